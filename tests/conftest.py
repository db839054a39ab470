"""Fixtures that more than one room's tests use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model: SmolLM2-135M-Instruct Q4_1, fetched once into the user's cache as `make demo` does."""
    given = os.environ.get("SHARDLINE_TEST_MODEL")
    if given:
        return Path(given)
    from shardline.cluster.models import fetch

    return fetch("smollm2-135m")
