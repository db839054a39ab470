"""Quantizes float matrices group by group: scale and minimum that make the squared error small, by search.

A group of x[i] becomes integers q[i] of 0 to L (15 or 255) with x[i] ~ scale * q[i] + minimum, both of float16. The
search for 4 bits:

1. Lay the L + 1 points over the group's range, cut at either end by each of some shares (cutting off outliers makes all
   other steps smaller): that gives integers, and for these the best scale and minimum follow in closed form (a line
   through the points (q[i], x[i]), least squares). The range with the smallest error left is taken.
2. From there, some times: round scale and minimum to float16, take each x[i]'s nearest integer, note the true error,
   fit the line anew. The best of these is the result.

8 bits skip the cuts: a step is 1/255 of the range, and there is nothing to gain.

Sixteen groups lie in the lanes of a vector, so that every sum runs over a group's elements in ascending order: the bits
are a function of the group alone, on any machine and however rows are shared out.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from shardline.kernels.cpu import simd
from shardline.kernels.cpu.intrinsics import IEEE_MODE, float_mode, float_to_half, half_to_float, set_float_mode
from shardline.kernels.cpu.jit import check_processor, jit, target_features, with_cache
from shardline.kernels.cpu.simd import LANES

_ZERO, _ONE = np.float32(0), np.float32(1)
# Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
_SHIFTER = np.float32(12582912.0)
# Shares of the range that are cut off at an end; a negative one leaves room. Twice as many gain half a percent.
_CUTS = np.array([-0.02, 0.005, 0.03, 0.055, 0.08], np.float32)
_REFITS = 3
_SMALLEST_HALF = np.float32(2.0**-24)
# 32768: half of float16's range, so that no minimum that the search finds can leave it.
_LARGEST_BITS = 0x47000000

# Rows of the per-lane scratch.
_LOW, _RANGE, _INVERSE, _OFFSET, _SUM, _SUM_Q, _SUM_QQ, _SUM_QX = range(8)
_SCALE, _MINIMUM, _ERROR, _BEST_SCALE, _BEST_MINIMUM, _BEST_ERROR = range(8, 14)
_SCRATCH = 14


@jit
def _nearest(x, inverse, offset, top):
    """The integer of 0 to `top` nearest to x * inverse + offset, as float32 lanes."""
    shifter = simd.broadcast(_SHIFTER)
    q = simd.sub(simd.add(simd.fma(x, inverse, offset), shifter), shifter)
    return simd.smaller(simd.larger(q, simd.broadcast(_ZERO)), top)


@jit
def _gather(values, first, last, size, tile, scratch):
    """Lay up to LANES groups into the lanes, each less its smallest element; a missing group repeats the last one."""
    for lane in range(LANES):
        start = min(first + lane, last) * size
        for i in range(size):
            tile[i * LANES + lane] = values[start + i]
    low = simd.load(tile, 0)
    high = low
    for i in range(1, size):
        x = simd.load(tile, i * LANES)
        low = simd.smaller(x, low)
        high = simd.larger(x, high)
    total = simd.broadcast(_ZERO)
    for i in range(size):
        x = simd.sub(simd.load(tile, i * LANES), low)
        simd.store(tile, i * LANES, x)
        total = simd.add(total, x)
    simd.store(scratch, _LOW * LANES, low)
    simd.store(scratch, _RANGE * LANES, simd.sub(high, low))
    simd.store(scratch, _SUM * LANES, total)


@jit
def _sums(tile, size, scratch, top):
    """Quantize with the scratch's inverse and offset, and sum q, q^2 and q x over each group."""
    inverse = simd.load(scratch, _INVERSE * LANES)
    offset = simd.load(scratch, _OFFSET * LANES)
    top = simd.broadcast(top)
    sum_q = simd.broadcast(_ZERO)
    sum_qq = simd.broadcast(_ZERO)
    sum_qx = simd.broadcast(_ZERO)
    for i in range(size):
        x = simd.load(tile, i * LANES)
        q = _nearest(x, inverse, offset, top)
        sum_q = simd.add(sum_q, q)
        sum_qq = simd.fma(q, q, sum_qq)
        sum_qx = simd.fma(q, x, sum_qx)
    simd.store(scratch, _SUM_Q * LANES, sum_q)
    simd.store(scratch, _SUM_QQ * LANES, sum_qq)
    simd.store(scratch, _SUM_QX * LANES, sum_qx)


