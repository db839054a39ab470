"""Paged attention on a GPU: against float64, and decode = whole = any chunks, bit for bit, split or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from shardline.kernels import KVLayout, RopeTable, Rows

pytestmark = pytest.mark.gpu
DTYPES = ["float16", "int8"]
Quantize = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
# Head dim, query heads a KV head, KV heads, tokens.
SHAPES = [(64, 3, 3, 1300), (80, 1, 2, 600), (96, 4, 2, 600), (128, 4, 2, 1400), (128, 7, 1, 700), (256, 16, 1, 600)]
COUNTS = [*range(1, 66), 255, 256, 257, 511, 512, 513]
# Head dim, query heads a KV head, KV heads, tokens; what the layer has besides.
KINDS = [
    (64, 8, 2, 700, {"window": 128, "sinks": True}),
    (64, 8, 2, 600, {"sinks": True}),
    (256, 2, 2, 900, {"window": 300, "softcap": 20.0}),
    (256, 2, 1, 600, {"softcap": 30.0}),
    (128, 4, 2, 1400, {"window": 513}),
    (96, 1, 2, 600, {"window": 1}),
    (80, 3, 1, 600, {"window": 70, "softcap": 5.0, "sinks": True}),
]


@dataclass
class Sequences:
    """Some sequences whose keys and values are in a pool, spread over blocks in no order."""

    cuda: Any
    qkv: list[np.ndarray]
    cache: Any
    tables: np.ndarray
    head_dim: int
    group: int
    kv_heads: int
    window: int = 0
    softcap: float = 0.0
    sinks: np.ndarray | None = None

    def of(self, kind: dict[str, Any]) -> Sequences:
        """The same, in a layer that has a window, a soft cap, sinks."""
        heads = self.group * self.kv_heads
        drawn = np.random.default_rng(heads).uniform(4, 14, heads).astype(np.float32)
        return replace(self, **(kind | ({"sinks": drawn} if "sinks" in kind else {})))

    def attend(self, runs: list[tuple[int, int, int]]) -> np.ndarray:
        """float32 bits [rows, Hq * D] of (sequence, first, end), all in one step."""
        values = np.concatenate([self.qkv[s][first:end] for s, first, end in runs])
        positions = np.concatenate([np.arange(first, end) for _, first, end in runs]).astype(np.int32)
        sequences = np.concatenate([np.full(end - first, i) for i, (_, first, end) in enumerate(runs)]).astype(np.int32)
        upload = self.cuda.upload
        tables = upload(np.ascontiguousarray(self.tables[[s for s, _, _ in runs]]))
        rows = Rows(len(values), upload(positions), upload(positions), upload(sequences), tables)
        heads = self.group * self.kv_heads
        out = self.cuda.activations(len(values), heads * self.head_dim)
        with self.cuda._stream:
            out.fragments.fill(0x7E557E55)
            out.values.fill(np.nan)
            out.sums.fill(np.nan)
        self.cuda.begin_step(rows, self.cache, heads)
        sinks = None if self.sinks is None else upload(self.sinks)
        options = {"window": self.window, "softcap": self.softcap, "sinks": sinks}
        self.cuda.paged_attention(upload(values), rows, self.cache, 0, self.head_dim**-0.5, out, **options)
        got: np.ndarray = self.cuda.read(out)
        sums = self.cuda.read(out.sums).transpose(0, 3, 1, 2).reshape(-1, out.blocks * 2)[: len(values)]
        channels = heads * self.head_dim // 32 * 32
        parts = got[:, :channels].reshape(len(got), -1, 32).astype(np.float64)
        near = np.abs(sums[:, : channels // 32] - parts.sum(axis=2)) <= np.abs(parts).sum(axis=2) * 2.0**-22
        assert (near | np.isnan(parts.sum(axis=2))).all(), "the sums are of other values"
        return got


def make(
    cuda: Any,
    head_dim: int,
    group: int,
    kv_heads: int,
    lengths: list[int],
    block_size: int,
    seed: int = 0,
    dtype: str = "float16",
    wrong: dict[tuple[int, int], float] | None = None,
) -> Sequences:
    """Fill a pool through rope_kv_write that turns by nothing. wrong: numbers by (position, channel), of sequence 0."""
    rng = np.random.default_rng([seed, head_dim, group])
    width = -(-max(lengths) // block_size)
    layout = KVLayout(1, width * len(lengths) + 3, block_size, kv_heads, head_dim, dtype)
    cache = cuda.allocate_kv(layout)
    with cuda._stream:
        # NaN wherever nothing was written: it must never be read.
        for array in (cache.keys, cache.values) if dtype == "float16" else (cache.key_scales, cache.value_scales):
            array.fill(0x7E00)
    blocks = np.random.default_rng([seed, block_size]).permutation(layout.num_blocks)
    tables = blocks[: width * len(lengths)].reshape(len(lengths), width).astype(np.int32)
    rope = RopeTable(
        cuda.upload(np.ones((max(lengths), 1), np.float32)), cuda.upload(np.zeros((max(lengths), 1), np.float32)), False
    )
    all_qkv = []
    for sequence, length in enumerate(lengths):
        qkv = rng.standard_normal((length, (group + 2) * kv_heads * head_dim)).astype(np.float32)
        qkv[:, : group * kv_heads * head_dim] *= 3
        for place, number in (wrong or {}).items() if sequence == 0 else ():
            qkv[place] = number
        positions = np.arange(length, dtype=np.int32)
        slots = tables[sequence][positions // block_size] * block_size + positions % block_size
        zeros = cuda.upload(np.zeros(length, np.int32))
        rows = Rows(length, cuda.upload(positions), cuda.upload(slots.astype(np.int32)), zeros, zeros.reshape(1, -1))
        cuda.rope_kv_write(cuda.upload(qkv), rows, rope, cache, 0)
        all_qkv.append(qkv)
    return Sequences(cuda, all_qkv, cache, tables, head_dim, group, kv_heads)


def reference(sequences: Sequences, rows: np.ndarray, quantized: Quantize) -> np.ndarray:
    """float64 [rows, Hq * D] of the first sequence, of queries in halves, and keys and values as the pool has them."""
    qkv, head_dim, group, kv_heads = sequences.qkv[0], sequences.head_dim, sequences.group, sequences.kv_heads
    halves = qkv.astype(np.float16).astype(np.float64).reshape(len(qkv), -1, head_dim)
    if sequences.cache.layout.dtype == "int8":
        q, scale = quantized(qkv.reshape(halves.shape)[:, group * kv_heads :])
        halves[:, group * kv_heads :] = q * scale.astype(np.float64)[..., None]
    out = np.empty((len(rows), group * kv_heads, head_dim))
    for place, p in enumerate(rows):
        first = max(p - sequences.window + 1, 0) if sequences.window else 0
        for head in range(group * kv_heads):
            kv = head // group
            keys = halves[first : p + 1, group * kv_heads + kv]
            values = halves[first : p + 1, (group + 1) * kv_heads + kv]
            scores = keys @ halves[p, head] * head_dim**-0.5
            if sequences.softcap:
                scores = sequences.softcap * np.tanh(scores / sequences.softcap)
            highest = scores.max()
            if sequences.sinks is not None:
                highest = max(highest, sequences.sinks[head])
            weights = np.exp(scores - highest)
            rest = 0 if sequences.sinks is None else np.exp(sequences.sinks[head] - highest)
            out[place, head] = weights @ values / (weights.sum() + rest)
    return out.reshape(len(rows), -1)


@pytest.fixture(params=["whole", "split"])
def way(request: pytest.FixtureRequest, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one block a tile, or a block for every split."""
    way: str = request.param
    monkeypatch.setattr(cuda, "_processors", 0 if way == "whole" else 10**5)
    return way


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "length"), SHAPES)
def test_against_float64(
    cuda: Any, way: str, quantized: Quantize, head_dim: int, group: int, kv_heads: int, length: int, dtype: str
) -> None:
    sequences = make(cuda, head_dim, group, kv_heads, [length], 16, dtype=dtype)
    got = sequences.attend([(0, 0, length)])
    rows = np.unique([0, 1, 62, 63, 64, 65, 255, 256, 257, 511, 512, length - 1])
    wanted = reference(sequences, rows, quantized)
    # Probabilities and the result are rounded to halves.
    largest = np.abs(sequences.qkv[0]).max()
    assert (np.abs(got[rows] - wanted) <= 2.0**-11 * largest + np.abs(wanted) * 2.0**-11).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "length"), SHAPES)
