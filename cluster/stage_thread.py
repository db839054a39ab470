"""A thread that runs one piece of work after the other, and that a program can leave behind when it hangs."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

EXIT_SECONDS = 60.0
"""How long a program that ends waits for the piece of work that runs."""

_Queue = queue.SimpleQueue[Callable[[], None] | None]


class StageThread:
    """Like an executor with one worker, but for the end: the interpreter waits for an executor's threads for ever, and
    for this one only for a while, or not at all once it was abandoned."""

    def __init__(self, name: str) -> None:
        self._work: _Queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._work,), name=name, daemon=True)
        self._thread.start()
        _THREADS[self._thread] = self._work
        # When nobody holds this object any more.
        self._stop = weakref.finalize(self, _stop, self._work)
        self._stop.atexit = False

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run it there, after all that was submitted before."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        self._work.put(work)
        return future

    def close(self) -> None:
        """End it after the piece of work that runs; what else was submitted is dropped."""
        self._stop()
        self._thread.join()

    def abandon(self) -> None:
        """As `close`, but nobody waits for what runs, not even the program's end."""
        self._stop()
        _THREADS.pop(self._thread, None)


_THREADS: weakref.WeakKeyDictionary[threading.Thread, _Queue] = weakref.WeakKeyDictionary()


def _run(work: _Queue) -> None:
    while (one := work.get()) is not None:
        one()
        # Or it would be kept, with all that it holds, until the next one comes.
        del one


def _stop(work: _Queue) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            work.get_nowait()
    work.put(None)


@atexit.register
def _wait_for_all() -> None:
    # Native code that comes back into an interpreter that is gone may crash.
    for thread, work in list(_THREADS.items()):
        _stop(work)
        thread.join(EXIT_SECONDS)
