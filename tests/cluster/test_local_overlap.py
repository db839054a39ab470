"""The in-process pipeline on a device that computes while the host goes on: the real model, whose tokens arrive when
the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster import EngineDeadError, StageLostError
from shardline.cluster.local_pipeline import LocalPipeline, stage_specs
from shardline.kernels import Backend
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan, StepResult
from shardline.stage import Checkpoint, PlanError, StageSpec, backend_for, open_checkpoint
from shardline.stage.stage import MAX_BEGUN


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Iterator[Checkpoint]:
    opened = open_checkpoint(smollm2)
    yield opened
    opened.close()


def specs(checkpoint: Checkpoint, *split: int) -> tuple[StageSpec, ...]:
    return stage_specs(
        checkpoint.spec,
        split or (30,),
        num_blocks=64,
        block_size=16,
        kv_dtype="float16",
        max_step_tokens=64,
        max_sequences=16,
        max_context=256,
        num_threads=2,
    )


class LateTokens:
    """A backend's `Pending` that arrives when `go` is set, with an error if it has one."""

    def __init__(self, device: Device, pending: Any) -> None:
        self.device, self.pending = device, pending
        self.go = threading.Event()
        self.error: Exception | None = None
        self.waiter = ""

    @property
    def ready(self) -> bool:
        return self.go.is_set()

    def wait(self) -> Any:
        self.waiter = threading.current_thread().name
        assert self.go.wait(60)
        if self.device.waiting[0] is not self:
            self.device.wrong.append("waited for out of order")
        self.device.waiting.remove(self)
        if self.error is not None:
            raise self.error
        return self.pending.wait()


class Device:
    """A backend factory.

    Attributes:
        steps: Every step's tokens that were begun.
        waiting: Those that nobody has waited for to the end.
        closed: How many backends were closed.
        wrong: What must not happen.
    """

    def __init__(self) -> None:
        self.steps: list[LateTokens] = []
        self.waiting: list[LateTokens] = []
        self.made: list[Backend] = []
        self.closed: list[Backend] = []
        self.wrong: list[str] = []
        self.at_once = False

    def __call__(self, spec: StageSpec) -> Backend:
        if self.waiting:
            self.wrong.append("a stage is loaded while a step runs")
        backend: Any = backend_for(spec)
        sample_later, close = backend.sample_later, backend.close

        def late(*arguments: Any) -> LateTokens:
            step = LateTokens(self, sample_later(*arguments))
            if self.at_once:
                step.go.set()
            self.waiting.append(step)
            self.steps.append(step)
            if len(self.waiting) > MAX_BEGUN:
                self.wrong.append(f"{len(self.waiting)} steps at once")
            return step

        def closing() -> None:
            if spec.has_head and self.waiting:
                self.wrong.append("closed while a step runs")
            if backend not in self.closed:
                self.closed.append(backend)
            close()

        backend.sample_later, backend.close = late, closing
        self.made.append(backend)
        return backend

    async def step(self, number: int) -> LateTokens:
        """The step of that number, once it has been begun."""
        while len(self.steps) <= number:
            await asyncio.sleep(0.001)
        return self.steps[number]


def chunk(step: int, seq_id: int, position: int = 0) -> StepPlan:
    """A plan that runs a prompt of three tokens, or one token behind it."""
    tokens = (1, 2, 3 + seq_id) if position == 0 else (7,)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.2, logprobs=2, seed=seq_id)
    starts = () if position else (SequenceStart(seq_id, params, 3, tokens, ()),)
    blocks = () if position else (seq_id,)
    return StepPlan(step, (), starts, (SequenceRun(seq_id, position, tokens, blocks, samples=True),))


PLANS = [chunk(0, 0), chunk(1, 1), chunk(2, 0, 3), chunk(3, 1, 3), chunk(4, 0, 4), chunk(5, 1, 4)]
"""Two sequences in turn."""


