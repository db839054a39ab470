"""The whole engine with plans made a step ahead, on the real model in one, two and three stages: each answer is token
by token, and logprob by logprob, that of its request alone in one stage with one plan at a time. Half of it on a device
that answers late, so that steps of the stage overlap too."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from shardline.cluster import Engine, Request, StageLostError
from shardline.cluster.build import EngineOptions, Prepared, build_engine, prepare
from shardline.cluster.local_pipeline import LocalPipeline
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import connected
from shardline.cluster.stage_loading import CheckpointLoader, LoadedStage
from shardline.cluster.wire.stage_worker import StageRunner
from shardline.kernels import Backend
from shardline.scheduler import SamplingParams, StepPlan, StepResult
from shardline.scheduler.plan import AHEAD
from shardline.stage import StageSpec, backend_for
from shardline.stage.stage import PendingStep, StepOutput

# The workers cannot import this file: what it defines goes to them by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

BLOCK = 16
CONTEXT = 256
SEQUENCES = 20
TOKENS = 24
TALE = "The old lighthouse keeper counted the ships of the harbour each evening, and wrote their names into a book. "


def chat(text: str, **params: Any) -> Request:
    return Request(messages=({"role": "user", "content": text},), params=params_of(**params))


def raw(text: str, **params: Any) -> Request:
    return Request(text=text, params=params_of(**params))


def params_of(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "logprobs": 2, "seed": 7, **given})


# By what ends them: the model's own end token, a stop string within and across tokens, a stop token, length.
FREE = (
    chat("What is 2+2? Answer with one number."),
    chat("What is the capital of France?"),
    chat("Name a color. One word only."),
    raw("The capital of France is", stop=("answer is",)),
    raw("Once upon a time", stop=("hriving metrop",), ignore_eos=True),
    raw("1, 2, 3, 4, 5,", stop_token_ids=(28,), min_p=0.05, ignore_eos=True),
    raw(TALE * 2, temperature=0.9, ignore_eos=True),
    raw(TALE * 2 + "One night", temperature=1.1, top_k=40, ignore_eos=True, logit_bias=((260, 2.0),)),
    raw(TALE + "He slept", temperature=0.8, top_p=0.9, n=3, stop=(" the", "."), ignore_eos=True, max_tokens=14),
    raw("שלום עולם", temperature=0.9, ignore_eos=True),
    raw("def fibonacci(n):", ignore_eos=True, max_tokens=1),
    raw("def fibonacci(n):", ignore_eos=True, max_tokens=2),
    raw("def fibonacci(n):", ignore_eos=True, max_tokens=3),
)
PENALIZED = (
    raw(TALE, temperature=0.9, repetition_penalty=1.3, ignore_eos=True, max_tokens=10),
    raw("Once upon a time", frequency_penalty=0.5, presence_penalty=0.3, ignore_eos=True, max_tokens=8),
)


@dataclass
class Answer:
    """What one sequence of a request gave."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[object, ...] = ()
    text: str = ""
    finish: tuple[str | None, str | int | None] = (None, None)


@dataclass
class Answers:
    """What a request gave; `cached` is no part of it."""

    sequences: dict[int, Answer] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    cached: int = field(default=0, compare=False)


async def answer(engine: Engine, request: Request, on_token: Callable[[], None] = lambda: None) -> Answers:
    """All of it. Nothing may follow what ends a sequence."""
    got = Answers()
    async for delta in engine.generate(request):
        one = got.sequences.setdefault(delta.index, Answer())
        assert one.finish[0] is None, "a delta after the end"
        assert len(delta.logprobs) == len(delta.token_ids)
        one.ids += delta.token_ids
        one.logprobs += delta.logprobs
        one.text += delta.text
        one.finish = (delta.finish_reason, delta.stop_reason)
        got.usage = (delta.usage.prompt_tokens, delta.usage.completion_tokens)
        got.cached = delta.usage.cached_tokens
        for _ in delta.token_ids:
            on_token()
    assert got.usage[1] == sum(len(one.ids) for one in got.sequences.values())
    return got


# -- a device that answers late ------------------------------------------------------------------------------------


