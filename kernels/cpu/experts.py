"""A mixture of experts' MLPs: several records an op, so that each expert's rows are computed together.

A *pair* is a row and one of the experts that it has chosen, by rank. `group` sorts a step's pairs by expert into
*tiles*: up to 64 pairs of one expert. `gated` and `down` then compute a tile's products block by block of channels,
with the code of `blocks.py` and the order of `linear.py`; `combine` adds up each row's results by rank. Which pairs
share a tile, and which thread computes what, changes no bit.

How many tiles there are is known only when the records run. So `group` also writes what each tile costs, and a share is
a range of the cost of all tasks (a tile and a block).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from shardline.kernels.cpu import simd
from shardline.kernels.cpu.blocks import (
    CHANNELS,
    GATE_SUMS,
    GATE_TOTALS,
    ORDER,
    PART_WORDS,
    ROW_CHUNK,
    ROWS_UNPACKED_FOR,
    UP_SUMS,
    UP_TOTALS,
    WORKSPACE_BYTES,
    block_totals,
    have_equal_sums,
)
from shardline.kernels.cpu.intrinsics import pointer
from shardline.kernels.cpu.jit import jit, operation
from shardline.kernels.cpu.linear import join, order_row, range_of
from shardline.kernels.cpu.resident import LANES

GATE, UP, DOWN = range(3)
"""An expert's parts, in a table int64 [experts, 3, words]."""

_NAN = np.float32(np.nan)
_ZERO = np.float32(0.0)

# A plan, as int64 words: the number of tiles and their cost; the pairs by expert, and their rows; the tiles; where each
# expert's pairs begin. A tile: its expert, its first pair's place, how many pairs, the cost of the tiles before it.
_HEADER = 2
_TILE = 4
_EXPERT, _FIRST, _COUNT, _COST = range(_TILE)


def plan_words(pairs: int, experts: int) -> int:
    """int64 words of a plan for so many pairs."""
    return _HEADER + 2 * pairs + _TILE * (_most_tiles(pairs, experts) + 1) + experts + 1