@jit
def _fit(size, scratch):
    """The line of least squares through (q, x): scale, minimum (less the group's low) and what it explains of sum x^2.

    The sums of q and q^2 are integers below 2^24, so float32 holds them; a group whose q are all one has a level line.
    """
    count = np.float32(size)
    for lane in range(LANES):
        sum_x = scratch[_SUM * LANES + lane]
        sum_q = scratch[_SUM_Q * LANES + lane]
        sum_qq = scratch[_SUM_QQ * LANES + lane]
        sum_qx = scratch[_SUM_QX * LANES + lane]
        mean_q = sum_q / count
        mean_x = sum_x / count
        spread = sum_qq - sum_q * mean_q
        slope = sum_qx - sum_q * mean_x
        scale = slope / spread if spread > _ZERO else _ZERO
        scratch[_SCALE * LANES + lane] = scale
        scratch[_MINIMUM * LANES + lane] = mean_x - scale * mean_q
        scratch[_ERROR * LANES + lane] = -(scale * slope)


@jit
def _keep_best(scratch):
    for lane in range(LANES):
        better = scratch[_ERROR * LANES + lane] < scratch[_BEST_ERROR * LANES + lane]
        for row in range(3):
            if better:
                scratch[(_BEST_SCALE + row) * LANES + lane] = scratch[(_SCALE + row) * LANES + lane]


@jit
def _forget_best(scratch):
    for lane in range(LANES):
        scratch[_BEST_ERROR * LANES + lane] = np.float32(np.inf)


@jit
def _search(tile, size, scratch, top, cuts):
    """Step 1: the best scale and minimum over all cuts."""
    _forget_best(scratch)
    for a in range(cuts.size):
        for b in range(cuts.size):
            kept = _ONE - cuts[a] - cuts[b]
            for lane in range(LANES):
                width = kept * scratch[_RANGE * LANES + lane]
                inverse = top / width if width > _ZERO else _ZERO
                # A range of subnormal numbers has an inverse that is none.
                inverse = inverse if inverse < np.float32(np.inf) else _ZERO
                scratch[_INVERSE * LANES + lane] = inverse
                scratch[_OFFSET * LANES + lane] = -(cuts[a] * scratch[_RANGE * LANES + lane]) * inverse
            _sums(tile, size, scratch, top)
            _fit(size, scratch)
            _keep_best(scratch)
    for lane in range(LANES):
        scratch[_SCALE * LANES + lane] = scratch[_BEST_SCALE * LANES + lane]
        scratch[_MINIMUM * LANES + lane] = scratch[_BEST_MINIMUM * LANES + lane]


@jit
def _round_to_halves(scratch):
    """Round scale and minimum to float16, and set what quantizes with them."""
    for lane in range(LANES):
        low = scratch[_LOW * LANES + lane]
        exact = scratch[_SCALE * LANES + lane]
        scale = half_to_float(float_to_half(exact))
        # Tiny weights: the smallest step that there is, rather than none.
        if exact > _ZERO and scale == _ZERO:
            scale = _SMALLEST_HALF
        minimum = half_to_float(float_to_half(scratch[_MINIMUM * LANES + lane] + low))
        inverse = _ONE / scale if scale > _ZERO else _ZERO
        scratch[_SCALE * LANES + lane] = scale
        scratch[_MINIMUM * LANES + lane] = minimum
        scratch[_INVERSE * LANES + lane] = inverse
        scratch[_OFFSET * LANES + lane] = (low - minimum) * inverse


@jit
def _true_error(tile, size, scratch, top):
    low = simd.load(scratch, _LOW * LANES)
    scale = simd.load(scratch, _SCALE * LANES)
    minimum = simd.sub(simd.load(scratch, _MINIMUM * LANES), low)
    inverse = simd.load(scratch, _INVERSE * LANES)
    offset = simd.load(scratch, _OFFSET * LANES)
    top = simd.broadcast(top)
    total = simd.broadcast(_ZERO)
    for i in range(size):
        x = simd.load(tile, i * LANES)
        off = simd.sub(simd.fma(_nearest(x, inverse, offset, top), scale, minimum), x)
        total = simd.fma(off, off, total)
    simd.store(scratch, _ERROR * LANES, total)


