"""The engine's loop without its text: what `verify` runs its requests with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardline.cluster.pipeline import Pipeline
from shardline.scheduler import NewRequest, SampledToken, Scheduler, StepPlan, StepResult
from shardline.scheduler.plan import AHEAD


@dataclass(frozen=True, slots=True)
class Played:
    """What came of some requests.

    Attributes:
        tokens: Each request's, by its id.
        preemptions, prefix_hit_tokens: How often sequences were preempted, and prompt tokens found in the cache.
        plans_ahead: Plans with a token that was being sampled when they were made.
    """

    tokens: dict[str, list[SampledToken]]
    preemptions: int
    prefix_hit_tokens: int
    plans_ahead: int


class Rehearsal:
    """A pipeline that computes nothing, for the scheduler's own part of a case."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()

    async def submit(self, plan: StepPlan) -> None:
        """See `Pipeline`."""
        self._plans.append(plan)

    async def result(self) -> StepResult:
        """Token 0 for all."""
        plan = self._plans.popleft()
        return StepResult(plan.step_id, tuple(SampledToken(run.seq_id, 0) for run in plan.runs if run.samples))


async def play(
    pipeline: Pipeline | Rehearsal,
    scheduler: Scheduler,
    requests: Sequence[NewRequest],
    later: Sequence[NewRequest] = (),
) -> Played:
    """Run requests to their ends. `later` come with the first token of the others."""
    before = scheduler.stats()
    for request in requests:
        scheduler.add(request)
    waiting = deque(later)
    tokens: dict[str, list[SampledToken]] = {}
    in_flight = plans_ahead = 0
    # A plan made ahead may still be in flight when the last sequence has ended.
    while scheduler.has_unfinished() or in_flight:
        while (plan := scheduler.schedule()) is not None:
            await pipeline.submit(plan)
            in_flight += 1
            plans_ahead += any(run.token_ids == (AHEAD,) for run in plan.runs)
        assert in_flight, "the scheduler has work and plans nothing"
        result = await pipeline.result()
        in_flight -= 1
        for update in scheduler.update(result):
            tokens.setdefault(update.request_id, []).append(update.token)
        while tokens and waiting:
            scheduler.add(waiting.popleft())
    scheduler.check_integrity()
    after = scheduler.stats()
    return Played(
        tokens, after.preemptions - before.preemptions, after.prefix_hit_tokens - before.prefix_hit_tokens, plans_ahead
    )
