"""How a client reaches its engine: in its own event loop, or in the engine's actor over Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from dataclasses import replace
from typing import Any, Protocol

from shardline.cluster.engine import Engine, EngineStatus
from shardline.cluster.errors import EngineDeadError, EngineNotFoundError, LeaseExpiredError, ShardlineError
from shardline.cluster.inbox import Failure, Inbox
from shardline.cluster.request import Request, checked_id
from shardline.cluster.text.generation_defaults import GenerationDefaults
from shardline.scheduler import InvalidParameterError

ENGINE_NAME = "engine"
"""Of the engine's actor, if nothing else is said."""

_RETRY_SECONDS = 0.5
_RETRIES = 20
_ANSWER_SECONDS = 60.0
"""A poll comes back after a few seconds; one that takes this long was lost, or the engine's process hangs."""

_LEAVE_SECONDS = 5.0


class Connection(Protocol):
    """One client's way to its engine. Belongs to one event loop."""

    async def submit(self, request: Request) -> tuple[str, Inbox]:
        """Accept a request, or raise what the engine raises. Returns its id and where its deltas arrive."""
        ...

    def cancel(self, request_id: str, inbox: Inbox) -> None:
        """End the request of that id whose deltas go to `inbox` soon; an unknown or ended one is no error."""
        ...

    async def generation_defaults(self) -> GenerationDefaults:
        """How the model's makers advise to sample."""
        ...

    async def status(self) -> EngineStatus:
        """The engine's snapshot."""
        ...

    async def close(self) -> None:
        """End this client's requests and what belongs to it. Idempotent."""
        ...


