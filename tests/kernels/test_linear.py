"""Products with resident integers: right, and each row the same bits whatever shares the step with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.kernels import GROUP_SIZES, Backend, GroupedMatrix, Weight
from shardline.kernels.cpu.panel import SUM_GROUPS

MakeBackend = Callable[[int], Backend]
MakeMatrix = Callable[..., GroupedMatrix]
Floats = NDArray[np.float32]

ROW_COUNTS = [*range(1, 66), 255, 256, 257]


def rows_of(count: int, inputs: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, count, inputs]).standard_normal((count, inputs), np.float32)


def run_linear(
    backend: Backend,
    weight: Weight,
    x: Floats,
    channels: int,
    *,
    bias: Floats | None = None,
    add_to: Floats | None = None,
) -> Floats:
    """The op on all rows of x; whatever it does not write stays poison, and it must write nothing else."""
    rows = len(x)
    out = backend.empty((rows + 2, channels), "float32")
    poison = np.full((rows + 2, channels), np.nan, np.float32)
    if add_to is not None:
        poison[:rows] = add_to
    backend.write(out, poison)
    more = np.concatenate([x, np.full((2, x.shape[1]), np.nan, np.float32)])
    device_bias = None if bias is None else backend.upload(bias)
    backend.linear(backend.upload(more), weight, out, rows, bias=device_bias, accumulate=add_to is not None)
    result: Floats = backend.read(out)
    assert np.isnan(result[rows:]).all()
    return result[:rows]


def tolerance(x: Floats, weights: Floats, group_size: int) -> NDArray[np.float64]:
    """Bound of the rounding error: every partial sum is off by at most its magnitude times steps * 2^-24."""
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(weights.astype(np.float64)).T
    # Integers from zero and a minimum cancel: their parts are a few times larger than the weights they make up.
    return 8 * (group_size + weights.shape[1] / group_size) * 2.0**-24 * magnitude + 1e-30


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("channels", [1, 63, 64, 65, 300])
def test_equals_the_product_of_the_dequantized_matrix(
    cpu: MakeBackend, random_matrix: MakeMatrix, bits: int, dtype: str, group_size: int, channels: int
) -> None:
    inputs = 5 * group_size
    matrix = random_matrix(channels, inputs, bits=bits, group_size=group_size, dtype=dtype)
    backend = cpu(2)
    weight = backend.load_matrix([matrix])
    weights = matrix.dequantize()
    for rows in (1, 2, 3, 4, 5, 9, 67):
        x = rows_of(rows, inputs)
        expected = x.astype(np.float64) @ weights.astype(np.float64).T
        error = np.abs(run_linear(backend, weight, x, channels) - expected)
        assert (error <= tolerance(x, weights, group_size)).all(), error.max()


@pytest.mark.parametrize(
    ("channels", "inputs", "bits"), [(576, 576, 4), (576, 1536, 4), (32003, 96, 4), (49152, 64, 8)]
)
def test_equals_the_product_at_model_sizes(
    cpu: MakeBackend, random_matrix: MakeMatrix, channels: int, inputs: int, bits: int
) -> None:
    matrix = random_matrix(channels, inputs, bits=bits)
    backend = cpu(2)
    weight = backend.load_matrix([matrix])
    weights = matrix.dequantize()
    for rows in (1, 6):
        x = rows_of(rows, inputs)
        error = np.abs(run_linear(backend, weight, x, channels) - x.astype(np.float64) @ weights.astype(np.float64).T)
        assert (error <= tolerance(x, weights, 32)).all(), error.max()


def contract(x: Floats, matrix: GroupedMatrix) -> Floats:
    """The order contract, one scalar step at a time; a fused step is exact in long double but for the last rounding."""

    def fma(a: Floats, b: Floats, c: Floats) -> Floats:
        return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)

    size = matrix.group_size
    q = matrix.integers().astype(np.float32)
    scale, minimum = matrix.scale.astype(np.float32), matrix.minimum.astype(np.float32)
    channels, inputs = matrix.shape
    total = np.zeros((len(x), channels), np.float32)
    for group in range(inputs // size):
        part = x[:, group * size : (group + 1) * size]
        product = np.zeros_like(total)
        row_sum = np.zeros((len(x), 1), np.float32)
        for k in range(size):
            product = fma(q[None, :, group * size + k], part[:, k, None], product)
            row_sum = row_sum + part[:, k, None]
        total = fma(scale[None, :, group], product, total)
        total = fma(minimum[None, :, group], row_sum, total)
    return total


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "dtype"), [(16, "float32"), (32, "float16"), (64, "float32"), (128, "float16")])
def test_keeps_the_order_contract_bit_for_bit(
    cpu: MakeBackend, random_matrix: MakeMatrix, bits: int, group_size: int, dtype: str
) -> None:
    matrix = random_matrix(70, 3 * group_size, bits=bits, group_size=group_size, dtype=dtype)
    backend = cpu(1)
    weight = backend.load_matrix([matrix])
    x = rows_of(12, 3 * group_size)
    expected = contract(x, matrix)
    # A tile of rows has its own code for each number of them, and a first one more.
    for rows in range(1, 13):
        np.testing.assert_array_equal(run_linear(backend, weight, x[-rows:], 70), expected[-rows:])


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
def test_a_row_has_the_same_bits_in_every_batch_at_every_place_on_any_threads(
    cpu: MakeBackend, random_matrix: MakeMatrix, bits: int, group_size: int
) -> None:
    channels, inputs = 130, 192
    matrix = random_matrix(channels, inputs, bits=bits, group_size=group_size)
    x = rows_of(max(ROW_COUNTS), inputs)
    single = cpu(1)
    weight = single.load_matrix([matrix])
    alone = np.concatenate([run_linear(single, weight, x[row : row + 1], channels) for row in range(len(x))])
    for threads in (1, 2, 3):
        backend = cpu(threads)
        weight = backend.load_matrix([matrix])
        for rows in ROW_COUNTS:
            order = np.roll(np.arange(len(x)), 7 * rows)[:rows]
            np.testing.assert_array_equal(run_linear(backend, weight, x[order], channels), alone[order])


@pytest.mark.parametrize("rows", [4, 67])
def test_more_groups_than_sums_of_x_are_kept_for(cpu: MakeBackend, random_matrix: MakeMatrix, rows: int) -> None:
    """The sums of x over each group are kept from block to block, but not without end: the first are wanted again."""
    inputs = 16 * (SUM_GROUPS + 3)
    matrix = random_matrix(130, inputs, group_size=16)
    backend = cpu(1)
    weight = backend.load_matrix([matrix])
    x = rows_of(rows, inputs)
    alone = np.concatenate([run_linear(backend, weight, x[row : row + 1], 130) for row in range(rows)])
    np.testing.assert_array_equal(run_linear(backend, weight, x, 130), alone)


@pytest.mark.parametrize("rows", [1, 64])
def test_threads_do_not_meet_in_scratch_memory(cpu: MakeBackend, random_matrix: MakeMatrix, rows: int) -> None:
    """Long enough that all threads come to work on it, also where they share cores."""
    gate, up = random_matrix(4096, 512, seed=1), random_matrix(4096, 512, seed=2)
    x = rows_of(rows, 512)
    single, team = cpu(1), cpu(4)
    expected = run_linear(single, single.load_matrix([gate]), x, 4096)
    expected_gated = run_gated(single, single.load_gated(gate, up), x, 4096)
    weight, gated = team.load_matrix([gate]), team.load_gated(gate, up)
    for _ in range(20):
        np.testing.assert_array_equal(run_linear(team, weight, x, 4096), expected)
        np.testing.assert_array_equal(run_gated(team, gated, x, 4096), expected_gated)


def test_channels_do_not_depend_on_what_they_are_stacked_with(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    kinds = [{}, {}, {"bits": 8}, {"group_size": 16}, {"group_size": 16, "dtype": "float32"}]
    parts = [random_matrix(30 + 17 * i, 64, seed=i, **kind) for i, kind in enumerate(kinds)]
    backend = cpu(2)
    x = rows_of(6, 64)
    bias = rows_of(1, sum(part.shape[0] for part in parts))[0]
    whole = run_linear(backend, backend.load_matrix(parts), x, len(bias), bias=bias)
    first = 0
    for part in parts:
        end = first + part.shape[0]
        own = run_linear(backend, backend.load_matrix([part]), x, part.shape[0], bias=bias[first:end])
        np.testing.assert_array_equal(whole[:, first:end], own)
        first = end


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_bias_and_accumulate_are_one_rounded_addition_each(
    cpu: MakeBackend, random_matrix: MakeMatrix, rows: int
) -> None:
    backend = cpu(2)
    weight = backend.load_matrix([random_matrix(70, 64)])
    x, bias, residual = rows_of(rows, 64), rows_of(1, 70, 1)[0], rows_of(rows, 70, 2)
    plain = run_linear(backend, weight, x, 70)
    np.testing.assert_array_equal(run_linear(backend, weight, x, 70, bias=bias), plain + bias)
    np.testing.assert_array_equal(run_linear(backend, weight, x, 70, add_to=residual), plain + residual)
    both = run_linear(backend, weight, x, 70, bias=bias, add_to=residual)
    np.testing.assert_array_equal(both, (plain + bias) + residual)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(cpu: MakeBackend, random_matrix: MakeMatrix, value: float) -> None:
    backend = cpu(2)
    weight = backend.load_matrix([random_matrix(70, 64)])
    x = rows_of(9, 64)
    clean = run_linear(backend, weight, x, 70)
    x[4, 40] = value
    dirty = run_linear(backend, weight, x, 70)
    assert not np.isfinite(dirty[4]).any()
    others = np.arange(9) != 4
    np.testing.assert_array_equal(dirty[others], clean[others])


def test_subnormal_inputs_are_not_flushed(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(2)
    matrix = random_matrix(64, 32)
    tiny = rows_of(2, 32) * np.float32(1e-40)
    result = run_linear(backend, backend.load_matrix([matrix]), tiny, 64)
    np.testing.assert_array_equal(result, contract(tiny, matrix))
    assert np.abs(result).max() > 0


def silu_reference(x: Floats, gate: GroupedMatrix, up: GroupedMatrix) -> NDArray[np.float64]:
    g = x.astype(np.float64) @ gate.dequantize().astype(np.float64).T
    u = x.astype(np.float64) @ up.dequantize().astype(np.float64).T
    return g / (1 + np.exp(-g)) * u


def run_gated(backend: Backend, weight: Weight, x: Floats, channels: int) -> Floats:
    out = backend.upload(np.full((len(x) + 1, channels), np.nan, np.float32))
    backend.gated_linear(backend.upload(x), weight, out, len(x))
    result: Floats = backend.read(out)
    assert np.isnan(result[-1]).all()
    return result[:-1]


@pytest.mark.parametrize("channels", [1, 63, 65, 300])
@pytest.mark.parametrize(
    ("gate_kind", "up_kind"),
    [({}, {}), ({"bits": 8, "dtype": "float32"}, {"group_size": 16}), ({"group_size": 64}, {"bits": 8})],
)
def test_gated_equals_its_definition(
    cpu: MakeBackend, random_matrix: MakeMatrix, channels: int, gate_kind: dict[str, object], up_kind: dict[str, object]
) -> None:
    gate = random_matrix(channels, 128, seed=1, **gate_kind)
    up = random_matrix(channels, 128, seed=2, **up_kind)
    backend = cpu(2)
    weight = backend.load_gated(gate, up)
    for rows in (1, 3, 66):
        x = 3 * rows_of(rows, 128)
        np.testing.assert_allclose(
            run_gated(backend, weight, x, channels), silu_reference(x, gate, up), rtol=1e-4, atol=2e-5
        )


def test_gated_rows_have_the_same_bits_in_every_batch_on_any_threads(
    cpu: MakeBackend, random_matrix: MakeMatrix
) -> None:
    gate, up = random_matrix(130, 96, seed=1), random_matrix(130, 96, seed=2, group_size=16)
    x = rows_of(257, 96)
    single = cpu(1)
    weight = single.load_gated(gate, up)
    alone = np.concatenate([run_gated(single, weight, x[row : row + 1], 130) for row in range(len(x))])
    for threads in (1, 2, 3):
        backend = cpu(threads)
        weight = backend.load_gated(gate, up)
        for rows in (*range(2, 34), 63, 64, 65, 255, 256, 257):
            order = np.roll(np.arange(len(x)), 7 * rows)[:rows]
            np.testing.assert_array_equal(run_gated(backend, weight, x[order], 130), alone[order])


def test_gated_is_exact_in_its_linear_part(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    """For a large gate silu(g) is g, so the op's products are those of `linear`, multiplied once."""
    gate, up = random_matrix(70, 32, seed=1), random_matrix(70, 32, seed=2)
    backend = cpu(2)
    x = 1e4 * rows_of(5, 32)
    g = run_linear(backend, backend.load_matrix([gate]), x, 70)
    u = run_linear(backend, backend.load_matrix([up]), x, 70)
    large = g > 100
    assert large.any()
    result = run_gated(backend, backend.load_gated(gate, up), x, 70)
    np.testing.assert_array_equal(result[large], (g * u)[large])
    assert (result[g < -120] == 0).all()


