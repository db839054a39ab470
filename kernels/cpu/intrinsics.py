"""Small pieces that Python cannot say to the compiler: fused multiply-add, bit casts, half floats, addresses.

Every float operation here is one IEEE operation, in the order written: the compiler may vectorise it, which changes no
bit, but has no licence to reassociate or to fuse.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()


def splat(builder: ir.IRBuilder, scalar: ir.Value, count: int) -> ir.Value:
    """A vector of `count` equal lanes."""
    vector = ir.VectorType(scalar.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, count), [0] * count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def constant_like(value: ir.Value, number: float) -> ir.Constant:
    """A constant of the value's type: a scalar, or a vector with that number in each lane."""
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(value.type, [number] * value.type.count)
    return ir.Constant(value.type, number)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c rounded once, of scalars or vectors (llvmlite's own `fma` takes scalars alone)."""
    kind = a.type
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    function_type = ir.FunctionType(kind, [kind] * 3)
    name = f"llvm.fma.{lanes}{'f32' if scalar == F32 else 'f64'}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [a, b, c])


def emit_address(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stride: int) -> ir.Value:
    """address + index * stride."""
    return builder.add(address, builder.mul(index, I64(stride)))


def emit_pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type, offset: int = 0) -> ir.Value:
    """The pointer to a value so many bytes behind an int64 address."""
    # Making machine code, LLVM may take an index for the pointer and the address for the offset. numba links that code
    # into callers and optimises it again; where the index is zero there, all of it would count as unreachable. Past
    # llvmlite's own check, which does not know the name.
    set.add(builder.function.attributes, "null_pointer_is_valid")
    return builder.inttoptr(builder.add(address, I64(offset)), pointee.as_pointer())


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for a cache line that will be read soon; one that does not exist does no harm."""
    function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
    read, keep, data = I32(0), I32(3), I32(1)
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), read, keep, data])


def emit_barrier(builder: ir.IRBuilder) -> None:
    """Let the compiler move no access to memory from here on to before; no instruction."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x of a float32 or a vector of them; see `exp_f32`."""
    float_type = x.type
    integer_type: ir.Type = I32
    if isinstance(float_type, ir.VectorType):
        integer_type = ir.VectorType(I32, float_type.count)

    def number(value: float) -> ir.Constant:
        return constant_like(x, value)

    def integer(value: int) -> ir.Constant:
        if isinstance(integer_type, ir.VectorType):
            return ir.Constant(integer_type, [value] * integer_type.count)
        return ir.Constant(integer_type, value)

    # Past these bounds the result is 0 or infinity anyway. A NaN takes the lower one here and is put back at the end.
    low, high = number(-104.0), number(89.0)
    bounded = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    bounded = builder.select(builder.fcmp_ordered("<", bounded, high), bounded, high)
    # Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
    shifter = number(12582912.0)
    shifted = emit_fma(builder, bounded, number(_as_f32(1.4426950408889634)), shifter)
    n = builder.fsub(shifted, shifter)
    # ln 2 as two floats: n times the first is exact.
    r = emit_fma(builder, n, number(-0.693145751953125), bounded)
    r = emit_fma(builder, n, number(_as_f32(-1.42860682030941723212e-6)), r)
    p = number(_as_f32(_EXP_COEFFICIENTS[-1]))
    for coefficient in reversed(_EXP_COEFFICIENTS[:-1]):
        p = emit_fma(builder, p, r, number(_as_f32(coefficient)))
    # 2^n in two factors, so that results below the smallest normal number come out right.
    whole = builder.sub(builder.bitcast(shifted, integer_type), integer(0x4B400000))
    half = builder.ashr(whole, integer(1))
    for part in (half, builder.sub(whole, half)):
        bits = builder.shl(builder.add(part, integer(127)), integer(23))
        p = builder.fmul(p, builder.bitcast(bits, float_type))
    return builder.select(builder.fcmp_unordered("uno", x, x), x, p)


# Minimax of e^r on [-ln 2 / 2, ln 2 / 2]; the first two are exactly 1, so that e^0 is.
_EXP_COEFFICIENTS = (
    1.0,
    1.0,
    0.5000000,
    0.16666666,
    0.041666646,
    0.0083333338,
    0.0013888889,
    0.00019841270,
)


