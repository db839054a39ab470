"""A node that goes, and comes back: with an engine that has nothing to do, and on a cluster of two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

PROGRAM = """
import asyncio, os, sys
from dataclasses import dataclass
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from shardline.cluster import Engine, Request
from shardline.cluster.engine import EngineConfig
from shardline.cluster.local_pipeline import stage_specs
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import StagePlacement, connected, describe_cluster
from shardline.cluster.text.model_text import ModelText
from shardline.scheduler import SamplingParams, SchedulerConfig
from shardline.stage import open_checkpoint

# With "gpu": GPUs that only Ray believes in, the second one of the first node, and the other node's for two stages.
ON_GPUS = sys.argv[2] == "gpu"
SPLIT, NODES, GPUS = ((10, 10, 10), (0, 1, 1), ("1", "0", "0")) if ON_GPUS else ((14, 16), (0, 1), (None, None))

@dataclass
class Finder:
    def held(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

REQUEST = Request(text="The capital of France is", params=SamplingParams(max_tokens=8, logprobs=1, seed=1))

async def answer(engine):
    return [(delta.token_ids, delta.logprobs) async for delta in engine.generate(REQUEST) if delta.token_ids]

def joined(deltas):
    return [sum((delta[i] for delta in deltas), ()) for i in (0, 1)]

async def until(condition):
    while not await condition():
        await asyncio.sleep(0.05)

def engine_on(path, nodes):
    checkpoint = open_checkpoint(path)
    specs = stage_specs(
        checkpoint.spec, SPLIT, num_blocks=8, block_size=16, kv_dtype="float16", max_step_tokens=32, max_sequences=2,
        max_context=64, num_threads=1,
    )
    text = ModelText.from_checkpoint(checkpoint)
    checkpoint.close()
    limits = SchedulerConfig(
        num_blocks=8, block_size=16, max_context=64, depth=3, max_step_tokens=32, prefill_chunk=32, max_sequences=2
    )
    placements = [StagePlacement(nodes[node].node_id, gpu=gpu) for node, gpu in zip(NODES, GPUS)]
    pipeline = RayPipeline(specs, path, placements, finder=Finder())
    return Engine(pipeline, text, limits, EngineConfig(max_losses=20, retry_seconds=0.5))

async def work(engine, cluster, worker):
    failures, recover = 0, engine._pipeline.recover

    async def watched():
        nonlocal failures
        try:
            await recover()
        except Exception as error:
            sys.stderr.write(f"{error}\\n")
            failures += 1
            raise

    engine._pipeline.recover = watched
    try:
        await engine.start()
        before = await answer(engine)
        first, second = engine._pipeline._fleet.nodes()[:2]
        assert first != second
        cluster.remove_node(worker, allow_graceful=False)

        async def failed():
            return failures > 0

        async def back():
            return (await engine.status()).state == "ready"

        await until(failed)
        assert (await engine.status()).state == "recovering"
        # Ray wants the main thread for this.
        cluster.add_node(num_cpus=1, num_gpus=1)
        await until(back)
        assert joined(await answer(engine)) == joined(before)
        status = await engine.status()
        assert (status.losses, len(status.stages)) == (1, len(SPLIT)), status
        after = engine._pipeline._fleet.nodes()
        assert after[0] == first
        assert len({second, *after}) == 3
        if ON_GPUS:
            assert [stage.where.split()[-1] for stage in status.stages] == list(GPUS), status
    finally:
        await engine.close()
    assert all(group["state"] == "REMOVED" for group in placement_group_table().values())

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2, "include_dashboard": False})
worker = cluster.add_node(num_cpus=1, num_gpus=1)
with connected(cluster.address):
    asyncio.run(work(engine_on(sys.argv[1], describe_cluster()), cluster, worker))
cluster.shutdown()
sys.stdout.write("same bytes\\n")
"""


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_node_that_comes_back_within_the_budget_is_used(smollm2: Path, device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(smollm2), device],
        # A token of this user's is for clusters that want one.
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("same bytes\n")
    assert "is gone from the cluster, and has not joined again" in done.stderr