def test_decode_is_whole_is_any_chunks(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, head_dim: int, group: int, kv_heads: int, length: int, dtype: str
) -> None:
    expected = None
    for block_size in (8, 64, 256):
        sequences = make(cuda, head_dim, group, kv_heads, [length], block_size, dtype=dtype)
        for processors in (0, 10**5, 132, 20):
            monkeypatch.setattr(cuda, "_processors", processors)
            whole = sequences.attend([(0, 0, length)])
            assert np.isfinite(whole).all()
            expected = whole if expected is None else expected
            assert np.array_equal(whole, expected), (block_size, processors)
            for chunk in (7, 64, 97, 300) if block_size == 64 else (250,):
                parts = [sequences.attend([(0, at, min(at + chunk, length))]) for at in range(0, length, chunk)]
                assert np.array_equal(np.concatenate(parts), expected), (block_size, processors, chunk)
            rows = {*range(0, length, 37), 63, 64, 65, 255, 256, 257, 511, 512, 513, length - 2, length - 1}
            for row in rows:
                assert np.array_equal(sequences.attend([(0, row, row + 1)])[0], expected[row]), (processors, row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_company(cuda: Any, way: str, dtype: str) -> None:
    lengths = [1, 5, 63, 64, 65, 130, 255, 256, 257, 300, 511, 513, 700, 1100]
    sequences = make(cuda, 128, 4, 2, lengths, 16, dtype=dtype)
    alone = [sequences.attend([(s, 0, length)]) for s, length in enumerate(lengths)]
    rng = np.random.default_rng(1)
    for count in COUNTS:
        # Decode rows, with a chunk of a prompt now and then.
        runs = []
        for s in rng.integers(len(lengths), size=count):
            first = int(rng.integers(lengths[s]))
            end = min(first + int(rng.integers(1, 40)), lengths[s]) if rng.random() < 0.1 else first + 1
            runs.append((int(s), first, end))
        got = sequences.attend(runs)
        assert np.array_equal(got, np.concatenate([alone[s][first:end] for s, first, end in runs])), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "length", "kind"), KINDS)
