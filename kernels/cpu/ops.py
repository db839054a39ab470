"""What the groups of ops of this backend share: the command list, how an op is cut into shares, what is held."""

from __future__ import annotations

import weakref
from typing import Any

from shardline.kernels.backend import Backend
from shardline.kernels.cpu.commands import CommandList
from shardline.kernels.cpu.jit import Operation
from shardline.kernels.cpu.linear import WORKSPACE_BYTES
from shardline.kernels.cpu.resident import aligned_empty

SHARES_A_THREAD = 2
"""Of an op with enough work: more even out threads that run at different speeds, fewer cost less to hand out."""

SHARE_WORK = 100_000
"""Multiply-adds that are worth a share of their own: some microseconds."""


class CpuOps(Backend):
    """The base of `ProductOps`, `ExpertOps` and `CpuBackend`, which is made of them."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads."""
        self.num_threads = num_threads
        self._commands = CommandList(num_threads)
        self._workspace = aligned_empty((num_threads, WORKSPACE_BYTES), "uint8")
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        """Weights and pools, by their `nbytes`."""

    def _shares(self, tasks: int, work: int) -> int:
        """Into how many shares to cut an op of so many tasks, each worth `work` multiply-adds."""
        return max(1, min(tasks, self.num_threads * SHARES_A_THREAD, tasks * work // SHARE_WORK))

    def _enqueue(self, operation: Operation, shares: int, words: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        self._commands.add(operation, shares, words, arrays)
