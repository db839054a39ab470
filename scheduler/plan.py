"""The messages between the scheduler and the stages: ids and integers only, frozen and picklable.

One `StepPlan` goes to every stage, in the same order on each; one `StepResult` comes back from the last stage. A plan
says only what changed: a stage keeps the block table of each sequence it knows, and the last stage its sampling
parameters and its tokens.

What a step has hundreds of is a named tuple: as frozen as a dataclass, and made in a fifth of the time. Plans and
results pickle by columns, one tuple of numbers a field, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardline.scheduler.params import SamplingParams

AHEAD = -1
"""In place of a token id: the token that this sequence samples in a plan before, whose result has not come yet.

Only a scheduler with `SchedulerConfig.ahead` plans so, and only in a run of exactly one token. A stage that has both
the embedding and the head takes it from what it chose for the sequence last; of several stages the last one tells it to
the first."""


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence that the stages do not know yet (new, or back after preemption or the loss of a stage).

    Attributes:
        seq_id: Its id; an id is not used again until a plan's `forget` has named it.
        params: Its sampling parameters with `seed` resolved to this sequence's own.
        prompt_len: How many of `token_ids` are the prompt; the rest was generated before a preemption or a loss.
        token_ids: All its tokens so far. Only the last stage keeps them, and only when the penalties need them.
        block_ids: Its block table so far: the blocks of a prefix that was found in the cache.
    """

    seq_id: int
    params: SamplingParams
    prompt_len: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


class SequenceRun(NamedTuple):
    """The tokens of one sequence that run in this step.

    Attributes:
        seq_id: The sequence.
        position: Absolute position of the first of `token_ids`.
        token_ids: The tokens to run, one or more, at consecutive positions; `(AHEAD,)` for one that is being sampled.
        new_block_ids: Blocks appended to its block table before the step.
        samples: Whether the step samples a token from the logits of the last of `token_ids`.
    """

    seq_id: int
    position: int
    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One microbatch's step through all stages.

    Attributes:
        step_id: Ascending by one from 0; the stages check the order.
        forget: Sequences to forget, before anything else in this plan (ended, aborted or preempted).
        starts: Sequences to learn, after `forget`.
        runs: What to run; a sequence appears at most once. Never empty.
    """

    step_id: int
    forget: tuple[int, ...]
    starts: tuple[SequenceStart, ...]
    runs: tuple[SequenceRun, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of this step."""
        return sum(len(run.token_ids) for run in self.runs)

    def __reduce__(self) -> tuple[Callable[..., StepPlan], tuple[Any, ...]]:
        return plan_of_columns, (self.step_id, self.forget, self.starts, *zip(*self.runs, strict=True))


def plan_of_columns(
    step_id: int, forget: tuple[int, ...], starts: tuple[SequenceStart, ...], *columns: tuple[Any, ...]
) -> StepPlan:
    """A plan from its runs' fields, one tuple each: how it pickles."""
    return StepPlan(step_id, forget, starts, tuple(map(SequenceRun._make, zip(*columns, strict=True))))


class SampledToken(NamedTuple):
    """One token that the last stage chose.

    Attributes:
        seq_id: Its sequence.
        token_id: The token.
        logprob: Its natural-log probability under the model's own distribution; None unless asked for.
        top_logprobs: (token id, logprob) of the most likely tokens, most likely first, ties by lower id.
    """

    seq_id: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of one plan.

    Attributes:
        step_id: The plan's.
        tokens: One for each run with `samples`, in the plan's order.
    """

    step_id: int
    tokens: tuple[SampledToken, ...]

    def __reduce__(self) -> tuple[Callable[..., StepResult], tuple[Any, ...]]:
        return result_of_columns, (self.step_id, *zip(*self.tokens, strict=True))


def result_of_columns(step_id: int, *columns: tuple[Any, ...]) -> StepResult:
    """A result from its tokens' fields, one tuple each: how it pickles."""
    return StepResult(step_id, tuple(map(SampledToken._make, zip(*columns, strict=True))))
