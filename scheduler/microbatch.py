"""The plan that is being made, the plans in flight, and how many sequences the one may take beside the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from shardline.scheduler.config import SchedulerConfig
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
        ahead: It has tokens that are being sampled, or every slot is taken without it. So it preempts nobody: the next
            result may end somebody who has blocks.
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


def whose_turn(ready: Iterable[Sequence], before: Iterable[InFlight], at_most: int) -> list[Sequence] | None:
    """Who has one token in a plan that is made ahead: whoever is ready, then whoever is sampled by the plans `before`
    it, in their order.

    None when such a plan would leave somebody behind: one of those that are being sampled cannot run ahead, for its
    penalties look at the token that is not known yet, or because it is ahead already. The plans would part then: the
    others would have a token in each turn, and that one in every other.
    """
    decoding = list(islice(ready, at_most))
    for plan in before:
        for sequence in plan.sequences:
            if len(decoding) == at_most:
                return decoding
            # Whoever has ended, or has been preempted, has nothing computed; and of whoever is in two plans, the later
            # one counts.
            if sequence.lag > 0 or sequence.samples_its_last or sequence.last_step != plan.step_id:
                continue
            if sequence.lag < 0 or sequence.params.needs_history:
                return None
            decoding.append(sequence)
    return decoding


def num_groups(active: int, slots: int, min_microbatch: int) -> int:
    """How many groups so many sequences make: as many as there are slots, but none thinner than `min_microbatch`."""
    return max(1, min(slots, active // min_microbatch))


def fair_share(active: int, slots: int, min_microbatch: int, in_flight: Iterable[int]) -> int:
    """The most sequences for the next plan.

    `active` sequences make `num_groups`, whose sizes differ by one at most. Only so many plans in flight may have the
    larger size as the division leaves over, which makes groups that became lopsided (a sequence came or ended) even
    again within one round.

    Args:
        active: Sequences to share out, those in flight included.
        slots: Of the pipeline.
        min_microbatch: The least size of a group, where there are that many sequences.
        in_flight: The sizes of the plans in flight that have the other slots.
    """
    size, larger = divmod(active, num_groups(active, slots, min_microbatch))
    if sum(1 for other in in_flight if other > size) < larger:
        size += 1
    return max(1, size)


class Slots:
    """The pipeline's slots, and the plans that have them. The decoding sequences make a group for each.

    Where plans are made ahead there is one slot less than plans: the last of those in flight are the groups' that take
    turns with the next plan's, and what is before them is of the turn before.
    """

    def __init__(self, config: SchedulerConfig, in_flight: deque[InFlight]) -> None:
        self._count = max(1, config.depth - 1) if config.ahead else config.depth
        self._config = config
        self._in_flight = in_flight

    def are_free(self, active: int) -> bool:
        """Whether so many sequences make more groups than there are plans; always, where none is made ahead."""
        return not self._config.ahead or len(self._in_flight) < self._groups(active)

    def before(self, active: int) -> list[InFlight]:
        """The plans whose sequences have the next turn: at least the oldest one's."""
        return list(self._in_flight)[: max(1, len(self._in_flight) + 1 - self._groups(active))]

    def share(self, active: int, size: Callable[[InFlight], int]) -> int:
        """The most sequences for the next plan, of so many; see `fair_share`."""
        beside = list(self._in_flight)
        if self._config.ahead:
            beside = beside[max(0, len(beside) + 1 - self._groups(active)) :]
        return fair_share(active, self._count, self._config.min_microbatch, map(size, beside))

    def _groups(self, active: int) -> int:
        return num_groups(active, self._count, self._config.min_microbatch)
