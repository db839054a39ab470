"""A mixture of experts on a GPU: against float64 and single products, and a row's bits in every tile and company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from shardline.kernels import Activation, Expert

pytestmark = pytest.mark.gpu
COUNTS = [*range(1, 66), 255, 256, 257, 511, 512, 513]
POISON = np.uint32(0x7FCABCDE)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")


@dataclass
class Layer:
    """Experts on the host and on the device."""

    experts: list[Expert]
    weight: Any
    activation: Activation
    biases: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    @property
    def inputs(self) -> int:
        return self.experts[0].gate.shape[1]

    @property
    def width(self) -> int:
        return self.experts[0].gate.shape[0]


def make_layer(
    cuda: Any,
    formats: tuple[Any, Any, Any],
    count: int,
    width: int,
    inputs: int,
    *,
    activation: Activation = "silu",
    biases: bool = False,
    orders: bool = False,
    seed: int = 0,
) -> Layer:
    """Random experts; formats of gate, up, down."""
    rng = np.random.default_rng([seed, count, width, inputs])
    gate, up, down = formats

    def ordered(matrix: Any, order: np.ndarray | None) -> Any:
        return matrix if order is None else replace(matrix, input_order=order)

    experts = []
    for e in range(count):
        ins = rng.permutation(inputs).astype(np.int32) if orders else None
        mids = rng.permutation(width).astype(np.int32) if orders else None
        experts.append(
            Expert(
                ordered(gate.matrix(width, inputs, 3 * e + seed), ins),
                ordered(up.matrix(width, inputs, 3 * e + 1 + seed), ins),
                ordered(down.matrix(inputs, width, 3 * e + 2 + seed), mids),
            )
        )
    made = None
    if biases:
        made = tuple(rng.standard_normal((count, n)).astype(np.float32) for n in (width, width, inputs))
    names = ("gate_bias", "up_bias", "down_bias")
    given = {} if made is None else {name: cuda.upload(array) for name, array in zip(names, made, strict=True)}
    before = cuda.resident_bytes()
    weight = cuda.load_experts(iter(experts), activation=activation, **given)
    least = sum(matrix.q.nbytes + matrix.scale.nbytes for e in experts for matrix in (e.gate, e.up, e.down))
    assert cuda.resident_bytes() - before >= least
    return Layer(experts, weight, activation, made)


def rows_of(seed: int, count: int, channels: int) -> np.ndarray:
    rng = np.random.default_rng([seed, count, channels])
    return (rng.standard_normal((count, channels)) * 10.0 ** rng.uniform(-1, 1, (count, 1))).astype(np.float32)


def choices(seed: int, rows: int, chosen: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts of each row, some far more popular than others, and their shares."""
    rng = np.random.default_rng([seed, rows, chosen, experts])
    popularity = rng.exponential(size=experts) + 0.05
    ids = np.stack([rng.choice(experts, chosen, replace=False, p=popularity / popularity.sum()) for _ in range(rows)])
    return ids.astype(np.int32), rng.uniform(0.05, 1, (rows, chosen)).astype(np.float32)


def run(cuda: Any, layer: Layer, x: Any, ids: np.ndarray, shares: np.ndarray, out: np.ndarray) -> np.ndarray:
    """What the op leaves in `out`, whose bits it returns; rows past the last stay as they were."""
    rows = len(ids)
    device = cuda.upload(np.concatenate([out, np.full((2, out.shape[1]), POISON, np.uint32).view(np.float32)]))
    cuda.expert_mlp(x, layer.weight, cuda.upload(ids), cuda.upload(shares), device, rows)
    bits = cuda.read(device).view(np.uint32)
    assert (bits[rows:] == POISON).all()
    return bits[:rows]


