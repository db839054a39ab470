"""What doctor finds on a real GPU: a step that is right, and no vendor library in the process that ran it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def test_a_step_is_right_and_brings_no_vendor_library() -> None:
    pytest.importorskip("cupy")
    command = [sys.executable, "-m", "shardline.kernels.cuda.check", "0"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["problem"] == ""
    assert found["stepped"] == []
    assert found["imported"] == []
    assert "CUDA" in found["driver"]


def test_doctor_says_so() -> None:
    pytest.importorskip("cupy")
    done = subprocess.run(
        [sys.executable, "-m", "shardline.cluster.cli", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    lines = {one["what"]: one for one in json.loads(done.stdout)}
    assert "sm_" in lines["GPU 0"]["value"]
    assert lines["GPU 0 computes"]["status"] == "ok", lines["GPU 0 computes"]
    assert "GPU 0 libraries" not in lines
