"""Choosing a device: what is refused where there is no GPU, and what reaches a stage's share."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from shardline.cluster import PlanningError, build
from shardline.cluster.build import EngineOptions, Prepared, build_engine, gpu_shares, prepare
from shardline.cluster.cli import doctor, main
from shardline.cluster.cli.doctor import Finding
from shardline.cluster.cli.gpu_check import GpuVerdict
from shardline.cluster.gpus import GpuReport, NodeGpu, wait_until_free
from shardline.cluster.ray_runtime import NodeInfo, StagePlacement
from shardline.kernels import CudaDevice, KernelsError
from shardline.scheduler import InvalidParameterError
from shardline.stage import StageSpec

GIB = 1 << 30
CARD = CudaDevice(1, "NVIDIA Test 3060", 86, 11 << 30, 12 << 30, 3.6e11, 28)


def gpu(index: int, free: int, arch: int = 86, node: str = "here") -> NodeGpu:
    card = CudaDevice(index, f"Test {arch}", arch, free * GIB, 99 * GIB, 3.6e11, 28, f"0000:0{index}:00.0")
    return NodeGpu(node, node, node == "here", card)


def prepared_on(monkeypatch: pytest.MonkeyPatch, gpus: list[NodeGpu], model: Path, **options: object) -> Prepared:
    monkeypatch.setattr(build, "gpus_here", lambda tell: gpus)
    wish: dict[str, object] = {"model": str(model), "device": "gpu", "context": 256, **options}
    return prepare(EngineOptions(**wish))  # type: ignore[arg-type]


def specs_of(prepared: Prepared, *, in_process: bool) -> tuple[StageSpec, ...]:
    """What the stages of the engine are told; it is not started."""
    engine = build_engine(prepared, in_process=in_process)
    try:
        return engine._pipeline.specs
    finally:
        asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "cuda"}, "device='cuda' is not allowed: give cpu; cuda:N or a list"),
        ({"device": "cuda:0,cuda:0"}, "cuda:0,cuda:1 for GPUs here; or gpu for all of the cluster"),
        ({"device": "cuda:0", "kv_dtype": "float32"}, "float16 or int8 on a GPU"),
        ({"device": "gpu", "kv_dtype": "float32"}, "float16 or int8 on a GPU"),
        ({"device": "gpu", "memory": (GIB,)}, "give --gpu-memory instead"),
        ({"device": "cuda:0", "stages": 2, "memory": (GIB, GIB)}, "give --gpu-memory instead"),
        ({"device": "cuda:0", "memory": (GIB,)}, "give --gpu-memory instead"),
        ({"gpu_memory": (GIB,)}, "give --device gpu too"),
        ({"device": "gpu", "gpu_memory": (GIB, GIB), "stages": 3}, "one size for all, or one for each of 3 stages"),
        ({"device": "cuda:0", "gpu_memory": (GIB,), "memory": (GIB,)}, "give --gpu-memory alone"),
    ],
)
def test_what_no_gpu_could_do_is_refused(smollm2: Path, options: dict[str, object], match: str) -> None:
    with pytest.raises(InvalidParameterError, match=match):
        prepare(EngineOptions(model=str(smollm2), **options))  # type: ignore[arg-type]


def test_a_missing_gpu_is_one_line(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # What is missing depends on the machine: cupy, a driver, or the 99th card.
    assert main(["run", str(smollm2), "--device", "cuda:99", "-p", "hi"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "GPU" in captured.err or "cupy" in captured.err


def test_a_gpu_becomes_the_stages_device(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cuda_device", lambda index: CARD if index == 1 else pytest.fail("another card"))
    (stage,) = prepare(EngineOptions(model=str(smollm2), device="cuda:1")).plan.stages
    assert stage.spec.device == "cuda:1"
    assert stage.device.numeric_class == "cuda 8"
    assert stage.total_bytes <= CARD.free_bytes
    (stage,) = prepare(EngineOptions(model=str(smollm2), device="cuda:1", gpu_memory=(GIB,))).plan.stages
    assert stage.total_bytes <= GIB - build.GPU_WORKSPACE_BYTES
    assert stage.spec.memory_bytes == GIB
    with pytest.raises(PlanningError, match=r"11264\.0 MiB of 12288\.0 MiB free"):
        prepare(EngineOptions(model=str(smollm2), device="cuda:1", gpu_memory=(12 * GIB,)))


def test_the_error_of_a_missing_backend_is_the_rooms_own() -> None:
    with pytest.raises(KernelsError):
        build.gpu_device("cuda:99", None)


# -- several GPUs ----------------------------------------------------------------------------------------------------


def test_one_stage_a_gpu_by_what_each_has(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    prepared = prepared_on(monkeypatch, [gpu(0, 12), gpu(1, 24, 89)], smollm2)
    assert prepared.options.uses_ray
    assert prepared.placements == [StagePlacement(gpu="0000:00:00.0"), StagePlacement(gpu="0000:01:00.0")]
    assert prepared.num_gpus == 2
    assert [spec.device for spec in prepared.plan.specs] == ["cuda:0", "cuda:1"]
    # A process over Ray sees its own GPU alone; in this process both are there.
    assert [spec.device for spec in specs_of(prepared, in_process=False)] == ["cuda:0", "cuda:0"]
    assert [spec.device for spec in specs_of(prepared, in_process=True)] == ["cuda:0", "cuda:1"]
    assert [spec.memory_bytes for spec in prepared.plan.specs] == [12 * GIB, 24 * GIB]
    assert not any("numeric" in note or "take turns" in note for note in prepared.plan.notes)
    for stage in prepared.plan.stages:
        assert stage.total_bytes + build.GPU_WORKSPACE_BYTES <= 0.9 * stage.spec.memory_bytes


def test_a_list_of_limits_longer_than_the_gpus_puts_several_stages_on_one(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    limits = (6 * GIB, 8 * GIB, 12 * GIB, 16 * GIB)
    prepared = prepared_on(monkeypatch, [gpu(0, 44)], smollm2, gpu_memory=limits)
    assert [spec.memory_bytes for spec in prepared.plan.specs] == list(limits)
    assert prepared.placements == [StagePlacement(gpu="0000:00:00.0")] * 4
    for stage, limit in zip(prepared.plan.stages, limits, strict=True):
        assert stage.device.free_bytes == limit - build.GPU_WORKSPACE_BYTES
        assert stage.total_bytes <= stage.device.free_bytes
    assert any("take turns" in note for note in prepared.plan.notes)


@pytest.mark.parametrize(
    ("free", "limits", "numbers"),
    [
        (
            40,
            (6, 8, 12, 16),
            r"40960\.0 MiB of .* free, .* 6144\.0 MiB \+ .* \+ 16384\.0 MiB = 43008\.0 MiB: give less",
        ),
        (4, (5,), r"4096\.0 MiB of 101376\.0 MiB free, and --gpu-memory gives its stage 5120\.0 MiB: give less"),
    ],
)
def test_limits_over_what_is_free_are_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path, free: int, limits: tuple[int, ...], numbers: str
) -> None:
    with pytest.raises(PlanningError, match=rf"here GPU 0 \(Test 86\) has {numbers}"):
        prepared_on(monkeypatch, [gpu(0, free)], smollm2, gpu_memory=tuple(limit * GIB for limit in limits))


def test_shares_are_dealt_in_order_and_stay_within_their_gpu() -> None:
    three = [gpu(0, 8), gpu(1, 30), gpu(2, 12)]
    shares = gpu_shares(three, 7, None)
    assert [share.gpu for share in shares] == [
        bus for bus, n in (("0000:00:00.0", 3), ("0000:01:00.0", 2), ("0000:02:00.0", 2)) for _ in range(n)
    ]
    assert len({share.name for share in shares}) == 7
    assert len({share.compute for share in shares}) == 3
    for one in three:
        mine = [share for share in shares if share.gpu == one.card.bus_id]
        assert sum(share.memory_limit or 0 for share in mine) <= one.card.free_bytes
        assert all((share.memory_limit or 0) >= one.card.free_bytes // len(mine) for share in mine)
    # One number is every stage's; a list is the first GPUs', and with as many stages as GPUs the planner chooses.
    assert [share.memory_limit for share in gpu_shares(three, 3, (2 * GIB,))] == [2 * GIB] * 3
    assert [share.memory_limit for share in gpu_shares(three, 2, (2 * GIB, 3 * GIB))] == [2 * GIB, 3 * GIB]
    assert len(gpu_shares(three, 2, None)) == 3


def test_chosen_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    gpus = [gpu(0, 12), gpu(2, 12), gpu(1, 12, node="there")]
    prepared = prepared_on(monkeypatch, gpus, smollm2, device="cuda:2,cuda:0")
    assert [place.gpu for place in prepared.placements or []] == ["0000:02:00.0", "0000:00:00.0"]
    # Ray counts them from 0.
    assert prepared.num_gpus == 3
    prepared = prepared_on(monkeypatch, gpus, smollm2, device="cuda:2", stages=2)
    assert [place.gpu for place in prepared.placements or []] == ["0000:02:00.0"] * 2
    with pytest.raises(PlanningError, match=r"there is no cuda:1 here .*there is cuda:0 \(Test 86\), cuda:2"):
        prepared_on(monkeypatch, gpus, smollm2, device="cuda:0,cuda:1")


def test_gpus_of_different_numeric_classes_are_warned_of_by_name(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    plan = prepared_on(monkeypatch, [gpu(0, 12, 86), gpu(1, 12, 120), gpu(2, 12, 89)], smollm2).plan
    (note,) = [note for note in plan.notes if "numeric classes" in note]
    assert note.startswith("WARNING: stages of 2 numeric classes")
    assert "cuda 16: here GPU 1 (Test 120)" in note
    assert "cuda 8: here GPU 0 (Test 86), here GPU 2 (Test 89)" in note
    for alike in ((80, 86, 89), (90, 100, 120)):
        plan = prepared_on(monkeypatch, [gpu(i, 12, arch) for i, arch in enumerate(alike)], smollm2).plan
        assert not [note for note in plan.notes if "numeric classes" in note]


def test_a_clusters_gpus_are_placed_on_their_nodes(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    nodes = [NodeInfo(f"id{i}", f"host{i}", f"10.0.0.{i}", 4.0, i, 8 * GIB, i == 0) for i in range(4)]
    old = "GPU 2 is sm_75, and the kernels need sm_80"
    reports = [GpuReport((gpu(0, 8).card,)), GpuReport((gpu(0, 8).card, gpu(1, 8, 90).card), old)]
    reports.append(GpuReport((), "the CUDA backend needs cupy"))
    monkeypatch.setattr("shardline.cluster.gpus._reports", lambda asked, finder: reports[: len(asked)])
    monkeypatch.setattr("shardline.cluster.ray_runtime.describe_cluster", lambda address: nodes)
    monkeypatch.setattr("shardline.cluster.ray_runtime.connected", lambda address: contextlib.nullcontext())
    prepared = prepare(EngineOptions(model=str(smollm2), device="gpu", address="auto", context=256))
    assert prepared.placements == [
        StagePlacement("id1", gpu="0000:00:00.0"),
        StagePlacement("id2", gpu="0000:00:00.0"),
        StagePlacement("id2", gpu="0000:01:00.0"),
    ]
    # Cards that cannot be used are not passed over in silence.
    assert prepared.plan.notes[-2:] == (f"not used, on host2: {old}", "not used, on host3: the CUDA backend needs cupy")
    assert prepared.num_gpus is None
    assert prepared.plan.stages[0].device.name == "host1 10.0.0.1 GPU 0 (Test 86)"


def test_without_a_gpu_it_says_so_before_anything_starts(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        build.gpus_here()
    except PlanningError:
        assert main(["plan", str(smollm2), "--device", "gpu"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("shardline: on ")
        assert "cupy" in error or "nvidia-smi" in error
    else:
        pytest.skip("there is a GPU here")


def test_memory_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    asked: list[int] = []

    def free() -> int:
        asked.append(0)
        return len(asked)

    assert wait_until_free(5, 60.0, free, pause=0)
    assert len(asked) == 5
    assert not wait_until_free(10**9, 0.0, free, pause=0)


# -- the commands ----------------------------------------------------------------------------------------------------


def findings(monkeypatch: pytest.MonkeyPatch, found: list[NodeGpu] | str) -> list[Finding]:
    def look(tell: Callable[[str], None]) -> list[NodeGpu]:
        if isinstance(found, str):
            raise PlanningError(found)
        tell("here: GPU 7 is sm_75")
        return found

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "cupy" else None)
    monkeypatch.setattr(doctor, "check_gpu", lambda index: GpuVerdict("yes", "", ""))
    monkeypatch.setattr(doctor, "gpus_here", look)
    return doctor._gpus()


def test_doctor_lists_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(monkeypatch, [gpu(0, 12), gpu(2, 24, 90)])
    first, second, third, unusable = [finding for finding in found if not finding.what.endswith("computes")]
    assert (first.what, first.status) == ("GPU 0", "ok")
    for part in ("Test 86", "sm_86", "12288.0 MiB of 101376.0 MiB free", "360 GB/s", "--device cuda:0"):
        assert part in first.value
    assert (second.what, "cuda:2" in second.value) == ("GPU 2", True)
    assert (third.status, "2 numeric classes" in third.value) == ("note", True)
    assert (unusable.status, unusable.value) == ("note", "not used, on here: GPU 7 is sm_75")
    assert not any("numeric classes" in one.value for one in findings(monkeypatch, [gpu(0, 12), gpu(1, 24, 89)]))


def test_doctor_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = findings(monkeypatch, "on here: the driver is too old")
    assert "the driver is too old" in one.value
    # Without cupy there is nothing to be asked of a child process, whether there are cards or none.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "gpus_here", lambda tell: pytest.fail("asked"))
    (one,) = doctor._gpus()
    assert one.value == "none found" or "pip install" in one.value


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--address", "local"], "give --device gpu too"),
        (["--device", "gpu", "--gpu-memory", "3GiB,4GiB"], "one size"),
        (["--gpu-memory", "3GiB"], "give --device gpu too"),
        (["--device", "gpu:0"], "cuda:N or a list"),
    ],
)
def test_what_verify_refuses(smollm2: Path, capsys: pytest.CaptureFixture[str], options: list[str], match: str) -> None:
    assert main(["verify", str(smollm2), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert match in captured.err
