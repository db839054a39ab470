"""Load on an engine: windows in which all sequences decode, prompts alone, one sequence at a time; and equal tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.layouts import between

from shardline.cluster.engine import Engine
from shardline.cluster.request import Delta, Request
from shardline.scheduler import SamplingParams

Tokens = tuple[int, ...]
Answer = tuple[tuple[int, float | None], ...]
"""Tokens with their logprobs, where these were asked for: a logprob shows an error that turns no token."""


@dataclass(slots=True)
class Parity:
    """Tokens and logprobs of one prompt must be the same whoever runs beside it and wherever its layers are.

    Attributes:
        alone: By key: what the prompt gave alone, on the first layout.
        seen: By key: what the others gave first, in company.
        compared_alone, compared_seen: Sequences that were compared with either.
        compared_logprobs: Logprobs that were.
        different: What did not agree, in words.
    """

    alone: dict[str, Answer] = field(default_factory=dict)
    seen: dict[str, Answer] = field(default_factory=dict)
    compared_alone: int = 0
    compared_seen: int = 0
    compared_logprobs: int = 0
    different: list[str] = field(default_factory=list)

    def check(self, key: str, answer: Sequence[tuple[int, float | None]], where: str, *, ended: bool = False) -> bool:
        """Compare, as far as both go; with `ended` also how far that is. Logprobs count where both have them."""
        got = tuple(answer)
        expected = self.alone.get(key)
        if expected is not None:
            self.compared_alone += 1
            return self._equal(key, got, expected, where, ended)
        first = self.seen.get(key)
        if first is None:
            self.seen[key] = got
            return True
        self.compared_seen += 1
        if not self._equal(key, got, first, where, ended):
            return False
        self.seen[key] = _merged(first, got)
        return True

    def _equal(self, key: str, got: Answer, expected: Answer, where: str, ended: bool) -> bool:
        for at, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
            both = mine[1] is not None and theirs[1] is not None
            self.compared_logprobs += both
            if mine[0] != theirs[0] or (both and mine[1] != theirs[1]):
                return self._differs(f"{where}: {key} has {mine} as token {at}, and {theirs} was expected")
        if ended and len(got) != len(expected):
            return self._differs(f"{where}: {key} has {len(got)} tokens, and {len(expected)} were expected")
        return True

    def _differs(self, words: str) -> bool:
        self.different.append(words)
        return False

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "sequences_compared_with_one_stream": self.compared_alone,
            "sequences_compared_with_another_layout_or_batch": self.compared_seen,
            "logprobs_compared": self.compared_logprobs,
            "different": self.different[:20],
            "equal": not self.different,
        }


def _merged(a: Answer, b: Answer) -> Answer:
    """Of two that agree the longer one, with the logprobs that either has."""
    shorter, longer = sorted((a, b), key=len)
    known = [mine if mine[1] is not None else theirs for mine, theirs in zip(shorter, longer, strict=False)]
    return (*known, *longer[len(shorter) :])


def prompt(vocab: int, length: int, index: int, seed: int) -> Tokens:
    """Token ids of the index-th prompt; never the last, which ends a text."""
    return tuple(map(int, np.random.default_rng([seed, index]).integers(vocab - 1, size=length)))


def greedy(index: int, max_tokens: int | None = None, *, logprobs: bool = False) -> SamplingParams:
    """Of the index-th sequence."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=index, logprobs=0 if logprobs else None)


def answered(delta: Delta) -> Iterator[tuple[int, float | None]]:
    """A delta's tokens, with their logprobs if it has them."""
    if delta.logprobs:
        return ((entry.token_id, entry.logprob) for entry in delta.logprobs)
    return ((token, None) for token in delta.token_ids)


@dataclass(slots=True)
class Window:
    """A time in which every sequence decoded.

    Attributes:
        seconds, tokens: Of the window.
        outputs: All tokens of each sequence, those before and after it too.
        stages: What each stage did in it.
        preemptions: Since the engine started; none should come in a window.
        processor_share: Of the window, how much of a core this process took: with stages in processes of their own the
            engine with scheduling, text and the client.
    """

    seconds: float
    tokens: int
    outputs: list[list[tuple[int, float | None]]]
    stages: list[dict[str, float]]
    preemptions: int
    processor_share: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


async def decode(engine: Engine, prompts: Sequence[Tokens], warm: int, steps: int, *, logprobs: bool = False) -> Window:
    """Run all prompts at once. The window begins when the last sequence has `warm` tokens and ends when the last has
    `steps` more; then all are cancelled. Raises RuntimeError if one ended before."""
    outputs: list[list[tuple[int, float | None]]] = [[] for _ in prompts]
    behind = {warm: len(prompts), warm + steps: len(prompts)}
    moments: dict[int, tuple[float, float, int]] = {}
    snapshots: dict[int, asyncio.Task[Any]] = {}
    ids = [f"decode-{index}" for index in range(len(prompts))]

    async def one(index: int) -> None:
        params = greedy(index, logprobs=logprobs)
        request = Request(token_ids=prompts[index], params=params, request_id=ids[index])
        out = outputs[index]
        async for delta in engine.generate(request):
            before = len(out)
            out.extend(answered(delta))
            for mark in behind:
                if before < mark <= len(out):
                    behind[mark] -= 1
                    if behind[mark] == 0:
                        moments[mark] = time.perf_counter(), time.process_time(), sum(map(len, outputs))
                        snapshots[mark] = asyncio.create_task(engine.status())
                        if mark == warm + steps:
                            for name in ids:
                                engine.cancel(name)
            if delta.finish_reason not in (None, "abort") and behind[warm + steps]:
                raise RuntimeError(
                    f"a sequence ended after {len(out)} tokens, before the last had {warm + steps}: give a longer "
                    "--context, or fewer --steps"
                )

    async with asyncio.TaskGroup() as group:
        for index in range(len(prompts)):
            group.create_task(one(index))
    (began, before_work, first), (ended, after_work, last) = moments[warm], moments[warm + steps]
    before, after = await snapshots[warm], await snapshots[warm + steps]
    await quiet(engine)
    return Window(
        ended - began,
        last - first,
        outputs,
        between(before.stages, after.stages),
        after.scheduler.preemptions,
        (after_work - before_work) / (ended - began),
    )


async def alone(engine: Engine, ids: Tokens, params: SamplingParams) -> Answer:
    """One sequence with nothing beside it."""
    out: list[tuple[int, float | None]] = []
    async for delta in engine.generate(Request(token_ids=ids, params=params)):
        out.extend(answered(delta))
    return tuple(out)


async def read_prompts(engine: Engine, prompts: Sequence[Tokens]) -> tuple[float, list[Answer]]:
    """Prompt tokens a second until every prompt has its first token, and these."""
    began = time.perf_counter()
    outputs = await asyncio.gather(*(alone(engine, ids, greedy(index, 1)) for index, ids in enumerate(prompts)))
    return sum(map(len, prompts)) / (time.perf_counter() - began), list(outputs)


async def quiet(engine: Engine) -> None:
    """Until nothing is in flight any more: what was cancelled still runs to the end of its step."""
    while engine._scheduler.has_unfinished() or engine._scheduler.stats().in_flight:
        await asyncio.sleep(0.001)