class Late:
    """A `Pending`, of a backend or of a stage, that is not ready, and takes as long as a device might."""

    ready = False

    def __init__(self, pending: Any, seconds: float, fails: bool = False) -> None:
        self.pending, self.seconds, self.fails = pending, seconds, fails

    def wait(self) -> Any:
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("the device fell off the bus")
        return self.pending.wait()


class Delays:
    """Shorter than a step, and longer than one: then two steps are begun."""

    def __init__(self) -> None:
        self._draw = random.Random(5)

    def next(self) -> float:
        return self._draw.choice((0.0, 0.002, 0.03))


class LateDevice:
    """A backend factory.

    Attributes:
        fail_at: Ordinals, over all backends that it made, of the samplings whose device fails.
    """

    def __init__(self, fail_at: Sequence[int] = ()) -> None:
        self.fail_at = fail_at
        self.samplings = 0
        self._delays = Delays()

    def __call__(self, spec: StageSpec) -> Backend:
        backend: Any = backend_for(spec)
        sample_later = backend.sample_later

        def late(*arguments: Any) -> Late:
            fails = self.samplings in self.fail_at
            self.samplings += 1
            return Late(sample_later(*arguments), self._delays.next(), fails)

        backend.sample_later = late
        made: Backend = backend
        return made


@dataclass(frozen=True)
class LateLoader(CheckpointLoader):
    """For a stage in a process of its own."""

    def load(self, spec: StageSpec) -> LoadedStage:
        loaded = super().load(spec)
        return replace(loaded, runner=LateStage(loaded.runner))


@dataclass
class LateStage:
    """Its steps are never ready when they have been begun."""

    stage: StageRunner
    delays: Delays = field(default_factory=Delays)

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> PendingStep:
        return LateStep(self.stage.begin(plan, hidden), self.delays.next())

    def reset(self) -> None:
        self.stage.reset()

    def close(self) -> None:
        self.stage.close()


class LateStep(Late):
    def wait(self) -> StepOutput:
        output: StepOutput = super().wait()
        return output


# -- engines -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each result one token is delivered before the next result may come: what ends in one has tokens in both."""
    monkeypatch.setattr("shardline.cluster.engine.DELIVERED_AT_ONCE", 1)


SPLITS = ((30,), (13, 17), (2, 17, 11))


@pytest.fixture(scope="module")
def whole(smollm2: Path) -> Prepared:
    """One stage, as a user's options give it."""
    return in_stages(smollm2, (30,))


@pytest.fixture(scope="module", params=SPLITS, ids=lambda split: "+".join(map(str, split)))
def prepared(smollm2: Path, request: pytest.FixtureRequest) -> Prepared:
    """A step ahead as on GPUs of their own."""
    return stepping_ahead(smollm2, request.param)


def stepping_ahead(path: Path, split: tuple[int, ...]) -> Prepared:
    found = in_stages(path, split)
    least = SEQUENCES if len(split) == 1 else 1
    return replace(found, plan=replace(found.plan, depth=len(split) + 1, min_microbatch=least, ahead=True))


def in_stages(path: Path, split: tuple[int, ...]) -> Prepared:
    options = EngineOptions(
        str(path),
        split=split,
        context=CONTEXT,
        concurrency=12,
        threads=1,
        memory=(400 * 2**20,) * len(split),
        block_size=BLOCK,
        max_sequences=SEQUENCES,
        max_step_tokens=64,
        prefill_chunk=32,
    )
    found = prepare(options)
    assert tuple(stage.spec.num_layers for stage in found.plan.stages) == split
    assert not found.plan.ahead, "a CPU gains nothing by it"
    return found


def with_blocks(prepared: Prepared, num_blocks: int) -> Prepared:
    stages = tuple(replace(stage, spec=replace(stage.spec, num_blocks=num_blocks)) for stage in prepared.plan.stages)
    return replace(prepared, plan=replace(prepared.plan, stages=stages))


def plans_of(engine: Engine) -> list[StepPlan]:
    """All plans that the engine submits from now on."""
    plans: list[StepPlan] = []
    pipeline: Any = engine._pipeline
    submit = pipeline.submit

    async def noted(plan: StepPlan) -> None:
        plans.append(plan)
        await submit(plan)

    pipeline.submit = noted
    return plans


