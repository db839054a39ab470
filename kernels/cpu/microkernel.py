"""The inner loops of products with resident integers, written as LLVM vectors of 64 lanes, one an output channel.

LLVM splits a vector of 64 into what the machine has (four registers with AVX-512, eight with AVX2), and keeps the sums
of a tile of rows in registers, which numba's arrays cannot do. The order of operations is `linear.py`'s contract.
Arguments are addresses and counts, all int64; strides are in floats.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shardline.kernels.cpu.intrinsics import F16, F32, I8, I32, I64, emit_exp, emit_fma, splat
from shardline.kernels.cpu.resident import LANES

WIDE = ir.VectorType(F32, LANES)
FLOAT_BITS = 32
"""The bits of a group that `unpack_group` unpacked."""


def make_accumulate(rows: int, bits: int) -> Any:
    """An intrinsic that adds some groups of one block to the totals of `rows` rows.

    Its arguments: (weights, scale, minimum, half_scales, x, x_stride, sums, sums_stride, totals, groups, group_size).
    Weights are resident integers of 4 or 8 bits, or with bits = 32 float32 [k, 64] with float32 scales. x is the first
    row at the first group, sums [row, group] the row's sum of each group, totals float32 [rows, 64].
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        weights, scale, minimum, half, x, x_stride, sums, sums_stride, totals, groups, group_size = args
        unroll = 4  # every group size is a multiple
        x_rows = [_at(builder, x, x_stride, 4 * row) for row in range(rows)]
        sum_rows = [_at(builder, sums, sums_stride, 4 * row) for row in range(rows)]
        total_rows = [_pointer(builder, totals, WIDE, 4 * LANES * row) for row in range(rows)]
        product = [cgutils.alloca_once(builder, WIDE) for _ in range(rows)]
        total = [cgutils.alloca_once(builder, WIDE) for _ in range(rows)]
        for row in range(rows):
            builder.store(builder.load(total_rows[row], align=64), total[row])
        is_half = builder.icmp_signed("!=", half, I64(0))
        scale_bytes = builder.select(is_half, I64(2 * LANES), I64(4 * LANES))

        with cgutils.for_range(builder, groups) as group_loop:
            group = group_loop.index
            first_k = builder.mul(group, group_size)
            for row in range(rows):
                builder.store(ir.Constant(WIDE, [0.0] * LANES), product[row])
            with cgutils.for_range(builder, builder.sdiv(group_size, I64(unroll))) as k_loop:
                base = builder.add(first_k, builder.mul(k_loop.index, I64(unroll)))
                for step in range(unroll):
                    k = builder.add(base, I64(step))
                    weight = _load_weights(builder, _at(builder, weights, k, LANES * bits // 8), bits)
                    for row in range(rows):
                        value = _load_splat(builder, _at(builder, x_rows[row], k, 4))
                        builder.store(emit_fma(builder, weight, value, builder.load(product[row])), product[row])
            scales, minimums = (
                _load_scales(builder, _at(builder, address, group, scale_bytes), is_half, bits)
                for address in (scale, minimum)
            )
            for row in range(rows):
                group_sum = _load_splat(builder, _at(builder, sum_rows[row], group, 4))
                scaled = emit_fma(builder, scales, builder.load(product[row]), builder.load(total[row]))
                builder.store(emit_fma(builder, minimums, group_sum, scaled), total[row])

        for row in range(rows):
            builder.store(builder.load(total[row]), total_rows[row], align=64)
        return context.get_dummy_value()

    @intrinsic
    def accumulate(
        typingctx: Any,
        weights: Any,
        scale: Any,
        minimum: Any,
        half_scales: Any,
        x: Any,
        x_stride: Any,
        sums: Any,
        sums_stride: Any,
        totals: Any,
        groups: Any,
        group_size: Any,
    ) -> Any:
        return types.void(*(types.int64,) * 11), codegen

    return accumulate


@intrinsic
def unpack_group(
    typingctx: Any, weights: Any, bits: Any, scale: Any, minimum: Any, half_scales: Any, target: Any, group_size: Any
) -> Any:
    """One group of a block to float32: its integers to target [group_size, 64], then its scales and minimums [64]."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        weights, bits, scale, minimum, half, target, group_size = args
        with builder.if_else(builder.icmp_signed("==", bits, I64(8))) as branches:
            for branch, width in zip(branches, (8, 4), strict=True):
                with branch, cgutils.for_range(builder, group_size) as k_loop:
                    values = _load_weights(builder, _at(builder, weights, k_loop.index, LANES * width // 8), width)
                    place = _at(builder, target, k_loop.index, 4 * LANES)
                    builder.store(values, _pointer(builder, place, WIDE), align=64)
        end = _at(builder, target, group_size, 4 * LANES)
        is_half = builder.icmp_signed("!=", half, I64(0))
        for index, address in enumerate((scale, minimum)):
            values = _load_scales(builder, address, is_half, 4)
            builder.store(values, _pointer(builder, end, WIDE, index * 4 * LANES), align=64)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), codegen


@intrinsic
def group_sum(typingctx: Any, x: Any, group_size: Any) -> Any:
    """The float32 sum of group_size (a multiple of 16) floats at x, in the order that `linear.py` states."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        x, group_size = args
        vector = ir.VectorType(F32, 16)
        partial = cgutils.alloca_once(builder, vector)
        builder.store(builder.load(_pointer(builder, x, vector), align=4), partial)
        with cgutils.for_range(builder, builder.sub(builder.sdiv(group_size, I64(16)), I64(1))) as loop:
            place = _at(builder, builder.add(x, I64(64)), loop.index, 64)
            values = builder.load(_pointer(builder, place, vector), align=4)
            builder.store(builder.fadd(builder.load(partial), values), partial)
        lanes = builder.load(partial)
        for count in (8, 4, 2, 1):
            low, high = (
                builder.shuffle_vector(
                    lanes, lanes, ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
                )
                for first in (0, count)
            )
            lanes = builder.fadd(low, high)
        return builder.extract_element(lanes, I32(0))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def zero_totals(typingctx: Any, totals: Any, rows: Any) -> Any:
    """Set float32 [rows, 64] at totals to zero."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        with cgutils.for_range(builder, args[1]) as loop:
            place = _pointer(builder, _at(builder, args[0], loop.index, 4 * LANES), WIDE)
            builder.store(ir.Constant(WIDE, [0.0] * LANES), place, align=64)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def silu_times(typingctx: Any, gate: Any, up: Any) -> Any:
    """gate[j] = gate[j] / (1 + e^-gate[j]) * up[j] for the 64 float32 at each address."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        place = _pointer(builder, args[0], WIDE)
        gate = builder.load(place, align=64)
        up = builder.load(_pointer(builder, args[1], WIDE), align=64)
        one = ir.Constant(WIDE, [1.0] * LANES)
        silu = builder.fdiv(gate, builder.fadd(one, emit_exp(builder, builder.fneg(gate))))
        builder.store(builder.fmul(silu, up), place, align=64)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _at(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stride: ir.Value | int) -> ir.Value:
    """address + index * stride."""
    return builder.add(address, builder.mul(index, I64(stride) if isinstance(stride, int) else stride))


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type, offset: int = 0) -> ir.Value:
    return builder.inttoptr(builder.add(address, I64(offset)), pointee.as_pointer())


def _load_splat(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return splat(builder, builder.load(_pointer(builder, address, F32), align=4), LANES)


def _load_weights(builder: ir.IRBuilder, address: ir.Value, bits: int) -> ir.Value:
    """The 64 channels' weights of one k, as floats."""
    if bits == FLOAT_BITS:
        return builder.load(_pointer(builder, address, WIDE), align=64)
    count = LANES * bits // 8
    packed = builder.load(_pointer(builder, address, ir.VectorType(I8, count)), align=count)
    integers = builder.zext(packed, ir.VectorType(I32, count))
    if bits == 4:
        low = builder.and_(integers, splat(builder, I32(15), count))
        high = builder.lshr(integers, splat(builder, I32(4), count))
        order = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
        integers = builder.shuffle_vector(low, high, order)
    # Signed: the integers are small, and fewer machines convert unsigned ones.
    return builder.sitofp(integers, WIDE)


def _load_scales(builder: ir.IRBuilder, address: ir.Value, is_half: ir.Value, bits: int) -> ir.Value:
    """64 scales or minimums as floats. Those of an unpacked group are float32."""
    if bits == FLOAT_BITS:
        return builder.load(_pointer(builder, address, WIDE), align=64)
    result = cgutils.alloca_once(builder, WIDE)
    with builder.if_else(is_half) as (half, single):
        with half:
            values = builder.load(_pointer(builder, address, ir.VectorType(F16, LANES)), align=64)
            builder.store(builder.fpext(values, WIDE), result)
        with single:
            builder.store(builder.load(_pointer(builder, address, WIDE), align=64), result)
    return builder.load(result)
