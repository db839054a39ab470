"""What the engine gives to the scheduler and gets back: ids and integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SampledToken


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the scheduler sees it: ids only. `priority`: lower runs first. `params.seed` is resolved."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0


class SequenceUpdate(NamedTuple):
    """A new token of one sequence of a request.

    Attributes:
        request_id: The request.
        index: Which of its n sequences.
        token: The new token.
        finish_reason: None while it goes on; "stop" (a stop token, which is `token`) or "length".
        cached_tokens: Prompt tokens found in the prefix cache when it was first admitted.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # in the place of a tuple's method of that name
    token: SampledToken
    finish_reason: str | None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for the status line and metrics.

    Attributes:
        waiting, running: Sequences in the queue (preempted ones included), and those that hold blocks.
        blocks_used: Blocks that some running sequence holds.
        blocks_cached: Blocks that none holds, but whose content can be found again.
        blocks_total: The pool's size.
        in_flight: Plans in flight.
        preemptions: Since the start.
        prefix_hit_tokens: Tokens found in the prefix cache instead of being computed, since the start.
        steps: Plans made since the start.
    """

    waiting: int
    running: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    in_flight: int
    preemptions: int
    prefix_hit_tokens: int
    steps: int
