"""The thread that runs stages in this process: order, errors, and every way to its end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from shardline.cluster.stage_thread import StageThread


def test_work_is_done_in_order_and_errors_come_back() -> None:
    thread = StageThread("test")
    done: list[int] = []
    for number in range(100):
        last = thread.submit(done.append, number)
    last.result(60)
    assert done == list(range(100))
    with pytest.raises(ZeroDivisionError):
        thread.submit(divmod, 1, 0).result(60)
    assert thread.submit(divmod, 7, 2).result(60) == (3, 1)
    thread.close()
    assert not thread._thread.is_alive()
    thread.close()


def test_a_close_waits_for_what_runs_and_drops_the_rest() -> None:
    thread = StageThread("test")
    began, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def slow() -> None:
        began.set()
        assert go_on.wait(60)
        done.append("slow")

    thread.submit(slow)
    cancelled = thread.submit(done.append, "cancelled")
    dropped = thread.submit(done.append, "dropped")
    assert began.wait(60)
    assert cancelled.cancel()
    closing = threading.Thread(target=thread.close)
    closing.start()
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert done[0] == "slow"
    assert "cancelled" not in done
    assert not dropped.running()
    with pytest.raises(CancelledError):
        cancelled.result(0)


def test_one_that_nobody_holds_ends() -> None:
    thread = StageThread("test")
    inner = thread._thread
    thread.submit(int).result(60)
    del thread
    gc.collect()
    inner.join(60)
    assert not inner.is_alive()


@pytest.mark.parametrize(("end", "printed"), [("", "done"), ("thread.abandon()", "")])
def test_a_program_waits_for_what_runs_unless_it_was_abandoned(end: str, printed: str) -> None:
    program = f"""
import atexit, sys, threading
from shardline.cluster.stage_thread import StageThread

began, go_on = threading.Event(), threading.Event()

def work():
    began.set()
    if go_on.wait({3600 if end else 60}):
        sys.stdout.write("done")

thread = StageThread("test")
thread.submit(work)
began.wait()
{end or "atexit.register(go_on.set)"}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
