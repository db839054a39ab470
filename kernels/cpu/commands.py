"""The command list: what was enqueued and has not run yet, and the programs that are kept for a replay."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.cpu.executor import RECORD_WORDS, Team
from shardline.kernels.cpu.jit import Operation

MAX_PROGRAMS = 128
"""Recorded programs that a backend keeps; the longest unused is forgotten."""


@dataclass(frozen=True, slots=True)
class _Program:
    records: NDArray[np.int64]
    arrays: tuple[Any, ...]
    """What the records point to."""


class CommandList:
    """Records in the order in which their ops were called, and the team that runs them."""

    def __init__(self, num_threads: int) -> None:
        self._team = Team(num_threads)
        self._records: list[tuple[int, ...]] = []
        self._arrays: list[Any] = []
        self._queue: list[_Program] = []
        self._programs: OrderedDict[Hashable, _Program] = OrderedDict()
        self._closed = False
        self.recording = False
        """Whether `replay` is issuing ops."""

    def add(self, operation: Operation, shares: int, words: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Enqueue an op of so many shares; `arrays` are what its words point to, kept until it has run."""
        assert not self._closed, "the backend is closed"
        self._records.append((operation.address, shares, *words))
        self._arrays.append(arrays)

    def replay(self, key: Hashable, issue: Callable[[], None]) -> None:
        """See `Backend.replay`."""
        assert not self.recording, "replay inside replay"
        program = self._programs.get(key)
        if program is None:
            self._seal()
            self.recording = True
            try:
                issue()
            except BaseException:
                self._records.clear()
                self._arrays.clear()
                raise
            finally:
                self.recording = False
            if not self._records:
                return
            program = self._seal()
            self._programs[key] = program
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
            return
        self._programs.move_to_end(key)
        self._seal()
        self._queue.append(program)

    def run(self) -> None:
        """Run everything enqueued and wait for its end."""
        assert not self.recording, "a wait inside replay"
        assert not self._closed, "the backend is closed"
        self._seal()
        queue, self._queue = self._queue, []
        for program in queue:
            self._team.run(program.records)

    def close(self) -> None:
        """End the threads and forget everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._team.close()
        self._records.clear()
        self._arrays.clear()
        self._queue.clear()
        self._programs.clear()

    def _seal(self) -> _Program:
        """Turn the open records into a program at the end of the queue."""
        records = np.zeros((len(self._records), RECORD_WORDS), np.int64)
        for index, words in enumerate(self._records):
            records[index, : len(words)] = words
        program = _Program(records, tuple(self._arrays))
        self._records.clear()
        self._arrays.clear()
        if len(records):
            self._queue.append(program)
        return program


def address(array: NDArray[Any] | None) -> int:
    """Where an array lies, as a record has it: 0 for None."""
    return 0 if array is None else array.ctypes.data


def row_address(array: NDArray[Any], index: int) -> int:
    """Where a row of an array lies."""
    return array.ctypes.data + index * array.strides[0]


def float_bits(value: float) -> int:
    """A float as a record has it; `float64_of_bits` reads it."""
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return bits
