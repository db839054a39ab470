"""The state of one request and of each of its n sequences."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from shardline.scheduler.config import SchedulerConfig
from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import AHEAD, SampledToken, SequenceRun, SequenceStart
from shardline.scheduler.request import NewRequest, SequenceUpdate

_MASK = 2**64 - 1

Rank = tuple[int, int, int]
"""The one order of service, smaller first: it orders the queue, and preemption takes the largest."""


def derived_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request: the request's own for 0, else a mix of both.

    The mix is splitmix64's finalizer (Steele, Lea and Flood, 2014) over seed + index times its odd increment: one to
    one in `seed` for each index, and in `index` for each seed, so that no two sequences of a request share a seed.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(eq=False, slots=True)
class RequestState:
    """A request with sequences that have not ended.

    Attributes:
        request: As it came.
        stop_ids: Tokens that end a sequence of it.
        max_tokens: Tokens, prompt and output, at which a sequence of it ends.
        rank: Its part of the order of service.
        live: Its unfinished sequences by index.
        prompt_hashes: The chain hashes of the prompt's full blocks, once they were needed.
    """

    request: NewRequest
    stop_ids: frozenset[int]
    max_tokens: int
    rank: tuple[int, int]
    live: dict[int, Sequence] = field(default_factory=dict)
    prompt_hashes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: NewRequest, max_tokens: int, arrival: int, config: SchedulerConfig) -> RequestState:
        """The state of a request that has just come, as the `arrival`-th."""
        stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stop_ids |= frozenset(config.eos_token_ids)
        return cls(request, stop_ids, max_tokens, (arrival + request.priority * config.priority_span, arrival))


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of a request.

    There is no prefill and no decode phase: `num_computed` catches up with `num_tokens`, and passes it by one where
    plans are made ahead. A token counts as computed as soon as a plan with it was made, since stages run plans in
    order; the loss of a stage sets it back to 0.

    Attributes:
        request: Its request.
        index: Which of the request's n sequences.
        rank: Its place in the order of service; kept through preemption.
        params: With a seed of its own.
        output: Tokens generated so far.
        num_tokens: Of the prompt and the output.
        num_computed: Tokens that are in the KV pool, or will be when the plans in flight have run.
        hashes: Chain hashes of its first full blocks, as far as they were needed.
        table: The blocks that it holds, in order.
        seq_id: Its name towards the stages, new with each admission, so that what is in flight for an earlier
            admission cannot be taken for this one's; -1 while it waits.
        known_blocks: How many blocks of the table the stages know; None when they do not know the sequence.
        awaits: A chain hash that another sequence is about to publish, and that this one waits for.
        was_preempted: It ran before.
        cached_tokens: Prompt tokens found in the cache at its first admission; None before.
        last_step: The id of the last plan that it is in; -1 before the first.
        losses: How often it was in flight when a stage was lost, since its last token.
    """

    request: RequestState
    index: int
    rank: Rank
    params: SamplingParams
    num_tokens: int
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    hashes: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    seq_id: int = -1
    known_blocks: int | None = None
    awaits: int | None = None
    was_preempted: bool = False
    cached_tokens: int | None = None
    last_step: int = -1
    losses: int = 0

    @classmethod
    def of(cls, request: RequestState, index: int) -> Sequence:
        """Sequence `index` of a request, with nothing computed."""
        params = request.request.params
        seed = derived_seed(params.seed or 0, index)
        return cls(
            request=request,
            index=index,
            rank=(*request.rank, index),
            params=params if params.seed == seed else dataclasses.replace(params, seed=seed),
            num_tokens=len(request.request.prompt_ids),
        )

    @property
    def priority(self) -> int:
        """Its request's."""
        return self.request.request.priority

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.request.live.get(self.index) is self

    @property
    def lag(self) -> int:
        """Tokens that no plan has computed yet; 0 while its next token is being sampled, -1 if the one after it too."""
        return self.num_tokens - self.num_computed

    @property
    def samples_its_last(self) -> bool:
        """Whether what is in flight samples the token at which it ends with "length" at the latest."""
        return self.num_computed >= self.num_tokens and self.num_computed + 1 >= self.request.max_tokens

    def token_ids(self, first: int, end: int) -> tuple[int, ...]:
        """Its tokens at positions first <= i < end; none of them beyond those that it has."""
        prompt = self.request.request.prompt_ids
        split = len(prompt)
        if first >= split:
            return tuple(self.output[first - split : end - split])
        if end <= split:
            return prompt[first:end]
        return prompt[first:] + tuple(self.output[: end - split])

    def start_message(self, block_size: int) -> SequenceStart:
        """What tells the stages of it."""
        return SequenceStart(
            seq_id=self.seq_id,
            params=self.params,
            prompt_len=len(self.request.request.prompt_ids),
            token_ids=self.token_ids(0, self.num_tokens),
            block_ids=tuple(self.table[: self.num_computed // block_size]),
        )

    def run_message(self, count: int) -> SequenceRun:
        """What tells the stages, which know it, to run its next `count` tokens; the one beyond those that it has is
        `AHEAD`."""
        first, end = self.num_computed, self.num_computed + count
        token_ids = (AHEAD,) if first == self.num_tokens else self.token_ids(first, end)
        assert self.known_blocks is not None
        new_blocks = tuple(self.table[self.known_blocks :]) if len(self.table) > self.known_blocks else ()
        return SequenceRun(self.seq_id, first, token_ids, new_blocks, end >= self.num_tokens)

    def append(self, token: SampledToken) -> SequenceUpdate:
        """Take its next token, and say whether it ends here."""
        self.output.append(token.token_id)
        self.num_tokens += 1
        finish_reason = None
        if token.token_id in self.request.stop_ids:
            finish_reason = "stop"
        elif self.num_tokens >= self.request.max_tokens:
            finish_reason = "length"
        request_id = self.request.request.request_id
        return SequenceUpdate(request_id, self.index, token, finish_reason, self.cached_tokens or 0)
