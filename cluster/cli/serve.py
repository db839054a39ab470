"""`shardline serve` and `stop`: an engine for Python clients anywhere on a Ray cluster."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

from shardline.cluster.build import EngineOptions, build_engine
from shardline.cluster.cli.engine import planned
from shardline.cluster.cli.output import say, waiting
from shardline.cluster.connection import ENGINE_NAME
from shardline.cluster.errors import EngineDeadError, EngineNotFoundError

WATCH_SECONDS = 2.0


def serve_command(options: EngineOptions, name: str | None) -> None:
    """See `shardline serve`."""
    import ray

    from shardline.cluster.engine_actor import serve, stop_serving

    name = name or ENGINE_NAME
    with planned(options) as prepared:
        with waiting("loading the model"):
            actor = serve(partial(build_engine, prepared), name=name, progress=say)
        try:
            address = ray.get_runtime_context().gcs_address
            named = "" if name == ENGINE_NAME else f", name={name!r}"
            say(f"ready. In Python: shardline.Client.connect({address!r}{named}). Ctrl-C stops it.", style="")
            _watch(actor)
        finally:
            with waiting("stopping"), contextlib.suppress(EngineNotFoundError):
                stop_serving(name)


def stop_command(address: str, name: str | None) -> None:
    """See `shardline stop`."""
    from shardline.cluster.engine_actor import stop_serving
    from shardline.cluster.ray_runtime import connected

    with connected(address), waiting("stopping"):
        stop_serving(name or ENGINE_NAME)
    say(f"stopped the engine {name or ENGINE_NAME!r}", style="")


def _watch(actor: Any) -> None:
    """Until the engine is dead. Raises EngineDeadError."""
    import ray
    from ray.exceptions import RayError

    while True:
        try:
            status = ray.get(actor.status.remote())
        except RayError as error:
            raise EngineDeadError(f"the engine's process is gone: {error}") from error
        if status.state == "dead":
            raise EngineDeadError(status.reason)
        time.sleep(WATCH_SECONDS)
