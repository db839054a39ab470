"""Which of a stage's steps run, and for how long any did: steps overlap, so their times must not be added up."""

from __future__ import annotations

import threading
import time
from collections import deque


class StepTimes:
    """Steps are begun and finished in the same order. For any thread.

    Attributes:
        steps, rows: Of the finished ones.
        busy_seconds: Time in which a step was begun and not finished, up to when one was finished last.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.busy_seconds = 0.0
        self._lock = threading.Lock()
        # Of each that runs: its id, and since when nothing before it does.
        self._open: deque[tuple[int, float]] = deque()
        self._first: float | None = None
        self._counted = 0.0

    @property
    def running(self) -> tuple[int, float] | None:
        """The oldest step that is begun and not finished, and the seconds for which nothing before it has run."""
        with self._lock:
            if not self._open:
                return None
            step_id, since = self._open[0]
        return step_id, time.perf_counter() - since

    @property
    def wall_seconds(self) -> float:
        """Time since the first step was begun."""
        return 0.0 if self._first is None else time.perf_counter() - self._first

    def begin(self, step_id: int) -> None:
        """A step begins."""
        now = time.perf_counter()
        with self._lock:
            if self._first is None:
                self._first = now
            if not self._open:
                self._counted = now
            self._open.append((step_id, now))

    def finish(self, rows: int) -> None:
        """The oldest one is finished."""
        self._end_oldest()
        self.steps += 1
        self.rows += rows

    def drop(self) -> None:
        """The oldest one, if any runs, came to nothing."""
        if self._open:
            self._end_oldest()

    def _end_oldest(self) -> None:
        now = time.perf_counter()
        with self._lock:
            self._open.popleft()
            self.busy_seconds += now - self._counted
            self._counted = now
            if self._open:
                self._open[0] = (self._open[0][0], now)
