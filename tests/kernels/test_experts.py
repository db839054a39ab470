"""A mixture of experts: right, the bits of products that are written out one by one, and each row's its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.kernels import Activation, Backend, Expert, GroupedMatrix, Weight

MakeBackend = Callable[[int], Backend]
MakeMatrix = Callable[..., GroupedMatrix]
Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

ROW_COUNTS = [*range(1, 66), 257]
KINDS = {
    "all 4": ({}, {}, {}),
    "mixed": ({"bits": 8}, {"group_size": 16, "dtype": "float32"}, {"bits": 8, "group_size": 16}),
}


def rows_of(count: int, inputs: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, count, inputs]).standard_normal((count, inputs), np.float32)


def order_of(inputs: int, seed: int) -> Ids:
    return np.random.default_rng([seed, inputs]).permutation(inputs).astype(np.int32)


def chosen_of(rows: int, experts: int, chosen: int, seed: int = 0) -> tuple[Ids, Floats]:
    """Distinct experts a row, by a routing that leaves some experts without a row, and shares."""
    rng = np.random.default_rng([seed, rows, experts, chosen])
    liked = rng.random(experts) ** 3 + 0.01
    liked[rng.permutation(experts)[: (experts - chosen) // 2]] = 0
    ids = [rng.choice(experts, chosen, replace=False, p=liked / liked.sum()) for _ in range(rows)]
    return np.array(ids, np.int32), rng.random((rows, chosen), np.float32)


def make_experts(
    random_matrix: MakeMatrix, count: int, width: int, inputs: int, kind: str = "all 4", orders: str = ""
) -> list[Expert]:
    """`orders`: which of gate, up, down have their columns in an order: of their own (a letter), or one that both gate
    and up have ("=")."""
    made = []
    for seed in range(count):
        gate, up, down = (
            random_matrix(*shape, seed=3 * seed + i, **options)
            for i, (shape, options) in enumerate(
                zip(((width, inputs), (width, inputs), (inputs, width)), KINDS[kind], strict=True)
            )
        )
        if "g" in orders or "=" in orders:
            gate = replace(gate, input_order=order_of(inputs, 3 * seed))
        if "u" in orders:
            up = replace(up, input_order=order_of(inputs, 3 * seed + 1))
        if "=" in orders:
            up = replace(up, input_order=order_of(inputs, 3 * seed))
        if "d" in orders:
            down = replace(down, input_order=order_of(width, 3 * seed + 2))
        made.append(Expert(gate, up, down))
    return made


def run(
    backend: Backend, experts: Weight, x: Floats, ids: Ids, shares: Floats, start: Floats, *, scratch: int = 0xFF
) -> Floats:
    """The op on all rows of x, added to `start`, from poisoned memory. Behind the rows lies what must not be used."""
    rows, inputs = x.shape
    for memory in backend._scratches.values():
        memory[...] = scratch
    behind = np.full((1, inputs), np.nan, np.float32)
    out = backend.upload(np.concatenate([start, behind]))
    backend.expert_mlp(
        backend.upload(np.concatenate([x, behind])),
        experts,
        backend.upload(np.concatenate([ids, np.full((1, ids.shape[1]), 2**30, np.int32)])),
        backend.upload(np.concatenate([shares, np.full((1, ids.shape[1]), np.nan, np.float32)])),
        out,
        rows,
    )
    result: Floats = backend.read(out)
    assert np.isnan(result[rows]).all()
    return result[:rows]


def joined(activation: str, gate: NDArray[np.float64], up: NDArray[np.float64]) -> NDArray[np.float64]:
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def by_definition(
    experts: Sequence[Expert],
    activation: str,
    biases: tuple[Floats, Floats, Floats] | None,
    x: Floats,
    ids: Ids,
    shares: Floats,
) -> NDArray[np.float64]:
    total = np.zeros(x.shape, np.float64)
    for number, expert in enumerate(experts):
        gate, up, down = (m.dequantize().astype(np.float64) for m in (expert.gate, expert.up, expert.down))
        for row, rank in zip(*np.nonzero(ids == number), strict=True):
            g, u = gate @ x[row].astype(np.float64), up @ x[row].astype(np.float64)
            if biases is not None:
                g, u = g + biases[0][number], u + biases[1][number]
            y = down @ joined(activation, g, u)
            total[row] += shares[row, rank] * (y if biases is None else y + biases[2][number])
    return total


def biases_of(experts: int, width: int, inputs: int) -> tuple[Floats, Floats, Floats]:
    return rows_of(experts, width, 7), rows_of(experts, width, 8), rows_of(experts, inputs, 9)


def load(
    backend: Backend,
    experts: Sequence[Expert],
    activation: Activation = "silu",
    biases: tuple[Floats, Floats, Floats] | None = None,
) -> Weight:
    names = ("gate_bias", "up_bias", "down_bias")
    given = {} if biases is None else {n: backend.upload(b) for n, b in zip(names, biases, strict=True)}
    return backend.load_experts(iter(experts), activation=activation, **given)


@pytest.mark.parametrize("chosen", [1, 2, 8])
@pytest.mark.parametrize(("count", "width"), [(8, 96), (60, 32), (128, 32)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_equals_its_definition(
    cpu: MakeBackend, random_matrix: MakeMatrix, count: int, width: int, chosen: int, kind: str
) -> None:
    experts = make_experts(random_matrix, count, width, 576, kind)
    backend = cpu(2)
    weight = load(backend, experts)
    for rows in (1, 37):
        x, (ids, shares), start = rows_of(rows, 576), chosen_of(rows, count, chosen), rows_of(rows, 576, 1)
        expected = start + by_definition(experts, "silu", None, x, ids, shares)
        np.testing.assert_allclose(run(backend, weight, x, ids, shares, start), expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("orders", ["", "=", "gud", "=d", "d", "u"])
def test_equals_its_definition_with_activations_biases_and_orders(
    cpu: MakeBackend, random_matrix: MakeMatrix, activation: Activation, biased: bool, orders: str
) -> None:
    experts = make_experts(random_matrix, 5, 96, 64, "mixed", orders)
    # One expert has its columns in order.
    experts[2] = make_experts(random_matrix, 3, 96, 64, "mixed")[2]
    biases = biases_of(5, 96, 64) if biased else None
    backend = cpu(3)
    x, (ids, shares), start = 3 * rows_of(40, 64), chosen_of(40, 5, 3), rows_of(40, 64, 1)
    expected = start + by_definition(experts, activation, biases, x, ids, shares)
    result = run(backend, load(backend, experts, activation, biases), x, ids, shares, start)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("orders", ["", "=", "gud", "d"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("biased", [False, True])
def test_has_the_bits_of_products_written_out_one_by_one(
    cpu: MakeBackend, random_matrix: MakeMatrix, orders: str, kind: str, biased: bool
) -> None:
    """Of `gated_linear` and `linear` for each row and expert alone, then a chain of fmas from zero by rank, then one
    sum."""
    count, width, inputs, rows, chosen = 6, 96, 70 * 16, 21, 4
    if kind == "all 4":
        inputs = 64 * 9
    experts = make_experts(random_matrix, count, width, inputs, kind, orders)
    biases = biases_of(count, width, inputs)
    backend = cpu(2)
    x, (ids, shares), start = rows_of(rows, inputs), chosen_of(rows, count, chosen), rows_of(rows, inputs, 1)
    total = np.zeros((rows, inputs), np.float32)
    alone = [(backend.load_gated(e.gate, e.up), backend.load_matrix([e.down])) for e in experts]
    row_x, hidden, result = (backend.empty((1, size), "float32") for size in (inputs, width, inputs))
    for row in range(rows):
        backend.write(row_x, x[row : row + 1])
        for rank in range(chosen):
            number = ids[row, rank]
            bias = np.concatenate([biases[0][number], biases[1][number]])
            device = (backend.upload(bias), backend.upload(biases[2][number])) if biased else (None, None)
            backend.gated_linear(row_x, alone[number][0], hidden, 1, bias=device[0])
            backend.linear(hidden, alone[number][1], result, 1, bias=device[1])
            y = backend.read(result)[0].astype(np.longdouble)
            # Exact but for its end.
            total[row] = (shares[row, rank].astype(np.longdouble) * y + total[row]).astype(np.float32)
    weight = load(backend, experts, "silu", biases if biased else None)
    np.testing.assert_array_equal(run(backend, weight, x, ids, shares, start), start + total)


@pytest.mark.parametrize(("count", "chosen", "orders"), [(60, 4, ""), (8, 2, "gud"), (8, 8, "=")])
def test_a_row_has_the_same_bits_in_every_batch_at_every_place_on_any_threads(
    cpu: MakeBackend, random_matrix: MakeMatrix, count: int, chosen: int, orders: str
) -> None:
    """Whichever experts the other rows choose: those of a routing, one for all, or none that the row has."""
    inputs, width = 128, 96
    experts = make_experts(random_matrix, count, width, inputs, "all 4", orders)
    rows = max(ROW_COUNTS)
    x, (ids, shares), start = rows_of(rows, inputs), chosen_of(rows, count, chosen), rows_of(rows, inputs, 1)
    single = cpu(1)
    weight = load(single, experts)
    alone = np.concatenate([run(single, weight, *(a[r : r + 1] for a in (x, ids, shares, start))) for r in range(rows)])
    for threads in (1, 2, 3):
        backend = cpu(threads)
        weight = load(backend, experts)
        for number in ROW_COUNTS:
            at = np.roll(np.arange(rows), 7 * number)[:number]
            np.testing.assert_array_equal(
                run(backend, weight, x[at], ids[at], shares[at], start[at]), alone[at], err_msg=f"{number} rows"
            )
        for seed in range(4):
            at = np.roll(np.arange(rows), 31 * seed)[:65]
            others = np.random.default_rng(seed).random(65) < 0.7
            changed = ids[at]
            kind = [np.arange(chosen), np.zeros(chosen), np.full(chosen, count - 1), np.arange(chosen)[::-1]][seed]
            changed[others] = kind.astype(np.int32)
            result = run(backend, weight, x[at], changed, shares[at], start[at])
            np.testing.assert_array_equal(result[~others], alone[at][~others])


@pytest.mark.parametrize("orders", ["", "gud"])
def test_more_rows_than_are_done_at_once(cpu: MakeBackend, random_matrix: MakeMatrix, orders: str) -> None:
    experts = make_experts(random_matrix, 8, 32, 64, "all 4", orders)
    backend = cpu(3)
    weight = load(backend, experts)
    x, (ids, shares), start = rows_of(1100, 64), chosen_of(1100, 8, 2), rows_of(1100, 64, 1)
    for rows in (511, 512, 513, 1100):
        arrays = [array[:rows] for array in (x, ids, shares, start)]
        whole = run(backend, weight, *arrays)
        for row in (0, 63, 64, 510, rows - 1):
            alone = run(backend, weight, *(array[row : row + 1] for array in arrays))
            np.testing.assert_array_equal(whole[row], alone[0])


def test_an_expert_is_read_once_for_all_of_its_rows(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    """As the compiled plan says: a tile is up to 64 pairs of one expert, and holds each of them once."""
    backend = cpu(2)
    weight = load(backend, make_experts(random_matrix, 8, 32, 64))
    for rows, chosen in ((1, 3), (64, 2), (257, 3)):
        ids, shares = chosen_of(rows, 8, chosen)
        run(backend, weight, rows_of(rows, 64), ids, shares, rows_of(rows, 64))
        plan = backend._scratches["plan"].view(np.int64)
        pairs, tiles = rows * chosen, plan[0]
        counts = np.bincount(ids.ravel(), minlength=8)
        assert tiles == sum(-(-count // 64) for count in counts)
        order = plan[2 : 2 + pairs]
        np.testing.assert_array_equal(order, np.argsort(ids.ravel(), kind="stable"))
        np.testing.assert_array_equal(plan[2 + pairs : 2 + 2 * pairs], order // chosen)
        table = plan[2 + 2 * pairs :][: 4 * tiles].reshape(-1, 4)
        np.testing.assert_array_equal(np.bincount(table[:, 0], table[:, 2], minlength=8), counts)
        np.testing.assert_array_equal(table[:, 1], np.cumsum(table[:, 2]) - table[:, 2])


def test_the_experts_are_known_only_when_the_records_run(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    """A recorded step is replayed with other choices."""
    backend = cpu(3)
    weight = load(backend, make_experts(random_matrix, 8, 32, 64))
    rows = 33
    x, out = backend.empty((rows, 64), "float32"), backend.empty((rows, 64), "float32")
    ids, shares = backend.empty((rows, 2), "int32"), backend.empty((rows, 2), "float32")
    zeros = np.zeros((rows, 64), np.float32)
    for seed in range(6):
        given_ids, given_shares = chosen_of(rows, 8, 2, seed)
        if seed == 3:
            given_ids[...] = [5, 1]
        for target, host in ((x, rows_of(rows, 64, seed)), (out, zeros), (ids, given_ids), (shares, given_shares)):
            backend.write(target, host)
        backend.replay("a mixture", lambda: backend.expert_mlp(x, weight, ids, shares, out, rows))
        result = backend.read(out)
        expected = run(backend, weight, rows_of(rows, 64, seed), given_ids, given_shares, zeros)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(cpu: MakeBackend, random_matrix: MakeMatrix, value: float) -> None:
    backend = cpu(2)
    weight = load(backend, make_experts(random_matrix, 8, 96, 64))
    x, (ids, shares), start = rows_of(20, 64), chosen_of(20, 8, 2), rows_of(20, 64, 1)
    clean = run(backend, weight, x, ids, shares, start)
    others = np.delete(np.arange(20), 7)
    for array, at in ((x, (7, 3)), (shares, (7, 1)), (start, (7, slice(None)))):
        dirty = array.copy()
        dirty[at] = value
        given = [dirty if own is array else own for own in (x, ids, shares, start)]
        result = run(backend, weight, *given)
        assert not np.isfinite(result[7]).any()
        np.testing.assert_array_equal(result[others], clean[others])


@pytest.mark.parametrize("wrong", [-1, 8, 2**31 - 1, -(2**31)])
def test_an_expert_that_is_none_poisons_its_row_alone(cpu: MakeBackend, random_matrix: MakeMatrix, wrong: int) -> None:
    backend = cpu(2)
    weight = load(backend, make_experts(random_matrix, 8, 32, 64))
    x, (ids, shares), start = rows_of(20, 64), chosen_of(20, 8, 2), rows_of(20, 64, 1)
    clean = run(backend, weight, x, ids, shares, start)
    ids[4, 1], ids[11] = wrong, wrong
    for scratch in (0xFF, 0):
        result = run(backend, weight, x, ids, shares, start, scratch=scratch)
        assert np.isnan(result[[4, 11]]).all()
        np.testing.assert_array_equal(np.delete(result, [4, 11], 0), np.delete(clean, [4, 11], 0))
    ids[...] = wrong
    assert np.isnan(run(backend, weight, x, ids, shares, start)).all()


def test_an_expert_may_come_twice_in_a_row(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(2)
    experts = make_experts(random_matrix, 8, 32, 64)
    x, start = rows_of(70, 64), rows_of(70, 64, 1)
    ids, shares = np.full((70, 3), 5, np.int32), rows_of(70, 3, 2)
    expected = start + by_definition(experts, "silu", None, x, ids, shares)
    np.testing.assert_allclose(run(backend, load(backend, experts), x, ids, shares, start), expected, atol=1e-4)


def test_threads_do_not_meet_in_scratch_memory(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    """Long enough that all threads come to work on it, also where they share cores."""
    experts = make_experts(random_matrix, 8, 512, 512, "all 4", "gud")
    x, (ids, shares), start = rows_of(64, 512), chosen_of(64, 8, 2), rows_of(64, 512, 1)
    single, team = cpu(1), cpu(4)
    expected = run(single, load(single, experts), x, ids, shares, start)
    weight = load(team, experts)
    for _ in range(10):
        np.testing.assert_array_equal(run(team, weight, x, ids, shares, start), expected)


def test_refuses_what_does_not_fit(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(1)
    experts = make_experts(random_matrix, 3, 32, 64)
    weight = load(backend, experts)
    x, out = np.zeros((4, 64), np.float32), np.zeros((4, 64), np.float32)
    ids, shares = np.zeros((4, 2), np.int32), np.zeros((4, 2), np.float32)
    good = {"x": x, "experts": weight, "expert_ids": ids, "shares": shares, "out": out, "rows": 4}
    backend.expert_mlp(**good)
    backend.synchronize()
    for change in (
        {"x": x[:, :32].copy()},
        {"x": x[:3]},
        {"x": out},
        {"experts": backend.load_matrix([experts[0].gate])},
        {"expert_ids": ids.astype(np.int64)},
        {"expert_ids": ids[:3]},
        {"shares": shares[:, :1].copy()},
        {"shares": shares[:3]},
        {"out": out[:3]},
        {"out": np.zeros((4, 65), np.float32)},
        {"rows": 0},
        {"rows": 5},
    ):
        with pytest.raises(AssertionError):
            backend.expert_mlp(**{**good, **change})
    other = make_experts(random_matrix, 1, 64, 64)
    bias = {name: np.zeros((3, size), np.float32) for name, size in (("gate_bias", 32), ("up_bias", 32))}
    for load_wrong in (
        lambda: backend.load_experts([]),
        lambda: backend.load_experts([*experts, *other]),
        lambda: backend.load_experts([replace(experts[0], up=other[0].up)]),
        lambda: backend.load_experts([replace(experts[0], down=other[0].down)]),
        lambda: backend.load_experts(experts, **bias),
        lambda: backend.load_experts(experts, **bias, down_bias=np.zeros((3, 32), np.float32)),
        lambda: backend.load_experts(experts[:2], **bias, down_bias=np.zeros((1, 64), np.float32)),
    ):
        with pytest.raises(AssertionError):
            load_wrong()