class LocalConnection:
    """An engine in this event loop, which the connection owns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def submit(self, request: Request) -> tuple[str, Inbox]:
        """See `Connection`."""
        inbox = Inbox()
        return await self._engine.submit(request, inbox), inbox

    def cancel(self, request_id: str, inbox: Inbox) -> None:
        """See `Connection`."""
        self._engine.cancel(request_id, inbox)

    async def generation_defaults(self) -> GenerationDefaults:
        """See `Connection`."""
        return self._engine.generation_defaults

    async def status(self) -> EngineStatus:
        """See `Connection`."""
        return await self._engine.status()

    async def close(self) -> None:
        """See `Connection`."""
        await self._engine.close()


class _Lease:
    """One stay with the engine: under an id of its own, so that nothing of an expired one can reach the next."""

    def __init__(self) -> None:
        self.client_id = uuid.uuid4().hex
        self.received = 0


class RayConnection:
    """The engine's actor.

    The deltas of all this client's requests come in batches through one long poll. The poll is the client's lease too:
    when it stays away the actor ends the client's requests.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._lease = _Lease()
        self._renewing = asyncio.Lock()
        self._inboxes: dict[str, Inbox] = {}
        # Sequences of each request that have not ended.
        self._running: dict[str, int] = {}
        self._poll_task: asyncio.Task[None] | None = None
        self._dead: ShardlineError | None = None

    @classmethod
    async def open(cls, address: str, name: str) -> RayConnection:
        """Find the engine. Raises EngineNotFoundError."""
        connection = cls(await asyncio.to_thread(_RAY.find, address, name))
        try:
            await connection._enter()
        except BaseException:
            await asyncio.to_thread(_RAY.release)
            raise
        connection._poll_task = asyncio.create_task(connection._poll(), name="shardline client")
        return connection

    async def submit(self, request: Request) -> tuple[str, Inbox]:
        """See `Connection`."""
        if self._dead is not None:
            raise _copy(self._dead)
        request_id = checked_id(request)
        if request_id in self._inboxes:
            raise InvalidParameterError("request_id", request_id, "an id that no running request has")
        numbered = replace(request, request_id=request_id)
        lease = self._lease
        try:
            return request_id, await self._submit(request_id, numbered)
        except LeaseExpiredError as expired:
            # Nothing of this request was begun.
            await self._renew(lease, expired)
            return request_id, await self._submit(request_id, numbered)

    async def _submit(self, request_id: str, request: Request) -> Inbox:
        inbox = Inbox()
        # Before the call: the first deltas may be here before its answer.
        self._inboxes[request_id] = inbox
        self._running[request_id] = request.params.n
        try:
            await self._call("submit", self._lease.client_id, request)
        except BaseException as error:
            self._forget(request_id)
            if isinstance(error, asyncio.CancelledError | _UnavailableError):
                # It may have been accepted.
                self._cancel(request_id)
            raise
        return inbox

    def cancel(self, request_id: str, inbox: Inbox) -> None:
        """See `Connection`."""
        if self._inboxes.get(request_id) is inbox:
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        if self._dead is None:
            with contextlib.suppress(Exception):
                self._actor.cancel.remote(self._lease.client_id, request_id)

    async def generation_defaults(self) -> GenerationDefaults:
        """See `Connection`."""
        defaults: GenerationDefaults = await self._call("generation_defaults")
        return defaults

    async def status(self) -> EngineStatus:
        """See `Connection`."""
        status: EngineStatus = await self._call("status")
        return status

    async def close(self) -> None:
        """See `Connection`."""
        task, self._poll_task = self._poll_task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._dead is None:
            # An engine that does not answer finds out by itself.
            with contextlib.suppress(ShardlineError, TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._call("leave", self._lease.client_id)
        self._fail_all(EngineDeadError("this client was closed"))
        await asyncio.to_thread(_RAY.release)

    async def _enter(self) -> None:
        lease = _Lease()
        await self._call("enter", lease.client_id)
        self._lease = lease

    async def _renew(self, expired: _Lease, error: LeaseExpiredError) -> None:
        """What ran under the expired lease has ended; go on under a new one, which somebody may have made by now."""
        async with self._renewing:
            if self._lease is expired:
                self._fail_requests(error)
                await self._enter()

    async def _poll(self) -> None:
        try:
            await self._poll_for_ever()
        except ShardlineError as error:
            self._fail_all(error)
        except Exception as error:
            # Whatever it is, a stream must not wait for a poll that nobody makes any more.
            self._fail_all(EngineDeadError(f"the connection to the engine failed: {type(error).__name__}: {error}"))

    async def _poll_for_ever(self) -> None:
        failures = 0
        while True:
            lease = self._lease
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    number, items = await self._call("poll", lease.client_id, lease.received)
            except LeaseExpiredError as expired:
                await self._renew(lease, expired)
                continue
            except (_UnavailableError, TimeoutError) as error:
                # The answer may be lost, so the engine has kept it: the next poll asks for it again.
                failures += 1
                if failures > _RETRIES:
                    raise EngineDeadError(f"the engine has not answered {failures} polls: {error}") from error
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            failures = 0
            if number != lease.received and lease is self._lease:
                lease.received = number
                for item in items:
                    self._dispatch(item)

    def _dispatch(self, item: Any) -> None:
        inbox = self._inboxes.get(item.request_id)
        if inbox is None:
            return
        if isinstance(item, Failure):
            inbox.fail(item.request_id, item.error)
            self._forget(item.request_id)
            return
        inbox.put(item)
        if item.finish_reason is not None:
            self._running[item.request_id] -= 1
            if not self._running[item.request_id]:
                self._forget(item.request_id)

    def _forget(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)
        self._running.pop(request_id, None)

    def _fail_requests(self, error: ShardlineError) -> None:
        for request_id, inbox in list(self._inboxes.items()):
            inbox.fail(request_id, _copy(error))
            self._forget(request_id)

    def _fail_all(self, error: ShardlineError) -> None:
        self._dead = error
        self._fail_requests(error)

    async def _call(self, method: str, *arguments: Any) -> Any:
        """One actor call; the engine's own exceptions come as themselves."""
        from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        except ActorUnavailableError as error:
            raise _UnavailableError(f"the engine cannot be reached: {error}") from None
        except RayActorError as error:
            raise EngineDeadError(f"the engine's process is gone: {error}") from None
        except RayError as error:
            raise EngineDeadError(f"Ray failed: {error}") from error


class _UnavailableError(EngineDeadError):
    """For the moment, perhaps."""


class _RaySession:
    """This process's connection to a Ray cluster: made when the first client needs it, unmade after the last one,
    unless somebody else had made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ours = False

    def find(self, address: str, name: str) -> Any:
        """The engine's actor. Raises EngineNotFoundError."""
        try:
            import ray
        except ImportError as error:
            raise EngineNotFoundError(f"ray is not installed here: {error}") from error
        from shardline.cluster.ray_runtime import NAMESPACE, before_joining

        with self._lock:
            if not ray.is_initialized():
                before_joining(address)
                try:
                    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
                except (ConnectionError, ValueError, RuntimeError) as error:
                    raise EngineNotFoundError(
                        f"no Ray cluster answers at {address!r} ({error});"
                        " start an engine with `shardline serve MODEL`, or give the address of the cluster's head"
                    ) from error
                self._ours = True
            self._users += 1
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            self.release()
            raise EngineNotFoundError(
                f"the Ray cluster has no engine named {name!r}: start one with `shardline serve MODEL`"
            ) from None

    def release(self) -> None:
        """One client less."""
        import ray

        with self._lock:
            self._users -= 1
            if not self._users and self._ours:
                self._ours = False
                ray.shutdown()


_RAY = _RaySession()


def _copy(error: ShardlineError) -> ShardlineError:
    """The same error for one more raise: an exception that is raised twice collects both tracebacks."""
    return type(error)(*error.args)
