"""The engine as an actor: batches, leases, lost answers, dead clients, a dead engine. Without Ray, then with it."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

import shardline.cluster.connection as connection_module
import shardline.cluster.engine_actor as actor_module
from shardline import Client, SamplingParams
from shardline.cluster import (
    AsyncClient,
    Delta,
    Engine,
    EngineDeadError,
    EngineNotFoundError,
    GenerationDefaults,
    LeaseExpiredError,
    Request,
    ShardlineError,
)
from shardline.cluster.build import EngineOptions, build_engine, prepare
from shardline.cluster.cli import main
from shardline.cluster.connection import LocalConnection, RayConnection
from shardline.cluster.engine import EngineConfig
from shardline.cluster.engine_actor import EngineHost, serve, stop_serving
from shardline.cluster.inbox import Failure, Inbox, merge
from shardline.cluster.ray_runtime import connected
from shardline.cluster.text.model_text import ModelText
from shardline.scheduler import InvalidParameterError, RequestTooLargeError, SchedulerConfig
from shardline.stage import CheckpointError, open_checkpoint

CHAT = ({"role": "user", "content": "What is the capital of France?"},)
GREEDY = SamplingParams(max_tokens=12, logprobs=2)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
# Four sequences run at a time, so its own end is more than ten thousand steps away: no test and no machine gets there.
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, n=128)


# -- the actor's class, without Ray ----------------------------------------------------------------------------------


class Hosted:
    """A host on a scripted pipeline."""

    def __init__(self, pipeline: Any, text: ModelText, **seconds: float) -> None:
        self.pipeline = pipeline
        limits = SchedulerConfig(
            num_blocks=64,
            block_size=16,
            max_context=512,
            depth=2,
            max_step_tokens=64,
            prefill_chunk=32,
            max_sequences=8,
        )
        settings = {"poll_seconds": 0.05, "lease_seconds": 60.0} | seconds
        self.engine = Engine(pipeline, text, limits, EngineConfig(max_losses=0))
        self.host = EngineHost(lambda: self.engine, **settings)

    async def __aenter__(self) -> Hosted:
        await self.host.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.host.stop()

    async def free(self) -> None:
        """Wait until nothing runs; no block may then be held."""
        async with asyncio.timeout(60):
            while self.engine._live:
                await asyncio.sleep(0.005)
        self.engine._scheduler.check_integrity()
        assert self.engine._scheduler.stats().blocks_used == 0

    async def finish(self, client: str, requests: int) -> dict[str, list[Delta | Failure]]:
        """Poll until that many requests have ended."""
        got: dict[str, list[Delta | Failure]] = {}
        received = ended = 0
        while ended < requests:
            received, items = await self.host.poll(client, received)
            for item in items:
                got.setdefault(item.request_id, []).append(item)
                ended += isinstance(item, Failure) or item.finish_reason is not None
        return got


@pytest.fixture(scope="module")
def text(smollm2: Path) -> ModelText:
    checkpoint = open_checkpoint(smollm2)
    made = ModelText.from_checkpoint(checkpoint)
    checkpoint.close()
    return made


@pytest.fixture
def hosted(scripted_pipeline: Any, text: ModelText) -> Callable[..., Hosted]:
    def make(**seconds: float) -> Hosted:
        pipeline = scripted_pipeline(lambda prompt, place: 300 + (prompt[0] * 17 + place * 5) % 2000)
        return Hosted(pipeline, ModelText(text.tokenizer, text.template), **seconds)

    return make


class Clock:
    """The host's idea of the time, which stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(actor_module, "time", made)
    return made


def ask(name: str, first: int = 5, **params: Any) -> Request:
    chosen = {"max_tokens": 10, "seed": 0} | params
    return Request(token_ids=(first, 6, 7), params=SamplingParams(**chosen), request_id=name)


def script(first: int, count: int) -> tuple[int, ...]:
    return tuple(300 + (first * 17 + place * 5) % 2000 for place in range(count))


