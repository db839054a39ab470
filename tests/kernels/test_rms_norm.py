from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardline.kernels import Backend

EPS = 1e-5
SIZES = (1, 7, 16, 63, 64, 65, 80, 127, 128, 576, 960, 1000, 2048, 4099)
ROWS = (*range(1, 9), 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257)


def norm(backend: Backend, x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
    out = backend.upload(np.full((len(x) + 1, x.shape[1]), np.nan, np.float32))
    backend.rms_norm(backend.upload(x), backend.upload(weight), eps, out, len(x))
    result = backend.read(out)
    assert np.isnan(result[len(x) :]).all(), "a row past the last was written"
    return result[: len(x)]


def reference(x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_definition(cpu: Callable[[int], Backend], size: int) -> None:
    rng = np.random.default_rng(size)
    # Rows from tiny, where eps rules, to large.
    x = (rng.standard_normal((7, size)) * 10.0 ** rng.uniform(-4, 4, (7, 1))).astype(np.float32)
    weight = rng.standard_normal(size).astype(np.float32)
    # Float32 sums of squares in at least 16 lanes: well within 1e-6 of the result, relative.
    np.testing.assert_allclose(norm(cpu(2), x, weight), reference(x, weight), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [80, 576, 1000])
def test_a_row_is_the_same_among_any_others(cpu: Callable[[int], Backend], size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((max(ROWS), size)).astype(np.float32)
    weight = rng.standard_normal(size).astype(np.float32)
    alone = np.concatenate([norm(cpu(1), x[r : r + 1], weight) for r in range(len(x))])
    for rows in ROWS:
        for threads in (1, 2, 3):
            np.testing.assert_array_equal(norm(cpu(threads), x[:rows], weight), alone[:rows])
    order = rng.permutation(len(x))
    np.testing.assert_array_equal(norm(cpu(3), x[order], weight), alone[order])


def add_norm(backend: Backend, x: np.ndarray, weight: np.ndarray, before: np.ndarray) -> np.ndarray:
    out = backend.upload(np.concatenate([before, np.full((1, x.shape[1]), np.nan, np.float32)]))
    backend.add_rms_norm(backend.upload(x), backend.upload(weight), EPS, out, len(x))
    result = backend.read(out)
    assert np.isnan(result[len(x)]).all(), "a row past the last was written"
    return result[: len(x)]


@pytest.mark.parametrize("size", [1, 7, 80, 576, 1000])
def test_a_norm_that_is_added_has_the_norms_bits_and_one_rounding_more(
    cpu: Callable[[int], Backend], size: int
) -> None:
    rng = np.random.default_rng(size)
    x, before = rng.standard_normal((2, 65, size)).astype(np.float32)
    weight = rng.standard_normal(size).astype(np.float32)
    expected = before + norm(cpu(1), x, weight)
    for rows in (1, 2, 5, 64, 65):
        for threads in (1, 2, 3):
            np.testing.assert_array_equal(add_norm(cpu(threads), x[:rows], weight, before[:rows]), expected[:rows])
    order = rng.permutation(65)
    np.testing.assert_array_equal(add_norm(cpu(3), x[order], weight, before[order]), expected[order])


def test_nan_and_infinity_stay_in_their_row(cpu: Callable[[int], Backend]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 100)).astype(np.float32)
    weight = rng.standard_normal(100).astype(np.float32)
    clean = norm(cpu(2), x, weight)
    x[1, 99] = np.nan
    x[3, 0] = np.inf
    dirty = norm(cpu(2), x, weight)
    np.testing.assert_array_equal(dirty[[0, 2, 4]], clean[[0, 2, 4]])
    assert np.isnan(dirty[1]).all()
    assert np.isnan(dirty[3, 0])
    assert (dirty[3, 1:] == 0).all()


def test_a_row_of_zeros_gives_zeros(cpu: Callable[[int], Backend]) -> None:
    assert (norm(cpu(1), np.zeros((1, 64), np.float32), np.ones(64, np.float32)) == 0).all()
