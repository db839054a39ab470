"""The engine as a named Ray actor that outlives whoever started it, and serves clients from anywhere in the cluster.

All deltas of one client process come in batches through one long poll: a Ray call a batch, not one a token or request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from shardline.cluster.connection import ENGINE_NAME
from shardline.cluster.engine import Engine, EngineStatus
from shardline.cluster.errors import EngineNotFoundError, LeaseExpiredError, ShardlineError
from shardline.cluster.inbox import Failure, Inbox
from shardline.cluster.models import Progress
from shardline.cluster.request import Delta, Request
from shardline.cluster.text.generation_defaults import GenerationDefaults
from shardline.scheduler import InvalidParameterError

POLL_SECONDS = 2.0
"""How long a poll waits for something to say."""

LEASE_SECONDS = 15.0
"""A client that does not begin a poll for this long is gone."""

_STOP_SECONDS = 30.0
_TOLD_SECONDS = 1.0


class _ClientState:
    def __init__(self) -> None:
        self.inbox = Inbox()
        # Sequences that go on, of each request.
        self.running: dict[str, int] = {}
        self.heard_of = time.monotonic()
        # The last batch, kept until the client's next poll says that it has arrived.
        self.number = 0
        self.batch: list[Delta | Failure] = []

    def note_ends(self, batch: list[Delta | Failure]) -> None:
        """Forget requests that have ended: another client may use their ids again."""
        for item in batch:
            if isinstance(item, Failure):
                self.running.pop(item.request_id, None)
            elif item.finish_reason is not None and item.request_id in self.running:
                self.running[item.request_id] -= 1
                if not self.running[item.request_id]:
                    del self.running[item.request_id]


class EngineHost:
    """The actor's class. Every method but the constructor runs in the actor's event loop."""

    def __init__(
        self,
        build: Callable[..., Engine],
        *,
        poll_seconds: float = POLL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`build` makes the engine here, in the actor's process, so that the stages' actors live and die with it."""
        self._build = build
        self._poll_seconds = poll_seconds
        self._lease_seconds = lease_seconds
        self._engine: Engine | None = None
        self._told: list[str] = []
        self._clients: dict[str, _ClientState] = {}
        self._reaper: asyncio.Task[None] | None = None

    async def start(self, tells: bool = False) -> None:
        """Build and start the engine; if it `tells`, `build` takes `progress`. Raises what keeps it from starting."""
        self._engine = self._build(progress=self._told.append) if tells else self._build()
        await self._engine.start()
        self._reaper = asyncio.create_task(self._reap())

    async def told(self, known: int) -> list[str]:
        """The lines of progress after so many."""
        return self._told[known:]

    async def stop(self) -> None:
        """Close the engine; the process ends by `ray.kill` afterwards."""
        if self._reaper is not None:
            self._reaper.cancel()
        if self._engine is not None:
            await self._engine.close()

    async def enter(self, client_id: str) -> None:
        """A new client."""
        self._clients[client_id] = _ClientState()

    async def leave(self, client_id: str) -> None:
        """A client goes, and its requests end."""
        client = self._clients.pop(client_id, None)
        if client is not None:
            for request_id in client.running:
                self._running_engine().cancel(request_id)

    async def submit(self, client_id: str, request: Request) -> None:
        """See `Engine.submit`; the deltas come by `poll`."""
        client = self._client(client_id)
        request_id = request.request_id
        if request_id is None or request_id in client.running:
            raise InvalidParameterError("request_id", request_id, "an id that no running request has")
        # Before the prompt is made, so that a cancel or a leave in the meantime finds it.
        client.running[request_id] = request.params.n
        try:
            await self._running_engine().submit(request, client.inbox)
        except BaseException:
            client.running.pop(request_id, None)
            raise

    async def cancel(self, client_id: str, request_id: str) -> None:
        """End one of the client's own requests; others are not touched."""
        client = self._clients.get(client_id)
        if client is not None and request_id in client.running:
            self._running_engine().cancel(request_id)

    async def poll(self, client_id: str, received: int) -> tuple[int, list[Delta | Failure]]:
        """The next batch and its number; waits for it a while. `received` is the number of the last batch that arrived:
        one whose answer was lost comes again."""
        client = self._client(client_id)
        if client.number == received:
            batch = await client.inbox.take(self._poll_seconds)
            if batch:
                client.number, client.batch = received + 1, batch
                client.note_ends(batch)
        return client.number, client.batch if client.number != received else []

    async def generation_defaults(self) -> GenerationDefaults:
        """See `Engine.generation_defaults`."""
        return self._running_engine().generation_defaults

    async def status(self) -> EngineStatus:
        """See `Engine.status`."""
        return await self._running_engine().status()

    def _running_engine(self) -> Engine:
        if self._engine is None or self._reaper is None:
            # Its name is known from the moment that its process is.
            raise ShardlineError("the engine is still starting: try again in a moment")
        return self._engine

    def _client(self, client_id: str) -> _ClientState:
        client = self._clients.get(client_id)
        if client is None:
            raise LeaseExpiredError(
                f"the engine had not heard of this client for {self._lease_seconds:g} seconds and ended its requests"
            )
        client.heard_of = time.monotonic()
        return client

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 4)
            oldest = time.monotonic() - self._lease_seconds
            for client_id in [key for key, client in self._clients.items() if client.heard_of < oldest]:
                await self.leave(client_id)


