"""Fixtures that more than one room's tests use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import cache
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


# -- several workers at once (pytest-xdist) ----------------------------------------------------------------------------

# Those without Ray that take longest: nobody is to begin one of them when the others have nothing left.
LONG = ("test_bits.py", "test_package.py", "test_verify.py", "test_cli.py", "test_memory.py", "test_attention.py")


@cache
def starts_ray(path: Path) -> bool:
    """Whether a file has tests that start a Ray cluster."""
    return "pytest.mark.ray" in path.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`. Not one a core: a test may have two threads, or a cluster's processes."""
    return 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker gets whole files, and one of them all files that start Ray: a cluster has no other one beside it."""
    from xdist.scheduler import LoadFileScheduling

    class OneRay(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path: str = super()._split_scope(nodeid)
            return "ray" if starts_ray(config.rootpath / path) else path

        def remove_node(self, node: Any) -> str | None:
            """A worker's end. What it crashed in has failed: xdist's own would run it again, and crash again."""
            units = self.assigned_work[node]
            crashed: str | None = next(
                (test for unit in units.values() for test, done in unit.items() if not done), None
            )
            for scope, unit in list(units.items()):
                if crashed in unit:
                    unit[crashed] = True
                if all(unit.values()):
                    del units[scope]
            super().remove_node(node)
            return crashed

    config.option.loadscopereorder = False
    return OneRay(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker, the long ones first."""
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONG, start=1)}
        items.sort(key=lambda item: 0 if starts_ray(item.path) else places.get(item.path.name, len(LONG) + 1))
