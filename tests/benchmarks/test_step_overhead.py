"""The benchmark of a step's host part runs every part for real, and its figures add up."""

from __future__ import annotations

import pytest
from benchmarks import step_overhead


def test_every_part_is_measured() -> None:
    row = step_overhead.measure(4, steps=16, repeats=2)
    assert row["batch"] == 4
    for part in step_overhead.PARTS:
        assert len(row[part]["trials"]) == 2
        assert row[part]["least"] > 0
    for trial in range(2):
        hidden_by_nothing = sum(row[part]["trials"][trial] for part in ("schedule", "update", "messages"))
        assert row["hop"]["trials"][trial] == pytest.approx(hidden_by_nothing)
