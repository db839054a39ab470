"""Products of several rows on machines without AVX-512: integers are unpacked once for up to 64 rows.

With eight lanes a vector, unpacking takes longer than multiplying with a few rows does. So a group is multiplied with
all rows before the next one is read. The first tile of rows unpacks the integers of a *pass*, 32 channels, to floats
and leaves them in a *panel*, which stays in the nearest cache; the other tiles read it from there. Reading a group at a
time also spreads the reads of weights evenly over the work, so that they come from memory meanwhile.

A tile has up to twelve vectors of sums: each is one chain of fused multiply-adds, of which ten must be under way to
keep two units busy that take five cycles. The order of operations in a lane is `linear.py`'s contract. Arguments are
addresses and counts, all int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from shardline.kernels.cpu.intrinsics import (
    F16,
    F32,
    I8,
    I32,
    I64,
    emit_address,
    emit_barrier,
    emit_fma,
    emit_pointer,
    emit_prefetch,
    pointer,
    splat,
)
from shardline.kernels.cpu.jit import jit
from shardline.kernels.cpu.microkernel import AHEAD, HALF
from shardline.kernels.cpu.resident import ALIGNMENT, LANES

MOST_ROWS = 64
"""Of one call: their totals (16 KiB) and the panel stay in the nearest cache."""

SUM_GROUPS = 512
"""Of a row, whose sums are kept from one block of channels to the next. With more, each block sums x again."""

_VECTOR = 8
_PASS = 16
"""Channels of a pass below HALF; as many lie above."""

_CHANNELS = (0, HALF, 8, HALF + 8)
"""Where the vectors of a pass begin: of 4-bit integers each two are the low and the high nibbles of the same bytes."""

_PANEL_ROW = 4 * _VECTOR * len(_CHANNELS)
"""Bytes of a panel that are one column's."""

_FIRST_TILES = (4, 5, 6)
_OTHER_TILES = (2, 3, 5, 6)
"""Rows of a tile that `_tile_of` makes: of the first one, and of those that read the panel."""

_UNROLL = 2
"""Columns at a time; more gain nothing here, and take longer to compile."""

