"""Explicit vectors for numba kernels: sixteen float32 lanes as one value, with fused multiply-adds that are meant.

LLVM's loop vectoriser decides per loop whether it vectorises, and keeps accumulators in memory when a loop nest is not
to its taste. Kernels that live from registers (attention) say what they want here instead: `simd.load`, `simd.fma`, ...
All of it is elementwise and exactly rounded, so the bits are the same on every instruction set: LLVM splits sixteen
lanes into what the machine has.

Functions take arrays with an element offset into their flat memory (C order); nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from shardline.kernels.cpu.intrinsics import F16, F32, I8, I32, I64, emit_exp, emit_fma, splat

LANES = 16


class Float32x16(types.Type):
    """Sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(F32, LANES))


def _elements(context: Any, builder: ir.IRBuilder, array_type: Any, array: ir.Value, offset: ir.Value) -> ir.Value:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def _load(builder: ir.IRBuilder, dtype: Any, pointer: ir.Value, lanes: int) -> ir.Value:
    """`lanes` elements as float32; uint16 holds float16."""
    stored, align = {types.uint16: (F16, 2), types.int8: (I8, 1)}.get(dtype, (F32, 4))
    vector, wanted = ir.VectorType(stored, lanes), ir.VectorType(F32, lanes)
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=align)
    if stored is F32:
        return loaded
    return builder.sitofp(loaded, wanted) if stored is I8 else builder.fpext(loaded, wanted)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Lanewise a * b + c with one rounding."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return emit_fma(builder, *args)

    return float32x16(float32x16, float32x16, float32x16), codegen


@intrinsic
def broadcast(typingctx: Any, value: Any) -> Any:
    """Sixteen times one float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return splat(builder, args[0], LANES)

    return float32x16(types.float32), codegen


@intrinsic
def load(typingctx: Any, array: Any, offset: Any) -> Any:
    """Sixteen elements from `offset` on, as float32; a uint16 array holds float16, an int8 array integers."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _load(builder, array.dtype, _elements(context, builder, array, args[0], args[1]), LANES)

    return float32x16(array, types.int64), codegen


@intrinsic
def load_halves(typingctx: Any, array: Any, low: Any, high: Any) -> Any:
    """Lanes 0-7 from offset `low` on and lanes 8-15 from `high` on; elements as `load` has them."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        halves = [
            _load(builder, array.dtype, _elements(context, builder, array, args[0], offset), LANES // 2)
            for offset in args[1:]
        ]
        return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, LANES), list(range(LANES))))

    return float32x16(array, types.int64, types.int64), codegen


@intrinsic
def store(typingctx: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write sixteen float32 from `offset` on."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = _elements(context, builder, array, args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, args[2].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, float32x16), codegen


def _binary(emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value], doc: str) -> Any:
    def typed(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return emit(builder, args[0], args[1])

        return float32x16(float32x16, float32x16), codegen

    typed.__doc__ = doc
    return intrinsic(typed)


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


add = _binary(lambda builder, a, b: builder.fadd(a, b), "Lanewise a + b.")
sub = _binary(lambda builder, a, b: builder.fsub(a, b), "Lanewise a - b.")
mul = _binary(lambda builder, a, b: builder.fmul(a, b), "Lanewise a * b.")
larger = _binary(_larger, "Lanewise a if a > b else b: a NaN in `a` gives b.")
smaller = _binary(_smaller, "Lanewise a if a < b else b: a NaN in `a` gives b.")


@intrinsic
def first_lanes(typingctx: Any, value: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of `value`, and the float32 `other` in the rest, whatever those held."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
        keep = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(args[1], I32), LANES))
        return builder.select(keep, args[0], splat(builder, args[2], LANES))

    return float32x16(float32x16, types.int64, types.float32), codegen


def _fold(emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value], doc: str) -> Any:
    """A horizontal reduction whose tree is fixed: the upper half onto the lower half, until one lane is left."""

    def typed(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            (vector,) = args
            width = LANES
            while width > 1:
                width //= 2
                low, high = (
                    builder.shuffle_vector(
                        vector,
                        ir.Constant(vector.type, ir.Undefined),
                        ir.Constant(ir.VectorType(I32, width), list(range(start, start + width))),
                    )
                    for start in (0, width)
                )
                vector = emit(builder, low, high)
            return builder.extract_element(vector, I32(0))

        return types.float32(float32x16), codegen

    typed.__doc__ = doc
    return intrinsic(typed)


fold_add = _fold(lambda builder, a, b: builder.fadd(a, b), "The sum of the lanes, in a fixed order.")
fold_larger = _fold(_larger, "The largest lane.")


@intrinsic
def exp(typingctx: Any, x: Any) -> Any:
    """e to each lane: the same bits as `exp_f32`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return emit_exp(builder, args[0])

    return float32x16(float32x16), codegen


