"""How many sequences one plan takes, so that the pipeline's slots are filled evenly."""

from __future__ import annotations

from collections.abc import Iterable


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
