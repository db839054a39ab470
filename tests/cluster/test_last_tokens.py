"""Tokens on their way from the last stage to the first, for plans that were made before they were known."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.cluster.errors import TransportError
from shardline.cluster.last_tokens import LastTokens
from shardline.cluster.wire.engine_link import EngineLink
from shardline.cluster.wire.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    decode_plan,
    decode_result,
    decode_tokens,
    encode_message,
    encode_tokens,
)
from shardline.cluster.wire.handshake import ENGINE, Credentials
from shardline.cluster.wire.stage_worker import StageWorker
from shardline.cluster.wire.transport import Listener, TcpSender, connect
from shardline.scheduler import NewRequest, SampledToken, SamplingParams, Scheduler, SchedulerConfig
from shardline.scheduler.plan import AHEAD, SequenceRun, StepPlan, StepResult
from shardline.stage.stage import DoneStep, StepOutput

HOST = "127.0.0.1"
HIDDEN, ROWS, STAGES = 4, 64, 3
RIGHT = Credentials(b"k" * 32, 5, b"p" * 32)
LIMITS = FrameLimits(max_meta_bytes=1 << 20, max_rows=ROWS, columns=HIDDEN)


def run(seq_id: int, *token_ids: int, samples: bool = True) -> SequenceRun:
    return SequenceRun(seq_id, 0, token_ids, (), samples)


def plan(step_id: int, *runs: SequenceRun, forget: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(step_id, forget, (), runs)


def ids(one: StepPlan | None) -> list[tuple[int, ...]]:
    assert one is not None
    return [item.token_ids for item in one.runs]


# -- what is kept --------------------------------------------------------------------------------------------------


def test_a_token_that_came_first_is_filled_in() -> None:
    kept = LastTokens()
    known = plan(3, run(0, 5, 6), run(1, 7, samples=False), run(2, 8))
    assert kept.fill_in(known) == known
    kept.arrive(3, [50, 52])
    asking = StepPlan(4, (), (), (SequenceRun(2, 9, (AHEAD,), (4, 5), True), run(1, 7), run(0, AHEAD, samples=False)))
    assert kept.fill_in(asking) == replace(
        asking, runs=(asking.runs[0]._replace(token_ids=(52,)), asking.runs[1], run(0, 50, samples=False))
    )
    kept.arrive(4, [62, 61])
    assert ids(kept.fill_in(plan(5, run(1, AHEAD), run(2, AHEAD)))) == [(61,), (62,)]


def waiting(kept: LastTokens, one: StepPlan) -> tuple[threading.Thread, list[StepPlan | None]]:
    """A thread that takes a plan through, and what comes of it."""
    made: list[StepPlan | None] = []
    thread = threading.Thread(target=lambda: made.append(kept.fill_in(one)))
    thread.start()
    return thread, made


def test_a_plan_waits_for_the_latest_of_its_tokens_and_no_longer() -> None:
    kept = LastTokens()
    for step_id in range(3):
        kept.fill_in(plan(step_id, run(step_id, 1)))
    thread, made = waiting(kept, plan(3, run(0, AHEAD), run(1, AHEAD)))
    kept.arrive(0, [10])
    thread.join(0.1)
    assert not made
    kept.arrive(1, [11])
    thread.join(60)
    assert ids(made[0]) == [(10,), (11,)]
    # Step 2's have not come, and a plan that asks for none does not wait.
    assert ids(kept.fill_in(plan(4, run(0, 9)))) == [(9,)]


def test_of_a_sequence_in_two_plans_the_later_token_is_waited_for() -> None:
    kept = LastTokens()
    kept.fill_in(plan(0, run(0, 1)))
    kept.arrive(0, [10])
    kept.fill_in(plan(1, run(0, AHEAD)))
    thread, made = waiting(kept, plan(2, run(0, AHEAD)))
    thread.join(0.1)
    assert not made
    kept.arrive(1, [11])
    thread.join(60)
    assert ids(made[0]) == [(11,)]


def test_a_name_that_is_used_again_has_no_token_of_its_first_bearer() -> None:
    kept = LastTokens()
    kept.fill_in(plan(0, run(0, 1), run(1, 1)))
    kept.fill_in(plan(1, run(0, 1), forget=(0,)))
    kept.arrive(0, [10, 20])
    thread, made = waiting(kept, plan(2, run(0, AHEAD), run(1, AHEAD)))
    kept.arrive(1, [11])
    thread.join(60)
    assert ids(made[0]) == [(11,), (20,)]
    # And one that has sampled nothing has none: the stage refuses the plan.
    assert ids(kept.fill_in(plan(3, run(0, AHEAD), forget=(0,)))) == [(AHEAD,)]


def test_nothing_is_kept_of_the_forgotten() -> None:
    kept = LastTokens()
    for step_id in range(200):
        forget = (step_id - 1,) if step_id else ()
        kept.fill_in(plan(step_id, run(step_id, 1), forget=forget))
        if step_id:
            kept.arrive(step_id - 1, [7])
    assert len(kept._tokens) <= 1
    assert len(kept._sampled_by) == len(kept._due) == 1


@pytest.mark.parametrize(("step_id", "tokens"), [(1, [5]), (0, [5, 6]), (0, []), (7, [5])])
def test_tokens_of_another_step_or_of_others_are_refused(step_id: int, tokens: list[int]) -> None:
    kept = LastTokens()
    with pytest.raises(TransportError, match="where 0 of step None were due"):
        kept.arrive(step_id, tokens)
    kept.fill_in(plan(0, run(0, 1)))
    with pytest.raises(TransportError, match=f"of step {step_id} came where 1 of step 0 were due"):
        kept.arrive(step_id, tokens)


def test_closing_wakes_a_plan_that_waits() -> None:
    kept = LastTokens()
    kept.fill_in(plan(0, run(0, 1)))
    thread, made = waiting(kept, plan(1, run(0, AHEAD)))
    kept.close()
    thread.join(60)
    assert made == [None]
    assert kept.fill_in(plan(2, run(1, 1))) is None


@pytest.mark.parametrize("seed", range(8))
def test_whenever_tokens_come_plans_are_those_of_a_scheduler_that_waits(seed: int) -> None:
    """Sequences come, end, are preempted and aborted in turns; tokens are as late as they can be, or at once."""
    draw = random.Random(seed)
    stages = draw.choice([2, 3])
    config = SchedulerConfig(
        num_blocks=9, block_size=8, max_context=48, depth=stages + 1, max_step_tokens=32, prefill_chunk=7,
        max_sequences=6, eos_token_ids=(3,), vocab_size=101, ahead=True,
    )  # fmt: skip
    scheduler, kept = Scheduler(config), LastTokens()
    known: dict[int, list[int]] = {}
    results: deque[StepResult] = deque()
    told = filled = added = 0
    while added < 80 or scheduler.has_unfinished() or results:
        if added < 80 and draw.random() < 0.3:
            prompt = tuple(draw.randrange(4, 101) for _ in range(draw.randint(1, 20)))
            scheduler.add(NewRequest(str(added), prompt, SamplingParams(max_tokens=draw.randint(1, 20), seed=0)))
            added += 1
        if added and draw.random() < 0.03:
            scheduler.abort(str(draw.randrange(added)))
        while (one := scheduler.schedule()) is not None:
            asked = {item.seq_id for item in one.runs if item.token_ids == (AHEAD,)}
            # Those that it needs; sometimes more of them have come.
            while told < len(results) and (
                any(token.seq_id in asked for result in list(results)[told:] for token in result.tokens)
                or draw.random() < 0.3
            ):
                result = results[told]
                if result.tokens:
                    kept.arrive(result.step_id, [token.token_id for token in result.tokens])
                told += 1
            made = kept.fill_in(one)
            assert made is not None
            for seq_id in one.forget:
                del known[seq_id]
            known.update((start.seq_id, list(start.token_ids)) for start in one.starts)
            for item in made.runs:
                tokens = known[item.seq_id]
                assert item.token_ids == tuple(tokens[item.position : item.position + len(item.token_ids)])
                filled += item.seq_id in asked
            sampled = [SampledToken(item.seq_id, draw.randrange(101)) for item in one.runs if item.samples]
            for token in sampled:
                known[token.seq_id].append(token.token_id)
            results.append(StepResult(one.step_id, tuple(sampled)))
        scheduler.check_integrity()
        if results:
            result = results.popleft()
            if told:
                told -= 1
            elif result.tokens:
                kept.arrive(result.step_id, [token.token_id for token in result.tokens])
            scheduler.update(result)
    assert filled > 100


# -- how it gets there ---------------------------------------------------------------------------------------------


class Recorder:
    """A stage that samples 100 + the step's id for each run, and remembers the plans that it was given."""

    def __init__(self, *, last: bool) -> None:
        self.last = last
        self.plans: list[StepPlan] = []
        self.fails_at: int | None = None

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> DoneStep:
        if plan.step_id == self.fails_at:
            raise RuntimeError("scripted")
        self.plans.append(plan)
        if not self.last:
            return DoneStep(StepOutput(np.zeros((plan.num_tokens, HIDDEN), np.float32), None))
        tokens = tuple(SampledToken(item.seq_id, 100 + plan.step_id) for item in plan.runs if item.samples)
        return DoneStep(StepOutput(None, StepResult(plan.step_id, tokens)))

    def reset(self) -> None:
        self.plans.clear()

    def close(self) -> None:
        pass


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited for ever until {what}"
        time.sleep(0.002)


