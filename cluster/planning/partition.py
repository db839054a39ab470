"""The exact search under the planner: contiguous layer ranges for devices in a row.

Everything is an integer (bytes, blocks, nanoseconds), so that a bisection ends at the exact optimum. One question is
answered by dynamic programming: is there a split in which every stage has room for that many blocks, no stage takes
longer than that, and no set of cores that several stages share is busy longer than that? The optimum is found by
asking it with ever tighter limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol


class Costs(Protocol):
    """What a stage costs: layers first..end on the device with that index."""

    def blocks(self, device: int, first: int, end: int, embed: bool, head: bool) -> int:
        """Blocks that fit beside the weights; negative when the weights alone do not fit."""
        ...

    def nanoseconds(self, device: int, first: int, end: int, head: bool) -> int:
        """Time of one step of one microbatch."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """Layers first <= i < end on a device; the first share has the embedding, the last one the head."""

    device: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a split must keep.

    Attributes:
        blocks: Every stage has room for this many.
        stage_ns: No stage's step takes longer.
        cycle_ns: No set of cores is busy longer with one microbatch, summed over the stages on it.
    """

    blocks: int
    stage_ns: int
    cycle_ns: int


def slack(cycle_ns: int) -> int:
    """A difference in cycle time that does not count: below what any prediction knows, above the rounding."""
    return cycle_ns // 1000 + 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """A split and what it reaches: `Limits` that it just keeps, and the time of one step through all stages."""

    shares: tuple[Share, ...]
    blocks: int
    stage_ns: int
    cycle_ns: int
    latency_ns: int


class Partition:
    """The search over splits of `num_layers` layers into `stages` stages.

    `computes[i]` names what computes for device i; devices with the same name take turns and must be neighbours. A
    stage has at least one layer, but the last one, which may have the head alone.
    """

    def __init__(self, num_layers: int, computes: Sequence[str], stages: int, costs: Costs) -> None:
        seen = [name for i, name in enumerate(computes) if i == 0 or computes[i - 1] != name]
        assert len(seen) == len(set(seen)), "devices that share cores must be neighbours"
        self._num_layers = num_layers
        self._computes = computes
        self._stages = stages
        self._costs = costs
        self._block_cache: dict[tuple[int, int, int, bool], int] = {}
        self._time_cache: dict[tuple[int, int, int, bool], int] = {}

    def outcome(self, shares: tuple[Share, ...]) -> Outcome:
        """What a given split reaches; `blocks` is negative when the weights do not fit."""
        cycle: dict[str, int] = {}
        times, blocks = [], []
        for share in shares:
            last = share is shares[-1]
            times.append(self._nanoseconds(share.device, share.first, share.end, last))
            blocks.append(self._blocks(share.device, share.first, share.end, last))
            name = self._computes[share.device]
            cycle[name] = cycle.get(name, 0) + times[-1]
        return Outcome(shares, min(blocks), max(times), max(cycle.values()), sum(times))

    def best(self, wanted_blocks: int, most_blocks: int) -> Outcome | None:
        """The best split, or None when the weights do not fit.

        In this order: the pool up to `wanted_blocks`, the cycle (up to `slack`), the pool up to `most_blocks`, the
        slowest stage.
        """
        unlimited = 2**62
        limits = Limits(0, unlimited, unlimited)
        if self.feasible(limits) is None:
            return None
        limits = self._grow_blocks(limits, wanted_blocks)
        limits = self._shrink(limits, "cycle_ns", self._feasible_outcome(limits).cycle_ns)
        limits = replace(limits, cycle_ns=limits.cycle_ns + slack(limits.cycle_ns))
        limits = self._grow_blocks(limits, most_blocks)
        limits = self._shrink(limits, "stage_ns", self._feasible_outcome(limits).stage_ns)
        return self._feasible_outcome(limits)

    def feasible(self, limits: Limits) -> tuple[Share, ...] | None:
        """A split that keeps the limits, or None.

        State: (stages made, layers given) after looking at a prefix of the devices; its value is the least time that
        the current cores are busy, which is all that the later choices depend on.
        """
        total = self._num_layers
        states: dict[tuple[int, int], tuple[int, tuple[Share, ...]]] = {(0, 0): (0, ())}
        for device in range(len(self._computes)):
            if device and self._computes[device] != self._computes[device - 1]:
                states = {key: (0, shares) for key, (_, shares) in states.items()}
            after = dict(states)
            for (made, given), (busy, shares) in states.items():
                last = made == self._stages - 1
                for end in [total] if last else range(given + 1, total + 1):
                    if self._blocks(device, given, end, last) < limits.blocks:
                        break
                    time = self._nanoseconds(device, given, end, last)
                    if time > limits.stage_ns or busy + time > limits.cycle_ns:
                        break
                    share = Share(device, given, end)
                    if last:
                        return (*shares, share)
                    known = after.get((made + 1, end))
                    if known is None or busy + time < known[0]:
                        after[made + 1, end] = (busy + time, (*shares, share))
            states = after
        return None

    def _feasible_outcome(self, limits: Limits) -> Outcome:
        shares = self.feasible(limits)
        assert shares is not None
        return self.outcome(shares)

    def _grow_blocks(self, limits: Limits, most: int) -> Limits:
        low, high = limits.blocks, max(limits.blocks, most)
        while low < high:
            middle = (low + high + 1) // 2
            if self.feasible(replace(limits, blocks=middle)) is None:
                high = middle - 1
            else:
                low = middle
        return replace(limits, blocks=low)

    def _shrink(self, limits: Limits, field: Literal["stage_ns", "cycle_ns"], known_good: int) -> Limits:
        low, high = 0, known_good
        while low < high:
            middle = (low + high) // 2
            if self.feasible(_with(limits, field, middle)) is None:
                low = middle + 1
            else:
                high = middle
        return _with(limits, field, low)

    def _blocks(self, device: int, first: int, end: int, last: bool) -> int:
        key = (device, first, end, last)
        if key not in self._block_cache:
            self._block_cache[key] = self._costs.blocks(device, first, end, first == 0, last)
        return self._block_cache[key]

    def _nanoseconds(self, device: int, first: int, end: int, last: bool) -> int:
        key = (device, first, end, last)
        if key not in self._time_cache:
            self._time_cache[key] = self._costs.nanoseconds(device, first, end, last)
        return self._time_cache[key]


def _with(limits: Limits, field: Literal["stage_ns", "cycle_ns"], value: int) -> Limits:
    if field == "stage_ns":
        return replace(limits, stage_ns=value)
    return replace(limits, cycle_ns=value)
