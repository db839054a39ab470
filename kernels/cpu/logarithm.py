"""The natural logarithm of float64, as operations of our own: a library's differs from machine to machine, and a loop
over it may take a vector routine for most elements and a scalar one, with other bits, for the rest.
"""

from __future__ import annotations

from shardline.kernels.cpu.intrinsics import bits_of_float64, float64_of_bits, fma_f64
from shardline.kernels.cpu.jit import jit

# ln 2 as two floats, the first with so few bits that its product with any exponent is exact.
_LN2_HIGH = 0.6931471803691238
_LN2_LOW = 1.9082149292705877e-10
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_FRACTION = 0x000FFFFFFFFFFFFF
# 2^52 + 2^51: its lowest bits hold the integer that is added to it.
_SHIFTER = 6755399441055744.0
_SHIFTER_BITS = 0x4338000000000000


@jit
def log_f64(x):
    """ln x of a finite, normal, positive float64, within 2 ulp; exactly 0 at 1. Branchless, so that loops vectorise."""
    # x = 2^e * m with m from sqrt(1/2) up to sqrt(2); then s = (m - 1) / (m + 1) and ln m = 2 atanh(s), |s| < 0.172.
    offset = bits_of_float64(x) - _SQRT_HALF_BITS
    exponent = offset >> 52
    m = float64_of_bits((offset & _FRACTION) + _SQRT_HALF_BITS)
    e = float64_of_bits(exponent + _SHIFTER_BITS) - _SHIFTER
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 2.0 / 21.0
    p = fma_f64(p, z, 2.0 / 19.0)
    p = fma_f64(p, z, 2.0 / 17.0)
    p = fma_f64(p, z, 2.0 / 15.0)
    p = fma_f64(p, z, 2.0 / 13.0)
    p = fma_f64(p, z, 2.0 / 11.0)
    p = fma_f64(p, z, 2.0 / 9.0)
    p = fma_f64(p, z, 2.0 / 7.0)
    p = fma_f64(p, z, 2.0 / 5.0)
    p = fma_f64(p, z, 2.0 / 3.0)
    small = fma_f64(s * z, p, e * _LN2_LOW)
    return fma_f64(e, _LN2_HIGH, fma_f64(2.0, s, small))
