"""The clients: `AsyncClient` for programs with an event loop, `Client` for all others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self, TypeVar

from shardline.cluster.connection import ENGINE_NAME, Connection, LocalConnection, RayConnection
from shardline.cluster.engine import Engine, EngineStatus
from shardline.cluster.errors import EngineDeadError, ShardlineError
from shardline.cluster.inbox import Failure, Inbox, merge
from shardline.cluster.request import Completion, Delta, Message, Request
from shardline.cluster.text.generation_defaults import GenerationDefaults
from shardline.scheduler import InvalidParameterError, SamplingParams

Prompt = str | Sequence[Message] | Request
T = TypeVar("T")


class AsyncStream:
    """The deltas of one request, those of all its sequences mixed; `Delta.index` tells them apart.

    Use it once, from the event loop of its client. Leaving it early (`async with`, `cancel`, or dropping the last
    reference) ends the request. What was received stays here, so `result` also has what was iterated over.
    """

    def __init__(self, connection: Connection, request_id: str, inbox: Inbox, n: int) -> None:
        self.request_id = request_id
        self._connection = connection
        self._inbox = inbox
        self._running = n
        self._received: list[list[Delta]] = [[] for _ in range(n)]
        self._ready: deque[Delta] = deque()
        self._event_loop = asyncio.get_running_loop()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not self._ready:
            self._ready.extend(await self.take())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def take(self) -> list[Delta]:
        """Wait, then all deltas that are there, at most one a sequence; empty when every sequence has ended."""
        if not self._running:
            return []
        taken: list[Delta] = []
        for item in await self._inbox.take():
            if isinstance(item, Failure):
                self._running = 0
                raise item.error
            self._received[item.index].append(item)
            self._running -= item.finish_reason is not None
            taken.append(item)
        return taken

    async def results(self) -> list[Completion]:
        """Wait for the end; every sequence whole, by index."""
        while await self.take():
            pass
        if not all(deltas and deltas[-1].finish_reason for deltas in self._received):
            raise ShardlineError("the stream was closed, or failed, before its end: its results are not whole")
        return [_completion(deltas) for deltas in self._received]

    async def result(self) -> Completion:
        """Wait for the end; the whole sequence of a request with n = 1."""
        results = await self.results()
        if len(results) != 1:
            raise InvalidParameterError("n", len(results), "1 for result(); use results()")
        return results[0]

    async def text(self) -> str:
        """Wait for the end; the whole text of a request with n = 1."""
        return (await self.result()).text

    def cancel(self) -> None:
        """End the request; its sequences then end with "abort", which the stream still delivers."""
        if self._running:
            self._connection.cancel(self.request_id, self._inbox)

    async def aclose(self) -> None:
        """End the request and expect nothing more of it."""
        self.cancel()
        self._running = 0
        self._ready.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # May run in any thread, and after the loop has ended.
        if self._running:
            with contextlib.suppress(RuntimeError):
                self._event_loop.call_soon_threadsafe(self._connection.cancel, self.request_id, self._inbox)


class AsyncClient:
    """An engine, seen from one event loop. Made by `connect` or `local`; close it, or use `async with`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._defaults: GenerationDefaults | None = None

    @classmethod
    async def connect(cls, address: str = "auto", *, name: str = ENGINE_NAME) -> Self:
        """Find the engine that `shardline serve` started.

        Args:
            address: The Ray cluster: "auto" for the one on this machine or in RAY_ADDRESS, else "host:port".
            name: The engine's, if several run there.

        Raises:
            EngineNotFoundError: no cluster, or no such engine on it.
        """
        return cls(await RayConnection.open(address, name))

    @classmethod
    async def local(cls, model: str | PathLike[str], **options: Any) -> Self:
        """An engine of one's own with all layers in this process, without Ray.

        Args:
            model: A model file's path or a known name.
            options: See `shardline.cluster.build.EngineOptions`.

        Raises:
            ModelNotFoundError, CheckpointError: the model cannot be had or used.
            PlanningError, InvalidParameterError: the options cannot be met.
        """
        from shardline.cluster.build import EngineOptions, build_engine, prepare

        wish = EngineOptions(model=fspath(model), **options)
        return await cls.over(lambda: build_engine(prepare(wish), in_process=True))

    @classmethod
    async def over(cls, build: Callable[[], Engine]) -> Self:
        """An engine of one's own, from whatever builds it; it is started here, and closed with the client. Raises what
        keeps it from starting."""
        engine = await asyncio.to_thread(build)
        await engine.start()
        return cls(LocalConnection(engine))

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> AsyncStream:
        """Hand in a request.

        Args:
            prompt: A raw text; or a chat as a sequence of messages; or a whole `Request`, which then holds everything.
            params: How tokens are chosen and when they end; None is the model's own way (`generation_defaults`), and
                `SamplingParams()` greedy.
            priority: Lower runs first.

        Raises:
            InvalidParameterError, RequestTooLargeError, QueueFullError: it is refused.
            TemplateError: the chat template refuses the messages.
            EngineDeadError: the engine is gone.
        """
        if params is None and not isinstance(prompt, Request):
            params = (await self.generation_defaults()).params()
        request = _request(prompt, params, priority)
        request_id, inbox = await self._connection.submit(request)
        return AsyncStream(self._connection, request_id, inbox, request.params.n)

    async def generation_defaults(self) -> GenerationDefaults:
        """How the model's makers advise to sample; its `params` are for `submit`. Raises EngineDeadError."""
        if self._defaults is None:
            self._defaults = await self._connection.generation_defaults()
        return self._defaults

    async def status(self) -> EngineStatus:
        """The engine's snapshot."""
        return await self._connection.status()

    async def close(self) -> None:
        """End this client's requests, and its engine if it is a local one. Idempotent."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Stream:
    """`AsyncStream` for programs without an event loop: a plain iterator of deltas."""

    def __init__(self, client: Client, stream: AsyncStream) -> None:
        # A client ends when nobody holds it any more; its streams do.
        self._client = client
        self._runner = client._runner
        self._stream = stream
        self._ready: deque[Delta] = deque()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._stream.request_id

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if not self._ready:
            self._ready.extend(self._runner.call(self._stream.take()))
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def results(self) -> list[Completion]:
        """Wait for the end; every sequence whole, by index."""
        return self._runner.call(self._stream.results())

    def result(self) -> Completion:
        """Wait for the end; the whole sequence of a request with n = 1."""
        return self._runner.call(self._stream.result())

    def text(self) -> str:
        """Wait for the end; the whole text of a request with n = 1."""
        return self._runner.call(self._stream.text())

    def cancel(self) -> None:
        """End the request; its sequences then end with "abort", which the stream still delivers."""
        self._runner.post(self._stream.cancel)

    def close(self) -> None:
        """End the request and expect nothing more of it."""
        self._runner.call(self._stream.aclose())
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """An engine, for programs without an event loop. Made by `connect` or `local`; close it, or use `with`.

    Any thread may use it; one stream belongs to one thread at a time. When nobody holds it, nor a stream of it, it is
    closed too, and nobody waits for that.
    """

    def __init__(self, runner: _LoopThread, client: AsyncClient) -> None:
        self._runner = runner
        self._client = client
        weakref.finalize(self, _abandon, runner, client).atexit = False

    @classmethod
    def connect(cls, address: str = "auto", *, name: str = ENGINE_NAME) -> Self:
        """See `AsyncClient.connect`."""
        return cls._open(AsyncClient.connect(address, name=name))

    @classmethod
    def local(cls, model: str | PathLike[str], **options: Any) -> Self:
        """See `AsyncClient.local`; the engine runs in a thread of its own."""
        return cls._open(AsyncClient.local(model, **options))

    @classmethod
    def over(cls, build: Callable[[], Engine]) -> Self:
        """See `AsyncClient.over`; the engine runs in a thread of its own."""
        return cls._open(AsyncClient.over(build))

    @classmethod
    def _open(cls, opening: Coroutine[Any, Any, AsyncClient]) -> Self:
        runner = _LoopThread()
        try:
            return cls(runner, runner.call(opening))
        except BaseException:
            runner.close()
            raise

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Stream:
        """See `AsyncClient.submit`."""
        return Stream(self, self._runner.call(self._client.submit(prompt, params, priority=priority)))

    def status(self) -> EngineStatus:
        """The engine's snapshot."""
        return self._runner.call(self._client.status())

    def generation_defaults(self) -> GenerationDefaults:
        """See `AsyncClient.generation_defaults`."""
        return self._runner.call(self._client.generation_defaults())

    def close(self) -> None:
        """End this client's requests, and its engine if it is a local one. Idempotent."""
        if self._runner.running:
            # Another thread may have been quicker.
            with contextlib.suppress(EngineDeadError):
                self._runner.call(self._client.close())
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _abandon(runner: _LoopThread, client: AsyncClient) -> None:
    """Close without waiting: the collector may call this in any thread, the loop's own included."""

    async def close() -> None:
        try:
            await client.close()
        finally:
            runner.stop()

    with contextlib.suppress(EngineDeadError):
        runner.submit(close())


