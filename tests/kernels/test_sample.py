"""Sampling against a slow reading of the rule in float64, and its rows against any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.kernels import Backend, SampleOutput, SamplingBatch


@dataclass(frozen=True)
class Row:
    """One row's parameters; `bias` and `history` as (id, value) and (id, count) pairs."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    position: int = 0
    logprobs: int = -1
    bias: tuple[tuple[int, float], ...] = ()
    history: tuple[tuple[int, int], ...] = ()


DTYPES = {"top_k": np.int32, "seed": np.uint64, "position": np.int64, "logprobs": np.int32}


def batch_of(rows: Sequence[Row]) -> SamplingBatch:
    columns: dict[str, Any] = {
        field.name: np.array([getattr(row, field.name) for row in rows], DTYPES.get(field.name, np.float32))
        for field in fields(Row)
        if field.name not in ("bias", "history")
    }
    for kind, value, dtype in (("bias", "values", np.float32), ("history", "counts", np.int32)):
        pairs = [getattr(row, kind) for row in rows]
        columns[f"{kind}_offsets"] = np.concatenate([[0], np.cumsum([len(some) for some in pairs])]).astype(np.int64)
        columns[f"{kind}_ids"] = np.array([pair[0] for some in pairs for pair in some], np.int32)
        columns[f"{kind}_{value}"] = np.array([pair[1] for some in pairs for pair in some], dtype)
    return SamplingBatch(**columns)


def sample(backend: Backend, logits: np.ndarray, rows: Sequence[Row]) -> SampleOutput:
    device = backend.upload(np.ascontiguousarray(logits, np.float32))
    output = backend.sample(device, batch_of(rows))
    np.testing.assert_array_equal(backend.read(device), logits.astype(np.float32), err_msg="logits were changed")
    return output


def test_tokens_go_to_their_places_too(cpu: Callable[[int], Backend]) -> None:
    backend, rng = cpu(3), np.random.default_rng(5)
    vocab, rows = 200, [Row(temperature=1.0, seed=seed) for seed in range(8)]
    last = backend.upload(np.full(12, -7, np.int32))
    first, second = (backend.upload(rng.standard_normal((8, vocab)).astype(np.float32)) for _ in range(2))
    places = np.array([11, 0, 5, 6, 2, 9, 3, 4], np.int32)
    pending = backend.sample_later(first, batch_of(rows), last, places)
    wanted = np.full(12, -7, np.int32)
    wanted[places] = backend.sample(first, batch_of(rows)).token_ids
    np.testing.assert_array_equal(backend.read(last), wanted)
    # The next step's tokens take these places before the first step's have been waited for.
    later = backend.sample_later(second, batch_of(rows[:3]), last, places[:3][::-1].copy())
    wanted[places[:3][::-1]] = backend.sample(second, batch_of(rows[:3])).token_ids
    np.testing.assert_array_equal(backend.read(last), wanted)
    assert pending.ready
    np.testing.assert_array_equal(later.wait().token_ids, backend.sample(second, batch_of(rows[:3])).token_ids)
    np.testing.assert_array_equal(pending.wait().token_ids, backend.sample(first, batch_of(rows)).token_ids)


def test_refuses_places_that_are_none(cpu: Callable[[int], Backend]) -> None:
    backend = cpu(1)
    logits, batch = backend.upload(np.zeros((3, 9), np.float32)), batch_of([Row()] * 3)
    last, places = backend.upload(np.zeros(4, np.int32)), np.array([3, 0, 1], np.int32)
    for wrong, message in (
        ((last, None), "go together"),
        ((None, places), "go together"),
        ((last, places + np.int32(1)), "places are 1 to 4"),
        ((last, places - np.int32(1)), "places are -1 to 2"),
        ((last, places[:2]), "places is"),
        ((last, places.astype(np.int64)), "places is int64"),
        ((last.view(np.float32), places), "last_tokens is float32"),
        ((last.reshape(2, 2), places), "1 dimensions"),
    ):
        with pytest.raises(AssertionError, match=message):
            backend.sample_later(logits, batch, *wrong)
    assert not backend.read(last).any()


