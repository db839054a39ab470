"""A router on a GPU: against float64 and the CPU backend, ties, and a row's bits in any company."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardline.kernels import RouterRule, cpu_backend
from shardline.kernels.cuda import tables

pytestmark = pytest.mark.gpu
KERNELS = (tables.ROUTE_ONE, *tables.ROUTE)
ORDERED = [pair for pair in itertools.product((8, 60, 64, 128, 512), (8, 64, 2048, 2880, 8192)) if pair != (512, 8192)]
COUNTS = [*range(1, 66), 255, 256, 257, 511, 512, 513]
POISON = np.uint32(0x7FCABCDE)
RULES = {
    "softmax": RouterRule(8),
    "softmax, not normalised": RouterRule(4, normalise=False, scale=2.5),
    "sigmoid": RouterRule(3, scoring="sigmoid", scale=1.5),
    "of chosen": RouterRule(4, scoring="softmax_of_chosen"),
    "groups": RouterRule(6, scoring="sigmoid", scale=2.5, num_groups=4, groups_kept=2),
}


class Router:
    """A router's weights on the host and on the device."""

    def __init__(self, cuda: Any, experts: int, inputs: int, *, biases: bool = False, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, experts, inputs])
        self.cuda = cuda
        self.weight = (rng.standard_normal((experts, inputs)) * 3 / np.sqrt(inputs)).astype(np.float32)
        self.bias = rng.standard_normal(experts).astype(np.float32) if biases else None
        self.choice_bias = rng.uniform(-0.3, 0.3, experts).astype(np.float32) if biases else None

    def __call__(self, x: Any, rule: RouterRule, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and the shares' bits, and that nothing else was written."""
        cuda = self.cuda
        ids = cuda.upload(np.full((rows + 2, rule.experts_per_token), -7, np.int32))
        shares = cuda.upload(np.full(ids.shape, POISON, np.uint32).view(np.float32))
        given = {"bias": self.bias, "choice_bias": self.choice_bias}
        device = {name: None if array is None else cuda.upload(array) for name, array in given.items()}
        cuda.route(x, cuda.upload(self.weight), rule, ids, shares, rows, **device)
        all_ids, bits = cuda.read(ids), cuda.read(shares).view(np.uint32)
        assert (all_ids[rows:] == -7).all()
        assert (bits[rows:] == POISON).all()
        return all_ids[:rows], bits[:rows]

    def on_cpu(self, values: np.ndarray, rule: RouterRule) -> tuple[np.ndarray, np.ndarray]:
        """The same from the CPU backend."""
        backend = cpu_backend(1)
        try:
            ids = backend.empty((len(values), rule.experts_per_token), "int32")
            shares = backend.empty(ids.shape, "float32")
            arrays = [None if a is None else backend.upload(a) for a in (self.bias, self.choice_bias)]
            x, weight = backend.upload(values), backend.upload(self.weight)
            backend.route(x, weight, rule, ids, shares, len(values), bias=arrays[0], choice_bias=arrays[1])
            return backend.read(ids), backend.read(shares)
        finally:
            backend.close()

    def scores(self, seen: np.ndarray, rule: RouterRule) -> np.ndarray:
        """In float64, of what the router sees."""
        logits = seen.astype(np.float64) @ self.weight.astype(np.float64).T
        if self.bias is not None:
            logits += self.bias
        if rule.scoring == "sigmoid":
            return 1 / (1 + np.exp(-logits))
        if rule.scoring == "softmax":
            e = np.exp(logits - logits.max(axis=1, keepdims=True))
            return e / e.sum(axis=1, keepdims=True)
        return logits


def rows_of(seed: int, count: int, channels: int) -> np.ndarray:
    rng = np.random.default_rng([seed, count, channels])
    return (rng.standard_normal((count, channels)) * rng.uniform(0.2, 3, (count, 1))).astype(np.float32)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_is_the_rule_in_float64_and_on_the_cpu(
    cuda: Any,
    prepared: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    biases: bool,
    kernel: tables.RouteVariant,
) -> None:
    monkeypatch.setattr(tables, "route_variant", lambda *_: kernel)
    rule = RULES[name]
    for experts, inputs, rows in ((8, 256, 3), (60, 576, 9), (128, 2048, 70), (512, 136, 17)):
        if rule.experts_per_token > experts // rule.num_groups * rule.groups_kept:
            continue
        router = Router(cuda, experts, inputs, biases=biases)
        x, seen = prepared(rows_of(1, rows, inputs))
        ids, bits = router(x, rule, rows)
        shares = bits.view(np.float32)
        cpu_ids, cpu_shares = router.on_cpu(seen, rule)
        # Two experts whose choices are closer than float32's rounding may change places.
        assert np.mean(ids == cpu_ids) > 0.99
        same = (ids == cpu_ids).all(axis=1)
        assert np.allclose(shares[same], cpu_shares[same], rtol=2e-5, atol=1e-7)

        chosen = np.take_along_axis(router.scores(seen, rule), ids, axis=1)
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        if rule.scoring == "softmax_of_chosen":
            chosen = np.exp(chosen - chosen.max(axis=1, keepdims=True))
        if rule.normalise or rule.scoring == "softmax_of_chosen":
            chosen = chosen / chosen.sum(axis=1, keepdims=True)
        assert np.allclose(shares, chosen * rule.scale, rtol=2e-5, atol=1e-7)


def test_equal_experts_go_by_the_lowest_id(cuda: Any, prepared: Callable[..., Any]) -> None:
    for experts, rule in itertools.product((4, 40, 128), (RouterRule(3), RouterRule(2, scoring="sigmoid"))):
        router = Router(cuda, experts, 256)
        router.weight[:] = router.weight[0]
        for rows in (1, 70):
            x, _ = prepared(rows_of(2, rows, 256))
            ids, bits = router(x, rule, rows)
            assert (ids == np.arange(rule.experts_per_token)).all()
            assert (bits == bits[:, :1]).all()
    # Groups too: all are worth the same, and of those kept the lowest experts are chosen.
    router = Router(cuda, 32, 256)
    router.weight[:] = router.weight[0]
    x, _ = prepared(rows_of(3, 5, 256))
    ids, _ = router(x, RouterRule(3, scoring="sigmoid", num_groups=8, groups_kept=2), 5)
    assert (ids == np.arange(3)).all()


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma of float32: a has 24 bits and b, an activation, 11, so that float64 holds their product."""
    product = a.astype(np.float64) * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    # Rounded to odd, so that the second rounding sees on which side of the middle the sum is.
    even = total.view(np.int64) % 2 == 0
    total = np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return total.astype(np.float32)


def logits_in_order(seen: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Logits by the order in the header of route.cu. `seen` has a row's power of two in it, which changes no bit."""
    rounds = -(-weight.shape[1] // 256)
    tail = (0, rounds * 256 - weight.shape[1])
    x, w = (np.pad(a, ((0, 0), tail)).reshape(len(a), rounds, 32, 8) for a in (seen, weight))
    chains = np.zeros((len(seen), len(weight), 32), np.float32)
    for position, i in itertools.product(range(rounds), range(8)):
        chains = multiply_add(w[None, :, position, :, i], x[:, None, position, :, i], chains)
    # By bits 4, 3, 2, 1, 0 of a chain's number.
    tree = chains.reshape(len(seen), len(weight), 2, 2, 2, 2, 2)
    tree = tree[:, :, :, :, 0] + tree[:, :, :, :, 1]
    tree = tree[:, :, :, 0] + tree[:, :, :, 1]
    tree = tree[:, :, 0] + tree[:, :, 1]
    tree = tree[..., 0] + tree[..., 1]
    logits: np.ndarray = tree[..., 0] + tree[..., 1]
    return logits if bias is None else logits + bias


@pytest.mark.parametrize(("experts", "inputs"), ORDERED)
def test_sums_in_the_order_that_the_source_states(
    cuda: Any, prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, experts: int, inputs: int
) -> None:
    router = Router(cuda, experts, inputs, biases=experts == 60)
    values = rows_of(6, 24, inputs)
    _, seen = prepared(values)
    expected = logits_in_order(seen, router.weight, router.bias).view(np.uint32)
    rng = np.random.default_rng(7)
    for kernel, count in itertools.product(KERNELS, [c for c in (*range(1, 18), 64, 257) if c in COUNTS]):
        monkeypatch.setattr(tables, "route_variant", lambda *_, kernel=kernel: kernel)
        chosen = rng.integers(0, len(values), count)
        x, _ = prepared(values[chosen])
        with cuda.here():
            logits = cuda._buffer("router logits", (count + 1) * experts)
        cuda.write(logits, np.full(logits.shape, POISON, np.uint32).view(np.float32))
        router(x, RouterRule(min(8, experts)), count)
        got = cuda.read(logits).view(np.uint32)
        assert np.array_equal(got[: count * experts].reshape(count, experts), expected[chosen]), (kernel, count)
        assert (got[count * experts :] == POISON).all(), (kernel, count)


@pytest.mark.parametrize("name", RULES)
def test_a_row_is_the_same_in_any_company(
    cuda: Any, prepared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rule, inputs, most = RULES[name], 2048, max(COUNTS)
    router = Router(cuda, 128, inputs, biases=name == "groups")
    values = rows_of(4, most, inputs)
    values[5, 77], values[17, 1] = np.nan, np.inf
    alone = []
    for row in range(most):
        x, _ = prepared(values[row : row + 1])
        alone.append(router(x, rule, 1))
    ids, bits = (np.concatenate(part) for part in zip(*alone, strict=True))
    for row in (5, 17):
        assert len(set(ids[row].tolist())) == rule.experts_per_token
        assert ((ids[row] >= 0) & (ids[row] < 128)).all()
    assert np.isnan(bits[5].view(np.float32)).all()
    fine = ~np.isnan(bits.view(np.float32)).any(axis=1)
    assert fine.sum() >= most - 2
    rng = np.random.default_rng(5)
    for kernel in (None, *KERNELS):
        if kernel is not None:
            monkeypatch.setattr(tables, "route_variant", lambda *_, kernel=kernel: kernel)
        for count in COUNTS:
            chosen = rng.permutation(most)[:count]
            x, _ = prepared(values[chosen])
            got_ids, got_bits = router(x, rule, count)
            assert np.array_equal(got_ids, ids[chosen]), (kernel, count)
            assert np.array_equal(got_bits[fine[chosen]], bits[chosen][fine[chosen]]), (kernel, count)