def _tuple(value_type: Any, count: Any) -> Any:
    return types.UniTuple(value_type, count.literal_value)


@intrinsic(prefer_literal=True)
def zeros(typingctx: Any, count: Any) -> Any:
    """A tuple of `count` (a constant) vectors of zeros."""
    result = _tuple(float32x16, count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        zero = ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES)
        return context.make_tuple(builder, result, [zero] * result.count)

    return result(count), codegen


@intrinsic(prefer_literal=True)
def scalars(typingctx: Any, array: Any, offset: Any, stride: Any, count: Any) -> Any:
    """A tuple of `count` (a constant) elements of a float32 array, `stride` apart."""
    result = _tuple(types.float32, count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = _elements(context, builder, array, args[0], args[1])
        values = []
        for _ in range(result.count):
            values.append(builder.load(pointer))
            pointer = builder.gep(pointer, [args[2]])
        return context.make_tuple(builder, result, values)

    return result(array, types.int64, types.int64, count), codegen


@intrinsic(prefer_literal=True)
def vectors(typingctx: Any, array: Any, offset: Any, count: Any) -> Any:
    """A tuple of `count` (a constant) vectors that follow each other, as `load` gives them."""
    result = _tuple(float32x16, count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = _elements(context, builder, array, args[0], args[1])
        values = [
            _load(builder, array.dtype, builder.gep(pointer, [I64(LANES * i)]), LANES) for i in range(result.count)
        ]
        return context.make_tuple(builder, result, values)

    return result(array, types.int64, count), codegen


@intrinsic(prefer_literal=True)
def load_rows(typingctx: Any, array: Any, offset: Any, stride: Any, rows: Any, columns: Any) -> Any:
    """A tuple of rows * columns (constants) vectors of a float32 array: the rows start `stride` apart."""
    count = rows.literal_value * columns.literal_value
    result = types.UniTuple(float32x16, count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = _elements(context, builder, array, args[0], args[1])
        values = []
        for _ in range(rows.literal_value):
            values += [
                _load(builder, array.dtype, builder.gep(pointer, [I64(LANES * i)]), LANES)
                for i in range(columns.literal_value)
            ]
            pointer = builder.gep(pointer, [args[2]])
        return context.make_tuple(builder, result, values)

    return result(array, types.int64, types.int64, rows, columns), codegen


@intrinsic(prefer_literal=True)
def store_rows(typingctx: Any, array: Any, offset: Any, stride: Any, values: Any, columns: Any) -> Any:
    """Write what `load_rows` gives, each row of `columns` (a constant) vectors `stride` from the one before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = _elements(context, builder, array, args[0], args[1])
        vectors = cgutils.unpack_tuple(builder, args[3], values.count)
        for start in range(0, values.count, columns.literal_value):
            for i, vector in enumerate(vectors[start : start + columns.literal_value]):
                target = builder.gep(pointer, [I64(LANES * i)])
                builder.store(vector, builder.bitcast(target, vector.type.as_pointer()), align=4)
            pointer = builder.gep(pointer, [args[2]])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, values, columns), codegen


@intrinsic
def outer_fma(typingctx: Any, accumulators: Any, column: Any, row: Any) -> Any:
    """accumulators[i * len(row) + j] + column[i] * row[j], each one fma: tuples of vectors, float32s and vectors."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        sums = cgutils.unpack_tuple(builder, args[0], accumulators.count)
        factors = cgutils.unpack_tuple(builder, args[1], column.count)
        vectors = cgutils.unpack_tuple(builder, args[2], row.count)
        values = []
        for i, factor in enumerate(factors):
            wide = splat(builder, factor, LANES)
            values += [emit_fma(builder, wide, vector, sums[i * row.count + j]) for j, vector in enumerate(vectors)]
        return context.make_tuple(builder, accumulators, values)

    assert accumulators.count == column.count * row.count
    return accumulators(accumulators, column, row), codegen
