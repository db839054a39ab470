"""The plan that is being made, the plans in flight, and how many sequences the one may take beside the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardline.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result has not come yet: its sequences, and the ids of those that sample."""

    step_id: int
    sequences: tuple[Sequence, ...]
    sampling: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many sequences it has."""
        return len(self.sequences)


class Draft:
    """The plan that is being made: how many tokens of which sequences, and how many tokens it may still take.

    Drafting changes nothing that the stages see: a sequence can be taken out again, and the whole draft be dropped.

    Attributes:
        counts: The tokens of each sequence.
        budget: Tokens that it may still take.
        ahead: It is made while tokens before it are being sampled, and so preempts nobody: the next result may end
            somebody who has blocks.
    """

    def __init__(self, budget: int, *, ahead: bool = False) -> None:
        self.counts: dict[Sequence, int] = {}
        self.budget = budget
        self.ahead = ahead

    def put(self, sequence: Sequence, count: int) -> None:
        """Add a sequence's next `count` tokens."""
        self.counts[sequence] = count
        self.budget -= count

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, if it is in."""
        self.budget += self.counts.pop(sequence, 0)

    def give_up(self) -> None:
        """Nothing is to come of it."""
        self.counts.clear()
        self.budget = 0


def all_that_decode(running: Iterable[Sequence]) -> list[Sequence] | None:
    """Who has one token in a plan that is made ahead: whoever is ready, and whoever is being sampled.

    None when such a plan would leave somebody behind: one of those that are being sampled cannot run ahead, for its
    penalties look at the token that is not known yet, or because it is ahead already. The plans would part then: the
    others would have a token in each step, and that one in every other.
    """
    decoding = []
    for sequence in running:
        lag = sequence.lag
        if lag > 1 or sequence.samples_its_last:
            continue
        if lag < 0 or (lag == 0 and sequence.params.needs_history):
            return None
        decoding.append(sequence)
    return decoding


def fair_share(active: int, depth: int, min_microbatch: int, in_flight: Iterable[int]) -> int:
    """The most sequences for the next plan.

    `active` sequences make as many groups as there are slots, as long as no group is thinner than `min_microbatch`; the
    groups' sizes differ by one at most. Only so many plans in flight may have the larger size as the division leaves
    over, which makes groups that became lopsided (a sequence came or ended) even again within one round.

    Args:
        active: Sequences to share out, those in flight included.
        depth: Slots of the pipeline.
        min_microbatch: The least size of a group, where there are that many sequences.
        in_flight: The sizes of the plans in flight.
    """
    groups = max(1, min(depth, active // min_microbatch))
    size, larger = divmod(active, groups)
    if sum(1 for other in in_flight if other > size) < larger:
        size += 1
    return max(1, size)
