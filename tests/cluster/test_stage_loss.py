"""Losing stages of the real model while eight requests stream: the same bytes, and the other processes untouched."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from shardline.cluster import DeadlyRequestError, Engine, Request
from shardline.cluster.engine import EngineStatus
from shardline.cluster.local_pipeline import LocalPipeline, stage_specs
from shardline.cluster.pipeline import Pipeline
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import connected
from shardline.cluster.stage_fleet import RayPipelineConfig
from shardline.cluster.stage_loading import CheckpointLoader, LoadedStage
from shardline.cluster.text.model_text import ModelText
from shardline.cluster.wire.stage_worker import StageRunner
from shardline.scheduler import SamplingParams, SchedulerConfig, StepPlan
from shardline.stage import ModelSpec, StageSpec, open_checkpoint
from shardline.stage.stage import PendingStep

pytestmark = pytest.mark.ray

# The workers cannot import this file: what it defines goes to them by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPLIT = (2, 17, 11)
TOKENS = 20
POEM = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate. "
PROMPTS = (
    "The capital of France is",
    POEM * 4,
    "def fibonacci(n):",
    "שלום עולם",
    "Once upon a time",
    POEM,
    "1, 1, 2, 3, 5, 8,",
    "The three laws of robotics are",
)

Bytes = list[tuple[tuple[int, ...], tuple[object, ...], str, str | None]]
"""Of each request: token ids, logprobs, text, finish reason."""


def requests() -> list[Request]:
    # Half of them greedy, half drawn, one with penalties that need its history; all with logprobs.
    return [
        Request(
            text=prompt,
            params=SamplingParams(
                max_tokens=TOKENS,
                ignore_eos=True,
                logprobs=2,
                seed=index,
                temperature=0.0 if index % 2 else 0.9,
                frequency_penalty=0.5 if index == 2 else 0.0,
            ),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def specs_of(model: ModelSpec, split: tuple[int, ...]) -> tuple[StageSpec, ...]:
    return stage_specs(
        model,
        split,
        num_blocks=128,
        block_size=16,
        kv_dtype="float16",
        max_step_tokens=64,
        max_sequences=16,
        max_context=256,
        num_threads=1,
    )


def engine_of(path: Path, pipeline: Pipeline, depth: int) -> Engine:
    checkpoint = open_checkpoint(path)
    try:
        text = ModelText.from_checkpoint(checkpoint)
    finally:
        checkpoint.close()
    config = SchedulerConfig(
        num_blocks=128,
        block_size=16,
        max_context=256,
        depth=depth,
        max_step_tokens=64,
        prefill_chunk=32,
        max_sequences=16,
        vocab_size=pipeline.vocab_size,
    )
    return Engine(pipeline, text, config)


async def stream(engine: Engine, on_token: Callable[[int], None] = lambda count: None) -> Bytes:
    """All requests at once; `on_token` is told how many tokens there are so far, over all of them."""
    count = 0

    async def one(request: Request) -> tuple[tuple[int, ...], tuple[object, ...], str, str | None]:
        nonlocal count
        ids: tuple[int, ...] = ()
        logprobs: tuple[object, ...] = ()
        text, finish = "", None
        async for delta in engine.generate(request):
            ids += delta.token_ids
            logprobs += delta.logprobs
            text += delta.text
            finish = delta.finish_reason or finish
            for _ in delta.token_ids:
                count += 1
                on_token(count)
        return ids, logprobs, text, finish

    return list(await asyncio.gather(*(one(request) for request in requests())))


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with connected(num_cpus=4):
        yield


@pytest.fixture(scope="module")
def undisturbed(smollm2: Path) -> Bytes:
    """From one stage in this process: another split, another transport, no loss."""

    async def run() -> Bytes:
        checkpoint = open_checkpoint(smollm2)
        specs = specs_of(checkpoint.spec, (30,))
        engine = engine_of(smollm2, LocalPipeline(specs, checkpoint), depth=1)
        try:
            await engine.start()
            return await stream(engine)
        finally:
            await engine.close()
            checkpoint.close()

    result = asyncio.run(run())
    assert all(len(ids) == TOKENS and len(logprobs) == TOKENS for ids, logprobs, _, _ in result)
    return result


def pipeline_of(path: Path, loader: CheckpointLoader | None = None, **config: float) -> RayPipeline:
    checkpoint = open_checkpoint(path)
    specs = specs_of(checkpoint.spec, SPLIT)
    checkpoint.close()
    return RayPipeline(specs, loader or path, config=RayPipelineConfig(**config))


def run_with(pipeline: RayPipeline, path: Path, work: Callable[[Engine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = engine_of(path, pipeline, depth=len(SPLIT) + 2)
        try:
            await engine.start()
            async with asyncio.timeout(240):
                await work(engine)
        finally:
            await engine.close()

    asyncio.run(run())


async def after_losses(engine: Engine, losses: int) -> EngineStatus:
    """Wait until the engine knows of that many losses and has brought the stages back. What was on its way behind a
    lost stage may have been enough for the streams to end before it did."""
    while (status := await engine.status()).losses < losses or status.state != "ready":
        await asyncio.sleep(0.01)
    assert status.losses == losses
    return status


async def pids(engine: Engine) -> list[int]:
    stages = (await engine.status()).stages
    assert len(stages) == len(SPLIT)
    return [stage.pid for stage in stages]


def test_any_stage_killed_at_any_time(ray_cluster: None, smollm2: Path, undisturbed: Bytes) -> None:
    """One engine goes through it all: each stage alone, two at once, and the same one again, early and late."""

    async def work(engine: Engine) -> None:
        assert await stream(engine) == undisturbed
        # Of 160 tokens; the last kill early enough that some of them need the fresh stage.
        rounds = (((1,), 40), ((1,), 120), ((0,), 9), ((0, 2), 80))
        for losses, (victims, when) in enumerate(rounds, start=1):
            before = await pids(engine)

            def kill(count: int, victims=victims, when=when, before=before) -> None:
                if count == when:
                    for victim in victims:
                        os.kill(before[victim], signal.SIGKILL)

            assert await stream(engine, kill) == undisturbed, f"stages {victims} killed after {when} tokens"
            status = await after_losses(engine, losses)
            after = await pids(engine)
            for stage in range(len(SPLIT)):
                assert (after[stage] == before[stage]) == (stage not in victims)
            assert all(step.steps > 0 for step in status.stages)

        # And one while nothing runs: it is there again before anyone asks.
        before = await pids(engine)
        os.kill(before[1], signal.SIGKILL)
        await after_losses(engine, len(rounds) + 1)
        after = await pids(engine)
        assert [after[stage] == before[stage] for stage in range(len(SPLIT))] == [True, False, True]
        assert await stream(engine) == undisturbed

    run_with(pipeline_of(smollm2), smollm2, work)


def test_a_stage_killed_again_while_it_is_brought_back(ray_cluster: None, smollm2: Path, undisturbed: Bytes) -> None:
    pipeline = pipeline_of(smollm2)

    async def work(engine: Engine) -> None:
        before = await pids(engine)
        killed: list[int] = [before[1]]

        async def kill_the_fresh_one() -> None:
            while True:
                await asyncio.sleep(0.001)
                info = pipeline._fleet.processes[1].info
                if info is not None and info.pid != before[1]:
                    os.kill(info.pid, signal.SIGKILL)
                    killed.append(info.pid)
                    return

        again: list[asyncio.Task[None]] = []

        def kill(count: int) -> None:
            if count == 50:
                os.kill(before[1], signal.SIGKILL)
                again.append(asyncio.get_running_loop().create_task(kill_the_fresh_one()))

        assert await stream(engine, kill) == undisturbed
        await again[0]
        # The second kill may have come when the streams had all that they needed.
        while len(stages := (await engine.status()).stages) < len(SPLIT) or stages[1].pid in killed:
            await asyncio.sleep(0.01)
        assert (stages[0].pid, stages[2].pid) == (before[0], before[2])

    run_with(pipeline, smollm2, work)


def test_a_stage_that_hangs_is_found_by_the_deadline(ray_cluster: None, smollm2: Path, undisturbed: Bytes) -> None:
    async def work(engine: Engine) -> None:
        before = await pids(engine)

        def stop(count: int) -> None:
            if count == 50:
                os.kill(before[1], signal.SIGSTOP)

        assert await stream(engine, stop) == undisturbed
        after = await pids(engine)
        assert after[1] != before[1]
        assert (after[0], after[2]) == (before[0], before[2])
        with pytest.raises(ProcessLookupError):
            os.kill(before[1], 0)

    run_with(pipeline_of(smollm2, step_seconds=5.0), smollm2, work)


DEADLY_TOKEN = 31_337


@dataclass(frozen=True)
class DeadlyLoader(CheckpointLoader):
    """Stage 1 dies of a certain token."""

    def load(self, spec: StageSpec) -> LoadedStage:
        loaded = super().load(spec)
        return replace(loaded, runner=Deadly(loaded.runner)) if spec.index == 1 else loaded


@dataclass
class Deadly:
    """A stage that dies when it is told of the token."""

    stage: StageRunner

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> PendingStep:
        if any(DEADLY_TOKEN in start.token_ids for start in plan.starts):
            os.write(2, b"an odd shape: the device fell off the bus\n")
            os._exit(17)
        return self.stage.begin(plan, hidden)

    def reset(self) -> None:
        self.stage.reset()

    def close(self) -> None:
        self.stage.close()


def test_a_request_that_kills_its_stage_each_time_ends_and_the_others_have_their_bytes(
    ray_cluster: None, smollm2: Path, undisturbed: Bytes
) -> None:
    async def work(engine: Engine) -> None:
        deadly: list[asyncio.Task[None]] = []

        async def kill() -> None:
            async for _ in engine.generate(Request(token_ids=(1, DEADLY_TOKEN, 2))):
                pass

        def on_token(count: int) -> None:
            if count == 50:
                deadly.append(asyncio.get_running_loop().create_task(kill()))

        assert await stream(engine, on_token) == undisturbed
        with pytest.raises(DeadlyRequestError, match=r"(?s)stage 1 was lost.*the device fell off the bus"):
            await deadly[0]
        status = await after_losses(engine, 4)
        assert (status.requests, status.scheduler.blocks_used) == (0, 0)
        assert await stream(engine) == undisturbed

    run_with(pipeline_of(smollm2, DeadlyLoader(smollm2)), smollm2, work)
