"""What all products are made of: rows times the 64 channels of one block, in the order that `linear.py` defines.

Where vectors are narrow, the code that does it is an operation of its own, whose address stands in the words of every
matrix: it is long, and would otherwise be compiled into each op that has products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from shardline.kernels.cpu.intrinsics import call_operation, pointer
from shardline.kernels.cpu.jit import jit, operation
from shardline.kernels.cpu.microkernel import HALF, PASS_BYTES, ROW_TILE, WIDE, accumulate
from shardline.kernels.cpu.panel import MOST_ROWS, PANEL_BYTES, SUMS_BYTES, panel_totals
from shardline.kernels.cpu.resident import LANES, Matrix

ROW_CHUNK = MOST_ROWS
"""The most rows of a block's product."""

ROWS_UNPACKED_FOR = ROW_TILE if WIDE else ROW_CHUNK
"""Rows that share one unpacking of a group."""

# A matrix part as int64 words: addresses of q, scale and minimum; bits, group size, groups, first channel, channels,
# whether scales are float16, address of the columns' order (0: that of the channels), address of `_narrow_totals`
# (0: not needed).
PART_WORDS = 11
Q, SCALE, MINIMUM, BITS, GROUP_SIZE, GROUPS, FIRST, CHANNELS, HALF_SCALES, ORDER, _CODE = range(PART_WORDS)

# Byte offsets in a thread's workspace.
GATE_TOTALS = 0
UP_TOTALS = 4 * ROW_CHUNK * LANES
_PANEL = 2 * UP_TOTALS
GATE_SUMS = _PANEL + PANEL_BYTES
UP_SUMS = GATE_SUMS + SUMS_BYTES
_CALL = UP_SUMS + SUMS_BYTES
_CALL_WORDS = 16
WORKSPACE_BYTES = _CALL + 8 * _CALL_WORDS
"""Scratch of one thread."""

_NARROW = not WIDE


def describe(matrix: Matrix) -> NDArray[np.int64]:
    """int64 [parts, words]: what the compiled code knows of a matrix."""
    words = [
        (
            part.q.ctypes.data,
            part.scale.ctypes.data,
            part.minimum.ctypes.data,
            part.bits,
            part.group_size,
            matrix.inputs // part.group_size,
            part.first,
            part.channels,
            part.scale.dtype == np.float16,
            0 if part.order is None else part.order.ctypes.data,
            _narrow_totals.address if _NARROW else 0,
        )
        for part in matrix.parts
    ]
    return np.array(words, np.int64)


@jit
def block_totals(
    part: Any,
    block: int,
    x: int,
    x_stride: int,
    ids: int,
    rows: int,
    workspace: int,
    totals: int,
    sums: int,
    are_summed: bool,
) -> None:
    """Leave rows of x times the block's channels, float32 [rows, 64], in the workspace.

    ids is the address of int64 [rows], which rows of x; or 0: the first ones. totals is GATE_TOTALS or UP_TOTALS. sums
    is GATE_SUMS or UP_SUMS, where sums of x are kept from call to call; are_summed says that the last call with them
    was with the same rows of x and a part of the same group size.
    """
    # A constant: one of the two is no code.
    if _NARROW:
        call = carray(pointer(workspace + _CALL), (_CALL_WORDS,), np.int64)
        call[0], call[1], call[2], call[3], call[4], call[5] = part.ctypes.data, block, x, x_stride, ids, rows
        call[6], call[7], call[8], call[9] = workspace + totals, workspace + _PANEL, workspace + sums, are_summed
        call_operation(part[_CODE], 0, 0, 1, workspace + _CALL)
    else:
        full = rows - rows % ROW_TILE
        if full:
            _tile_totals(part, block, x, x_stride, ids, 0, full, ROW_TILE, workspace + totals)
        if full < rows:
            _tile_totals(part, block, x, x_stride, ids, full, rows, rows - full, workspace + totals)


@operation
def _narrow_totals(worker: int, share: int, num_shares: int, record: int) -> None:
    """`block_totals`. Words: part, block, x, x_stride, ids, rows, totals, scratch for a panel, sums, are_summed."""
    words = carray(pointer(record), (_CALL_WORDS,), np.int64)
    part = carray(pointer(words[0]), (PART_WORDS,), np.int64)
    block, x, x_stride, ids, rows, totals = words[1], words[2], words[3], words[4], words[5], words[6]
    if rows <= ROW_TILE:
        _tile_totals(part, block, x, x_stride, ids, 0, rows, rows, totals)
        return
    groups, group_size, bits, half_scales = part[GROUPS], part[GROUP_SIZE], part[BITS], part[HALF_SCALES]
    scales = block * groups * LANES * (4 - 2 * half_scales)
    panel_totals(
        bits,
        part[Q] + block * groups * group_size * 8 * bits,
        part[SCALE] + scales,
        part[MINIMUM] + scales,
        half_scales,
        groups,
        group_size,
        x,
        x_stride,
        ids,
        rows,
        totals,
        words[7],
        words[8],
        words[9] != 0,
    )


@jit
def _tile_totals(
    part: Any, block: int, x: int, x_stride: int, ids: int, first: int, end: int, tile: int, totals: int
) -> None:
    """`block_totals` of the rows from first to end, `tile` at a time."""
    groups, group_size, bits, half = part[GROUPS], part[GROUP_SIZE], part[BITS], part[HALF_SCALES]
    scale_bytes = 4 - 2 * half
    last = end - 1
    for channel in range(0, HALF, PASS_BYTES[tile]):
        q = part[Q] + block * groups * group_size * 8 * bits + channel
        scale = part[SCALE] + (block * groups * LANES + channel) * scale_bytes
        minimum = part[MINIMUM] + (block * groups * LANES + channel) * scale_bytes
        for row in range(first, end, tile):
            accumulate(
                bits,
                tile,
                q,
                scale,
                minimum,
                half,
                _row_of(x, x_stride, ids, row),
                _row_of(x, x_stride, ids, min(row + 1, last)),
                _row_of(x, x_stride, ids, min(row + 2, last)),
                _row_of(x, x_stride, ids, min(row + 3, last)),
                totals + 4 * (row * LANES + channel),
                groups,
                group_size,
            )


@jit
def _row_of(x: int, x_stride: int, ids: int, row: int) -> int:
    if ids:
        row = carray(pointer(ids + 8 * row), (1,), np.int64)[0]
    return x + 4 * row * x_stride


@jit
def have_equal_sums(gate: Any, up: Any, x_gate: int, x_up: int) -> bool:
    """Whether `block_totals` of a gate and an up may share their sums of x."""
    return x_gate == x_up and gate[GROUP_SIZE] == up[GROUP_SIZE]
