"""shardline: one large language model served from several small, unequal GPUs, with the same bytes every time.

The public interface is what ``__all__`` lists. Everything else is for the engine's own rooms (``shardline.cluster``,
``shardline.stage``, ``shardline.kernels``, ``shardline.scheduler``), which ``docs/architecture.md`` walks through.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardline._version import __version__

if TYPE_CHECKING:
    from shardline.cluster import Client, Request
    from shardline.scheduler import SamplingParams

__all__ = ["Client", "Request", "SamplingParams", "__version__"]

# Imported on first use: `import shardline` must not start Ray's or numba's import.
_HOMES = {
    "Client": "shardline.cluster",
    "Request": "shardline.cluster",
    "SamplingParams": "shardline.scheduler",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shardline' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
