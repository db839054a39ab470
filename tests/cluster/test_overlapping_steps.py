"""A stage on the data plane whose steps still run on their device when they have been begun. Real sockets and threads;
each step of the stage ends when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.cluster import step_times
from shardline.cluster.errors import TransportError
from shardline.cluster.step_times import StepTimes
from shardline.cluster.wire.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    decode_failure,
    decode_result,
    encode_message,
)
from shardline.cluster.wire.handshake import ENGINE, Credentials
from shardline.cluster.wire.stage_worker import StageWorker
from shardline.cluster.wire.transport import Listener, connect
from shardline.scheduler.plan import SampledToken, SequenceRun, StepPlan, StepResult
from shardline.stage.errors import PlanError
from shardline.stage.stage import MAX_BEGUN, PendingStep, StepOutput

HOST = "127.0.0.1"
HIDDEN, ROWS = 32, 4
LIMITS = FrameLimits(max_meta_bytes=1 << 20, max_rows=1 << 20, columns=HIDDEN)


class LateStep:
    """Ends when `go` is set."""

    def __init__(self, stage: LateStage, step_id: int, output: StepOutput) -> None:
        self.stage, self.step_id, self.output = stage, step_id, output
        self.go = threading.Event()
        self.waiter: str | None = None

    @property
    def ready(self) -> bool:
        return self.go.is_set()

    def wait(self) -> StepOutput:
        self.waiter = threading.current_thread().name
        assert self.go.wait(240)
        self.stage.ended(self)
        if self.step_id in self.stage.fails_late:
            raise self.stage.fails_late[self.step_id]
        return self.output


class LateStage:
    """Writes down what a stage must not be asked for.

    Attributes:
        steps: Those that were begun in this epoch.
        at_once: Steps are done when they have been begun.
        fails, fails_late: The error of a step when it begins, or when it is waited for.
        wrong: What has been done to it that must not be.
    """

    def __init__(self, *, last: bool) -> None:
        self.last = last
        self.steps: list[LateStep] = []
        self.at_once = False
        self.fails: dict[int, Exception] = {}
        self.fails_late: dict[int, Exception] = {}
        self.running: list[LateStep] = []
        self.most = self.resets = 0
        self.wrong: list[str] = []
        self.closed = False
        self._changed = threading.Condition()

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> PendingStep:
        if plan.step_id in self.fails:
            raise self.fails[plan.step_id]
        result = StepResult(plan.step_id, (SampledToken(7, 100 + plan.step_id),))
        # The very memory that it was given: it must be left alone until it has been sent.
        step = LateStep(self, plan.step_id, StepOutput(None, result) if self.last else StepOutput(hidden, None))
        if self.at_once:
            step.go.set()
        with self._changed:
            self.steps.append(step)
            self.running.append(step)
            self.most = max(self.most, len(self.running))
            self._changed.notify_all()
        return step

    def ended(self, step: LateStep) -> None:
        with self._changed:
            if self.running[0] is not step:
                self.wrong.append(f"step {step.step_id} was waited for before step {self.running[0].step_id}")
            self.running.remove(step)
            self._changed.notify_all()

    def reset(self) -> None:
        if self.running:
            self.wrong.append(f"reset while step {self.running[0].step_id} runs")
        self.resets += 1
        self.steps = []

    def close(self) -> None:
        if self.running:
            self.wrong.append("closed while a step runs")
        self.closed = True

    def step(self, number: int) -> LateStep:
        """The epoch's step of that number, once it has been begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.steps) > number, 60), f"step {number} is never begun"
            return self.steps[number]

    def finish_all(self) -> None:
        """Steps that run, and those to come, end at once."""
        self.at_once = True
        for step in list(self.running):
            step.go.set()


