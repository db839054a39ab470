from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardline.kernels import Backend


def soft_cap(backend: Backend, x: np.ndarray, cap: float) -> np.ndarray:
    device = backend.upload(np.concatenate([x, np.full((1, x.shape[1]), 7e5, np.float32)]))
    backend.soft_cap(device, cap, len(x))
    result = backend.read(device)
    assert (result[len(x)] == np.float32(7e5)).all(), "a row past the last was changed"
    return result[: len(x)]


@pytest.mark.parametrize("cap", [0.5, 1.0, 30.0, 50.0])
def test_equals_the_definition(cpu: Callable[[int], Backend], cap: float) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-20, 20, 100_001), np.linspace(0.6, 0.65, 20_001), rng.normal(0, 1e-3, 10_000)])
    x = (x[None] * cap).astype(np.float32)
    exact = cap * np.tanh(x.astype(np.longdouble) / cap)
    # One rounding of the quotient, under two units in the last place of tanh, one rounding of the product.
    np.testing.assert_allclose(soft_cap(cpu(2), x, cap), exact, rtol=3e-7, atol=0)


def test_borders(cpu: Callable[[int], Backend]) -> None:
    x = np.float32([[0.0, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1e-30]])
    np.testing.assert_array_equal(soft_cap(cpu(1), x, 1.0), np.float32([[0, 1, -1, 1, -1, 1e-45, -1e-30]]))
    x[0, ::2] = np.nan
    assert np.isnan(soft_cap(cpu(1), x, 30.0)).tolist() == np.isnan(x).tolist()


@pytest.mark.parametrize("columns", [1, 17, 64, 5003])
def test_a_row_is_the_same_among_any_others(cpu: Callable[[int], Backend], columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = rng.normal(0, 40, (65, columns)).astype(np.float32)
    x[3, 0] = np.nan
    alone = np.concatenate([soft_cap(cpu(1), x[row : row + 1], 30.0) for row in range(65)])
    for rows in (2, 3, 33, 64, 65):
        for threads in (1, 2, 3):
            np.testing.assert_array_equal(soft_cap(cpu(threads), x[:rows], 30.0), alone[:rows])
    order = rng.permutation(65)
    np.testing.assert_array_equal(soft_cap(cpu(3), x[order], 30.0), alone[order])
