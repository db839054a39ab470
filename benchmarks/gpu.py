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
from benchmarks.record import RESULTS, spread
from cupy_backends.cuda.libs import nvrtc
from numpy.typing import NDArray

from shardline import __version__
from shardline.kernels.cuda import experts, tables, weights
from shardline.kernels.cuda.backend import CudaBackend
from shardline.kernels.cuda.compile import HERE
from shardline.kernels.cuda.pack import Format, blocks_of, pad_to

__all__ = ["RESULTS", "BenchBackend", "limits", "spread", "surroundings", "write"]

SOURCE = np.frombuffer(np.random.default_rng(0).bytes(1 << 24), np.uint32)


def symmetric(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The same with every 4 bits of 0 as 8, which stands for zero: then the weights' mean is zero.

    A mean, however small, pulls the rows of all sequences into one direction within two layers, and a router sends them
    all to the same few experts.
    """
    nibbles = np.array([value or 8 for value in range(16)], np.uint8)
    pairs = words.view(np.uint8)
    return (nibbles[pairs & 15] | nibbles[pairs >> 4] << 4).view(np.uint32)


INTEGERS = symmetric(SOURCE)


class BenchBackend(CudaBackend):
    """Makes random weights where a real backend loads them: any bits are valid integers."""

    def random(
        self, channels: int, inputs: int, group_size: int, *, minimums: bool, gated: bool = False
    ) -> weights.CudaWeight:
        """A 4-bit matrix; a gated one has `channels` for each of gate and up."""
        both, blocks = channels * (1 + gated), blocks_of(inputs)
        arrays = self._random_arrays(both, blocks, group_size, minimums)
        part = weights.CudaPart(4, group_size, minimums, False, *arrays, both, 0, blocks)
        kept: weights.CudaWeight = self._keep(self.described(weights.CudaWeight((part,), channels, inputs, gated)))
        return kept

    def random_experts(
        self, count: int, width: int, inputs: int, group_size: int, *, minimums: bool
    ) -> experts.CudaExperts:
        """Experts in 4 bits: gates and ups [width, inputs], downs [inputs, width]."""

        def matrices(channels: int, blocks: int) -> experts.ExpertMatrices:
            rows = pad_to(channels, tables.PADDED_CHANNELS)
            arrays = self._random_arrays(count * rows, blocks, group_size, minimums)
            # Padded channels alone come between two experts' own.
            strides = [array.nbytes // count if array.size > 1 else 0 for array in arrays]
            table = [[a.data.ptr + e * stride for a, stride in zip(arrays, strides, strict=True)] for e in range(count)]
            form = Format(4, group_size, minimums, False)
            return experts.ExpertMatrices(
                form, cupy.asarray(np.array(table, np.uint64)), tuple(arrays), channels, blocks, None
            )

        gate_up = matrices(2 * width, blocks_of(inputs))
        down = matrices(inputs, blocks_of(width))
        made = experts.CudaExperts((gate_up,), down, "silu", None, None, None, count, width, inputs)
        kept: experts.CudaExperts = self._keep(made)
        return kept

    def _random_arrays(self, channels: int, blocks: int, group_size: int, minimums: bool) -> tuple[Any, Any, Any]:
        """Integers, scales and minimums of that many channels."""
        rows = pad_to(channels, tables.PADDED_CHANNELS)
        words = rows * blocks * tables.BLOCK_K // 8
        scales = (rows // 16, blocks * tables.BLOCK_K // group_size, 8, 2)
        with self._stream:
            # Copies of one random run, shifted, so that no two matrices are the same bits.
            source = cupy.asarray(np.roll(INTEGERS, self._resident_bytes % 997))
            integers = cupy.tile(source, -(-words // source.size))[:words].copy()
            scale = cupy.asarray(np.resize(SOURCE.view(np.uint16) % 0x200 + 0x1C00, scales).astype(np.uint16))
            minimum = scale + np.uint16(0x8C00) if minimums else cupy.zeros(1, cupy.uint16)
        return integers, scale, minimum

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


LIMITS = """
extern "C" __global__ void __launch_bounds__(512) copy(const uint4* from, uint4* to, size_t count) {
    const size_t step = (size_t)gridDim.x * 512;
    size_t i = (size_t)blockIdx.x * 512 + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 v[4];
        UNROLL for (int j = 0; j < 4; j++) v[j] = load_streaming(from + i + j * step);
        UNROLL for (int j = 0; j < 4; j++) to[i + j * step] = v[j];
    }
    for (; i < count; i += step) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(512) mma_rate(float* out, int rounds) {
    float c[8][4];
    u32 a[4] = {threadIdx.x * 0x3c013c01u, 0x3c003c00u, 0x38003800u, 0x34003400u};
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] = 0.f;
    for (int r = 0; r < rounds; r++)
        UNROLL for (int i = 0; i < 8; i++) mma_16x8x16(c[i], a, 0x3c003c00u + threadIdx.x, 0x38003c00u);
    float sum = 0.f;
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int e = 0; e < 4; e++) sum += c[i][e];
    if (sum == 1234.5f) out[threadIdx.x] = sum;
}
"""


def limits(backend: BenchBackend) -> tuple[float, float]:
    """The card's own: bytes a second of a copy on the device, read and written; operations of mma.sync on registers."""
    program = nvrtc.createProgram((HERE / "common.cuh").read_text() + LIMITS, "limits.cu", (), ())
    nvrtc.compileProgram(program, (f"-arch=sm_{backend.arch}", "--std=c++17"))
    module = cupy.cuda.function.Module()
    module.load(nvrtc.getCUBIN(program))
    copy, rate, stream = module.get_function("copy"), module.get_function("mma_rate"), backend._stream
    with stream:
        a, b = cupy.zeros((1 << 31) // 4, cupy.uint32), cupy.zeros((1 << 31) // 4, cupy.uint32)
    blocks, rounds, out = backend._processors, 4000, backend.empty((512,), "float32")
    copied = backend.seconds(lambda: copy((4 * blocks,), (512,), (a, b, np.uint64(a.nbytes // 16)), stream=stream))
    multiplied = backend.seconds(lambda: rate((blocks,), (512,), (out, np.int32(rounds)), stream=stream))
    flops = blocks * 16 * rounds * 8 * 2 * 16 * 8 * 16
    return 2 * a.nbytes / statistics.median(copied), flops / statistics.median(multiplied)


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
