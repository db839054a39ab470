"""The rotary table against angles taken one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardline.stage import RopeSpec
from shardline.stage.rope import rope_tables

POSITIONS = [0, 1, 255, 256, 257, 4095, 8191, 65536, 131071]


@pytest.mark.parametrize(
    ("rope", "factors"),
    [
        (RopeSpec(1e5, 64, True), None),
        (RopeSpec(1e6, 128, False), None),
        (RopeSpec(1e4, 32, False, "linear", 4.0), None),
        (RopeSpec(5e5, 64, True, has_frequency_factors=True), np.linspace(1, 8, 32, dtype=np.float32)),
        (RopeSpec(1e4, 2, True), None),
    ],
    ids=["plain", "qwen", "linear", "factors", "one pair"],
)
def test_cosines_and_sines(rope, factors):
    """Within one rounding to float32 of float64's angle, whose own error grows with the position: 1e-16 of it."""
    cos, sin = rope_tables(rope, POSITIONS[-1] + 1, factors)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (POSITIONS[-1] + 1, rope.rotary_dim // 2)
    for position in POSITIONS:
        for i in range(rope.rotary_dim // 2):
            angle = position / rope.factor * rope.base ** (-2 * i / rope.rotary_dim)
            if factors is not None:
                angle /= float(factors[i])
            bound = 2.0**-24 + angle * 2.0**-50
            assert abs(float(cos[position, i]) - math.cos(angle)) <= bound
            assert abs(float(sin[position, i]) - math.sin(angle)) <= bound


def test_a_table_does_not_depend_on_its_length():
    """Stages of other pools have shorter tables; their leading rows are the same bytes."""
    whole, _ = rope_tables(RopeSpec(1e5, 64, True), 1000, None)
    for positions in (1, 255, 256, 257, 999):
        part, _ = rope_tables(RopeSpec(1e5, 64, True), positions, None)
        assert np.array_equal(part, whole[:positions])