class Line:
    """One worker between two neighbours that the test plays."""

    def __init__(self, *, last: bool = True, max_in_flight: int = 8) -> None:
        self.index, self.stages = (0, 1) if last else (1, 3)
        self.stage = LateStage(last=last)
        self.worker = StageWorker(self.index, self.stages, self.stage, HIDDEN, 64, max_in_flight)
        self.epoch = 0
        self.ends: list[Callable[[], None]] = []

    def wire(self, join_seconds: float = 60.0) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        credentials = Credentials(b"k" * 32, self.epoch, b"p" * 32)
        address = self.worker.listen(HOST, credentials, join_seconds)
        following = ENGINE if self.index + 1 == self.stages else self.index + 1
        behind = Listener(HOST, credentials, following, self.index, LIMITS)
        self.before = connect(address, credentials, ENGINE if self.index == 0 else self.index - 1, self.index)
        self.worker.connect(behind.address)
        self.receiver = behind.accept(60.0)
        self.ends += [self.before.close, self.receiver.close, behind.close]

    def send(self, *step_ids: int) -> None:
        for step_id in step_ids:
            plan = StepPlan(step_id, (), (), (SequenceRun(7, 0, tuple(range(ROWS)), (2,), True),))
            hidden = None if self.index == 0 else np.full((ROWS, HIDDEN), step_id, np.float32)
            self.before.send(self.epoch, Frame(FrameKind.STEP, step_id, encode_message(plan), hidden))

    def probe(self) -> None:
        self.before.send(self.epoch, Frame(FrameKind.PROBE, 0, b""))

    def receive(self) -> Frame:
        return self.receiver.receive(self.epoch, np.empty(1 << 16, np.uint8))

    def token(self, step_id: int) -> None:
        """The next frame is that step's result."""
        frame = self.receive()
        assert (frame.kind, frame.step_id) == (FrameKind.RESULT, step_id)
        assert decode_result(frame.meta).tokens[0].token_id == 100 + step_id

    def failure(self, step_id: int) -> str:
        """The next frame says that this step failed; why."""
        frame = self.receive()
        assert (frame.kind, frame.step_id) == (FrameKind.FAILURE, step_id)
        return decode_failure(frame.meta).text

    def close(self) -> None:
        self.stage.finish_all()
        for end in self.ends:
            end()
        self.worker.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited for ever until {what}"
        time.sleep(0.002)


@pytest.fixture
def line() -> Iterator[Callable[..., Line]]:
    made: list[Line] = []

    def make(**options: int) -> Line:
        made.append(Line(**options))
        made[-1].wire()
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.stage.wrong == []
        assert one.stage.most <= MAX_BEGUN
        assert one.stage.closed
    roles = ("compute", "receive", "send", "accept", "handshake")
    wait_until(lambda: not any(t.name.startswith(roles) for t in threading.enumerate()), "the data threads end")


def test_the_next_step_is_begun_while_one_runs_and_results_come_in_order(line: Callable[..., Line]) -> None:
    one = line()
    one.send(0, 1)
    first, second = one.stage.step(0), one.stage.step(1)
    assert not first.ready
    # Done first, and yet it comes second.
    second.go.set()
    first.go.set()
    one.token(0)
    one.token(1)
    assert one.stage.most == 2


def test_a_step_that_is_done_at_once_waits_its_turn(line: Callable[..., Line]) -> None:
    one = line()
    one.send(0)
    first = one.stage.step(0)
    one.stage.at_once = True
    one.send(1)
    one.stage.step(1)
    first.go.set()
    one.token(0)
    one.token(1)


def test_three_steps_are_never_begun_at_once(line: Callable[..., Line]) -> None:
    one = line()
    one.send(0, 1, 2, 3)
    one.stage.step(1)
    inbox = one.worker._session._inbox._items
    # The computing thread has taken step 2, and would have begun it by the time that it takes step 3.
    wait_until(lambda: len(inbox) == 1 or len(one.stage.steps) > 2, "step 2 is taken")
    assert len(one.stage.steps) == 2
    one.stage.step(0).go.set()
    one.token(0)
    assert one.stage.step(2).step_id == 2
    one.stage.finish_all()
    for step_id in (1, 2, 3):
        one.token(step_id)


def test_many_steps_that_end_whenever_they_like(line: Callable[..., Line]) -> None:
    one = line(max_in_flight=2)
    draw = np.random.default_rng(0)
    count = 300

    def end_each() -> None:
        for number in range(count):
            step = one.stage.step(number)
            if draw.random() < 0.5 and number + 1 < count:
                one.stage.step(number + 1)
            step.go.set()

    ending = threading.Thread(target=end_each)
    sending = threading.Thread(target=one.send, args=range(count))
    ending.start()
    sending.start()
    for step_id in range(count):
        one.token(step_id)
    ending.join()
    sending.join()
    assert one.stage.most == 2
    counters = one.worker.counters()
    assert (counters.steps, counters.rows) == (count, count * ROWS)
    # About twice as much, if the times of steps that overlap were added up.
    assert 0 < counters.busy_seconds <= counters.wall_seconds


