"""The in-process pipeline on the real model: order, a free event loop, a lost stage, and what is given back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster import Delta, Engine, EngineDeadError, Request, StageLostError
from shardline.cluster.inbox import merge
from shardline.cluster.local_pipeline import LocalPipeline, stage_specs
from shardline.cluster.text.model_text import ModelText
from shardline.kernels import Backend
from shardline.scheduler import (
    InvalidParameterError,
    SamplingParams,
    SchedulerConfig,
    SequenceRun,
    SequenceStart,
    StepPlan,
)
from shardline.stage import Checkpoint, StageSpec, backend_for, open_checkpoint

SPLIT = (2, 17, 11)


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Iterator[Checkpoint]:
    opened = open_checkpoint(smollm2)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def specs(checkpoint: Checkpoint) -> tuple[StageSpec, ...]:
    return stage_specs(
        checkpoint.spec,
        SPLIT,
        num_blocks=64,
        block_size=16,
        kv_dtype="float16",
        max_step_tokens=64,
        max_sequences=16,
        max_context=256,
        num_threads=2,
    )


class Faults:
    """A backend factory whose backends fail when told to, and that counts what was made and closed."""

    def __init__(self) -> None:
        self.made: list[Backend] = []
        self.closed: list[Backend] = []
        self.steps: dict[int, int] = {}
        self.fail_at: set[tuple[int, int]] = set()
        self.failing_makes = 0

    def __call__(self, spec: StageSpec) -> Backend:
        if self.failing_makes:
            self.failing_makes -= 1
            raise MemoryError("no room on this device")
        backend: Any = backend_for(spec)
        replay, close = backend.replay, backend.close

        def counted(key: object, issue: Callable[[], None]) -> None:
            step = self.steps[spec.index] = self.steps.get(spec.index, -1) + 1
            if (spec.index, step) in self.fail_at:
                self.fail_at.remove((spec.index, step))
                raise RuntimeError(f"device error in step {step}")
            replay(key, issue)

        def closing() -> None:
            if backend not in self.closed:
                self.closed.append(backend)
            close()

        backend.replay, backend.close = counted, closing
        self.made.append(backend)
        return backend


def chunk(step: int, tokens: tuple[int, ...], position: int = 0) -> StepPlan:
    """A plan that runs some tokens of sequence 0 and samples."""
    start = SequenceStart(0, SamplingParams(logprobs=1, seed=0), len(tokens), tokens, ())
    blocks = () if position else tuple(range(4))
    run = SequenceRun(0, position, tokens, blocks, samples=True)
    return StepPlan(step, (), () if position else (start,), (run,))


def within(work: Any, seconds: float = 240.0) -> None:
    """Run it; something that waits for ever fails instead. The first to run may have to compile the kernels."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await work

    asyncio.run(bounded())


def test_results_come_in_the_order_of_the_plans(specs: tuple[StageSpec, ...], checkpoint: Checkpoint) -> None:
    async def work() -> None:
        pipeline = LocalPipeline(specs, checkpoint)
        await pipeline.start()
        plans = [chunk(0, (1, 2, 3)), chunk(1, (4,), 3), chunk(2, (5, 6), 4)]
        for plan in plans:
            await pipeline.submit(plan)
        got = [await pipeline.result() for _ in plans]
        assert [result.step_id for result in got] == [0, 1, 2]
        # One at a time gives the same.
        await pipeline.recover()
        for plan, result in zip(plans, got, strict=True):
            await pipeline.submit(plan)
            assert await pipeline.result() == result
        await pipeline.close()

    within(work())


def test_the_event_loop_goes_on_while_a_stage_computes(specs: tuple[StageSpec, ...], checkpoint: Checkpoint) -> None:
    """The stage's step ends only when the event loop lets it: a loop that waits for the step would wait for ever."""
    let_go = threading.Event()
    computing = threading.Event()

    def slow(spec: StageSpec) -> Backend:
        backend: Any = backend_for(spec)
        replay = backend.replay

        def waiting(key: object, issue: Callable[[], None]) -> None:
            computing.set()
            assert let_go.wait(240)
            replay(key, issue)

        backend.replay = waiting
        return backend

    async def work() -> None:
        pipeline = LocalPipeline(specs, checkpoint, slow)
        await pipeline.start()
        await pipeline.submit(chunk(0, (1, 2, 3)))
        await pipeline.submit(chunk(1, (4,), 3))
        result = asyncio.create_task(pipeline.result())
        while not computing.is_set():
            await asyncio.sleep(0.001)
        assert not result.done()
        assert len(await pipeline.stats()) == 3
        let_go.set()
        assert (await result).step_id == 0
        await pipeline.close()

    within(work())