def fails(call: Callable[[], object]) -> bool:
    """Whether its channel is broken."""
    try:
        call()
    except TransportError:
        return True
    return False


def data_threads() -> list[str]:
    roles = ("compute", "receive", "send", "tokens", "accept", "handshake", "engine-")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(roles)]


class First:
    """The first of three stages, between neighbours that the test plays."""

    def __init__(self) -> None:
        self.stage = Recorder(last=False)
        self.worker = StageWorker(0, STAGES, self.stage, HIDDEN, ROWS, 8)
        self.behind = Listener(HOST, RIGHT, 1, 0, LIMITS)
        address = self.worker.listen(HOST, RIGHT)
        self.for_tokens = self.worker.listen_for_tokens(HOST)
        self.engine = connect(address, RIGHT, ENGINE, 0)
        self.worker.connect(self.behind.address)
        self.receiver = self.behind.accept(60.0)

    def last(self, credentials: Credentials = RIGHT, own: int = STAGES - 1) -> TcpSender:
        return connect(self.for_tokens, credentials, own, 0)

    def send(self, one: StepPlan) -> None:
        self.engine.send(RIGHT.epoch, Frame(FrameKind.STEP, one.step_id, encode_message(one)))

    def receive(self) -> StepPlan:
        frame = self.receiver.receive(RIGHT.epoch, np.empty(LIMITS.slot_bytes, np.uint8))
        assert frame.kind is FrameKind.STEP
        return decode_plan(frame.meta)

    def ended(self, words: str) -> None:
        wait_until(lambda: self.worker.progress().ended, "the session ends")
        assert words in str(self.worker.progress().ended)
        wait_until(lambda: fails(self.receive), "the neighbours learn of it")

    def close(self) -> None:
        for channel in (self.engine, self.receiver, self.behind):
            channel.close()
        self.worker.close()


