"""Rotary embedding and the write of keys and values to the paged pool: (row, head) pairs over threads.

A pool holds, a layer, keys as [blocks, Hkv, block size / 8, D, 8] and values as [blocks, Hkv, block size, D']: eight
positions of a key channel lie together, so that attention's lanes are positions, and D' is D up to a whole vector.
float16 pools are uint16 arrays. An int8 pool has scales beside it, float16 bits [blocks, Hkv, block size] for keys and
for values; `KVLayout` says what they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from shardline.kernels.backend import KVLayout
from shardline.kernels.cpu.intrinsics import bits_of_float32, float32_of_bits, float_to_half, half_to_float
from shardline.kernels.cpu.jit import jit
from shardline.kernels.cpu.rms_norm import inverse_root_mean_square
from shardline.kernels.cpu.simd import LANES

OCTET = 8
"""Positions that lie together in a key channel; every block size is a multiple of it."""


def kv_shapes(layout: KVLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of one layer's keys and values; see the module's head."""
    blocks, heads, size, dim = layout.num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim
    assert size % OCTET == 0, f"a block of {size} tokens does not hold whole octets"
    padded = -(-dim // LANES) * LANES
    return (blocks, heads, size // OCTET, dim, OCTET), (blocks, heads, size, padded)


def kv_dtype(layout: KVLayout) -> np.dtype[Any]:
    """What an element is stored in: numba has no float16 on the CPU, so its bits are kept as uint16."""
    return np.dtype({"float32": np.float32, "float16": np.uint16, "int8": np.int8}[layout.dtype])


def scale_shape(layout: KVLayout) -> tuple[int, ...]:
    """The shape of one layer's scales of keys, or of values: uint16 that hold float16; empty if there are none."""
    blocks = layout.num_blocks if layout.dtype == "int8" else 0
    return blocks, layout.num_kv_heads, layout.block_size


_LARGEST_SCALE = np.uint16(0x6000)  # 512
_NAN_SCALE = np.uint16(0x7E00)
_INFINITE = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
# Adding 1.5 * 2^23 rounds to the nearest integer.
_SHIFTER = np.float32(12582912.0)
_MOST = np.float32(127.0)


@jit
def head_scale(flat, start, dim):
    """The scale (uint16: float16 bits) of the `dim` numbers from `start` on; see `KVLayout`."""
    # As integers magnitudes ascend alike, and a NaN is the largest: so the order in which they are compared is free.
    largest = np.uint32(0)
    for d in range(dim):
        largest = max(largest, bits_of_float32(flat[start + d]) & _MAGNITUDE)
    if largest >= _INFINITE:
        return _NAN_SCALE
    magnitude = float32_of_bits(largest)
    scale = float_to_half(magnitude / _MOST)
    if half_to_float(scale) * _MOST < magnitude:
        scale = np.uint16(scale + np.uint16(1))
    return min(scale, _LARGEST_SCALE)


def _put_head(array, scales, target, stride, scale_at, flat, start, dim):
    raise NotImplementedError  # a name for numba, which compiles the overload below in its place


@overload(_put_head)
def _put_head_overload(array, scales, target, stride, scale_at, flat, start, dim):
    """Store the head at flat[start : start + dim] from `target` on, its elements `stride` apart."""
    if array.dtype == types.int8:

        def put(array, scales, target, stride, scale_at, flat, start, dim):
            bits = head_scale(flat, start, dim)
            scales[scale_at] = bits
            scale = half_to_float(bits)
            # Not so for a NaN.
            if scale > np.float32(0.0):
                for d in range(dim):
                    q = min(max(flat[start + d] / scale, -_MOST), _MOST)
                    array[target + d * stride] = np.int8((q + _SHIFTER) - _SHIFTER)
            else:
                for d in range(dim):
                    array[target + d * stride] = np.int8(0)

    elif array.dtype == types.uint16:

        def put(array, scales, target, stride, scale_at, flat, start, dim):
            for d in range(dim):
                array[target + d * stride] = float_to_half(flat[start + d])
    else:

        def put(array, scales, target, stride, scale_at, flat, start, dim):
            for d in range(dim):
                array[target + d * stride] = flat[start + d]

    return put


@jit
def rope_kv_write(
    thread,
    num_threads,
    qkv,
    positions,
    slots,
    cos,
    sin,
    interleaved,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    q_norm,
    k_norm,
    eps,
    rows,
):
    """Normalise (if `q_norm` and `k_norm` are not empty) and turn queries and keys of qkv in place; write the cache.

    qkv float32 [>= rows, (Hq + 2 Hkv) * D]; positions, slots int32; cos, sin float32 [max positions, R / 2]; k_cache
    and v_cache one layer's, float32, uint16 or int8, and k_scales and v_scales int8's scales; q_norm, k_norm [D], or
    [Hq * D] and [Hkv * D]: one norm over all heads of a row.
    """
    kv_heads = k_cache.shape[1]
    dim = k_cache.shape[3]
    block_size = v_cache.shape[2]
    value_stride = v_cache.shape[3]
    heads = qkv.shape[1] // dim
    query_heads = heads - 2 * kv_heads
    half = cos.shape[1]
    eps = np.float32(eps)
    flat = qkv.reshape(qkv.size)
    keys = k_cache.reshape(k_cache.size)
    values = v_cache.reshape(v_cache.size)
    key_scales = k_scales.reshape(k_scales.size)
    value_scales = v_scales.reshape(v_scales.size)
    whole_row = q_norm.size > dim
    # A norm over all heads of a row reads what its first head is about to change: one thread does all of the row.
    grain = heads if whole_row else 1
    items = rows * heads // grain
    scale = np.float32(0.0)
    for item in range(items * thread // num_threads * grain, items * (thread + 1) // num_threads * grain):
        row = item // heads
        head = item - row * heads
        start = item * dim
        block = np.int64(slots[row]) // block_size
        offset = np.int64(slots[row]) - block * block_size
        if head >= query_heads + kv_heads:
            place = (block * kv_heads + head - query_heads - kv_heads) * block_size + offset
            _put_head(values, value_scales, place * value_stride, 1, place, flat, start, dim)
            continue
        norm = q_norm if head < query_heads else k_norm
        if norm.size:
            weight = 0
            if not whole_row:
                scale = inverse_root_mean_square(flat, start, dim, eps)
            elif head == 0 or head == query_heads:
                scale = inverse_root_mean_square(flat, start, norm.size, eps)
            if whole_row:
                weight = (head if head < query_heads else head - query_heads) * dim
            for d in range(dim):
                flat[start + d] = flat[start + d] * scale * norm[weight + d]
        position = np.int64(positions[row])
        for i in range(half):
            first = start + (2 * i if interleaved else i)
            second = first + (1 if interleaved else half)
            a = flat[first]
            b = flat[second]
            c = cos[position, i]
            s = sin[position, i]
            flat[first] = a * c - b * s
            flat[second] = a * s + b * c
        if head >= query_heads:
            octet = offset // OCTET
            first = (block * kv_heads + head - query_heads) * block_size + octet * OCTET
            place = first + offset - octet * OCTET
            _put_head(keys, key_scales, first * dim + offset - octet * OCTET, OCTET, place, flat, start, dim)
