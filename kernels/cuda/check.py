"""Does a GPU compute? `python -m shardline.kernels.cuda.check 0` runs one small step there and prints a `CudaCheck`.

In a process of its own: what is mapped into it is the backend's doing, and a driver that hangs or crashes takes nobody
with it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardline.kernels.backend import Backend, KVLayout, RopeTable, Rows, StepShape
from shardline.kernels.cuda.libraries import vendor_libraries
from shardline.kernels.matrix import GroupedMatrix, pack_nibbles
from shardline.kernels.sampling import SamplingBatch

ROWS, CHANNELS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 256, 4, 2, 64, 512


@dataclass(frozen=True, slots=True)
class CudaCheck:
    """What was found.

    Attributes:
        driver: The kernel module's version, and the newest CUDA that it knows: "580.159.04, CUDA 13.0".
        nvrtc: The compiler's version.
        problem: What went wrong; "" if the kernels compiled and a product gave the right bits.
        imported: Vendor libraries that `import cupy` mapped into the process, or that were there before.
        stepped: Those that came with the step: there must be none.
    """

    driver: str
    nvrtc: str
    problem: str
    imported: tuple[str, ...]
    stepped: tuple[str, ...]


def check(index: int) -> CudaCheck:
    """Run a small step on a GPU of this process. Raises DeviceUnavailableError."""
    from shardline.kernels import cuda_backend, cuda_device

    cuda_device(index)
    imported = vendor_libraries()
    problem = ""
    try:
        backend = cuda_backend(index)
        with _closed(backend):
            problem = product_problem(backend) or step_problem(backend)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return CudaCheck(
        _driver(), _nvrtc(), problem, tuple(sorted(imported)), tuple(sorted(vendor_libraries() - imported))
    )


def product_problem(backend: Backend) -> str:
    """A product of integers, whose sums are exact in any order: what is wrong with it, or ""."""
    rng = np.random.default_rng(0)
    integers, x = rng.integers(0, 16, (CHANNELS, CHANNELS)), rng.integers(-8, 9, (ROWS, CHANNELS))
    rows = backend.activations(ROWS, CHANNELS)
    backend.write(rows, x.astype(np.float32))
    out = backend.empty((ROWS, CHANNELS), "float32")
    backend.linear(rows, backend.load_matrix([_matrix(integers)]), out, ROWS)
    wrong = np.count_nonzero(backend.read(out) != (x @ (integers - 8).T).astype(np.float32))
    return f"{wrong} of {out.size} sums of one product are wrong" if wrong else ""


def step_problem(backend: Backend) -> str:
    """A step of one layer, issued, recorded and replayed: what is wrong with it, or ""."""
    step = _Step(backend)
    first, *later = (step.run() for _ in range(3))
    tokens, kept, logits = first
    if not np.isfinite(logits).all():
        return "a step of finite weights gives logits that are not"
    if not np.array_equal(tokens, logits.argmax(axis=1)) or not np.array_equal(kept, tokens):
        return "the most likely tokens are not those that were chosen, or not those that the device keeps"
    if not all(np.array_equal(got, wanted) for step in later for got, wanted in zip(step, first, strict=True)):
        return "the same step gives other bits when it is replayed"
    return ""


class _Step:
    """One layer of a decoder with random weights, on a few rows of one sequence."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        rng = np.random.default_rng(1)

        def matrix(channels: int) -> GroupedMatrix:
            return _matrix(rng.integers(0, 16, (channels, CHANNELS)), 2.0**-6)

        layout = KVLayout(1, 1, 16, KV_HEADS, HEAD_DIM, "float16")
        self._embed = backend.load_matrix([matrix(VOCAB)])
        self._qkv = backend.load_matrix([matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM)])
        self._output = backend.load_matrix([matrix(CHANNELS)])
        self._gate_up = backend.load_gated(matrix(CHANNELS), matrix(CHANNELS))
        self._down = backend.load_matrix([matrix(CHANNELS)])
        self._norm = backend.upload(np.ones(CHANNELS, np.float32))
        self._cache = backend.allocate_kv(layout)
        angles = np.outer(np.arange(16), 1e4 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
        cos, sin = (backend.upload(wave(angles).astype(np.float32)) for wave in (np.cos, np.sin))
        self._rope = RopeTable(cos, sin, interleaved=False)
        indices = [backend.empty((ROWS,), "int32") for _ in range(4)]
        tables = backend.empty((1, 1), "int32")
        for array in indices:
            backend.write(array, np.arange(ROWS, dtype=np.int32))
        backend.write(indices[3], np.zeros(ROWS, np.int32))
        backend.write(tables, np.zeros((1, 1), np.int32))
        # The step begins with the last tokens of three places, and ends with its own in their stead.
        self._token_ids = backend.upload(np.array([-2, -3, -1], np.int32))
        self._last_tokens = indices[0]
        self._rows = Rows(ROWS, indices[1], indices[2], indices[3], tables)
        self._x = backend.empty((ROWS, CHANNELS), "float32")
        self._normed, self._gated = (backend.activations(ROWS, CHANNELS) for _ in range(2))
        self._attended = backend.activations(ROWS, HEADS * HEAD_DIM)
        self._heads = backend.empty((ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM), "float32")
        self._logits = backend.empty((ROWS, VOCAB), "float32")
        backend.reserve(StepShape(ROWS, HEADS, KV_HEADS, HEAD_DIM, 16, 0, ROWS, VOCAB, 16, 0))

    def run(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, those that are left in their places, and logits."""
        backend, places = self._backend, np.array([2, 0, 1], np.int32)
        backend.write(self._last_tokens, np.arange(ROWS, dtype=np.int32))
        backend.replay("step", self._issue)
        sampled = backend.sample_later(self._logits, _greedy(ROWS), self._last_tokens, places)
        logits = backend.read_later(self._logits)
        kept = backend.read(self._last_tokens)[places]
        return sampled.wait().token_ids, kept, logits.wait()

    def _issue(self) -> None:
        backend, rows = self._backend, self._rows
        backend.embedding(self._token_ids, self._embed, self._x, ROWS, last_tokens=self._last_tokens)
        backend.begin_step(rows, self._cache, HEADS)
        backend.rms_norm(self._x, self._norm, 1e-5, self._normed, ROWS)
        backend.linear(self._normed, self._qkv, self._heads, ROWS)
        backend.rope_kv_write(self._heads, rows, self._rope, self._cache, 0)
        backend.paged_attention(self._heads, rows, self._cache, 0, HEAD_DIM**-0.5, self._attended)
        backend.linear(self._attended, self._output, self._x, ROWS, accumulate=True)
        backend.rms_norm(self._x, self._norm, 1e-5, self._normed, ROWS)
        backend.gated_linear(self._normed, self._gate_up, self._gated, ROWS)
        backend.linear(self._gated, self._down, self._x, ROWS, accumulate=True)
        backend.rms_norm(self._x, self._norm, 1e-5, self._normed, ROWS)
        backend.linear(self._normed, self._embed, self._logits, ROWS)


def _matrix(integers: np.ndarray, scale: float = 1.0) -> GroupedMatrix:
    """4 bits in groups of 128, around 8."""
    scales = np.full((len(integers), CHANNELS // 128), scale, np.float16)
    return GroupedMatrix(4, 128, pack_nibbles(integers.astype(np.uint8)), scales, scales * np.float16(-8))


def _greedy(rows: int) -> SamplingBatch:
    def filled(value: float, dtype: str = "float32", more: int = 0) -> Any:
        return np.full(rows + more, value, dtype)

    nothing = np.zeros(0, np.int32)
    return SamplingBatch(
        temperature=filled(0),
        top_k=filled(0, "int32"),
        top_p=filled(1),
        min_p=filled(0),
        repetition=filled(1),
        presence=filled(0),
        frequency=filled(0),
        seed=filled(0, "uint64"),
        position=filled(0, "int64"),
        logprobs=filled(-1, "int32"),
        bias_offsets=filled(0, "int64", 1),
        bias_ids=nothing,
        bias_values=np.zeros(0, np.float32),
        history_offsets=filled(0, "int64", 1),
        history_ids=nothing,
        history_counts=nothing,
    )


@contextmanager
def _closed(backend: Backend) -> Iterator[None]:
    try:
        yield
    finally:
        backend.close()


def _driver() -> str:
    from shardline.kernels.cuda.cupy_import import cupy

    known = int(cupy.cuda.runtime.driverGetVersion())
    cuda = f"CUDA {known // 1000}.{known % 1000 // 10}"
    try:
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  ...", or "... Open Kernel Module for ...".
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return cuda
    version = next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "")
    return f"{version}, {cuda}" if version else cuda


def _nvrtc() -> str:
    from cupy_backends.cuda.libs import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dataclasses.asdict(check(int(sys.argv[1])))))
