"""The pipeline over Ray with stages that pretend: starting, refusing, losing, hanging, closing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from ray.util.placement_group import placement_group_table

from shardline.cluster import ModelNotFoundError, PlanningError, StageLostError
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import StagePlacement, connected, describe_cluster
from shardline.cluster.stage_actor import start_ticks
from shardline.cluster.stage_fleet import RayPipelineConfig
from shardline.cluster.stage_loading import CheckpointLoader, LoadedStage, ModelIdentity
from shardline.scheduler.plan import SampledToken, SequenceRun, StepPlan, StepResult
from shardline.stage import CheckpointError, PlanError, StageSpec
from shardline.stage.stage import DoneStep, StepOutput

pytestmark = pytest.mark.ray

HIDDEN = 16
NUM_STAGES = 3
ENGINE_PID = os.getpid()

# The workers cannot import this file: what it defines goes to them by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass
class Pretend:
    """A stage that marks each row; what it does at some steps or while loading is said by its loader."""

    spec: StageSpec
    faults: dict[tuple[int, int], str]

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> DoneStep:
        fault = self.faults.get((self.spec.index, plan.step_id))
        if fault == "raise":
            raise ValueError("an odd device error")
        if fault == "plan":
            raise PlanError("no such block")
        if fault == "segfault":
            import ctypes

            ctypes.string_at(0)
        if fault == "sleep":
            time.sleep(1000)
        if self.spec.has_embed:
            hidden = np.full((plan.num_tokens, HIDDEN), plan.step_id, np.float32)
        assert hidden is not None
        hidden = hidden * 7 + self.spec.index + 1
        if not self.spec.has_head:
            return DoneStep(StepOutput(hidden, None))
        return DoneStep(StepOutput(None, StepResult(plan.step_id, (SampledToken(0, int(hidden[0, 0])),))))

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Loader:
    """Loads pretend stages.

    Attributes:
        faults: What happens in which step of which stage.
        loading: What happens while a stage is loaded.
        elsewhere: The fingerprint that the stages' processes find.
    """

    faults: dict[tuple[int, int], str] = field(default_factory=dict)
    loading: dict[int, str] = field(default_factory=dict)
    elsewhere: str = "same"

    def identity(self) -> ModelIdentity:
        return ModelIdentity("same" if os.getpid() == ENGINE_PID else self.elsewhere, HIDDEN, 10**6)

    def load(self, spec: StageSpec) -> LoadedStage:
        match self.loading.get(spec.index):
            case "raise":
                raise RuntimeError("no room on this device")
            case "checkpoint":
                raise CheckpointError("/models/x.gguf", "blk.3.ffn_up.weight", "is cut short")
            case "die":
                os.write(2, b"CUDA error: the device fell off the bus\n")
                os._exit(17)
        return LoadedStage(Pretend(spec, dict(self.faults)), self.identity(), "pretend", lambda: 4096 + spec.index)


def specs(num_stages: int = NUM_STAGES) -> list[StageSpec]:
    last = num_stages - 1
    return [StageSpec(i, i, i + 1, i == 0, i == last, 8, 8, "float32", 64, 8, 100, 1) for i in range(num_stages)]


def plan_of(step_id: int) -> StepPlan:
    return StepPlan(step_id, (), (), (SequenceRun(0, 0, (1, 2), (), True),))


def token_of(step_id: int) -> int:
    value = step_id
    for index in range(NUM_STAGES):
        value = value * 7 + index + 1
    return value


async def run_steps(pipeline: RayPipeline, steps: range, in_flight: int = NUM_STAGES + 2) -> None:
    submitted = steps.start
    for step_id in steps:
        while submitted < steps.stop and submitted - step_id < in_flight:
            await pipeline.submit(plan_of(submitted))
            submitted += 1
        assert await pipeline.result() == StepResult(step_id, (SampledToken(0, token_of(step_id)),))


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with connected(num_cpus=4):
        yield


def groups() -> int:
    return sum(group["state"] == "CREATED" for group in placement_group_table().values())


def work_with(
    work: Callable[[RayPipeline], Awaitable[None]], loader: Loader | None = None, **config: float
) -> RayPipeline:
    """Start a pipeline, do the work, close it; nothing of it is left, whatever happened."""
    pipeline = RayPipeline(specs(), loader or Loader(), config=RayPipelineConfig(**config))

    async def run() -> None:
        try:
            await pipeline.start()
            async with asyncio.timeout(240):
                await work(pipeline)
        finally:
            await pipeline.close()
            await pipeline.close()

    try:
        asyncio.run(run())
    finally:
        for process in pipeline._fleet.processes:
            assert process.info is None or start_ticks(process.info.pid) != process.info.start_ticks
        assert groups() == 0
    return pipeline


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)


def free_cpus() -> float:
    """What Ray says, which comes a little after what has happened."""
    return float(ray.available_resources().get("CPU", 0.0))


def stop(pid: int) -> None:
    """Stop a process and wait until all of its threads stand still: the signal alone does not say when."""
    os.kill(pid, signal.SIGSTOP)

    def stands_still() -> bool:
        threads = Path(f"/proc/{pid}/task").iterdir()
        return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)

    wait_until(stands_still, "the process stands still")


async def pids(pipeline: RayPipeline) -> list[int]:
    return [stage.pid for stage in await pipeline.stats()]


# -- starting --------------------------------------------------------------------------------------------------------


def test_steps_come_back_in_order_with_figures_of_every_stage():
    async def work(pipeline: RayPipeline) -> None:
        await run_steps(pipeline, range(200))
        stats = await pipeline.stats()
        assert [stage.spec for stage in stats] == specs()
        assert len({stage.pid for stage in stats} | {os.getpid()}) == NUM_STAGES + 1
        for index, stage in enumerate(stats):
            assert (stage.steps, stage.rows) == (200, 400)
            assert stage.resident_bytes == 4096 + index
            assert 0 < stage.busy_seconds < stage.wall_seconds
            assert stage.send_seconds > 0
            assert stage.receive_seconds > 0
            assert stage.where.endswith(" pretend")
            # Ray's default would have every other process of the host go first.
            assert os.getpriority(os.PRIO_PROCESS, stage.pid) == os.getpriority(os.PRIO_PROCESS, 0)

    work_with(work)


def test_a_stage_that_cannot_be_loaded_says_why():
    with pytest.raises(StageLostError, match="stage 1 was lost: RuntimeError: no room on this device") as caught:
        work_with(run_nothing, Loader(loading={1: "raise"}))
    assert caught.value.stage == 1


def test_a_damaged_file_on_a_node_names_file_field_and_node():
    with pytest.raises(CheckpointError, match=r"blk\.3\.ffn_up\.weight: is cut short \(on node .+\)") as caught:
        work_with(run_nothing, Loader(loading={2: "checkpoint"}))
    assert caught.value.path == "/models/x.gguf"


def test_another_file_on_a_node_is_refused():
    with pytest.raises(CheckpointError, match=r"fingerprint: node .+ has another file .* \(other\) than .* \(same\)"):
        work_with(run_nothing, Loader(elsewhere="other"))


@dataclass(frozen=True)
class OnlyHere(CheckpointLoader):
    """A file that the engine's host has and the stages' do not."""

    def identity(self) -> ModelIdentity:
        return Loader().identity() if os.getpid() == ENGINE_PID else super().identity()


def test_a_missing_file_on_a_node_names_the_node():
    with pytest.raises(ModelNotFoundError, match=r"has no file /models/none\.gguf: every node needs"):
        work_with(run_nothing, OnlyHere(Path("/models/none.gguf")))


def test_a_missing_file_here_is_told_before_anything_starts():
    with pytest.raises(ModelNotFoundError, match=r"has no file /models/none\.gguf"):
        RayPipeline(specs(), "/models/none.gguf")


def test_the_last_words_of_a_process_that_died_reach_the_user():
    with pytest.raises(StageLostError, match="the device fell off the bus") as caught:
        work_with(run_nothing, Loader(loading={0: "die"}))
    assert caught.value.stage == 0
    assert "its worker process has died" in str(caught.value)


def test_stages_that_fit_nowhere_are_refused_with_the_numbers():
    wait_until(lambda: free_cpus() == 4, "what other tests had is free")
    pipeline = RayPipeline(
        specs(),
        Loader(),
        [StagePlacement(resources={"CPU": 2.0})] * NUM_STAGES,
        RayPipelineConfig(placement_seconds=0.5),
    )
    with pytest.raises(PlanningError, match=r"could not place .* Wanted stage 0: CPU 2, .* free CPU 4.* of CPU 4"):
        asyncio.run(pipeline.start())
    # Ray's own removal of a group that waits is not immediate.
    settled = ("REMOVED", "CREATED")
    wait_until(
        lambda: all(group["state"] in settled for group in placement_group_table().values()), "the group is removed"
    )
    work_with(run_nothing)


def test_stages_go_to_the_node_they_were_given():
    (node,) = describe_cluster()
    assert (node.cpus, node.gpus, node.is_this) == (4.0, 0.0, True)
    assert node.memory_bytes > 0
    pipeline = RayPipeline(specs(), Loader(), [StagePlacement(node.node_id)] * NUM_STAGES)

    async def run() -> None:
        try:
            await pipeline.start()
            assert pipeline._fleet.nodes() == [node.node_id] * NUM_STAGES
        finally:
            await pipeline.close()

    asyncio.run(run())
    nowhere = RayPipeline(
        specs(), Loader(), [StagePlacement("f" * 56)] * NUM_STAGES, RayPipelineConfig(placement_seconds=0.5)
    )
    with pytest.raises(PlanningError, match=r"stage 0: CPU 0\.333 on node ffffffff"):
        asyncio.run(nowhere.start())


def test_more_stages_than_cpus_share_them():
    (node,) = describe_cluster()
    pipeline = RayPipeline(specs(6), Loader(), [StagePlacement(node.node_id)] * 6)

    async def run() -> None:
        try:
            await pipeline.start()
            wait_until(lambda: free_cpus() == pytest.approx(4 - 6 * 0.666), "the stages share the CPUs")
        finally:
            await pipeline.close()

    asyncio.run(run())


async def run_nothing(pipeline: RayPipeline) -> None:
    pass


# -- losing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "error", "replaced"), [("raise", "ValueError", True), ("plan", "PlanError", False)])
def test_an_exception_in_a_stage_is_its_loss_and_nobody_elses(fault, error, replaced):
    async def work(pipeline: RayPipeline) -> None:
        before = await pids(pipeline)
        await run_steps(pipeline, range(5))
        await pipeline.submit(plan_of(5))
        await pipeline.submit(plan_of(6))
        with pytest.raises(StageLostError, match=f"stage 1 was lost: {error}: ") as caught:
            await pipeline.result()
        assert caught.value.stage == 1
        with pytest.raises(StageLostError):
            await pipeline.submit(plan_of(7))
        await pipeline.recover()
        await run_steps(pipeline, range(100, 120))
        after = await pids(pipeline)
        # A plan that is refused leaves the stage as it was; after anything else its process is not to be trusted.
        assert (after[1] != before[1]) == replaced
        assert (after[0], after[2]) == (before[0], before[2])

    work_with(work, Loader(faults={(1, 5): fault}))


def test_a_crash_in_native_code_leaves_its_trace():
    async def work(pipeline: RayPipeline) -> None:
        await pipeline.submit(plan_of(0))
        with pytest.raises(StageLostError, match="Segmentation fault") as caught:
            await pipeline.result()
        assert caught.value.stage == 2
        assert "string_at" in caught.value.reason
        await pipeline.recover()
        await run_steps(pipeline, range(100, 120))

    work_with(work, Loader(faults={(2, 0): "segfault"}))


def test_a_killed_stage_is_noticed_at_once_and_only_it_is_replaced():
    async def work(pipeline: RayPipeline) -> None:
        for round_number, victim in enumerate((1, 1, 0, 2)):
            await run_steps(pipeline, range(round_number * 100, round_number * 100 + 10))
            before = await pids(pipeline)
            os.kill(before[victim], signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(StageLostError, match=f"pid {before[victim]} on .*process has died") as caught:
                # Nothing is submitted: an idle engine learns of it, too.
                await pipeline.result()
            # Long before a deadline would tell.
            assert time.monotonic() - began < pipeline._config.step_seconds / 3
            assert caught.value.stage == victim
            await pipeline.recover()
            after = await pids(pipeline)
            assert [index for index in range(NUM_STAGES) if after[index] != before[index]] == [victim]
        # And one that dies while the loss of another is known already.
        os.kill(after[0], signal.SIGKILL)
        with pytest.raises(StageLostError):
            await pipeline.result()
        os.kill(after[2], signal.SIGKILL)
        await pipeline.recover()
        await run_steps(pipeline, range(20))
        assert [pid in after for pid in await pids(pipeline)] == [False, True, False]

    work_with(work)


@pytest.mark.parametrize("how", ["stopped", "sleeping"])
def test_a_stage_that_hangs_is_found_by_the_deadline_and_replaced(how):
    async def work(pipeline: RayPipeline) -> None:
        before = await pids(pipeline)
        await run_steps(pipeline, range(5))
        if how == "stopped":
            stop(before[1])
        await pipeline.submit(plan_of(5))
        words = "has not answered 'progress'" if how == "stopped" else "has been computing step 5 for"
        with pytest.raises(StageLostError, match=f"{words}.*no result of step 5 within 3 s") as caught:
            await pipeline.result()
        assert caught.value.stage == 1
        await pipeline.recover()
        await run_steps(pipeline, range(100, 120))
        after = await pids(pipeline)
        assert [index for index in range(NUM_STAGES) if after[index] != before[index]] == [1]
        assert not Path(f"/proc/{before[1]}").exists()

    work_with(work, Loader(faults={(1, 5): "sleep"} if how == "sleeping" else {}), step_seconds=3.0)


def test_a_pipeline_that_works_slowly_does_not_miss_the_deadline():
    async def work(pipeline: RayPipeline) -> None:
        for step_id in range(8):
            await pipeline.submit(plan_of(step_id))
            await asyncio.sleep(0.4)
            await pipeline.result()
        # Nothing in flight: nothing is due.
        await asyncio.sleep(3.2)
        await run_steps(pipeline, range(8, 20))

    work_with(work, step_seconds=3.0)


def test_a_recovery_that_fails_says_why_and_another_one_may_succeed():
    loader = Loader()

    async def work(pipeline: RayPipeline) -> None:
        loader.loading[1] = "raise"
        os.kill((await pids(pipeline))[1], signal.SIGKILL)
        with pytest.raises(StageLostError):
            await pipeline.result()
        with pytest.raises(StageLostError, match="stage 1 was lost: RuntimeError: no room on this device"):
            await pipeline.recover()
        loader.loading.clear()
        await pipeline.recover()
        await run_steps(pipeline, range(20))

    work_with(work, loader)


# -- the engine's side -----------------------------------------------------------------------------------------------


def test_the_window_a_cancelled_wait_and_the_close():
    async def work(pipeline: RayPipeline) -> None:
        waiting = asyncio.create_task(pipeline.result())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await run_steps(pipeline, range(10), in_flight=4)

        # Nothing comes back, so the fifth has to wait.
        stopped = (await pids(pipeline))[0]
        stop(stopped)
        for step_id in range(10, 14):
            await pipeline.submit(plan_of(step_id))
        fifth = asyncio.create_task(pipeline.submit(plan_of(14)))
        await asyncio.sleep(0.2)
        assert not fifth.done()
        os.kill(stopped, signal.SIGCONT)
        await fifth
        for step_id in range(10, 15):
            assert (await pipeline.result()).step_id == step_id

        waiting = asyncio.create_task(pipeline.result())
        await asyncio.sleep(0.01)
        await pipeline.close()
        with pytest.raises(StageLostError, match="the pipeline was closed"):
            await waiting
        with pytest.raises(StageLostError, match="the pipeline was closed"):
            await pipeline.recover()

    work_with(work, max_in_flight=4)


def test_a_close_that_is_cancelled_goes_on_and_a_second_one_waits_for_it():
    async def work(pipeline: RayPipeline) -> None:
        first = asyncio.create_task(pipeline.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()

    work_with(work)


DRIVER = """
import asyncio, os, sys, time
import numpy as np
import ray
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import connected
from shardline.cluster.stage_loading import LoadedStage, ModelIdentity
from shardline.stage import StageSpec