# Byte offsets in a thread's scratch: the addresses of rows, with room for a tile of eight; a group's scales and
# minimums; the panel of the largest group.
_ROWS_AT = 0
_SCALES_AT = 8 * (MOST_ROWS + 8)
_PANEL_AT = -(-(_SCALES_AT + 2 * 4 * LANES) // ALIGNMENT) * ALIGNMENT
PANEL_BYTES = _PANEL_AT + 128 * _PANEL_ROW
"""Scratch of one thread, aligned to a cache line."""

SUMS_BYTES = 4 * MOST_ROWS * SUM_GROUPS
"""Of the sums of x that `panel_totals` keeps."""


@jit
def panel_totals(
    bits: int,
    weights: int,
    scale: int,
    minimum: int,
    half_scales: int,
    groups: int,
    group_size: int,
    x: int,
    x_stride: int,
    ids: int,
    rows: int,
    totals: int,
    scratch: int,
    sums: int,
    are_summed: bool,
) -> None:
    """totals float32 [rows, 64] = 4..64 rows of x times a block's channels; see `blocks.block_totals`.

    weights, scale and minimum are the addresses of the block's, scales float16 if half_scales, else float32. scratch
    has PANEL_BYTES, and sums SUMS_BYTES: the sums of these rows over each group, if are_summed says so.
    """
    _list_rows(x, x_stride, ids, rows, scratch + _ROWS_AT)
    cleared = carray(pointer(totals), (rows * LANES,), np.float32)
    for i in range(rows * LANES):
        cleared[i] = np.float32(0.0)
    scale_bytes = LANES * (4 - 2 * half_scales)
    sums_stride = 4 * ((rows + 7) & ~7)
    for group in range(groups):
        x_offset = 4 * group * group_size
        group_sums = sums + (group % SUM_GROUPS) * sums_stride
        if not are_summed or groups > SUM_GROUPS:
            for row in range(0, rows, 8):
                _sum_rows(scratch + _ROWS_AT + 8 * row, x_offset, group_size, group_sums + 4 * row)
        _widen(half_scales, scale + group * scale_bytes, scratch + _SCALES_AT)
        _widen(half_scales, minimum + group * scale_bytes, scratch + _SCALES_AT + 4 * LANES)
        for channel in range(0, HALF, _PASS):
            row = 0
            while row < rows:
                tile = _tile_of(rows - row)
                for half in range(1 if tile < 4 else 2):
                    first = channel + half * _VECTOR
                    _multiply(
                        0 if row else bits,
                        tile,
                        weights + 8 * bits * group * group_size + first,
                        scratch + _PANEL_AT + half * (_PANEL_ROW // 2),
                        group_size,
                        scratch + _ROWS_AT + 8 * row,
                        x_offset,
                        group_sums + 4 * row,
                        scratch + _SCALES_AT + 4 * first,
                        totals + 4 * (row * LANES + first),
                    )
                row += tile


@jit
def _tile_of(rows: int) -> int:
    """How many of the rows that are left, 2 or more, the next tile has, such that none is left alone."""
    if rows == 7 or rows == 8 or rows == 10:
        return 5
    return min(rows, 6)


@jit
def _list_rows(x: int, x_stride: int, ids: int, rows: int, target: int) -> None:
    """The addresses of the rows of x, and of the last one again to fill a tile of eight."""
    addresses = carray(pointer(target), (rows + 7,), np.int64)
    chosen = carray(pointer(ids), (rows,), np.int64)
    for i in range(rows + 7):
        row = min(i, rows - 1)
        addresses[i] = x + 4 * x_stride * (chosen[row] if ids else row)


@intrinsic
def _sum_rows(typingctx: Any, rows: Any, x_offset: Any, columns: Any, sums: Any) -> Any:
    """sums float32 [8] = the sums of eight rows over a group: eight chains, as two adders that take three cycles
    want six."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        rows, x_offset, columns, sums = args
        x_rows = _x_rows(builder, rows, x_offset, 8)
        chains = [cgutils.alloca_once_value(builder, F32(0.0)) for _ in x_rows]
        for chain in chains:
            builder.store(F32(0.0), chain)
        with cgutils.for_range(builder, columns) as loop:
            for x_row, chain in zip(x_rows, chains, strict=True):
                value = builder.load(emit_pointer(builder, emit_address(builder, x_row, loop.index, 4), F32), align=4)
                builder.store(builder.fadd(builder.load(chain), value), chain)
        for row, chain in enumerate(chains):
            builder.store(builder.load(chain), emit_pointer(builder, sums, F32, 4 * row), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def _widen(typingctx: Any, half: Any, source: Any, target: Any) -> Any:
    """target float32 [64] = source, float16 if half, else float32."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        half, source, target = args
        wide = ir.VectorType(F32, _VECTOR)
        with builder.if_else(builder.icmp_signed("!=", half, I64(0))) as branches:
            for stored, size, branch in zip((F16, F32), (2, 4), branches, strict=True):
                with branch:
                    for channel in range(0, LANES, _VECTOR):
                        place = emit_pointer(builder, source, ir.VectorType(stored, _VECTOR), size * channel)
                        value = builder.load(place, align=size)
                        value = builder.fpext(value, wide) if stored is F16 else value
                        builder.store(value, emit_pointer(builder, target, wide, 4 * channel), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), codegen


@intrinsic
def _multiply(
    typingctx: Any,
    bits: Any,
    tile: Any,
    weights: Any,
    panel: Any,
    columns: Any,
    rows: Any,
    x_offset: Any,
    sums: Any,
    scales: Any,
    totals: Any,
) -> Any:
    """Add a group's products of a pass and a tile of rows to the totals.

    Weights of 4 or 8 bits are unpacked into the panel; with 0 bits they have been. rows points to the addresses of the
    tile's rows, whose group begins x_offset bytes on, and sums to their sums over the group. weights, scales (float32
    [64], minimums behind them) and totals (float32 [rows, 64]) start at the pass's first channel.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        bits, tile, *rest = args
        for width, tiles in ((0, _OTHER_TILES), (4, _FIRST_TILES), (8, _FIRST_TILES)):
            with builder.if_then(builder.icmp_signed("==", bits, I64(width))):
                for count in tiles:
                    with builder.if_then(builder.icmp_signed("==", tile, I64(count))):
                        _emit_multiply(builder, width, count, _CHANNELS[: 4 if count < 4 else 2], rest)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10), codegen


def _emit_multiply(builder: ir.IRBuilder, bits: int, count: int, channels: tuple[int, ...], args: list[Any]) -> None:
    """`_multiply` of `count` rows and the vectors that begin at these channels."""
    weights, panel, columns, rows, x_offset, sums, scales, totals = args
    wide = ir.VectorType(F32, _VECTOR)
    x_rows = _x_rows(builder, rows, x_offset, count)
    products = [[cgutils.alloca_once(builder, wide) for _ in channels] for _ in x_rows]
    for place in (place for row in products for place in row):
        builder.store(ir.Constant(wide, [0.0] * _VECTOR), place)
    with cgutils.for_range(builder, builder.sdiv(columns, I64(_UNROLL))) as loop:
        for step in range(_UNROLL):
            k = builder.add(builder.mul(loop.index, I64(_UNROLL)), I64(step))
            x_places = [emit_pointer(builder, emit_address(builder, x_row, k, 4), F32) for x_row in x_rows]
            panel_row = emit_address(builder, panel, k, _PANEL_ROW)
            places = [emit_pointer(builder, panel_row, wide, 4 * _VECTOR * vector) for vector in range(len(channels))]
            if bits:
                column = emit_address(builder, weights, k, 8 * bits)
                if step * 8 * bits % ALIGNMENT == 0:
                    emit_prefetch(builder, builder.add(column, I64(AHEAD)))
                for value, place in zip(_unpacked(builder, column, bits, channels), places, strict=True):
                    builder.store(value, place, align=4 * _VECTOR)
            if len(channels) > 2:
                _emit_columns_in_turn(builder, places, x_places, products)
            else:
                _emit_rows_in_turn(builder, places, x_places, products)
    for index, channel in enumerate(channels):
        factor = builder.load(emit_pointer(builder, scales, wide, 4 * channel), align=4)
        addend = builder.load(emit_pointer(builder, scales, wide, 4 * (LANES + channel)), align=4)
        for row in range(count):
            group_sum = splat(builder, builder.load(emit_pointer(builder, sums, F32, 4 * row), align=4), _VECTOR)
            place = emit_pointer(builder, totals, wide, 4 * (LANES * row + channel))
            product = builder.load(products[row][index])
            total = emit_fma(builder, factor, product, builder.load(place, align=4))
            builder.store(emit_fma(builder, addend, group_sum, total), place, align=4)


def _emit_rows_in_turn(builder: ir.IRBuilder, weights: list[Any], x: list[Any], products: list[list[Any]]) -> None:
    """One column's multiply-adds: twelve sums, two vectors of weights and a number of x take fifteen registers."""
    loaded = [builder.load(place, align=4 * _VECTOR) for place in weights]
    for x_place, row in zip(x, products, strict=True):
        value = splat(builder, builder.load(x_place, align=4), _VECTOR)
        for weight, place in zip(loaded, row, strict=True):
            builder.store(emit_fma(builder, weight, value, builder.load(place)), place)


def _emit_columns_in_turn(builder: ir.IRBuilder, weights: list[Any], x: list[Any], products: list[list[Any]]) -> None:
    """The same for few rows: twelve sums, three numbers of x and a vector of weights."""
    values = [splat(builder, builder.load(place, align=4), _VECTOR) for place in x]
    for index, weight_place in enumerate(weights):
        # Else LLVM loads all weights at first, and sums no longer fit the registers.
        emit_barrier(builder)
        weight = builder.load(weight_place, align=4 * _VECTOR)
        for value, row in zip(values, products, strict=True):
            builder.store(emit_fma(builder, weight, value, builder.load(row[index])), row[index])


def _x_rows(builder: ir.IRBuilder, rows: ir.Value, x_offset: ir.Value, count: int) -> list[ir.Value]:
    """The addresses of `count` rows' group."""
    return [
        builder.add(builder.load(emit_pointer(builder, rows, I64, 8 * row), align=8), x_offset) for row in range(count)
    ]


def _unpacked(builder: ir.IRBuilder, column: ir.Value, bits: int, channels: tuple[int, ...]) -> list[ir.Value]:
    """One column's integers as floats, of the two vectors that begin at these channels."""
    spread = ir.VectorType(I32, _VECTOR)

    def load(channel: int) -> ir.Value:
        place = emit_pointer(builder, column, ir.VectorType(I8, _VECTOR), channel)
        return builder.zext(builder.load(place, align=8), spread)

    if bits == 8:
        integers = [load(channel) for channel in channels]
    else:
        both = load(channels[0])
        low = builder.and_(both, ir.Constant(spread, [15] * _VECTOR))
        integers = [low, builder.lshr(both, ir.Constant(spread, [4] * _VECTOR))]
    # As signed: the integers are small, and fewer machines convert unsigned ones.
    return [builder.sitofp(value, ir.VectorType(F32, _VECTOR)) for value in integers]
