"""Runs programs: lists of fixed-size records that a team of threads executes together, op after op."""

from __future__ import annotations

import numpy as np
from numba import carray
from numpy.typing import NDArray

from shardline.kernels.cpu.intrinsics import call_operation, pointer
from shardline.kernels.cpu.jit import operation

RECORD_WORDS = 24
"""int64 words of a record: an `Operation`'s address, then its arguments."""


@operation
def run_program(thread: int, num_threads: int, program: int) -> None:
    """Words: the records' address, their number."""
    words = carray(pointer(program), (2,), np.int64)
    for index in range(words[1]):
        record = words[0] + 8 * RECORD_WORDS * index
        call_operation(carray(pointer(record), (1,), np.int64)[0], thread, num_threads, record + 8)


class Team:
    def __init__(self, num_threads: int) -> None:
        import ctypes

        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(run_program.address)

    def run(self, records: NDArray[np.int64]) -> None:
        words = np.array([records.ctypes.data, len(records)], np.int64)
        self._call(0, 1, words.ctypes.data)

    def close(self) -> None:
        pass
