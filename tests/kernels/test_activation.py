"""What joins a gate and an up: within the stated bounds of the true value, and each lane on its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.kernels.cpu.activation import CODES, activate
from shardline.kernels.cpu.jit import jit
from shardline.kernels.cpu.resident import LANES

Floats = NDArray[np.float32]

# In units in the last place of the true value; see the module.
BOUNDS = {"silu": 3.0, "gelu_tanh": 4.0, "clamped_swiglu": 4.0}


@jit
def _activate(code: Any, gate: Any, up: Any) -> None:
    for block in range(gate.shape[0]):
        activate(code, gate[block].ctypes.data, up[block].ctypes.data)


def run(activation: str, gate: Any, up: Any) -> Floats:
    g, u = np.broadcast_arrays(np.asarray(gate, np.float32), np.asarray(up, np.float32))
    size = g.size
    blocks = np.zeros((2, -(-size // LANES) * LANES), np.float32)
    blocks[0, :size], blocks[1, :size] = g.ravel(), u.ravel()
    blocks = blocks.reshape(2, -1, LANES)
    _activate(CODES[activation], blocks[0], blocks[1])
    return blocks[0].ravel()[:size].reshape(g.shape)


def truth(activation: str, gate: Floats, up: Floats) -> tuple[NDArray[np.longdouble], NDArray[np.longdouble]]:
    """The true value, and the argument of its exponential."""
    g, u = gate.astype(np.longdouble), up.astype(np.longdouble)
    argument = g
    if activation == "gelu_tanh":
        argument = 2 * np.sqrt(2 / np.longdouble(np.pi)) * (g + np.longdouble("0.044715") * g**3)
    if activation == "clamped_swiglu":
        g, u = np.minimum(g, 7), np.clip(u, -7, 7) + 1
        argument = np.longdouble("1.702") * g
    return g / (1 + np.exp(-np.maximum(argument, -10_000))) * u, argument


@pytest.mark.parametrize("activation", list(CODES))
def test_is_within_its_bound_of_the_true_value(activation: str) -> None:
    rng = np.random.default_rng(0)
    lowest = {"silu": -88, "gelu_tanh": -10.2, "clamped_swiglu": -52}[activation]
    ramp, near = np.linspace(lowest, 50, 400_001), rng.normal(0, 1e-4, 20_000)
    gate = np.concatenate([ramp, near, rng.normal(0, 1, 100_000), np.linspace(-1e4, lowest, 9999)]).astype(np.float32)
    up = rng.normal(0, 4, gate.size).astype(np.float32)
    true, argument = truth(activation, gate, up)
    limits = np.finfo(np.float32)
    normal = (np.abs(true) > limits.smallest_normal) & (argument > -88.7)
    assert normal.mean() > 0.9
    unit = np.spacing(np.abs(true).astype(np.float32)).astype(np.longdouble)
    result = run(activation, gate, up)
    error = np.where(normal, np.abs(result.astype(np.longdouble) - true) / unit, 0)
    worst = error.argmax()
    assert error[worst] < BOUNDS[activation], (gate[worst], up[worst], error[worst])
    assert (np.abs(result[~normal]) < 1e-34).all()


def test_at_their_borders() -> None:
    huge = np.float32(3e38)
    for activation in CODES:
        np.testing.assert_array_equal(run(activation, [0.0, -0.0, -1e4, -huge, 0.0], [3.0, 3.0, 3.0, 1.0, huge]), 0)
    np.testing.assert_array_equal(run("silu", [1e4, huge, np.inf], [2.0, 1.0, 1.0]), [2e4, huge, np.inf])
    np.testing.assert_array_equal(run("gelu_tanh", [1e4, huge, np.inf], [2.0, 1.0, 1.0]), [2e4, huge, np.inf])
    seven = run("clamped_swiglu", 7.0, 7.0)
    np.testing.assert_array_equal(run("clamped_swiglu", [7.5, 1e30, np.inf], [8.0, huge, np.inf]), seven)
    np.testing.assert_array_equal(run("clamped_swiglu", 7.0, [-8.0, -huge, -np.inf]), run("clamped_swiglu", 7.0, -7.0))
    assert seven > 55


@pytest.mark.parametrize("activation", list(CODES))
def test_a_nan_stays_in_its_lane(activation: str) -> None:
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, LANES), np.float32)
    clean = run(activation, gate, up)
    for lane in range(LANES):
        for side in range(2):
            given = np.stack([gate, up])
            given[side, lane] = np.nan
            dirty = run(activation, *given)
            assert np.isnan(dirty[lane])
            np.testing.assert_array_equal(np.delete(dirty, lane), np.delete(clean, lane))


@pytest.mark.parametrize("activation", list(CODES))
def test_a_result_does_not_depend_on_its_lane(activation: str) -> None:
    gate, up = np.random.default_rng(2).standard_normal((2, LANES), np.float32) * 4
    expected = run(activation, gate, up)
    for shift in range(1, LANES):
        shifted = run(activation, np.roll(gate, shift), np.roll(up, shift))
        np.testing.assert_array_equal(shifted, np.roll(expected, shift))