@pytest.fixture
def first() -> Iterator[First]:
    made = First()
    yield made
    made.close()
    wait_until(lambda: not data_threads(), f"the data threads end: {data_threads()}")


def tokens_of(step_id: int, *token_ids: int) -> Frame:
    made = StepResult(step_id, tuple(SampledToken(0, token_id) for token_id in token_ids))
    return Frame(FrameKind.TOKENS, step_id, encode_tokens(made))


@pytest.mark.parametrize("before", [True, False])
def test_tokens_before_and_after_the_plan_that_asks_for_them(first: First, before: bool) -> None:
    last = first.last()
    first.send(plan(4, run(0, 1), run(1, 2)))
    assert first.receive() == plan(4, run(0, 1), run(1, 2))
    asking = plan(5, run(1, AHEAD), run(0, AHEAD))
    if before:
        last.send(RIGHT.epoch, tokens_of(4, 77, 2**31 - 1))
        first.send(asking)
    else:
        first.send(asking)
        first.send(plan(6, run(2, 5)))
        time.sleep(0.1)
        # It waits, the one behind it too, and to wait is not to be in a step.
        assert len(first.stage.plans) == 1
        assert first.worker.progress().running is None
        last.send(RIGHT.epoch, tokens_of(4, 77, 2**31 - 1))
    # The others get the plan as it came.
    assert first.receive() == asking
    assert ids(first.stage.plans[1]) == [(2**31 - 1,), (77,)]
    if not before:
        assert first.receive() == plan(6, run(2, 5))
    last.close()