def test_kinds_against_float64(
    cuda: Any,
    way: str,
    quantized: Quantize,
    head_dim: int,
    group: int,
    kv_heads: int,
    length: int,
    kind: dict[str, Any],
    dtype: str,
) -> None:
    sequences = make(cuda, head_dim, group, kv_heads, [length], 16, dtype=dtype).of(kind)
    got = sequences.attend([(0, 0, length)])
    borders = {0, 1, 62, 63, 64, 65, 127, 128, 129, 255, 256, 257, 299, 300, 301, 511, 512, 513, 514, length - 1}
    rows = np.array(sorted(row for row in borders if row < length))
    wanted = reference(sequences, rows, quantized)
    largest = np.abs(sequences.qkv[0]).max()
    assert (np.abs(got[rows] - wanted) <= 2.0**-11 * largest + np.abs(wanted) * 2.0**-11).all()
    plain = replace(sequences, window=0, softcap=0.0, sinks=None).attend([(0, 0, length)])
    assert not np.array_equal(got, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "length", "kind"), KINDS)
def test_kinds_decode_is_whole_is_any_chunks(
    cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    group: int,
    kv_heads: int,
    length: int,
    kind: dict[str, Any],
    dtype: str,
) -> None:
    expected = None
    for block_size in (8, 64):
        sequences = make(cuda, head_dim, group, kv_heads, [length], block_size, dtype=dtype).of(kind)
        for processors in (0, 10**5, 20):
            monkeypatch.setattr(cuda, "_processors", processors)
            whole = sequences.attend([(0, 0, length)])
            assert np.isfinite(whole).all()
            expected = whole if expected is None else expected
            assert np.array_equal(whole, expected), (block_size, processors)
            for chunk in (7, 97, 300):
                parts = [sequences.attend([(0, at, min(at + chunk, length))]) for at in range(0, length, chunk)]
                assert np.array_equal(np.concatenate(parts), expected), (block_size, processors, chunk)
            for row in {*range(0, length, 41), 63, 64, 127, 128, 255, 256, 257, 511, 512, 513, length - 1}:
                if row < length:
                    got = sequences.attend([(0, row, row + 1)])[0]
                    assert np.array_equal(got, expected[row]), (block_size, processors, row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_before_the_window_is_read(cuda: Any, way: str, dtype: str) -> None:
    """Neither the keys and values there, which are NaN, nor the table, which names no block of the pool."""
    for window, first in ((64, 400), (128, 255), (300, 599)):
        sequences = make(cuda, 128, 4, 2, [700], 16, dtype=dtype).of({"window": window})
        runs = [(0, first, 700)]
        expected = sequences.attend(runs)
        gone = (first - window + 1) // 16
        blocks = sequences.tables[0, :gone]
        cache = sequences.cache
        for array in (cache.keys, cache.values) if dtype == "float16" else (cache.key_scales, cache.value_scales):
            held = cuda.read(array)
            held[:, blocks] = 0x7E00
            cuda.write(array, held)
        sequences.tables[0, :gone] = 1 << 30
        assert np.array_equal(sequences.attend(runs), expected)
        rows = [sequences.attend([(0, row, row + 1)])[0] for row in range(first, 700)]
        assert np.array_equal(np.stack(rows), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_windowed_rows_are_the_same_in_any_company(cuda: Any, way: str, dtype: str) -> None:
    lengths = [1, 63, 64, 130, 256, 257, 300, 511, 700, 1100]
    sequences = make(cuda, 64, 8, 2, lengths, 16, dtype=dtype).of({"window": 200, "sinks": True})
    alone = [sequences.attend([(s, 0, length)]) for s, length in enumerate(lengths)]
    rng = np.random.default_rng(2)
    for count in COUNTS:
        runs = []
        for s in rng.integers(len(lengths), size=count):
            first = int(rng.integers(lengths[s]))
            end = min(first + int(rng.integers(1, 40)), lengths[s]) if rng.random() < 0.1 else first + 1
            runs.append((int(s), first, end))
        got = sequences.attend(runs)
        assert np.array_equal(got, np.concatenate([alone[s][first:end] for s, first, end in runs])), count


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_position_of_eight_bits_that_is_not_finite_reaches_those_alone_that_see_it(
    cuda: Any, way: str, part: str, window: int
) -> None:
    """Not even the rows before it in its tile."""
    clean = make(cuda, 64, 3, 2, [300], 16, dtype="int8").of({"window": window})
    expected = clean.attend([(0, 0, 300)])
    for position in (3, 70, 255, 256):
        dirty = make(cuda, 64, 3, 2, [300], 16, dtype="int8").of({"window": window})
        place, offset = dirty.tables[0, position // 16], position % 16
        scales = dirty.cache.key_scales if part == "key" else dirty.cache.value_scales
        held = cuda.read(scales)
        held[0, place, 1, offset] = 0x7E00
        cuda.write(scales, held)
        end = min(position + window, 300) if window else 300
        wanted = expected.copy()
        wanted[position:end, 3 * 64 :] = np.nan  # the query heads of the second KV head
        for chunk in (1, 7, 300):
            runs = [dirty.attend([(0, at, min(at + chunk, 300))]) for at in range(0, 300, chunk)]
            assert np.array_equal(np.concatenate(runs), wanted, equal_nan=True), (position, chunk)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_or_value_that_is_not_finite_reaches_those_alone_that_see_it(
    cuda: Any, way: str, dtype: str, part: str, window: int
) -> None:
    """One channel of it is not. Not even the rows before it in its tile, nor the split that begins with it."""
    kind = {"window": window}
    expected = make(cuda, 64, 3, 2, [300], 16, dtype=dtype).of(kind).attend([(0, 0, 300)])
    channel = (7 if part == "key" else 9) * 64 + 17  # of the second KV head
    for position, number in ((3, np.nan), (255, np.inf), (256, np.nan), (262, -np.inf)):
        dirty = make(cuda, 64, 3, 2, [300], 16, dtype=dtype, wrong={(position, channel): number}).of(kind)
        end = min(position + window, 300) if window else 300
        wanted = expected.copy()
        wanted[position:end, 3 * 64 :] = np.nan
        for chunk in (7, 300):
            runs = [dirty.attend([(0, at, min(at + chunk, 300))]) for at in range(0, 300, chunk)]
            assert np.array_equal(np.concatenate(runs), wanted, equal_nan=True), (position, chunk)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row_and_its_sequence(cuda: Any, way: str, dtype: str) -> None:
    sequences = make(cuda, 128, 4, 2, [300, 300], 16, dtype=dtype)
    expected = [sequences.attend([(s, 0, 300)]) for s in range(2)]
    sequences.qkv[0][130, 200] = np.nan
    got = sequences.attend([(0, 0, 300), (1, 0, 300)])
    channels = np.arange(8 * 128) // 128 == 1
    assert np.isnan(got[130, channels]).all()
    got[130, channels] = expected[0][130, channels]
    assert np.array_equal(got, np.concatenate(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_replay_is_eager_a_hundred_times(cuda: Any, poisoned: Callable[..., Any], dtype: str) -> None:
    sequences = make(cuda, 128, 4, 8, [1000, 700, 30], 16, dtype=dtype)
    upload = cuda.upload
    positions = np.array([999, 650, 3], np.int32)
    rows = Rows(3, upload(positions), upload(positions), upload(np.arange(3, dtype=np.int32)), upload(sequences.tables))
    qkv = upload(np.stack([sequences.qkv[s][p] for s, p in enumerate(positions)]))
    out = cuda.activations(3, 4096)

    def issue() -> None:
        cuda.begin_step(rows, sequences.cache, 32)
        cuda.paged_attention(qkv, rows, sequences.cache, 0, 128**-0.5, out)

    issue()
    eager = cuda.read(out)
    for _ in range(100):
        with cuda._stream:
            out.fragments.fill(0x7E557E55)
        cuda.replay(("replayed attention", dtype), issue)
        assert np.array_equal(cuda.read(out), eager)