def test_hidden_states_stay_where_they_are_until_they_are_sent(line: Callable[..., Line]) -> None:
    one = line(last=False, max_in_flight=2)
    received: list[NDArray[np.float32]] = []

    def receive() -> None:
        for _ in range(60):
            frame = one.receive()
            assert frame.hidden is not None
            received.append(frame.hidden.copy())

    receiving = threading.Thread(target=receive)
    sending = threading.Thread(target=one.send, args=range(60))
    receiving.start()
    sending.start()
    for number in range(0, 60, 2):
        first, second = one.stage.step(number), one.stage.step(number + 1)
        second.go.set()
        first.go.set()
    receiving.join()
    sending.join()
    assert [rows.shape for rows in received] == [(ROWS, HIDDEN)] * 60
    for step_id, rows in enumerate(received):
        assert np.array_equal(rows, np.full((ROWS, HIDDEN), step_id, np.float32)), step_id


def test_a_probe_keeps_its_place(line: Callable[..., Line]) -> None:
    one = line()
    one.send(0)
    one.probe()
    one.send(1)
    one.stage.step(1).go.set()
    one.stage.step(0).go.set()
    one.token(0)
    frame = one.receive()
    assert (frame.kind, bytes(frame.meta)) == (FrameKind.PROBE, bytes([0]))
    one.token(1)


def test_a_step_that_fails_late_takes_those_behind_it_along(line: Callable[..., Line]) -> None:
    one = line()
    one.stage.fails_late = {1: ValueError("the device fell off the bus")}
    one.send(0, 1, 2)
    one.stage.step(0).go.set()
    one.token(0)
    failing, behind = one.stage.step(1), one.stage.step(2)
    behind.go.set()
    failing.go.set()
    assert "fell off the bus" in one.failure(1)
    # It had been begun, on what the failed one left behind.
    assert "fell off the bus" in one.failure(2)
    one.send(3)
    assert "fell off the bus" in one.failure(3)
    assert [step.step_id for step in one.stage.steps] == [0, 1, 2]
    assert not one.stage.running
    assert one.worker.progress().running is None
    one.stage.fails_late = {}
    one.wire()
    one.send(9)
    one.stage.step(0).go.set()
    one.token(9)


def test_a_step_that_cannot_begin_leaves_the_one_before_its_result(line: Callable[..., Line]) -> None:
    one = line()
    one.stage.fails = {1: PlanError("no such block")}
    one.send(0, 1, 2)
    one.stage.step(0).go.set()
    one.token(0)
    assert "no such block" in one.failure(1)
    assert "no such block" in one.failure(2)
    assert len(one.stage.steps) == 1


def test_of_two_failures_the_earlier_steps_is_told(line: Callable[..., Line]) -> None:
    """The later step failed first, when it was begun: which must not make a device's error one of a plan."""
    one = line()
    one.stage.fails_late = {0: ValueError("the device fell off the bus")}
    one.stage.fails = {1: PlanError("no such block")}
    one.send(0, 1)
    wait_until(lambda: one.worker._broken, "step 1 has failed")
    one.stage.step(0).go.set()
    assert "fell off the bus" in one.failure(0)
    assert "fell off the bus" in one.failure(1)


def test_an_epoch_that_ends_in_the_middle_of_two_steps(line: Callable[..., Line]) -> None:
    one = line()
    one.send(0, 1, 2, 3)
    steps = [one.stage.step(0), one.stage.step(1)]
    one.worker.end("it was cut off")
    for step in steps:
        # Both of them hold it up, each in its turn, and it is not reset meanwhile.
        message = f"still computes step {step.step_id} of epoch 1"
        wait_until(lambda step=step: one.worker.progress().running == step.step_id, f"step {step.step_id} is next")
        with pytest.raises(TransportError, match=message):
            one.worker.listen(HOST, Credentials(b"k" * 32, 2, b"p" * 32), join_seconds=0.1)
        assert one.stage.resets == 1
        step.go.set()
    one.wire()
    assert one.stage.resets == 2
    assert [step.waiter is not None for step in steps] == [True, True]
    assert one.worker.progress().running is None
    one.send(40, 41)
    one.stage.step(1).go.set()
    one.stage.step(0).go.set()
    one.token(40)
    one.token(41)


