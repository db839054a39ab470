"""Matrix products on a GPU: against float64, and a row's bits in every tile, place and company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardline.kernels import UnsupportedOperationError

pytestmark = pytest.mark.gpu
POISON = np.uint32(0x7FCABCDE)
COUNTS = [*range(1, 66), 255, 256, 257, 511, 512, 513]


def rows_of(seed: int, count: int, channels: int) -> np.ndarray:
    """Rows of very different magnitudes, with a channel far from the others in each."""
    rng = np.random.default_rng([seed, count, channels])
    x = rng.standard_normal((count, channels)) * 10.0 ** rng.uniform(-4, 4, (count, 1))
    x[np.arange(count), rng.integers(channels, size=count)] *= 30
    return x.astype(np.float32)


def expected(seen: np.ndarray, matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64 of what it sees, and the error that it may have.

    Products are exact; sums are float32 of numbers up to scale * 2^(bits - 1) and minimum a channel.
    """
    w = matrix.dequantize().astype(np.float64)
    largest = np.abs(w) + np.repeat(matrix.scale.astype(np.float64), matrix.group_size, 1) * 2 ** (matrix.bits - 1)
    x = seen.astype(np.float64)
    return x @ w.T, 1e-6 * (np.abs(x) @ largest.T)


def product(cuda: Any, poisoned: Callable[..., Any], x: Any, weight: Any, rows: int, **options: Any) -> np.ndarray:
    """The product's bits, and that nothing else was written."""
    out = poisoned(rows + 3, weight.channels)
    cuda.linear(x, weight, out, rows, **options)
    bits = cuda.read(out).view(np.uint32)
    assert (bits[rows:] == POISON).all(), "rows past the last were written"
    assert (bits[:rows] != POISON).all(), "something was left unwritten"
    return bits[:rows]


def gated(cuda: Any, x: Any, weight: Any, rows: int, **options: Any) -> np.ndarray:
    out = cuda.activations(rows, weight.channels)
    with cuda._stream:
        out.fragments.fill(0x7E557E55)
        out.values.fill(np.nan)
    cuda.gated_linear(x, weight, out, rows, **options)
    return cuda.read(out)