def results_in_pairs(engine: Engine) -> None:
    """A result comes when the one after it has come too, or is lost, where there is to be one: so the engine has a
    whole result to take while most of the one before is owed to the streams."""
    pipeline: Any = engine._pipeline
    submit, result, recover = pipeline.submit, pipeline.result, pipeline.recover
    due: deque[int] = deque()
    held: deque[StepResult | StageLostError] = deque()

    async def submitted(plan: StepPlan) -> None:
        await submit(plan)
        due.append(plan.step_id)

    async def next_result() -> StepResult:
        if not held:
            held.append(await result())
            due.popleft()
            if due:
                try:
                    held.append(await result())
                    due.popleft()
                except StageLostError as lost:
                    held.append(lost)
        arrived = held.popleft()
        if isinstance(arrived, StageLostError):
            raise arrived
        return arrived

    async def recovered() -> None:
        held.clear()
        due.clear()
        await recover()

    pipeline.submit, pipeline.result, pipeline.recover = submitted, next_result, recovered


def ahead(plans: Sequence[StepPlan]) -> list[StepPlan]:
    return [plan for plan in plans if any(run.token_ids == (AHEAD,) for run in plan.runs)]


def run_with(engine: Engine, work: Callable[[Engine], Awaitable[None]]) -> None:
    """Start, work, prove that nothing is left, close."""

    async def run() -> None:
        async with asyncio.timeout(120):
            try:
                await engine.start()
                await work(engine)
                while (status := await engine.status()).scheduler.in_flight:
                    await asyncio.sleep(0.005)
                assert (status.state, status.requests, status.scheduler.running) == ("ready", 0, 0)
                assert (status.scheduler.waiting, status.scheduler.blocks_used) == (0, 0)
                engine._scheduler.check_integrity()
                assert not engine._owed
            finally:
                await engine.close()

    asyncio.run(run())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardline-stages")]


class Alone:
    """Each request's answers when nothing runs beside it, planned one at a time and without a prefix cache."""

    def __init__(self, prepared: Prepared) -> None:
        plan = replace(prepared.plan, ahead=False, depth=1)
        self._prepared = replace(prepared, plan=plan, options=replace(prepared.options, prefix_cache=False))
        self._answers: dict[str, Answers] = {}

    def __call__(self, *requests: Request) -> list[Answers]:
        missing = [request for request in requests if repr(request) not in self._answers]
        if missing:
            run_with(build_engine(self._prepared, in_process=True), lambda engine: self._ask(engine, missing))
        return [self._answers[repr(request)] for request in requests]

    async def _ask(self, engine: Engine, requests: Sequence[Request]) -> None:
        plans = plans_of(engine)
        for request in requests:
            self._answers[repr(request)] = await answer(engine, request)
        assert not ahead(plans)


@pytest.fixture(scope="module")
def alone(whole: Prepared) -> Alone:
    made = Alone(whole)
    ends = [one.finish for got in made(*FREE, *PENALIZED) for one in got.sequences.values()]
    # Or the requests would not show what they are for.
    assert {type(reason) for how, reason in ends if how == "stop"} == {str, int}
    assert sum(how == "stop" for how, _ in ends) >= 6
    assert ("stop", "hriving metrop") in ends
    assert ("stop", 28) in ends
    assert sum(how == "length" for how, _ in ends) >= 6
    return made


def local(prepared: Prepared, device: LateDevice | None) -> Engine:
    engine = build_engine(prepared, in_process=True)
    pipeline: Any = engine._pipeline
    assert isinstance(pipeline, LocalPipeline)
    assert len(pipeline.specs) == len(prepared.plan.stages)
    if device is not None:
        pipeline._backend_factory = device
        results_in_pairs(engine)
    return engine


async def all_of(engine: Engine, requests: Sequence[Request]) -> list[Answers]:
    return list(await asyncio.gather(*(answer(engine, request) for request in requests)))