class _LoopThread:
    """An event loop in a thread of its own; a daemon, so that a client left open does not keep its program alive."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # When the program ends with its client open, the tasks that still wait here are no fault to report.
        weakref.finalize(self, self.loop.set_exception_handler, _ignore)
        self._stopping = False
        # Whatever was submitted before `_ended` runs, or is cancelled; the collector may submit in a thread that does.
        self._lock = threading.RLock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="shardline-client", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return not self.loop.is_closed()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it there. Raises EngineDeadError once nothing runs there any more."""
        with self._lock:
            if not self._ended:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise EngineDeadError("this client was closed")

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait; an interrupt here cancels it there."""
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise EngineDeadError("this client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Run it there soon."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """Cancel what still runs there, wait for its end, and stop."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.stop)
        self._thread.join()

    def stop(self) -> None:
        """Stop, from inside; once, however often it is asked for: what follows runs on the same loop."""
        if not self._stopping:
            self._stopping = True
            self.loop.stop()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_cancel_others())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            with self._lock:
                self._ended = True
            # Or who submitted since the last time would wait for ever.
            self.loop.run_until_complete(_cancel_others())
            self.loop.close()


def _ignore(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception handler of a loop that says nothing."""


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _request(prompt: Prompt, params: SamplingParams | None, priority: int) -> Request:
    if isinstance(prompt, Request):
        if params is not None or priority:
            raise InvalidParameterError("prompt", prompt, "a Request alone: it holds its own params and priority")
        return prompt
    chosen = params if params is not None else SamplingParams()
    if isinstance(prompt, str):
        return Request(text=prompt, params=chosen, priority=priority)
    return Request(messages=tuple(prompt), params=chosen, priority=priority)


def _completion(deltas: list[Delta]) -> Completion:
    whole = merge(deltas)
    assert whole.finish_reason is not None
    return Completion(
        index=whole.index,
        text=whole.text,
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        usage=whole.usage,
    )