def _as_f32(value: float) -> float:
    # LLVM refuses a float constant that float32 cannot hold exactly.
    return float(np.float32(value))


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c on float32, rounded once."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, sig, args: builder.fma(*args)


@intrinsic
def exp_f32(typingctx: Any, x: Any) -> Any:
    """e^x on float32 without branches, so that loops over it vectorise.

    Within 2 ulp of the true value; exactly 1 at 0; exactly 0 below -104; infinity above 88.8; NaN stays NaN.
    """
    return types.float32(types.float32), lambda context, builder, sig, args: emit_exp(builder, args[0])


@intrinsic
def half_to_float(typingctx: Any, bits: Any) -> Any:
    """The float32 equal to the float16 with these bits (uint16)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], F16), F32)

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_half(typingctx: Any, value: Any) -> Any:
    """The bits (uint16) of the float16 nearest to a float32, ties to even, infinity past the range."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], F16), I16)

    return types.uint16(types.float32), codegen


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An int64 address as the pointer that `numba.carray` takes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(emit_pointer(builder, args[0], I64), cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def float64_of_bits(typingctx: Any, bits: Any) -> Any:
    """The float64 with these bits (int64): how a record of int64 words carries a float."""
    return types.float64(types.int64), lambda context, builder, sig, args: builder.bitcast(args[0], ir.DoubleType())


@intrinsic
def call_operation(typingctx: Any, address: Any, worker: Any, share: Any, num_shares: Any, record: Any) -> Any:
    """Call the `Operation` at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [I64] * 4)
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@intrinsic
def bits_of_float64(typingctx: Any, value: Any) -> Any:
    """The bits (int64) of a float64."""
    return types.int64(types.float64), lambda context, builder, sig, args: builder.bitcast(args[0], I64)


@intrinsic
def bits_of_float32(typingctx: Any, value: Any) -> Any:
    """The bits (uint32) of a float32."""
    return types.uint32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], I32)


@intrinsic
def float32_of_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 with these bits (uint32)."""
    return types.float32(types.uint32), lambda context, builder, sig, args: builder.bitcast(args[0], F32)


@intrinsic
def fma_f64(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c on float64, rounded once."""
    signature = types.float64(types.float64, types.float64, types.float64)
    return signature, lambda context, builder, sig, args: builder.fma(*args)


_MACHINE = "x86" if platform.machine().lower() in ("x86_64", "amd64") else platform.machine().lower()

IEEE_MODE = 0x1F80 if _MACHINE == "x86" else 0
"""The float mode of the standard: to nearest even, subnormal numbers kept, no traps."""


@intrinsic
def float_mode(typingctx: Any) -> Any:
    """The calling thread's rounding, flushing and trapping, as its processor has them (x86: MXCSR, ARM: FPCR)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _MACHINE == "x86":
            place = cgutils.alloca_once(builder, I32)
            function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
            store = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse.stmxcsr")
            builder.call(store, [builder.bitcast(place, cgutils.voidptr_t)])
            return builder.zext(builder.load(place), I64)
        if _MACHINE in ("aarch64", "arm64"):
            function_type = ir.FunctionType(I64, [])
            return builder.call(
                cgutils.get_or_insert_function(builder.module, function_type, "llvm.aarch64.get.fpcr"), []
            )
        return I64(IEEE_MODE)

    return types.int64(), codegen


@intrinsic
def set_float_mode(typingctx: Any, mode: Any) -> Any:
    """Take over what `float_mode` gave."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _MACHINE == "x86":
            place = cgutils.alloca_once_value(builder, builder.trunc(args[0], I32))
            function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
            load = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse.ldmxcsr")
            builder.call(load, [builder.bitcast(place, cgutils.voidptr_t)])
        elif _MACHINE in ("aarch64", "arm64"):
            function_type = ir.FunctionType(ir.VoidType(), [I64])
            builder.call(
                cgutils.get_or_insert_function(builder.module, function_type, "llvm.aarch64.set.fpcr"), [args[0]]
            )
        return context.get_dummy_value()

    return types.void(types.int64), codegen
