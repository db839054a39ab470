"""Choosing a device: what is refused where there is no GPU, and what reaches a stage's share."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.cluster import build
from shardline.cluster.build import EngineOptions, prepare
from shardline.cluster.cli import main
from shardline.kernels import CudaDevice, KernelsError
from shardline.scheduler import InvalidParameterError

CARD = CudaDevice(1, "NVIDIA Test 3060", 86, 11 << 30, 12 << 30, 3.6e11, 28)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "gpu"}, "device='gpu' is not allowed: give cpu, or cuda:0"),
        ({"device": "cuda:0", "stages": 2}, "GPUs over Ray"),
        ({"device": "cuda:0", "address": "auto"}, "GPUs over Ray"),
        ({"device": "cuda:0", "kv_dtype": "float32"}, "float16 on a GPU"),
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
    (stage,) = prepare(EngineOptions(model=str(smollm2), device="cuda:1", memory=(300 << 20,))).plan.stages
    assert stage.total_bytes <= 300 << 20


def test_the_error_of_a_missing_backend_is_the_rooms_own() -> None:
    with pytest.raises(KernelsError):
        build.gpu_device("cuda:99", None)
