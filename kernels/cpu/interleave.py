"""Rows of integers to the lanes of vectors: the transposition with which a matrix becomes resident (see `resident`).

Bytes are moved eight at a time: 8 x 8 bytes, one row in each of eight words, are transposed by exchanging halves of
pairs of words, then quarters, then eighths (Warren, Hacker's Delight, 7-3).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from shardline.kernels.cpu.jit import jit, with_cache

_LANES = 64
_WORDS = 8
"""Of a row that are turned at a time: a cache line, so that rows whose length is a power of two do not drive each other
out of the cache."""

_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
_HIGH = np.uint64(0xF0F0F0F0F0F0F0F0)
_FOUR = np.uint64(4)
_HALVES, _QUARTERS, _EIGHTHS = (
    np.uint64(mask) for mask in (0x00000000FFFFFFFF, 0x0000FFFF0000FFFF, 0x00FF00FF00FF00FF)
)


@jit
def _exchange(first, second, bits, mask):
    """The upper parts of one word for the lower ones of another."""
    moved = ((first >> bits) ^ second) & mask
    return first ^ (moved << bits), second ^ moved


@jit
def _transposed(a, b, c, d, e, f, g, h):
    """8 x 8 bytes: byte j of word i becomes byte i of word j."""
    bits = np.uint64(32)
    a, e = _exchange(a, e, bits, _HALVES)
    b, f = _exchange(b, f, bits, _HALVES)
    c, g = _exchange(c, g, bits, _HALVES)
    d, h = _exchange(d, h, bits, _HALVES)
    bits = np.uint64(16)
    a, c = _exchange(a, c, bits, _QUARTERS)
    b, d = _exchange(b, d, bits, _QUARTERS)
    e, g = _exchange(e, g, bits, _QUARTERS)
    f, h = _exchange(f, h, bits, _QUARTERS)
    bits = np.uint64(8)
    a, b = _exchange(a, b, bits, _EIGHTHS)
    c, d = _exchange(c, d, bits, _EIGHTHS)
    e, f = _exchange(e, f, bits, _EIGHTHS)
    g, h = _exchange(g, h, bits, _EIGHTHS)
    return a, b, c, d, e, f, g, h


@jit
def _turn(tile, lanes, width, out, first, step):
    """The tile's columns, of which byte j is row j's, to rows first, first + step, ... of out."""
    for word in range(width):
        row = first + 8 * word * step
        for top in range(lanes // 8):
            lane = 8 * top
            a, b, c, d, e, f, g, h = _transposed(
                tile[lane, word],
                tile[lane + 1, word],
                tile[lane + 2, word],
                tile[lane + 3, word],
                tile[lane + 4, word],
                tile[lane + 5, word],
                tile[lane + 6, word],
                tile[lane + 7, word],
            )
            out[row, top] = a
            out[row + step, top] = b
            out[row + 2 * step, top] = c
            out[row + 3 * step, top] = d
            out[row + 4 * step, top] = e
            out[row + 5 * step, top] = f
            out[row + 6 * step, top] = g
            out[row + 7 * step, top] = h


def _interleave(rows, is_packed, out):
    tile = np.zeros((_LANES, _WORDS), np.uint64)
    low, high = np.zeros_like(tile[: _LANES // 2]), np.zeros_like(tile[: _LANES // 2])
    for block in range(out.shape[0]):
        for start in range(0, rows.shape[1], _WORDS):
            width = min(_WORDS, rows.shape[1] - start)
            for lane in range(_LANES):
                words = rows[block * _LANES + lane, start : start + width]
                for i in range(width):
                    tile[lane, i] = words[i]
            if is_packed:
                for lane in range(_LANES // 2):
                    for i in range(_WORDS):
                        first, second = tile[lane, i], tile[lane + _LANES // 2, i]
                        low[lane, i] = (first & _LOW) | ((second & _LOW) << _FOUR)
                        high[lane, i] = ((first & _HIGH) >> _FOUR) | (second & _HIGH)
                _turn(low, _LANES // 2, width, out[block], 16 * start, 2)
                _turn(high, _LANES // 2, width, out[block], 16 * start + 1, 2)
            else:
                _turn(tile, _LANES, width, out[block], 8 * start, 1)


_compiled: Any = numba.njit(nogil=True, error_model="numpy")(_interleave)
with_cache(_compiled, _interleave)


def interleave(rows: NDArray[np.uint8], bits: int, out: NDArray[np.uint8]) -> None:
    """Turn `GroupedMatrix.q` of whole blocks, uint8 [64 * blocks, K * bits / 8], into `Part.q` seen as
    [blocks, K, 8 * bits], C-contiguous; K is a multiple of 16. Runs without the interpreter's lock."""
    assert out.flags.c_contiguous, out.strides
    blocks, inputs, width = out.shape
    assert width == 8 * bits, (width, bits)
    assert rows.shape == (_LANES * blocks, inputs * bits // 8), (rows.shape, out.shape)
    assert inputs % 16 == 0, inputs
    # Words need not begin where words may: what was read from a file may begin anywhere.
    words = np.require(rows, requirements="C").view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    _compiled(words, bits == 4, out.view(np.uint64))