def serve(
    build: Callable[..., Engine],
    *,
    name: str = ENGINE_NAME,
    progress: Progress | None = None,
    poll_seconds: float = POLL_SECONDS,
    lease_seconds: float = LEASE_SECONDS,
) -> Any:
    """Start an engine in an actor of its own, on the Ray cluster that this process is connected to.

    The actor stays when this process ends; `stop_serving` ends it. Returns its handle once it is ready.

    Args:
        build: Makes the engine in the actor's process; pickled, so a module's function or a partial of one.
        name: Under which clients find it.
        progress: Called here with lines about what takes long; `build` then takes an argument `progress` for them.
        poll_seconds, lease_seconds: See the constants of this module.

    Raises:
        ShardlineError: an engine of that name runs already.
        Exception: what kept the engine from starting, as itself.
    """
    import ray

    from shardline.cluster.ray_runtime import NAMESPACE

    if _find(name) is not None:
        raise ShardlineError(
            f"an engine named {name!r} runs already: `shardline stop` ends it, or give this one another name"
        )
    actor_class: Any = ray.remote(num_cpus=0, max_restarts=0)(EngineHost)
    # Every client has a poll that waits; beyond this many calls at once a new one would wait for an old one's end.
    options = {"max_concurrency": 10_000, "lifetime": "detached", "name": name, "namespace": NAMESPACE}
    actor = actor_class.options(**options).remote(build, poll_seconds=poll_seconds, lease_seconds=lease_seconds)
    try:
        starting, heard = actor.start.remote(progress is not None), 0
        while progress is not None and not ray.wait([starting], timeout=_TOLD_SECONDS)[0]:
            for line in ray.get(actor.told.remote(heard)):
                progress(line)
                heard += 1
        ray.get(starting)
    except BaseException as error:
        _end(actor, name)
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception):
            raise cause from None
        raise
    return actor


def stop_serving(name: str = ENGINE_NAME) -> None:
    """Stop the engine of that name: its requests end, its stages stop. Raises EngineNotFoundError."""
    import ray
    from ray.exceptions import RayError

    actor = _find(name)
    if actor is None:
        raise EngineNotFoundError(f"the Ray cluster has no engine named {name!r}")
    # A process that cannot answer any more is ended all the same.
    with contextlib.suppress(RayError):
        ray.get(actor.stop.remote(), timeout=_STOP_SECONDS)
    _end(actor, name)


def _end(actor: Any, name: str) -> None:
    """End the actor's process, and wait until its name is free: Ray takes it from the list a little later."""
    import ray

    ray.kill(actor)
    deadline = time.monotonic() + _STOP_SECONDS
    while _find(name) is not None and time.monotonic() < deadline:
        time.sleep(0.02)


def _find(name: str) -> Any | None:
    import ray

    from shardline.cluster.ray_runtime import NAMESPACE

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
