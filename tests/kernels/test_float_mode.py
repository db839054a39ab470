"""A library that was built for fast arithmetic may leave the thread that loads it flushing subnormal numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shardline.kernels import Backend, GroupedMatrix, cpu_backend
from shardline.kernels.cpu import intrinsics
from shardline.kernels.cpu.jit import jit


@jit
def get() -> int:
    return intrinsics.float_mode()


@jit
def put(mode: int) -> None:
    intrinsics.set_float_mode(mode)


@contextmanager
def fast_arithmetic() -> Iterator[int]:
    """This thread flushes subnormal numbers and rounds towards zero, as far as the processor can."""
    before = get()
    # x86: flush to zero, denormals are zero, round towards zero. ARM: flush to zero, round towards zero.
    bad = before | (0xE040 if intrinsics.IEEE_MODE else 0x1C00000)
    put(bad)
    try:
        yield bad
    finally:
        put(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("born_fast", [False, True])
def test_results_do_not_depend_on_the_callers_float_mode(
    random_matrix: Callable[..., GroupedMatrix], threads: int, born_fast: bool
) -> None:
    if born_fast:
        with fast_arithmetic():
            backend = cpu_backend(threads)
    else:
        backend = cpu_backend(threads)
    try:
        check(backend, random_matrix)
    finally:
        backend.close()


def check(backend: Backend, random_matrix: Callable[..., GroupedMatrix]) -> None:
    rng = np.random.default_rng(0)
    rows, inputs, channels = 40, 64, 200
    x = backend.upload(rng.standard_normal((rows, inputs)).astype(np.float32) * np.float32(1e-39))
    weight = backend.load_matrix([random_matrix(channels, inputs)])
    out = backend.empty((rows, channels), "float32")
    normed = backend.empty((rows, inputs), "float32")
    ones = backend.upload(np.ones(inputs, np.float32))

    def run() -> list[np.ndarray]:
        backend.linear(x, weight, out, rows)
        backend.rms_norm(x, ones, 1e-5, normed, rows)
        return [backend.read(out), backend.read(normed)]

    expected = run()
    assert all((array != 0).mean() > 0.9 for array in expected)
    with fast_arithmetic() as mode:
        results = run()
        after = get()
    # Without x86's flags of what has happened so far.
    assert (after ^ mode) & ~0x3F == 0, "the caller's mode was not given back"
    for ours, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), right.view(np.uint32))
