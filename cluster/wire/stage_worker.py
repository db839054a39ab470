"""The data plane's half of a stage: frames in, steps of the stage, frames out. No Ray in here."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardline.cluster.errors import TransportError
from shardline.cluster.step_times import StepTimes
from shardline.cluster.wire.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    StageFailure,
    encode_message,
    encode_tokens,
)
from shardline.cluster.wire.handshake import ENGINE, Credentials, name
from shardline.cluster.wire.stage_session import BegunFrame, SlotPool, StageSession
from shardline.cluster.wire.transport import Listener, connect
from shardline.scheduler.plan import StepPlan
from shardline.stage.errors import PlanError
from shardline.stage.stage import PendingStep, StepOutput

MAX_PLAN_BYTES = 64 * 1024 * 1024
"""Room for the replay of every sequence's tokens after a loss."""


class StageRunner(Protocol):
    """What the data plane needs of a stage; `shardline.stage.Stage` is one."""

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> PendingStep:
        """See `Stage.begin`. The hidden states that come of it are the caller's to keep."""
        ...

    def reset(self) -> None:
        """See `Stage.reset`."""
        ...

    def close(self) -> None:
        """See `Stage.close`."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """What a stage has done since it was made; see `StageStats`."""

    steps: int = 0
    rows: int = 0
    busy_seconds: float = 0.0
    wall_seconds: float = 0.0
    send_seconds: float = 0.0
    receive_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a stage stands, for finding out which one hangs.

    Attributes:
        epoch: The epoch it is in.
        running: The oldest step that is begun and not finished, or None.
        running_seconds: How long it has had the stage to itself, or only those after it beside it.
        ended: Why its connections ended, or None while they stand.
    """

    epoch: int
    running: int | None
    running_seconds: float
    ended: str | None