class Loader:
    def identity(self):
        return ModelIdentity("same", 16, 10)
    def load(self, spec):
        class Nothing:
            def reset(self): pass
        return LoadedStage(Nothing(), self.identity(), "pretend", lambda: 0)

async def main():
    specs = [StageSpec(i, i, i + 1, i == 0, i == 1, 8, 8, "float32", 64, 8, 100, 1) for i in range(2)]
    pipeline = RayPipeline(specs, Loader())
    try:
        await pipeline.start()
        pids = [stage.pid for stage in await pipeline.stats()]
        raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
        sys.stdout.write(" ".join(map(str, [*pids, raylet])) + "\\n")
        sys.stdout.flush()
        await pipeline.result()
    finally:
        await pipeline.close()

with connected(num_cpus=2):
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_program_leaves_no_process_behind(how, tmp_path):
    program = tmp_path / "driver.py"
    program.write_text(textwrap.dedent(DRIVER))
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line, driver.stderr.read() if driver.stderr else ""
        left = {int(pid): start_ticks(int(pid)) for pid in line.split()}
        assert None not in left.values()
        driver.send_signal(how)
        driver.communicate(timeout=120)
    wait_until(lambda: not any(start_ticks(pid) == ticks for pid, ticks in left.items()), "its processes are gone")


def test_another_loaders_share_is_another_plan():
    from shardline.cluster.stage_loading import plan_hash

    identity = Loader().identity()
    base = plan_hash(specs(), identity)
    assert base == plan_hash(tuple(specs()), identity)
    moved = [replace(specs()[0], end_layer=2), replace(specs()[1], first_layer=2), specs()[2]]
    others = {
        plan_hash(moved, identity),
        plan_hash(specs(), replace(identity, fingerprint="x")),
        plan_hash(specs(2), identity),
    }
    assert len(others | {base}) == 4
