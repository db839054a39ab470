"""The rotary table against angles taken one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardline.stage import RopeSpec
from shardline.stage.rope import rope_tables

FOUR, EIGHT = (4.0,) * 16, (8.0,) * 16
RISING = tuple(np.linspace(1, 8, 32))
POSITIONS = [0, 1, 255, 256, 257, 4095, 8191, 65536, 131071]


@pytest.mark.parametrize(
    ("rope", "max_context", "factors", "attention_factor"),
    [
        (RopeSpec(1e5, 64, True), 8192, None, 1.0),
        (RopeSpec(1e6, 128, False), 8192, None, 1.0),
        (RopeSpec(1e4, 32, False, FOUR), 8192, FOUR, 1.0),
        (RopeSpec(5e5, 64, True, RISING), 8192, RISING, 1.0),
        (RopeSpec(1e4, 2, True), 8192, None, 1.0),
        (RopeSpec(1e4, 32, False, FOUR, EIGHT, 4096, 1.2), 4096, FOUR, 1.2),
        (RopeSpec(1e4, 32, False, FOUR, EIGHT, 4096, 1.2), 4097, EIGHT, 1.2),
    ],
    ids=["plain", "qwen", "linear", "factors", "one pair", "short", "long"],
)
def test_cosines_and_sines(rope, max_context, factors, attention_factor):
    """Within one rounding to float32 of float64's angle, whose own error grows with the position: 1e-16 of it."""
    cos, sin = rope_tables(rope, POSITIONS[-1] + 1, max_context)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (POSITIONS[-1] + 1, rope.rotary_dim // 2)
    for position in POSITIONS:
        for i in range(rope.rotary_dim // 2):
            angle = position * rope.base ** (-2 * i / rope.rotary_dim)
            if factors is not None:
                angle /= factors[i]
            bound = attention_factor * (2.0**-24 + angle * 2.0**-50)
            assert abs(float(cos[position, i]) - attention_factor * math.cos(angle)) <= bound
            assert abs(float(sin[position, i]) - attention_factor * math.sin(angle)) <= bound


def test_a_table_does_not_depend_on_its_length():
    """Stages of other pools have shorter tables; their leading rows are the same bytes."""
    whole, _ = rope_tables(RopeSpec(1e5, 64, True), 1000, 1000)
    for positions in (1, 255, 256, 257, 999):
        part, _ = rope_tables(RopeSpec(1e5, 64, True), positions, 1000)
        assert np.array_equal(part, whole[:positions])
