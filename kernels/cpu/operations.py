"""The entries of the ops on float arrays: each turns a record's words into arrays and calls the op for a thread."""

from __future__ import annotations

import numpy as np
from numba import carray

from shardline.kernels.cpu import attention, rms_norm, rope, soft_cap
from shardline.kernels.cpu.intrinsics import float64_of_bits, pointer
from shardline.kernels.cpu.jit import jit, operation


@operation
def rms_norm_operation(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: x, weight, eps (float64 bits), out, K, rows."""
    words = carray(pointer(record), (6,), np.int64)
    x, weight, out = _rms_norm_arrays(words)
    rms_norm.rms_norm(share, num_shares, x, weight, float64_of_bits(words[2]), out, words[5])


@operation
def add_rms_norm_operation(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words as of `rms_norm_operation`."""
    words = carray(pointer(record), (6,), np.int64)
    x, weight, out = _rms_norm_arrays(words)
    rms_norm.add_rms_norm(share, num_shares, x, weight, float64_of_bits(words[2]), out, words[5])


@jit
def _rms_norm_arrays(words):
    size, rows = words[4], words[5]
    x = carray(pointer(words[0]), (rows, size), np.float32)
    weight = carray(pointer(words[1]), (size,), np.float32)
    out = carray(pointer(words[3]), (rows, size), np.float32)
    return x, weight, out


@operation
def soft_cap_operation(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: x, its elements, cap (float64 bits)."""
    words = carray(pointer(record), (3,), np.int64)
    flat = carray(pointer(words[0]), (words[1],), np.float32)
    soft_cap.soft_cap(share, num_shares, flat, float64_of_bits(words[2]))


@jit
def _rope_kv_write(share, num_shares, record, dtype):
    words = carray(pointer(record), (23,), np.int64)
    columns, rows = words[1], words[2]
    max_positions, half_rotary = words[7], words[8]
    blocks, kv_heads, block_size, dim, value_stride = words[12], words[13], words[14], words[15], words[16]
    qkv = carray(pointer(words[0]), (rows, columns), np.float32)
    positions = carray(pointer(words[3]), (rows,), np.int32)
    slots = carray(pointer(words[4]), (rows,), np.int32)
    cos = carray(pointer(words[5]), (max_positions, half_rotary), np.float32)
    sin = carray(pointer(words[6]), (max_positions, half_rotary), np.float32)
    keys = carray(pointer(words[10]), (blocks, kv_heads, block_size // rope.OCTET, dim, rope.OCTET), dtype)
    values = carray(pointer(words[11]), (blocks, kv_heads, block_size, value_stride), dtype)
    key_scales = carray(pointer(words[17]), (blocks, kv_heads, block_size), np.uint16)
    value_scales = carray(pointer(words[18]), (blocks, kv_heads, block_size), np.uint16)
    q_norm = carray(pointer(words[19]), (words[21],), np.float32)
    k_norm = carray(pointer(words[20]), (kv_heads * dim if words[21] > dim else words[21],), np.float32)
    rope.rope_kv_write(
        share,
        num_shares,
        qkv,
        positions,
        slots,
        cos,
        sin,
        words[9] != 0,
        keys,
        values,
        key_scales,
        value_scales,
        q_norm,
        k_norm,
        float64_of_bits(words[22]),
        rows,
    )


@operation
def rope_kv_write_float32(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: qkv, its columns, rows, positions, slots, cos, sin, max positions, R / 2, interleaved, keys, values,
    blocks, Hkv, block size, D, value stride, key scales, value scales, q_norm, k_norm, q_norm's length (0: none), eps
    (float64 bits)."""
    _rope_kv_write(share, num_shares, record, np.float32)


@operation
def rope_kv_write_float16(worker: int, share: int, num_shares: int, record: int) -> None:
    """As `rope_kv_write_float32`; the pool holds float16 bits."""
    _rope_kv_write(share, num_shares, record, np.uint16)


@operation
def rope_kv_write_int8(worker: int, share: int, num_shares: int, record: int) -> None:
    """As `rope_kv_write_float32`; the pool holds integers and has scales."""
    _rope_kv_write(share, num_shares, record, np.int8)


@jit
def _paged_attention(worker, share, num_shares, record, dtype):
    words = carray(pointer(record), (24,), np.int64)
    columns, rows = words[1], words[2]
    blocks, kv_heads, block_size, dim, value_stride = words[10], words[11], words[12], words[13], words[14]
    qkv = carray(pointer(words[0]), (rows, columns), np.float32)
    positions = carray(pointer(words[3]), (rows,), np.int32)
    sequences = carray(pointer(words[4]), (rows,), np.int32)
    block_tables = carray(pointer(words[5]), (words[6], words[7]), np.int32)
    keys = carray(pointer(words[8]), (blocks, kv_heads, block_size // rope.OCTET, dim, rope.OCTET), dtype)
    values = carray(pointer(words[9]), (blocks, kv_heads, block_size, value_stride), dtype)
    key_scales = carray(pointer(words[15]), (blocks, kv_heads, block_size), np.uint16)
    value_scales = carray(pointer(words[16]), (blocks, kv_heads, block_size), np.uint16)
    out = carray(pointer(words[18]), (rows, columns - 2 * kv_heads * dim), np.float32)
    # The scratch belongs to the thread, whichever share it does.
    scratch = carray(pointer(words[19] + (worker - share) * words[20]), (num_shares, words[20]), np.uint8)
    # Without sinks the address is 0.
    sinks = carray(pointer(words[23]), ((out.shape[1] // dim if words[23] else 0),), np.float32)
    attention.paged_attention(
        share,
        num_shares,
        qkv,
        positions,
        sequences,
        block_tables,
        keys,
        values,
        key_scales,
        value_scales,
        float64_of_bits(words[17]),
        words[21],
        float64_of_bits(words[22]),
        sinks,
        out,
        scratch,
        rows,
    )


@operation
def paged_attention_float32(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: qkv, its columns, rows, positions, sequences, block_tables, their rows, their columns, keys, values,
    blocks, Hkv, block size, D, value stride, key scales, value scales, scale (float64 bits), out, scratch, scratch
    bytes a thread, window, softcap (float64 bits), sinks (0: none)."""
    _paged_attention(worker, share, num_shares, record, np.float32)


@operation
def paged_attention_float16(worker: int, share: int, num_shares: int, record: int) -> None:
    """As `paged_attention_float32`; the pool holds float16 bits."""
    _paged_attention(worker, share, num_shares, record, np.uint16)


@operation
def paged_attention_int8(worker: int, share: int, num_shares: int, record: int) -> None:
    """As `paged_attention_float32`; the pool holds integers and has scales."""
    _paged_attention(worker, share, num_shares, record, np.int8)


ROPE_KV_WRITE = {"float32": rope_kv_write_float32, "float16": rope_kv_write_float16, "int8": rope_kv_write_int8}
PAGED_ATTENTION = {"float32": paged_attention_float32, "float16": paged_attention_float16, "int8": paged_attention_int8}
"""By `KVLayout.dtype`."""