def test_a_stage_that_raises_is_lost_and_only_it_is_made_anew(
    specs: tuple[StageSpec, ...], checkpoint: Checkpoint
) -> None:
    async def work() -> None:
        faults = Faults()
        pipeline = LocalPipeline(specs, checkpoint, faults)
        await pipeline.start()
        first, second, third = faults.made
        await pipeline.submit(chunk(0, (1, 2, 3)))
        good = await pipeline.result()
        faults.fail_at = {(1, 1)}
        await pipeline.submit(chunk(1, (4,), 3))
        await pipeline.submit(chunk(2, (5,), 4))
        for _ in range(2):
            with pytest.raises(StageLostError, match="device error in step 1") as caught:
                await pipeline.result()
            assert caught.value.stage == 1
        with pytest.raises(StageLostError, match="device error"):
            await pipeline.submit(chunk(3, (6,), 5))
        assert len(await pipeline.stats()) == 2
        await pipeline.recover()
        assert faults.made[:3] == [first, second, third]
        assert len(faults.made) == 4
        assert faults.closed == [second]
        await pipeline.submit(chunk(7, (1, 2, 3)))
        assert (await pipeline.result()).tokens == good.tokens
        stats = await pipeline.stats()
        assert [stage.steps for stage in stats] == [3, 1, 2]
        await pipeline.close()
        assert len(faults.closed) == 4

    within(work())


def test_a_recovery_that_fails_says_why_and_may_be_tried_again(
    specs: tuple[StageSpec, ...], checkpoint: Checkpoint
) -> None:
    async def work() -> None:
        faults = Faults()
        pipeline = LocalPipeline(specs, checkpoint, faults)
        await pipeline.start()
        faults.fail_at = {(2, 0)}
        await pipeline.submit(chunk(0, (1, 2, 3)))
        with pytest.raises(StageLostError):
            await pipeline.result()
        faults.failing_makes = 1
        with pytest.raises(StageLostError, match="no room on this device"):
            await pipeline.recover()
        with pytest.raises(StageLostError, match="device error"):
            await pipeline.submit(chunk(0, (1, 2, 3)))
        await pipeline.recover()
        await pipeline.submit(chunk(0, (1, 2, 3)))
        assert (await pipeline.result()).step_id == 0
        await pipeline.close()

    within(work())


def test_a_start_that_fails_gives_back_what_it_had(specs: tuple[StageSpec, ...], checkpoint: Checkpoint) -> None:
    async def work() -> None:
        faults = Faults()

        def third_fails(spec: StageSpec) -> Backend:
            faults.failing_makes = int(spec.index == 2)
            return faults(spec)

        pipeline = LocalPipeline(specs, checkpoint, third_fails)
        with pytest.raises(MemoryError, match="no room"):
            await pipeline.start()
        await pipeline.close()
        assert len(faults.made) == 2
        assert set(faults.closed) == set(faults.made)

    within(work())


def test_a_stage_that_cannot_load_gives_its_backend_back(specs: tuple[StageSpec, ...], checkpoint: Checkpoint) -> None:
    async def work() -> None:
        faults = Faults()

        def cannot_load(spec: StageSpec) -> Backend:
            backend = faults(spec)

            def full(_: object) -> None:
                raise MemoryError("no room for this matrix")

            if spec.index == 1:
                backend.load_matrix = full  # type: ignore[method-assign, assignment]
            return backend

        pipeline = LocalPipeline(specs, checkpoint, cannot_load)
        with pytest.raises(MemoryError, match="no room for this matrix"):
            await pipeline.start()
        assert faults.closed == [faults.made[1]]
        await pipeline.close()
        assert set(faults.closed) == set(faults.made)

    within(work())


