"""What `shardline doctor` says of each GPU: do the kernels compile and compute there, and what comes with them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECK_SECONDS = 600.0
"""The first time the kernels have to be compiled."""


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """`fault` and `note` are "" where there is none; `computes` says what has been found right."""

    computes: str
    fault: str
    note: str


def check_gpu(
    index: int, command: tuple[str, ...] = (sys.executable, "-m", "shardline.kernels.cuda.check")
) -> GpuVerdict:
    """Run one step on a GPU, in a process of its own."""
    try:
        done = subprocess.run(
            [*command, str(index)], capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return GpuVerdict(
            "", f"one small step has not ended within {CHECK_SECONDS:g} s: see `dmesg` for the driver", ""
        )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return GpuVerdict("", f"the process that ran one small step failed: {last}", "")
    return verdict(found)


def verdict(found: dict[str, Any]) -> GpuVerdict:
    """Of a `CudaCheck`."""
    faults = [found["problem"]] if found["problem"] else []
    if found["stepped"]:
        faults.append(f"a step brings in {_names(found['stepped'])}, and no vendor library may take part in one")
    note = ""
    if found["imported"]:
        note = f"{_names(found['imported'])}: mapped before any step, by `import cupy` or the environment; unused"
    versions = f"driver {found['driver']}, NVRTC {found['nvrtc']}"
    if faults:
        return GpuVerdict("", f"{'; '.join(faults)} ({versions})", note)
    return GpuVerdict(f"kernels compile, and a product and a step are right; {versions}", "", note)


def _names(paths: list[str]) -> str:
    return ", ".join(sorted({Path(path).name for path in paths}))