@pytest.mark.parametrize(
    ("epoch", "frame", "words"),
    [
        (4, tokens_of(4, 77, 78), "a frame of epoch 4 came in epoch 5"),
        (6, tokens_of(4, 77, 78), "a frame of epoch 6 came in epoch 5"),
        (5, tokens_of(3, 77, 78), "2 tokens of step 3 came where 2 of step 4 were due"),
        (5, tokens_of(4, 77), "1 tokens of step 4 came where 2 of step 4 were due"),
        (5, Frame(FrameKind.TOKENS, 4, bytes(7)), "tokens of 7 bytes"),
        (5, Frame(FrameKind.TOKENS, 4, bytes(4 * ROWS + 4)), "over the limit 256"),
        (5, Frame(FrameKind.RESULT, 4, b""), "RESULT came where tokens were due"),
        (5, Frame(FrameKind.TOKENS, 4, b"", np.ones((1, HIDDEN), np.float32)), "over the limit 0"),
    ],
)
def test_what_is_not_the_tokens_that_are_due_ends_the_epoch(first: First, epoch: int, frame: Frame, words: str) -> None:
    last = first.last()
    first.send(plan(4, run(0, 1), run(1, 2)))
    first.receive()
    first.send(plan(5, run(0, AHEAD)))
    last.send(epoch, frame)
    first.ended(words)
    assert len(first.stage.plans) == 1, "a plan ran without its tokens"
    last.close()


@pytest.mark.parametrize(
    ("credentials", "own", "words"),
    [
        (replace(RIGHT, epoch=4), 2, "it is of epoch 4, the pipeline is in epoch 5"),
        (replace(RIGHT, key=b"x" * 32), 2, "does not know this pipeline's key"),
        (RIGHT, 1, "expects stage 2"),
        (RIGHT, ENGINE, "expects stage 2"),
    ],
)
def test_only_the_last_stage_of_this_epoch_may_send_tokens(
    first: First, credentials: Credentials, own: int, words: str
) -> None:
    with pytest.raises(TransportError, match=words):
        first.last(credentials, own)
    last = first.last()
    first.send(plan(0, run(0, 1)))
    first.send(plan(1, run(0, AHEAD)))
    wait_until(lambda: first.stage.plans, "the first step, from which the tokens come")
    last.send(RIGHT.epoch, tokens_of(0, 9))
    wait_until(lambda: len(first.stage.plans) == 2, "both run")
    assert ids(first.stage.plans[1]) == [(9,)]
    last.close()


def test_a_last_stage_that_is_gone_ends_the_epoch_for_all(first: First) -> None:
    last = first.last()
    first.send(plan(0, run(0, 1)))
    first.send(plan(1, run(0, AHEAD)))
    wait_until(lambda: first.stage.plans, "the first step")
    last.close()
    first.ended("stage 2 closed the connection")


def test_a_plan_that_waits_does_not_keep_the_next_epoch_from_beginning(first: First) -> None:
    last = first.last()
    first.send(plan(0, run(0, 1)))
    first.send(plan(1, run(0, AHEAD)))
    wait_until(lambda: first.stage.plans, "the first step")
    again = replace(RIGHT, epoch=6)
    address = first.worker.listen(HOST, again)
    assert first.stage.plans == []
    for_tokens = first.worker.listen_for_tokens(HOST)
    # What an earlier epoch sampled is of no use to this one, and cannot get there either.
    wait_until(lambda: fails(lambda: last.send(RIGHT.epoch, tokens_of(0, 9))), "its channel is closed")
    last.close()
    with pytest.raises(TransportError, match="it is of epoch 5"):
        connect(for_tokens, RIGHT, STAGES - 1, 0)
    behind = Listener(HOST, again, 1, 0, LIMITS)
    engine, last = connect(address, again, ENGINE, 0), connect(for_tokens, again, STAGES - 1, 0)
    first.worker.connect(behind.address)
    receiver = behind.accept(60.0)
    for one in (plan(0, run(0, 1)), plan(1, run(0, AHEAD))):
        engine.send(6, Frame(FrameKind.STEP, one.step_id, encode_message(one)))
    wait_until(lambda: first.stage.plans, "the first step, from which the tokens come")
    last.send(6, tokens_of(0, 11))
    wait_until(lambda: len(first.stage.plans) == 2, "both run")
    assert ids(first.stage.plans[1]) == [(11,)]
    for channel in (engine, last, receiver, behind):
        channel.close()


