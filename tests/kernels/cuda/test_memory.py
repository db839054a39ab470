"""Memory and transfers of the CUDA backend without a GPU: the tests that need no kernel, on the emulated CuPy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("file", "pool"),
    [
        ("test_memory_cuda.py", ""),
        ("test_transfers_cuda.py", ""),
        ("test_workspace_cuda.py", ""),
        # In segments, as on a GPU.
        ("test_memory_cuda.py", "1"),
        ("test_workspace_cuda.py", "1"),
    ],
)
def test_on_the_emulation(file: str, pool: str) -> None:
    # In a process of its own: the emulated CuPy takes the place of the real one for good.
    command = [sys.executable, "-m", "pytest", "-p", "emu_plugin", "-p", "no:cacheprovider", "-q", "-k", "not kernel"]
    done = subprocess.run(
        [*command, f"tests/gpu/{file}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "emulation"), "EMU_POOL": pool},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout, done.stdout