def test_an_epoch_that_ends_before_anybody_waits_for_its_steps(line: Callable[..., Line]) -> None:
    one = line()
    # As if the sending thread had not come to them yet.
    one.worker._session._outbox.put = lambda work: None
    one.send(0, 1, 2, 3)
    steps = [one.stage.step(0), one.stage.step(1)]
    inbox = one.worker._session._inbox._items
    wait_until(lambda: len(inbox) == 1, "the computing thread waits for room")
    one.worker.end("it was cut off")
    for step in steps:
        wait_until(lambda step=step: one.worker.progress().running == step.step_id, f"step {step.step_id} is next")
        step.go.set()
    one.wire()
    assert {step.waiter for step in steps} == {"compute-1"}
    one.send(7)
    one.stage.step(0).go.set()
    one.token(7)


def test_a_neighbour_that_goes_away_in_the_middle_of_two_steps(line: Callable[..., Line]) -> None:
    one = line()
    one.send(0, 1)
    steps = [one.stage.step(0), one.stage.step(1)]
    one.receiver.close()
    one.before.close()
    wait_until(lambda: one.worker.progress().ended is not None, "the epoch ends")
    for step in steps:
        step.go.set()
    one.wire()
    one.send(7)
    one.stage.step(0).go.set()
    one.token(7)


def test_a_stage_is_closed_when_its_steps_are_done(line: Callable[..., Line]) -> None:
    one = line()
    one.send(0, 1)
    steps = [one.stage.step(0), one.stage.step(1)]
    closing = threading.Thread(target=one.worker.close)
    closing.start()
    wait_until(lambda: one.worker.progress().ended is not None, "it is being closed")
    assert not one.stage.closed
    for step in steps:
        step.go.set()
    closing.join(60)
    assert one.stage.closed


def test_the_oldest_step_is_the_one_that_hangs(line: Callable[..., Line]) -> None:
    one = line()
    one.send(5, 6)
    first, second = one.stage.step(0), one.stage.step(1)
    progress = one.worker.progress()
    assert (progress.running, progress.ended) == (5, None)
    assert progress.running_seconds >= 0
    first.go.set()
    one.token(5)
    wait_until(lambda: one.worker.progress().running == 6, "step 5 is finished")
    second.go.set()
    one.token(6)
    wait_until(lambda: one.worker.progress().running is None, "step 6 is finished")


def test_a_step_that_is_done_when_begun_wakes_no_other_thread(line: Callable[..., Line]) -> None:
    """As the steps of a CPU are: finished and sent by the thread that began them."""
    one = line()
    one.stage.at_once = True
    one.worker._session._outbox.put = lambda work: pytest.fail("handed to the sending thread")
    one.send(*range(20))
    for step_id in range(20):
        one.token(step_id)
    assert {step.waiter for step in one.stage.steps} == {"compute-1"}


def test_a_late_step_is_waited_for_by_the_sending_thread(line: Callable[..., Line]) -> None:
    one = line()
    one.send(0)
    step = one.stage.step(0)
    wait_until(lambda: step.waiter is not None, "somebody waits")
    assert step.waiter == "send-1"
    step.go.set()
    one.token(0)


def test_times_of_steps_that_overlap_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: now))
    times = StepTimes()
    assert (times.running, times.wall_seconds, times.busy_seconds) == (None, 0.0, 0.0)
    times.begin(7)
    now = 101.0
    times.begin(8)
    now = 104.0
    assert times.running == (7, 4.0)
    times.finish(3)
    assert times.busy_seconds == 4.0
    now = 106.0
    # Only since step 7 is out of its way.
    assert times.running == (8, 2.0)
    times.finish(1)
    assert (times.running, times.busy_seconds) == (None, 6.0)
    now = 110.0
    times.begin(9)
    now = 111.0
    times.finish(5)
    assert (times.steps, times.rows, times.busy_seconds, times.wall_seconds) == (3, 9, 7.0, 11.0)
    times.begin(10)
    times.begin(11)
    now = 112.0
    times.drop()
    assert (times.running, times.steps, times.busy_seconds) == ((11, 0.0), 3, 8.0)
    times.drop()
    times.drop()
    assert times.running is None
