"""Which experts a row goes to: the rule as it is written, valid and distinct ids whatever the logits are, a row's own
bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.kernels import Backend, RouterRule

MakeBackend = Callable[[int], Backend]
Floats = NDArray[np.float32]
Chosen = tuple[NDArray[np.int32], Floats]


def rows_of(count: int, inputs: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, count, inputs]).standard_normal((count, inputs), np.float32)


def run(
    backend: Backend,
    x: Floats,
    router: Floats,
    rule: RouterRule,
    *,
    bias: Floats | None = None,
    choice_bias: Floats | None = None,
) -> Chosen:
    """The op on all rows of x, from poisoned memory; what lies behind the rows stays as it is."""
    rows, chosen = len(x), rule.experts_per_token
    for scratch in backend._scratches.values():
        scratch[...] = 0xFF
    ids = backend.upload(np.full((rows + 1, chosen), -7, np.int32))
    shares = backend.upload(np.full((rows + 1, chosen), np.nan, np.float32))
    given = backend.upload(np.concatenate([x, np.full((1, x.shape[1]), np.nan, np.float32)]))
    device = [None if array is None else backend.upload(array) for array in (bias, choice_bias)]
    backend.route(given, backend.upload(router), rule, ids, shares, rows, bias=device[0], choice_bias=device[1])
    got_ids, got_shares = backend.read(ids), backend.read(shares)
    assert (got_ids[rows] == -7).all()
    assert np.isnan(got_shares[rows]).all()
    return got_ids[:rows], got_shares[:rows]


def logits_by_contract(x: Floats, router: Floats) -> Floats:
    """The module's order of summation, one step at a time; a fused step is exact in long double but for its end."""

    def fma(a: Floats, b: Floats, c: Floats) -> Floats:
        return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)

    size = x.shape[1]
    whole = size // 16 * 16
    lanes = np.zeros((len(x), len(router), 32), np.float32)
    for k in range(0, whole, 16):
        half = lanes[:, :, k % 32 : k % 32 + 16]
        half[...] = fma(x[:, None, k : k + 16], router[None, :, k : k + 16], half)
    left = lanes[:, :, :16] + lanes[:, :, 16:]
    while left.shape[2] > 1:
        middle = left.shape[2] // 2
        left = left[:, :, :middle] + left[:, :, middle:]
    total = left[:, :, 0]
    for k in range(whole, size):
        total = fma(x[:, None, k], router[None, :, k], total)
    return total