@pytest.fixture
def forced(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[str]]:
    """Goes through every launch that may compute a product of some rows, each forced in turn."""
    from shardline.kernels.cuda import tables

    def each(rows: int, channels: int, blocks: int, weights: Any, *, is_gated: bool) -> Iterator[str]:
        slices = tables.slices(blocks)
        # Few rows go to staged.cu first; test_staged.py compares it.
        monkeypatch.setattr(tables, "STAGED_ROWS", dict.fromkeys(tables.STAGED_ROWS, 0))
        choices = [
            (variant, 1)
            for (tokens, of), variants in tables.FEW.items()
            for variant in variants
            if rows <= tokens and of == slices and (variant.gated or not is_gated)
        ]
        there = tables.num_tiles(weights.bits, weights.group_size, weights.zero is None, cuda.arch)
        choices += [(variant, 1) for variant in tables.WHOLE[:there]]
        choices += [
            (variant, z)
            for variant in tables.SPLIT[:there]
            for z in tables.blocks_of_a_tile(variant.tokens, slices, cuda.arch)[1:]
        ]
        if tables.is_wide_format(weights.bits, weights.group_size, weights.zero is None, cuda.arch):
            for tile in tables.WIDE:
                pairs = -(-channels // (2 * tile.variant.channels)) * -(-rows // tile.variant.tokens)
                for clusters in (
                    {1, 3, min(pairs, 66), min(pairs * slices, 66)} if is_gated or not tile.only_gated else ()
                ):
                    launch = tables.LinearLaunch(tile.variant, (min(clusters, pairs * slices), 1, 2), 2)
                    monkeypatch.setattr(tables, "linear_launch", lambda *_, launch=launch, **__: launch)
                    yield f"{tile.variant.name} clusters={clusters}"
        for variant, z in choices:
            grid = (-(-channels // variant.channels), -(-rows // variant.tokens), z)
            launch = tables.LinearLaunch(variant, grid, z if cuda.arch >= tables.CLUSTERS_FROM else 1)
            monkeypatch.setattr(tables, "linear_launch", lambda *_, launch=launch, **__: launch)
            yield f"{variant.name} z={z}"
        monkeypatch.undo()

    return each


@pytest.mark.parametrize(
    ("channels", "inputs", "rows"),
    [(1, 128, 1), (63, 576, 5), (65, 640, 17), (320, 4096, 33), (200, 12288, 3), (130, 2048, 130)],
)
def test_against_float64(
    cuda: Any,
    poisoned: Callable[..., Any],
    prepared: Callable[..., Any],
    weights: Any,
    channels: int,
    inputs: int,
    rows: int,
) -> None:
    if inputs % weights.group_size:
        pytest.skip("a group does not divide K")
    matrix = weights.matrix(channels, inputs)
    x, seen = prepared(rows_of(1, rows, inputs))
    wanted, error = expected(seen, matrix)
    got = product(cuda, poisoned, x, cuda.load_matrix([matrix]), rows).view(np.float32)
    assert (np.abs(got - wanted) <= error + np.abs(wanted) * 2.0**-23).all()


@pytest.mark.parametrize(("channels", "inputs"), [(49152, 576), (32003, 1024)])
def test_many_channels(
    cuda: Any, poisoned: Callable[..., Any], prepared: Callable[..., Any], formats: Any, channels: int, inputs: int
) -> None:
    matrix = formats(8, 32, "float16", 128).matrix(channels, inputs)
    weight = cuda.load_matrix([matrix])
    for rows in (1, 9, 70):
        x, seen = prepared(rows_of(2, rows, inputs))
        wanted, error = expected(seen, matrix)
        got = product(cuda, poisoned, x, weight, rows).view(np.float32)
        assert (np.abs(got - wanted) <= error + np.abs(wanted) * 2.0**-23).all()


def test_stacked_parts_of_different_formats_with_bias(
    cuda: Any, poisoned: Callable[..., Any], prepared: Callable[..., Any], formats: Any
) -> None:
    parts = [
        formats(4, 32, "float16", None).matrix(96, 1024, 1),
        formats(4, 32, "float16", None).matrix(40, 1024, 2),
        formats(8, 16, "float32", 32).matrix(33, 1024, 3),
        formats(4, 32, "float16", None).matrix(50, 1024, 4),
    ]
    weight = cuda.load_matrix(parts)
    assert len(weight.parts) == 3
    bias = np.random.default_rng(5).standard_normal(weight.channels).astype(np.float32)
    device_bias = cuda.upload(bias)
    for rows in (1, 12, 40):
        x, _ = prepared(rows_of(3, rows, 1024))
        plain = product(cuda, poisoned, x, weight, rows).view(np.float32)
        apart = [product(cuda, poisoned, x, cuda.load_matrix([part]), rows) for part in parts]
        assert np.array_equal(plain.view(np.uint32), np.concatenate(apart, axis=1))
        with_bias = product(cuda, poisoned, x, weight, rows, bias=device_bias)
        assert np.array_equal(with_bias, (plain + bias).view(np.uint32))
        before = rows_of(4, rows, weight.channels)
        out = cuda.upload(before)
        cuda.linear(x, weight, out, rows, accumulate=True)
        assert np.array_equal(cuda.read(out).view(np.uint32), (before + plain).view(np.uint32))


def test_gated_against_float64(cuda: Any, prepared: Callable[..., Any], weights: Any) -> None:
    for channels, inputs, rows in ((16, 128, 1), (48, 640, 9), (100, 4096, 40), (300, 1024, 130)):
        gate, up = weights.matrix(channels, inputs, 1), weights.matrix(channels, inputs, 2)
        x, seen = prepared(rows_of(5, rows, inputs) / 100)
        (g, g_error), (u, u_error) = expected(seen, gate), expected(seen, up)
        with np.errstate(over="ignore"):
            sigmoid = 1 / (1 + np.exp(-g))
        wanted = g * sigmoid * u
        got = gated(cuda, x, cuda.load_gated(gate, up), rows)
        # silu has a slope of at most 1.1; then the fast exponential, and the row's rounding to halves.
        error = 1.1 * g_error * np.abs(u) + np.abs(g) * u_error + np.abs(wanted) * 2.0**-10
        error += np.abs(wanted) * np.maximum(np.abs(g), 1) * 2.0**-21
        error += np.abs(wanted).max(axis=1, keepdims=True) * 2.0**-28
        assert (np.abs(got - wanted) <= error).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("biases", [False, True])
def test_activations_and_biases_in_every_tile(
    cuda: Any, prepared: Callable[..., Any], formats: Any, forced: Any, activation: str, biases: bool
) -> None:
    from shardline.kernels.cuda.pack import blocks_of

    weights, channels, inputs = formats(4, 32, "float16", None), 112, 640
    gate, up = weights.matrix(channels, inputs, 1), weights.matrix(channels, inputs, 2)
    gate_up = cuda.load_gated(gate, up)
    both = (np.random.default_rng(11).standard_normal(2 * channels) * 3).astype(np.float32) * biases
    options = {"activation": activation, "bias": cuda.upload(both) if biases else None}
    for rows in (1, 9, 40):
        x, seen = prepared(rows_of(12, rows, inputs) / 100)
        (g, g_error), (u, u_error) = expected(seen, gate), expected(seen, up)
        g, u = g + both[:channels], u + both[channels:]
        with np.errstate(over="ignore"):
            if activation == "silu":
                wanted = g / (1 + np.exp(-g)) * u
            elif activation == "gelu_tanh":
                wanted = g * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
            else:
                low = np.minimum(g, 7)
                wanted = low / (1 + np.exp(-1.702 * low)) * (np.clip(u, -7, 7) + 1)
        error = 1.2 * g_error * (np.abs(u) + 8) + (np.abs(g) + 8) * u_error + np.abs(wanted) * 2.0**-10
        error += np.abs(wanted) * np.maximum(np.abs(g), 1) * 2.0**-18
        error += np.abs(wanted).max(axis=1, keepdims=True) * 2.0**-28
        results = {}
        for name in forced(rows, gate_up.parts[0].tiles * 16, blocks_of(inputs), weights, is_gated=True):
            results[name] = gated(cuda, x, gate_up, rows, **options)
        first = next(iter(results.values()))
        assert (np.abs(first - wanted) <= error).all()
        assert not [name for name, result in results.items() if not np.array_equal(result, first)]
        # Kept apart, as where a gate and an up are of different formats, they give the same bits.
        apart = cuda.load_gated(gate, up)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardline.kernels.cuda.weights.can_interleave", lambda *_: False)
            apart = cuda.load_gated(gate, up)
        assert apart.apart
        assert np.array_equal(gated(cuda, x, apart, rows, **options), first)


def test_a_gate_and_an_up_of_different_formats(cuda: Any, prepared: Callable[..., Any], formats: Any) -> None:
    gate = formats(4, 32, "float16", None).matrix(100, 640, 1)
    up = formats(8, 16, "float32", 32).matrix(100, 640, 2)
    gate_up = cuda.load_gated(gate, up)
    for rows in (1, 40):
        x, seen = prepared(rows_of(13, rows, 640) / 100)
        (g, g_error), (u, u_error) = expected(seen, gate), expected(seen, up)
        with np.errstate(over="ignore"):
            wanted = g / (1 + np.exp(-g)) * u
        error = 1.1 * g_error * np.abs(u) + np.abs(g) * u_error + np.abs(wanted) * 2.0**-10
        error += np.abs(wanted) * np.maximum(np.abs(g), 1) * 2.0**-21
        error += np.abs(wanted).max(axis=1, keepdims=True) * 2.0**-28
        assert (np.abs(gated(cuda, x, gate_up, rows) - wanted) <= error).all()


def test_ordered_columns_give_the_bits_of_ordered_channels(
    cuda: Any, poisoned: Callable[..., Any], prepared: Callable[..., Any], weights: Any
) -> None:
    rng, inputs = np.random.default_rng(14), 640
    plain = [weights.matrix(channels, inputs, channels) for channels in (96, 32, 33)]
    first, second = (rng.permutation(inputs).astype(np.int32) for _ in range(2))
    orders = (first, None, second)
    parts = [replace(part, input_order=order) for part, order in zip(plain, orders, strict=True)]
    weight = cuda.load_matrix(parts)
    gate_up = cuda.load_gated(*(replace(weights.matrix(48, inputs, seed), input_order=first) for seed in (1, 2)))
    plain_gate_up = cuda.load_gated(weights.matrix(48, inputs, 1), weights.matrix(48, inputs, 2))
    for rows in (1, 12, 70):
        values = rows_of(15, rows, inputs)
        x, _ = prepared(values)
        wanted = []
        for part, order in zip(plain, orders, strict=True):
            own, _ = prepared(values if order is None else np.ascontiguousarray(values[:, order]))
            wanted.append(product(cuda, poisoned, own, cuda.load_matrix([part]), rows))
        assert np.array_equal(product(cuda, poisoned, x, weight, rows), np.concatenate(wanted, axis=1))
        own, _ = prepared(np.ascontiguousarray(values[:, first]))
        assert np.array_equal(gated(cuda, x, gate_up, rows), gated(cuda, own, plain_gate_up, rows))


def test_groups_of_16_with_minimums_are_refused(cuda: Any, formats: Any) -> None:
    with pytest.raises(UnsupportedOperationError, match="groups of 16 with minimums of their own"):
        cuda.load_matrix([formats(4, 16, "float16", None).matrix(64, 256)])


@pytest.mark.parametrize("inputs", [256, 640, 4096, 5120])
def test_every_tile_gives_the_same_bits(
    cuda: Any,
    poisoned: Callable[..., Any],
    prepared: Callable[..., Any],
    weights: Any,
    portable: tuple[Any, ...],
    forced: Any,
    inputs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shardline.kernels.cuda.pack import blocks_of
    from shardline.kernels.cuda.weights import CudaPart

    def run(is_gated: bool, x: Any, rows: int) -> np.ndarray:
        return gated(cuda, x, gate_up, rows) if is_gated else product(cuda, poisoned, x, weight, rows)

    weight = cuda.load_matrix([weights.matrix(208, inputs)])
    gate_up = cuda.load_gated(weights.matrix(112, inputs, 1), weights.matrix(112, inputs, 2))
    for rows in (1, 8, 13, 40, 150):
        x, _ = prepared(rows_of(6, rows, inputs))
        for is_gated in (False, True):
            results = {}
            channels = (gate_up if is_gated else weight).parts[0].tiles * 16
            for name in forced(rows, channels, blocks_of(inputs), weights, is_gated=is_gated):
                results[name] = run(is_gated, x, rows)
                if cuda.arch == 90 and weights in portable and "256" not in name and "wide" not in name:
                    # Without Hopper's instructions, as other cards compute it.
                    with monkeypatch.context() as patch:
                        defines = weights.defines | {"PORTABLE": 1}
                        patch.setattr(CudaPart, "defines", property(lambda _, defines=defines: defines))
                        results[f"{name} portable"] = run(is_gated, x, rows)
            first = next(iter(results.values()))
            different = [name for name, result in results.items() if not np.array_equal(result, first)]
            assert not different, (rows, is_gated, different)
            assert len(results) >= 2


def test_a_row_is_the_same_in_any_company(
    cuda: Any, poisoned: Callable[..., Any], prepared: Callable[..., Any], weights: Any
) -> None:
    inputs, most = 4096, max(COUNTS)
    weight = cuda.load_matrix([weights.matrix(96, inputs)])
    gate_up = cuda.load_gated(weights.matrix(64, inputs, 1), weights.matrix(64, inputs, 2))
    values = rows_of(7, most, inputs)
    values[5, 77], values[40, 1], values[300, 9] = np.nan, np.inf, -np.inf
    alone, alone_gated = [], []
    for row in range(most):
        x, _ = prepared(values[row : row + 1])
        alone.append(product(cuda, poisoned, x, weight, 1)[0])
        alone_gated.append(gated(cuda, x, gate_up, 1)[0])
    alone, alone_gated = np.stack(alone), np.stack(alone_gated)
    finite = np.isfinite(alone.view(np.float32)).all(axis=1)
    assert set(np.flatnonzero(~finite)) == {5, 40, 300}
    rng = np.random.default_rng(8)
    for count in COUNTS:
        chosen = rng.permutation(most)[:count]
        x, _ = prepared(values[chosen])
        got, got_gated = product(cuda, poisoned, x, weight, count), gated(cuda, x, gate_up, count)
        fine = finite[chosen]
        assert np.array_equal(got[fine], alone[chosen][fine]), count
        assert (~np.isfinite(got[~fine].view(np.float32))).any(axis=1).all()
        assert np.array_equal(got_gated[fine], alone_gated[chosen][fine]), count


def test_replay_is_eager_a_hundred_times(
    cuda: Any, poisoned: Callable[..., Any], prepared: Callable[..., Any], formats: Any
) -> None:
    weights = formats(4, 128, "float16", 8)
    weight = cuda.load_matrix([weights.matrix(4096, 4096)])
    gate_up = cuda.load_gated(weights.matrix(2048, 4096, 1), weights.matrix(2048, 4096, 2))
    for rows in (1, 12, 40, 100, 300):
        x, _ = prepared(rows_of(9, rows, 4096))
        out, between = poisoned(rows, 4096), cuda.activations(rows, 2048)

        def issue(x: Any = x, out: Any = out, between: Any = between, rows: int = rows) -> None:
            cuda.linear(x, weight, out, rows)
            cuda.gated_linear(x, gate_up, between, rows)

        issue()
        eager = cuda.read(out), cuda.read(between)
        for _ in range(100):
            with cuda._stream:
                out.fill(np.nan)
                between.fragments.fill(0)
            cuda.replay(("replayed products", rows), issue)
            assert np.array_equal(cuda.read(out), eager[0])
            assert np.array_equal(cuda.read(between), eager[1])


def test_a_gated_row_forgets_what_was_there_before(cuda: Any, prepared: Callable[..., Any], formats: Any) -> None:
    weights = formats(4, 128, "float16", 8)
    gate_up = cuda.load_gated(weights.matrix(300, 512, 1), weights.matrix(300, 512, 2))
    small = rows_of(10, 40, 512) / 1e4
    x_small, _ = prepared(small)
    x_large, _ = prepared(small * 1e4)
    expected = gated(cuda, x_small, gate_up, 40)
    out = cuda.activations(40, 300)
    for x in (x_large, x_small):
        cuda.gated_linear(x, gate_up, out, 40)
    assert np.array_equal(cuda.read(out), expected)