def test_gated_keeps_what_is_not_finite_in_its_row(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(2)
    weight = backend.load_gated(random_matrix(70, 64, seed=1), random_matrix(70, 64, seed=2))
    x = rows_of(9, 64)
    clean = run_gated(backend, weight, x, 70)
    x[3, 5] = np.nan
    dirty = run_gated(backend, weight, x, 70)
    assert np.isnan(dirty[3]).all()
    others = np.arange(9) != 3
    np.testing.assert_array_equal(dirty[others], clean[others])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "dtype"), [(16, "float32"), (32, "float16"), (128, "float16")])
@pytest.mark.parametrize("threads", [1, 3])
def test_embedding_gives_the_dequantized_rows(
    cpu: MakeBackend, random_matrix: MakeMatrix, bits: int, group_size: int, dtype: str, threads: int
) -> None:
    matrix = random_matrix(203, 128, bits=bits, group_size=group_size, dtype=dtype)
    backend = cpu(threads)
    weight = backend.load_matrix([matrix])
    ids = np.array([0, 202, 31, 32, 63, 64, 65, 127, 128, 0, 7], np.int32)
    out = backend.upload(np.full((len(ids) + 1, 128), np.nan, np.float32))
    backend.embedding(backend.upload(ids), weight, out, len(ids))
    result = backend.read(out)
    q = matrix.integers().astype(np.longdouble).reshape(203, -1, group_size)
    exact = q * matrix.scale.astype(np.longdouble)[:, :, None] + matrix.minimum.astype(np.longdouble)[:, :, None]
    np.testing.assert_array_equal(result[:-1], exact.reshape(203, 128)[ids].astype(np.float32))
    assert np.isnan(result[-1]).all()


