"""The matrix runner over Ray: a case's stages and the one that they are compared with have the devices in turn."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import ray

from shardline.cluster.checking.verify import PipelineFactory, Verifier
from shardline.cluster.checking.verify_cases import Case
from shardline.cluster.checking.verify_result import CaseResult
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import connected
from shardline.cluster.stage_loading import CheckpointLoader, LoadedStage
from shardline.scheduler.plan import StepPlan
from shardline.stage import StageSpec
from shardline.stage.stage import DoneStep

CASE = Case(split=(18, 12), block_size=16, prefill_chunk=None, batch=5, warm=False, preempted=False, seeded=True)


@dataclass(frozen=True)
class OddRowsWrong(CheckpointLoader):
    """Stages whose first row is a little off when a step has an odd number of rows."""

    def load(self, spec: StageSpec) -> LoadedStage:
        loaded = super().load(spec)
        begin = loaded.runner.begin

        def faulty(plan: StepPlan, hidden: np.ndarray | None) -> DoneStep:
            output = begin(plan, hidden).wait()
            if output.hidden is not None and plan.num_tokens % 2 and plan.num_tokens > 1:
                output.hidden[0] *= 1.5
            return DoneStep(output)

        loaded.runner.begin = faulty  # type: ignore[method-assign]
        return loaded


@pytest.mark.ray
def test_stages_over_ray_are_compared_with_one_that_had_its_devices_before(smollm2: Path) -> None:
    made: list[RayPipeline] = []

    def pipelines(loader: CheckpointLoader) -> PipelineFactory:
        def make(specs: tuple[StageSpec, ...]) -> RayPipeline:
            # Whoever was there before has given its devices back.
            assert all(not pipeline._fleet.processes or pipeline._closed for pipeline in made)
            made.append(RayPipeline(specs, loader))
            return made[-1]

        return make

    cases = [replace(CASE, batch=1), replace(CASE, warm=True)]
    results: list[CaseResult] = []
    with connected(num_cpus=2):
        with Verifier(smollm2, max_batch=5, pipelines=pipelines(CheckpointLoader(smollm2))) as verifier:
            assert verifier.run_all(cases, results.append)
        assert [len(pipeline.specs) for pipeline in made] == [1, 2]
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with Verifier(smollm2, max_batch=5, pipelines=pipelines(OddRowsWrong(smollm2))) as verifier:
            assert not verifier.run_all(cases, results.append)
        assert results[-1].differing
