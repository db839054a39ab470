"""Paged attention, prefill and decode with the same bits.

A (row, query head) pair takes its positions in splits of 256 absolute positions. In a split: scores, each one chain of
fmas over ascending channels; their maximum; the sum of the exponentials in 16 lanes by absolute position, folded in a
fixed order; the output, one chain of fmas over ascending positions. Splits merge in ascending order. Nothing in this
depends on what shares the loads: pairs of one KV head, rows of one sequence that follow each other, a tile of 64
positions. A position past a pair's own is loaded with its neighbours at most into a score that nobody reads.

Threads share out (rows, query head) by their cost. See `rope` for the arrangement of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardline.kernels.cpu import simd
from shardline.kernels.cpu.intrinsics import exp_f32, fma
from shardline.kernels.cpu.jit import jit
from shardline.kernels.cpu.rope import OCTET
from shardline.kernels.cpu.simd import LANES

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
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def attention_scratch_bytes(head_dim: int) -> int:
    """Bytes that `paged_attention` needs of scratch a thread."""
    padded = -(-head_dim // LANES) * LANES
    return 4 * MAX_PAIRS * (head_dim + SPLIT + 2 * padded + 4) + 8 * (MAX_PAIRS + 2 * _OCTETS)


def _score_kernel(pairs: int) -> Callable[..., Any]:
    """Scores of `pairs` pairs with one tile of positions."""
    count = pairs * (TILE // LANES)

    @jit
    def kernel(q, q_offset, q_stride, keys, octets, first, dim, scores, scores_offset):
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
            tile = (
                simd.load_halves(keys, a + at, b + at),
                simd.load_halves(keys, c + at, d + at),
                simd.load_halves(keys, e + at, f + at),
                simd.load_halves(keys, g + at, h + at),
            )
            sums = simd.outer_fma(sums, simd.scalars(q, q_offset + channel * q_stride, 1, pairs), tile)
        simd.store_rows(scores, scores_offset, SPLIT, sums, 4)

    return kernel


def _value_kernel(pairs: int, columns: int) -> Callable[..., Any]:
    """Adds the weighted values of positions begin..end - 1 of a split to `pairs` outputs, `columns` vectors of each."""

    @jit
    def kernel(weights, weights_offset, values, octets, stride, channel, begin, end, out, out_offset):
        sums = simd.load_rows(out, out_offset, stride, pairs, columns)
        for j in range(begin, end):
            at = octets[j // OCTET] + (j % OCTET) * stride + channel
            column = simd.scalars(weights, weights_offset + j, SPLIT, pairs)
            sums = simd.outer_fma(sums, column, simd.vectors(values, at, columns))
        simd.store_rows(out, out_offset, stride, sums, columns)

    return kernel


_scores_1, _scores_2, _scores_3, _scores_4 = (_score_kernel(pairs) for pairs in (1, 2, 3, 4))
_wide_1, _wide_2, _wide_3, _wide_4 = (_value_kernel(pairs, WIDE) for pairs in (1, 2, 3, 4))
_narrow_1, _narrow_2, _narrow_3, _narrow_4 = (_value_kernel(pairs, 1) for pairs in (1, 2, 3, 4))


@jit
def _scores(pairs, q, q_offset, q_stride, keys, octets, first, dim, scores, scores_offset):
    if pairs == 4:
        _scores_4(q, q_offset, q_stride, keys, octets, first, dim, scores, scores_offset)
    elif pairs == 3:
        _scores_3(q, q_offset, q_stride, keys, octets, first, dim, scores, scores_offset)
    elif pairs == 2:
        _scores_2(q, q_offset, q_stride, keys, octets, first, dim, scores, scores_offset)
    else:
        _scores_1(q, q_offset, q_stride, keys, octets, first, dim, scores, scores_offset)


@jit
def _values(pairs, weights, weights_offset, values, octets, stride, begin, end, out, out_offset):
    if begin >= end:
        return
    channel = 0
    while channel + WIDE * LANES <= stride:
        at = out_offset + channel
        if pairs == 4:
            _wide_4(weights, weights_offset, values, octets, stride, channel, begin, end, out, at)
        elif pairs == 3:
            _wide_3(weights, weights_offset, values, octets, stride, channel, begin, end, out, at)
        elif pairs == 2:
            _wide_2(weights, weights_offset, values, octets, stride, channel, begin, end, out, at)
        else:
            _wide_1(weights, weights_offset, values, octets, stride, channel, begin, end, out, at)
        channel += WIDE * LANES
    while channel < stride:
        at = out_offset + channel
        if pairs == 4:
            _narrow_4(weights, weights_offset, values, octets, stride, channel, begin, end, out, at)
        elif pairs == 3:
            _narrow_3(weights, weights_offset, values, octets, stride, channel, begin, end, out, at)
        elif pairs == 2:
            _narrow_2(weights, weights_offset, values, octets, stride, channel, begin, end, out, at)
        else:
            _narrow_1(weights, weights_offset, values, octets, stride, channel, begin, end, out, at)
        channel += LANES


@jit
def _softmax(scores, offset, count):
    """simd.exp(score - maximum) of the first `count` scores in place; their maximum and sum.

    The maximum starts from the lowest finite number, so that scores of minus infinity weigh nothing.
    """
    highest = simd.broadcast(_LOWEST)
    for j in range(0, count, LANES):
        highest = simd.larger(simd.first_lanes(simd.load(scores, offset + j), count - j, _LOWEST), highest)
    maximum = simd.fold_larger(highest)
    shift = simd.broadcast(maximum)
    total = simd.broadcast(_ZERO)
    for j in range(0, count, LANES):
        weights = simd.first_lanes(simd.exp(simd.sub(simd.load(scores, offset + j), shift)), count - j, _ZERO)
        simd.store(scores, offset + j, weights)
        total = simd.add(total, weights)
    return maximum, simd.fold_add(total)


@jit
def _attend(
    qkv, positions, table, k_cache, v_cache, scale, out, scratch, first_row, end_row, first_head, end_head, kv_head
):
    """Rows first_row..end_row - 1 of one sequence with query heads first_head..end_head - 1 of one KV head."""
    dim = k_cache.shape[3]
    block_size = v_cache.shape[2]
    stride = v_cache.shape[3]
    kv_heads = k_cache.shape[1]
    octets_a_block = block_size // OCTET
    keys = k_cache.reshape(k_cache.size)
    values = v_cache.reshape(v_cache.size)
    heads = end_head - first_head
    pairs = (end_row - first_row) * heads

    begin = 0
    end = 8 * MAX_PAIRS
    counts = scratch[begin:end].view(np.int64)
    begin, end = end, end + 8 * _OCTETS
    key_octets = scratch[begin:end].view(np.int64)
    begin, end = end, end + 8 * _OCTETS
    value_octets = scratch[begin:end].view(np.int64)
    begin, end = end, end + 4 * MAX_PAIRS
    maxima = scratch[begin:end].view(np.float32)
    begin, end = end, end + 4 * MAX_PAIRS
    sums = scratch[begin:end].view(np.float32)
    begin, end = end, end + 4 * MAX_PAIRS
    part_maxima = scratch[begin:end].view(np.float32)
    begin, end = end, end + 4 * MAX_PAIRS
    part_sums = scratch[begin:end].view(np.float32)
    begin, end = end, end + 4 * MAX_PAIRS * dim
    q = scratch[begin:end].view(np.float32)
    begin, end = end, end + 4 * MAX_PAIRS * SPLIT
    scores = scratch[begin:end].view(np.float32)
    begin, end = end, end + 4 * MAX_PAIRS * stride
    total = scratch[begin:end].view(np.float32)
    begin, end = end, end + 4 * MAX_PAIRS * stride
    part = scratch[begin:end].view(np.float32)

    for row in range(first_row, end_row):
        for head in range(first_head, end_head):
            pair = (row - first_row) * heads + head - first_head
            counts[pair] = np.int64(positions[row]) + 1
            for d in range(dim):
                q[d * pairs + pair] = qkv[row, head * dim + d] * scale

    longest = counts[pairs - 1]
    for split in range(0, longest, SPLIT):
        length = min(longest - split, SPLIT)
        # A tile that reaches past the last position loads its last octet again.
        last = (length - 1) // OCTET
        for octet in range(_OCTETS):
            at = split // OCTET + min(octet, last)
            block = np.int64(table[at // octets_a_block])
            inner = (block * kv_heads + kv_head) * octets_a_block + at % octets_a_block
            key_octets[octet] = inner * dim * OCTET
            value_octets[octet] = inner * OCTET * stride
        for tile in range(0, length, TILE):
            for pair in range(0, pairs, 4):
                group = min(4, pairs - pair)
                if counts[pair + group - 1] > split + tile:
                    _scores(group, q, pair, pairs, keys, key_octets, tile // OCTET, dim, scores, pair * SPLIT + tile)
        for pair in range(pairs):
            count = min(counts[pair] - split, SPLIT)
            if count > 0:
                part_maxima[pair], part_sums[pair] = _softmax(scores, pair * SPLIT, count)
        part[: pairs * stride] = _ZERO
        for pair in range(0, pairs, 4):
            group = min(4, pairs - pair)
            common = min(max(counts[pair] - split, 0), SPLIT)
            _values(group, scores, pair * SPLIT, values, value_octets, stride, 0, common, part, pair * stride)
            for i in range(pair, pair + group):
                count = min(counts[i] - split, SPLIT)
                _values(1, scores, i * SPLIT, values, value_octets, stride, common, count, part, i * stride)
        for pair in range(pairs):
            if counts[pair] <= split:
                continue
            start = pair * stride
            if split == 0:
                maxima[pair] = part_maxima[pair]
                sums[pair] = part_sums[pair]
                for d in range(dim):
                    total[start + d] = part[start + d]
                continue
            maximum = max(maxima[pair], part_maxima[pair])
            before = exp_f32(maxima[pair] - maximum)
            now = exp_f32(part_maxima[pair] - maximum)
            maxima[pair] = maximum
            sums[pair] = fma(part_sums[pair], now, sums[pair] * before)
            for d in range(dim):
                total[start + d] = fma(part[start + d], now, total[start + d] * before)

    for row in range(first_row, end_row):
        for head in range(first_head, end_head):
            pair = (row - first_row) * heads + head - first_head
            share = _ONE / sums[pair]
            for d in range(dim):
                out[row, head * dim + d] = total[pair * stride + d] * share


@jit
def paged_attention(
    thread, num_threads, qkv, positions, sequences, block_tables, k_cache, v_cache, scale, out, scratch, rows
):
    """Causal attention of each row's query heads over positions 0..its own of its sequence.

    qkv float32 [>= rows, (Hq + 2 Hkv) * D]; positions, sequences int32; block_tables int32 [sequences, blocks];
    k_cache, v_cache one layer's; out float32 [>= rows, Hq * D]; scratch uint8
    [>= num_threads, `attention_scratch_bytes`], 8-byte aligned.
    """
    kv_heads = k_cache.shape[1]
    heads = qkv.shape[1] // k_cache.shape[3] - 2 * kv_heads
    group = heads // kv_heads
    rows_at_once = max(1, MAX_PAIRS // group)
    work = 0
    for row in range(rows):
        work += np.int64(positions[row]) + 1
    low = work * heads * thread // num_threads
    high = work * heads * (thread + 1) // num_threads
    done = 0
    row = 0
    while row < rows and done < high:
        end_row = row
        cost = 0
        while end_row < rows and end_row - row < rows_at_once and sequences[end_row] == sequences[row]:
            cost += np.int64(positions[end_row]) + 1
            end_row += 1
        # Head h of these rows starts at done + h * cost, and belongs to the thread in whose range that lies.
        head = min(max(-(-(low - done) // cost), 0), heads)
        end_head = min(max(-(-(high - done) // cost), 0), heads)
        while head < end_head:
            kv_head = head // group
            stop = min(min((kv_head + 1) * group, end_head), head + MAX_PAIRS)
            _attend(
                qkv,
                positions,
                block_tables[sequences[row]],
                k_cache,
                v_cache,
                np.float32(scale),
                out,
                scratch[thread],
                row,
                end_row,
                head,
                stop,
                kv_head,
            )
            head = stop
        done += cost * heads
        row = end_row
