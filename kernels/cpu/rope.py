"""Rotary embedding and the write of keys and values to the paged pool: (row, head) pairs over threads.

A pool holds, a layer, keys as [blocks, Hkv, block size / 8, D, 8] and values as [blocks, Hkv, block size, D']: eight
positions of a key channel lie together, so that attention's lanes are positions, and D' is D up to a whole vector.
float16 pools are uint16 arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from shardline.kernels.backend import KVLayout
from shardline.kernels.cpu.intrinsics import float_to_half
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
    return np.dtype({"float32": np.float32, "float16": np.uint16}[layout.dtype])


def _put(array, index, value):
    raise NotImplementedError  # a name for numba, which compiles the overload below in its place


@overload(_put)
def _put_overload(array, index, value):
    if array.dtype == types.uint16:

        def put(array, index, value):
            array[index] = float_to_half(value)
    else:

        def put(array, index, value):
            array[index] = value

    return put


@jit
def rope_kv_write(
    thread, num_threads, qkv, positions, slots, cos, sin, interleaved, k_cache, v_cache, q_norm, k_norm, eps, rows
):
    """Normalise (if `q_norm` and `k_norm` are not empty) and turn queries and keys of qkv in place; write the cache.

    qkv float32 [>= rows, (Hq + 2 Hkv) * D]; positions, slots int32; cos, sin float32 [max positions, R / 2]; k_cache
    and v_cache one layer's, float32 or uint16; q_norm, k_norm [D], or [Hq * D] and [Hkv * D]: one norm over all heads
    of a row.
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
            target = ((block * kv_heads + head - query_heads - kv_heads) * block_size + offset) * value_stride
            for d in range(dim):
                _put(values, target + d, flat[start + d])
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
            target = ((block * kv_heads + head - query_heads) * (block_size // OCTET) + octet) * dim * OCTET
            target += offset - octet * OCTET
            for d in range(dim):
                _put(keys, target + d * OCTET, flat[start + d])
