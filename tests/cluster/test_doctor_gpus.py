"""What doctor says of GPUs: a step that runs, one that is wrong, hangs or crashes, and libraries that do not belong."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from shardline.cluster.cli import doctor, gpu_check, main
from shardline.cluster.gpus import NodeGpu
from shardline.kernels import CudaDevice

CARD = CudaDevice(1, "NVIDIA Test 3060", 86, 11 << 30, 12 << 30, 3.6e11, 28, "0000:65:00.0")
GOOD: dict[str, Any] = {"driver": "580.1, CUDA 13.0", "nvrtc": "12.9", "problem": "", "imported": [], "stepped": []}


def prints(text: str, more: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; sys.stdout.write({text!r}); {more}")


def test_a_gpu_that_computes() -> None:
    found = gpu_check.check_gpu(0, prints(json.dumps(GOOD)))
    assert (found.fault, found.note) == ("", "")
    assert "580.1, CUDA 13.0" in found.computes
    assert "NVRTC 12.9" in found.computes


def test_wrong_bits_are_a_fault() -> None:
    found = gpu_check.verdict(GOOD | {"problem": "7 of 768 sums of one product are wrong"})
    assert found.fault.startswith("7 of 768 sums")
    assert not found.computes


def test_a_library_of_a_step_is_a_fault_and_one_of_the_import_a_note() -> None:
    found = gpu_check.verdict(GOOD | {"stepped": ["/usr/lib/libcublas.so.12"], "imported": ["/x/libcublasLt.so.13"]})
    assert "libcublas.so.12" in found.fault
    assert "import cupy" in found.note
    assert "libcublasLt.so.13" in found.note
    found = gpu_check.verdict(GOOD | {"imported": ["/x/libcublasLt.so.13"]})
    assert found.computes
    assert not found.fault


def test_a_crash_and_a_hang_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = (sys.executable, "-c", "import os, sys; sys.stderr.write('first\\nno driver\\n'); os.abort()")
    assert gpu_check.check_gpu(0, crash).fault.endswith("failed: no driver")
    assert "exit code" in gpu_check.check_gpu(0, prints("", "sys.exit(3)")).fault
    monkeypatch.setattr(gpu_check, "CHECK_SECONDS", 0.2)
    waits = (sys.executable, "-c", "import threading; threading.Event().wait()")
    assert "has not ended" in gpu_check.check_gpu(0, waits).fault


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("wrong", 1)])
def test_doctor_shows_each_gpu_and_its_exit_code_says_whether_all_compute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str, code: int
) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "gpus_here", lambda tell: [NodeGpu("here", "here", True, CARD)])
    monkeypatch.setattr(doctor, "check_gpu", lambda index: gpu_check.verdict(GOOD | {"problem": problem}))
    assert main(["doctor", "--json"]) == code
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    for part in ("NVIDIA Test 3060", "sm_86", "cuda 8", "11264.0 MiB of 12288.0 MiB", "0000:65:00.0", "cuda:1"):
        assert part in found["GPU 1"]["value"]
    assert found["GPU 1 computes"]["status"] == ("fault" if problem else "ok")
