"""Products with resident integer matrices: `linear`, `gated_linear`, and `embedding`, which reads single rows.

The order contract, the same for any number of rows and threads. For output channel n and row r, groups g ascending:

    P = fma(q[n, k], x[r, k], P) and X = X + x[r, k] for k ascending in the group, both from zero
    T = fma(scale[n, g], P, T), then T = fma(minimum[n, g], X, T), from zero

where k counts the matrix's columns; if their order is not that of the input channels, x[r, k] is the k-th column's.

What may change with the number of rows: how many rows share one unpacking of a group's integers, and which thread
computes a block. Threads split output channels and rows, never K.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from shardline.kernels.cpu.activation import activate
from shardline.kernels.cpu.blocks import (
    BITS,
    CHANNELS,
    FIRST,
    GATE_SUMS,
    GATE_TOTALS,
    GROUP_SIZE,
    GROUPS,
    HALF_SCALES,
    MINIMUM,
    ORDER,
    PART_WORDS,
    ROW_CHUNK,
    SCALE,
    UP_SUMS,
    UP_TOTALS,
    WORKSPACE_BYTES,
    Q,
    block_totals,
    have_equal_sums,
)
from shardline.kernels.cpu.intrinsics import float64_of_bits, fma, half_to_float, pointer
from shardline.kernels.cpu.jit import jit, operation
from shardline.kernels.cpu.resident import LANES


def tasks(channels: int, rows: int) -> int:
    """Into how many tasks a product falls: a block of channels for a chunk of rows."""
    return -(-channels // LANES) * -(-rows // ROW_CHUNK)


def task_work(inputs: int, rows: int) -> int:
    """About how many multiply-adds a task takes."""
    return LANES * inputs * min(rows, ROW_CHUNK)


@jit
def join(activation: int, gate_bias: int, up_bias: int, lanes: int, rows: int, workspace: int) -> None:
    """Turn a block's gate totals, [rows, 64] in a workspace, into the activation of gate and up.

    The biases are addresses of the block's, `lanes` many each, or 0.
    """
    if gate_bias:
        _add_bias(workspace + GATE_TOTALS, gate_bias, lanes, rows)
        _add_bias(workspace + UP_TOTALS, up_bias, lanes, rows)
    for row in range(rows):
        activate(activation, workspace + GATE_TOTALS + 4 * LANES * row, workspace + UP_TOTALS + 4 * LANES * row)


@jit
def _add_bias(totals: int, bias: int, lanes: int, rows: int) -> None:
    values = carray(pointer(totals), (rows, LANES), np.float32)
    added = carray(pointer(bias), (lanes,), np.float32)
    for row in range(rows):
        for lane in range(lanes):
            values[row, lane] += added[lane]


@jit
def range_of(share: int, num_shares: int, count: int) -> tuple[int, int]:
    """A share's contiguous part of `count` tasks: first and end."""
    return share * count // num_shares, (share + 1) * count // num_shares