class Ring:
    """All stages in this process, wired as a pipeline over Ray wires them."""

    def __init__(self, num_stages: int) -> None:
        self.stages = [Recorder(last=index == num_stages - 1) for index in range(num_stages)]
        self.workers = [
            StageWorker(index, num_stages, stage, HIDDEN, ROWS, 8) for index, stage in enumerate(self.stages)
        ]
        self.frames: deque[Frame] = deque()
        self.ends: deque[str] = deque()
        credentials = Credentials(secrets.token_bytes(32), 1, b"p" * 32)
        self.link = EngineLink(HOST, credentials, num_stages, self.frames.append, self.ends.append)
        addresses = [worker.listen(HOST, credentials) for worker in self.workers]
        for_tokens = self.workers[0].listen_for_tokens(HOST)
        for worker, address in zip(self.workers, [*addresses[1:], self.link.address], strict=True):
            worker.connect(address, for_tokens if worker is self.workers[-1] else None)
        self.link.open(addresses[0], 60.0)

    def send(self, one: StepPlan) -> None:
        self.link.send(Frame(FrameKind.STEP, one.step_id, encode_message(one)))

    def close(self) -> None:
        self.link.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture(params=[2, 3])
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    made = Ring(request.param)
    yield made
    made.close()
    wait_until(lambda: not data_threads(), "the data threads end")


def test_round_and_round(ring: Ring) -> None:
    """Two plans of a sequence in flight, a step without a token between them, and all results in order."""
    count = 60
    sent = 0
    for done in range(count):
        while sent < min(done + 3, count):
            samples = sent % 3 != 2
            runs = [run(5, 40, 41, samples=False)]
            if samples:
                runs.insert(0, run(0, AHEAD if sent else 1))
            ring.send(plan(sent, *runs))
            sent += 1
        wait_until(lambda done=done: len(ring.frames) > done, "the result")  # type: ignore[misc]
    results = [decode_result(frame.meta) for frame in ring.frames]
    assert [result.step_id for result in results] == list(range(count))
    asked = [item.token_ids[0] for one in ring.stages[0].plans for item in one.runs if item.seq_id == 0]
    assert asked == [1, *(100 + step for step in range(count) if step % 3 != 2)][: len(asked)]
    assert len(asked) == 40
    assert {item.token_ids for one in ring.stages[1].plans[1:] for item in one.runs if item.seq_id == 0} == {(AHEAD,)}


@pytest.mark.parametrize("where", [0, -1])
def test_a_step_that_fails_tells_the_engine_though_the_next_one_waits_for_its_token(ring: Ring, where: int) -> None:
    ring.stages[where].fails_at = 1
    ring.send(plan(0, run(0, 1)))
    ring.send(plan(1, run(0, AHEAD)))
    ring.send(plan(2, run(0, AHEAD)))
    wait_until(lambda: len(ring.frames) >= 2, "the failure")
    assert [frame.kind for frame in ring.frames] == [FrameKind.RESULT, FrameKind.FAILURE]
    assert not ring.ends
    ring.link.close()
    # Nobody waits for ever for the token that does not come.
    wait_until(lambda: all(worker._session.join_compute(0) for worker in ring.workers if worker._session), "they end")


def test_an_engine_that_is_sent_tokens_ends_the_epoch() -> None:
    ends: deque[str] = deque()
    link = EngineLink(HOST, RIGHT, 2, lambda _: None, ends.append)
    first = Listener(HOST, RIGHT, 0, ENGINE, LIMITS)
    last = connect(link.address, RIGHT, 1, ENGINE)
    link.open(first.address, 60.0)
    last.send(RIGHT.epoch, tokens_of(0, 1))
    wait_until(lambda: ends, "it ends")
    assert "TOKENS to the engine" in ends[0]
    for channel in (first, last):
        channel.close()
    wait_until(lambda: not data_threads(), "the data threads end")


def test_tokens_are_encoded_bit_for_bit() -> None:
    tokens = (0, 1, 255, 256, 2**31 - 1)
    made = StepResult(9, tuple(SampledToken(index, token) for index, token in enumerate(tokens)))
    assert decode_tokens(encode_tokens(made)) == list(tokens)
    assert encode_tokens(StepResult(9, ())) == b""
