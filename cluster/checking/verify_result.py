"""What came of a case of `verify`, and where it first went wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardline.cluster.checking.verify_cases import Case
from shardline.scheduler import SampledToken


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a sequence first left its reference.

    Attributes:
        request: Its number in the batch.
        position: Index of the generated token.
        expected, got: Alone and in the case; None where one of them has no such token.
    """

    request: int
    position: int
    expected: SampledToken | None
    got: SampledToken | None

    @property
    def same_token(self) -> bool:
        """Whether only logprobs differ."""
        return self.expected is not None and self.got is not None and self.expected.token_id == self.got.token_id

    def __str__(self) -> str:
        return (
            f"request {self.request}, token {self.position}: expected {_shown(self.expected)}, got {_shown(self.got)}"
        )


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What came of a case.

    Attributes:
        case: The case.
        sequences, tokens: Compared.
        differing: Sequences that were not equal.
        first: The first difference.
        missed: What the case should have done and did not; empty when it did.
        preemptions, prefix_hit_tokens: How often sequences were preempted, and prompt tokens found in the cache.
        plans_ahead: Plans with a token that was being sampled when they were made.
        seconds: It took.
    """

    case: Case
    sequences: int
    tokens: int
    differing: int
    first: Difference | None
    missed: str
    preemptions: int
    prefix_hit_tokens: int
    plans_ahead: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Equal, and the case did what it is for."""
        return self.first is None and not self.missed


def first_difference(request: int, expected: Sequence[SampledToken], got: Sequence[SampledToken]) -> Difference | None:
    """Where two sequences first differ in a token id or in a bit of a logprob."""
    for position, (a, b) in enumerate(itertools.zip_longest(expected, got)):
        if a is None or b is None or _bits(a) != _bits(b):
            return Difference(request, position, a, b)
    return None


def _bits(token: SampledToken) -> str:
    """All of a token but its sequence's id, which is the scheduler's own affair; a float's repr has all of its bits."""
    return repr((token.token_id, token.logprob, token.top_logprobs))


def _shown(token: SampledToken | None) -> str:
    if token is None:
        return "no token"
    tops = ", ".join(f"{token_id}: {logprob!r}" for token_id, logprob in token.top_logprobs)
    return f"token {token.token_id} with logprob {token.logprob!r} (most likely {tops})"
