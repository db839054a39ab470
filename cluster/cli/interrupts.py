"""Ctrl-C in a chat: every press is answered, once, and none where nobody could answer it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

TICK_SECONDS = 0.2


class Interrupts:
    """Inside the block Ctrl-C raises KeyboardInterrupt where `heard` says so, at most once for each `heard`. Pressed
    elsewhere, while the last one is being answered say, it waits for the next `heard`. For the main thread.

    CPython's readline looks for signals only when its select() is interrupted, so a Ctrl-C between the prompt and the
    select() would be kept until the next one, or until the line is finished. A timer interrupts it now and then.
    """

    def __init__(self) -> None:
        self._heard = False
        self._pending = False

    def __enter__(self) -> Self:
        self._on_ctrl_c = signal.signal(signal.SIGINT, self._pressed)
        self._on_alarm = signal.signal(signal.SIGALRM, lambda *_: None)
        # select() returns all the same; a write to a terminal that is stopped (Ctrl-S) must go on.
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.signal(signal.SIGINT, self._on_ctrl_c)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, Ctrl-C raises KeyboardInterrupt; at once if it was pressed before."""
        self._heard = True
        try:
            if self._pending:
                self._pending = False
                self._pressed()
            yield
        finally:
            self._heard = False

    def _pressed(self, number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        if self._heard:
            self._heard = False
            raise KeyboardInterrupt
        self._pending = True
