"""What every benchmark's JSON has: versions, machine, commit and command; medians with their range. Needs no GPU."""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardline import __version__

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def trials(values: Sequence[float]) -> dict[str, Any]:
    """`spread`, and the values themselves in the order of the trials."""
    return spread(values) | {"trials": list(values)}


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99 of many requests; None of none."""
    ordered = sorted(values)

    def at(share: float) -> float | None:
        # The nearest rank: a request that was, not a mean of two.
        return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))] if ordered else None

    return {"p50": at(0.50), "p95": at(0.95), "p99": at(0.99)}


def commit_of(given: str | None) -> str | None:
    """`given`, else that of the checkout, with a plus if it has changes; None outside of one."""
    if given is not None:
        return given

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "") if head else None


def processor() -> str:
    """Its name, as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def nvidia_smi(*fields: str) -> list[list[str]]:
    """A row of these fields for each GPU; empty where nvidia-smi is missing or refuses."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    if said.returncode:
        return []
    return [[field.strip() for field in line.split(",")] for line in said.stdout.splitlines() if line.strip()]


def gpu_memory_used() -> list[int]:
    """Bytes in use on each GPU, of all processes. From the driver's library, which makes no context, where Ray's copy
    of its bindings finds it; else from nvidia-smi. Empty without a GPU."""
    try:
        nvml: Any = importlib.import_module("ray._private.thirdparty.pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
    except Exception:
        return [int(row[0]) << 20 for row in nvidia_smi("memory.used") if row[0].isdigit()]


def machine(commit: str | None, module: str) -> dict[str, Any]:
    """What ran where, without a context on any GPU."""
    versions: dict[str, str] = {"shardline": __version__, "python": platform.python_version()}
    for name in ("numpy", "ray", "cupy", "numba"):
        # By import, for a package on PYTHONPATH alone has no metadata.
        with suppress(ImportError):
            versions[name] = str(getattr(importlib.import_module(name), "__version__", "unknown"))
    driver = Path("/proc/driver/nvidia/version")
    return {
        "versions": versions,
        "commit": commit_of(commit),
        "command": " ".join(["python", "-m", module, *sys.argv[1:]]),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "gpus": [
            {"name": name, "driver": version, "memory_bytes": int(total) << 20 if total.isdigit() else None}
            for name, version, total in nvidia_smi("name", "driver_version", "memory.total")
        ],
    }


def write(path: Path, report: dict[str, Any]) -> None:
    """Keep a report, whole or not at all: a run that is ended half way leaves the parts before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def numbers(values: dict[str, Any], factor: float = 1.0, digits: int = 0) -> str:
    """ "median (least - most)" """
    middle, least, most = (factor * values[name] for name in ("median", "least", "most"))
    return f"{middle:.{digits}f} ({least:.{digits}f} - {most:.{digits}f})"


def milliseconds(seconds: float | None) -> str:
    """For a table."""
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"
