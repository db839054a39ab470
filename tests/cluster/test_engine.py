"""The engine against a scripted pipeline: order of work, refusals, cancellation, loss and recovery, death."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster import (
    DeadlyRequestError,
    Delta,
    Engine,
    EngineDeadError,
    Request,
    ShardlineError,
    StageLostError,
)
from shardline.cluster.engine import EngineConfig
from shardline.cluster.inbox import Failure, Inbox, merge
from shardline.cluster.live_request import LiveRequest
from shardline.cluster.text.model_text import ModelText
from shardline.cluster.text.tokenizer import Tokenizer
from shardline.scheduler import (
    InvalidParameterError,
    QueueFullError,
    RequestTooLargeError,
    SamplingParams,
    SchedulerConfig,
)
from shardline.stage import open_checkpoint

BLOCK_SIZE = 16
FILLER = 253


@pytest.fixture(scope="module")
def model_text(smollm2: Path) -> Callable[[], ModelText]:
    checkpoint = open_checkpoint(smollm2)
    text = ModelText.from_checkpoint(checkpoint)
    checkpoint.close()
    return lambda: ModelText(text.tokenizer, text.template)


class Rig:
    """One engine on one scripted pipeline, with a check that nothing is left behind."""

    def __init__(self, pipeline: Any, text: ModelText, config: EngineConfig | None = None, **limits: Any) -> None:
        self.pipeline = pipeline
        settings: dict[str, Any] = {
            "num_blocks": 64,
            "block_size": BLOCK_SIZE,
            "max_context": 2048,
            "depth": 3,
            "max_step_tokens": 64,
            "prefill_chunk": 32,
            "max_sequences": 16,
            "eos_token_ids": tuple(sorted(text.tokenizer.eos_ids)),
            "vocab_size": pipeline.vocab_size,
        }
        config = config or EngineConfig(retry_seconds=0.01)
        self.engine = Engine(pipeline, text, SchedulerConfig(**settings | limits), config)

    async def __aenter__(self) -> Rig:
        await self.engine.start()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.check_idle()
        await self.engine.close()

    def check_idle(self) -> None:
        scheduler = self.engine._scheduler
        assert not self.engine._live
        assert not scheduler.has_unfinished()
        scheduler.check_integrity()
        assert scheduler.stats().blocks_used == 0

    async def run(self, request: Request) -> list[Delta]:
        return [delta async for delta in self.engine.generate(request)]

    async def whole(self, request: Request) -> Delta:
        """A request with one sequence, merged; its usage left out, for it counts what the cache held."""
        return merge(await self.run(request))


@pytest.fixture
def rig(scripted_pipeline: Any, model_text: Callable[[], ModelText]) -> Callable[..., Rig]:
    def make(script: Any = None, config: EngineConfig | None = None, **limits: Any) -> Rig:
        pipeline = scripted_pipeline(script or babble, block_size=limits.get("block_size", BLOCK_SIZE))
        return Rig(pipeline, model_text(), config, **limits)

    return make


def babble(prompt: tuple[int, ...], place: int) -> int:
    """A token that depends on the whole prompt and the place, and is never an end token."""
    return 300 + (sum(prompt) * 31 + len(prompt) * 7 + place * 13) % 9000


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


def ask(*prompt: int, **params: Any) -> Request:
    chosen: dict[str, Any] = {"max_tokens": 12, "logprobs": 1, "seed": 5}
    return Request(token_ids=prompt, params=SamplingParams(**chosen | params))


def expected(request: Request) -> tuple[int, ...]:
    assert request.token_ids is not None
    assert request.params.max_tokens is not None
    return tuple(babble(request.token_ids, place) for place in range(request.params.max_tokens))


def within(work: Coroutine[Any, Any, None], seconds: float = 120.0) -> None:
    """Run it; something that waits for ever fails instead."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await work

    asyncio.run(bounded())


# -- one request -----------------------------------------------------------------------------------------------------


