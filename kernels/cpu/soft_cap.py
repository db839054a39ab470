"""cap * tanh(x / cap), elementwise, from operations of our own: a library's tanh differs from machine to machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shardline.kernels.cpu import simd
from shardline.kernels.cpu.intrinsics import I32, constant_like, emit_exp, emit_fma
from shardline.kernels.cpu.jit import jit
from shardline.kernels.cpu.simd import LANES, float32x16

_SMALL = 0.625
# Minimax of (tanh(x) / x - 1) / x^2 in x^2, for |x| < _SMALL.
_COEFFICIENTS = tuple(float(np.float32(c)) for c in (-0.33333281, 0.13331442, -0.053739715, 0.020639088, -0.0057049873))


def emit_tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """tanh of a float32 or a vector of them, within 2 ulp; a NaN stays one."""
    float_type = x.type
    integer_type: ir.Type = I32
    if isinstance(float_type, ir.VectorType):
        integer_type = ir.VectorType(I32, float_type.count)

    def masked(value: ir.Value, mask: int) -> ir.Value:
        lanes = [mask] * integer_type.count if isinstance(integer_type, ir.VectorType) else mask
        return builder.and_(builder.bitcast(value, integer_type), ir.Constant(integer_type, lanes))

    a = builder.bitcast(masked(x, 0x7FFFFFFF), float_type)
    z = builder.fmul(a, a)
    p = constant_like(x, _COEFFICIENTS[-1])
    for coefficient in reversed(_COEFFICIENTS[:-1]):
        p = emit_fma(builder, p, z, constant_like(x, coefficient))
    small = emit_fma(builder, builder.fmul(a, z), p, a)
    # 1 - 2 / (e^2a + 1): where tanh is large enough, its subtraction loses nothing.
    one = constant_like(x, 1.0)
    power = emit_exp(builder, builder.fadd(a, a))
    large = builder.fsub(one, builder.fdiv(constant_like(x, 2.0), builder.fadd(power, one)))
    result = builder.select(builder.fcmp_ordered("<", a, constant_like(x, _SMALL)), small, large)
    sign = masked(x, 0x80000000)
    return builder.bitcast(builder.or_(builder.bitcast(result, integer_type), sign), float_type)


def _emit_soft_cap(builder: ir.IRBuilder, x: ir.Value, cap: ir.Value) -> ir.Value:
    return builder.fmul(cap, emit_tanh(builder, builder.fdiv(x, cap)))


@intrinsic
def soft_cap_f32(typingctx: Any, x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap) of one float32."""
    signature = types.float32(types.float32, types.float32)
    return signature, lambda context, builder, sig, args: _emit_soft_cap(builder, *args)


@intrinsic
def soft_cap_x16(typingctx: Any, x: Any, cap: Any) -> Any:
    """The same of sixteen lanes with one cap each: the same bits."""
    signature = float32x16(float32x16, float32x16)
    return signature, lambda context, builder, sig, args: _emit_soft_cap(builder, *args)


@jit
def soft_cap(thread, num_threads, flat, cap):
    """flat[i] = cap * tanh(flat[i] / cap) in place; flat float32."""
    cap = np.float32(cap)
    caps = simd.broadcast(cap)
    i = flat.size * thread // num_threads
    end = flat.size * (thread + 1) // num_threads
    while i + LANES <= end:
        simd.store(flat, i, soft_cap_x16(simd.load(flat, i), caps))
        i += LANES
    while i < end:
        flat[i] = soft_cap_f32(flat[i], cap)
        i += 1
