"""From options to devices and plans."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster import build
from shardline.cluster.build import EngineOptions, cluster_devices, cpu_devices, model_bytes, prepare
from shardline.cluster.errors import PlanningError
from shardline.cluster.ray_runtime import NodeInfo
from shardline.scheduler import InvalidParameterError
from shardline.stage import open_checkpoint

GIB = 2**30


def nodes(*gib: int) -> list[NodeInfo]:
    return [NodeInfo(f"id{i}", f"host{i}", f"10.0.0.{i}", 4.0, 0.0, size * GIB, i == 0) for i, size in enumerate(gib)]


def on_cluster(monkeypatch: pytest.MonkeyPatch, found: list[NodeInfo], model: Path, **options: Any) -> build.Prepared:
    monkeypatch.setattr("shardline.cluster.ray_runtime.describe_cluster", lambda address: found)
    return prepare(EngineOptions(model=str(model), address="auto", context=256, **options))


def test_one_stage_a_node(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    prepared = on_cluster(monkeypatch, nodes(8, 4, 8), smollm2)
    assert prepared.node_ids == ("id0", "id1", "id2")
    assert prepared.options.uses_ray
    assert prepared.plan.min_microbatch == 1
    assert prepared.plan.depth == 4
    assert pickle.loads(pickle.dumps(prepared)) == prepared


def test_fewer_stages_than_nodes_take_the_best(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    # The first node has no room for anything.
    prepared = on_cluster(monkeypatch, [*nodes(0, 4, 8)], smollm2, stages=2)
    assert prepared.node_ids == ("id1", "id2")


def test_more_stages_than_nodes_share_them(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    prepared = on_cluster(monkeypatch, nodes(8, 4), smollm2, stages=5)
    assert prepared.node_ids == ("id0", "id0", "id0", "id1", "id1")
    assert len({stage.device.name for stage in prepared.plan.stages}) == 5


def test_a_forced_split_on_fewer_nodes(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    prepared = on_cluster(monkeypatch, nodes(8, 8, 8), smollm2, split=(20, 10))
    assert [spec.num_layers for spec in prepared.plan.specs] == [20, 10]
    assert prepared.node_ids == ("id0", "id1")


def test_nodes_without_room_are_named(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    with pytest.raises(PlanningError, match=r"host0 10\.0\.0\.0 cpu"):
        on_cluster(monkeypatch, nodes(0, 0), smollm2)


def test_memory_says_how_many_stages() -> None:
    options = EngineOptions(model="x", memory=(1, 2, 3))
    assert options.stage_count == 3
    assert options.uses_ray
    assert [device.free_bytes for device in cluster_devices(nodes(8, 8, 8), options)] == [1, 2, 3]
    with pytest.raises(InvalidParameterError, match="one number for each of 2 stages"):
        build.wanted(EngineOptions(model="x", memory=(1, 2, 3), stages=2))


def test_a_host_is_shared_with_room_for_each_process() -> None:
    devices = cpu_devices(3, node="a", free_bytes=3 * GIB, host_cores=2)
    assert sum(device.free_bytes + build.PROCESS_BYTES for device in devices) <= 3 * GIB
    assert {device.compute for device in devices} == {"a cores"}
    assert {device.threads for device in devices} == {2}
    assert len({device.name for device in devices}) == 3
    # More threads than cores are not faster.
    assert cpu_devices(1, threads=9, host_cores=2)[0].bytes_per_second == devices[0].bytes_per_second


def test_bytes_of_the_real_model(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    try:
        size = model_bytes(checkpoint)
    finally:
        checkpoint.close()
    assert size.tied
    assert len(set(size.layers)) == 1
    # 4 bits with a scale and a minimum of 16 bits for 32 of them, and two norms.
    weights = 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536
    assert size.layers[0] == weights * 5 // 8 + 4 * 2 * 576
    # 8 bits likewise; one matrix on one device, two on two.
    assert size.embed == 49152 * 576 * 9 // 8
    assert size.total == 30 * size.layers[0] + size.head
