"""CuPy, without the vendor library that importing it would load.

`import cupy` asks `cuda.pathfinder` for cuTENSOR, whether anyone will use it or not, and pathfinder first loads what
cuTENSOR stands on: cuBLASLt, even where there is no cuTENSOR. So for the time of the import cuTENSOR counts as loaded.
Every module of this room takes `cupy` from here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["cupy"]


@contextmanager
def _cutensor_counts_as_loaded() -> Iterator[None]:
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
    except ImportError:
        # An older CuPy, which does not ask it.
        yield
        return
    load = pathfinder.load_nvidia_dynamic_lib

    def load_others(name: str) -> Any:
        return None if name == "cutensor" else load(name)

    pathfinder.load_nvidia_dynamic_lib = load_others
    try:
        yield
    finally:
        pathfinder.load_nvidia_dynamic_lib = load


with _cutensor_counts_as_loaded():
    import cupy
