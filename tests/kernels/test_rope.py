from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardline.kernels import Backend, KVLayout, RopeTable, Rows

MAX_POSITIONS = 5000
Quantize = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def table(backend: Backend, rotary: int, interleaved: bool) -> RopeTable:
    angle = np.arange(MAX_POSITIONS)[:, None] * 1e4 ** (-np.arange(rotary // 2) * 2 / max(rotary, 1))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return RopeTable(backend.upload(cos), backend.upload(sin), interleaved)


def reference(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """heads float64 [rows, heads, D]; cos, sin [rows, R / 2]."""
    half = cos.shape[1]
    first = np.arange(half) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)
    a, b = heads[..., first], heads[..., second]
    out = heads.copy()
    out[..., first] = a * cos[:, None] - b * sin[:, None]
    out[..., second] = a * sin[:, None] + b * cos[:, None]
    return out


def normalised(heads: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return heads / np.sqrt((heads * heads).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "dim", "rotary"),
    [
        (9, 3, 64, 64),
        (1, 1, 80, 80),
        (7, 1, 96, 32),
        (4, 4, 128, 64),
        (28, 4, 128, 128),
        (3, 3, 256, 256),
        (20, 1, 16, 16),
        (2, 1, 64, 0),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_equals_the_definition(
    cpu: Callable[[int], Backend],
    query_heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    interleaved: bool,
    norm: bool,
) -> None:
    rng = np.random.default_rng(dim + rotary)
    backend = cpu(2)
    rows = 11
    heads = query_heads + 2 * kv_heads
    qkv = rng.standard_normal((rows + 1, heads * dim)).astype(np.float32)
    layout = KVLayout(1, 9, 16, kv_heads, dim, "float32")
    positions = rng.permutation(MAX_POSITIONS)[:rows].astype(np.int32)
    slots = rng.permutation(9 * 16)[:rows].astype(np.int32)
    rope = table(backend, rotary, interleaved)
    weights = rng.standard_normal((2, dim)).astype(np.float32)
    given = {"q_norm": backend.upload(weights[0]), "k_norm": backend.upload(weights[1]), "eps": 1e-6} if norm else {}
    device = backend.upload(qkv)
    cache = backend.allocate_kv(layout)
    where = Rows(rows, backend.upload(positions), backend.upload(slots), None, None)
    backend.rope_kv_write(device, where, rope, cache, 0, **given)
    result = backend.read(device)

    np.testing.assert_array_equal(result[rows], qkv[rows], err_msg="a row past the last was changed")
    split = qkv[:rows].reshape(rows, heads, dim).astype(np.float64)
    turned = split[:, : query_heads + kv_heads]
    if norm:
        turned = np.concatenate(
            [
                normalised(turned[:, :query_heads], weights[0], 1e-6),
                normalised(turned[:, query_heads:], weights[1], 1e-6),
            ],
            axis=1,
        )
    cos, sin = backend.read(rope.cos)[positions], backend.read(rope.sin)[positions]
    expected = np.concatenate([reference(turned, cos, sin, interleaved), split[:, query_heads + kv_heads :]], axis=1)
    got = result[:rows].reshape(rows, heads, dim)
    # A few roundings of numbers up to about 5 (25 after the norm's weight).
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=4e-6)
    if not norm:
        np.testing.assert_array_equal(
            got[:, : query_heads + kv_heads, rotary:], turned[..., rotary:].astype(np.float32)
        )
    np.testing.assert_array_equal(got[:, query_heads + kv_heads :], split[:, query_heads + kv_heads :])


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "dim"), [(1, 1, 64), (9, 3, 64), (4, 1, 80), (7, 7, 96), (16, 16, 128), (2, 2, 256)]
)
@pytest.mark.parametrize("turned", [True, False])
def test_one_norm_over_all_heads_of_a_row_has_the_bits_of_rms_norm(
    cpu: Callable[[int], Backend], query_heads: int, kv_heads: int, dim: int, turned: bool
) -> None:
    rng = np.random.default_rng(dim)
    rows, queries, keys = 37, query_heads * dim, kv_heads * dim
    # So that heads differ in size: a norm a head would give something else.
    heads = rng.uniform(0.1, 10, (rows, query_heads + 2 * kv_heads, 1))
    qkv = (heads * rng.standard_normal((*heads.shape[:2], dim))).reshape(rows, -1).astype(np.float32)
    q_norm, k_norm = rng.standard_normal(queries).astype(np.float32), rng.standard_normal(keys).astype(np.float32)
    positions = rng.permutation(MAX_POSITIONS)[:rows].astype(np.int32)

    def run(threads: int, chosen: np.ndarray, whole: bool = True) -> np.ndarray:
        backend = cpu(threads)
        device = backend.upload(qkv[chosen])
        slots = backend.upload(np.arange(len(chosen), dtype=np.int32))
        where = Rows(len(chosen), backend.upload(positions[chosen]), slots, None, None)
        cache = backend.allocate_kv(KVLayout(1, 5, 8, kv_heads, dim, "float16"))
        given = {"q_norm": backend.upload(q_norm), "k_norm": backend.upload(k_norm), "eps": 1e-6} if whole else {}
        if not whole:
            for first, weight in ((0, q_norm), (queries, k_norm)):
                part = backend.upload(np.ascontiguousarray(qkv[chosen, first : first + len(weight)]))
                out = backend.empty(part.shape, "float32")
                backend.rms_norm(part, backend.upload(weight), 1e-6, out, len(chosen))
                device[:, first : first + len(weight)] = backend.read(out)
        backend.rope_kv_write(device, where, table(backend, dim, False) if turned else None, cache, 0, **given)
        return np.concatenate([backend.read(device).ravel(), backend.read(cache.keys).ravel()])

    every = np.arange(rows)
    expected = run(1, every, whole=False)
    for threads in (1, 2, 3):
        np.testing.assert_array_equal(run(threads, every), expected)
        for count in (1, 2, 3, 8, 36):
            chosen = rng.permutation(rows)[:count]
            np.testing.assert_array_equal(run(threads, chosen), run(1, chosen, whole=False))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_without_a_rope_nothing_turns(cpu: Callable[[int], Backend], dtype: str, norm: bool) -> None:
    rng = np.random.default_rng(1)
    rows, heads, dim = 11, 15, 80
    qkv = rng.standard_normal((rows, heads * dim)).astype(np.float32)
    weights = rng.standard_normal((2, dim)).astype(np.float32)

    def run(rope: bool) -> tuple[np.ndarray, ...]:
        backend = cpu(2)
        given = {"q_norm": backend.upload(weights[0]), "k_norm": backend.upload(weights[1]), "eps": 1e-6}
        device = backend.upload(qkv)
        cache = backend.allocate_kv(KVLayout(1, 9, 8, 3, dim, dtype))
        positions = backend.upload(rng.integers(0, MAX_POSITIONS, rows).astype(np.int32))
        where = Rows(rows, positions, backend.upload(np.arange(rows, dtype=np.int32) * 3), None, None)
        # A table of no channels turns none either.
        none = table(backend, 0, True) if rope else None
        backend.rope_kv_write(device, where, none, cache, 0, **(given if norm else {}))
        return tuple(backend.read(a) for a in (device, cache.keys, cache.values, cache.key_scales, cache.value_scales))

    for ours, expected in zip(run(False), run(True), strict=True):
        np.testing.assert_array_equal(ours, expected)
    result, keys, *_ = run(False)
    assert keys.any()
    if norm:
        split = qkv.reshape(rows, heads, dim).astype(np.float64)
        expected = np.concatenate(
            [normalised(split[:, :9], weights[0], 1e-6), normalised(split[:, 9:12], weights[1], 1e-6)], axis=1
        )
        np.testing.assert_allclose(result.reshape(rows, heads, dim)[:, :12], expected, rtol=1e-6, atol=4e-6)
    else:
        np.testing.assert_array_equal(result, qkv)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block_size", [8, 64])
def test_keys_and_values_lie_at_their_slots_and_nowhere_else(
    cpu: Callable[[int], Backend], dtype: str, block_size: int
) -> None:
    rng = np.random.default_rng(block_size)
    backend = cpu(3)
    layout = KVLayout(2, 5, block_size, 3, 80, dtype)
    cache = backend.allocate_kv(layout)
    rows = 13
    qkv = backend.upload(rng.standard_normal((rows, 15 * 80)).astype(np.float32) * 100)
    slots = rng.permutation(5 * block_size)[:rows].astype(np.int32)
    where = Rows(rows, backend.upload(np.arange(rows, dtype=np.int32)), backend.upload(slots), None, None)
    backend.rope_kv_write(qkv, where, table(backend, 80, True), cache, 1)
    written = backend.read(qkv).reshape(rows, 15, 80).astype(np.float16 if dtype == "float16" else np.float32)
    keys, values = cache.keys, cache.values
    if dtype == "float16":
        keys, values = keys.view(np.float16), values.view(np.float16)
    # [blocks, Hkv, octets, D, 8] to [slots, Hkv, D]; values may have padding behind D.
    keys = keys[1].transpose(0, 2, 4, 1, 3).reshape(5 * block_size, 3, 80)
    values = values[1].transpose(0, 2, 1, 3).reshape(5 * block_size, 3, -1)
    np.testing.assert_array_equal(keys[slots], written[:, 9:12])
    np.testing.assert_array_equal(values[slots, :, :80], written[:, 12:])
    others = np.delete(np.arange(5 * block_size), slots)
    assert (keys[others] == 0).all()
    assert (values[others] == 0).all()
    assert (cache.keys[0] == 0).all()
    assert (cache.values[0] == 0).all()


def test_float16_rounds_to_nearest_even_and_keeps_the_ends_of_the_range(cpu: Callable[[int], Backend]) -> None:
    special = np.array(
        [1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -1e30, np.inf, np.nan, 2**-24, 2**-25, 3 * 2**-26, 6e-8, -0.0],
        np.float32,
    )
    backend = cpu(1)
    row = np.resize(special, (1, 3 * 64)).astype(np.float32)
    cache = backend.allocate_kv(KVLayout(1, 1, 8, 1, 64, "float16"))
    where = Rows(1, backend.upload(np.zeros(1, np.int32)), backend.upload(np.zeros(1, np.int32)), None, None)
    backend.rope_kv_write(backend.upload(row), where, table(backend, 0, True), cache, 0)
    backend.synchronize()
    with np.errstate(over="ignore"):
        expected = row[0, 128:].astype(np.float16)
    np.testing.assert_array_equal(cache.values.view(np.float16)[0, 0, 0, 0, :64], expected)


def int8_pool(cache: Any, layer: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(integers, scales) of keys, then of values: [slots, Hkv, D] and [slots, Hkv]."""
    layout = cache.layout
    slots, heads, dim = layout.num_blocks * layout.block_size, layout.num_kv_heads, layout.head_dim
    keys = cache.keys[layer].transpose(0, 2, 4, 1, 3).reshape(slots, heads, dim)
    values = cache.values[layer].transpose(0, 2, 1, 3).reshape(slots, heads, -1)[..., :dim]
    scales = (
        array[layer].view(np.float16).transpose(0, 2, 1).reshape(slots, heads)
        for array in (cache.key_scales, cache.value_scales)
    )
    return keys, next(scales), values, next(scales)


@pytest.mark.parametrize(("dim", "rotary"), [(16, 0), (64, 64), (72, 72), (80, 32), (128, 128), (256, 64)])
@pytest.mark.parametrize("block_size", [8, 64])
def test_int8_holds_each_head_by_its_definition_at_its_slot_and_nowhere_else(
    cpu: Callable[[int], Backend], quantized: Quantize, dim: int, rotary: int, block_size: int
) -> None:
    rng = np.random.default_rng(dim)
    backend, rows, heads = cpu(3), 37, 15
    # Heads from below the least half to beyond the largest.
    qkv = rng.standard_normal((rows, heads, dim)) * 10.0 ** rng.uniform(-12, 6, (rows, heads, 1))
    qkv[5, 10], qkv[6, 14] = 0, -0.0
    device = backend.upload(qkv.reshape(rows, -1).astype(np.float32))
    layout = KVLayout(2, 320 // block_size, block_size, 3, dim, "int8")
    cache = backend.allocate_kv(layout)
    slots = rng.permutation(320)[:rows].astype(np.int32)
    where = Rows(rows, backend.upload(np.arange(rows, dtype=np.int32)), backend.upload(slots), None, None)
    backend.rope_kv_write(device, where, table(backend, rotary, True), cache, 1)
    written = backend.read(device).reshape(rows, heads, dim)
    pool = int8_pool(cache, 1)
    for part, (q, scale) in enumerate((pool[:2], pool[2:])):
        expected = quantized(written[:, 9 + 3 * part :][:, :3])
        np.testing.assert_array_equal(q[slots], expected[0])
        np.testing.assert_array_equal(scale[slots], expected[1])
        others = np.delete(np.arange(320), slots)
        assert (q[others] == 0).all()
        assert (scale[others] == 0).all()
        assert not any(array.any() for array in int8_pool(cache, 0))
        # The largest of each head is one of its ends, and none is more than half a step away.
        held = np.abs(written[:, 9 + 3 * part :][:, :3].astype(np.float64))
        normal = (held.max(axis=-1) > 127 * 2.0**-14) & (held.max(axis=-1) <= 127 * 512)
        assert (np.abs(q[slots].astype(int)).max(axis=-1)[normal] == 127).all()
        error = np.abs(np.abs(q[slots] * scale[slots].astype(np.float64)[..., None]) - held)
        assert (error <= scale[slots].astype(np.float64)[..., None] * 0.50001)[held.max(axis=-1) <= 127 * 512].all()


def test_int8_rounds_to_even_holds_large_numbers_and_marks_a_head_that_is_not_finite(
    cpu: Callable[[int], Backend],
) -> None:
    backend = cpu(1)
    heads = np.zeros((6, 16), np.float32)
    heads[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 125.5]  # a scale of 1
    heads[1, :4] = [1e9, -1e9, 511.9, 40_000]
    heads[2, :3] = [1, np.nan, 2]
    heads[3, :3] = [1, -np.inf, 2]
    heads[4, :2] = [1e-45, -1e-45]
    heads[5] = -0.0
    cache = backend.allocate_kv(KVLayout(1, 1, 8, 6, 16, "int8"))
    zero = backend.upload(np.zeros(1, np.int32))
    qkv = backend.upload(np.concatenate([heads, heads, heads[::-1]]).reshape(1, -1))
    backend.rope_kv_write(qkv, Rows(1, zero, zero, None, None), None, cache, 0)
    backend.synchronize()
    keys, key_scales, values, value_scales = (array[0] for array in int8_pool(cache))
    np.testing.assert_array_equal(keys[0, :8], [127, 0, 2, 2, 0, -2, -126, 126])
    np.testing.assert_array_equal(keys[1, :4], [127, -127, 1, 78])
    assert not keys[2:].any()
    np.testing.assert_array_equal(key_scales, np.float16([1, 512, np.nan, np.nan, 2**-24, 0]))
    np.testing.assert_array_equal(values, keys[::-1])
    np.testing.assert_array_equal(value_scales, key_scales[::-1])


def test_an_int8_head_is_the_same_among_any_others(cpu: Callable[[int], Backend]) -> None:
    rng = np.random.default_rng(6)
    rows, heads, dim = 65, 15, 64
    qkv = (rng.standard_normal((rows, heads, dim)) * 10.0 ** rng.uniform(-3, 3, (rows, heads, 1))).astype(np.float32)
    qkv = qkv.reshape(rows, -1)
    qkv[7, 10 * dim] = np.nan

    def run(threads: int, chosen: np.ndarray) -> list[np.ndarray]:
        backend = cpu(threads)
        slots = np.arange(len(chosen), dtype=np.int32)
        where = Rows(len(chosen), backend.upload(chosen.astype(np.int32)), backend.upload(slots), None, None)
        cache = backend.allocate_kv(KVLayout(1, 9, 8, 3, dim, "int8"))
        backend.rope_kv_write(backend.upload(qkv[chosen]), where, table(backend, dim, True), cache, 0)
        backend.synchronize()
        return [array[: len(chosen)] for array in int8_pool(cache)]

    alone = [np.concatenate(parts) for parts in zip(*(run(1, np.array([row])) for row in range(rows)), strict=True)]
    assert np.isnan(alone[1]).sum() == 1
    for threads in (1, 2, 3):
        for count in (1, 2, 3, 8, 17, 33, 64, 65):
            chosen = rng.permutation(rows)[:count]
            for ours, expected in zip(run(threads, chosen), alone, strict=True):
                np.testing.assert_array_equal(ours, expected[chosen])


@pytest.mark.parametrize("norm", [False, True])
def test_a_row_is_the_same_among_any_others(cpu: Callable[[int], Backend], norm: bool) -> None:
    rng = np.random.default_rng(5)
    rows, heads, dim = 65, 15, 64
    qkv = rng.standard_normal((rows, heads * dim)).astype(np.float32)
    qkv[7, 3] = np.nan
    positions = rng.integers(0, MAX_POSITIONS, rows).astype(np.int32)
    weights = rng.standard_normal((2, dim)).astype(np.float32)

    def run(threads: int, chosen: np.ndarray) -> np.ndarray:
        backend = cpu(threads)
        given = {"q_norm": backend.upload(weights[0]), "k_norm": backend.upload(weights[1]), "eps": 1e-6}
        device = backend.upload(qkv[chosen])
        slots = np.arange(len(chosen), dtype=np.int32)
        where = Rows(len(chosen), backend.upload(positions[chosen]), backend.upload(slots), None, None)
        cache = backend.allocate_kv(KVLayout(1, 9, 8, 3, dim, "float32"))
        backend.rope_kv_write(device, where, table(backend, dim, True), cache, 0, **(given if norm else {}))
        return backend.read(device)

    alone = np.concatenate([run(1, np.array([row])) for row in range(rows)])
    for threads in (1, 2, 3):
        for count in (1, 2, 3, 8, 17, 33, 64, 65):
            chosen = rng.permutation(rows)[:count]
            np.testing.assert_array_equal(run(threads, chosen), alone[chosen])