def within(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardline-stages")]


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> list[StepResult]:
    """The results of PLANS, each submitted when the one before has come; and no thread is there to wait for them."""
    results = []

    async def work() -> None:
        pipeline = LocalPipeline(specs(checkpoint), checkpoint)
        await pipeline.start()
        for plan in PLANS:
            await pipeline.submit(plan)
            results.append(await pipeline.result())
        assert pipeline._finisher is None
        await pipeline.close()

    within(work())
    return results


@pytest.mark.parametrize("split", [(30,), (11, 19)])
def test_a_plan_is_begun_while_the_one_before_runs(
    checkpoint: Checkpoint, alone: list[StepResult], split: tuple[int, ...]
) -> None:
    async def work() -> None:
        device = Device()
        pipeline = LocalPipeline(specs(checkpoint, *split), checkpoint, device)
        await pipeline.start()
        for plan in PLANS:
            await pipeline.submit(plan)
        for number in range(0, len(PLANS), 2):
            first, second = await device.step(number), await device.step(number + 1)
            assert len(device.steps) == number + 2
            second.go.set()
            assert not pipeline._results[0].done()
            first.go.set()
            assert [await pipeline.result(), await pipeline.result()] == alone[number : number + 2]
            assert first.waiter == "shardline-stages-finish"
        stats = await pipeline.stats()
        assert [(stage.steps, stage.rows) for stage in stats] == [(6, 10)] * len(split)
        assert all(0 < stage.busy_seconds <= stage.wall_seconds for stage in stats)
        await pipeline.close()
        assert device.wrong == []

    within(work())


def test_a_step_that_is_done_at_once_waits_its_turn(checkpoint: Checkpoint, alone: list[StepResult]) -> None:
    async def work() -> None:
        device = Device()
        pipeline = LocalPipeline(specs(checkpoint), checkpoint, device)
        await pipeline.start()
        await pipeline.submit(PLANS[0])
        first = await device.step(0)
        device.at_once = True
        await pipeline.submit(PLANS[1])
        await device.step(1)
        first.go.set()
        assert [await pipeline.result(), await pipeline.result()] == alone[:2]
        await pipeline.close()
        assert device.wrong == []

    within(work())


def test_a_step_that_fails_late_takes_the_stage_and_those_behind_it_along(
    checkpoint: Checkpoint, alone: list[StepResult]
) -> None:
    async def work() -> None:
        device = Device()
        pipeline = LocalPipeline(specs(checkpoint, 11, 19), checkpoint, device)
        await pipeline.start()
        for plan in PLANS[:4]:
            await pipeline.submit(plan)
        failing, behind = await device.step(0), await device.step(1)
        failing.error = RuntimeError("the device has gone")
        failing.go.set()
        with pytest.raises(StageLostError, match="the device has gone") as caught:
            await pipeline.result()
        assert caught.value.stage == 1
        assert len(await pipeline.stats()) == 1
        with pytest.raises(StageLostError, match="the device has gone"):
            await pipeline.submit(PLANS[4])
        recovering = asyncio.create_task(pipeline.recover())
        await asyncio.sleep(0.01)
        # The stage is held by a step that nobody wants any more.
        assert device.closed == []
        behind.go.set()
        await recovering
        assert device.closed == [device.made[1]]
        assert len(device.made) == 3
        assert len(device.steps) == 2
        for plan in PLANS[:2]:
            await pipeline.submit(plan)
        for number in (2, 3):
            (await device.step(number)).go.set()
        assert [await pipeline.result(), await pipeline.result()] == alone[:2]
        await pipeline.close()
        assert device.wrong == []
        assert set(device.closed) == set(device.made)

    within(work())


def test_all_that_were_begun_behind_a_failed_step_fail(checkpoint: Checkpoint) -> None:
    async def work() -> None:
        device = Device()
        pipeline = LocalPipeline(specs(checkpoint), checkpoint, device)
        await pipeline.start()
        for plan in PLANS[:3]:
            await pipeline.submit(plan)
        failing, behind = await device.step(0), await device.step(1)
        behind.go.set()
        failing.error = RuntimeError("the device has gone")
        failing.go.set()
        for _ in range(3):
            with pytest.raises(StageLostError, match="the device has gone"):
                await pipeline.result()
        await pipeline.close()
        assert device.wrong == []

    within(work())


def test_a_plan_that_cannot_begin_leaves_the_one_before_its_result(
    checkpoint: Checkpoint, alone: list[StepResult]
) -> None:
    async def work() -> None:
        device = Device()
        pipeline = LocalPipeline(specs(checkpoint), checkpoint, device)
        await pipeline.start()
        await pipeline.submit(PLANS[0])
        await pipeline.submit(chunk(1, 5, 3))
        (await device.step(0)).go.set()
        assert await pipeline.result() == alone[0]
        with pytest.raises(StageLostError, match="sequence 5, which is not known") as caught:
            await pipeline.result()
        assert isinstance(caught.value.__cause__, PlanError)
        await pipeline.recover()
        await pipeline.close()
        assert device.wrong == []

    within(work())


def test_a_recovery_waits_for_steps_that_were_begun(checkpoint: Checkpoint, alone: list[StepResult]) -> None:
    """Of the last stage, when another one is lost: it is not reset while it computes."""

    async def work() -> None:
        device = Device()
        pipeline = LocalPipeline(specs(checkpoint, 11, 19), checkpoint, device)
        await pipeline.start()
        await pipeline.submit(PLANS[0])
        first = await device.step(0)
        await pipeline.submit(chunk(1, 5, 3))
        recovering = asyncio.create_task(pipeline.recover())
        while pipeline._slots[0] is not None:
            await asyncio.sleep(0.001)
        # Long enough to be seen by `Device` if it did not wait.
        await asyncio.sleep(0.05)
        assert not recovering.done()
        first.go.set()
        await recovering
        assert device.closed == [device.made[0]]
        await pipeline.submit(PLANS[0])
        (await device.step(1)).go.set()
        assert await pipeline.result() == alone[0]
        await pipeline.close()
        assert device.wrong == []

    within(work())


def test_a_close_waits_for_the_steps_that_run_and_drops_the_others(checkpoint: Checkpoint) -> None:
    async def work() -> None:
        device = Device()
        pipeline = LocalPipeline(specs(checkpoint), checkpoint, device)
        await pipeline.start()
        for plan in PLANS:
            await pipeline.submit(plan)
        steps = [await device.step(0), await device.step(1)]
        closing = asyncio.create_task(pipeline.close())
        while pipeline._results:
            await asyncio.sleep(0)
        assert device.closed == []
        for step in reversed(steps):
            step.go.set()
        await closing
        assert len(device.closed) == 1
        assert len(device.steps) == 2
        assert device.wrong == []

    within(work())


def test_the_oldest_step_is_the_one_that_hangs(checkpoint: Checkpoint) -> None:
    device = Device()

    async def work() -> None:
        pipeline = LocalPipeline(specs(checkpoint, 11, 19), checkpoint, device, step_seconds=0.5)
        await pipeline.start()
        for plan in PLANS:
            await pipeline.submit(plan)
        await device.step(1)
        for _ in range(2):
            with pytest.raises(StageLostError, match=r"been computing step 0 for 0\.5 s") as caught:
                await pipeline.result()
            assert caught.value.stage == 1
        with pytest.raises(EngineDeadError, match="start the program again"):
            await pipeline.recover()
        await pipeline.close()
        assert device.closed == []

    asyncio.run(work())
    # Both threads were left to themselves; they end when what they wait for does.
    device.at_once = True
    for step in list(device.steps):
        step.go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("shardline-stages"):
            thread.join(60)
            assert not thread.is_alive()
