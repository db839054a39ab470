"""Ops on single rows on a GPU: norm, embedding, gathering, turning and cache writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardline.kernels import KVLayout, RopeTable, Rows, UnsupportedOperationError

pytestmark = pytest.mark.gpu
COUNTS = [*range(1, 66), 255, 256, 257, 511, 512, 513]


def rows_of(seed: int, count: int, channels: int) -> np.ndarray:
    rng = np.random.default_rng([seed, count, channels])
    x = rng.standard_normal((count, channels)) * 10.0 ** rng.uniform(-6, 6, (count, 1))
    return x.astype(np.float32)


def norm(cuda: Any, x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """What a product sees of the result, and the sums of each 32 channels that come with it."""
    out = cuda.activations(*x.shape)
    with cuda._stream:
        out.fragments.fill(0x7E557E55)
        out.sums.fill(np.nan)
    cuda.rms_norm(cuda.upload(x), cuda.upload(weight), eps, out, len(x))
    values = cuda.read(out)
    sums = cuda.read(out.sums).transpose(0, 3, 1, 2).reshape(-1, out.blocks * 2)[: len(x)]
    return values, sums * cuda.read(out.scales)[: len(x), None]


@pytest.mark.parametrize("channels", [64, 100, 576, 1024, 2044, 2048, 4096, 12288])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_norm_against_float64(cuda: Any, channels: int, rows: int) -> None:
    x = rows_of(1, rows, channels)
    weight = np.random.default_rng(2).uniform(0.2, 2, channels).astype(np.float32)
    got, sums = norm(cuda, x, weight, 1e-5)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    # A rounding to halves of the row's own scale.
    error = np.abs(wanted) * 2.0**-10.99 + np.abs(wanted).max(axis=1, keepdims=True) * 2.0**-38
    assert (np.abs(got - wanted) <= error).all()
    padded = np.zeros((rows, sums.shape[1] * 32))
    padded[:, :channels] = got
    parts = padded.reshape(rows, -1, 32)
    assert (np.abs(sums - parts.sum(axis=2)) <= np.abs(parts).sum(axis=2) * 2.0**-22).all()


@pytest.mark.parametrize("channels", [576, 4096])
def test_norm_of_a_row_is_the_same_in_any_company(cuda: Any, channels: int) -> None:
    most = max(COUNTS)
    x = rows_of(3, most, channels)
    x[7, 5], x[9, 1], x[11] = np.nan, np.inf, 0
    weight = np.random.default_rng(4).uniform(0.2, 2, channels).astype(np.float32)
    alone = [norm(cuda, x[row : row + 1], weight, 1e-6) for row in range(most)]
    values, sums = (np.concatenate(part) for part in zip(*alone, strict=True))
    assert set(np.flatnonzero(~np.isfinite(values).all(axis=1))) == {7, 9}
    assert (values[11] == 0).all()
    rng = np.random.default_rng(5)
    for count in COUNTS:
        chosen = rng.permutation(most)[:count]
        got, got_sums = norm(cuda, x[chosen], weight, 1e-6)
        assert np.array_equal(got, values[chosen], equal_nan=True), count
        assert np.array_equal(got_sums, sums[chosen], equal_nan=True), count


def test_written_activations_keep_eleven_bits(cuda: Any, prepared: Callable[..., Any]) -> None:
    for channels in (64, 576, 4096):
        x = rows_of(6, 21, channels)
        _, got = prepared(x)
        error = np.abs(x) * 2.0**-11 + np.abs(x).max(axis=1, keepdims=True) * 2.0**-38
        assert (np.abs(got - x) <= error).all()


def test_embedding_is_the_matrix(cuda: Any, poisoned: Callable[..., Any], weights: Any) -> None:
    matrix = weights.matrix(331, 640)
    ids = np.random.default_rng(7).integers(331, size=40).astype(np.int32)
    out = poisoned(40, 640)
    cuda.embedding(cuda.upload(ids), cuda.load_matrix([matrix]), out, 40)
    # Two roundings, of which one may be of a zero point shifted into the integers.
    wanted = matrix.dequantize()[ids]
    scale = np.repeat(matrix.scale.astype(np.float32), weights.group_size, 1)[ids]
    assert (np.abs(cuda.read(out) - wanted) <= scale * 2.0 ** (weights.bits - 22)).all()


def test_embedding_takes_the_tokens_that_were_sampled_last(
    cuda: Any, poisoned: Callable[..., Any], weights: Any
) -> None:
    weight = cuda.load_matrix([weights.matrix(331, 640)])
    rng = np.random.default_rng(12)
    last = rng.integers(331, size=50).astype(np.int32)
    ids = np.where(rng.random(40) < 0.6, -1 - rng.permutation(50)[:40], rng.integers(331, size=40)).astype(np.int32)
    ids[:4] = [-1, -50, 330, 0]
    resolved = np.array([last[-1 - i] if i < 0 else i for i in ids], np.int32)
    for scale in (1.0, 1.7320508):
        plain, ahead = poisoned(43, 640), poisoned(43, 640)
        cuda.embedding(cuda.upload(resolved), weight, plain, 40, scale=scale)
        cuda.embedding(cuda.upload(ids), weight, ahead, 40, scale=scale, last_tokens=cuda.upload(last))
        assert np.array_equal(cuda.read(ahead).view(np.uint32), cuda.read(plain).view(np.uint32))


def test_ids_that_stand_for_nothing_poison_their_rows_alone(cuda: Any, weights: Any) -> None:
    weight = cuda.load_matrix([weights.matrix(331, 640)])
    # The array ends in the middle of one that has a token for every place.
    last = cuda.upload(np.array([330, -1, 331, -3, 1, 1], np.int32))[:4]
    ids = np.array([-1, -2, -3, -4, -5, -(2**31), 330, 331, 2**31 - 1], np.int32)
    for given, wrong in ((last, [1, 2, 3, 4, 5, 7, 8]), (None, [0, 1, 2, 3, 4, 5, 7, 8])):
        out = cuda.upload(np.zeros((9, 640), np.float32))
        cuda.embedding(cuda.upload(ids), weight, out, 9, last_tokens=given)
        assert np.flatnonzero(np.isnan(cuda.read(out)).all(axis=1)).tolist() == wrong


def test_gathered_rows_are_the_rows(cuda: Any, poisoned: Callable[..., Any]) -> None:
    x = rows_of(8, 50, 777)
    indices = np.random.default_rng(9).integers(50, size=33).astype(np.int32)
    out = poisoned(33, 777)
    cuda.gather_rows(cuda.upload(x), cuda.upload(indices), out, 33)
    assert np.array_equal(cuda.read(out), x[indices])


def test_scaled_embedding_of_ordered_columns(cuda: Any, poisoned: Callable[..., Any], weights: Any) -> None:
    plain = weights.matrix(331, 640)
    order = np.random.default_rng(10).permutation(640).astype(np.int32)
    ids = np.random.default_rng(11).integers(331, size=40).astype(np.int32)
    device_ids, scale = cuda.upload(ids), 1.7320508
    expected = poisoned(40, 640)
    cuda.embedding(device_ids, cuda.load_matrix([plain]), expected, 40)
    once = cuda.read(expected)
    for input_order in (None, order):
        weight = cuda.load_matrix([replace(plain, input_order=input_order)])
        for factor in (1.0, scale):
            out = poisoned(43, 640)
            cuda.embedding(device_ids, weight, out, 40, scale=factor)
            got = cuda.read(out)
            # Column j is channel order[j].
            columns = got[:40] if input_order is None else got[:40, input_order]
            assert np.array_equal(columns, once * np.float32(factor))
            assert (got[40:].view(np.uint32) == 0x7FCABCDE).all()


@pytest.mark.parametrize("channels", [64, 576, 2044, 2048, 4096])
def test_added_norm_against_float64_and_in_any_company(cuda: Any, channels: int) -> None:
    most = max(COUNTS)
    x, before = rows_of(12, most, channels), rows_of(13, most, channels)
    x[7, 5], x[9] = np.nan, 0
    weight = np.random.default_rng(14).uniform(0.2, 2, channels).astype(np.float32)
    device_weight = cuda.upload(weight)

    def added(chosen: np.ndarray) -> np.ndarray:
        out = cuda.upload(np.concatenate([before[chosen], before[:2]]))
        cuda.add_rms_norm(cuda.upload(x[chosen]), device_weight, 1e-5, out, len(chosen))
        got: np.ndarray = cuda.read(out)
        assert np.array_equal(got[len(chosen) :], before[:2])
        return got[: len(chosen)]

    alone = np.concatenate([added(np.array([row])) for row in range(most)])
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    fine = np.arange(most) != 7
    error = np.abs(normed) * 2.0**-20 + np.abs(before + normed) * 2.0**-23
    assert (np.abs(alone - (before + normed)) <= error)[fine].all()
    assert np.isnan(alone[7]).all()
    rng = np.random.default_rng(15)
    for count in COUNTS:
        chosen = rng.permutation(most)[:count]
        assert np.array_equal(added(chosen), alone[chosen], equal_nan=True), count


def test_soft_cap_against_float64(cuda: Any) -> None:
    for rows, columns in ((1, 7), (3, 1023), (5, 32003)):
        x = rows_of(16, rows + 1, columns) / 1e4
        device = cuda.upload(x)
        cuda.soft_cap(device, 30.0, rows)
        got = cuda.read(device)
        wanted = 30 * np.tanh(x.astype(np.float64) / 30)
        assert (np.abs(got - wanted)[:rows] <= np.abs(wanted[:rows]) * 2.0**-21 + 1e-37).all()
        assert np.array_equal(got[rows:], x[rows:])
        alone = cuda.upload(x[:1])
        cuda.soft_cap(alone, 30.0, 1)
        assert np.array_equal(cuda.read(alone)[0], got[0])


@pytest.mark.parametrize(("inputs", "channels"), [(256, 64), (576, 576), (2048, 2048), (5120, 260)])
def test_added_gated_rows_against_float64_and_in_any_company(
    cuda: Any, prepared: Callable[..., Any], inputs: int, channels: int
) -> None:
    most = max(COUNTS)
    rng = np.random.default_rng([17, inputs])
    x = (rng.standard_normal((most, inputs)) * rng.uniform(0.1, 3, (most, 1))).astype(np.float32)
    gate = (rng.standard_normal(inputs) / np.sqrt(inputs)).astype(np.float32)
    y, before = (rng.standard_normal((most, channels)).astype(np.float32) for _ in range(2))
    device_gate = cuda.upload(gate)

    def added(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        activations, seen = prepared(x[chosen])
        out = cuda.upload(np.concatenate([before[chosen], before[:2]]))
        cuda.add_gated(activations, device_gate, cuda.upload(y[chosen]), out, len(chosen))
        got = cuda.read(out)
        assert np.array_equal(got[len(chosen) :], before[:2])
        return got[: len(chosen)], seen

    whole, seen = added(np.arange(most))
    share = 1 / (1 + np.exp(-(seen.astype(np.float64) @ gate)))
    assert (np.abs(whole - (before + share[:, None] * y)) <= 2e-6 * (1 + np.abs(y))).all()
    for count in COUNTS:
        chosen = rng.permutation(most)[:count]
        assert np.array_equal(added(chosen)[0], whole[chosen]), count


@pytest.mark.parametrize(("head_dim", "query_heads", "kv_heads"), [(64, 16, 16), (128, 16, 4), (80, 3, 1)])
def test_norm_over_all_heads_of_a_row(cuda: Any, head_dim: int, query_heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng([18, head_dim])
    count, queries, keys = 19, query_heads * head_dim, kv_heads * head_dim
    cache = cuda.allocate_kv(KVLayout(1, 4, 16, kv_heads, head_dim, "float16"))
    qkv = rows_of(19, count, queries + 2 * keys) / 1e3
    q_norm, k_norm = (rng.uniform(0.5, 2, n).astype(np.float32) for n in (queries, keys))
    device_norms = {"q_norm": cuda.upload(q_norm), "k_norm": cuda.upload(k_norm), "eps": 1e-6}

    def written(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        upload, slots = cuda.upload, np.arange(len(chosen), dtype=np.int32)
        rows = Rows(len(chosen), upload(slots), upload(slots), upload(0 * slots), upload(np.zeros((1, 4), np.int32)))
        device = upload(qkv[chosen])
        # Without a rope nothing turns.
        cuda.rope_kv_write(device, rows, None, cache, 0, **device_norms)
        pool = cuda.read(cache.keys).view(np.float16)[0].transpose(0, 2, 1, 3).reshape(64, keys)
        return cuda.read(device), pool[: len(chosen)].astype(np.float64)

    got, pool = written(np.arange(count))
    for values, first, size, weight, error in (
        (got, 0, queries, q_norm, 2.0**-20),
        (pool, queries, keys, k_norm, 2.0**-10.9),
    ):
        wide = qkv[:, first : first + size].astype(np.float64)
        wanted = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight
        assert (np.abs(values[:, :size] - wanted) <= np.abs(wanted) * error + 1e-7).all()
    assert np.array_equal(got[:, queries + keys :], qkv[:, queries + keys :])
    for row in range(count):
        alone, own_pool = written(np.array([row]))
        assert np.array_equal(alone[0], got[row])
        assert np.array_equal(own_pool[0], pool[row])


@pytest.mark.parametrize(
    ("head_dim", "rotary", "interleaved", "norms"),
    [
        (64, 64, True, False),
        (80, 32, False, False),
        (96, 96, False, True),
        (128, 128, False, True),
        (256, 64, True, True),
    ],
)
@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_turned_and_written(
    cuda: Any, head_dim: int, rotary: int, interleaved: bool, norms: bool, block_size: int
) -> None:
    rng = np.random.default_rng([head_dim, block_size])
    count, query_heads, kv_heads = 37, 6, 2
    layout = KVLayout(2, 512 // block_size, block_size, kv_heads, head_dim, "float16")
    cache = cuda.allocate_kv(layout)
    angles = rng.uniform(0, 6, (400, rotary // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rope = RopeTable(cuda.upload(cos), cuda.upload(sin), interleaved)
    positions = np.sort(rng.permutation(400)[:count]).astype(np.int32)
    slots = rng.permutation(512)[:count].astype(np.int32)
    qkv = rng.standard_normal((count, (query_heads + 2 * kv_heads) * head_dim)).astype(np.float32)
    qkv[3, -1], qkv[4, -1] = 1e6, -1e6
    q_norm, k_norm = (rng.uniform(0.5, 2, head_dim).astype(np.float32) for _ in range(2))
    rows = Rows(
        count,
        cuda.upload(positions),
        cuda.upload(slots),
        cuda.upload(np.zeros(count, np.int32)),
        cuda.upload(np.zeros((1, 1), np.int32)),
    )
    device = cuda.upload(qkv)
    kept = {"q_norm": cuda.upload(q_norm), "k_norm": cuda.upload(k_norm), "eps": 1e-6} if norms else {}
    cuda.rope_kv_write(device, rows, rope, cache, 1, **kept)

    heads = qkv.astype(np.float64).reshape(count, -1, head_dim)
    turned = heads[:, : query_heads + kv_heads].copy()
    if norms:
        turned /= np.sqrt((turned**2).mean(axis=2, keepdims=True) + 1e-6)
        turned[:, :query_heads] *= q_norm
        turned[:, query_heads:] *= k_norm
    pairs = np.arange(rotary).reshape(-1, 2) if interleaved else np.arange(rotary).reshape(2, -1).T
    a, b = turned[:, :, pairs[:, 0]], turned[:, :, pairs[:, 1]]
    c, s = cos[positions].astype(np.float64)[:, None], sin[positions].astype(np.float64)[:, None]
    turned[:, :, pairs[:, 0]], turned[:, :, pairs[:, 1]] = a * c - b * s, b * c + a * s

    got = cuda.read(device).reshape(count, -1, head_dim)
    assert (np.abs(got[:, :query_heads] - turned[:, :query_heads]) <= 3e-6).all()
    assert np.array_equal(got[:, query_heads:], qkv.reshape(got.shape)[:, query_heads:])
    for array, wanted in (
        (cache.keys, turned[:, query_heads:]),
        (cache.values, np.clip(heads[:, query_heads + kv_heads :], -65504, 65504)),
    ):
        pool = cuda.read(array).view(np.float16).astype(np.float64)
        assert (pool[0] == 0).all()
        by_slot = pool[1].transpose(0, 2, 1, 3).reshape(512, kv_heads, head_dim)
        assert (np.abs(by_slot[slots] - wanted) <= np.abs(wanted) * 2.0**-11 + 3e-6).all()
        untouched = np.setdiff1d(np.arange(512), slots)
        assert (by_slot[untouched] == 0).all()


@pytest.mark.parametrize(("head_dim", "rotary", "norms"), [(64, 64, True), (80, 32, False), (128, 0, False)])
def test_a_head_in_halves_that_is_not_finite_has_a_key_of_nan_and_no_value(
    cuda: Any, head_dim: int, rotary: int, norms: bool
) -> None:
    """And of one whose key alone is not, the value stays; all others are as they were."""
    rng = np.random.default_rng([22, head_dim])
    count, query_heads, kv_heads = 9, 4, 2
    clean = rng.standard_normal((count, query_heads + 2 * kv_heads, head_dim)).astype(np.float32)
    clean[0, 4, 0], clean[0, 7, 1] = 1e9, -1e9
    angles = rng.uniform(0, 6, (count, rotary // 2))
    rope = RopeTable(cuda.upload(np.cos(angles, dtype="f4")), cuda.upload(np.sin(angles, dtype="f4")), False)
    numbers, zeros = cuda.upload(np.arange(count, dtype=np.int32)), cuda.upload(np.zeros(count, np.int32))
    rows = Rows(count, numbers, numbers, zeros, zeros.reshape(1, -1))
    weight = cuda.upload(rng.uniform(0.5, 2, head_dim).astype(np.float32))
    kept = {"q_norm": weight, "k_norm": weight, "eps": 1e-6} if norms else {}

    def written(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cache = cuda.allocate_kv(KVLayout(1, 2, 16, kv_heads, head_dim, "float16"))
        qkv = cuda.upload(heads.reshape(count, -1))
        cuda.rope_kv_write(qkv, rows, rope if rotary else None, cache, 0, **kept)
        pools = [
            cuda.read(array)[0].transpose(0, 2, 1, 3).reshape(32, kv_heads, -1) for array in (cache.keys, cache.values)
        ]
        return pools[0].view(np.float16), pools[1].view(np.float16)

    dirty = clean.copy()
    dirty[1, 4, 3], dirty[2, 5, -1], dirty[3, 6, 0], dirty[4, 7, -1], dirty[5, 6, 7] = (
        np.nan,
        np.inf,
        np.nan,
        np.inf,
        -np.inf,
    )
    dirty[6, 4, 2], dirty[6, 6, 2] = np.inf, np.nan
    keys, values = written(clean)
    assert np.isfinite(keys).all()
    assert np.isfinite(values).all()
    for row, head in ((1, 0), (2, 1), (3, 0), (4, 1), (5, 0), (6, 0)):
        keys[row, head] = np.nan
    for row, head in ((3, 0), (4, 1), (5, 0), (6, 0)):
        values[row, head] = 0
    got = written(dirty)
    assert np.array_equal(got[0], keys, equal_nan=True)
    assert np.array_equal(got[1], values)


def int8_pool(cuda: Any, cache: Any, layer: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(integers, scales) of keys and of values: [slots, Hkv, D] and [slots, Hkv]."""
    slots, heads, dim = cache.layout.num_blocks * cache.layout.block_size, *cache.keys.shape[2::2]
    pairs = ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
    return [
        (
            cuda.read(stored)[layer].view(np.int8).transpose(0, 2, 1, 3).reshape(slots, heads, dim),
            cuda.read(scales)[layer].view(np.float16).transpose(0, 2, 1).reshape(slots, heads),
        )
        for stored, scales in pairs
    ]


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [8, 64])
def test_int8_holds_each_head_by_its_definition_at_its_slot_and_nowhere_else(
    cuda: Any,
    quantized: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    head_dim: int,
    block_size: int,
) -> None:
    rng = np.random.default_rng([20, head_dim])
    count, query_heads, kv_heads = 37, 6, 2
    # Heads from below the least half to beyond the largest.
    heads = rng.standard_normal((count, query_heads + 2 * kv_heads, head_dim))
    heads *= 10.0 ** rng.uniform(-12, 6, (*heads.shape[:2], 1))
    heads[5, 6], heads[6, 8, 3], heads[7, 9, 5], heads[8, 7, :2] = 0, np.nan, -np.inf, [1e9, -1e9]
    heads[9, 9, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 125.5]
    heads[9, 9, 8:] = 0
    heads = heads.astype(np.float32)
    cache = cuda.allocate_kv(KVLayout(2, 320 // block_size, block_size, kv_heads, head_dim, "int8"))
    slots = rng.permutation(320)[:count].astype(np.int32)

    def write(chosen: np.ndarray) -> None:
        numbers, zeros = cuda.upload(slots[chosen]), cuda.upload(np.zeros(len(chosen), np.int32))
        rows = Rows(len(chosen), numbers, numbers, zeros, zeros.reshape(1, -1))
        cuda.rope_kv_write(cuda.upload(heads[chosen].reshape(len(chosen), -1)), rows, None, cache, 1)

    write(np.arange(count))
    pool = int8_pool(cuda, cache, 1)
    others = np.setdiff1d(np.arange(320), slots)
    for part, (q, scale) in enumerate(pool):
        expected = quantized(heads[:, query_heads + part * kv_heads :][:, :kv_heads])
        assert np.array_equal(q[slots], expected[0])
        assert np.array_equal(scale[slots], expected[1], equal_nan=True)
        assert not q[others].any()
        assert not scale[others].any()
    assert not any(array.any() for pair in int8_pool(cuda, cache, 0) for array in pair)
    for size in (1, 2, 9, 33):
        write(rng.permutation(count)[:size])
        for (q, scale), (again, scale_again) in zip(pool, int8_pool(cuda, cache, 1), strict=True):
            assert np.array_equal(q, again)
            assert np.array_equal(scale, scale_again, equal_nan=True)


@pytest.mark.parametrize(("head_dim", "rotary", "interleaved"), [(64, 64, True), (80, 32, False), (128, 128, False)])
def test_int8_keys_are_those_that_are_turned(cuda: Any, head_dim: int, rotary: int, interleaved: bool) -> None:
    rng = np.random.default_rng([21, head_dim])
    count, kv_heads = 37, 2
    qkv = rng.standard_normal((count, 10 * head_dim)).astype(np.float32)
    angles = rng.uniform(0, 6, (count, rotary // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rope = RopeTable(cuda.upload(cos), cuda.upload(sin), interleaved)
    numbers = cuda.upload(np.arange(count, dtype=np.int32))
    rows = Rows(count, numbers, numbers, numbers, numbers.reshape(1, -1))
    norms = {name: cuda.upload(rng.uniform(0.5, 2, head_dim).astype(np.float32)) for name in ("q_norm", "k_norm")}
    for given in ({}, norms | {"eps": 1e-6}):
        pools = []
        for dtype in ("float16", "int8"):
            cache = cuda.allocate_kv(KVLayout(1, 4, 16, kv_heads, head_dim, dtype))
            cuda.rope_kv_write(cuda.upload(qkv), rows, rope, cache, 0, **given)
            pools.append(cache)
        halves = cuda.read(pools[0].keys)[0].view(np.float16).transpose(0, 2, 1, 3).reshape(64, kv_heads, head_dim)
        q, scale = int8_pool(cuda, pools[1], 0)[0]
        step = scale.astype(np.float64)[..., None]
        # Half a step, and what the half was rounded by.
        assert (np.abs(q * step - halves) <= 0.5001 * step + np.abs(halves) * 2.0**-11)[:count].all()
        assert (np.abs(q[:count]).max(axis=2) == 127).all()


def test_a_pool_in_float32_is_refused_by_name(cuda: Any) -> None:
    with pytest.raises(UnsupportedOperationError, match=r"keys and values in float32.*cuda"):
        cuda.allocate_kv(KVLayout(1, 4, 16, 2, 64, "float32"))
    for dtype in ("float16", "int8"):
        for head_dim in (72, 272):
            with pytest.raises(UnsupportedOperationError, match=f"heads of {head_dim} channels"):
                cuda.allocate_kv(KVLayout(1, 4, 16, 2, head_dim, dtype))
        cache = cuda.allocate_kv(KVLayout(3, 4, 16, 2, 64, dtype))
        assert cache.nbytes == cache.layout.nbytes
