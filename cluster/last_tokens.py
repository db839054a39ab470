"""What the first of several stages is told of the tokens that the last one samples: plans may call them `AHEAD`."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence

from shardline.cluster.errors import TransportError
from shardline.scheduler.plan import AHEAD, SequenceRun, StepPlan

_NEW_RUN = functools.partial(tuple.__new__, SequenceRun)
"""In a third of the time of the class's own way: hundreds are made a step, while a device waits for it."""


class LastTokens:
    """The token that was sampled last for each sequence.

    One thread takes all plans through `fill_in`, in their order. Another brings the tokens of those that sample, in the
    same order; they may come before the plan that asks for them, or after it. What is kept of a sequence goes when a
    plan forgets it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The plans whose tokens have not come: id and the sequences that they sample for.
        self._due: deque[tuple[int, tuple[int, ...]]] = deque()
        # Of each sequence the last plan that samples for it, and its token once that has come.
        self._sampled_by: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._closed = False

    def fill_in(self, plan: StepPlan) -> StepPlan | None:
        """The next plan, with tokens in the place of `AHEAD`; waits for them. None once closed.

        `AHEAD` of a sequence for which no plan has sampled stays as it is.
        """
        with self._changed:
            for seq_id in plan.forget:
                self._sampled_by.pop(seq_id, None)
                self._tokens.pop(seq_id, None)
            asked = [run.seq_id for run in plan.runs if run.token_ids == (AHEAD,)]
            if asked:
                # Tokens come in the order of the plans: with the latest of these all are there.
                last = max(self._sampled_by.get(seq_id, -1) for seq_id in asked)
                self._changed.wait_for(lambda: self._closed or not self._due or self._due[0][0] > last)
                tokens = self._tokens
                runs = tuple(
                    _NEW_RUN((seq_id, position, (tokens.get(seq_id, AHEAD),) if ids == (AHEAD,) else ids, *others))
                    for seq_id, position, ids, *others in plan.runs
                )
                plan = StepPlan(plan.step_id, plan.forget, plan.starts, runs)
            sampling = tuple(run.seq_id for run in plan.runs if run.samples)
            if sampling:
                self._due.append((plan.step_id, sampling))
                self._sampled_by.update(dict.fromkeys(sampling, plan.step_id))
            return None if self._closed else plan

    def arrive(self, step_id: int, token_ids: Sequence[int]) -> None:
        """The tokens of the oldest plan that waits for its own. Raises TransportError if they are of another."""
        with self._changed:
            due, sampling = self._due[0] if self._due else (None, ())
            if (step_id, len(token_ids)) != (due, len(sampling)):
                raise TransportError(
                    f"{len(token_ids)} tokens of step {step_id} came where {len(sampling)} of step {due} were due"
                )
            self._due.popleft()
            for seq_id, token_id in zip(sampling, token_ids, strict=True):
                # Not of a sequence that was forgotten since, even if there is another of that name.
                if self._sampled_by.get(seq_id) == step_id:
                    self._tokens[seq_id] = token_id
            self._changed.notify_all()

    def close(self) -> None:
        """Wake who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
