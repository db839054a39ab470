"""Paged attention, prefill and decode with the same bits.

A (row, query head) pair takes its positions in splits of 256 absolute positions. In a split: scores, each one chain of
fmas over ascending channels; their maximum; the sum of the exponentials in 16 lanes by absolute position, folded in a
fixed order; the output, one chain of fmas over ascending positions. Splits merge in ascending order. Nothing in this
depends on what shares the loads: pairs of one KV head, rows of one sequence that follow each other, a tile of 64
positions. A position past a pair's own is loaded with its neighbours at most into a score that nobody reads.

A sliding window only moves where a pair begins: splits stay where they are, and lanes that have no position of its own
add zero. So a window that holds all positions changes no bit, and positions before it cost nothing. A sink is merged
like one more split, of a score and no values.

Of an int8 pool scores and values are summed over the integers as they are; the scale of a position's key multiplies its
score before the softmax, and that of its value its exponential after the softmax's sum. So a scale that is NaN reaches
the pairs that attend to its position, and no other.

Threads share out (rows, query head) by their cost. See `rope` for the arrangement of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from shardline.kernels.cpu import simd
from shardline.kernels.cpu.intrinsics import exp_f32, fma
from shardline.kernels.cpu.jit import jit
from shardline.kernels.cpu.rope import OCTET
from shardline.kernels.cpu.simd import LANES
from shardline.kernels.cpu.soft_cap import soft_cap_x16

SPLIT = 256
"""Absolute positions whose softmax is computed on its own; part of the bit contract."""

TILE = 64
"""Positions that one call of a score kernel computes."""

MAX_PAIRS = 16
"""Pairs that share loads."""

WIDE = 4
"""Vectors of value channels that one call of a value kernel computes."""

_OCTETS = SPLIT // OCTET
_LOWEST = np.float32(np.finfo(np.float32).min)
_NOTHING = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


# What a thread's scratch holds: integers, then float32.
_BEGINS = 0
_ENDS = MAX_PAIRS
_KEY_OCTETS = 2 * MAX_PAIRS
_VALUE_OCTETS = _KEY_OCTETS + _OCTETS
_SCALE_OCTETS = _VALUE_OCTETS + _OCTETS
_INTEGERS = _SCALE_OCTETS + _OCTETS
_MAXIMA = 0
_SUMS = MAX_PAIRS
_PART_MAXIMA = 2 * MAX_PAIRS
_PART_SUMS = 3 * MAX_PAIRS
_SCORES = 4 * MAX_PAIRS
_QUERIES = _SCORES + MAX_PAIRS * SPLIT


def attention_scratch_bytes(head_dim: int) -> int:
    """Bytes that `paged_attention` needs of scratch a thread."""
    padded = -(-head_dim // LANES) * LANES
    return 8 * _INTEGERS + 4 * (_QUERIES + MAX_PAIRS * (head_dim + 2 * padded))


def _score_kernel(pairs: int) -> Callable[..., Any]:
    """Scores of `pairs` pairs from `pair` on with one tile of positions."""
    count = pairs * (TILE // LANES)

    @jit
    def kernel(work, octets, keys, dim, pair, pairs_all, tile):
        first = _KEY_OCTETS + tile // OCTET
        a = octets[first]
        b = octets[first + 1]
        c = octets[first + 2]
        d = octets[first + 3]
        e = octets[first + 4]
        f = octets[first + 5]
        g = octets[first + 6]
        h = octets[first + 7]
        sums = simd.zeros(count)
        for channel in range(dim):
            at = channel * OCTET
            row = (
                simd.load_halves(keys, a + at, b + at),
                simd.load_halves(keys, c + at, d + at),
                simd.load_halves(keys, e + at, f + at),
                simd.load_halves(keys, g + at, h + at),
            )
            column = simd.scalars(work, _QUERIES + channel * pairs_all + pair, 1, pairs)
            sums = simd.outer_fma(sums, column, row)
        simd.store_rows(work, _SCORES + pair * SPLIT + tile, SPLIT, sums, 4)

    return kernel


def _value_kernel(pairs: int, columns: int) -> Callable[..., Any]:
    """Adds the weighted values of positions begin..end - 1 of a split to `pairs` outputs, `columns` vectors of each."""

    @jit
    def kernel(work, octets, values, stride, pair, channel, begin, end, out):
        weights = _SCORES + pair * SPLIT
        sums = simd.load_rows(work, out, stride, pairs, columns)
        for j in range(begin, end):
            at = octets[_VALUE_OCTETS + j // OCTET] + (j % OCTET) * stride + channel
            column = simd.scalars(work, weights + j, SPLIT, pairs)
            sums = simd.outer_fma(sums, column, simd.vectors(values, at, columns))
        simd.store_rows(work, out, stride, sums, columns)

    return kernel


_scores_1, _scores_2, _scores_3, _scores_4 = (_score_kernel(pairs) for pairs in (1, 2, 3, 4))
_wide_1, _wide_2, _wide_3, _wide_4 = (_value_kernel(pairs, WIDE) for pairs in (1, 2, 3, 4))
_narrow_1, _narrow_2, _narrow_3, _narrow_4 = (_value_kernel(pairs, 1) for pairs in (1, 2, 3, 4))


@jit
def _scores(work, octets, keys, dim, first, group, pairs, tile):
    """Scores of `group` pairs from `first` on of all `pairs`."""
    if group == 4:
        _scores_4(work, octets, keys, dim, first, pairs, tile)
    elif group == 3:
        _scores_3(work, octets, keys, dim, first, pairs, tile)
    elif group == 2:
        _scores_2(work, octets, keys, dim, first, pairs, tile)
    else:
        _scores_1(work, octets, keys, dim, first, pairs, tile)


@jit
def _values(work, octets, values, stride, first, group, begin, end, out):
    """Adds the values of positions begin..end - 1 to the outputs at `out` of `group` pairs from `first` on."""
    channel = 0
    while channel < stride:
        if channel + WIDE * LANES <= stride:
            if group == 4:
                _wide_4(work, octets, values, stride, first, channel, begin, end, out + channel)
            elif group == 3:
                _wide_3(work, octets, values, stride, first, channel, begin, end, out + channel)
            elif group == 2:
                _wide_2(work, octets, values, stride, first, channel, begin, end, out + channel)
            else:
                _wide_1(work, octets, values, stride, first, channel, begin, end, out + channel)
            channel += WIDE * LANES
        else:
            if group == 4:
                _narrow_4(work, octets, values, stride, first, channel, begin, end, out + channel)
            elif group == 3:
                _narrow_3(work, octets, values, stride, first, channel, begin, end, out + channel)
            elif group == 2:
                _narrow_2(work, octets, values, stride, first, channel, begin, end, out + channel)
            else:
                _narrow_1(work, octets, values, stride, first, channel, begin, end, out + channel)
            channel += LANES


@jit
def _softmax(work, offset, begin, end, softcap):
    """exp(score - maximum) of the scores begin..end - 1 of a split in place; their maximum and sum.

    The maximum starts from the lowest finite number, so that scores of minus infinity weigh nothing.
    """
    first = begin // LANES * LANES
    if softcap > _ZERO:
        caps = simd.broadcast(softcap)
        for j in range(first, end, LANES):
            simd.store(work, offset + j, soft_cap_x16(simd.load(work, offset + j), caps))
    for j in range(first, begin):
        work[offset + j] = _NOTHING
    highest = simd.broadcast(_LOWEST)
    for j in range(first, end, LANES):
        highest = simd.larger(simd.first_lanes(simd.load(work, offset + j), end - j, _LOWEST), highest)
    maximum = simd.fold_larger(highest)
    shift = simd.broadcast(maximum)
    total = simd.broadcast(_ZERO)
    for j in range(first, end, LANES):
        weights = simd.first_lanes(simd.exp(simd.sub(simd.load(work, offset + j), shift)), end - j, _ZERO)
        simd.store(work, offset + j, weights)
        total = simd.add(total, weights)
    return maximum, simd.fold_add(total)


def _scale(work, octets, scales, pair, begin, end, cache):
    raise NotImplementedError  # a name for numba, which compiles the overload below in its place


@overload(_scale)
def _scale_overload(work, octets, scales, pair, begin, end, cache):
    """Multiply scores or weights begin..end - 1 of a split by their positions' scales, if the cache has any.

    Whole vectors are: what that does to their other lanes is nothing that is read.
    """
    if cache.dtype != types.int8:
        return lambda work, octets, scales, pair, begin, end, cache: None

    def scale(work, octets, scales, pair, begin, end, cache):
        offset = _SCORES + pair * SPLIT
        for j in range(begin // LANES * LANES, end, LANES):
            octet = _SCALE_OCTETS + j // OCTET
            factors = simd.load_halves(scales, octets[octet], octets[octet + 1])
            simd.store(work, offset + j, simd.mul(simd.load(work, offset + j), factors))

    return scale


@jit
def _attend(
    qkv,
    positions,
    tables,
    table,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    scale,
    window,
    softcap,
    sinks,
    out,
    octets,
    work,
    first_row,
    end_row,
    first_head,
    end_head,
):
    """Rows first_row..end_row - 1 of one sequence with query heads first_head..end_head - 1 of one KV head.

    tables: all block tables in one dimension; `table` is where the sequence's starts. octets, work: scratch.
    """
    kv_heads = k_cache.shape[1]
    dim = k_cache.shape[3]
    block_size = v_cache.shape[2]
    stride = v_cache.shape[3]
    octets_a_block = block_size // OCTET
    keys = k_cache.reshape(k_cache.size)
    values = v_cache.reshape(v_cache.size)
    key_scales = k_scales.reshape(k_scales.size)
    value_scales = v_scales.reshape(v_scales.size)
    kv_head = first_head // ((qkv.shape[1] // dim - 2 * kv_heads) // kv_heads)
    heads = end_head - first_head
    pairs = (end_row - first_row) * heads
    total = _QUERIES + MAX_PAIRS * dim
    part = total + MAX_PAIRS * stride

    for row in range(first_row, end_row):
        for head in range(first_head, end_head):
            pair = (row - first_row) * heads + head - first_head
            octets[_ENDS + pair] = np.int64(positions[row]) + 1
            octets[_BEGINS + pair] = max(octets[_ENDS + pair] - window, 0)
            for d in range(dim):
                work[_QUERIES + d * pairs + pair] = qkv[row, head * dim + d] * scale

    # Both ascend with the pair.
    begin = octets[_BEGINS]
    end = octets[_ENDS + pairs - 1]
    for split in range(begin // SPLIT * SPLIT, end, SPLIT):
        start = max(begin - split, 0)
        length = min(end - split, SPLIT)
        # A tile that reaches out of what the pairs see loads the nearest octet that they do see again.
        last = (length - 1) // OCTET
        first_tile = start // TILE
        end_tile = (length + TILE - 1) // TILE
        for octet in range(first_tile * (TILE // OCTET), end_tile * (TILE // OCTET)):
            at = split // OCTET + min(max(octet, start // OCTET), last)
            block = np.int64(tables[table + at // octets_a_block])
            inner = (block * kv_heads + kv_head) * octets_a_block + at % octets_a_block
            octets[_KEY_OCTETS + octet] = inner * dim * OCTET
            octets[_VALUE_OCTETS + octet] = inner * OCTET * stride
            octets[_SCALE_OCTETS + octet] = inner * OCTET
        for tile in range(first_tile * TILE, length, TILE):
            for first in range(0, pairs, 4):
                group = min(4, pairs - first)
                seen = octets[_BEGINS + first] < split + tile + TILE
                if seen and octets[_ENDS + first + group - 1] > split + tile:
                    _scores(work, octets, keys, dim, first, group, pairs, tile)
        for pair in range(pairs):
            low = max(octets[_BEGINS + pair] - split, 0)
            high = min(octets[_ENDS + pair] - split, SPLIT)
            if low < high:
                _scale(work, octets, key_scales, pair, low, high, keys)
                maximum, weight = _softmax(work, _SCORES + pair * SPLIT, low, high, softcap)
                work[_PART_MAXIMA + pair] = maximum
                work[_PART_SUMS + pair] = weight
                _scale(work, octets, value_scales, pair, low, high, values)
        for i in range(part, part + pairs * stride):
            work[i] = _ZERO
        for first in range(0, pairs, 4):
            # What each of a group's pairs sees before all of them do; what all see, together; the rest of each.
            group = min(4, pairs - first)
            common = max(octets[_BEGINS + first + group - 1] - split, 0)
            common_end = min(octets[_ENDS + first] - split, SPLIT)
            if common >= common_end:
                common = SPLIT
                common_end = SPLIT
            for turn in range(0 if common else group, 2 * group + 1):
                pair = first + (turn if turn < group else max(turn - group - 1, 0))
                low = max(octets[_BEGINS + pair] - split, 0)
                high = min(octets[_ENDS + pair] - split, SPLIT)
                together = 1
                if turn < group:
                    high = min(high, common)
                elif turn == group:
                    low = common
                    high = common_end
                    together = group
                else:
                    low = max(low, common_end)
                if low < high:
                    _values(work, octets, values, stride, pair, together, low, high, part + pair * stride)
        for pair in range(pairs):
            if octets[_ENDS + pair] <= split or octets[_BEGINS + pair] >= split + SPLIT:
                continue
            start = pair * stride
            if octets[_BEGINS + pair] >= split:
                work[_MAXIMA + pair] = work[_PART_MAXIMA + pair]
                work[_SUMS + pair] = work[_PART_SUMS + pair]
                for d in range(dim):
                    work[total + start + d] = work[part + start + d]
                continue
            maximum = max(work[_MAXIMA + pair], work[_PART_MAXIMA + pair])
            before = exp_f32(work[_MAXIMA + pair] - maximum)
            now = exp_f32(work[_PART_MAXIMA + pair] - maximum)
            work[_MAXIMA + pair] = maximum
            work[_SUMS + pair] = fma(work[_PART_SUMS + pair], now, work[_SUMS + pair] * before)
            for d in range(dim):
                work[total + start + d] = fma(work[part + start + d], now, work[total + start + d] * before)

    for row in range(first_row, end_row):
        for head in range(first_head, end_head):
            pair = (row - first_row) * heads + head - first_head
            share = _ONE / work[_SUMS + pair]
            if sinks.size:
                maximum = max(work[_MAXIMA + pair], sinks[head])
                before = exp_f32(work[_MAXIMA + pair] - maximum)
                share = before / (work[_SUMS + pair] * before + exp_f32(sinks[head] - maximum))
            for d in range(dim):
                out[row, head * dim + d] = work[total + pair * stride + d] * share


@jit
def paged_attention(
    thread,
    num_threads,
    qkv,
    positions,
    sequences,
    block_tables,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    scale,
    window,
    softcap,
    sinks,
    out,
    scratch,
    rows,
):
    """Causal attention of each row's query heads over the last `window` positions up to its own of its sequence.

    qkv float32 [>= rows, (Hq + 2 Hkv) * D]; positions, sequences int32; block_tables int32 [sequences, blocks];
    k_cache, v_cache one layer's, and k_scales, v_scales int8's scales; window int64, 0: all; softcap, 0: none; sinks
    float32 [Hq], or empty: none; out float32 [>= rows, Hq * D]; scratch uint8 [>= num_threads,
    `attention_scratch_bytes`], 8-byte aligned.
    """
    kv_heads = k_cache.shape[1]
    heads = qkv.shape[1] // k_cache.shape[3] - 2 * kv_heads
    group = heads // kv_heads
    rows_at_once = max(1, MAX_PAIRS // group)
    own = scratch[thread]
    octets = own[: 8 * _INTEGERS].view(np.int64)
    work = own[8 * _INTEGERS : own.size // 4 * 4].view(np.float32)
    tables = block_tables.reshape(block_tables.size)
    window = window if window else np.int64(1 << 62)
    cost = 0
    for row in range(rows):
        cost += min(np.int64(positions[row]) + 1, window)
    low = cost * heads * thread // num_threads
    high = cost * heads * (thread + 1) // num_threads
    done = 0
    # Not a plain 0, for which numba would compile another `_attend`.
    row = np.int64(0)
    while row < rows and done < high:
        end_row = row
        cost = 0
        while end_row < rows and end_row - row < rows_at_once and sequences[end_row] == sequences[row]:
            cost += min(np.int64(positions[end_row]) + 1, window)
            end_row += 1
        # Head h of these rows starts at done + h * cost, and belongs to the thread in whose range that lies.
        head = min(max(-(-(low - done) // cost), 0), heads)
        end_head = min(max(-(-(high - done) // cost), 0), heads)
        while head < end_head:
            stop = min(min((head // group + 1) * group, end_head), head + MAX_PAIRS)
            table = np.int64(sequences[row]) * block_tables.shape[1]
            _attend(
                qkv,
                positions,
                tables,
                table,
                k_cache,
                v_cache,
                k_scales,
                v_scales,
                np.float32(scale),
                window,
                np.float32(softcap),
                sinks,
                out,
                octets,
                work,
                row,
                end_row,
                head,
                stop,
            )
            head = stop
        done += cost * heads
        row = end_row