def join(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        if activation == "silu":
            return gate / (1 + np.exp(-gate)) * up
        if activation == "gelu_tanh":
            return gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def product(x: np.ndarray, matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and the error it may have (see test_products.py)."""
    w = matrix.dequantize().astype(np.float64)
    columns = np.repeat(matrix.scale.astype(np.float64), matrix.group_size, 1) * 2 ** (matrix.bits - 1)
    largest = np.abs(w)
    if matrix.input_order is None:
        largest = largest + columns
    else:
        largest[:, matrix.input_order] += columns
    return x @ w.T, 1e-6 * (np.abs(x) @ largest.T)


def expected(layer: Layer, seen: np.ndarray, ids: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum over each row's experts in float64, and the error it may have."""
    total = np.zeros((len(seen), layer.inputs))
    error = np.zeros_like(total)
    for row, (own_ids, own_shares) in enumerate(zip(ids, shares, strict=True)):
        x = seen[row : row + 1].astype(np.float64)
        for e, share in zip(own_ids, own_shares, strict=True):
            expert = layer.experts[e]
            (g, g_error), (u, u_error) = product(x, expert.gate), product(x, expert.up)
            if layer.biases is not None:
                g, u = g + layer.biases[0][e], u + layer.biases[1][e]
            h = join(layer.activation, g, u)
            # Slopes up to 1.2; 8 is more than |up + 1| or the gate can be where they are clamped.
            wide = np.abs(u) + (8 if layer.activation == "clamped_swiglu" else 0)
            h_error = 1.2 * g_error * wide + (np.abs(g) + 8) * u_error
            h_error += np.abs(h) * np.maximum(np.abs(g), 1) * 2.0**-19
            h_error += np.abs(h) * 2.0**-10 + np.abs(h).max() * 2.0**-28
            y, y_error = product(h, expert.down)
            w = np.abs(expert.down.dequantize().astype(np.float64))
            y_error = y_error + h_error @ w.T
            if layer.biases is not None:
                y = y + layer.biases[2][e]
            total[row] += share * y[0]
            error[row] += share * (y_error[0] + np.abs(y[0]) * 2.0**-20)
    return total, error


@pytest.fixture
def forced(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[str]]:
    """Goes through every way to compute an expert_mlp, each forced in turn."""
    from shardline.kernels.cuda import tables

    def each(rows: int, chosen: int, layer: Layer) -> Iterator[str]:
        pairs, count = rows * chosen, len(layer.experts)
        plans = [tables.ExpertPlan(8, pairs, sorted=False)]
        plans += [tables.sorted_plan(tile, pairs, count) for tile in (8, 16, 32, 64)]
        size = min(m.format.group_size for m in (*layer.weight.gate_up, layer.weight.down))
        whole = tables.EXPERT_WHOLE[: tables.num_expert_tiles(size, cuda.arch)]
        for plan in plans:
            for place in range(2):
                tiles = [v for v in whole if v.tokens == plan.tile_pairs]

                def variant(
                    plan: Any, channels: int, blocks: int, *_: Any, tiles: Any = tiles, place: int = place
                ) -> Any:
                    few = tables.EXPERT_FEW.get((plan.tile_pairs, tables.slices(blocks)), ())
                    return [*few, *tiles][place % len([*few, *tiles])]

                monkeypatch.setattr(tables, "expert_plan", lambda *_, plan=plan: plan)
                monkeypatch.setattr(tables, "expert_variant", variant)
                # With choices.cu, where it goes, and without.
                for most in (0, 64) if not plan.sorted and place == 0 else (0,):
                    monkeypatch.setattr(tables, "CHOICES_ROWS", most)
                    monkeypatch.setattr(tables, "CHOICES_BLOCKS", 80)
                    yield f"{plan} {place} {most}"
        monkeypatch.undo()

    return each


@pytest.mark.parametrize(
    ("count", "chosen", "width", "inputs", "rows"),
    [(8, 2, 96, 256, 1), (60, 4, 160, 640, 3), (128, 8, 96, 256, 40), (8, 3, 1408, 128, 20), (4, 2, 64, 4096, 70)],
)
def test_against_float64(
    cuda: Any,
    prepared: Callable[..., Any],
    weights: Any,
    count: int,
    chosen: int,
    width: int,
    inputs: int,
    rows: int,
) -> None:
    if inputs % weights.group_size or width % weights.group_size:
        pytest.skip("a group does not divide K")
    layer = make_layer(cuda, (weights, weights, weights), count, width, inputs)
    x, seen = prepared(rows_of(1, rows, inputs))
    ids, shares = choices(2, rows, chosen, count)
    out = rows_of(3, rows, inputs)
    wanted, error = expected(layer, seen, ids, shares)
    got = run(cuda, layer, x, ids, shares, out).view(np.float32)
    assert (np.abs(got - (out + wanted)) <= error + np.abs(out + wanted) * 2.0**-22).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biases", [False, True])
def test_activations_and_biases_against_float64(
    cuda: Any, prepared: Callable[..., Any], formats: Any, activation: Activation, biases: bool
) -> None:
    form = formats(4, 32, "float16", None)
    layer = make_layer(cuda, (form, form, form), 8, 96, 256, activation=activation, biases=biases)
    for rows in (1, 30):
        x, seen = prepared(rows_of(4, rows, 256))
        ids, shares = choices(5, rows, 2, 8)
        wanted, error = expected(layer, seen, ids, shares)
        got = run(cuda, layer, x, ids, shares, np.zeros((rows, 256), np.float32)).view(np.float32)
        assert (np.abs(got - wanted) <= error + np.abs(wanted) * 2.0**-22).all()


def by_products(cuda: Any, layer: Layer, values: np.ndarray, ids: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The op's bits from one gated product and one product a pair, and the sum in numbers that round once."""
    total = np.zeros((len(values), layer.inputs), np.longdouble)
    loaded: dict[int, tuple[Any, Any]] = {}
    for row, (own_ids, own_shares) in enumerate(zip(ids, shares, strict=True)):
        for e, share in zip(own_ids, own_shares, strict=True):
            expert = layer.experts[e]
            if e not in loaded:
                loaded[e] = cuda.load_gated(expert.gate, expert.up), cuda.load_matrix([expert.down])
            gate_up, down = loaded[e]
            x, between = cuda.activations(1, layer.inputs), cuda.activations(1, layer.width)
            y = cuda.empty((1, layer.inputs), "float32")
            cuda.write(x, values[row : row + 1])
            own = layer.biases
            gate_bias = None if own is None else cuda.upload(np.concatenate([own[0][e], own[1][e]]))
            cuda.gated_linear(x, gate_up, between, 1, activation=layer.activation, bias=gate_bias)
            cuda.linear(between, down, y, 1, bias=None if own is None else cuda.upload(own[2][e]))
            product = np.longdouble(share) * cuda.read(y)[0].astype(np.longdouble)
            total[row] = (product + total[row]).astype(np.float32)
    return total.astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", "biases", "orders", "apart", "orders and biases"])
def test_every_way_gives_the_bits_of_single_products(
    cuda: Any, prepared: Callable[..., Any], formats: Any, forced: Any, kind: str
) -> None:
    form = formats(4, 32, "float16", None)
    other = formats(8, 32, "float16", 128) if kind == "apart" else form
    layers = [
        make_layer(
            cuda, (form, other, other), 6, 160, inputs, biases="biases" in kind, orders="orders" in kind, seed=inputs
        )
        for inputs in (256, 640)
    ]
    # The down product's slices are those of the gate's: 1, 4 and 8 of them in turn.
    layers.append(make_layer(cuda, (form, other, other), 3, 4160, 64, biases="biases" in kind, orders="orders" in kind))
    for layer in layers:
        count = len(layer.experts)
        for rows in (1, 5, 40):
            values = rows_of(6, rows, layer.inputs)
            x, _ = prepared(values)
            ids, shares = choices(7, rows, 2, count)
            out = rows_of(8, rows, layer.inputs)
            wanted = out + by_products(cuda, layer, values, ids, shares)
            for name in forced(rows, 2, layer):
                got = run(cuda, layer, x, ids, shares, out)
                assert np.array_equal(got, wanted.view(np.uint32)), (name, rows)


def test_formats_give_the_same_bits_in_every_way(
    cuda: Any, prepared: Callable[..., Any], weights: Any, forced: Any
) -> None:
    layer = make_layer(cuda, (weights, weights, weights), 8, 256, 640)
    x, _ = prepared(rows_of(9, 50, 640))
    ids, shares = choices(10, 50, 3, 8)
    out = rows_of(11, 50, 640)
    results = {name: run(cuda, layer, x, ids, shares, out) for name in forced(50, 3, layer)}
    first = next(iter(results.values()))
    assert not [name for name, result in results.items() if not np.array_equal(result, first)]
    assert len(results) == 11


def test_a_row_is_the_same_in_any_company(cuda: Any, prepared: Callable[..., Any], formats: Any) -> None:
    form, most = formats(4, 128, "float16", 8), max(COUNTS)
    layer = make_layer(cuda, (form, form, form), 32, 128, 256)
    values = rows_of(12, most, 256)
    values[3, 7], values[19, 200] = np.nan, np.inf
    ids, shares = choices(13, most, 4, 32)
    alone = []
    for row in range(most):
        x, _ = prepared(values[row : row + 1])
        own = slice(row, row + 1)
        alone.append(run(cuda, layer, x, ids[own], shares[own], values[own])[0])
    alone = np.stack(alone)
    fine = np.isfinite(alone.view(np.float32)).all(axis=1)
    assert set(np.flatnonzero(~fine)) == {3, 19}
    rng = np.random.default_rng(14)
    for count in COUNTS:
        chosen = rng.permutation(most)[:count]
        x, _ = prepared(values[chosen])
        got = run(cuda, layer, x, ids[chosen], shares[chosen], values[chosen])
        assert np.array_equal(got[fine[chosen]], alone[chosen][fine[chosen]]), count


def test_one_expert_takes_all_and_others_none(cuda: Any, prepared: Callable[..., Any], formats: Any) -> None:
    form = formats(4, 128, "float16", 8)
    layer = make_layer(cuda, (form, form, form), 128, 128, 256)
    for rows in (33, 150):
        values = rows_of(15, rows, 256)
        ids = np.tile(np.array([[127, 0]], np.int32), (rows, 1))
        shares = choices(16, rows, 2, 128)[1]
        x, _ = prepared(values)
        got = run(cuda, layer, x, ids, shares, values)
        for row in (0, 31, rows - 1):
            x, _ = prepared(values[row : row + 1])
            own = slice(row, row + 1)
            assert np.array_equal(run(cuda, layer, x, ids[own], shares[own], values[own])[0], got[row])


def test_replay_follows_the_routing(cuda: Any, prepared: Callable[..., Any], formats: Any) -> None:
    form = formats(4, 128, "float16", 8)
    layer = make_layer(cuda, (form, form, form), 16, 128, 256)
    for rows in (1, 2, 12, 100):
        x, _ = prepared(rows_of(17, rows, 256))
        given = [choices(18 + i, rows, 4, 16) for i in range(4)]
        device_ids, device_shares = cuda.upload(given[0][0]), cuda.upload(given[0][1])
        start = rows_of(19, rows, 256)
        out = cuda.upload(start)

        def issue(
            x: Any = x, ids: Any = device_ids, shares: Any = device_shares, out: Any = out, rows: int = rows
        ) -> None:
            cuda.expert_mlp(x, layer.weight, ids, shares, out, rows)

        eager = [run(cuda, layer, x, ids, shares, start) for ids, shares in given]
        assert len({bits.tobytes() for bits in eager}) == len(given)
        for turn in range(100):
            ids, shares = given[turn % len(given)]
            cuda.write(device_ids, ids)
            cuda.write(device_shares, shares)
            cuda.write(out, start)
            cuda.replay(("replayed experts", rows), issue)
            assert np.array_equal(cuda.read(out).view(np.uint32), eager[turn % len(given)])


def test_an_expert_with_minimums_among_others_without(cuda: Any, prepared: Callable[..., Any], formats: Any) -> None:
    plain, own = formats(4, 32, "float16", 8), formats(4, 32, "float16", None)
    for odd in (0, 3, 5):
        experts = [
            Expert(*(form.matrix(n, k, 3 * e + i) for i, (n, k) in enumerate(((96, 256), (96, 256), (256, 96)))))
            for e, form in enumerate(own if e == odd else plain for e in range(6))
        ]
        layer = Layer(experts, cuda.load_experts(experts), "silu", None)
        assert layer.weight.down.format.has_minimum
        values, ids = rows_of(20, 6, 256), np.arange(6, dtype=np.int32).reshape(6, 1)
        x, seen = prepared(values)
        shares = np.ones((6, 1), np.float32)
        wanted, error = expected(layer, seen, ids, shares)
        got = run(cuda, layer, x, ids, shares, np.zeros((6, 256), np.float32)).view(np.float32)
        assert (np.abs(got - wanted) <= error + np.abs(wanted) * 2.0**-22).all()


def test_few_rows_take_two_kernels(
    cuda: Any, prepared: Callable[..., Any], formats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, names, launch = formats(4, 128, "float16", 8), [], cuda._launch

    def noting(kernel: tuple[str, str], *args: Any, **options: Any) -> None:
        names.append(kernel[1])
        launch(kernel, *args, **options)

    layer = make_layer(cuda, (form, form, form), 32, 128, 256)
    x, _ = prepared(rows_of(21, 2, 256))
    ids, shares = choices(22, 2, 4, 32)
    monkeypatch.setattr(cuda, "_launch", noting)
    run(cuda, layer, x, ids, shares, rows_of(23, 2, 256))
    assert len(names) == 2
    assert names[1] == "add_choices"
    between = cuda._rows_between("experts", 8, 128)
    assert not cuda.read(between.largest).any()
    assert not cuda.read(between.done).any()