@jit
def _refine(tile, size, scratch, top):
    """Step 2."""
    _forget_best(scratch)
    for _ in range(_REFITS):
        _round_to_halves(scratch)
        _true_error(tile, size, scratch, top)
        _keep_best(scratch)
        _sums(tile, size, scratch, top)
        _fit(size, scratch)
    _round_to_halves(scratch)
    _true_error(tile, size, scratch, top)
    _keep_best(scratch)
    for lane in range(LANES):
        scratch[_SCALE * LANES + lane] = scratch[_BEST_SCALE * LANES + lane]
        scratch[_MINIMUM * LANES + lane] = scratch[_BEST_MINIMUM * LANES + lane] - scratch[_LOW * LANES + lane]
    _round_to_halves(scratch)


@jit
def _write(tile, first, count, size, scratch, top, q, scales, minimums):
    """Quantize the lanes with the scratch's scale and minimum, and write them out."""
    inverse = simd.load(scratch, _INVERSE * LANES)
    offset = simd.load(scratch, _OFFSET * LANES)
    tops = simd.broadcast(top)
    for i in range(size):
        simd.store(tile, i * LANES, _nearest(simd.load(tile, i * LANES), inverse, offset, tops))
    for lane in range(count):
        group = first + lane
        scales[group] = float_to_half(scratch[_SCALE * LANES + lane])
        minimums[group] = float_to_half(scratch[_MINIMUM * LANES + lane])
        if top > np.float32(15):
            for i in range(size):
                q[group * size + i] = np.uint8(tile[i * LANES + lane])
        else:
            for i in range(size // 2):
                low = np.uint8(tile[2 * i * LANES + lane])
                high = np.uint8(tile[(2 * i + 1) * LANES + lane])
                q[group * (size // 2) + i] = low | (high << np.uint8(4))


def _quantize(values, size, top, cuts, q, scales, minimums):
    """All groups of a flat array; scales and minimums are float16 bits."""
    callers_mode = float_mode()
    set_float_mode(IEEE_MODE)
    tile = np.empty(size * LANES, np.float32)
    scratch = np.zeros(_SCRATCH * LANES, np.float32)
    groups = scales.size
    for first in range(0, groups, LANES):
        _gather(values, first, groups - 1, size, tile, scratch)
        _search(tile, size, scratch, top, cuts)
        _refine(tile, size, scratch, top)
        _write(tile, first, min(LANES, groups - first), size, scratch, top, q, scales, minimums)
    set_float_mode(callers_mode)


_compiled: Any = numba.njit(nogil=True, error_model="numpy")(_quantize)
with_cache(_compiled, _quantize)


def quantize_groups(
    values: NDArray[np.float32], bits: int, group_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Quantize float32 [rows, K]; `GroupedMatrix`'s q, scale and minimum. Runs without the interpreter's lock.

    Raises UnsupportedProcessorError, and ValueError: an element is not a finite number, or is so large that float16
    could not hold a minimum.
    """
    check_processor(platform.machine(), target_features())
    assert values.dtype == np.float32, values.dtype
    assert values.flags.c_contiguous
    assert bits in (4, 8), bits
    rows, k = values.shape
    assert group_size % 2 == 0, group_size
    assert k % group_size == 0, (k, group_size)
    # Of positive floats the bits are in order, infinity's and those of what is no number above them.
    if values.size and int((values.view(np.int32) & 0x7FFFFFFF).max()) > _LARGEST_BITS:
        raise ValueError("an element is not a finite number, or its size is past 32768")
    q = np.empty((rows, k * bits // 8), np.uint8)
    scale = np.empty((rows, k // group_size), np.float16)
    minimum = np.empty_like(scale)
    cuts = _CUTS if bits == 4 else np.zeros(1, np.float32)
    top = np.float32((1 << bits) - 1)
    halves = (part.reshape(-1).view(np.uint16) for part in (scale, minimum))
    _compiled(values.reshape(-1), group_size, top, cuts, q.reshape(-1), *halves)
    return q, scale, minimum
