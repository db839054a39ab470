"""The inner loops of products with resident integers, written as LLVM vectors whose lanes are output channels.

A kernel computes one pass of a block for a tile of rows: the channels of PASS_BYTES bytes of 4-bit integers, as many
low as high nibbles. On machines with AVX-512 a pass is the whole block of 64 channels; on others a quarter, so that the
sums of a tile of rows still fit the registers. LLVM splits the vectors into what the machine has. The order of
operations in a lane is `linear.py`'s contract whatever the pass and the tile. Arguments are addresses and counts, all
int64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shardline.kernels.cpu.intrinsics import F16, F32, I8, I32, I64, emit_fma, splat
from shardline.kernels.cpu.jit import target_features
from shardline.kernels.cpu.resident import LANES

HALF = LANES // 2
"""Channels between those of a byte's low and high nibble."""

PASS_BYTES = HALF if "avx512f" in target_features() else 8

ROW_TILE = 4
"""The most rows whose sums are held in registers at once."""

_UNROLL = 4  # every group size is a multiple


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
    wide = ir.VectorType(F32, PASS_BYTES)
    zero = ir.Constant(wide, [0.0] * PASS_BYTES)
    sums = [cgutils.alloca_once(builder, F32) for _ in range(rows)]
    products = [[cgutils.alloca_once(builder, wide) for _ in range(2)] for _ in range(rows)]
    is_half = builder.icmp_signed("!=", half, I64(0))
    scale_bytes = builder.select(is_half, I64(2 * LANES), I64(4 * LANES))

    def total_place(row: int, side: int) -> ir.Value:
        return _pointer(builder, totals, wide, 4 * (LANES * row + HALF * side))

    for row in range(rows):
        for side in range(2):
            builder.store(zero, total_place(row, side), align=4)
    with cgutils.for_range(builder, groups) as group_loop:
        group = group_loop.index
        first_k = builder.mul(group, group_size)
        for row in range(rows):
            builder.store(F32(0.0), sums[row])
            for side in range(2):
                builder.store(zero, products[row][side])
        with cgutils.for_range(builder, builder.sdiv(group_size, I64(_UNROLL))) as k_loop:
            base = builder.add(first_k, builder.mul(k_loop.index, I64(_UNROLL)))
            for step in range(_UNROLL):
                k = builder.add(base, I64(step))
                weight = _load_integers(builder, _at(builder, weights, k, LANES * bits // 8), bits, wide)
                for row in range(rows):
                    scalar = builder.load(_pointer(builder, _at(builder, x_rows[row], k, 4), F32), align=4)
                    builder.store(builder.fadd(builder.load(sums[row]), scalar), sums[row])
                    value = splat(builder, scalar, PASS_BYTES)
                    for place, integers in zip(products[row], weight, strict=True):
                        builder.store(emit_fma(builder, integers, value, builder.load(place)), place)
        offset = builder.mul(group, scale_bytes)
        scales = _load_scales(builder, builder.add(scale, offset), is_half, wide)
        minimums = _load_scales(builder, builder.add(minimum, offset), is_half, wide)
        for row in range(rows):
            group_sum = splat(builder, builder.load(sums[row]), PASS_BYTES)
            for side in range(2):
                place = total_place(row, side)
                total = builder.load(place, align=4)
                total = emit_fma(builder, scales[side], builder.load(products[row][side]), total)
                builder.store(emit_fma(builder, minimums[side], group_sum, total), place, align=4)


def _at(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stride: int) -> ir.Value:
    """address + index * stride."""
    return builder.add(address, builder.mul(index, I64(stride)))


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type, offset: int = 0) -> ir.Value:
    return builder.inttoptr(builder.add(address, I64(offset)), pointee.as_pointer())


def _load_integers(builder: ir.IRBuilder, address: ir.Value, bits: int, wide: ir.VectorType) -> list[ir.Value]:
    """The integers of one k as floats: the pass's channels of the block's lower half, those of its upper half."""
    spread = ir.VectorType(I32, PASS_BYTES)

    def load(offset: int) -> ir.Value:
        place = _pointer(builder, address, ir.VectorType(I8, PASS_BYTES), offset)
        return builder.zext(builder.load(place, align=8), spread)

    if bits == 8:
        halves = [load(0), load(HALF)]
    else:
        both = load(0)
        halves = [
            builder.and_(both, ir.Constant(spread, [15] * PASS_BYTES)),
            builder.lshr(both, ir.Constant(spread, [4] * PASS_BYTES)),
        ]
    # As signed: the integers are small, and fewer machines convert unsigned ones.
    return [builder.sitofp(half, wide) for half in halves]


def _load_scales(builder: ir.IRBuilder, address: ir.Value, is_half: ir.Value, wide: ir.VectorType) -> list[ir.Value]:
    """A group's scales or minimums as floats, of the pass's channels in the block's lower and upper half."""
    places = [cgutils.alloca_once(builder, wide) for _ in range(2)]
    with builder.if_else(is_half) as (half, single):
        with half:
            for side, place in enumerate(places):
                source = _pointer(builder, address, ir.VectorType(F16, PASS_BYTES), 2 * HALF * side)
                builder.store(builder.fpext(builder.load(source, align=2), wide), place)
        with single:
            for side, place in enumerate(places):
                source = _pointer(builder, address, wide, 4 * HALF * side)
                builder.store(builder.load(source, align=4), place)
    return [builder.load(place) for place in places]
