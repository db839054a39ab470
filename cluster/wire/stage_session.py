"""One epoch of a stage on the data plane: its channels, and the threads that receive, compute and send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardline.cluster.errors import TransportError
from shardline.cluster.last_tokens import LastTokens
from shardline.cluster.wire.frames import Frame, FrameKind, decode_plan, decode_tokens
from shardline.cluster.wire.handshake import Credentials, name
from shardline.cluster.wire.transport import (
    ChannelClosedError,
    FrameReceiver,
    FrameSender,
    Handoff,
    Listener,
    Slot,
)
from shardline.scheduler.plan import StepPlan
from shardline.stage.stage import MAX_BEGUN, PendingStep

CONNECT_SECONDS = 30.0

SENT_AT_ONCE = 64 * 1024
"""Bytes of a frame up to which sending it takes less time than waking the thread that would send it."""


@dataclass(slots=True)
class BegunFrame:
    """A frame whose step has been begun, or could not be.

    Attributes:
        plan: Its plan.
        frame: As it came.
        pending: The step; None if it was not begun.
        error: Why not; None too if a step before it had failed already.
        tokens: On the last stage, once it is finished: the frame with what it sampled.
    """

    plan: StepPlan
    frame: Frame
    pending: PendingStep | None = None
    error: Exception | None = None
    tokens: Frame | None = None

    @property
    def ready(self) -> bool:
        """Whether to finish it takes no waiting."""
        return self.pending is None or self.pending.ready


class Computer(Protocol):
    """What a session needs of the worker: steps are begun by one thread, and finished in the same order."""

    index: int

    def begin(self, plan: StepPlan, frame: Frame) -> BegunFrame:
        """Begin a step."""
        ...

    def finish(self, begun: BegunFrame) -> Frame:
        """Wait for it: the frame for the next stage."""
        ...

    def drain(self) -> None:
        """Wait for what was begun and will not be finished."""
        ...


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
    begun: BegunFrame | None = None
    tokens: Frame | None = None


class StageSession:
    """One epoch of one stage: its two channels and three threads. Ends once, for one reason.

    Of several stages the last one has a third channel, to the first, which has a fourth thread for it: what was sampled
    goes there at once, and a plan made ahead waits for it in the computing thread. Those behind it wait too: the
    scheduler puts a plan ahead behind all that can go on without its tokens.

    The computing thread begins steps. One that is ready then, as all of a CPU are, it finishes and sends itself.
    Another one it leaves to the sending thread, and begins the next while that waits for the device.
    """

    def __init__(self, worker: Computer, credentials: Credentials, listener: Listener, slots: SlotPool) -> None:
        self.credentials = credentials
        self._worker = worker
        self._listener = listener
        self._slots = slots
        self._inbox: Handoff[_Work] = Handoff()
        self._outbox: Handoff[_Work] = Handoff()
        self._lock = threading.Lock()
        self._receiver: FrameReceiver | None = None
        self._sender: FrameSender | None = None
        # On the first of several stages, and on the last.
        self._last_tokens: LastTokens | None = None
        self._to_first: FrameSender | None = None
        self._others: list[Listener | FrameReceiver | FrameSender] = []
        self._room = threading.Semaphore(MAX_BEGUN)
        self._unfinished = 0  # steps that the sending thread has to finish
        self._unsent = 0  # frames that it has to send
        self._sending: threading.Thread | None = None
        self.ended: str | None = None
        self._compute = self._spawn("compute", self._compute_loop, self._leave_stage)
        self._spawn("receive", self._receive_loop)

    def _spawn(self, role: str, loop: Callable[[], None], leave: Callable[[], None] = lambda: None) -> threading.Thread:
        def guarded() -> None:
            try:
                loop()
            except TransportError as error:
                self.end(str(error))
            except BaseException as error:
                self.end(f"the {role} thread of {name(self._worker.index)} failed: {error!r}")
                raise
            finally:
                leave()

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
            self._sending = self._spawn("send", self._send_loop)

    def attach_first(self, sender: FrameSender) -> None:
        """Give the last stage its way to the first one; before `attach`."""
        self._own(sender)
        self._to_first = sender

    def expect_tokens(self, listener: Listener) -> None:
        """On the first stage: the last one will connect there."""
        self._last_tokens = LastTokens()
        self._own(listener)
        self._spawn("tokens", lambda: self._tokens_loop(listener))

    def _own(self, channel: Listener | FrameReceiver | FrameSender) -> None:
        """Close it when the session ends. Raises TransportError if it has."""
        with self._lock:
            self._others.append(channel)
            ended = self.ended
        if ended is not None:
            channel.close()
            raise TransportError(f"epoch {self.credentials.epoch} has ended: {ended}")

    def end(self, reason: str) -> None:
        """Close all channels, so that the whole pipeline learns of it at once. The first reason is kept."""
        with self._lock:
            if self.ended is None:
                self.ended = reason
            receiver, sender, others = self._receiver, self._sender, tuple(self._others)
        self._inbox.close()
        self._outbox.close()
        self._slots.close()
        self._listener.close()
        self._room.release()
        if self._last_tokens is not None:
            self._last_tokens.close()
        for channel in (receiver, sender, *others):
            if channel is not None:
                channel.close()

    def join_compute(self, timeout: float) -> bool:
        """Wait until nothing of this epoch runs in the stage any more; call after `end`."""
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

    def _tokens_loop(self, listener: Listener) -> None:
        receiver = listener.accept(CONNECT_SECONDS)
        listener.close()
        self._own(receiver)
        assert self._last_tokens is not None
        nothing = np.empty(0, np.uint8)
        while True:
            frame = receiver.receive(self.credentials.epoch, nothing)
            if frame.kind is not FrameKind.TOKENS:
                raise TransportError(f"a frame of kind {frame.kind.name} came where tokens were due")
            self._last_tokens.arrive(frame.step_id, decode_tokens(frame.meta))

    def _compute_loop(self) -> None:
        while True:
            work = self._inbox.get()
            if work.plan is not None:
                plan = work.plan if self._last_tokens is None else self._last_tokens.fill_in(work.plan)
                self._wait_for_room()
                assert plan is not None, "only a session that has ended goes without"
                work.begun = self._worker.begin(plan, work.frame)
            elif work.frame.kind is FrameKind.PROBE:
                # Through the threads that compute, so that a probe that came back says that those of every stage run.
                passed = bytes(work.frame.meta) + bytes([self._worker.index])
                work.frame = Frame(FrameKind.PROBE, work.frame.step_id, passed)
            self._pass_on(work)

    def _leave_stage(self) -> None:
        """The compute thread's last act, once the session has ended: who waits for it wants the stage to himself."""
        if self._sending is not None:
            self._sending.join()
        self._worker.drain()

    def _wait_for_room(self) -> None:
        self._room.acquire()
        if self.ended is not None:
            raise ChannelClosedError("closed on this side")

    def _finish(self, work: _Work) -> None:
        assert work.begun is not None
        work.frame = self._worker.finish(work.begun)
        work.tokens = work.begun.tokens
        work.begun = None
        self._room.release()

    def _pass_on(self, work: _Work) -> None:
        """Finish and send, or let the sending thread do it. Called by the compute thread only, so steps and frames keep
        their order."""
        if work.begun is not None:
            ready = work.begun.ready
            with self._lock:
                later = not ready or self._unfinished > 0
                if later:
                    self._unfinished += 1
                    self._unsent += 1
            if later:
                self._outbox.put(work)
                return
            self._finish(work)
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
            work = self._outbox.get()
            if work.begun is not None:
                self._finish(work)
                with self._lock:
                    self._unfinished -= 1
            self._send(sender, work)
            with self._lock:
                self._unsent -= 1

    def _send(self, sender: FrameSender, work: _Work) -> None:
        if self._to_first is not None and work.tokens is not None:
            # First: a step may wait for them, and nothing waits for the result but the plan of a later one.
            self._to_first.send(self.credentials.epoch, work.tokens)
        sender.send(self.credentials.epoch, work.frame)
        # Only now: what a stage returns may lie in the slot that it was given.
        self._slots.give(work.slot)
