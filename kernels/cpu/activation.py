"""What joins a gate g and an up u: each of the activations of `Activation`, on the 64 channels of a block.

Error bounds, as a share of the true value, wherever that and e^|argument| are normal numbers: silu 3 ulp, gelu_tanh and
clamped_swiglu 4 ulp. The exponential's argument is a product, whose rounding error would grow with it; so it is
computed as a sum of two floats, of which the second one corrects the result.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shardline.kernels.cpu.intrinsics import F32, I64, constant_like, emit_exp, emit_fma, emit_pointer
from shardline.kernels.cpu.resident import LANES
from shardline.kernels.experts import Activation

CODES: Final[dict[Activation, int]] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
"""How a record names an activation."""

_VECTOR = ir.VectorType(F32, 16)
_LIMIT = 7.0  # of clamped_swiglu
_SLOPE = 1.702
# 2 sqrt(2 / pi), and that times the cubic term's factor: gelu(g) = g * sigmoid(g * (linear + cubic * g^2)).
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


@intrinsic
def activate(typingctx: Any, activation: Any, gate: Any, up: Any) -> Any:
    """gate[j] = what the activation makes of gate[j] and up[j], for the 64 float32 at each address."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        activation, gate, up = args
        for name, code in CODES.items():
            with builder.if_then(builder.icmp_signed("==", activation, I64(code))):
                for offset in range(0, 4 * LANES, 64):
                    place, source = (emit_pointer(builder, address, _VECTOR, offset) for address in (gate, up))
                    g, u = builder.load(place, align=4), builder.load(source, align=4)
                    builder.store(_EMIT[name](builder, g, u), place, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _emit_silu(builder: ir.IRBuilder, g: ir.Value, u: ir.Value) -> ir.Value:
    decay = emit_exp(builder, builder.fneg(g))
    return builder.fmul(_over_one_plus(builder, g, decay), u)


def _emit_gelu_tanh(builder: ir.IRBuilder, g: ir.Value, u: ir.Value) -> ir.Value:
    # Past 16 the sigmoid is 0 or 1, and the argument must not overflow.
    bounded = _clamp(builder, g, 16.0)
    square = builder.fmul(bounded, bounded)
    square_rest = emit_fma(builder, bounded, bounded, builder.fneg(square))
    linear, linear_rest = _two_floats(g, _LINEAR)
    cubic, cubic_rest = _two_floats(g, _CUBIC)
    # The polynomial and the rest of it: what rounding a product and a sum has cost, and the rests of the factors.
    product = builder.fmul(cubic, square)
    product_rest = emit_fma(builder, cubic, square, builder.fneg(product))
    slope = builder.fadd(linear, product)
    added = builder.fsub(slope, linear)
    rest = builder.fadd(builder.fsub(linear, builder.fsub(slope, added)), builder.fsub(product, added))
    for term in (product_rest, emit_fma(builder, cubic, square_rest, builder.fmul(cubic_rest, square)), linear_rest):
        rest = builder.fadd(rest, term)
    decay = _emit_decay(builder, bounded, slope, rest)
    return builder.fmul(_over_one_plus(builder, g, decay), u)


def _emit_clamped_swiglu(builder: ir.IRBuilder, g: ir.Value, u: ir.Value) -> ir.Value:
    limit = constant_like(g, _LIMIT)
    g = builder.select(builder.fcmp_ordered(">", g, limit), limit, g)
    u = _clamp(builder, u, _LIMIT)
    slope, rest = _two_floats(g, _SLOPE)
    decay = _emit_decay(builder, g, slope, rest)
    return builder.fmul(_over_one_plus(builder, g, decay), builder.fadd(u, constant_like(u, 1.0)))


_EMIT: Final = {"silu": _emit_silu, "gelu_tanh": _emit_gelu_tanh, "clamped_swiglu": _emit_clamped_swiglu}


def _over_one_plus(builder: ir.IRBuilder, g: ir.Value, decay: ir.Value) -> ir.Value:
    return builder.fdiv(g, builder.fadd(constant_like(g, 1.0), decay))


def _emit_decay(builder: ir.IRBuilder, g: ir.Value, slope: ir.Value, rest: ir.Value) -> ir.Value:
    """e^-(g * (slope + rest)), with `rest` small beside `slope`."""
    argument = builder.fmul(g, slope)
    correction = emit_fma(builder, g, rest, emit_fma(builder, g, slope, builder.fneg(argument)))
    decay = emit_exp(builder, builder.fneg(argument))
    corrected = emit_fma(builder, builder.fneg(correction), decay, decay)
    # An infinite decay has no correction, and must not become a NaN.
    return builder.select(builder.fcmp_ordered("==", decay, constant_like(g, math.inf)), decay, corrected)


def _clamp(builder: ir.IRBuilder, x: ir.Value, bound: float) -> ir.Value:
    """x between -bound and bound; a NaN stays one."""
    high, low = constant_like(x, bound), constant_like(x, -bound)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    return builder.select(builder.fcmp_ordered("<", x, low), low, x)


def _two_floats(like: ir.Value, number: float) -> tuple[ir.Constant, ir.Constant]:
    """A constant as a float32 and what it lacks."""
    first = np.float32(number)
    return constant_like(like, float(first)), constant_like(like, float(np.float32(number - float(first))))