def test_a_request_gives_its_tokens_logprobs_usage_and_reason(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            request = ask(5, 6, 7)
            deltas = await r.run(request)
            whole = merge(deltas)
            assert whole.token_ids == expected(request)
            assert [entry.token_id for entry in whole.logprobs] == list(whole.token_ids)
            assert [entry.logprob for entry in whole.logprobs] == [
                -(3 + place + token / r.pipeline.vocab_size) for place, token in enumerate(whole.token_ids)
            ]
            assert all(entry.top == ((entry.token_id, entry.logprob),) for entry in whole.logprobs)
            assert whole.text == r.engine._text.tokenizer.decode(whole.token_ids)
            assert (whole.finish_reason, whole.stop_reason) == ("length", None)
            assert (whole.usage.prompt_tokens, whole.usage.cached_tokens) == (3, 0)
            assert [delta.usage.completion_tokens for delta in deltas] == list(range(1, 13))
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * 11

    within(work())


def test_logprobs_come_only_when_asked_for(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            whole = await r.whole(ask(5, 6, 7, logprobs=None))
            assert whole.logprobs == ()

    within(work())


def test_text_and_messages_reach_the_model_as_token_ids(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            tokenizer = r.engine._text.tokenizer
            await r.run(Request(text="Hello world", params=SamplingParams(max_tokens=1)))
            assert r.pipeline.plans[-1].starts[0].token_ids == tuple(encode(tokenizer, "Hello world"))
            messages = ({"role": "user", "content": "Hello"},)
            await r.run(Request(messages=messages, params=SamplingParams(max_tokens=1)))
            prompt = [token for plan in r.pipeline.plans[2:] for start in plan.starts for token in start.token_ids]
            assert "<|im_start|>user\nHello<|im_end|>" in tokenizer.decode(prompt, skip_special=False)

    within(work())


@pytest.mark.parametrize("as_stop_token", [True, False])
def test_a_stop_token_ends_the_sequence_and_is_not_shown(rig: Callable[..., Rig], as_stop_token: bool) -> None:
    async def work() -> None:
        async with rig() as r:
            tokenizer = r.engine._text.tokenizer
            end = encode(tokenizer, " world")[0] if as_stop_token else min(tokenizer.eos_ids)
            words = (*encode(tokenizer, "Hello"), end)
            r.pipeline.script = lambda _prompt, place: words[place]
            whole = await r.whole(ask(5, stop_token_ids=(end,) if as_stop_token else ()))
            assert whole.text == "Hello"
            assert whole.token_ids == words
            assert (whole.finish_reason, whole.stop_reason) == ("stop", end)
            assert whole.usage.completion_tokens == len(words)

    within(work())


def test_sequences_of_one_request_are_told_apart_and_usage_counts_all(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            deltas = await r.run(ask(5, 6, n=3))
            for index in range(3):
                assert merge([d for d in deltas if d.index == index]).token_ids == expected(ask(5, 6))
            assert deltas[-1].usage.completion_tokens == 36
            assert deltas[-1].usage.prompt_tokens == 2

    within(work())


def test_a_seed_is_drawn_when_none_is_given_and_kept_when_one_is(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            for seed in (None, None, 7):
                await r.run(ask(5, seed=seed, max_tokens=1))
            seeds = [start.params.seed for plan in r.pipeline.plans[1:] for start in plan.starts]
            assert None not in seeds
            assert seeds[2] == 7
            assert seeds[0] != seeds[1]

    within(work())


# -- the loop --------------------------------------------------------------------------------------------------------


def test_the_pipeline_is_filled_before_the_first_result_is_read(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig(depth=3) as r:
            r.pipeline.gate.clear()
            started = len(r.pipeline.plans)
            tasks = [asyncio.create_task(r.run(ask(5 + i, 6, 7))) for i in range(6)]
            while len(r.pipeline.plans) < started + 3:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(r.pipeline.plans) == started + 3
            assert r.engine._scheduler.stats().in_flight == 3
            r.pipeline.gate.set()
            for i, deltas in enumerate(await asyncio.gather(*tasks)):
                assert merge(deltas).token_ids == expected(ask(5 + i, 6, 7))

    within(work())


def test_the_probe_leaves_nothing_behind(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            assert len(r.pipeline.plans) >= 1
            stats = r.engine._scheduler.stats()
            assert (stats.waiting, stats.running, stats.blocks_used, stats.blocks_cached) == (0, 0, 0, 0)
            status = await r.engine.status()
            assert (status.state, status.requests, status.generated_tokens) == ("ready", 0, 0)

    within(work())


def test_a_slow_consumer_holds_nobody_up_and_gets_what_waits_as_one(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            slow = r.engine.generate(ask(5, max_tokens=40))
            first = await anext(slow)
            assert (await r.whole(ask(6, max_tokens=60))).token_ids == expected(ask(6, max_tokens=60))
            rest = [delta async for delta in slow]
            assert len(rest) == 1
            assert merge([first, *rest]).token_ids == expected(ask(5, max_tokens=40))

    within(work())


def test_status_counts(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            stream = r.engine.generate(ask(5, 6, max_tokens=100))
            await anext(stream)
            status = await r.engine.status()
            assert (status.requests, status.scheduler.running, status.losses) == (1, 1, 0)
            assert status.scheduler.blocks_used > 0
            assert status.generated_tokens >= 1
            assert status.tokens_per_second > 0
            await stream.aclose()

    within(work())


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Request, type[Exception], str]] = [
    (Request(), InvalidParameterError, "exactly one of text, messages and token_ids"),
    (Request(text="a", token_ids=(1,)), InvalidParameterError, "exactly one of text, messages and token_ids"),
    (Request(text=""), InvalidParameterError, "prompt"),
    (Request(token_ids=()), InvalidParameterError, "prompt"),
    (Request(text=7), InvalidParameterError, "text"),  # type: ignore[arg-type]
    (Request(token_ids=(1, 49152)), InvalidParameterError, "49152"),
    (Request(token_ids=(1, -1)), InvalidParameterError, "-1"),
    (Request(token_ids=(1, "2")), InvalidParameterError, "token_ids"),  # type: ignore[arg-type]
    (Request(token_ids=7), InvalidParameterError, "token_ids"),  # type: ignore[arg-type]
    (Request(messages=()), ValueError, "messages"),
    (Request(messages=("hello",)), ValueError, "messages"),  # type: ignore[arg-type]
    (Request(messages=({"content": "hello"},)), ValueError, "role"),
    (Request(token_ids=(1,), request_id=""), InvalidParameterError, "request_id"),
    (Request(token_ids=(1,), request_id=7), InvalidParameterError, "request_id"),  # type: ignore[arg-type]
    (Request(token_ids=(1,), priority="high"), InvalidParameterError, "priority"),  # type: ignore[arg-type]
    (Request(token_ids=(1,), params={"n": 1}), InvalidParameterError, "params"),  # type: ignore[arg-type]
    (ask(1, logit_bias=((49152, 1.0),)), InvalidParameterError, "49152"),
    (ask(1, stop_token_ids=(49152,)), InvalidParameterError, "49152"),
    (ask(*range(1, 2049)), RequestTooLargeError, "2048"),
    (ask(1, max_tokens=2000), RequestTooLargeError, "1024 tokens"),
]


def test_each_bad_request_is_one_clear_error_and_harms_no_other(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            good = ask(5, 6, 7, max_tokens=900)
            stream = r.engine.generate(good)
            deltas = []
            for request, kind, words in REFUSED:
                # Each is refused between two steps of the good one.
                deltas.append(await anext(stream))
                assert deltas[-1].finish_reason is None
                r.pipeline.gate.clear()
                with pytest.raises(kind, match=words):
                    await r.run(request)
                r.pipeline.gate.set()
            deltas += [delta async for delta in stream]
            assert merge(deltas).token_ids == expected(good)

    within(work())


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_nothing_waits_behind_it(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig(num_blocks=4) as r:
            with pytest.raises(RequestTooLargeError, match="64"):
                await r.run(ask(*range(1, 100)))
            assert (await r.whole(ask(5))).token_ids == expected(ask(5))

    within(work())


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing sixteen megabytes takes many seconds, in which nobody else's prompt would be made."""

    async def work() -> None:
        async with rig() as r:
            too_long = "a " * 2048
            while r.engine._text.tokenizer.fewest_tokens(too_long) <= 2048:
                too_long *= 2
            with pytest.raises(RequestTooLargeError, match="2048"):
                await r.run(Request(text=too_long[: len(too_long) // 2]))

            def encode(*_: object, **__: object) -> list[int]:
                raise AssertionError("it must not be tokenized")

            monkeypatch.setattr(Tokenizer, "encode", encode)
            with pytest.raises(RequestTooLargeError, match="shorten the prompt"):
                await r.run(Request(text=too_long))
            with pytest.raises(RequestTooLargeError, match="shorten the prompt"):
                await r.run(Request(messages=({"role": "user", "content": too_long},)))

    within(work())


def test_an_id_in_use_is_refused_and_its_owner_goes_on(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            request = replace(ask(5), request_id="mine")
            first = asyncio.create_task(r.whole(request))
            await asyncio.sleep(0)
            with pytest.raises(InvalidParameterError, match="mine"):
                await r.run(request)
            assert (await first).token_ids == expected(request)
            assert (await r.whole(request)).token_ids == expected(request), "an id is free again after its end"

    within(work())


def test_a_full_queue_is_refused(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig(max_waiting=2, max_sequences=1) as r:
            r.pipeline.gate.clear()
            tasks = [asyncio.create_task(r.whole(ask(5 + i))) for i in range(12)]
            refused = 0
            # One may run and two may wait.
            while sum(task.done() for task in tasks) < 9:
                await asyncio.sleep(0)
            r.pipeline.gate.set()
            for i, outcome in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
                if isinstance(outcome, QueueFullError):
                    refused += 1
                else:
                    assert isinstance(outcome, Delta)
                    assert outcome.token_ids == expected(ask(5 + i))
            assert refused >= 9

    within(work())


def test_text_that_cannot_be_made_ends_its_own_request_only(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            bad = ask(5, stop=("never",), max_tokens=50)
            good = ask(6, max_tokens=50)
            kept = asyncio.create_task(r.whole(good))
            stream = r.engine.generate(bad)
            await anext(stream)
            (live,) = [live for live in r.engine._live.values() if live.params.stop]
            live._texts[0] = _BrokenText()  # type: ignore[assignment]
            with pytest.raises(ShardlineError, match="no text today"):
                async for _ in stream:
                    pass
            assert (await kept).token_ids == expected(good)

    within(work())


class _BrokenText:
    def push(self, token_id: int) -> str:
        raise RuntimeError("no text today")


# -- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "cancel", "task", "drop"])
def test_a_request_that_is_left_at_any_delta_frees_its_blocks(rig: Callable[..., Rig], how: str) -> None:
    async def leave_after(r: Rig, count: int) -> None:
        request = replace(ask(*range(1, 71), max_tokens=10), request_id="left")
        stream = r.engine.generate(request)
        if how == "task":
            got = 0

            async def consume() -> None:
                nonlocal got
                async for _ in stream:
                    got += 1

            task = asyncio.create_task(consume())
            while got < count:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        deltas = [await anext(stream) for _ in range(count)]
        if how == "close":
            await stream.aclose()
        elif how == "cancel":
            r.engine.cancel("left")
            deltas += [delta async for delta in stream]
            if count:
                assert merge(deltas).finish_reason == "abort"
        else:
            del stream
            for _ in range(3):
                await asyncio.sleep(0)

    async def work() -> None:
        async with rig() as r:
            for count in range(10):
                neighbour = ask(9, 9, max_tokens=20)
                beside = asyncio.create_task(r.whole(neighbour))
                await leave_after(r, count)
                assert (await beside).token_ids == expected(neighbour)
                r.check_idle()

    within(work())


def test_cancel_at_every_turn_of_the_event_loop(rig: Callable[..., Rig]) -> None:
    """Also while the prompt is being made, waits, is in its first chunk, or has a step in flight."""

    async def work() -> None:
        async with rig() as r:
            for turns in range(60):
                request = replace(
                    ask(*range(1, 100), max_tokens=5), token_ids=None, text="word " * 99, request_id="left"
                )
                task = asyncio.create_task(r.run(request))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if turns % 2:
                    await asyncio.sleep(0.001 * (turns % 5))
                r.engine.cancel("left")
                deltas = await task
                assert deltas[-1].finish_reason in ("abort", "length")
                r.check_idle()

    within(work())


def test_cancel_of_a_waiting_request_lets_the_next_one_in(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig(max_sequences=1) as r:
            r.pipeline.gate.clear()
            first = asyncio.create_task(r.whole(replace(ask(5), request_id="first")))
            second = asyncio.create_task(r.whole(replace(ask(6), request_id="second")))
            third = asyncio.create_task(r.whole(ask(7)))
            await asyncio.sleep(0)
            r.engine.cancel("second")
            assert (await second).finish_reason == "abort"
            r.pipeline.gate.set()
            assert (await first).token_ids == expected(ask(5))
            assert (await third).token_ids == expected(ask(7))

    within(work())


def test_room_that_a_cancel_makes_is_used_at_once(rig: Callable[..., Rig]) -> None:
    """Not only when the next result comes."""

    async def work() -> None:
        async with rig(max_sequences=1) as r:
            r.pipeline.gate.clear()
            planned = len(r.pipeline.plans)
            first = asyncio.create_task(r.run(replace(ask(5), request_id="first")))
            second = asyncio.create_task(r.whole(ask(6)))
            while len(r.pipeline.plans) == planned:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(r.pipeline.plans) == planned + 1
            r.engine.cancel("first")
            while len(r.pipeline.plans) == planned + 1:
                await asyncio.sleep(0)
            r.pipeline.gate.set()
            assert (await first)[-1].finish_reason == "abort"
            assert (await second).token_ids == expected(ask(6))

    within(work())


def test_usage_counts_what_the_prefix_cache_held(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            request = ask(*range(1, 2 * BLOCK_SIZE + 5), n=2)
            cold = (await r.run(request))[-1].usage
            warm = (await r.run(request))[-1].usage
            assert warm.cached_tokens == 2 * BLOCK_SIZE
            assert warm.prompt_tokens == cold.prompt_tokens == 2 * BLOCK_SIZE + 4

    within(work())


def test_one_inbox_may_carry_many_requests(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            inbox = Inbox()
            requests = {await r.engine.submit(ask(5 + i), inbox): ask(5 + i) for i in range(5)}
            got: dict[str, list[Delta]] = {request_id: [] for request_id in requests}
            while not all(deltas and deltas[-1].finish_reason for deltas in got.values()):
                for item in await inbox.take():
                    assert isinstance(item, Delta)
                    got[item.request_id].append(item)
            for request_id, request in requests.items():
                assert merge(got[request_id]).token_ids == expected(request)

    within(work())


# -- loss and death --------------------------------------------------------------------------------------------------


async def _eight(r: Rig) -> list[Delta]:
    requests = [ask(*range(1, 6 + 11 * i), max_tokens=7 + i) for i in range(8)]
    # All share a prefix, so that the cache is in play; the usage tells how far, and may differ.
    wholes = await asyncio.gather(*(r.whole(replace(q, request_id=f"r{i}")) for i, q in enumerate(requests)))
    return [replace(whole, usage=replace(whole.usage, cached_tokens=0)) for whole in wholes]


@pytest.mark.parametrize("where", ["result", "submit"])
def test_a_loss_at_any_step_changes_no_byte(rig: Callable[..., Rig], where: str) -> None:
    async def work() -> None:
        async with rig() as r:
            undisturbed = await _eight(r)
            steps = len(r.pipeline.plans)
        assert steps > 20
        for step in range(1, steps):
            async with rig() as r:
                (r.pipeline.lose_at if where == "result" else r.pipeline.lose_on_submit).add(step)
                assert await _eight(r) == undisturbed
                assert r.pipeline.recoveries == 1
                status = await r.engine.status()
                assert (status.losses, status.state) == (1, "ready")

    within(work(), 240.0)


def test_losses_with_steps_between_are_survived_for_ever(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            undisturbed = await _eight(r)
        async with rig() as r:
            r.pipeline.lose_at = set(range(3, 400, 5))
            assert await _eight(r) == undisturbed
            assert r.pipeline.recoveries > 5

    within(work())


def test_a_stage_that_is_lost_at_rest_comes_back_before_anyone_asks(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            assert (await r.whole(ask(5))).token_ids == expected(ask(5))
            r.pipeline.lose()
            while (await r.engine.status()).losses == 0:
                await asyncio.sleep(0)
            assert (await r.engine.status()).state == "ready"
            assert (await r.whole(ask(6))).token_ids == expected(ask(6))
            assert r.pipeline.recoveries == 1

    within(work())


def test_recoveries_that_fail_are_tried_again_within_the_budget(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig(config=EngineConfig(max_losses=3, retry_seconds=0.01)) as r:
            r.pipeline.lose_at = {4}
            r.pipeline.failing_recoveries = 2
            assert (await r.whole(ask(5))).token_ids == expected(ask(5))
            assert r.pipeline.recoveries == 3

    within(work())


@pytest.mark.parametrize("how", ["every step is lost", "recovery fails"])
def test_a_spent_budget_ends_every_request_with_the_last_words(rig: Callable[..., Rig], how: str) -> None:
    async def work() -> None:
        r = rig(config=EngineConfig(max_losses=3, retry_seconds=0.01))
        await r.engine.start()
        if how == "recovery fails":
            r.pipeline.lose_at = {6}
            r.pipeline.failing_recoveries = 99
            words = "scripted: cannot come back"
        else:
            r.pipeline.lose_at = set(range(6, 99))
            words = "scripted loss"
        outcomes = await asyncio.gather(*(r.whole(ask(5 + i, n=1)) for i in range(8)), return_exceptions=True)
        assert len(outcomes) == 8
        for outcome in outcomes:
            assert isinstance(outcome, EngineDeadError)
            assert words in str(outcome)
        assert r.pipeline.recoveries == 3
        assert r.pipeline.closed
        with pytest.raises(EngineDeadError, match=words):
            await r.run(ask(5))
        status = await r.engine.status()
        assert status.state == "dead"
        assert words in status.reason
        r.check_idle()
        await r.engine.close()

    within(work())


def test_tries_to_bring_a_stage_back_wait_longer_each_time(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig(config=EngineConfig(max_losses=4, retry_seconds=0.05)) as r:
            recover, tries = r.pipeline.recover, []

            async def watched() -> None:
                tries.append(asyncio.get_running_loop().time())
                await recover()

            r.pipeline.recover = watched
            # Nobody asks for anything, and what is gone comes back within the budget.
            r.pipeline.failing_recoveries = 3
            r.pipeline.lose()
            while (await r.engine.status()).losses == 0:
                await asyncio.sleep(0.01)
            waits = [later - earlier for earlier, later in itertools.pairwise(tries)]
            assert len(waits) == 3
            assert all(wait >= least for wait, least in zip(waits, (0.049, 0.099, 0.199), strict=True))
            assert (await r.whole(ask(5))).token_ids == expected(ask(5))

    within(work())


def test_close_ends_the_wait_for_the_next_try(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig(config=EngineConfig(retry_seconds=10_000.0))
        await r.engine.start()
        r.pipeline.failing_recoveries = 99
        r.pipeline.lose()
        while not r.pipeline.recoveries:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(r.whole(ask(5)))
        await asyncio.sleep(0.01)
        assert r.pipeline.recoveries == 1
        await r.engine.close()
        assert (await waiting).finish_reason == "abort"

    within(work())


@pytest.mark.parametrize("deadly", [((6, 3),), ((6, 3), (11, 20), (9, 3))])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_that_kills_a_stage_each_time_ends_alone(
    rig: Callable[..., Rig], deadly: tuple[tuple[int, int], ...], depth: int
) -> None:
    """Pairs of a prompt's first token, and how many tokens of that sequence no stage survives."""

    async def work() -> None:
        async with rig(depth=depth) as r:
            requests = [ask(5 + i, 6, 7, max_tokens=30) for i in range(8)]
            r.pipeline.deadly = {(first, 6, 7): tokens for first, tokens in deadly}
            streams: list[list[Delta]] = [[] for _ in requests]

            async def consume(index: int) -> None:
                async for delta in r.engine.generate(requests[index]):
                    streams[index].append(delta)

            outcomes = await asyncio.gather(*map(consume, range(8)), return_exceptions=True)
            for i, (request, outcome, deltas) in enumerate(zip(requests, outcomes, streams, strict=True)):
                fatal = dict(deadly).get(5 + i)
                if fatal is None:
                    assert outcome is None
                    assert merge(deltas).token_ids == expected(request)
                else:
                    assert isinstance(outcome, DeadlyRequestError)
                    assert "stage 1 was lost: scripted loss at step" in str(outcome)
                    # What it had before is there.
                    had = merge(deltas).token_ids if deltas else ()
                    assert had == expected(request)[: max(0, fatal - 3)]
            assert r.pipeline.recoveries <= 4 * len(deadly)
            status = await r.engine.status()
            assert (status.state, status.requests) == ("ready", 0)
            assert (await r.whole(ask(5))).token_ids == expected(ask(5))

    within(work())


def test_a_deadly_request_of_several_sequences_ends_with_all_of_them(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            r.pipeline.deadly = {(5, 6): 4}
            beside = asyncio.create_task(r.whole(ask(6, 6)))
            with pytest.raises(DeadlyRequestError, match=r"request 'mine' was ended"):
                await r.run(replace(ask(5, 6, n=3), request_id="mine"))
            assert (await beside).token_ids == expected(ask(6, 6))

    within(work())


def test_a_plan_does_not_wait_for_all_the_text_of_a_result(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig(depth=2, max_sequences=80, max_step_tokens=80, num_blocks=200) as r:
            owed: list[int] = []
            submit = r.pipeline.submit

            async def watched(plan: Any) -> None:
                owed.append(len(r.engine._owed))
                await submit(plan)

            r.pipeline.submit = watched
            requests = [ask(place, place + 1, max_tokens=20) for place in range(80)]
            wholes = await asyncio.gather(*(r.whole(request) for request in requests))
            assert [whole.token_ids for whole in wholes] == [expected(request) for request in requests]
            # Two groups of 40: one's plan goes out before the other's text is made, and nothing piles up.
            assert max(owed) > 40
            assert max(owed) <= 80

    within(work())


def test_a_cancelled_request_has_had_every_token_that_was_counted(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.cluster.engine.DELIVERED_AT_ONCE", 1)

    async def work() -> None:
        async with rig(depth=1) as r:
            others = [asyncio.create_task(r.whole(ask(place, 9, max_tokens=30))) for place in range(6)]
            inbox, counted = Inbox(), 0
            request = replace(ask(5, 6, max_tokens=30), request_id="mine")
            await r.engine.submit(request, inbox)
            while True:
                await asyncio.sleep(0)
                if any(live.request_id == "mine" for live, _ in r.engine._owed):
                    counted = len(r.engine._scheduler._requests["mine"].live[0].output)
                    if counted >= 4:
                        break
            r.engine.cancel("mine")
            got = [item for item in await inbox.take() if isinstance(item, Delta)]
            assert merge(got).token_ids == expected(request)[:counted]
            assert got[-1].finish_reason == "abort"
            for place, whole in enumerate(await asyncio.gather(*others)):
                assert whole.token_ids == expected(ask(place, 9, max_tokens=30))

    within(work())


def test_tokens_that_are_owed_to_a_failed_request_do_not_reach_the_next_of_its_name(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.cluster.engine.DELIVERED_AT_ONCE", 1)
    advance = LiveRequest.advance

    def failing(self: LiveRequest, update: Any) -> Delta:
        if self.params.max_tokens == 13 and self._completion_tokens >= 4:
            raise ValueError("no text")
        return advance(self, update)

    monkeypatch.setattr(LiveRequest, "advance", failing)

    async def work() -> None:
        async with rig(depth=1) as r:
            first = replace(ask(5, 6, n=2, max_tokens=13), request_id="mine")
            second = replace(ask(7, 8, 9, n=2, max_tokens=8), request_id="mine")
            inbox, again = Inbox(), Inbox()
            await r.engine.submit(first, inbox)
            while not (taken := await inbox.take()) or not isinstance(taken[-1], Failure):
                pass
            # The token of its other sequence waits still.
            assert [live.request_id for live, _ in r.engine._owed] == ["mine"]
            await r.engine.submit(second, again)
            deltas: list[Delta] = []
            while sum(delta.finish_reason is not None for delta in deltas) < 2:
                deltas += [item for item in await again.take() if isinstance(item, Delta)]
            for index in range(2):
                assert merge([delta for delta in deltas if delta.index == index]).token_ids == expected(second)

    within(work())


def test_what_was_generated_before_death_is_still_delivered(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig(config=EngineConfig(max_losses=0))
        await r.engine.start()
        r.pipeline.lose_at = {5}
        inbox = Inbox()
        await r.engine.submit(ask(5), inbox)
        got: list[Delta] = []
        failures: list[Failure] = []
        while not failures:
            for item in await inbox.take():
                (failures if isinstance(item, Failure) else got).append(item)  # type: ignore[arg-type]
        assert isinstance(failures[0].error, EngineDeadError)
        assert merge(got).token_ids == expected(ask(5))[: 5 - 1]
        await r.engine.close()

    within(work())


def test_a_fault_in_the_loop_ends_every_stream_instead_of_hanging_it(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig()
        await r.engine.start()
        stream = r.engine.generate(ask(5, max_tokens=100))
        await anext(stream)

        async def broken() -> None:
            raise ZeroDivisionError("a fault of ours")

        r.pipeline.result = broken
        with pytest.raises(EngineDeadError, match="a fault of ours"):
            async for _ in stream:
                pass
        await r.engine.close()

    within(work())


def test_a_scheduler_that_fails_ends_every_stream_and_gives_the_pipeline_back(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig()
        await r.engine.start()
        streams = [r.engine.generate(ask(5 + i, max_tokens=100)) for i in range(3)]
        for stream in streams:
            await anext(stream)

        def broken(*_: object) -> None:
            raise AssertionError("a block is lost")

        r.engine._scheduler.update = r.engine._scheduler.abort = broken  # type: ignore[method-assign, assignment]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="a block is lost"):
                async for _ in stream:
                    pass
        while not r.pipeline.closed:
            await asyncio.sleep(0)
        await r.engine.close()

    within(work())


def test_cancel_while_a_stage_comes_back(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            r.pipeline.lose_at = {3}
            back = asyncio.Event()
            recover = r.pipeline.recover

            async def slowly() -> None:
                await back.wait()
                await recover()

            r.pipeline.recover = slowly
            left = asyncio.create_task(r.whole(replace(ask(5), request_id="left")))
            kept = asyncio.create_task(r.whole(ask(6)))
            while (await r.engine.status()).state != "recovering":
                await asyncio.sleep(0)
            r.engine.cancel("left")
            assert (await left).finish_reason == "abort"
            late = asyncio.create_task(r.whole(ask(7)))
            await asyncio.sleep(0)
            back.set()
            assert (await kept).token_ids == expected(ask(6))
            assert (await late).token_ids == expected(ask(7))

    within(work())


def test_a_pipeline_that_cannot_start_says_why_and_is_given_back(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig()

        async def start() -> None:
            raise StageLostError(2, "no such device")

        r.pipeline.start = start
        with pytest.raises(StageLostError, match="no such device"):
            await r.engine.start()
        assert r.pipeline.closed
        with pytest.raises(EngineDeadError):
            await r.run(ask(5))

    within(work())


def test_a_stage_that_dies_on_every_probe_keeps_the_engine_from_starting(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig(config=EngineConfig(max_losses=1))
        r.pipeline.lose_at = set(range(10))
        with pytest.raises(EngineDeadError, match="scripted loss"):
            await r.engine.start()
        assert r.pipeline.closed

    within(work())


def test_close_ends_what_runs_with_abort(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig()
        await r.engine.start()
        stream = r.engine.generate(ask(5, max_tokens=200))
        first = await anext(stream)
        await r.engine.close()
        await r.engine.close()
        whole = merge([first, *[delta async for delta in stream]])
        assert whole.finish_reason == "abort"
        assert r.pipeline.closed
        with pytest.raises(EngineDeadError, match="closed"):
            await r.run(ask(5))

    within(work())


def test_a_close_that_is_cancelled_goes_on_and_a_second_one_waits_for_it(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig()
        await r.engine.start()
        may_close = asyncio.Event()
        close = r.pipeline.close

        async def slowly() -> None:
            await may_close.wait()
            await close()

        r.pipeline.close = slowly
        first = asyncio.create_task(r.engine.close())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(r.engine.close())
        await asyncio.sleep(0.01)
        assert not second.done()
        assert not r.pipeline.closed
        may_close.set()
        await second
        assert r.pipeline.closed

    within(work())


@pytest.mark.parametrize("when", ["loading", "probing"])
def test_an_engine_that_is_closed_while_it_starts_does_not_become_ready(rig: Callable[..., Rig], when: str) -> None:
    async def work() -> None:
        r = rig()
        go_on = asyncio.Event()
        if when == "loading":
            r.pipeline.start = go_on.wait
        else:
            r.pipeline.gate.clear()
        starting = asyncio.create_task(r.engine.start())
        while when == "probing" and not r.pipeline.plans:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await r.engine.close()
        go_on.set()
        with pytest.raises(EngineDeadError, match="closed"):
            await starting
        assert (await r.engine.status()).state == "closed"
        assert asyncio.all_tasks() <= {asyncio.current_task()}

    within(work())


def test_an_id_that_is_used_again_is_not_ended_by_who_had_it_before(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        async with rig() as r:
            first = r.engine.generate(replace(ask(5, max_tokens=3), request_id="same"))
            await anext(first)
            while r.engine._live:
                await asyncio.sleep(0)
            second = r.engine.generate(replace(ask(6, max_tokens=40), request_id="same"))
            got = [await anext(second)]
            await first.aclose()
            got += [delta async for delta in second]
            assert merge(got).token_ids == expected(ask(6, max_tokens=40))

    within(work())


def test_close_while_a_stage_comes_back(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        r = rig()
        await r.engine.start()
        r.pipeline.lose_at = {3}

        async def never() -> None:
            await asyncio.Event().wait()

        r.pipeline.recover = never
        running = asyncio.create_task(r.whole(ask(5)))
        while (await r.engine.status()).state != "recovering":
            await asyncio.sleep(0)
        await r.engine.close()
        assert (await running).finish_reason == "abort"
        assert r.pipeline.closed

    within(work())


def test_an_engine_that_was_not_started_says_so(rig: Callable[..., Rig]) -> None:
    async def work() -> None:
        with pytest.raises(ShardlineError, match="start"):
            await rig().run(ask(5))

    within(work())


# -- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_any_company_any_trouble_the_same_tokens(rig: Callable[..., Rig], seed: int) -> None:
    """A small pool, priorities, several sequences a request, cancels, consumers that leave or sleep, lost stages: who
    was not cancelled has all tokens of the script, who was has a beginning of them, and nothing is left behind."""
    draw = random.Random(seed)

    async def client(r: Rig, name: str) -> int:
        for _ in range(draw.randrange(60)):
            await asyncio.sleep(0)
        prompt = (
            *range(1, 1 + 16 * draw.randrange(4)),
            *(draw.randrange(1, 2000) for _ in range(draw.randrange(1, 30))),
        )
        request = replace(
            ask(*prompt, max_tokens=draw.randrange(1, 40), n=draw.choice((1, 1, 1, 3))),
            request_id=name,
            priority=draw.randrange(-1, 2),
        )
        leaves_after = draw.choice((None, None, None, draw.randrange(12)))
        cancels_after = draw.choice((None, None, None, draw.randrange(12)))
        got: dict[int, list[Delta]] = {index: [] for index in range(request.params.n)}
        count = 0
        stream = r.engine.generate(request)
        async for delta in stream:
            got[delta.index].append(delta)
            if count == leaves_after:
                await stream.aclose()  # type: ignore[attr-defined]
                break
            if count == cancels_after:
                r.engine.cancel(name)
            count += 1
            for _ in range(draw.randrange(5)):
                await asyncio.sleep(0)
        for deltas in got.values():
            tokens = merge(deltas).token_ids if deltas else ()
            assert tokens == expected(request)[: len(tokens)]
            if leaves_after is None and cancels_after is None:
                assert tokens == expected(request)
                assert deltas[-1].finish_reason == "length"
        return sum(len(delta.token_ids) for deltas in got.values() for delta in deltas)

    async def work() -> None:
        async with rig(num_blocks=8, max_context=128, max_sequences=6, depth=draw.randrange(1, 5)) as r:
            r.pipeline.lose_at = {draw.randrange(2, 300) for _ in range(draw.randrange(4))}
            r.pipeline.lose_on_submit = {draw.randrange(2, 300) for _ in range(draw.randrange(4))}
            counts = await asyncio.gather(*(client(r, f"r{i}") for i in range(30)))
            assert sum(counts) > 100
            assert r.engine._scheduler.stats().preemptions > 0

    within(work())
