"""Backends that the kernels' tests share: making one starts threads, and its code is compiled once a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shardline.kernels import Backend, GroupedMatrix, cpu_backend, pack_nibbles


@pytest.fixture(scope="session")
def cpu() -> Iterator[Callable[[int], Backend]]:
    """A CPU backend with that many threads, the same one each time."""
    made: dict[int, Backend] = {}

    def get(num_threads: int) -> Backend:
        if num_threads not in made:
            made[num_threads] = cpu_backend(num_threads)
        return made[num_threads]

    yield get
    for backend in made.values():
        backend.close()


@pytest.fixture(scope="session")
def random_matrix() -> Callable[..., GroupedMatrix]:
    """Makes a `GroupedMatrix` of N x K with integers over their whole range and weights around zero."""

    def make(
        channels: int, inputs: int, *, bits: int = 4, group_size: int = 32, dtype: str = "float16", seed: int = 0
    ) -> GroupedMatrix:
        rng = np.random.default_rng([seed, channels, inputs, bits, group_size])
        q = rng.integers(0, 1 << bits, (channels, inputs), dtype=np.uint8)
        scale = (rng.random((channels, inputs // group_size)) + 0.5) * (0.1 / (1 << bits))
        minimum = scale * rng.uniform(-0.6, -0.4, scale.shape) * (1 << bits)
        return GroupedMatrix(
            bits, group_size, pack_nibbles(q) if bits == 4 else q, scale.astype(dtype), minimum.astype(dtype)
        )

    return make