@pytest.mark.parametrize("late", [False, True])
def test_all_at_once_are_each_as_alone(prepared: Prepared, alone: Alone, late: bool) -> None:
    async def work(engine: Engine) -> None:
        plans = plans_of(engine)
        assert await all_of(engine, FREE) == alone(*FREE)
        made = ahead(plans)
        assert len(made) > TOKENS // 2
        assert any(len(plan.runs) > 8 // len(prepared.plan.stages) for plan in made)
        if late:
            # Everything but what needs its tokens' history runs a step ahead; of one group, beside it nobody does.
            del plans[:]
            assert await all_of(engine, (*PENALIZED, *FREE)) == alone(*PENALIZED, *FREE)
            histories = {start.seq_id for plan in plans for start in plan.starts if start.params.needs_history}
            assert len(histories) == len(PENALIZED)
            assert ahead(plans)
            beside = [plan for plan in ahead(plans) if histories & {run.seq_id for run in plan.runs}]
            assert not beside or len(prepared.plan.stages) > 1
            assert not [run for plan in beside for run in plan.runs if run.seq_id in histories and run.token_ids[0] < 0]

    run_with(local(prepared, LateDevice() if late else None), work)


def test_a_block_that_a_token_ahead_filled_is_found_with_its_bytes(prepared: Prepared, alone: Alone) -> None:
    """A conversation goes on: what the cache has of the first answer is what its tokens give."""
    first = [
        replace_ids(request) for request in (raw("", max_tokens=3 * BLOCK), raw("", temperature=0.9, max_tokens=40))
    ]
    expected = alone(*first)
    again = [
        Request(token_ids=(*ids_of(request), *got.sequences[0].ids, 198, 30), params=params_of(max_tokens=8, seed=9))
        for request, got in zip(first, expected, strict=True)
    ]
    expected_again = alone(*again)

    async def work(engine: Engine) -> None:
        plans = plans_of(engine)
        assert await all_of(engine, first) == expected
        filled = {run.position for plan in ahead(plans) for run in plan.runs if run.token_ids == (AHEAD,)}
        got = await all_of(engine, again)
        assert got == expected_again
        for request, answers in zip(again, got, strict=True):
            # The last token of the prompt's last full block; what the answer's last token fills nobody has computed.
            assert answers.cached == (len(ids_of(request)) - 3) // BLOCK * BLOCK
            assert answers.cached - 1 in filled
            assert answers.cached > 3 * BLOCK

    run_with(local(prepared, LateDevice()), work)


def replace_ids(request: Request) -> Request:
    """With a prompt of two blocks and a half, another for each way to sample."""
    draw = random.Random(str(request.params))
    ids = tuple(draw.randrange(1000, 20_000) for _ in range(2 * BLOCK + BLOCK // 2))
    return Request(token_ids=ids, params=replace(request.params, ignore_eos=True))


def ids_of(request: Request) -> tuple[int, ...]:
    assert request.token_ids is not None
    return request.token_ids


def test_a_small_pool_that_preempts(prepared: Prepared, alone: Alone) -> None:
    """Prompts of three blocks that nearly fill it, and answers that take two more each."""
    prompts = [tuple(random.Random(place).sample(range(1000, 20_000), 3 * BLOCK - 4)) for place in range(4)]
    requests = [
        Request(token_ids=ids, params=params_of(temperature=0.3 * place, ignore_eos=True))
        for place, ids in enumerate(prompts)
    ]
    expected = alone(*requests)

    async def work(engine: Engine) -> None:
        plans = plans_of(engine)
        assert await all_of(engine, requests) == expected
        assert ahead(plans)
        assert (await engine.status()).scheduler.preemptions > 0

    run_with(local(with_blocks(prepared, 14), LateDevice()), work)


async def cancelled_at(engine: Engine, request: Request, count: int) -> Answers:
    """What came of a request that its consumer leaves when so many tokens have come."""
    got = Answers()
    stream: Any = engine.generate(request)
    async for delta in stream:
        one = got.sequences.setdefault(delta.index, Answer())
        one.ids += delta.token_ids
        one.logprobs += delta.logprobs
        if sum(len(one.ids) for one in got.sequences.values()) >= count:
            break
    await stream.aclose()
    return got


def check_begins(got: Answers, whole: Answers) -> None:
    for index, one in got.sequences.items():
        expected = whole.sequences[index]
        assert one.ids == expected.ids[: len(one.ids)]
        assert one.logprobs == expected.logprobs[: len(one.ids)]


async def with_cancels(engine: Engine, alone: Alone, requests: Sequence[Request]) -> None:
    """Some of the requests are left in the middle, others ask at once for what these had."""
    draw = random.Random(11)
    order = draw.sample(requests, len(requests))
    left, kept = order[: len(order) // 2], order[len(order) // 2 :]

    async def leave(request: Request, count: int) -> None:
        check_begins(await cancelled_at(engine, request, count), alone(request)[0])
        assert await answer(engine, request) == alone(request)[0]

    leaving = [asyncio.ensure_future(leave(request, draw.randint(1, 12))) for request in left]
    assert await all_of(engine, kept) == alone(*kept)
    await asyncio.gather(*leaving)


def test_cancels_at_any_time(prepared: Prepared, alone: Alone) -> None:
    run_with(local(prepared, LateDevice()), lambda engine: with_cancels(engine, alone, FREE))


def test_a_device_that_fails_while_two_steps_run(prepared: Prepared, alone: Alone) -> None:
    device = LateDevice(fail_at=(9, 21, 22))

    async def work(engine: Engine) -> None:
        plans = plans_of(engine)
        assert await all_of(engine, FREE) == alone(*FREE)
        assert (await engine.status()).losses in (2, 3)
        assert ahead(plans)

    run_with(local(prepared, device), work)


def test_closed_under_load(prepared: Prepared, alone: Alone) -> None:
    """Every stream ends, with tokens that are the first of its answer, and no thread is left."""
    engine = local(prepared, LateDevice())

    async def work() -> None:
        await engine.start()
        count = 0

        def on_token() -> None:
            nonlocal count
            count += 1
            if count == 60:
                closing.append(asyncio.ensure_future(engine.close()))

        closing: list[asyncio.Task[None]] = []
        async with asyncio.timeout(120):
            got = await asyncio.gather(*(answer(engine, request, on_token) for request in FREE))
            await closing[0]
        ends = [one.finish[0] for answers in got for one in answers.sequences.values()]
        assert "abort" in ends
        assert None not in ends
        for answers, whole in zip(got, alone(*FREE), strict=True):
            check_begins(answers, whole)
        assert engine._scheduler.stats().blocks_used == 0
        engine._scheduler.check_integrity()

    asyncio.run(work())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardline-stages")]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with connected(num_cpus=4):
        yield


@pytest.mark.ray
@pytest.mark.parametrize(
    ("split", "victim"), [(SPLITS[0], 0), (SPLITS[1], 1), *((SPLITS[2], place) for place in range(3))]
)
def test_a_stage_in_a_process_of_its_own_is_killed_under_load(
    ray_cluster: None, smollm2: Path, alone: Alone, split: tuple[int, ...], victim: int
) -> None:
    prepared = stepping_ahead(smollm2, split)
    requests = (*FREE[2:9], PENALIZED[1])

    async def work(engine: Engine) -> None:
        plans = plans_of(engine)
        await with_cancels(engine, alone, requests)
        assert ahead(plans)
        before = [stage.pid for stage in (await engine.status()).stages]
        killed = False

        def on_token() -> None:
            nonlocal killed
            # With a plan in flight whose tokens another plan in flight has yet to sample.
            if engine._tokens.total > total + 40 and not killed and -1 in lags(engine):
                killed = True
                os.kill(before[victim], signal.SIGKILL)

        total = engine._tokens.total
        got = await asyncio.gather(*(answer(engine, request, on_token) for request in requests))
        assert killed
        assert list(got) == alone(*requests)
        while (status := await engine.status()).losses < 1 or status.state != "ready":
            await asyncio.sleep(0.01)
        assert status.losses == 1
        after = [stage.pid for stage in status.stages]
        assert [pid == was for pid, was in zip(after, before, strict=True)] == [
            place != victim for place in range(len(split))
        ]

    engine: Any = build_engine(replace(prepared, options=replace(prepared.options, address="local")))
    assert isinstance(engine._pipeline, RayPipeline)
    engine._pipeline = RayPipeline(engine._pipeline.specs, LateLoader(prepared.path))
    run_with(engine, work)


def lags(engine: Engine) -> list[int]:
    return [sequence.lag for sequence in engine._scheduler._running.values()]
