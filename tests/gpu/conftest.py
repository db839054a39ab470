"""One CUDA backend for all tests on a GPU, and random inputs for its ops."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.kernels import GroupedMatrix, pack_nibbles


@dataclass(frozen=True)
class Format:
    """How a matrix is stored. `zero`: every minimum is -zero * scale; None: minimums of their own."""

    bits: int
    group_size: int
    dtype: str
    zero: int | None

    @property
    def defines(self) -> dict[str, int]:
        return {
            "BITS": self.bits,
            "GROUP": self.group_size,
            "HAS_MIN": int(self.zero is None),
            "SCALE_F32": int(self.dtype == "float32"),
        }

    def matrix(self, channels: int, inputs: int, seed: int = 0) -> GroupedMatrix:
        """Random N x K: integers over their whole range, weights around zero."""
        rng = np.random.default_rng([seed, channels, inputs, self.bits, self.group_size])
        high = 1 << self.bits if self.zero is None else min(1 << self.bits, 2 * self.zero)
        q = rng.integers(0, high, (channels, inputs), dtype=np.uint8)
        scale = ((rng.random((channels, inputs // self.group_size)) + 0.5) * (0.1 / high)).astype(self.dtype)
        if self.zero is None:
            minimum = (scale * rng.uniform(-0.6, -0.4, scale.shape) * high).astype(self.dtype)
        else:
            # Exactly, in half precision too: few bits in the scale.
            scale = (np.round(scale.astype(np.float64) * 2**18) / 2**18).astype(self.dtype)
            minimum = (scale.astype(np.float64) * -self.zero).astype(self.dtype)
        return GroupedMatrix(self.bits, self.group_size, pack_nibbles(q) if self.bits == 4 else q, scale, minimum)


FORMATS = [
    Format(4, 32, "float16", None),
    Format(4, 32, "float32", None),
    Format(4, 64, "float16", None),
    Format(4, 128, "float16", 8),
    Format(4, 128, "float16", None),
    Format(4, 16, "float16", 8),
    Format(8, 32, "float16", 128),
    Format(8, 16, "float32", 32),
    Format(8, 64, "float16", None),
    Format(8, 128, "float32", None),
]


EXPERTS = [form.defines | {"EXPERTS": 1, "IS_GATED": 0} for form in FORMATS] + [
    form.defines | {"EXPERTS": 1, "IS_GATED": 1, "ACTIVATION": 0, "GATED_BIAS": 0} for form in FORMATS
]
"""What products of experts are compiled for."""

PORTABLE = (FORMATS[0], FORMATS[3], FORMATS[7])
"""Formats whose products are also compiled without Hopper's instructions, as other cards have them."""


@pytest.fixture(scope="session", params=FORMATS, ids=str)
def weights(request: pytest.FixtureRequest) -> Format:
    """Each format in turn."""
    format_: Format = request.param
    return format_


@pytest.fixture(scope="session")
def portable() -> tuple[Format, ...]:
    """The formats that are also compiled as other cards have them, with the define PORTABLE."""
    return PORTABLE


@pytest.fixture(scope="session")
def formats() -> Callable[..., Format]:
    """Makes a `Format`."""
    return Format


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The backend, with its longest compilations done side by side before."""
    pytest.importorskip("cupy")
    from shardline.kernels.cuda.backend import CudaBackend
    from shardline.kernels.cuda.compile import compile_kernels

    cache: Path = tmp_path_factory.mktemp("kernels")
    backend = CudaBackend(0, cache)
    wanted = [("linear", f.defines) for f in FORMATS] + [("linear", f.defines | {"PORTABLE": 1}) for f in PORTABLE]
    wanted += [("experts", defines) for defines in EXPERTS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: compile_kernels(*source, backend.arch, cache), wanted))
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def poisoned(cuda: Any) -> Callable[..., Any]:
    """A device array of NaN with a payload that no arithmetic gives: what an op must write, and what it must leave."""

    def make(*shape: int) -> Any:
        return cuda.upload(np.full(shape, 0x7FCABCDE, np.uint32).view(np.float32))

    return make


@pytest.fixture(scope="session")
def prepared(cuda: Any) -> Callable[[np.ndarray], tuple[Any, np.ndarray]]:
    """Rows as activations, and what a product sees of them."""

    def make(values: np.ndarray) -> tuple[Any, np.ndarray]:
        x = cuda.activations(*values.shape)
        cuda.write(x, values)
        return x, cuda.read(x)

    return make
