"""Stages on GPUs over Ray, with GPUs that only Ray believes in: who gets which, who shares one, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from shardline.cluster import PlanningError, StageLostError
from shardline.cluster.gpus import CudaFinder, GpuReport, gpus_of
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import StagePlacement, connected, describe_cluster
from shardline.cluster.stage_actor import start_ticks
from shardline.cluster.stage_fleet import RayPipelineConfig
from shardline.cluster.stage_loading import LoadedStage, ModelIdentity
from shardline.kernels import CudaDevice, DeviceUnavailableError
from shardline.scheduler.plan import SampledToken, SequenceRun, StepPlan, StepResult
from shardline.stage import StageSpec
from shardline.stage.stage import DoneStep, StepOutput

pytestmark = pytest.mark.ray

# The workers cannot import this file: what it defines goes to them by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

HIDDEN = 8
NUM_GPUS = 4
GIB = 2**30


def bus(index: int) -> str:
    return f"0000:0{index}:00.0"


@dataclass(frozen=True)
class PretendFinder:
    """What the driver would say on a machine with four unequal cards, to a process with that CUDA_VISIBLE_DEVICES.

    Attributes:
        folder: free_bytes: what is free, read from the file "free" there; each question is a line of "asked".
    """

    folder: Path | None = None
    broken: bool = False

    def _numbers(self) -> list[int]:
        if self.broken:
            raise DeviceUnavailableError("no GPU can be used: the driver is too old")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return list(range(NUM_GPUS)) if visible is None else [int(part) for part in visible.split(",")]

    def look(self) -> GpuReport:
        return GpuReport(
            tuple(
                CudaDevice(place, f"card {os.getpid()}", 80 + number, number * GIB, 99 * GIB, 1e11, 10, bus(number))
                for place, number in enumerate(self._numbers())
            )
        )

    def held(self) -> str:
        return bus(self._numbers()[0])

    def free_bytes(self) -> int:
        if self.folder is None:
            return 99 * GIB
        with (self.folder / "asked").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return int((self.folder / "free").read_text())


@dataclass
class Pretend:
    """A stage whose token tells, digit by digit, which GPU each stage before it computed on."""

    spec: StageSpec

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> DoneStep:
        if hidden is None:
            hidden = np.zeros((plan.num_tokens, HIDDEN), np.float32)
        hidden = hidden * 10 + int(os.environ["CUDA_VISIBLE_DEVICES"]) + 1
        if not self.spec.has_head:
            return DoneStep(StepOutput(hidden, None))
        return DoneStep(StepOutput(None, StepResult(plan.step_id, (SampledToken(0, int(hidden[0, 0])),))))

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Loader:
    """Loads them."""

    def identity(self) -> ModelIdentity:
        return ModelIdentity("same", HIDDEN, 10**6)

    def load(self, spec: StageSpec) -> LoadedStage:
        kind = "cuda 8" if int(os.environ["CUDA_VISIBLE_DEVICES"]) < 2 else "cuda 16"
        return LoadedStage(Pretend(spec), self.identity(), "pretend", lambda: 1, kind)


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with connected(num_cpus=2, num_gpus=NUM_GPUS):
        yield


def pipeline_on(*gpus: int, finder: PretendFinder | None = None, **config: float) -> RayPipeline:
    last = len(gpus) - 1
    specs = [
        StageSpec(i, i, i + 1, i == 0, i == last, 8, 8, "float16", 64, 8, 100, 1, "cuda:0", memory_bytes=GIB)
        for i in range(len(gpus))
    ]
    places = [StagePlacement(gpu=bus(gpu)) for gpu in gpus]
    return RayPipeline(specs, Loader(), places, RayPipelineConfig(**config), finder or PretendFinder())


def groups() -> int:
    return sum(group["state"] == "CREATED" for group in placement_group_table().values())


def run_with(pipeline: RayPipeline, work: Callable[[RayPipeline], Awaitable[None]]) -> None:
    """Start, do the work, close; nothing is left, and Ray has all its GPUs again."""

    async def run() -> None:
        try:
            await pipeline.start()
            async with asyncio.timeout(240):
                await work(pipeline)
        finally:
            await pipeline.close()

    try:
        asyncio.run(run())
    finally:
        assert groups() == 0
        wait_until(lambda: free_gpus() == NUM_GPUS, "Ray has its GPUs back")


async def nothing(pipeline: RayPipeline) -> None:
    pass


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0.0))


async def computed_on(pipeline: RayPipeline, step_id: int = 0) -> list[int]:
    """Which GPU each stage saw in a step."""
    await pipeline.submit(StepPlan(step_id, (), (), (SequenceRun(0, 0, (1, 2), (), True),)))
    (token,) = (await pipeline.result()).tokens
    return [int(digit) - 1 for digit in str(token.token_id)]


@pytest.mark.parametrize("gpus", [(2, 0), (3, 1, 2), (1,), (3, 2, 1, 0)])
def test_a_stage_gets_the_gpu_that_was_planned_for_it(gpus: tuple[int, ...]) -> None:
    async def work(pipeline: RayPipeline) -> None:
        assert await computed_on(pipeline) == list(gpus)
        stats = await pipeline.stats()
        assert [stage.where.split(" ", 1)[1] for stage in stats] == [f"GPU {gpu}" for gpu in gpus]
        assert [stage.numeric_class for stage in stats] == ["cuda 8" if gpu < 2 else "cuda 16" for gpu in gpus]
        # Those that were looked at and not wanted are others' again.
        wait_until(lambda: free_gpus() == NUM_GPUS - len(gpus), "the other GPUs are free")

    run_with(pipeline_on(*gpus), work)


@pytest.mark.parametrize("gpus", [(1, 1, 1), (2, 2, 0), (3, 3, 3, 0, 0)])
def test_stages_share_a_gpu_and_ray_counts_it_once(gpus: tuple[int, ...]) -> None:
    async def work(pipeline: RayPipeline) -> None:
        assert await computed_on(pipeline) == list(gpus)
        assert len({stage.pid for stage in await pipeline.stats()}) == len(gpus)
        wait_until(lambda: free_gpus() == NUM_GPUS - len(set(gpus)), "the other GPUs are free")

    run_with(pipeline_on(*gpus), work)


def test_a_gpu_that_another_job_has_is_not_touched() -> None:
    # Whichever card these get, one of the two that are wanted is among them.
    group = placement_group([{"GPU": 3}])
    assert group.wait(30)
    try:
        with pytest.raises(PlanningError, match=r"does not give the GPU 0000:0\d:00\.0 of node .*another job"):
            asyncio.run(pipeline_on(0, 1, placement_seconds=0.5).start())
        wait_until(lambda: groups() == 1, "only the other job's group is left")
    finally:
        remove_placement_group(group)
    wait_until(lambda: free_gpus() == NUM_GPUS, "Ray has its GPUs back")


def test_a_gpu_that_cannot_be_used_is_told_in_the_drivers_words() -> None:
    with pytest.raises(PlanningError, match=r"a GPU that Ray gave cannot be used: .*the driver is too old"):
        run_with(pipeline_on(0, finder=PretendFinder(broken=True)), nothing)


def test_a_stage_whose_gpu_is_another_one_after_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_on(1)

    async def wrong(wanted: object, finder: object, timeout: float) -> object:
        return {key: group for (key, _), group in zip(held.items(), reversed(held.values()), strict=True)}

    from shardline.cluster import stage_fleet
    from shardline.cluster.gpu_bundles import hold_gpus

    (node,) = describe_cluster()
    held = {}

    async def start() -> None:
        held.update(await hold_gpus([(node.node_id, bus(0)), (node.node_id, bus(1))], PretendFinder(), 30))
        monkeypatch.setattr(stage_fleet, "hold_gpus", wrong)
        await pipeline.start()

    with pytest.raises(StageLostError, match=r"it has the GPU 0000:00:00\.0, and 0000:01:00\.0 is planned for it"):
        asyncio.run(start())
    wait_until(lambda: free_gpus() == NUM_GPUS, "Ray has its GPUs back")


@pytest.mark.parametrize("gpus", [(2, 1), (1, 1)])
def test_a_killed_stage_comes_back_on_its_own_gpu_once_the_memory_has(gpus: tuple[int, ...], tmp_path: Path) -> None:
    free, asked = tmp_path / "free", tmp_path / "asked"
    free.write_text(str(99 * GIB))

    async def work(pipeline: RayPipeline) -> None:
        assert await computed_on(pipeline) == list(gpus)
        before = [stage.pid for stage in await pipeline.stats()]
        # Of what the old process had, nothing has come back yet.
        free.write_text(str(GIB // 2))
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(StageLostError, match="stage 1"):
            await pipeline.result()
        recovery = asyncio.create_task(pipeline.recover())
        known = {str(pid) for pid in before}
        while len([line for line in asked.read_text().split() if line not in known]) < 5:
            assert not recovery.done(), "it was loaded beside what the old process still has"
            await asyncio.sleep(0.01)
        assert start_ticks(before[1]) is None
        free.write_text(str(GIB))
        await recovery
        after = [stage.pid for stage in await pipeline.stats()]
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert await computed_on(pipeline, 100) == list(gpus)

    run_with(pipeline_on(*gpus, finder=PretendFinder(tmp_path)), work)


def test_a_look_sees_every_gpu_also_those_in_use_and_its_process_ends() -> None:
    async def work(pipeline: RayPipeline) -> None:
        (node,) = describe_cluster()
        found = gpus_of([node, replace(node, gpus=0.0, node_id="none")], PretendFinder())
        assert [gpu.card.bus_id for gpu in found] == [bus(number) for number in range(NUM_GPUS)]
        assert {(gpu.node, gpu.is_here) for gpu in found} == {(node.node_id, True)}
        pid = int(found[0].card.name.split()[1])
        # A context would stay on every card for as long as its process lives.
        wait_until(lambda: start_ticks(pid) is None, "the process that looked is gone")

    run_with(pipeline_on(0, 1, 2, 3), work)


def test_nodes_without_a_gpu_or_a_driver_are_named() -> None:
    (node,) = describe_cluster()
    bare = replace(node, host="bare", gpus=0.0)
    with pytest.raises(
        PlanningError, match=r"no node has a GPU that can be used \(.*too old; bare: Ray has no GPU there\)"
    ):
        gpus_of([node, bare], PretendFinder(broken=True))


def test_without_a_driver_the_real_finder_says_what_is_missing() -> None:
    report = CudaFinder().look()
    if report.devices:
        pytest.skip("there is a GPU here")
    assert "cupy" in report.problem or "nvidia-smi" in report.problem
