"""What the GPU benchmarks share: random weights, times of recorded launches, the card's own limits, and what ran."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from shardline import __version__
from shardline.kernels.cuda import tables, weights
from shardline.kernels.cuda.backend import CudaBackend
from shardline.kernels.cuda.pack import pad_to

RESULTS = Path(__file__).parent / "results"
SOURCE = np.frombuffer(np.random.default_rng(0).bytes(1 << 24), np.uint32)


class BenchBackend(CudaBackend):
    """Makes random weights where a real backend loads them: any bits are valid integers."""

    def random(
        self, channels: int, inputs: int, group_size: int, *, minimums: bool, gated: bool = False
    ) -> weights.CudaWeight:
        """A 4-bit matrix; a gated one has `channels` for each of gate and up."""
        rows, blocks = pad_to(channels * (1 + gated), tables.PADDED_CHANNELS), weights.blocks_of(inputs)
        words = rows * blocks * tables.BLOCK_K // 8
        scales = (rows // 16, blocks * tables.BLOCK_K // group_size, 8, 2)
        with self._stream:
            # Copies of one random run, shifted, so that no two matrices are the same bits.
            source = cupy.asarray(np.roll(SOURCE, self._resident_bytes % 997))
            integers = cupy.tile(source, -(-words // source.size))[:words].copy()
            scale = cupy.asarray(np.resize(SOURCE.view(np.uint16) % 0x200 + 0x1C00, scales).astype(np.uint16))
            minimum = scale + np.uint16(0x8C00) if minimums else cupy.zeros(1, cupy.uint16)
        part = weights.CudaPart(
            4, group_size, minimums, False, integers, scale, minimum, channels * (1 + gated), 0, blocks
        )
        return self._keep(weights.CudaWeight((part,), channels, inputs, gated))

    def seconds(self, issue: Callable[[], None], repeats: int = 7) -> list[float]:
        """Times of one recorded run of what `issue` enqueues, on the device's clock."""
        issue()
        self.synchronize()
        self._capturing = True
        self._stream.begin_capture()
        issue()
        graph = self._stream.end_capture()
        self._capturing = False
        graph.launch(self._stream)
        times = []
        for _ in range(repeats):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(self._stream)
            graph.launch(self._stream)
            end.record(self._stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
        return times


def copy_bytes_per_second(backend: BenchBackend) -> float:
    """Device to device, bytes read and written."""
    with backend._stream:
        a, b = cupy.zeros(1 << 31, cupy.uint8), cupy.zeros(1 << 31, cupy.uint8)

    def copy() -> None:
        cupy.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, a.nbytes, 3, backend._stream.ptr)

    return 2 * a.nbytes / statistics.median(backend.seconds(copy))


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def surroundings(commit: str | None) -> dict[str, Any]:
    """What ran where."""
    device = cupy.cuda.runtime.getDeviceProperties(0)
    if commit is None:
        said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = said.stdout.strip() or None
    driver = Path("/proc/driver/nvidia/version")
    return {
        "shardline": __version__,
        "commit": commit,
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "python": platform.python_version(),
        "cupy": cupy.__version__,
        "gpu": device["name"].decode(),
        "driver_cuda": cupy.cuda.runtime.driverGetVersion(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
    }


def write(path: Path, report: dict[str, Any]) -> None:
    """Keep a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"written to {path}\n")
