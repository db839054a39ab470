"""What the groups of ops of this backend share: the command list, how an op is cut into shares, what is held."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.backend import Backend
from shardline.kernels.cpu.blocks import WORKSPACE_BYTES
from shardline.kernels.cpu.commands import CommandList
from shardline.kernels.cpu.jit import Operation
from shardline.kernels.cpu.resident import aligned_empty

SHARES_A_THREAD = 2
"""Of an op with enough work: more even out threads that run at different speeds, fewer cost less to hand out."""

SHARE_WORK = 100_000
"""Multiply-adds that are worth a share of their own: some microseconds."""

SPAN_ROWS = 512
"""Rows that an op with scratch memory for each row takes at once, so that more rows do not take more memory."""


def spans(rows: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each span."""
    for first in range(0, rows, SPAN_ROWS):
        yield first, min(rows - first, SPAN_ROWS)


class CpuOps(Backend):
    """The base of `ProductOps`, `ExpertOps` and `CpuBackend`, which is made of them."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads."""
        self.num_threads = num_threads
        self._commands = CommandList(num_threads)
        self._workspace = aligned_empty((num_threads, WORKSPACE_BYTES), "uint8")
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        """Weights and pools, by their `nbytes`."""
        self._scratches: dict[str, NDArray[np.uint8]] = {}

    def _shares(self, tasks: int, work: int) -> int:
        """Into how many shares to cut an op of so many tasks, each worth `work` multiply-adds."""
        return max(1, min(tasks, self.num_threads * SHARES_A_THREAD, tasks * work // SHARE_WORK))

    def _scratch(self, name: str, nbytes: int) -> NDArray[np.uint8]:
        """Memory that one record leaves to the next ones of the same op; the same under a name until more is wanted.

        Who asks for what its largest step needs at its first one keeps no older, smaller memory alive in records.
        """
        held = self._scratches.get(name)
        if held is None or held.nbytes < nbytes:
            held = self._scratches[name] = aligned_empty((nbytes,), "uint8")
        return held

    def _enqueue(self, operation: Operation, shares: int, words: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        self._commands.add(operation, shares, words, arrays)
