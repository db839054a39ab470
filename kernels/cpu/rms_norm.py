"""RMSNorm: rows over threads; the sum of squares in 64 lanes by channel, folded in a fixed order."""

from __future__ import annotations

import math

import numpy as np

from shardline.kernels.cpu import simd
from shardline.kernels.cpu.intrinsics import fma
from shardline.kernels.cpu.jit import jit
from shardline.kernels.cpu.simd import LANES

_ZERO = np.float32(0.0)


@jit
def sum_of_squares(flat, offset, length):
    """Sum of flat[offset : offset + length]^2 as float32; the order depends on `length` alone."""
    a = simd.broadcast(_ZERO)
    b = simd.broadcast(_ZERO)
    c = simd.broadcast(_ZERO)
    d = simd.broadcast(_ZERO)
    k = 0
    while k + 4 * LANES <= length:
        v = simd.load(flat, offset + k)
        a = simd.fma(v, v, a)
        v = simd.load(flat, offset + k + LANES)
        b = simd.fma(v, v, b)
        v = simd.load(flat, offset + k + 2 * LANES)
        c = simd.fma(v, v, c)
        v = simd.load(flat, offset + k + 3 * LANES)
        d = simd.fma(v, v, d)
        k += 4 * LANES
    while k + LANES <= length:
        v = simd.load(flat, offset + k)
        a = simd.fma(v, v, a)
        k += LANES
    total = simd.fold_add(simd.add(simd.add(a, b), simd.add(c, d)))
    while k < length:
        v = flat[offset + k]
        total = fma(v, v, total)
        k += 1
    return total


@jit
def inverse_root_mean_square(flat, offset, length, eps):
    """1 / sqrt(mean(flat[offset : offset + length]^2) + eps); eps float32."""
    mean = sum_of_squares(flat, offset, length) / np.float32(length)
    return np.float32(1.0) / np.float32(math.sqrt(np.float32(mean + eps)))


@jit
def rms_norm(thread, num_threads, x, weight, eps, out, rows):
    """out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight for r < rows. x, out float32 [>= rows, K]; weight [K]."""
    size = x.shape[1]
    flat = x.reshape(x.size)
    for row in range(rows * thread // num_threads, rows * (thread + 1) // num_threads):
        scale = inverse_root_mean_square(flat, row * size, size, np.float32(eps))
        for k in range(size):
            out[row, k] = x[row, k] * scale * weight[k]


@jit
def add_rms_norm(thread, num_threads, x, weight, eps, out, rows):
    """As `rms_norm`, added to out."""
    size = x.shape[1]
    flat = x.reshape(x.size)
    for row in range(rows * thread // num_threads, rows * (thread + 1) // num_threads):
        scale = inverse_root_mean_square(flat, row * size, size, np.float32(eps))
        for k in range(size):
            out[row, k] += x[row, k] * scale * weight[k]
