"""The central continuous-batching scheduler: three verbs, `add`, `schedule`, `update` (and `abort`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SampledToken, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy.

    Attributes:
        num_blocks: Blocks in the pool: the smallest stage's.
        block_size: Tokens a block: a power of two from 8.
        max_context: The most tokens of one sequence, prompt and output.
        depth: The most plans in flight.
        max_step_tokens: The most rows of one step.
        prefill_chunk: The most prompt tokens of one sequence in one step.
        max_sequences: The most sequences that hold blocks at once.
        min_microbatch: Do not spread ready sequences thinner than this over the free slots of the pipeline. 1 on
            GPUs of their own (a step is bound by the weights' bytes); more where stages share one device.
        max_waiting: The most requests that may wait; more are refused.
        watermark: Blocks that an admission must leave free.
        prefix_cache: Whether full blocks of ended and running sequences are found again by their tokens.
        eos_token_ids: The model's own end tokens.
        vocab_size: For checking token ids.
    """

    num_blocks: int
    block_size: int
    max_context: int
    depth: int
    max_step_tokens: int
    prefill_chunk: int
    max_sequences: int
    min_microbatch: int = 1
    max_waiting: int = 4096
    watermark: int = 0
    prefix_cache: bool = True
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the scheduler sees it: ids only. `priority`: lower runs first. `params.seed` is resolved."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """A new token of one sequence of a request, or its end.

    Attributes:
        request_id: The request.
        index: Which of its n sequences.
        token: The new token; None when the sequence ended without one.
        finish_reason: None while it goes on; "stop" (a stop token, which is `token`), "length" or "abort".
        cached_tokens: Prompt tokens found in the prefix cache when it was first admitted.
    """

    request_id: str
    index: int
    token: SampledToken | None
    finish_reason: str | None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for the status line and metrics."""

    waiting: int
    running: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    in_flight: int
    preemptions: int
    prefix_hit_tokens: int
    steps: int


class Scheduler:
    """See `SchedulerConfig`. Not thread-safe: one owner calls it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    def add(self, request: NewRequest) -> None:
        """Queue a request. Raises RequestTooLargeError, QueueFullError or InvalidParameterError (empty prompt,
        id in use, token out of the vocabulary)."""
        raise NotImplementedError

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run or the pipeline is full."""
        raise NotImplementedError

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """Take a result, in the order of the plans."""
        raise NotImplementedError

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its sequences) now; unknown or ended ones are no error. No update follows for it."""
        raise NotImplementedError

    def drop_in_flight(self) -> None:
        """A stage was lost: forget all plans in flight and every cached block; unfinished sequences are recomputed."""
        raise NotImplementedError

    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        raise NotImplementedError

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is leaked, shared wrongly or counted wrongly."""
        raise NotImplementedError

    def unfinished(self) -> Sequence[str]:
        """Ids of the requests that have not ended."""
        raise NotImplementedError
