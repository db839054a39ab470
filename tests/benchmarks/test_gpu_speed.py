"""What the planner expects of GPUs: against whole steps that were measured, and in order where nothing was."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.geometries import MODELS

from shardline.cluster.build import gpu_shares
from shardline.cluster.gpus import NodeGpu
from shardline.cluster.planning.gpu_speed import gpu_speed
from shardline.cluster.planning.placement import ModelBytes, Wanted
from shardline.cluster.planning.planner import plan_pipeline
from shardline.cluster.planning.stage_costs import StageCosts
from shardline.kernels.cuda.device import CudaDevice
from shardline.stage import ModelSpec

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 1 << 30
H200 = CudaDevice(0, "NVIDIA H200", 90, 139 * GIB, 140 * GIB, 4.917e12, 132, "0000:01:00.0", 1.98e9)
RTX_3060 = CudaDevice(0, "NVIDIA 3060", 86, 11 * GIB, 12 * GIB, 3.6e11, 28, "0000:02:00.0", 1.78e9)
RTX_4090 = CudaDevice(0, "NVIDIA 4090", 89, 23 * GIB, 24 * GIB, 1.008e12, 128, "0000:03:00.0", 2.52e9)
BYTES_A_WEIGHT = 0.5 + 2 / 128
"""In groups of 128 with a scale each."""


def model_bytes(model: ModelSpec) -> ModelBytes:
    """Of random models as the benchmark makes them."""
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    experts = model.experts
    mlp = 3 * model.hidden_size * model.intermediate_size
    routed = 3 * model.hidden_size * experts.intermediate_size * experts.num_experts if experts else 0
    layer = int(BYTES_A_WEIGHT * (attention + mlp + routed))
    ends = int(BYTES_A_WEIGHT * model.hidden_size * model.vocab_size)
    each = (int(BYTES_A_WEIGHT * routed),) * model.num_layers if experts else ()
    return ModelBytes((layer,) * model.num_layers, ends, ends, tied=False, experts=each)


@pytest.mark.parametrize(
    ("geometry", "file"), [("qwen3-8b", "gpu_model.json"), ("qwen3-30b-a3b", "gpu_model_experts.json")]
)
def test_predicted_steps_are_near_those_that_were_measured_on_an_h200(geometry: str, file: str) -> None:
    model = MODELS[geometry]
    measured = json.loads((RESULTS / file).read_text())
    assert (measured["gpu"], measured["geometry"]) == (H200.name, geometry)
    (device,) = gpu_shares([NodeGpu("node", "node", True, H200)], 1, None)
    # The benchmark decodes at positions of a few hundred.
    costs = StageCosts(model, model_bytes(model), [device], Wanted(context=512, max_sequences=256), 1)
    ratios = {
        row["batch"]: costs.seconds(0, 0, model.num_layers, head=True, rows=row["batch"])
        / row["step_seconds"]["median"]
        for row in measured["decode"]
    }
    assert len(ratios) >= 6
    assert all(1 / 1.2 < ratio < 1.2 for ratio in ratios.values()), ratios
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    assert 0.85 < mean < 1.15, ratios


def test_one_gpu_is_planned_to_run_ahead_and_its_prediction_has_no_host_part() -> None:
    model = MODELS["qwen3-8b"]
    wanted = Wanted(context=512, concurrency=64, max_sequences=256, stages=1)
    plan = plan_pipeline(model, model_bytes(model), gpu_shares([NodeGpu("node", "node", True, H200)], 1, None), wanted)
    assert (plan.depth, plan.min_microbatch, plan.ahead) == (2, 256, True)
    assert plan.tokens_per_second == pytest.approx(64 / plan.stages[0].step_seconds)
    two = plan_pipeline(model, model_bytes(model), gpu_shares(_cards(H200, 2), 2, None), replace(wanted, stages=2))
    assert (two.depth, two.min_microbatch, two.ahead) == (3, 1, True)


def test_cards_come_in_the_order_of_what_they_can_do() -> None:
    small, large, server = (gpu_speed(card) for card in (RTX_3060, RTX_4090, H200))
    assert small.bytes_per_second < large.bytes_per_second < server.bytes_per_second
    assert small.flops_per_second is not None
    assert large.flops_per_second is not None
    assert server.flops_per_second is not None
    assert small.flops_per_second < large.flops_per_second < server.flops_per_second
    # None may be expected to do more than its tensor cores could: 51, 165 and 989 * 10^12.
    assert small.flops_per_second < 25.6e12
    assert large.flops_per_second < 165e12
    assert gpu_speed(replace(H200, clock_hertz=0.0)).flops_per_second is None
    assert gpu_speed(replace(H200, arch=75)).flops_per_second == gpu_speed(replace(H200, arch=86)).flops_per_second


def _cards(card: CudaDevice, count: int) -> list[NodeGpu]:
    return [
        NodeGpu("node", "node", True, replace(card, index=index, bus_id=f"0000:0{index}:00.0"))
        for index in range(count)
    ]
