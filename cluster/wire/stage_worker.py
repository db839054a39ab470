"""The data plane's half of a stage: frames in, `Stage.run`, frames out, on three threads. No Ray in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardline.cluster.errors import TransportError
from shardline.cluster.wire.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    StageFailure,
    decode_plan,
    encode_message,
)
from shardline.cluster.wire.handshake import ENGINE, Credentials, name
from shardline.cluster.wire.transport import (
    ChannelClosedError,
    FrameReceiver,
    FrameSender,
    Handoff,
    Listener,
    Slot,
    connect,
)
from shardline.scheduler.plan import StepPlan
from shardline.stage.errors import PlanError
from shardline.stage.stage import StepOutput

MAX_PLAN_BYTES = 64 * 1024 * 1024
"""Room for the replay of every sequence's tokens after a loss."""

CONNECT_SECONDS = 30.0

SENT_AT_ONCE = 64 * 1024
"""Bytes of a frame up to which sending it takes less time than waking the thread that would send it."""


class StageRunner(Protocol):
    """What the data plane needs of a stage; `shardline.stage.Stage` is one."""

    def run(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> StepOutput:
        """See `Stage.run`. The returned hidden states are the caller's to keep."""
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
        running: The step that `Stage.run` has now, or None.
        running_seconds: For how long.
        ended: Why its connections ended, or None while they stand.
    """

    epoch: int
    running: int | None
    running_seconds: float
    ended: str | None


class SlotPool:
    """Payload buffers for the frames that may be inside a stage at once.

    Lent last-in first-out, so that memory which was never needed is never touched and costs nothing.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self._free: list[Slot] = [np.empty(slot_bytes, np.uint8) for _ in range(count)]
        self._changed = threading.Condition()
        self._closed = False

    def take(self) -> Slot:
        """Wait for a free slot: what stops a peer that sends too much. Raises ChannelClosedError once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise ChannelClosedError("closed on this side")
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        """Return a slot."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Wake whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(slots=True)
class _Work:
    frame: Frame
    plan: StepPlan | None
    slot: Slot


class _Session:
    """One epoch of one stage: its two channels and three threads. Ends once, for one reason."""

    def __init__(self, worker: StageWorker, credentials: Credentials, listener: Listener, slots: SlotPool) -> None:
        self.credentials = credentials
        self._worker = worker
        self._listener = listener
        self._slots = slots
        self._inbox: Handoff[_Work] = Handoff()
        self._outbox: Handoff[_Work] = Handoff()
        self._lock = threading.Lock()
        self._receiver: FrameReceiver | None = None
        self._sender: FrameSender | None = None
        self._unsent = 0  # frames that the sending thread has not sent yet
        self.ended: str | None = None
        self._compute = self._spawn("compute", self._compute_loop)
        self._spawn("receive", self._receive_loop)

    def _spawn(self, role: str, loop: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                loop()
            except TransportError as error:
                self.end(str(error))
            except BaseException as error:
                self.end(f"the {role} thread of {name(self._worker.index)} failed: {error!r}")
                raise

        thread = threading.Thread(target=guarded, name=f"{role}-{self.credentials.epoch}", daemon=True)
        thread.start()
        return thread

    def attach(self, sender: FrameSender) -> None:
        """Give the session its way out."""
        with self._lock:
            if self.ended is not None:
                sender.close()
                raise TransportError(f"epoch {self.credentials.epoch} has ended: {self.ended}")
            self._sender = sender
        self._spawn("send", self._send_loop)

    def end(self, reason: str) -> None:
        """Close both channels, so that the whole pipeline learns of it at once. The first reason is kept."""
        with self._lock:
            if self.ended is None:
                self.ended = reason
            receiver, sender = self._receiver, self._sender
        self._inbox.close()
        self._outbox.close()
        self._slots.close()
        self._listener.close()
        for channel in (receiver, sender):
            if channel is not None:
                channel.close()

    def join_compute(self, timeout: float) -> bool:
        """Wait until `Stage.run` is not running any more; call after `end`."""
        self._compute.join(timeout)
        return not self._compute.is_alive()

    def moving_seconds(self) -> tuple[float, float]:
        """(sending, receiving)."""
        with self._lock:
            sender, receiver = self._sender, self._receiver
        return (sender.seconds if sender else 0.0, receiver.seconds if receiver else 0.0)

    def _receive_loop(self) -> None:
        receiver = self._listener.accept(CONNECT_SECONDS)
        self._listener.close()
        with self._lock:
            if self.ended is not None:
                receiver.close()
                return
            self._receiver = receiver
        first = self._worker.index == 0
        expected: int | None = None
        while True:
            slot = self._slots.take()
            frame = receiver.receive(self.credentials.epoch, slot)
            plan = None
            if frame.kind is FrameKind.PROBE:
                pass
            elif frame.kind is FrameKind.STEP or (frame.kind is FrameKind.FAILURE and not first):
                if expected is not None and frame.step_id != expected:
                    raise TransportError(f"step {frame.step_id} came where step {expected} was due")
                expected = frame.step_id + 1
                if frame.kind is FrameKind.STEP:
                    plan = decode_plan(frame.meta)
                    rows = 0 if frame.hidden is None else len(frame.hidden)
                    if plan.step_id != frame.step_id or rows != (0 if first else plan.num_tokens):
                        raise TransportError(
                            f"the frame of step {frame.step_id} with {rows} rows carries the plan of step "
                            f"{plan.step_id} with {plan.num_tokens} rows"
                        )
            else:
                raise TransportError(f"a frame of kind {frame.kind.name} has no business in a stage")
            self._inbox.put(_Work(frame, plan, slot))

    def _compute_loop(self) -> None:
        while True:
            work = self._inbox.get()
            if work.plan is not None:
                work.frame = self._worker.step(work.plan, work.frame)
            elif work.frame.kind is FrameKind.PROBE:
                # Through the compute thread, so that a probe that came back says that every thread of every stage runs.
                passed = bytes(work.frame.meta) + bytes([self._worker.index])
                work.frame = Frame(FrameKind.PROBE, work.frame.step_id, passed)
            self._pass_on(work)

    def _pass_on(self, work: _Work) -> None:
        """Send, or let the sending thread do it. Called by the compute thread only, so frames keep their order."""
        with self._lock:
            sender = self._sender if self._unsent == 0 else None
            at_once = sender is not None and work.frame.nbytes <= SENT_AT_ONCE
            if not at_once:
                self._unsent += 1
        if at_once and sender is not None:
            self._send(sender, work)
        else:
            self._outbox.put(work)

    def _send_loop(self) -> None:
        sender = self._sender
        assert sender is not None
        while True:
            self._send(sender, self._outbox.get())
            with self._lock:
                self._unsent -= 1

    def _send(self, sender: FrameSender, work: _Work) -> None:
        sender.send(self.credentials.epoch, work.frame)
        # Only now: what a stage returns may lie in the slot that it was given.
        self._slots.give(work.slot)


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
        self._max_in_flight = max_in_flight
        self._session: _Session | None = None
        self._failure: StageFailure | None = None
        self._lock = threading.Lock()
        self._steps = 0
        self._rows = 0
        self._busy = 0.0
        self._first: float | None = None
        self._running: tuple[int, float] | None = None
        self._moved = (0.0, 0.0)

    def listen(self, host: str, credentials: Credentials, join_seconds: float = 5.0) -> tuple[str, int]:
        """End the last epoch, forget every sequence, and wait at the returned address for the stage before.

        Raises TransportError when the step of the last epoch does not end: such a stage must be replaced.
        """
        self.end(f"epoch {credentials.epoch} begins")
        if self._session is not None:
            if not self._session.join_compute(join_seconds):
                running = self._running
                raise TransportError(
                    f"{name(self.index)} still computes step {running[0] if running else '?'} of epoch "
                    f"{self._session.credentials.epoch}"
                )
            sent, received = self._session.moving_seconds()
            self._moved = (self._moved[0] + sent, self._moved[1] + received)
        self._stage.reset()
        self._failure = None
        previous = ENGINE if self.index == 0 else self.index - 1
        listener = Listener(host, credentials, self.index, previous, self._limits)
        # One more than may be in flight: the receiving thread always has a slot, so a long step never leaves the
        # peer's bytes untaken in the kernel, where its user timeout would take this stage for dead.
        slots = SlotPool(self._max_in_flight + 1, self._limits.slot_bytes)
        self._session = _Session(self, credentials, listener, slots)
        return listener.address

    def connect(self, address: tuple[str, int]) -> None:
        """Connect to the next stage, or from the last one to the engine. Raises TransportError."""
        session = self._session
        assert session is not None, "listen first"
        following = self.index + 1 if self.index + 1 < self._num_stages else ENGINE
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

    def step(self, plan: StepPlan, frame: Frame) -> Frame:
        """Run one plan: the frame for the next stage. Called by the session's compute thread only."""
        began = time.perf_counter()
        with self._lock:
            self._running = (plan.step_id, time.monotonic())
            if self._first is None:
                self._first = began
        try:
            out = self._run(plan, frame)
        finally:
            now = time.perf_counter()
            with self._lock:
                self._running = None
                self._steps += 1
                self._rows += plan.num_tokens
                self._busy += now - began
        return out

    def _run(self, plan: StepPlan, frame: Frame) -> Frame:
        if self._failure is None:
            try:
                output = self._stage.run(plan, frame.hidden)
                return self._output_frame(plan, frame, output)
            except Exception as error:
                self._failure = describe_failure(self.index, error)
        return Frame(FrameKind.FAILURE, plan.step_id, encode_message(self._failure))

    def _output_frame(self, plan: StepPlan, frame: Frame, output: StepOutput) -> Frame:
        if self.index + 1 == self._num_stages:
            assert output.result is not None
            return Frame(FrameKind.RESULT, plan.step_id, encode_message(output.result))
        hidden = output.hidden
        assert hidden is not None
        assert hidden.dtype == np.float32
        assert hidden.shape == (plan.num_tokens, self._limits.columns), hidden.shape
        # The plan's own bytes go on: a stage never encodes them again.
        return Frame(FrameKind.STEP, plan.step_id, frame.meta, np.ascontiguousarray(hidden))

    def progress(self) -> Progress:
        """Where it stands."""
        session = self._session
        with self._lock:
            running = self._running
        return Progress(
            session.credentials.epoch if session else 0,
            running[0] if running else None,
            time.monotonic() - running[1] if running else 0.0,
            session.ended if session else "not connected yet",
        )

    def counters(self) -> WorkerCounters:
        """Figures since it was made."""
        sent, received = self._session.moving_seconds() if self._session else (0.0, 0.0)
        with self._lock:
            wall = time.perf_counter() - self._first if self._first is not None else 0.0
            return WorkerCounters(
                self._steps, self._rows, self._busy, wall, self._moved[0] + sent, self._moved[1] + received
            )


def describe_failure(stage: int, error: Exception) -> StageFailure:
    """An exception as it travels: its own words, and the innermost place in the code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return StageFailure(stage, type(error).__name__, f"{error}{where}", isinstance(error, PlanError))
