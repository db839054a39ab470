"""Paged attention against float64, and its bits against every way of cutting the same work into steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from shardline.kernels import Backend, KVLayout, RopeTable, Rows

Step = Sequence[tuple[int, int, int]]
"""What runs at once: (sequence, first position, end position)."""


@dataclass(frozen=True)
class Kind:
    """What `paged_attention` is asked for beside the plain thing."""

    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def sinks_of(self, heads: int) -> np.ndarray | None:
        """One that is far below the scores, one that is among them, one that is above most, ..."""
        return np.resize(np.float32([-40, 0.5, 3]), heads) if self.sinks else None


PLAIN = Kind()
KINDS = [
    *(Kind(window=window) for window in (1, 7, 16, 33, 270, 2**40)),
    Kind(softcap=1.5),
    Kind(sinks=True),
    Kind(window=7, sinks=True),
    Kind(window=33, softcap=20.0),
    Kind(softcap=5.0, sinks=True),
    Kind(window=270, softcap=3.0, sinks=True),
]


class Paged:
    """Sequences of queries, keys and values in a pool with shuffled blocks; all its slots held NaN before."""

    def __init__(
        self,
        backend: Backend,
        qkv: Sequence[np.ndarray],
        *,
        kv_heads: int,
        dim: int,
        block_size: int,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        self.backend = backend
        self.qkv = qkv
        self.dim = dim
        self.block_size = block_size
        self.scale = dim**-0.5
        self.query_heads = qkv[0].shape[1] // dim - 2 * kv_heads
        blocks = [-(-len(one) // block_size) for one in qkv]
        self.layout = KVLayout(1, sum(blocks) + 3, block_size, kv_heads, dim, dtype)
        ids = np.random.default_rng(seed).permutation(self.layout.num_blocks).astype(np.int32)
        # An id out of range where no block belongs: it must never be read.
        self.tables = np.full((len(qkv), max(blocks) + 1), 2**30, np.int32)
        for sequence, count in enumerate(blocks):
            self.tables[sequence, :count], ids = ids[:count], ids[count:]
        ones = np.ones((max(map(len, qkv)), 0), np.float32)
        self.rope = RopeTable(backend.upload(ones), backend.upload(ones), True)
        self.cache = backend.allocate_kv(self.layout)
        slots = np.arange(self.layout.num_blocks * block_size, dtype=np.int32)
        self.write(np.full((len(slots), qkv[0].shape[1]), np.nan, np.float32), np.zeros_like(slots), slots)

    def write(self, qkv: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        upload = self.backend.upload
        rows = Rows(len(qkv), upload(positions), upload(slots), None, None)
        self.backend.rope_kv_write(upload(qkv), rows, self.rope, self.cache, 0)

    def run(self, steps: Sequence[Step], kind: Kind = PLAIN, *, order: Sequence[int] | None = None) -> list[np.ndarray]:
        """Every sequence's outputs. `order` gives each sequence its row of the block tables.

        A block that lies before all windows of a step has an id out of range then: it must never be read.
        """
        upload = self.backend.upload
        place = np.arange(len(self.qkv)) if order is None else np.asarray(order)
        sinks = kind.sinks_of(self.query_heads)
        given = {"softcap": kind.softcap, "sinks": None if sinks is None else upload(sinks)}
        out = [np.full((len(one), self.query_heads * self.dim), np.nan, np.float32) for one in self.qkv]
        for step in steps:
            qkv = np.concatenate([self.qkv[sequence][first:end] for sequence, first, end in step])
            positions = np.concatenate([np.arange(first, end) for _, first, end in step]).astype(np.int32)
            owner = np.concatenate([np.full(end - first, sequence) for sequence, first, end in step])
            blocks = self.tables[owner, positions // self.block_size]
            slots = (blocks * self.block_size + positions % self.block_size).astype(np.int32)
            self.write(qkv, positions, slots)
            tables = np.empty_like(self.tables)
            tables[place] = self.tables
            for sequence, first, _ in step:
                unseen = max(first + 1 - kind.window, 0) // self.block_size if kind.window else 0
                tables[place[sequence], :unseen] = 2**30
            result = upload(np.full((len(qkv) + 1, self.query_heads * self.dim), np.nan, np.float32))
            sequences = upload(place[owner].astype(np.int32))
            rows = Rows(len(qkv), upload(positions), upload(slots), sequences, upload(tables))
            self.backend.paged_attention(
                upload(qkv), rows, self.cache, 0, self.scale, result, window=kind.window, **given
            )
            host = self.backend.read(result)
            assert np.isnan(host[len(qkv) :]).all(), "a row past the last was written"
            done = 0
            for sequence, first, end in step:
                out[sequence][first:end] = host[done : done + end - first]
                done += end - first
        return out


Quantize = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def reference(
    qkv: np.ndarray,
    kv_heads: int,
    dim: int,
    dtype: str,
    kind: Kind = PLAIN,
    quantized: Quantize | None = None,
) -> np.ndarray:
    rows = len(qkv)
    heads = qkv.reshape(rows, -1, dim)
    query_heads = heads.shape[1] - 2 * kv_heads
    queries = heads[:, :query_heads].astype(np.float64)
    stored = heads[:, query_heads:]
    if quantized is None:
        stored = stored.astype(dtype).astype(np.float64)
    else:
        q, scale = quantized(stored)
        stored = q * scale.astype(np.float64)[..., None]
    keys, values = stored[:, :kv_heads], stored[:, kv_heads:]
    out = np.empty((rows, query_heads, dim))
    distance = np.arange(rows)[:, None] - np.arange(rows)
    unseen = (distance < 0) | (distance >= (kind.window or rows))
    sinks = kind.sinks_of(query_heads)
    for head in range(query_heads):
        kv_head = head // (query_heads // kv_heads)
        scores = queries[:, head] @ keys[:, kv_head].T * dim**-0.5
        if kind.softcap:
            scores = kind.softcap * np.tanh(scores / kind.softcap)
        scores[unseen] = -np.inf
        if sinks is not None:
            scores = np.concatenate([scores, np.full((rows, 1), sinks[head])], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = (weights / weights.sum(axis=1, keepdims=True))[:, :rows] @ values[:, kv_head]
    return out.reshape(rows, -1)


def random_qkv(
    lengths: Sequence[int], query_heads: int, kv_heads: int, dim: int, *, seed: int = 0, spread: float = 1.0
) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    columns = (query_heads + 2 * kv_heads) * dim
    return [(rng.standard_normal((length, columns)) * spread).astype(np.float32) for length in lengths]


def in_chunks(length: int, chunk: int, sequence: int = 0) -> list[Step]:
    return [[(sequence, first, min(first + chunk, length))] for first in range(0, length, chunk)]


SHAPES = [
    (1, 1, 64),
    (3, 3, 64),
    (9, 3, 64),
    (4, 1, 80),
    (7, 1, 96),
    (4, 4, 128),
    (28, 4, 128),
    (8, 2, 256),
    (2, 1, 72),
    (20, 1, 16),
]


@pytest.mark.parametrize(("query_heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_equals_the_definition(
    cpu: Callable[[int], Backend], quantized: Quantize, query_heads: int, kv_heads: int, dim: int, dtype: str
) -> None:
    lengths = (300, 1, 17)
    qkv = random_qkv(lengths, query_heads, kv_heads, dim)
    paged = Paged(cpu(2), qkv, kv_heads=kv_heads, dim=dim, block_size=16, dtype=dtype)
    outputs = paged.run([[(2, 0, 17), (0, 0, 300), (1, 0, 1)]])
    for one, output in zip(qkv, outputs, strict=True):
        # Averages of numbers up to 4; float32 throughout.
        expected = reference(one, kv_heads, dim, dtype, quantized=quantized if dtype == "int8" else None)
        np.testing.assert_allclose(output, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_eight_bits_are_within_half_a_step_of_what_was_written(cpu: Callable[[int], Backend], spread: float) -> None:
    """Against float64 without any quantisation: what the pool costs, not what it holds."""
    qkv = random_qkv([300], 9, 3, 64, spread=spread)
    qkv[0][:, : 9 * 64] /= spread**2
    output = Paged(cpu(2), qkv, kv_heads=3, dim=64, block_size=16, dtype="int8").run([[(0, 0, 300)]])[0]
    # A value moves by half a step of 1 / 127 of its head's largest; a score by the root of D times that of its key's.
    step = np.abs(qkv[0][:, 9 * 64 :]).max() / 127
    error = np.abs(output - reference(qkv[0], 3, 64, "float32"))
    assert error.max() < step
    assert error.max() > step / 100, "nothing was rounded to 8 bits"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_windows_caps_and_sinks_equal_the_definition(
    cpu: Callable[[int], Backend], quantized: Quantize, kind: Kind
) -> None:
    lengths = (90, 1, 17)
    for index, (query_heads, kv_heads, dim) in enumerate(SHAPES):
        dtype = ("float32", "float16", "int8")[index % 3]
        qkv = random_qkv(lengths, query_heads, kv_heads, dim)
        paged = Paged(cpu(2), qkv, kv_heads=kv_heads, dim=dim, block_size=8, dtype=dtype)
        outputs = paged.run([[(2, 0, 17), (0, 0, 90), (1, 0, 1)]], kind)
        for one, output in zip(qkv, outputs, strict=True):
            expected = reference(one, kv_heads, dim, dtype, kind, quantized if dtype == "int8" else None)
            np.testing.assert_allclose(output, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("window", [1, 2, 15, 63, 64, 65, 255, 256, 257, 511, 512, 513, 999])
def test_equals_the_definition_where_windows_meet_tiles_and_splits(cpu: Callable[[int], Backend], window: int) -> None:
    qkv = random_qkv([1000], 3, 1, 64, seed=window, spread=2.0)
    kind = Kind(window, 50.0, sinks=True)
    output = Paged(cpu(1), qkv, kv_heads=1, dim=64, block_size=8).run([[(0, 0, 1000)]], kind)[0]
    np.testing.assert_allclose(output, reference(qkv[0], 1, 64, "float32", kind), rtol=0, atol=5e-5)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000])
def test_equals_the_definition_at_the_borders_of_tiles_and_splits(cpu: Callable[[int], Backend], length: int) -> None:
    qkv = random_qkv([length], 3, 1, 64, seed=length, spread=2.0)
    output = Paged(cpu(1), qkv, kv_heads=1, dim=64, block_size=8).run([[(0, 0, length)]])[0]
    # Scores up to 100, so that their rounding moves the weights by some 1e-5.
    np.testing.assert_allclose(output, reference(qkv[0], 1, 64, "float32"), rtol=0, atol=5e-5)


def test_equals_the_definition_when_one_position_takes_all(cpu: Callable[[int], Backend]) -> None:
    qkv = random_qkv([600], 3, 1, 64, spread=20.0)
    output = Paged(cpu(1), qkv, kv_heads=1, dim=64, block_size=16).run([[(0, 0, 600)]])[0]
    # Scores up to some thousands: their float32 rounding is what the weights see.
    np.testing.assert_allclose(output, reference(qkv[0], 1, 64, "float32"), rtol=0, atol=0.05)


def test_a_lone_position_gives_its_value_exactly(cpu: Callable[[int], Backend]) -> None:
    qkv = random_qkv([1], 9, 3, 80)
    output = Paged(cpu(2), qkv, kv_heads=3, dim=80, block_size=8).run([[(0, 0, 1)]])[0]
    values = qkv[0][0, 12 * 80 :].reshape(3, 80)
    np.testing.assert_array_equal(output.reshape(9, 80), np.repeat(values, 3, axis=0))


def test_a_lone_position_of_eight_bits_gives_integer_times_scale_exactly(
    cpu: Callable[[int], Backend], quantized: Quantize
) -> None:
    for seed, spread in enumerate((1.0, 1e-4, 1e-7, 100.0, 1e4)):
        qkv = random_qkv([1], 9, 3, 80, seed=seed)
        qkv[0][:, 12 * 80 :] *= np.float32(spread)
        output = Paged(cpu(2), qkv, kv_heads=3, dim=80, block_size=8, dtype="int8").run([[(0, 0, 1)]])[0]
        q, scale = quantized(qkv[0][0, 12 * 80 :].reshape(3, 80))
        values = q * scale.astype(np.float64)[:, None]
        np.testing.assert_array_equal(output.reshape(9, 80), np.repeat(values, 3, axis=0))


@pytest.fixture(scope="module")
def token_by_token(cpu: Callable[[int], Backend]) -> Callable[[int, int, int, str], np.ndarray]:
    """What `random_qkv([530], ...)` gives with one thread, one token a step and blocks of 16: computed once a shape."""

    @cache
    def run(query_heads: int, kv_heads: int, dim: int, dtype: str) -> np.ndarray:
        qkv = random_qkv([530], query_heads, kv_heads, dim)
        paged = Paged(cpu(1), qkv, kv_heads=kv_heads, dim=dim, block_size=16, dtype=dtype, seed=17)
        output = paged.run(in_chunks(530, 1))[0]
        output.flags.writeable = False
        return output

    return run


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
@pytest.mark.parametrize(("query_heads", "kv_heads", "dim"), [(9, 3, 64), (3, 3, 80), (7, 1, 96), (20, 1, 16)])
def test_bits_do_not_depend_on_chunks_blocks_or_threads(
    cpu: Callable[[int], Backend],
    token_by_token: Callable[[int, int, int, str], np.ndarray],
    query_heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: str,
) -> None:
    length = 530
    qkv = random_qkv([length], query_heads, kv_heads, dim)

    def run(threads: int, steps: Sequence[Step]) -> np.ndarray:
        seed = threads + block_size
        paged = Paged(cpu(threads), qkv, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype, seed=seed)
        return paged.run(steps)[0]

    expected = token_by_token(query_heads, kv_heads, dim, dtype)
    for threads in (1, 2, 3):
        for chunk in (7, 64, 256, length):
            np.testing.assert_array_equal(run(threads, in_chunks(length, chunk)), expected)
    np.testing.assert_array_equal(run(2, in_chunks(length, 1)), expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "dim", "dtype"),
    [(9, 3, 64, "float16"), (3, 3, 80, "float32"), (20, 1, 16, "float16"), (9, 3, 64, "int8"), (3, 3, 80, "int8")],
)
def test_bits_of_every_kind_do_not_depend_on_chunks_blocks_or_threads(
    cpu: Callable[[int], Backend], query_heads: int, kv_heads: int, dim: int, dtype: str, kind: Kind
) -> None:
    length = 300
    qkv = random_qkv([length], query_heads, kv_heads, dim)

    def run(threads: int, block_size: int, chunk: int) -> np.ndarray:
        paged = Paged(cpu(threads), qkv, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype, seed=chunk)
        return paged.run(in_chunks(length, chunk), kind)[0]

    whole = run(1, 16, length)
    for threads, block_size, chunk in ((2, 8, 1), (3, 8, 7), (1, 64, 19), (2, 16, 64), (3, 64, length), (1, 8, 258)):
        np.testing.assert_array_equal(run(threads, block_size, chunk), whole)


@pytest.mark.parametrize("kind", [PLAIN, Kind(softcap=2.0), Kind(sinks=True), Kind(0, 2.0, True)], ids=str)
def test_a_window_that_holds_all_changes_no_bit(cpu: Callable[[int], Backend], kind: Kind) -> None:
    length = 530
    qkv = random_qkv([length], 9, 3, 64)

    def run(window: int, chunk: int = length) -> np.ndarray:
        paged = Paged(cpu(2), qkv, kv_heads=3, dim=64, block_size=16, dtype="float16")
        return paged.run(in_chunks(length, chunk), Kind(window, kind.softcap, kind.sinks))[0]

    none = run(0)
    for window in (length, length + 1, 2**31 - 1, 2**31, 2**62):
        np.testing.assert_array_equal(run(window), none)
        np.testing.assert_array_equal(run(window, 100), none)
    for window in (1, 33, 256, length - 1):
        ours = run(window)  # up to there it holds all
        np.testing.assert_array_equal(ours[:window], none[:window])
        assert (ours[window:] != none[window:]).any(axis=1).all()


def test_a_sink_of_minus_infinity_changes_no_bit_and_a_great_one_takes_all(cpu: Callable[[int], Backend]) -> None:
    qkv = random_qkv([300], 6, 2, 64)
    backend = cpu(2)
    none = Paged(backend, qkv, kv_heads=2, dim=64, block_size=16).run([[(0, 0, 300)]])[0]

    class Given(Kind):
        def sinks_of(self, heads: int) -> np.ndarray:
            return np.float32([-np.inf, 1e30, -1e30, -np.inf, 200, 88])

    heads = Paged(backend, qkv, kv_heads=2, dim=64, block_size=16).run([[(0, 0, 300)]], Given())[0].reshape(300, 6, 64)
    for head in (0, 2, 3):
        np.testing.assert_array_equal(heads[:, head], none.reshape(300, 6, 64)[:, head])
    for head in (1, 4):
        assert (heads[:, head] == 0).all()
    assert 0 < np.abs(heads[:, 5]).max() < 1e-20


@pytest.mark.parametrize("kind", [PLAIN, Kind(33, 20.0, True)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "dim", "dtype"),
    [(9, 3, 64, "float32"), (4, 4, 64, "float32"), (14, 2, 80, "float32"), (9, 3, 64, "int8")],
)
def test_bits_do_not_depend_on_other_sequences(
    cpu: Callable[[int], Backend], query_heads: int, kv_heads: int, dim: int, dtype: str, threads: int, kind: Kind
) -> None:
    rng = np.random.default_rng(threads)
    lengths = [int(n) for n in rng.integers(1, 300, 40)]
    lengths[5] = 400
    qkv = random_qkv(lengths, query_heads, kv_heads, dim)
    alone = [
        Paged(cpu(1), [one], kv_heads=kv_heads, dim=dim, block_size=16, dtype=dtype).run([[(0, 0, len(one))]], kind)[0]
        for one in qkv
    ]
    # Decodes of some, chunks of others, in any order, until all are done.
    done = [0] * len(lengths)
    steps = []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        step = []
        for sequence in rng.permutation(len(lengths)):
            left = lengths[sequence] - done[sequence]
            if left and rng.random() < 0.8:
                take = min(left, int(rng.choice([1, 1, 2, 5, 33, 200])))
                step.append((int(sequence), done[sequence], done[sequence] + take))
                done[sequence] += take
        if step:
            steps.append(step)
    paged = Paged(cpu(threads), qkv, kv_heads=kv_heads, dim=dim, block_size=8, dtype=dtype, seed=threads)
    for ours, expected in zip(paged.run(steps, kind, order=rng.permutation(len(lengths))), alone, strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_nan_of_a_later_position_or_another_sequence_reaches_nobody_else(
    cpu: Callable[[int], Backend], dtype: str
) -> None:
    lengths = (330, 40)
    clean = random_qkv(lengths, 9, 3, 64)
    expected = Paged(cpu(2), clean, kv_heads=3, dim=64, block_size=16, dtype=dtype).run([[(0, 0, 330), (1, 0, 40)]])
    for bad, value in ((3, np.nan), (100, np.inf), (255, np.nan), (256, -np.inf), (300, np.nan)):
        for part in (slice(0, 9 * 64), slice(9 * 64, 12 * 64), slice(12 * 64, None)):
            dirty = [one.copy() for one in clean]
            dirty[0][bad, part] = value
            for steps in ([[(0, 0, 330), (1, 0, 40)]], [*in_chunks(330, 50), [(1, 0, 40)]]):
                ours = Paged(cpu(2), dirty, kv_heads=3, dim=64, block_size=8, dtype=dtype).run(steps)
                np.testing.assert_array_equal(ours[0][:bad], expected[0][:bad])
                np.testing.assert_array_equal(ours[1], expected[1])
                assert not np.array_equal(ours[0][bad], expected[0][bad])
                if part.start == 0:
                    np.testing.assert_array_equal(ours[0][bad + 1 :], expected[0][bad + 1 :])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("window", [1, 7, 16, 33, 300])
def test_nan_of_a_position_reaches_only_the_rows_whose_window_holds_it(
    cpu: Callable[[int], Backend], window: int, dtype: str
) -> None:
    kind = Kind(window, 20.0, True)
    clean = random_qkv([400], 9, 3, 64)
    expected = Paged(cpu(2), clean, kv_heads=3, dim=64, block_size=16, dtype=dtype).run([[(0, 0, 400)]], kind)[0]
    for bad, value in ((0, np.nan), (100, np.inf), (255, np.nan), (256, np.nan), (399, np.nan)):
        for part in (slice(9 * 64, 12 * 64), slice(12 * 64, None)):
            dirty = [clean[0].copy()]
            dirty[0][bad, part] = value
            for steps in ([[(0, 0, 400)]], in_chunks(400, 50)):
                ours = Paged(cpu(2), dirty, kv_heads=3, dim=64, block_size=8, dtype=dtype).run(steps, kind)[0]
                changed = (ours != expected).any(axis=1)
                assert np.flatnonzero(changed).tolist() == list(range(bad, min(bad + window, 400)))


@pytest.mark.parametrize("window", [1, 7, 16, 33])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_window_reads_no_position_before_it(cpu: Callable[[int], Backend], window: int, dtype: str) -> None:
    length, more = 290, 30
    qkv = random_qkv([length + more], 9, 3, 64)

    def run(poison: bool, chunk: int) -> np.ndarray:
        paged = Paged(cpu(2), qkv, kv_heads=3, dim=64, block_size=16, dtype=dtype)
        paged.run(in_chunks(length, 64), Kind(window))
        if poison:
            positions = np.arange(length - window + 1)
            slots = paged.tables[0, positions // 16] * 16 + positions % 16
            nothing = np.full((len(positions), qkv[0].shape[1]), np.nan, np.float32)
            paged.write(nothing, positions.astype(np.int32), slots.astype(np.int32))
        steps = [[(0, first, min(first + chunk, length + more))] for first in range(length, length + more, chunk)]
        return paged.run(steps, Kind(window))[0][length:]

    clean = run(False, 1)
    assert np.isfinite(clean).all()
    for chunk in (1, 4, more):
        np.testing.assert_array_equal(run(True, chunk), clean)


@pytest.mark.parametrize("window", [0, 7, 290])
def test_scores_of_minus_infinity_weigh_nothing(cpu: Callable[[int], Backend], window: int) -> None:
    qkv = random_qkv([600], 1, 1, 64)
    qkv[0][:, 0] = 1e30
    qkv[0][:, 64] = 0.0
    # Positions 0..299, so the whole first split and a part of the second, overflow to a score of -inf.
    qkv[0][:300, 64] = -1e30
    output = Paged(cpu(1), qkv, kv_heads=1, dim=64, block_size=16).run([[(0, 0, 600)]], Kind(window))[0]
    qkv[0][:, 0] = 0.0
    rest = reference(qkv[0][300:], 1, 64, "float32", Kind(window))
    np.testing.assert_allclose(output[300:], rest, rtol=0, atol=1e-5)
    assert np.isnan(output[:300]).all()