class StageWorker:
    """A stage on the data plane.

    `listen` begins an epoch, `connect` completes it. An exception inside the stage becomes a FAILURE frame in the place
    of that step and of every later one of the epoch; it never ends the loop. A broken connection ends the epoch.
    """

    def __init__(
        self, index: int, num_stages: int, stage: StageRunner, hidden_size: int, max_rows: int, max_in_flight: int
    ) -> None:
        self.index = index
        self._num_stages = num_stages
        self._stage = stage
        self._limits = FrameLimits(MAX_PLAN_BYTES, 0 if index == 0 else max_rows, hidden_size)
        self._max_rows = max_rows
        self._max_in_flight = max_in_flight
        self._session: StageSession | None = None
        self._begun: deque[PendingStep] = deque()
        self._failure: StageFailure | None = None
        # Set as soon as a step fails; `_failure` is made of the first failure in the order of the steps.
        self._broken = False
        self._times = StepTimes()
        self._moved = (0.0, 0.0)

    def listen(self, host: str, credentials: Credentials, join_seconds: float = 5.0) -> tuple[str, int]:
        """End the last epoch, forget every sequence, and wait at the returned address for the stage before.

        Raises TransportError when the step of the last epoch does not end: such a stage must be replaced.
        """
        self.end(f"epoch {credentials.epoch} begins")
        if self._session is not None:
            if not self._session.join_compute(join_seconds):
                running = self._times.running
                raise TransportError(
                    f"{name(self.index)} still computes step {running[0] if running else '?'} of epoch "
                    f"{self._session.credentials.epoch}"
                )
            sent, received = self._session.moving_seconds()
            self._moved = (self._moved[0] + sent, self._moved[1] + received)
        self._stage.reset()
        self._failure, self._broken = None, False
        previous = ENGINE if self.index == 0 else self.index - 1
        listener = Listener(host, credentials, self.index, previous, self._limits)
        # One more than may be in flight: the receiving thread always has a slot, so a long step never leaves the
        # peer's bytes untaken in the kernel, where its user timeout would take this stage for dead.
        slots = SlotPool(self._max_in_flight + 1, self._limits.slot_bytes)
        self._session = StageSession(self, credentials, listener, slots)
        return listener.address

    def listen_for_tokens(self, host: str) -> tuple[str, int]:
        """On the first of several stages: wait at the returned address for the last one too. After `listen`."""
        session = self._session
        assert session is not None, "listen first"
        assert 0 == self.index < self._num_stages - 1
        limits = FrameLimits(4 * self._max_rows, max_rows=0, columns=0)
        listener = Listener(host, session.credentials, self.index, self._num_stages - 1, limits)
        session.expect_tokens(listener)
        return listener.address

    def connect(self, address: tuple[str, int], first: tuple[str, int] | None = None) -> None:
        """Connect to the next stage; from the last one to the engine, and to where the first one listens for tokens.

        Raises TransportError.
        """
        session = self._session
        assert session is not None, "listen first"
        following = self.index + 1 if self.index + 1 < self._num_stages else ENGINE
        if first is not None:
            session.attach_first(connect(first, session.credentials, self.index, 0))
        session.attach(connect(address, session.credentials, self.index, following))

    def end(self, reason: str) -> None:
        """End the epoch, if one runs."""
        if self._session is not None:
            self._session.end(reason)

    def close(self) -> None:
        """End the epoch and give the stage's memory back."""
        self.end("the stage was stopped")
        if self._session is None or self._session.join_compute(5.0):
            self._stage.close()

    def begin(self, plan: StepPlan, frame: Frame) -> BegunFrame:
        """Begin a step, unless one before it has failed. Called by the session's compute thread only."""
        self._times.begin(plan.step_id)
        begun = BegunFrame(plan, frame)
        if not self._broken:
            try:
                begun.pending = self._stage.begin(plan, frame.hidden)
                self._begun.append(begun.pending)
            except Exception as error:
                begun.error = error
                self._broken = True
        return begun

    def finish(self, begun: BegunFrame) -> Frame:
        """Wait for the oldest step that was begun: the frame for the next stage."""
        try:
            return self._finish(begun)
        finally:
            self._times.finish(begun.plan.num_tokens)

    def drain(self) -> None:
        """Wait for what was begun in an epoch that has ended; nobody wants to know what came of it."""
        while self._begun:
            with suppress(Exception):
                self._begun.popleft().wait()
            self._times.drop()
        # Steps that could not be begun, whose frames nobody has made.
        while self._times.running is not None:
            self._times.drop()

    def _finish(self, begun: BegunFrame) -> Frame:
        error = begun.error
        if begun.pending is not None:
            self._begun.popleft()
            try:
                output = begun.pending.wait()
                if self._failure is None:
                    return self._output_frame(begun, output)
            except Exception as problem:
                error = problem
                self._broken = True
        if self._failure is None:
            assert error is not None, "a step that was not begun comes after one that failed"
            self._failure = describe_failure(self.index, error)
        return Frame(FrameKind.FAILURE, begun.plan.step_id, encode_message(self._failure))

    def _output_frame(self, begun: BegunFrame, output: StepOutput) -> Frame:
        plan = begun.plan
        if self.index + 1 == self._num_stages:
            assert output.result is not None
            if output.result.tokens:
                begun.tokens = Frame(FrameKind.TOKENS, plan.step_id, encode_tokens(output.result))
            return Frame(FrameKind.RESULT, plan.step_id, encode_message(output.result))
        hidden = output.hidden
        assert hidden is not None
        assert hidden.dtype == np.float32
        assert hidden.shape == (plan.num_tokens, self._limits.columns), hidden.shape
        # The plan's own bytes go on: a stage never encodes them again.
        return Frame(FrameKind.STEP, plan.step_id, begun.frame.meta, np.ascontiguousarray(hidden))

    def progress(self) -> Progress:
        """Where it stands."""
        session = self._session
        step_id, seconds = self._times.running or (None, 0.0)
        return Progress(
            session.credentials.epoch if session else 0,
            step_id,
            seconds,
            session.ended if session else "not connected yet",
        )

    def counters(self) -> WorkerCounters:
        """Figures since it was made."""
        sent, received = self._session.moving_seconds() if self._session else (0.0, 0.0)
        times = self._times
        return WorkerCounters(
            times.steps,
            times.rows,
            times.busy_seconds,
            times.wall_seconds,
            self._moved[0] + sent,
            self._moved[1] + received,
        )


def describe_failure(stage: int, error: Exception) -> StageFailure:
    """An exception as it travels: its own words, and the innermost place in the code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return StageFailure(stage, type(error).__name__, f"{error}{where}", isinstance(error, PlanError))