@pytest.mark.parametrize("scale", [64.0, 1536**0.5, 12.0])
def test_an_embedding_is_scaled_after_both_are_rounded(
    cpu: MakeBackend, random_matrix: MakeMatrix, scale: float
) -> None:
    backend = cpu(2)
    weight = backend.load_matrix([random_matrix(203, 128), random_matrix(20, 128, bits=8)])
    ids = backend.upload(np.arange(223, dtype=np.int32)[::-1].copy())
    plain, scaled = backend.empty((223, 128), "float32"), backend.empty((223, 128), "float32")
    backend.embedding(ids, weight, plain, 223)
    backend.embedding(ids, weight, scaled, 223, scale=scale)
    np.testing.assert_array_equal(backend.read(scaled), backend.read(plain) * np.float32(scale))


def test_one_matrix_serves_as_embedding_and_head(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    matrix = random_matrix(130, 64, bits=8)
    backend = cpu(2)
    weight = backend.load_matrix([matrix])
    ids = np.arange(130, dtype=np.int32)
    rows = backend.empty((130, 64), "float32")
    backend.embedding(backend.upload(ids), weight, rows, 130)
    scores = run_linear(backend, weight, backend.read(rows), 130)
    dense = matrix.dequantize().astype(np.float64)
    np.testing.assert_allclose(scores, dense @ dense.T, atol=1e-3)


def test_an_embedding_of_several_kinds_finds_each_row(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    parts = [random_matrix(70, 64), random_matrix(3, 64, bits=8), random_matrix(66, 64, group_size=16)]
    backend = cpu(2)
    weight = backend.load_matrix(parts)
    ids = np.arange(139, dtype=np.int32)[::-1].copy()
    out = backend.empty((139, 64), "float32")
    backend.embedding(backend.upload(ids), weight, out, 139)
    expected = np.concatenate([part.dequantize() for part in parts])[ids]
    np.testing.assert_allclose(backend.read(out), expected, atol=1e-6)


def test_an_id_outside_the_vocabulary_poisons_its_row_alone(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(2)
    weight = backend.load_matrix([random_matrix(70, 64)])
    out = backend.upload(np.zeros((4, 64), np.float32))
    ids = np.array([3, 70, -1, 69], np.int32)
    backend.embedding(backend.upload(ids), weight, out, 4)
    assert np.isnan(backend.read(out)).all(axis=1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("threads", [1, 3])
def test_gather_rows_copies_bits(cpu: MakeBackend, threads: int) -> None:
    backend = cpu(threads)
    x = rows_of(50, 65)
    x[7] = np.nan
    indices = np.array([49, 0, 7, 7, 13, 50, -1], np.int32)
    out = backend.upload(np.zeros((8, 65), np.float32))
    backend.gather_rows(backend.upload(x), backend.upload(indices), out, 7)
    result = backend.read(out)
    np.testing.assert_array_equal(result[:5].view(np.uint32), x[indices[:5]].view(np.uint32))
    assert np.isnan(result[5:7]).all()
    assert (result[7] == 0).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_id_below_0_is_the_last_token_of_its_place(
    cpu: MakeBackend, random_matrix: MakeMatrix, threads: int
) -> None:
    backend = cpu(threads)
    weight = backend.load_matrix([random_matrix(70, 64), random_matrix(9, 64, bits=8)])
    last = np.array([7, 78, 0, 69, 5], np.int32)
    ids = np.array([3, -1, -5, -2, -4, 78, -2, -3], np.int32)

    def resolved(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.array([tokens[-1 - i] if i < 0 else i for i in ids], np.int32)

    plain, ahead = (backend.upload(np.full((9, 64), 7, np.float32)) for _ in range(2))
    device_last = backend.upload(last)
    backend.embedding(backend.upload(ids), weight, ahead, 8, scale=3.0, last_tokens=device_last)
    backend.embedding(backend.upload(resolved(last)), weight, plain, 8, scale=3.0)
    np.testing.assert_array_equal(backend.read(ahead), backend.read(plain))
    # The array is read when the op runs, not when it is enqueued.
    backend.replay("ahead", lambda: backend.embedding(backend.upload(ids), weight, ahead, 8, last_tokens=device_last))
    backend.write(device_last, last[::-1].copy())
    backend.replay("ahead", lambda: pytest.fail("recorded"))
    backend.embedding(backend.upload(resolved(last[::-1])), weight, plain, 8)
    np.testing.assert_array_equal(backend.read(ahead), backend.read(plain))


def test_a_place_outside_the_last_tokens_and_a_last_token_outside_the_vocabulary_poison_their_rows(
    cpu: MakeBackend, random_matrix: MakeMatrix
) -> None:
    backend = cpu(2)
    weight = backend.load_matrix([random_matrix(70, 64)])
    out = backend.upload(np.zeros((7, 64), np.float32))
    # The array ends in the middle of one that has a token for every place.
    last = backend.upload(np.array([69, -1, 70, -3, 1, 1, 1, 1], np.int32))[:4]
    ids = np.array([-1, -2, -3, -4, -5, -(2**31), 2], np.int32)
    backend.embedding(backend.upload(ids), weight, out, 7, last_tokens=last)
    poisoned = np.isnan(backend.read(out)).all(axis=1).tolist()
    assert poisoned == [False, True, True, True, True, True, False]
