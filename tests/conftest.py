"""Fixtures that more than one room's tests use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

with contextlib.suppress(ImportError):  # the tests on a GPU need no hypothesis
    from hypothesis import HealthCheck, settings

    # How fast the machine is decides no test.
    settings.register_profile("shardline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shardline")


@pytest.fixture(scope="session")
def quantized() -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """What an int8 pool holds of float32 heads [.., D], by its definition: int8 [.., D] and float16 scales [..]."""

    def quantize(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            largest = np.abs(heads.astype(np.float64)).max(axis=-1)
            scale = (largest / 127).astype(np.float16)
            scale = np.where(scale.astype(np.float64) * 127 < largest, np.nextafter(scale, np.float16(np.inf)), scale)
            scale = np.minimum(scale, np.float16(512))
            scale[~np.isfinite(largest)] = np.nan
            quotient = heads / scale.astype(np.float32)[..., None]
            q = np.where(scale[..., None] > 0, np.clip(np.rint(quotient), -127, 127), 0)
        return q.astype(np.int8), scale

    return quantize


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model: SmolLM2-135M-Instruct Q4_1, fetched once into the user's cache as `make demo` does."""
    given = os.environ.get("SHARDLINE_TEST_MODEL")
    if given:
        return Path(given)
    from shardline.cluster.models import fetch

    return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2: Path) -> Mapping[str, Any]:
    """Its key-value pairs: what the tokenizer and the chat template are built from. Not to be changed."""
    from shardline.stage import open_checkpoint

    checkpoint = open_checkpoint(smollm2)
    try:
        return MappingProxyType(dict(checkpoint.metadata))
    finally:
        checkpoint.close()
