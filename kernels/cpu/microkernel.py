"""The inner loops of products with resident integers, written as LLVM vectors whose lanes are output channels.

A kernel computes one pass of a block for a tile of rows: the channels of so many bytes of 4-bit integers, as many low
as high nibbles. On machines with AVX-512 a pass is the whole block of 64 channels. On others these kernels are for one
to three rows, `panel.py` for more; and the fewer the rows, the wider a pass: eight vectors of sums fill the registers,
and fewer than that wait for each other, because each sum is one chain of fused multiply-adds. The order of operations
in a lane is `linear.py`'s contract whatever the pass and the tile.
Arguments are addresses and counts, all int64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shardline.kernels.cpu.intrinsics import (
    F16,
    F32,
    I8,
    I32,
    I64,
    emit_address,
    emit_fma,
    emit_pointer,
    emit_prefetch,
    splat,
)
from shardline.kernels.cpu.jit import target_features
from shardline.kernels.cpu.resident import ALIGNMENT, LANES

HALF = LANES // 2
"""Channels between those of a byte's low and high nibble."""

WIDE = "avx512f" in target_features()

ROW_TILE = 4 if WIDE else 3
"""The most rows whose sums are held in registers at once."""

VECTOR = HALF if WIDE else 8
"""Lanes that are loaded at once. LLVM splits what the machine does not have, but then unpacks all bytes before it
widens them, which takes more shuffles than to widen while loading."""

PASS_BYTES = (0, HALF, HALF, HALF, HALF) if WIDE else (0, 32, 16, 8)
"""By the rows of a tile; multiples of VECTOR."""

_UNROLL = (0, 4, 4, 4, 4) if WIDE else (0, 1, 1, 4)
"""Columns at a time, by the rows of a tile: with more, LLVM moves loads up until sums no longer fit the registers.
Every group size is a multiple."""

AHEAD = 0 if WIDE else 2048
"""Bytes of weights, if any, that are fetched ahead of their use: processors do so by themselves, but only to the end of
a page of memory. Tuned on Zen 2, where products of weights that come from memory take a quarter less time with it."""


@intrinsic
def accumulate(
    typingctx: Any,
    bits: Any,
    rows: Any,
    weights: Any,
    scale: Any,
    minimum: Any,
    half_scales: Any,
    x0: Any,
    x1: Any,
    x2: Any,
    x3: Any,
    totals: Any,
    groups: Any,
    group_size: Any,
) -> Any:
    """Compute one pass of a block for 1..ROW_TILE rows.

    Weights (of 4 or 8 bits), scale, minimum (float16 if half_scales, else float32) and totals (float32 [rows, 64])
    start at the pass's first channel; x0, x1, ... are the rows of x, as many as there are.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        bits, rows, *rest = args
        for width in (4, 8):
            with builder.if_then(builder.icmp_signed("==", bits, I64(width))):
                for count in range(1, ROW_TILE + 1):
                    with builder.if_then(builder.icmp_signed("==", rows, I64(count))):
                        _emit_accumulate(builder, count, width, rest)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 13), codegen


def _emit_accumulate(builder: ir.IRBuilder, rows: int, bits: int, args: list[ir.Value]) -> None:
    weights, scale, minimum, half, *x_rows, totals, groups, group_size = args
    wide = ir.VectorType(F32, VECTOR)
    zero = ir.Constant(wide, [0.0] * VECTOR)
    channels = [side + start for side in (0, HALF) for start in range(0, PASS_BYTES[rows], VECTOR)]
    sums = [cgutils.alloca_once(builder, F32) for _ in range(rows)]
    products = [[cgutils.alloca_once(builder, wide) for _ in channels] for _ in range(rows)]
    column_bytes = LANES * bits // 8
    is_half = builder.icmp_signed("!=", half, I64(0))
    scale_bytes = builder.select(is_half, I64(2 * LANES), I64(4 * LANES))

    def total_place(row: int, channel: int) -> ir.Value:
        return emit_pointer(builder, totals, wide, 4 * (LANES * row + channel))

    for row in range(rows):
        for channel in channels:
            builder.store(zero, total_place(row, channel), align=4)
    with cgutils.for_range(builder, groups) as group_loop:
        group = group_loop.index
        first_k = builder.mul(group, group_size)
        for row in range(rows):
            builder.store(F32(0.0), sums[row])
            for product in products[row]:
                builder.store(zero, product)
        with cgutils.for_range(builder, builder.sdiv(group_size, I64(_UNROLL[rows]))) as k_loop:
            base = builder.add(first_k, builder.mul(k_loop.index, I64(_UNROLL[rows])))
            for step in range(_UNROLL[rows]):
                k = builder.add(base, I64(step))
                column = emit_address(builder, weights, k, column_bytes)
                if AHEAD and step * column_bytes % ALIGNMENT == 0:
                    emit_prefetch(builder, builder.add(column, I64(AHEAD)))
                weight = _load_integers(builder, column, bits, channels)
                for row in range(rows):
                    scalar = builder.load(emit_pointer(builder, emit_address(builder, x_rows[row], k, 4), F32), align=4)
                    builder.store(builder.fadd(builder.load(sums[row]), scalar), sums[row])
                    value = splat(builder, scalar, VECTOR)
                    for place, integers in zip(products[row], weight, strict=True):
                        builder.store(emit_fma(builder, integers, value, builder.load(place)), place)
        offset = builder.mul(group, scale_bytes)
        group_sums = [splat(builder, builder.load(place), VECTOR) for place in sums]
        with builder.if_else(is_half) as branches:
            for stored, branch in zip((F16, F32), branches, strict=True):
                with branch:
                    for index, channel in enumerate(channels):
                        factor = _load_scales(builder, builder.add(scale, offset), stored, channel)
                        addend = _load_scales(builder, builder.add(minimum, offset), stored, channel)
                        for row, group_sum in enumerate(group_sums):
                            place = total_place(row, channel)
                            total = builder.load(place, align=4)
                            total = emit_fma(builder, factor, builder.load(products[row][index]), total)
                            builder.store(emit_fma(builder, addend, group_sum, total), place, align=4)


def _load_integers(builder: ir.IRBuilder, address: ir.Value, bits: int, channels: list[int]) -> list[ir.Value]:
    """The integers of one k as floats, of the vectors that start at these channels."""
    spread = ir.VectorType(I32, VECTOR)

    def load(offset: int) -> ir.Value:
        place = emit_pointer(builder, address, ir.VectorType(I8, VECTOR), offset)
        return builder.zext(builder.load(place, align=8), spread)

    if bits == 8:
        integers = [load(channel) for channel in channels]
    else:
        both = [load(channel) for channel in channels if channel < HALF]
        integers = [builder.and_(value, ir.Constant(spread, [15] * VECTOR)) for value in both]
        integers += [builder.lshr(value, ir.Constant(spread, [4] * VECTOR)) for value in both]
    # As signed: the integers are small, and fewer machines convert unsigned ones.
    return [builder.sitofp(value, ir.VectorType(F32, VECTOR)) for value in integers]


def _load_scales(builder: ir.IRBuilder, address: ir.Value, stored: ir.Type, channel: int) -> ir.Value:
    """A group's scales or minimums as floats, of the vector that starts at this channel."""
    size = 2 if stored is F16 else 4
    place = emit_pointer(builder, address, ir.VectorType(stored, VECTOR), size * channel)
    loaded = builder.load(place, align=size)
    return builder.fpext(loaded, ir.VectorType(F32, VECTOR)) if stored is F16 else loaded