def test_close_with_steps_in_flight(specs: tuple[StageSpec, ...], checkpoint: Checkpoint) -> None:
    let_go = threading.Event()

    async def work() -> None:
        faults = Faults()
        pipeline = LocalPipeline(specs, checkpoint, faults)
        await pipeline.start()
        replay = faults.made[0].replay

        def held(key: object, issue: Callable[[], None]) -> None:
            assert let_go.wait(240)
            replay(key, issue)

        faults.made[0].replay = held  # type: ignore[method-assign]
        await pipeline.submit(chunk(0, (1, 2, 3)))
        for step in range(1, 8):
            await pipeline.submit(chunk(step, (4,), step + 2))
        waiting = asyncio.create_task(pipeline.result())
        await asyncio.sleep(0)
        closing = asyncio.create_task(pipeline.close())
        while pipeline._results:
            await asyncio.sleep(0)
        let_go.set()
        await closing
        await pipeline.close()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(faults.closed) == 3
        assert faults.steps[0] == 0

    within(work())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardline-stages")]


class Held:
    """A backend factory: a step waits until it is let go, one at a time if so many were allowed."""

    def __init__(self, allowed: int = 0) -> None:
        self.go = threading.Semaphore(allowed)

    def __call__(self, spec: StageSpec) -> Backend:
        backend: Any = backend_for(spec)
        replay = backend.replay

        def held(key: object, issue: Callable[[], None]) -> None:
            if spec.index == 1:
                assert self.go.acquire(timeout=240)
            replay(key, issue)

        backend.replay = held
        return backend


def test_a_step_that_hangs_is_found_by_the_deadline_and_holds_nobody_up(
    specs: tuple[StageSpec, ...], checkpoint: Checkpoint
) -> None:
    async def work() -> None:
        held = Held(allowed=1)
        # The first step is done, whatever it has to compile; the second hangs.
        pipeline = LocalPipeline(specs, checkpoint, held, step_seconds=240)
        await pipeline.start()
        await pipeline.submit(chunk(7, (1, 2, 3)))
        await pipeline.result()
        pipeline._step_seconds = 0.5
        await pipeline.submit(chunk(8, (4,), 3))
        await pipeline.submit(chunk(9, (5,), 4))
        for _ in range(2):
            with pytest.raises(StageLostError, match=r"been computing step 8 for 0\.5 s") as caught:
                await pipeline.result()
            assert caught.value.stage == 1
        with pytest.raises(StageLostError, match="been computing step 8"):
            await pipeline.submit(chunk(10, (6,), 5))
        with pytest.raises(
            EngineDeadError, match=r"stage 1 was lost: it has been computing step 8 .* start the program"
        ):
            await pipeline.recover()
        pipeline._step_seconds = 10_000
        await pipeline.close()
        held.go.release(9)

    within(work())


def test_a_close_waits_no_longer_than_a_step_may_take(specs: tuple[StageSpec, ...], checkpoint: Checkpoint) -> None:
    async def work() -> None:
        held = Held()
        pipeline = LocalPipeline(specs, checkpoint, held, step_seconds=0.5)
        await pipeline.start()
        await pipeline.submit(chunk(0, (1, 2, 3)))
        await pipeline.close()
        held.go.release(9)

    within(work())


def test_steps_that_take_their_time_are_not_taken_to_hang(specs: tuple[StageSpec, ...], checkpoint: Checkpoint) -> None:
    async def work() -> None:
        held = Held(allowed=1)
        pipeline = LocalPipeline(specs, checkpoint, held, step_seconds=240)
        await pipeline.start()
        await pipeline.submit(chunk(0, (1, 2, 3)))
        await pipeline.result()
        pipeline._step_seconds = 3.0
        for step in range(1, 4):
            await pipeline.submit(chunk(step, (4,), step + 2))
        for step in range(1, 4):
            asyncio.get_running_loop().call_later(1.2, held.go.release)
            assert (await pipeline.result()).step_id == step
        await pipeline.close()

    within(work())