def tasks(pairs: int, experts: int, channels: int) -> int:
    """The most tasks that a product for so many pairs falls into."""
    return _most_tiles(pairs, experts) * -(-channels // LANES)


def task_work(inputs: int, pairs: int, experts: int) -> int:
    """About how many multiply-adds one of them takes."""
    return LANES * inputs * -(-pairs // _most_tiles(pairs, experts))


def _most_tiles(pairs: int, experts: int) -> int:
    # Each expert's last tile, and those before it, which are full.
    return min(pairs, experts + pairs // ROW_CHUNK)


_compiled_most_tiles = jit(_most_tiles)


@jit
def _plan(address: int, pairs: int, experts: int) -> Any:
    """A plan's header, pairs, rows, tiles and beginnings."""
    most = _compiled_most_tiles(pairs, experts) + 1
    header = carray(pointer(address), (_HEADER,), np.int64)
    order = carray(pointer(address + 8 * _HEADER), (pairs,), np.int64)
    rows = carray(pointer(address + 8 * (_HEADER + pairs)), (pairs,), np.int64)
    tiles = carray(pointer(address + 8 * (_HEADER + 2 * pairs)), (most, _TILE), np.int64)
    begins = carray(pointer(address + 8 * (_HEADER + 2 * pairs + _TILE * most)), (experts + 1,), np.int64)
    return header, order, rows, tiles, begins


@operation
def group(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: expert_ids, rows, chosen, experts, plan. One share. Pairs of an expert that is none are left out."""
    words = carray(pointer(record), (16,), np.int64)
    num_rows, chosen, experts = words[1], words[2], words[3]
    pairs = num_rows * chosen
    ids = carray(pointer(words[0]), (pairs,), np.int32)
    header, order, rows, tiles, begins = _plan(words[4], pairs, experts)
    for expert in range(experts + 1):
        begins[expert] = 0
    for pair in range(pairs):
        chose = np.int64(ids[pair])
        if 0 <= chose < experts:
            begins[chose + 1] += 1
    tile = 0
    cost = 0
    for expert in range(experts):
        first = begins[expert]
        end = first + begins[expert + 1]
        begins[expert + 1] = end
        while first < end:
            count = min(end - first, ROW_CHUNK)
            tiles[tile, _EXPERT] = expert
            tiles[tile, _FIRST] = first
            tiles[tile, _COUNT] = count
            tiles[tile, _COST] = cost
            # Unpacking integers for a few rows takes about as long as multiplying them with a row and two thirds.
            cost += 5 * ((count + ROWS_UNPACKED_FOR - 1) // ROWS_UNPACKED_FOR) + 3 * count
            first += count
            tile += 1
    tiles[tile, _COST] = cost
    header[0] = tile
    for pair in range(pairs):
        chose = np.int64(ids[pair])
        if 0 <= chose < experts:
            place = begins[chose]
            begins[chose] += 1
            order[place] = pair
            rows[place] = pair // chosen


@jit
def _first_task(tiles: Any, num_tiles: int, blocks: int, share: int, num_shares: int) -> tuple[int, int, int]:
    """A share's first tile and block, and the cost before which its last task begins."""
    total = tiles[num_tiles, _COST] * blocks
    low, high = range_of(share, num_shares, total)
    tile = 0
    while tile < num_tiles and tiles[tile + 1, _COST] * blocks <= low:
        tile += 1
    if tile == num_tiles:
        return tile, 0, high
    cost = tiles[tile + 1, _COST] - tiles[tile, _COST]
    block = (low - tiles[tile, _COST] * blocks + cost - 1) // cost
    if block == blocks:
        return tile + 1, 0, high
    return tile, block, high


@jit
def _begins_before(tiles: Any, num_tiles: int, blocks: int, tile: int, block: int, high: int) -> bool:
    if tile == num_tiles:
        return False
    cost = tiles[tile + 1, _COST] - tiles[tile, _COST]
    return tiles[tile, _COST] * blocks + block * cost < high


@operation
def order_columns(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: expert table, GATE or UP, x, K, out, pairs, experts, plan: out[place] = the pair's row of x in the order
    of its expert's columns."""
    words = carray(pointer(record), (16,), np.int64)
    inputs, pairs, experts = words[3], words[5], words[6]
    parts = carray(pointer(words[0]), (experts, 3, PART_WORDS), np.int64)
    header, _order, rows, tiles, _begins = _plan(words[7], pairs, experts)
    low, high = range_of(share, num_shares, pairs)
    for tile in range(header[0]):
        first = tiles[tile, _FIRST]
        for place in range(max(first, low), min(first + tiles[tile, _COUNT], high)):
            order = parts[tiles[tile, _EXPERT], words[1], ORDER]
            order_row(words[2] + 4 * rows[place] * inputs, order, words[4] + 4 * place * inputs, inputs)


@operation
def gated(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: expert table, x for the gate, x for the up, whether these are by place (else by row), K, out, pairs,
    experts, plan, activation, gate biases, up biases (0: none), workspaces. out float32 [pairs, F], by place."""
    words = carray(pointer(record), (16,), np.int64)
    by_place, inputs, pairs, experts = words[3], words[4], words[6], words[7]
    parts = carray(pointer(words[0]), (experts, 3, PART_WORDS), np.int64)
    header, _order, rows, tiles, _begins = _plan(words[8], pairs, experts)
    workspace = words[12] + worker * WORKSPACE_BYTES
    totals = carray(pointer(workspace + GATE_TOTALS), (ROW_CHUNK, LANES), np.float32)
    channels = parts[0, GATE, CHANNELS]
    out = carray(pointer(words[5]), (pairs, channels), np.float32)
    blocks = (channels + LANES - 1) // LANES
    num_tiles = header[0]
    tile, block, high = _first_task(tiles, num_tiles, blocks, share, num_shares)
    summed = -1
    while _begins_before(tiles, num_tiles, blocks, tile, block, high):
        expert, first, count = tiles[tile, _EXPERT], tiles[tile, _FIRST], tiles[tile, _COUNT]
        skipped = 4 * first * inputs if by_place else 0
        ids = 0 if by_place else rows[first:].ctypes.data
        gate, up, x_gate, x_up = parts[expert, GATE], parts[expert, UP], words[1] + skipped, words[2] + skipped
        known = summed == tile
        alike = have_equal_sums(gate, up, x_gate, x_up)
        up_sums = GATE_SUMS if alike else UP_SUMS
        block_totals(gate, block, x_gate, inputs, ids, count, workspace, GATE_TOTALS, GATE_SUMS, known)
        block_totals(up, block, x_up, inputs, ids, count, workspace, UP_TOTALS, up_sums, known or alike)
        summed = tile
        lanes = min(channels - block * LANES, LANES)
        bias = 4 * (expert * channels + block * LANES)
        join(
            words[9],
            words[10] + bias if words[10] else 0,
            words[11] + bias if words[10] else 0,
            lanes,
            count,
            workspace,
        )
        for i in range(count):
            for lane in range(lanes):
                out[first + i, block * LANES + lane] = totals[i, lane]
        block += 1
        if block == blocks:
            tile, block = tile + 1, 0


@operation
def down(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: expert table, x [pairs, F] by place, F, out, pairs, experts, plan, biases (0: none), workspaces. out
    float32 [pairs, K], by pair."""
    words = carray(pointer(record), (16,), np.int64)
    inputs, pairs, experts, biases = words[2], words[4], words[5], words[7]
    parts = carray(pointer(words[0]), (experts, 3, PART_WORDS), np.int64)
    header, order, _rows, tiles, _begins = _plan(words[6], pairs, experts)
    workspace = words[8] + worker * WORKSPACE_BYTES
    totals = carray(pointer(workspace + GATE_TOTALS), (ROW_CHUNK, LANES), np.float32)
    channels = parts[0, DOWN, CHANNELS]
    out = carray(pointer(words[3]), (pairs, channels), np.float32)
    bias = carray(pointer(biases), (experts, channels), np.float32)
    blocks = (channels + LANES - 1) // LANES
    num_tiles = header[0]
    tile, block, high = _first_task(tiles, num_tiles, blocks, share, num_shares)
    summed = -1
    while _begins_before(tiles, num_tiles, blocks, tile, block, high):
        expert, first, count = tiles[tile, _EXPERT], tiles[tile, _FIRST], tiles[tile, _COUNT]
        x = words[1] + 4 * first * inputs
        part = parts[expert, DOWN]
        block_totals(part, block, x, inputs, 0, count, workspace, GATE_TOTALS, GATE_SUMS, summed == tile)
        summed = tile
        lanes = min(channels - block * LANES, LANES)
        for i in range(count):
            pair = order[first + i]
            for lane in range(lanes):
                channel = block * LANES + lane
                value = totals[i, lane]
                if biases:
                    value += bias[expert, channel]
                out[pair, channel] = value
        block += 1
        if block == blocks:
            tile, block = tile + 1, 0


@operation
def combine(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: expert_ids, shares, y [rows * chosen, K], out, rows, chosen, K, experts. An expert that is none makes its
    row NaN. K is a multiple of every group size, and so of a vector's lanes."""
    words = carray(pointer(record), (16,), np.int64)
    rows, chosen, channels, experts = words[4], words[5], words[6], words[7]
    ids = carray(pointer(words[0]), (rows, chosen), np.int32)
    shares = carray(pointer(words[1]), (rows, chosen), np.float32)
    y = carray(pointer(words[2]), (rows * chosen * channels,), np.float32)
    out = carray(pointer(words[3]), (rows * channels,), np.float32)
    first, end = range_of(share, num_shares, rows)
    for row in range(first, end):
        begin = _ZERO
        for rank in range(chosen):
            if not 0 <= ids[row, rank] < experts:
                begin = _NAN
        for channel in range(0, channels, simd.LANES):
            total = simd.broadcast(begin)
            for rank in range(chosen):
                part = simd.load(y, (row * chosen + rank) * channels + channel)
                total = simd.fma(simd.broadcast(shares[row, rank]), part, total)
            at = row * channels + channel
            simd.store(out, at, simd.add(simd.load(out, at), total))