def noise(seed: int, position: int, vocab: int) -> np.ndarray:
    """Philox 4x32-10 once more, from its paper, in NumPy."""
    mask = np.uint64(0xFFFFFFFF)
    counters = np.arange(-(-vocab // 4), dtype=np.uint64)
    state = [counters, np.full_like(counters, position), np.zeros_like(counters), np.zeros_like(counters)]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = state[0] * np.uint64(0xD2511F53), state[2] * np.uint64(0xCD9E8D57)
        state = [
            (b >> np.uint64(32)) ^ state[1] ^ np.uint64(keys[0]),
            b & mask,
            (a >> np.uint64(32)) ^ state[3] ^ np.uint64(keys[1]),
            a & mask,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    uniform = (np.stack(state, axis=1).reshape(-1)[:vocab].astype(np.float64) + 0.5) / 2**32
    return -np.log(-np.log(uniform))


def adjusted(logits: np.ndarray, row: Row) -> np.ndarray:
    """Step 2 of the rule."""
    x = logits.astype(np.float32).copy()
    for token, value in row.bias:
        x[token] += np.float32(value)
    for token, count in row.history:
        penalty = np.float32(row.repetition)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        if count:
            x[token] -= np.float32(row.frequency) * np.float32(count) + np.float32(row.presence)
    return x


def tempered(logits: np.ndarray, row: Row) -> np.ndarray:
    x = adjusted(logits, row)
    with np.errstate(over="ignore"):
        return (x - np.nanmax(x)) / np.float32(row.temperature)


def allowed_sets(x: np.ndarray, row: Row) -> list[np.ndarray]:
    """The kept ids as masks: two where top-p is so close to a border that float64 cannot tell."""
    keep = ~np.isnan(x)
    if 0 < row.top_k < len(x):
        keep &= x >= np.sort(x[keep])[::-1][: row.top_k][-1]
    if row.min_p > 0:
        keep &= x >= np.float32(np.log(np.float64(np.float32(row.min_p))))
    if row.top_p >= 1:
        return [keep]
    descending = np.sort(x[keep])[::-1]
    reached = np.cumsum(np.exp(descending.astype(np.float64)))
    p = float(np.float32(row.top_p))
    masks = []
    for slack in (-1e-6, 1e-6):
        last = min(np.searchsorted(reached, (p + slack) * reached[-1]), len(descending) - 1)
        masks.append(keep & (x >= descending[last]))
    return masks


def expected_tokens(logits: np.ndarray, row: Row) -> set[int]:
    if row.temperature == 0:
        x = adjusted(logits, row)
        return {int(np.flatnonzero(x == np.nanmax(x))[0])}
    x = tempered(logits, row)
    perturbed = x.astype(np.float64) + noise(row.seed, row.position, len(x))
    return {int(np.argmax(np.where(mask, perturbed, -np.inf))) for mask in allowed_sets(x, row)}


VARIED = [
    Row(temperature=1.0),
    Row(temperature=0.3),
    Row(temperature=7.0),
    Row(temperature=1.0, top_k=1),
    Row(temperature=1.0, top_k=40),
    Row(temperature=1.0, top_k=3000),
    Row(temperature=1.0, top_p=0.9),
    Row(temperature=2.0, top_p=0.5),
    Row(temperature=1.0, top_p=1e-6),
    Row(temperature=1.0, min_p=0.05),
    Row(temperature=1.0, min_p=1.0),
    Row(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01),
    Row(temperature=1.0, top_k=10**9, top_p=0.9999),
    Row(temperature=1.3, repetition=1.2, history=((3, 0), (5, 2), (900, 1))),
    Row(temperature=1.0, presence=0.7, frequency=-0.3, history=((0, 4), (1, 0), (999, 1))),
    Row(temperature=1.0, bias=((7, 5.0), (8, -5.0), (7, 2.5))),
    Row(),
    Row(repetition=3.0, presence=1.0, history=((2, 1), (4, 0))),
    Row(bias=((11, 1000.0),)),
    Row(logprobs=0),
    Row(temperature=1.0, logprobs=5),
    Row(logprobs=64),
]


@pytest.mark.parametrize("vocab", [1000, 4096, 49152])
def test_follows_the_rule(cpu: Callable[[int], Backend], vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    copies = 3 if vocab > 10000 else 40
    rows = [
        replace(row, seed=int(rng.integers(2**63)) * 2 + 1, position=int(rng.integers(10**6)))
        for row in VARIED * copies
    ]
    logits = (rng.standard_normal((len(rows), vocab)) * rng.uniform(0.5, 6, (len(rows), 1))).astype(np.float32)
    output = sample(cpu(2), logits, rows)
    for r, row in enumerate(rows):
        assert int(output.token_ids[r]) in expected_tokens(logits[r], row), row


NUMBERS = st.sampled_from([-np.inf, -30.0, -3.0, -2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 30.0])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_filters_with_ties_and_infinities(cpu: Callable[[int], Backend], data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 130))
    distinct = data.draw(st.lists(NUMBERS, min_size=1, max_size=12))
    logits = np.resize(np.array(distinct, np.float32), vocab)
    logits[data.draw(st.integers(0, vocab - 1))] = 1.5
    row = Row(
        temperature=data.draw(st.sampled_from([1e-40, 1e-6, 0.1, 1.0, 100.0])),
        top_k=data.draw(st.integers(0, vocab + 2)),
        top_p=data.draw(st.sampled_from([1e-30, 0.1, 0.5, 0.77, 0.95, 0.999999, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 1e-30, 0.03, 0.6065307, 1.0])),
        repetition=data.draw(st.sampled_from([1.0, 0.5, 2.0])),
        presence=data.draw(st.sampled_from([0.0, 1.0, -0.5])),
        bias=tuple(data.draw(st.lists(st.tuples(st.integers(0, vocab - 1), NUMBERS.filter(np.isfinite)), max_size=4))),
        history=tuple(data.draw(st.dictionaries(st.integers(0, vocab - 1), st.integers(0, 3), max_size=4)).items()),
    )
    rows = [replace(row, seed=data.draw(st.integers(0, 2**64 - 1)) if i == 0 else i) for i in range(12)]
    output = sample(cpu(1), np.tile(logits, (len(rows), 1)), rows)
    for r, one in enumerate(rows):
        assert int(output.token_ids[r]) in expected_tokens(logits, one), one


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_in_any_company(cpu: Callable[[int], Backend], threads: int) -> None:
    rng = np.random.default_rng(threads)
    vocab = 5000
    rows = [replace(row, seed=i * 2**33, position=i) for i, row in enumerate(VARIED * 3)]
    logits = (rng.standard_normal((len(rows), vocab)) * 4).astype(np.float32)
    logits[9, 17] = np.nan
    logits[19] = np.nan
    logits[30, :100] = np.inf
    alone = [sample(cpu(1), logits[r : r + 1], [row]) for r, row in enumerate(rows)]
    for count in (1, 2, 5, 17, 33, 64):
        chosen = rng.permutation(len(rows))[:count]
        output = sample(cpu(threads), logits[chosen], [rows[r] for r in chosen])
        for place, r in enumerate(chosen):
            assert output.token_ids[place] == alone[r].token_ids[0]
            assert output.logprobs[place].tobytes() == alone[r].logprobs[0].tobytes()
            wanted = max(rows[r].logprobs, 0)
            np.testing.assert_array_equal(output.top_ids[place, :wanted], alone[r].top_ids[0])
            assert output.top_logprobs[place, :wanted].tobytes() == alone[r].top_logprobs[0].tobytes()
            assert (output.top_ids[place, wanted:] == -1).all()
            assert np.isnan(output.top_logprobs[place, wanted:]).all()


@pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65, 255, 256, 257, 1000, 49152])
def test_logprobs_are_the_models_own(cpu: Callable[[int], Backend], vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((4, vocab)) * np.array([[0.1], [3.0], [10.0], [1000.0]])).astype(np.float32)
    row = Row(logprobs=20, temperature=1.5, top_k=7, bias=((0, 3.0),), repetition=1.5, history=((vocab - 1, 1),))
    output = sample(cpu(2), logits, [replace(row, seed=seed) for seed in range(4)])
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    true = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    take = min(vocab, 20)
    for r in range(4):
        order = np.lexsort((np.arange(vocab), -logits[r]))[:take]
        np.testing.assert_array_equal(output.top_ids[r, :take], order)
        # A sum of up to 49152 float32 exponentials, and the result's own rounding.
        np.testing.assert_allclose(output.top_logprobs[r, :take], true[r, order], rtol=1e-6, atol=1e-6)
        assert output.logprobs[r] == pytest.approx(true[r, output.token_ids[r]], rel=1e-6, abs=1e-6)
        assert (output.top_ids[r, take:] == -1).all()
        assert np.isnan(output.top_logprobs[r, take:]).all()


def test_the_most_likely_of_ascending_descending_and_equal_logits(cpu: Callable[[int], Backend]) -> None:
    vocab = 3000
    ramp = np.arange(vocab, dtype=np.float32) / 100
    logits = np.stack([ramp, ramp[::-1], np.zeros(vocab), np.where(np.arange(vocab) % 1000 == 999, 1, 0)])
    output = sample(cpu(1), logits, [Row(logprobs=5)] * 4)
    np.testing.assert_array_equal(
        output.top_ids,
        [[2999, 2998, 2997, 2996, 2995], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [999, 1999, 2999, 0, 1]],
    )
    np.testing.assert_array_equal(output.token_ids, output.top_ids[:, 0])
    np.testing.assert_array_equal(output.logprobs, output.top_logprobs[:, 0])
    assert output.logprobs[2] == np.float32(-np.log(3000))


def test_greedy_takes_the_lowest_of_equals(cpu: Callable[[int], Backend]) -> None:
    logits = np.full((6, 200), -5.0, np.float32)
    logits[0, [150, 70, 199]] = 3.0
    logits[1] = 0.0
    logits[2, [60, 130]] = [-0.0, 0.0]
    logits[3, [60, 130]] = [0.0, -0.0]
    logits[4] = -np.inf
    logits[5, [100, 3]] = np.inf
    assert list(sample(cpu(2), logits, [Row()] * 6).token_ids) == [70, 0, 60, 60, 0, 3]
    # The same ids after a copy through penalties that change nothing.
    assert list(sample(cpu(2), logits, [Row(history=((9, 1),))] * 6).token_ids) == [70, 0, 60, 60, 0, 3]


def test_nan_is_never_chosen_before_a_number(cpu: Callable[[int], Backend]) -> None:
    logits = np.full((4, 130), np.nan, np.float32)
    logits[0, ::2] = np.uint32(0xFFC01234).view(np.float32)
    logits[1, 129] = -np.inf
    logits[2, [64, 100]] = [2.0, 5.0]
    logits[3] = np.linspace(0, 1, 130)
    logits[3, 40] = np.nan
    for row in (
        Row(logprobs=3),
        Row(logprobs=3, temperature=1.0),
        Row(logprobs=3, temperature=1.0, top_k=2, top_p=0.9),
    ):
        output = sample(cpu(1), logits, [row] * 4)
        assert list(output.token_ids[:2]) == [0, 129]
        assert output.token_ids[2] in (64, 100)
        assert output.token_ids[3] != 40
        for logprobs in (output.logprobs, output.top_logprobs):
            assert set(logprobs.view(np.uint32).flat) == {np.float32(np.nan).view(np.uint32)}
        np.testing.assert_array_equal(output.top_ids, [[0, 1, 2], [129, 0, 1], [100, 64, 0], [129, 128, 127]])


def test_minus_infinity_is_never_drawn(cpu: Callable[[int], Backend]) -> None:
    logits = np.full(500, -np.inf, np.float32)
    logits[[3, 77, 400]] = [1.0, 0.5, 0.0]
    rows = [
        Row(temperature=50.0, seed=seed, top_p=p, top_k=k)
        for seed in range(100)
        for p, k in ((1, 0), (0.99, 0), (1, 9))
    ]
    tokens = set(sample(cpu(2), np.tile(logits, (len(rows), 1)), rows).token_ids.tolist())
    assert tokens == {3, 77, 400}


@pytest.mark.parametrize(
    ("logits", "row", "expected"),
    [
        # A positive logit is divided, a negative one multiplied; a seen id of the prompt counts (count 0).
        ((4.0, 2.1, -9.0), Row(repetition=2.0, history=((0, 0),)), 1),
        ((-1.0, -1.9, -9.0), Row(repetition=2.0, history=((0, 0),)), 1),
        ((-1.0, -2.1, -9.0), Row(repetition=2.0, history=((0, 5),)), 0),
        ((1.9, 2.0, 2.1), Row(repetition=0.5, history=((0, 1),)), 0),
        ((-2.0, -2.9, -1.9), Row(repetition=0.5, history=((0, 1), (1, 0))), 0),
        # Presence once, frequency per occurrence, neither for an id of the prompt alone.
        ((2.0, 1.4, 0.0), Row(presence=0.5, history=((0, 9),)), 0),
        ((2.0, 1.6, 0.0), Row(presence=0.5, history=((0, 9),)), 1),
        ((2.0, 1.6, 0.0), Row(presence=0.5, history=((0, 0),)), 0),
        ((2.0, 1.4, 0.0), Row(frequency=0.25, history=((0, 2),)), 0),
        ((2.0, 1.4, 0.0), Row(frequency=0.25, history=((0, 3),)), 1),
        ((2.0, 1.9, 0.0), Row(frequency=-0.25, history=((0, 1), (1, 2))), 1),
        # The repetition penalty comes first: 4 / 2 - 1 = 1, not (4 - 1) / 2 = 1.5; and bias before it: (1 + 3) / 2 = 2.
        ((4.0, 1.2, 0.0), Row(repetition=2.0, presence=1.0, history=((0, 1),)), 1),
        ((1.0, 2.2, 0.0), Row(repetition=2.0, bias=((0, 3.0),), history=((0, 0),)), 1),
        ((1.0, 1.8, 0.0), Row(repetition=2.0, bias=((0, 1.0), (0, 2.0)), history=((0, 0),)), 0),
    ],
)
def test_penalties(cpu: Callable[[int], Backend], logits: tuple[float, ...], row: Row, expected: int) -> None:
    assert sample(cpu(1), np.array([logits]), [row]).token_ids[0] == expected
    # A small temperature leaves the same winner.
    assert sample(cpu(1), np.array([logits]), [replace(row, temperature=1e-3)]).token_ids[0] == expected


def test_extreme_parameters(cpu: Callable[[int], Backend]) -> None:
    logits = np.array([1.0, 3.0, 2.0, 3.0, -1e30, 1e30], np.float32)
    finite = replace(Row(), bias=((5, -1e30),))
    cases = {
        replace(finite, temperature=1e-40): {1, 3},
        replace(finite, temperature=1e-3): {1, 3},
        replace(finite, temperature=1.0, top_k=1): {1, 3},
        replace(finite, temperature=100.0, top_p=1e-30): {1, 3},
        replace(finite, temperature=100.0, min_p=1.0): {1, 3},
        replace(finite, temperature=1.0, bias=((5, -1e30), (0, 1000.0))): {0},
        replace(finite, temperature=100.0, bias=((5, -1e30), (1, -1000.0), (3, -1000.0), (2, -1e4))): {0, 5},
        Row(temperature=1.0, repetition=1e-30, history=((5, 0), (0, 1))): {5},
        Row(temperature=1.0): {5},
    }
    for row, expected in cases.items():
        rows = [replace(row, seed=seed) for seed in range(64)]
        assert set(sample(cpu(1), np.tile(logits, (64, 1)), rows).token_ids.tolist()) == expected, row


# The 0.999 quantiles of chi-square with 9 and with 15 degrees of freedom.
@pytest.mark.parametrize(("vocab", "limit"), [(10, 27.88), (16, 37.70)])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(cpu: Callable[[int], Backend], vocab: int, limit: float, vary: str) -> None:
    draws = 20000
    logits = np.linspace(-1, 1.5, vocab).astype(np.float32)
    temperature = 0.8
    rows = [replace(Row(temperature=temperature, seed=99, position=5), **{vary: i}) for i in range(draws)]
    tokens = sample(cpu(2), np.tile(logits, (draws, 1)), rows).token_ids
    probabilities = np.exp(logits.astype(np.float64) / temperature)
    expected = draws * probabilities / probabilities.sum()
    observed = np.bincount(tokens, minlength=vocab)
    assert ((observed - expected) ** 2 / expected).sum() < limit
    # Draws that follow each other are independent: the pairs' table against the product of its margins.
    pairs = np.zeros((vocab, vocab))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    product = np.outer(expected, expected) / draws
    degrees = (vocab - 1) ** 2
    assert ((pairs - product) ** 2 / product).sum() < degrees + 2 * vocab + 4 * np.sqrt(2 * degrees)


def test_truncated_draws_follow_the_distribution(cpu: Callable[[int], Backend]) -> None:
    draws = 20000
    logits = np.concatenate([np.linspace(-1, 1.5, 10), np.full(90, -1.1)]).astype(np.float32)[::-1]
    rows = [Row(temperature=1.0, top_k=10, seed=seed) for seed in range(draws)]
    observed = np.bincount(sample(cpu(2), np.tile(logits, (draws, 1)), rows).token_ids, minlength=100)
    assert observed[:90].sum() == 0
    probabilities = np.exp(logits[90:].astype(np.float64))
    expected = draws * probabilities / probabilities.sum()
    assert ((observed[90:] - expected) ** 2 / expected).sum() < 27.88


def test_each_part_of_the_key_counts(cpu: Callable[[int], Backend]) -> None:
    logits = np.zeros(4096, np.float32)
    rows = [
        Row(temperature=1.0, seed=seed, position=position)
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
        for position in (0, 1, 2, 70000)
    ]
    tokens = sample(cpu(1), np.tile(logits, (len(rows), 1)), rows).token_ids
    assert len(set(tokens.tolist())) > len(rows) - 3