def test_an_engine_whose_step_hangs_ends_its_streams_and_lets_the_program_end(smollm2: Path) -> None:
    program = f"""
import sys, threading
from shardline import Client, SamplingParams
from shardline.cluster import EngineDeadError
from shardline.cluster import stage_thread
from shardline.cluster.build import EngineOptions, build_engine, prepare

# Nobody waits for what hangs, so it does not matter how long.
stage_thread.EXIT_SECONDS = 10_000
engine = build_engine(prepare(EngineOptions(model={str(smollm2)!r}, context=64)), in_process=True)
client = Client.over(lambda: engine)
client.submit("Once", SamplingParams(max_tokens=4, ignore_eos=True)).result()
pipeline = engine._pipeline
pipeline._step_seconds = 0.5
pipeline._slots[0].stage.begin = lambda plan, hidden: threading.Event().wait()
try:
    client.submit("Once", SamplingParams(max_tokens=4)).result()
except EngineDeadError as error:
    sys.stdout.write(str(error))
client.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stage 0 was lost: it has been computing step" in done.stdout


def test_a_close_that_is_cancelled_still_gives_everything_back(
    specs: tuple[StageSpec, ...], checkpoint: Checkpoint
) -> None:
    async def work() -> None:
        faults = Faults()
        pipeline = LocalPipeline(specs, checkpoint, faults)
        await pipeline.start()
        await pipeline.submit(chunk(0, (1, 2, 3)))
        first = asyncio.create_task(pipeline.close())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await pipeline.close()
        assert len(faults.closed) == 3

    within(work())


def test_stats_count_steps_rows_bytes_and_time(specs: tuple[StageSpec, ...], checkpoint: Checkpoint) -> None:
    async def work() -> None:
        pipeline = LocalPipeline(specs, checkpoint)
        await pipeline.start()
        assert [stage.steps for stage in await pipeline.stats()] == [0, 0, 0]
        await pipeline.submit(chunk(0, (1, 2, 3)))
        await pipeline.submit(chunk(1, (4,), 3))
        await pipeline.result()
        await pipeline.result()
        for stage, spec in zip(await pipeline.stats(), specs, strict=True):
            assert (stage.spec, stage.steps, stage.rows) == (spec, 2, 4)
            assert 0 < stage.busy_seconds < stage.wall_seconds
            assert stage.resident_bytes > 2_000_000 * spec.num_layers
        await pipeline.close()

    within(work())


@pytest.mark.parametrize("split", [(), (30, 1), (29,), (31, -1)])
def test_a_split_that_does_not_add_up_is_refused(checkpoint: Checkpoint, split: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameterError, match="30"):
        stage_specs(
            checkpoint.spec,
            split,
            num_blocks=8,
            block_size=16,
            kv_dtype="float16",
            max_step_tokens=64,
            max_sequences=8,
            max_context=64,
            num_threads=1,
        )


def test_streams_over_a_loss_have_the_bytes_of_undisturbed_ones(
    specs: tuple[StageSpec, ...], checkpoint: Checkpoint
) -> None:
    """Eight real streams, greedy and seeded; a stage is lost at several moments, among them twice in one run."""
    text = ModelText.from_checkpoint(checkpoint)
    prompts = [f"{i}. A question about {word}:" for i, word in enumerate(("rain", "iron", "sums", "cats") * 2)]
    requests = [
        Request(
            text=prompt,
            params=SamplingParams(
                max_tokens=8, temperature=0.9 * (i % 2), seed=i, logprobs=2, repetition_penalty=1.0 + 0.1 * (i % 3)
            ),
        )
        for i, prompt in enumerate(prompts)
    ]

    async def run(fail_at: set[tuple[int, int]]) -> list[tuple[str, tuple[int, ...], str]]:
        faults = Faults()
        pipeline = LocalPipeline(specs, checkpoint, faults)
        limits = SchedulerConfig(
            num_blocks=64,
            block_size=16,
            max_context=256,
            depth=4,
            max_step_tokens=64,
            prefill_chunk=16,
            max_sequences=8,
        )
        engine = Engine(pipeline, ModelText(text.tokenizer, text.template), limits)
        await engine.start()
        faults.fail_at = set(fail_at)

        async def one(request: Request) -> Delta:
            return merge([delta async for delta in engine.generate(request)])

        wholes = await asyncio.gather(*map(one, requests))
        assert not faults.fail_at, "every planned fault must have happened"
        engine._scheduler.check_integrity()
        status = await engine.status()
        assert status.losses == len(fail_at)
        await engine.close()
        return [(whole.text, whole.token_ids, repr(whole.logprobs)) for whole in wholes]

    async def work() -> None:
        undisturbed = await run(set())
        for fail_at in ({(0, 3)}, {(1, 6)}, {(2, 9)}, {(2, 3), (0, 9)}):
            assert await run(fail_at) == undisturbed

    within(work())
