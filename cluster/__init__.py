"""The room of Ray, placement, lifetime and the front doors. Only this room imports ray, and only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardline.cluster.errors import (
    DeadlyRequestError,
    EngineDeadError,
    EngineNotFoundError,
    LeaseExpiredError,
    ModelNotFoundError,
    PlanningError,
    ShardlineError,
    StageLostError,
    TemplateError,
    TokenizerError,
    TransportError,
)
from shardline.cluster.request import Completion, Delta, Message, Request, TokenLogprob, Usage
from shardline.cluster.text.generation_defaults import GenerationDefaults

if TYPE_CHECKING:
    from shardline.cluster.client import AsyncClient, Client
    from shardline.cluster.engine import Engine

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "DeadlyRequestError",
    "Delta",
    "Engine",
    "EngineDeadError",
    "EngineNotFoundError",
    "GenerationDefaults",
    "LeaseExpiredError",
    "Message",
    "ModelNotFoundError",
    "PlanningError",
    "Request",
    "ShardlineError",
    "StageLostError",
    "TemplateError",
    "TokenLogprob",
    "TokenizerError",
    "TransportError",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncClient", "Client"):
        from shardline.cluster import client

        return getattr(client, name)
    if name == "Engine":
        from shardline.cluster.engine import Engine

        return Engine
    raise AttributeError(f"module 'shardline.cluster' has no attribute {name!r}")