def by_definition(
    logits: NDArray[np.float64], rule: RouterRule, choice_bias: Floats | None
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Ids, shares, and which rows are clear: no two choices are so close that rounding may swap them."""
    scores = logits
    if rule.scoring == "softmax":
        scores = np.exp(logits - logits.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    if rule.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    choices = scores if choice_bias is None else scores + choice_bias
    rows, experts = choices.shape
    clear = np.ones(rows, np.bool_)

    def best(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
        order = np.argsort(-values, axis=1, kind="stable")
        ranked = np.take_along_axis(values, order, 1)[:, : count + 1]
        with np.errstate(invalid="ignore"):
            gaps = ranked[:, :-1] - ranked[:, 1:]
        clear[(gaps < 1e-5 * np.abs(ranked[:, :-1])).any(1)] = False
        return order[:, :count]

    if rule.num_groups > 1:
        grouped = choices.reshape(rows, rule.num_groups, -1)
        worth = np.sort(grouped, axis=2)[:, :, -2:].sum(2)
        kept = best(worth, rule.groups_kept)
        out = np.full_like(grouped, -np.inf)
        for row in range(rows):
            out[row, kept[row]] = grouped[row, kept[row]]
        choices = out.reshape(rows, experts)
    ids = best(choices, rule.experts_per_token)
    shares = np.take_along_axis(scores, ids, 1)
    if rule.scoring == "softmax_of_chosen":
        shares = np.exp(shares - shares.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
    elif rule.normalise:
        shares = shares / shares.sum(1, keepdims=True)
    return ids, shares * rule.scale, clear


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (8, 2), (8, 8), (60, 4), (128, 8), (128, 1), (130, 16)])
@pytest.mark.parametrize("normalise", [True, False])
def test_equals_the_rule(cpu: MakeBackend, scoring: str, experts: int, chosen: int, normalise: bool) -> None:
    backend = cpu(3)
    x, router, bias = rows_of(40, 576), rows_of(experts, 576, 1) / 12, rows_of(1, experts, 2)[0]
    choice_bias = rows_of(1, experts, 3)[0] / 8
    exact = x.astype(np.float64) @ router.astype(np.float64).T
    rule = RouterRule(chosen, scoring, normalise, 1.5)  # type: ignore[arg-type]
    for own_bias, own_choice in ((None, None), (bias, None), (None, choice_bias), (bias, choice_bias)):
        logits = exact if own_bias is None else exact + own_bias
        ids, shares = run(backend, x, router, rule, bias=own_bias, choice_bias=own_choice)
        expected_ids, expected_shares, clear = by_definition(logits, rule, own_choice)
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(ids[clear], expected_ids[clear])
        np.testing.assert_allclose(shares[clear], expected_shares[clear], rtol=3e-6)
        assert ((ids >= 0) & (ids < experts)).all()


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "chosen"),
    [(8, 4, 2, 3), (60, 6, 3, 8), (128, 8, 4, 8), (256, 8, 1, 16), (6, 6, 3, 2)],
)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_equals_the_rule_with_groups(
    cpu: MakeBackend, experts: int, groups: int, kept: int, chosen: int, scoring: str
) -> None:
    x, router, choice_bias = rows_of(70, 96), rows_of(experts, 96, 1) / 6, rows_of(1, experts, 3)[0] / 8
    rule = RouterRule(chosen, scoring, True, 2.5, groups, kept)  # type: ignore[arg-type]
    for own in (None, choice_bias):
        ids, shares = run(cpu(2), x, router, rule, choice_bias=own)
        exact = x.astype(np.float64) @ router.astype(np.float64).T
        expected_ids, expected_shares, clear = by_definition(exact, rule, own)
        assert clear.mean() > 0.8
        np.testing.assert_array_equal(ids[clear], expected_ids[clear])
        np.testing.assert_allclose(shares[clear], expected_shares[clear], rtol=3e-6)
        assert (np.array([len(set(row // (experts // groups))) for row in ids]) <= kept).all()


@pytest.mark.parametrize("inputs", [1, 15, 16, 17, 32, 47, 48, 63, 576, 2048])
def test_logits_keep_their_order_of_summation(cpu: MakeBackend, inputs: int) -> None:
    """Seen through a choice of all experts by logit whose shares are softmax: equal logits would be needed for equal
    bits, and unequal ones show in a share."""
    backend = cpu(2)
    x, router = 3 * rows_of(9, inputs), rows_of(7, inputs, 1) / np.float32(inputs**0.5)
    run(backend, x, router, RouterRule(7, "softmax_of_chosen"))
    # The logits stay in the scratch memory when shares are made of the chosen ones alone.
    held = backend._scratches["logits"].view(np.float32)[: 9 * 7].reshape(9, 7)
    np.testing.assert_array_equal(held, logits_by_contract(x, router))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_every_batch_at_every_place(cpu: MakeBackend, threads: int) -> None:
    x, router = rows_of(1100, 200), rows_of(60, 200, 1)
    rule = RouterRule(8, "softmax", True, 1.5, 6, 3)
    single = cpu(1)
    alone = [run(single, x[row : row + 1], router, rule) for row in range(0, len(x), 5)]
    alone_ids, alone_shares = (np.concatenate(arrays) for arrays in zip(*alone, strict=True))
    for rows in (*range(1, 66), 257, 511, 512, 513, 1100):
        start = (7 * rows) % (len(x) - rows + 1)
        ids, shares = run(cpu(threads), x[start : start + rows], router, rule)
        skip = -start % 5
        first, count = (start + skip) // 5, len(ids[skip::5])
        np.testing.assert_array_equal(ids[skip::5], alone_ids[first : first + count])
        np.testing.assert_array_equal(shares[skip::5], alone_shares[first : first + count])


def test_threads_do_not_meet_in_scratch_memory(cpu: MakeBackend) -> None:
    """Long enough that all threads come to work on it, also where they share cores."""
    x, router, rule = rows_of(500, 32), rows_of(256, 32, 1), RouterRule(16, "sigmoid", num_groups=8, groups_kept=4)
    expected = run(cpu(1), x, router, rule)
    for _ in range(20):
        for result, right in zip(run(cpu(4), x, router, rule), expected, strict=True):
            np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize("biased", [False, True])
def test_equal_experts_are_chosen_by_the_lowest_id(cpu: MakeBackend, scoring: str, biased: bool) -> None:
    router = rows_of(4, 48, 1)[[3, 1, 0, 1, 2, 0, 3, 2, 1, 0]]
    x = rows_of(40, 48)
    choice_bias = np.zeros(10, np.float32) if biased else None
    ids, shares = run(cpu(2), x, router, RouterRule(10, scoring), choice_bias=choice_bias)  # type: ignore[arg-type]
    kinds = np.array([3, 1, 0, 1, 2, 0, 3, 2, 1, 0])
    for row, row_shares in zip(ids, shares, strict=True):
        assert sorted(row) == list(range(10))
        for kind in range(4):
            own = row[kinds[row] == kind]
            assert (np.diff(own) > 0).all()
            assert len(set(row_shares[kinds[row] == kind])) == 1
        # Equal ones stand together.
        assert (np.diff(kinds[row]) != 0).sum() == 3


def test_zeros_of_both_signs_are_equal(cpu: MakeBackend) -> None:
    """A product too small for a float32 rounds to either of them."""
    router = np.array([[-1e-30], [1e-30], [-1e-30], [1e-30]], np.float32)
    x = np.array([[1e-30], [-1e-30]], np.float32)
    backend = cpu(1)
    ids, _ = run(backend, x, router, RouterRule(4, "softmax_of_chosen"))
    assert np.signbit(backend._scratches["logits"].view(np.float32)[:8]).sum() == 4
    assert (ids == [0, 1, 2, 3]).all()


def test_equal_groups_are_kept_by_the_lowest(cpu: MakeBackend) -> None:
    """Two runs of equal experts: worth the same, so the first ones are kept."""
    router = np.tile(rows_of(3, 48, 1), (4, 1))
    ids, _ = run(cpu(1), rows_of(20, 48), router, RouterRule(6, "sigmoid", num_groups=4, groups_kept=2))
    assert (np.sort(ids, axis=1) == np.arange(6)).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_ids_are_valid_and_distinct_whatever_the_logits_are(
    cpu: MakeBackend, scoring: str, groups: tuple[int, int], value: float
) -> None:
    backend = cpu(2)
    router = np.eye(16, dtype=np.float32)
    clean = rows_of(40, 16)
    rng = np.random.default_rng(3)
    x = clean.copy()
    for row in range(0, 40, 2):
        x[row, rng.permutation(16)[: 1 + row // 2 % 16]] = value
    x[38] = value
    rule = RouterRule(8, scoring, True, 1.0, *groups)  # type: ignore[arg-type]
    ids, shares = run(backend, x, router, rule)
    assert ((ids >= 0) & (ids < 16)).all()
    assert all(len(set(row)) == 8 for row in ids)
    expected_ids, expected_shares = run(backend, clean, router, rule)
    np.testing.assert_array_equal(ids[1::2], expected_ids[1::2])
    np.testing.assert_array_equal(shares[1::2], expected_shares[1::2])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax_of_chosen"])
def test_an_expert_without_a_number_is_chosen_last(cpu: MakeBackend, sign: int, scoring: str) -> None:
    bias = np.zeros(6, np.float32)
    bias[[1, 4]] = np.copysign(np.float32(np.nan), sign)
    bias[2] = -np.inf
    rule = RouterRule(6, scoring)  # type: ignore[arg-type]
    ids, _ = run(cpu(1), rows_of(5, 32), rows_of(6, 32, 1), rule, bias=bias)
    assert (ids[:, 3:] == [2, 1, 4]).all()


def test_the_choice_bias_has_no_part_in_the_shares(cpu: MakeBackend) -> None:
    x, router = rows_of(20, 48), rows_of(8, 48, 1) / 7
    push = np.zeros(8, np.float32)
    push[[2, 5]] = 100
    ids, shares = run(cpu(1), x, router, RouterRule(2, "sigmoid", normalise=False), choice_bias=push)
    assert (np.sort(ids, axis=1) == [2, 5]).all()
    scores = 1 / (1 + np.exp(-x.astype(np.float64) @ router.astype(np.float64).T))
    np.testing.assert_allclose(shares, np.take_along_axis(scores, ids.astype(np.int64), 1), rtol=1e-6)


def test_refuses_what_does_not_fit(cpu: MakeBackend) -> None:
    backend = cpu(1)
    x, router = np.zeros((3, 32), np.float32), np.zeros((8, 32), np.float32)
    ids, shares, rule = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32), RouterRule(2)
    backend.route(x, router, rule, ids, shares, 3)
    backend.synchronize()
    vector = np.zeros(8, np.float32)
    for change in (
        {"x": x[:, :31].copy()},
        {"x": x[:2]},
        {"router": router.T},
        {"rule": RouterRule(3)},
        {"rule": RouterRule(0)},
        {"rule": replace(rule, num_groups=3)},
        {"rule": replace(rule, num_groups=8, groups_kept=1)},
        {"rule": replace(rule, num_groups=2, groups_kept=3)},
        {"expert_ids": ids.astype(np.int64)},
        {"expert_ids": ids[:2]},
        {"shares": shares[:2]},
        {"shares": np.zeros((3, 3), np.float32)},
        {"rows": 0},
        {"rows": 4},
        {"bias": vector[:7]},
        {"choice_bias": vector.astype(np.float64)},
    ):
        given = {"x": x, "router": router, "rule": rule, "expert_ids": ids, "shares": shares, "rows": 3, **change}
        with pytest.raises(AssertionError):
            backend.route(**given)


def run_add_gated(backend: Backend, x: Floats, gate: Floats, y: Floats, out: Floats) -> Floats:
    behind = np.full((1, y.shape[1]), np.nan, np.float32)
    device_out = backend.upload(np.concatenate([out, behind]))
    arrays = [backend.upload(array) for array in (x, gate, np.concatenate([y, behind]))]
    backend.add_gated(*arrays, device_out, len(x))
    result: Floats = backend.read(device_out)
    assert np.isnan(result[-1]).all()
    return result[:-1]


@pytest.mark.parametrize("inputs", [1, 17, 576])
def test_add_gated_equals_its_definition_and_keeps_a_rows_bits(cpu: MakeBackend, inputs: int) -> None:
    x, gate = rows_of(257, inputs), rows_of(1, inputs, 1)[0] * 2
    y, out = rows_of(257, 70, 2), rows_of(257, 70, 3)
    weight = 1 / (1 + np.exp(-x.astype(np.float64) @ gate.astype(np.float64)))
    whole = run_add_gated(cpu(1), x, gate, y, out)
    np.testing.assert_allclose(whole, out + weight[:, None] * y, rtol=1e-4, atol=1e-5)
    for threads in (1, 2, 3):
        for rows in (1, 2, 3, 5, 64, 65, 256):
            start = 257 - rows
            part = run_add_gated(cpu(threads), x[start:], gate, y[start:], out[start:])
            np.testing.assert_array_equal(part, whole[start:])
    x[3] = np.nan
    dirty = run_add_gated(cpu(2), x, gate, y, out)
    assert np.isnan(dirty[3]).all()
    np.testing.assert_array_equal(np.delete(dirty, 3, 0), np.delete(whole, 3, 0))