@operation
def linear(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: part, x, inputs, out, out_stride, rows, bias (0: none), accumulate, workspaces."""
    words = carray(pointer(record), (16,), np.int64)
    part = carray(pointer(words[0]), (PART_WORDS,), np.int64)
    x, inputs, out_stride, rows, accumulate = words[1], words[2], words[4], words[5], words[7]
    workspace = words[8] + worker * WORKSPACE_BYTES
    first, channels = part[FIRST], part[CHANNELS]
    out = carray(pointer(words[3]), (rows, out_stride), np.float32)
    bias = carray(pointer(words[6]), (first + channels,), np.float32)
    has_bias = words[6] != 0
    totals = carray(pointer(workspace + GATE_TOTALS), (ROW_CHUNK, LANES), np.float32)
    blocks = (channels + LANES - 1) // LANES
    chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
    task, end = range_of(share, num_shares, blocks * chunks)
    summed = -1
    while task < end:
        chunk, block = task // blocks, task % blocks
        row = chunk * ROW_CHUNK
        count = min(rows - row, ROW_CHUNK)
        x_chunk = x + 4 * row * inputs
        block_totals(part, block, x_chunk, inputs, 0, count, workspace, GATE_TOTALS, GATE_SUMS, summed == chunk)
        summed = chunk
        lanes = min(channels - block * LANES, LANES)
        channel = first + block * LANES
        for i in range(count):
            for lane in range(lanes):
                value = totals[i, lane]
                if has_bias:
                    value += bias[channel + lane]
                if accumulate:
                    value += out[row + i, channel + lane]
                out[row + i, channel + lane] = value
        task += 1


@operation
def gated_linear(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: gate part, up part, x for the gate, x for the up, inputs, out, out_stride, rows, activation, bias of the
    gate and then of the up (0: none), workspaces."""
    words = carray(pointer(record), (16,), np.int64)
    gate = carray(pointer(words[0]), (PART_WORDS,), np.int64)
    up = carray(pointer(words[1]), (PART_WORDS,), np.int64)
    x_gate, x_up, inputs, out_stride, rows, bias = words[2], words[3], words[4], words[6], words[7], words[9]
    workspace = words[10] + worker * WORKSPACE_BYTES
    channels = gate[CHANNELS]
    out = carray(pointer(words[5]), (rows, out_stride), np.float32)
    totals = carray(pointer(workspace + GATE_TOTALS), (ROW_CHUNK, LANES), np.float32)
    blocks = (channels + LANES - 1) // LANES
    chunks = (rows + ROW_CHUNK - 1) // ROW_CHUNK
    task, end = range_of(share, num_shares, blocks * chunks)
    alike = have_equal_sums(gate, up, x_gate, x_up)
    up_sums = GATE_SUMS if alike else UP_SUMS
    summed = -1
    while task < end:
        chunk, block = task // blocks, task % blocks
        row = chunk * ROW_CHUNK
        count = min(rows - row, ROW_CHUNK)
        skipped = 4 * row * inputs
        known = summed == chunk
        block_totals(gate, block, x_gate + skipped, inputs, 0, count, workspace, GATE_TOTALS, GATE_SUMS, known)
        block_totals(up, block, x_up + skipped, inputs, 0, count, workspace, UP_TOTALS, up_sums, known or alike)
        summed = chunk
        lanes = min(channels - block * LANES, LANES)
        channel = block * LANES
        gate_bias = bias + 4 * channel if bias else 0
        join(words[8], gate_bias, gate_bias + 4 * channels, lanes, count, workspace)
        for i in range(count):
            for lane in range(lanes):
                out[row + i, channel + lane] = totals[i, lane]
        task += 1


@operation
def order_columns(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: x, order, out, K, rows: out[r, j] = x[r, order[j]]."""
    words = carray(pointer(record), (16,), np.int64)
    inputs, rows = words[3], words[4]
    first, end = range_of(share, num_shares, rows)
    for row in range(first, end):
        order_row(words[0] + 4 * row * inputs, words[1], words[2] + 4 * row * inputs, inputs)


@jit
def order_row(x: int, order: int, out: int, inputs: int) -> None:
    """out[j] = x[order[j]] of one row, or without an order (0) x[j]. Arguments are addresses."""
    source = carray(pointer(x), (inputs,), np.float32)
    target = carray(pointer(out), (inputs,), np.float32)
    if order:
        columns = carray(pointer(order), (inputs,), np.int32)
        for j in range(inputs):
            target[j] = source[columns[j]]
    else:
        for j in range(inputs):
            target[j] = source[j]


@operation
def embedding(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: parts, number of parts, token_ids, out, inputs, rows, scale (float64 bits), last_tokens, their number. An
    id below 0 is that of a last token. One outside the matrix, or the last tokens, gives a row of NaN."""
    words = carray(pointer(record), (16,), np.int64)
    parts = carray(pointer(words[0]), (words[1], PART_WORDS), np.int64)
    inputs, rows = words[4], words[5]
    factor = np.float32(float64_of_bits(words[6]))
    token_ids = carray(pointer(words[2]), (rows,), np.int32)
    out = carray(pointer(words[3]), (rows, inputs), np.float32)
    places = words[8]
    last_tokens = carray(pointer(words[7]), (places,), np.int32)
    first_row, end_row = range_of(share, num_shares, rows)
    for row in range(first_row, end_row):
        token = np.int64(token_ids[row])
        if -places <= token < 0:
            token = np.int64(last_tokens[-1 - token])
        found = False
        for index in range(words[1]):
            part = parts[index]
            if part[FIRST] <= token < part[FIRST] + part[CHANNELS]:
                found = True
                _read_channel(part, token - part[FIRST], factor, out[row])
        if not found:
            for k in range(inputs):
                out[row, k] = np.nan


@jit
def _read_channel(part: Any, channel: int, factor: float, out: Any) -> None:
    """out[k] = factor times what scale * q + minimum of one channel rounds to."""
    block, lane = channel // LANES, channel % LANES
    groups, group_size, bits = part[GROUPS], part[GROUP_SIZE], part[BITS]
    bytes_per_k = 8 * bits
    q = carray(
        pointer(part[Q] + block * groups * group_size * bytes_per_k), (groups * group_size, bytes_per_k), np.uint8
    )
    place = block * groups * LANES + lane
    order = carray(pointer(part[ORDER]), (groups * group_size,), np.int32)
    for group in range(groups):
        index = place + group * LANES
        scale = _read_scale(part[SCALE], part[HALF_SCALES], index)
        minimum = _read_scale(part[MINIMUM], part[HALF_SCALES], index)
        for k in range(group * group_size, (group + 1) * group_size):
            if bits == 8:
                integer = q[k, lane]
            elif lane < LANES // 2:
                integer = q[k, lane] & 15
            else:
                integer = q[k, lane - LANES // 2] >> 4
            out[order[k] if part[ORDER] else k] = factor * fma(scale, np.float32(integer), minimum)


@jit
def _read_scale(address: int, half: int, index: int) -> float:
    if half:
        return half_to_float(carray(pointer(address + 2 * index), (1,), np.uint16)[0])
    return carray(pointer(address + 4 * index), (1,), np.float32)[0]


@operation
def gather_rows(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: x, rows of x, indices, out, width, count. An index outside x gives a row of NaN."""
    words = carray(pointer(record), (16,), np.int64)
    available, width, count = words[1], words[4], words[5]
    x = carray(pointer(words[0]), (available, width), np.float32)
    indices = carray(pointer(words[2]), (count,), np.int32)
    out = carray(pointer(words[3]), (count, width), np.float32)
    first, end = range_of(share, num_shares, count)
    for i in range(first, end):
        index = np.int64(indices[i])
        found = 0 <= index < available
        for k in range(width):
            out[i, k] = x[index, k] if found else np.float32(np.nan)
