"""What `verify` varies: the ways to run a batch that must not change a byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run a batch.

    Attributes:
        split: Layers of each stage.
        block_size: Tokens a block.
        prefill_chunk: The most prompt tokens of a sequence in a step; None for whole prompts.
        batch: Sequences at once.
        warm: Prompts' prefixes are in the cache. The plans are also made one step ahead then.
        preempted: The pool is so small that sequences are preempted and recomputed.
        seeded: Sampled with penalties (not where plans are made ahead) and filters; otherwise greedy.
    """

    split: tuple[int, ...]
    block_size: int
    prefill_chunk: int | None
    batch: int
    warm: bool
    preempted: bool
    seeded: bool

    @property
    def ahead(self) -> bool:
        """Whether a sequence's next token is planned while the one before is being sampled: see `SchedulerConfig`."""
        return self.warm


@dataclass(frozen=True, slots=True)
class Factors:
    """The values of each of a case's attributes."""

    split: tuple[tuple[int, ...], ...]
    block_size: tuple[int, ...] = (8, 16, 64)
    prefill_chunk: tuple[int | None, ...] = (7, 64, None)
    batch: tuple[int, ...] = (1, 2, 5, 17, 33, 64)
    warm: tuple[bool, ...] = (False, True)
    preempted: tuple[bool, ...] = (False, True)
    seeded: tuple[bool, ...] = (False, True)

    def product(self) -> list[Case]:
        """Every combination."""
        return _ordered(Case(*values) for values in itertools.product(*self._values()))

    def covering(self) -> list[Case]:
        """Combinations in which every two values of two attributes meet at least once."""
        return _ordered(Case(*(v[i] for v, i in zip(self._values(), row, strict=True))) for row in self._rows())

    def _values(self) -> list[tuple[Any, ...]]:
        return [getattr(self, field.name) for field in fields(Case)]

    def _rows(self) -> list[tuple[int, ...]]:
        sizes = [len(values) for values in self._values()]
        pairs = list(itertools.combinations(range(len(sizes)), 2))
        missing = {(a, i, b, j) for a, b in pairs for i in range(sizes[a]) for j in range(sizes[b])}
        draw = random.Random(0)
        rows = []
        while missing:
            # Start from a pair that is missing, then take the best of some random ways to fill the rest.
            a, i, b, j = min(missing)
            best: tuple[int, ...] = ()
            most = 0
            for _ in range(50):
                row = [draw.randrange(size) for size in sizes]
                row[a], row[b] = i, j
                met = sum((p, row[p], q, row[q]) in missing for p, q in pairs)
                if met > most:
                    best, most = tuple(row), met
            rows.append(best)
            missing -= {(p, best[p], q, best[q]) for p, q in pairs}
        return rows


def _ordered(cases: Iterable[Case]) -> list[Case]:
    """Cases of one split and block size side by side: they share a loaded pipeline."""
    return sorted(cases, key=lambda case: (len(case.split), case.split, case.block_size))


def default_splits(num_layers: int) -> tuple[tuple[int, ...], ...]:
    """One, two and three even stages, and two uneven splits, as far as the layers suffice."""

    def even(count: int) -> tuple[int, ...]:
        return tuple(num_layers * (i + 1) // count - num_layers * i // count for i in range(count))

    third = max(1, num_layers // 3)
    uneven = [(1, num_layers - 1), (third - 1, num_layers - 2 * third + 2, third - 1)]
    splits = [even(1), even(2), even(3), *uneven]
    return tuple(dict.fromkeys(split for split in splits if all(layers > 0 for layers in split)))