def test_one_poll_carries_all_requests_of_a_client_and_only_its_own(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            for client in ("a", "b"):
                await h.host.enter(client)
            for i in range(6):
                await h.host.submit("ab"[i % 2], ask(f"r{i}", 5 + i))
            for client, mine in (("a", (0, 2, 4)), ("b", (1, 3, 5))):
                got = await h.finish(client, 3)
                assert set(got) == {f"r{i}" for i in mine}
                for i in mine:
                    assert merge(got[f"r{i}"]).token_ids == script(5 + i, 10)  # type: ignore[arg-type]
            await h.free()

    asyncio.run(work())


def test_an_answer_that_was_lost_comes_again(hosted: Callable[..., Hosted]) -> None:
    """A poll that says what it has received gets what it has not, however often it asks; also two at once."""

    async def work() -> None:
        async with hosted() as h:
            await h.host.enter("a")
            await h.host.submit("a", ask("r", max_tokens=30))
            got: list[Any] = []
            received = 0
            while not got or got[-1].finish_reason is None:
                polls = await asyncio.gather(*(h.host.poll("a", received) for _ in range(3)))
                assert polls[0] == polls[1] == polls[2]
                assert await h.host.poll("a", received) == polls[0]
                received, items = polls[0]
                got.extend(items)
            assert merge(got).token_ids == script(5, 30)

    asyncio.run(work())


def test_an_idle_poll_comes_back_empty_and_keeps_its_number(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            await h.host.enter("a")
            assert await h.host.poll("a", 0) == (0, [])

    asyncio.run(work())


def test_a_client_that_does_not_poll_loses_its_requests_and_no_one_elses(
    hosted: Callable[..., Hosted], clock: Clock
) -> None:
    async def work() -> None:
        async with hosted(lease_seconds=0.3) as h:
            await h.host.enter("silent")
            await h.host.enter("alive")
            h.pipeline.gate.clear()
            await h.host.submit("silent", ask("s"))
            await h.host.submit("alive", ask("k", 9))
            received = 0
            for _ in range(2):
                clock.now += 0.2
                received, items = await h.host.poll("alive", received)
                assert items == []
            async with asyncio.timeout(60):
                while "s" in h.engine._live:
                    await asyncio.sleep(0.01)
            with pytest.raises(LeaseExpiredError, match=r"0\.3 seconds"):
                await h.host.poll("silent", 0)
            with pytest.raises(LeaseExpiredError):
                await h.host.submit("silent", ask("again"))
            h.pipeline.gate.set()
            got = await h.finish("alive", 1)
            assert merge(got["k"]).token_ids == script(9, 10)  # type: ignore[arg-type]
            await h.free()

    asyncio.run(work())


def test_a_poll_that_waits_is_a_sign_of_life(hosted: Callable[..., Hosted], clock: Clock) -> None:
    async def work() -> None:
        async with hosted(lease_seconds=0.2, poll_seconds=0.1) as h:
            await h.host.enter("a")
            h.pipeline.gate.clear()
            await h.host.submit("a", ask("r"))
            for _ in range(8):
                # While a poll waits, the host looks for silent clients once or twice.
                clock.now += 0.15
                assert await h.host.poll("a", 0) == (0, [])
            assert "r" in h.engine._live
            h.pipeline.gate.set()

    asyncio.run(work())


def test_cancel_and_leave_reach_a_request_whose_prompt_is_being_made(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            for end in ("cancel", "leave"):
                await h.host.enter("a")
                request = Request(text="word " * 200, params=ENDLESS, request_id="r")
                submitting = asyncio.create_task(h.host.submit("a", request))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert "r" in h.engine._live
                if end == "cancel":
                    await h.host.cancel("a", "r")
                else:
                    await h.host.leave("a")
                await submitting
                await h.free()

    asyncio.run(work())


def test_a_client_cancels_only_its_own(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            await h.host.enter("a")
            await h.host.enter("b")
            await h.host.submit("a", ask("r"))
            await h.host.cancel("b", "r")
            with pytest.raises(InvalidParameterError, match="request_id"):
                await h.host.submit("b", ask("r"))
            await h.host.leave("b")
            assert merge((await h.finish("a", 1))["r"]).token_ids == script(5, 10)  # type: ignore[arg-type]
            # An ended request's id is free, and its first owner has no say over the next.
            await h.host.enter("b")
            await h.host.submit("b", ask("r"))
            await h.host.leave("a")
            assert merge((await h.finish("b", 1))["r"]).token_ids == script(5, 10)  # type: ignore[arg-type]

    asyncio.run(work())


def test_a_client_that_comes_too_early_is_told_so(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        h = hosted()
        await h.host.enter("a")
        with pytest.raises(ShardlineError, match="still starting"):
            await h.host.submit("a", ask("r"))
        with pytest.raises(ShardlineError, match="still starting"):
            await h.host.status()
        await h.host.leave("a")
        async with h:
            await h.host.enter("a")
            await h.host.submit("a", ask("r"))
            assert merge((await h.finish("a", 1))["r"]).token_ids == script(5, 10)  # type: ignore[arg-type]

    asyncio.run(work())


def test_a_dead_engine_reaches_the_client_as_itself(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            await h.host.enter("a")
            h.pipeline.lose_at = {4}
            await h.host.submit("a", ask("r"))
            got = await h.finish("a", 1)
            (failure,) = [item for item in got["r"] if isinstance(item, Failure)]
            assert isinstance(failure.error, EngineDeadError)
            assert "scripted loss at step 4" in str(failure.error)
            with pytest.raises(EngineDeadError, match="scripted loss at step 4"):
                await h.host.submit("a", ask("later"))
            assert (await h.host.status()).state == "dead"

    asyncio.run(work())


# -- the client's side, on an actor that is none -----------------------------------------------------------------------


class FakeActor:
    """Stands for the actor's handle: calls go to a host in this process, and some of their answers get lost."""

    def __init__(self, host: EngineHost, lose: Callable[[str, int], Exception | None]) -> None:
        self._host = host
        self._lose = lose
        self.calls: dict[str, int] = {}

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            count = self.calls[method] = self.calls.get(method, 0) + 1

            async def run() -> Any:
                # As over Ray, what comes back is a copy.
                answer = pickle.loads(pickle.dumps(await getattr(self._host, method)(*arguments)))
                lost = self._lose(method, count)
                if lost is not None:
                    raise lost
                return answer

            return asyncio.ensure_future(run())

        return SimpleNamespace(remote=remote)


async def connect(h: Hosted, lose: Callable[[str, int], Exception | None]) -> AsyncClient:
    connection = RayConnection(FakeActor(h.host, lose))
    await connection._enter()
    connection._poll_task = asyncio.create_task(connection._poll())
    return AsyncClient(connection)


def test_what_an_engine_refuses_is_refused_alike_on_the_way_to_an_actor(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            client = await connect(h, lambda method, count: None)
            wrong: list[tuple[Request, str]] = [
                (Request(token_ids=(1,), params={"n": 1}), "params"),  # type: ignore[arg-type]
                (Request(token_ids=(1,), request_id=["a"]), "request_id"),  # type: ignore[arg-type]
                (Request(token_ids=(1,), request_id=""), "request_id"),
            ]
            for request, field in wrong:
                with pytest.raises(InvalidParameterError, match=field):
                    await client.submit(request)
            with pytest.raises(InvalidParameterError, match="params"):
                await client.submit("Hello", {"max_tokens": 5})  # type: ignore[arg-type]
            connection: Any = client._connection
            assert not connection._inboxes
            await client.close()

    asyncio.run(work())


def test_a_request_without_params_is_sampled_as_the_models_makers_advise(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            advice = GenerationDefaults(temperature=0.5, top_k=7, source="generation_config.json")
            h.engine._text.generation_defaults = advice
            client = await connect(h, lambda method, count: None)
            seen: list[SamplingParams] = []
            submit = h.engine.submit

            async def noted(request: Request, inbox: Inbox) -> str:
                seen.append(request.params)
                return await submit(request, inbox)

            h.engine.submit = noted  # type: ignore[method-assign]
            assert await client.generation_defaults() == advice
            for params in (None, SamplingParams(max_tokens=3), None):
                (await client.submit("one", params)).cancel()
            (await client.submit(Request(text="one"))).cancel()
            advised = SamplingParams(temperature=0.5, top_k=7)
            assert seen == [advised, SamplingParams(max_tokens=3), advised, SamplingParams()]
            # A client asks once.
            actor: Any = client._connection
            assert actor._actor.calls["generation_defaults"] == 1
            await h.free()

    asyncio.run(work())


def test_a_stream_that_is_left_late_does_not_end_who_has_its_id_now(hosted: Callable[..., Hosted]) -> None:
    async def work(client: AsyncClient) -> None:
        first = await client.submit(ask("same", max_tokens=2))
        other = await client.submit(ask("other", max_tokens=30))
        # By now the first has ended, and nobody has read it.
        await other.result()
        second = await client.submit(ask("same", 9, max_tokens=200))
        await first.aclose()
        del first
        assert (await second.result()).token_ids == script(9, 200)

    async def both() -> None:
        async with hosted() as h:
            await work(AsyncClient(LocalConnection(h.engine)))
        async with hosted() as h:
            client = await connect(h, lambda method, count: None)
            await work(client)
            await client.close()

    asyncio.run(both())


def test_a_stream_over_lost_answers_has_every_byte_once(
    hosted: Callable[..., Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_RETRY_SECONDS", 0.001)

    def lose(method: str, count: int) -> Exception | None:
        return ActorUnavailableError("the network went away", None) if method == "poll" and count % 3 else None

    async def work() -> None:
        async with hosted() as h:
            client = await connect(h, lose)
            streams = [await client.submit(ask(f"r{i}", 5 + i, max_tokens=60)) for i in range(4)]
            for i, stream in enumerate(streams):
                assert (await stream.result()).token_ids == script(5 + i, 60)
            connection: Any = client._connection
            assert not connection._inboxes
            assert not connection._running

    asyncio.run(work())


def test_a_poll_that_never_answers_is_asked_again(
    hosted: Callable[..., Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(connection_module, "_ANSWER_SECONDS", 0.2)

    async def work() -> None:
        async with hosted() as h:
            poll = h.host.poll
            asked = 0

            async def deaf_at_first(client_id: str, received: int) -> Any:
                nonlocal asked
                asked += 1
                if asked % 2:
                    await asyncio.sleep(3600)
                return await poll(client_id, received)

            h.host.poll = deaf_at_first  # type: ignore[method-assign]
            client = await connect(h, lambda _method, _count: None)
            assert (await (await client.submit(ask("r"))).result()).token_ids == script(5, 10)

    asyncio.run(work())


@pytest.mark.parametrize("error", [RuntimeError("ray was shut down"), ActorUnavailableError("no way there", None)])
def test_streams_end_when_polls_fail_for_good(
    hosted: Callable[..., Hosted], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(connection_module, "_RETRY_SECONDS", 0.001)

    async def work() -> None:
        async with hosted() as h:
            client = await connect(h, lambda method, count: error if method == "poll" and count > 2 else None)
            stream = await client.submit(ask("r", max_tokens=400))
            with pytest.raises(EngineDeadError, match=str(error.args[0])):
                await stream.result()
            with pytest.raises(EngineDeadError):
                await client.submit(ask("later"))

    asyncio.run(work())


@pytest.mark.parametrize("first", ["submit", "poll"])
def test_after_an_expired_lease_streams_end_and_new_requests_run(hosted: Callable[..., Hosted], first: str) -> None:
    async def work() -> None:
        async with hosted(poll_seconds=0.2) as h:
            client = await connect(h, lambda _method, _count: None)
            h.pipeline.gate.clear()
            old = await client.submit(ask("r"))
            h.host._clients.clear()
            if first == "poll":
                with pytest.raises(LeaseExpiredError):
                    await old.result()
            streams = [await client.submit(ask(f"n{i}", 5 + i)) for i in range(3)]
            h.pipeline.gate.set()
            for i, stream in enumerate(streams):
                assert (await stream.result()).token_ids == script(5 + i, 10)
            if first == "submit":
                with pytest.raises(LeaseExpiredError):
                    await old.result()
            await client.close()
            await h.free()

    asyncio.run(work())


def test_an_answer_from_an_expired_lease_is_not_taken_for_a_new_requests(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            client = await connect(h, lambda _method, _count: None)
            connection: Any = client._connection
            first_lease = connection._lease.client_id
            poll, held, late = h.host.poll, asyncio.Event(), asyncio.Event()

            async def slow(client_id: str, received: int) -> Any:
                answer = await poll(client_id, received)
                if client_id == first_lease and answer[1]:
                    held.set()
                    await late.wait()
                return answer

            h.host.poll = slow  # type: ignore[method-assign]
            old = await client.submit(ask("same", 5))
            await held.wait()
            await h.host.leave(first_lease)
            h.pipeline.gate.clear()
            new = await client.submit(ask("other", 6))
            # As soon as it was accepted, the old one's id is free; its answer is still on its way.
            again = await client.submit(ask("same", 7))
            late.set()
            h.pipeline.gate.set()
            with pytest.raises(LeaseExpiredError):
                await old.result()
            assert (await new.result()).token_ids == script(6, 10)
            assert (await again.result()).token_ids == script(7, 10)

    asyncio.run(work())


def test_a_lease_that_cannot_be_renewed_leaves_no_stream_waiting(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            client = await connect(h, lambda _method, _count: None)
            h.pipeline.gate.clear()
            stream = await client.submit(ask("r"))

            async def gone(*_: Any) -> None:
                raise EngineDeadError("no more clients")

            h.host.enter = gone  # type: ignore[method-assign]
            h.host._clients.clear()
            with pytest.raises(LeaseExpiredError):
                await stream.result()
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="no more clients"):
                    await client.submit(ask("later"))

    asyncio.run(work())


def test_a_request_whose_acceptance_was_lost_is_cancelled(hosted: Callable[..., Hosted]) -> None:
    async def work() -> None:
        async with hosted() as h:
            h.pipeline.gate.clear()
            client = await connect(
                h, lambda method, _count: ActorUnavailableError("gone", None) if method == "submit" else None
            )
            with pytest.raises(EngineDeadError, match="reached"):
                await client.submit(ask("r"))
            await h.free()

    asyncio.run(work())


# -- over Ray, with the real model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a local Ray cluster."""
    import ray

    with connected(num_cpus=4):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def build(smollm2: Path) -> Callable[[], Engine]:
    prepared = prepare(EngineOptions(model=str(smollm2), context=512, concurrency=4))
    return partial(build_engine, prepared, in_process=True)


@pytest.fixture(scope="module")
def served(cluster: str, build: Callable[[], Engine]) -> Iterator[str]:
    serve(build, poll_seconds=0.5, lease_seconds=6.0)
    yield cluster
    stop_serving()


@pytest.fixture
def client(served: str) -> Iterator[Client]:
    with Client.connect(served) as opened:
        yield opened


def idle(client: Client) -> None:
    deadline = time.monotonic() + 60
    while (status := client.status()).requests:
        assert time.monotonic() < deadline, "requests that nobody wants still run"
        time.sleep(0.02)
    assert status.scheduler.blocks_used == 0


@pytest.mark.ray
def test_a_client_over_ray_gets_the_bytes_of_a_local_one(client: Client, smollm2: Path) -> None:
    requests = [Request(messages=CHAT, params=GREEDY)] + [
        Request(text=f"{i} plus {i} is", params=SamplingParams(max_tokens=9, temperature=0.9, seed=i, logprobs=1))
        for i in range(5)
    ]
    over_ray = [stream.results() for stream in [client.submit(request) for request in requests]]
    with Client.local(smollm2, context=512, concurrency=4) as local:
        here = [local.submit(request).results() for request in requests]
    for ours, theirs in zip(over_ray, here, strict=True):
        assert [(c.text, c.token_ids, repr(c.logprobs), c.finish_reason) for c in ours] == [
            (c.text, c.token_ids, repr(c.logprobs), c.finish_reason) for c in theirs
        ]
    assert "Paris" in over_ray[0][0].text
    idle(client)


@pytest.mark.ray
def test_deltas_come_before_the_end_and_n_sequences_end_apart(client: Client) -> None:
    stream = client.submit(CHAT, ENDLESS)
    assert next(stream).finish_reason is None
    stream.close()
    deltas = list(client.submit("Once upon a time", SamplingParams(max_tokens=16, n=2, temperature=1.0, seed=1)))
    assert {delta.index for delta in deltas if delta.finish_reason} == {0, 1}
    assert sum(len(delta.token_ids) for delta in deltas) == deltas[-1].usage.completion_tokens


@pytest.mark.ray
def test_many_streams_share_one_poll(served: str) -> None:
    async def work() -> None:
        async with await AsyncClient.connect(served) as client:
            connection: Any = client._connection
            call, polling = connection._call, 0
            together: list[set[str]] = []

            async def watched(method: str, *arguments: Any) -> Any:
                nonlocal polling
                polling += method == "poll"
                assert polling <= 1, "a client has one poll at a time, however many streams"
                try:
                    answer = await call(method, *arguments)
                finally:
                    polling -= method == "poll"
                if method == "poll":
                    together.append({item.request_id for item in answer[1]})
                return answer

            connection._call = watched
            streams = [client.submit(f"{i} plus {i} is", SamplingParams(max_tokens=32)) for i in range(12)]
            results = await asyncio.gather(*[(await stream).result() for stream in asyncio.as_completed(streams)])
            assert all(result.finish_reason for result in results)
            assert max(map(len, together)) > 1

    asyncio.run(work())


@pytest.mark.ray
def test_errors_come_as_themselves_over_ray(client: Client, served: str) -> None:
    with pytest.raises(RequestTooLargeError, match="512"):
        client.submit("word " * 600)
    with pytest.raises(InvalidParameterError, match="prompt"):
        client.submit("")
    with pytest.raises(InvalidParameterError, match="role"):
        client.submit(({"content": "no role"},))
    with pytest.raises(EngineNotFoundError, match="no-such-engine"):
        Client.connect(served, name="no-such-engine")
    with pytest.raises(ShardlineError, match="already"):
        serve(lambda: None)  # type: ignore[arg-type, return-value]
    idle(client)


@pytest.mark.ray
def test_cancel_drop_and_close_over_ray(client: Client, served: str) -> None:
    stream = client.submit(CHAT, ENDLESS)
    next(stream)
    stream.cancel()
    assert list(stream)[-1].finish_reason == "abort"
    idle(client)
    stream = client.submit(CHAT, ENDLESS)
    next(stream)
    del stream
    idle(client)
    with Client.connect(served) as other:
        left = other.submit(CHAT, ENDLESS)
        next(left)
    with pytest.raises(EngineDeadError, match="closed"):
        list(left)
    idle(client)


@pytest.mark.ray
def test_the_requests_of_a_killed_client_end_and_others_go_on(client: Client, served: str) -> None:
    program = f"""
import sys, time
from shardline import Client, SamplingParams
client = Client.connect({served!r})
params = SamplingParams(max_tokens={ENDLESS.max_tokens}, ignore_eos=True, n={ENDLESS.n})
streams = [client.submit("Once", params) for _ in range(3)]
next(streams[0])
print("streaming", flush=True)
time.sleep(600)
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "streaming\n"
    # More urgent, or it would wait for the end that does not come.
    mine = client.submit("Two plus two is", LONG, priority=-1)
    assert client.status().requests == 4
    other.kill()
    other.wait()
    other.stdout.close()
    next(mine)
    deadline = time.monotonic() + 60
    while (status := client.status()).requests > 1:
        assert time.monotonic() < deadline, "a dead client's requests still run"
        time.sleep(0.05)
    assert status.scheduler.running <= 1
    mine.cancel()
    tokens = mine.result().token_ids
    alone = client.submit("Two plus two is", SamplingParams(max_tokens=len(tokens), ignore_eos=True)).result()
    assert alone.token_ids == tokens
    idle(client)


@pytest.mark.ray
def test_a_client_that_was_silent_too_long_is_told_and_may_go_on(client: Client, served: str) -> None:
    async def work() -> None:
        async with await AsyncClient.connect(served) as silent:
            stream = await silent.submit("Once", ENDLESS)
            await anext(stream)
            # The event loop stands still for longer than its lease.
            idle(client)
            with pytest.raises(LeaseExpiredError):
                async for _ in stream:
                    pass
            assert "Paris" in await (await silent.submit(CHAT, GREEDY)).text()

    asyncio.run(work())


@pytest.mark.ray
def test_an_engine_that_is_killed_ends_every_stream_at_once(cluster: str, build: Callable[[], Engine]) -> None:
    serve(build, name="doomed", poll_seconds=0.5)
    with Client.connect(cluster, name="doomed") as client:
        streams = [client.submit("Once", ENDLESS) for _ in range(3)]
        next(streams[0])
        os.kill(client.status().stages[0].pid, signal.SIGKILL)
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="gone"):
                list(stream)
        with pytest.raises(EngineDeadError, match="gone"):
            client.submit("Once")
        # Not only when a poll has stayed away for too long.
        assert time.monotonic() - began < connection_module._ANSWER_SECONDS / 2
    with pytest.raises(EngineNotFoundError, match="doomed"):
        Client.connect(cluster, name="doomed")


@pytest.mark.ray
def test_what_keeps_an_engine_from_starting_comes_as_itself(cluster: str, smollm2: Path, tmp_path: Path) -> None:
    broken = tmp_path / "cut.gguf"
    broken.write_bytes(smollm2.read_bytes()[:100_000_000][:-1_000_000])
    prepared = prepare(EngineOptions(model=str(smollm2), context=512, concurrency=1))
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        serve(partial(build_engine, replace(prepared, path=broken), in_process=True), name="again")
    with pytest.raises(EngineNotFoundError):
        stop_serving("again")
    # The name is free at once, each time.
    for _ in range(2):
        serve(partial(build_engine, prepared, in_process=True), name="again")
        stop_serving("again")


@pytest.mark.ray
def test_an_engine_over_stage_actors_serves_and_stops_with_them(
    cluster: str, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = prepare(EngineOptions(model=str(smollm2), split=(12, 18), context=256, concurrency=4, threads=1))
    serve(partial(build_engine, prepared), name="staged")
    with Client.connect(cluster, name="staged") as client:
        assert "Paris" in client.submit(CHAT, GREEDY).text()
        stages = client.status().stages
        assert [stage.spec.num_layers for stage in stages] == [12, 18]
        assert len({stage.pid for stage in stages} | {os.getpid()}) == 3
    with pytest.raises(ShardlineError, match="`shardline stop` ends it"):
        serve(partial(build_engine, prepared), name="staged")
    assert main(["stop", "--name", "staged", "--address", cluster]) == 0
    assert main(["stop", "--name", "staged", "--address", cluster]) == 1
    assert "no engine named 'staged'" in capsys.readouterr().err
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{stage.pid}") for stage in stages):
        assert time.monotonic() < deadline, "a stage outlives its engine"
        time.sleep(0.05)
