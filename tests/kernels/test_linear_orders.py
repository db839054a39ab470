"""Products whose columns are not in the order of the input channels (act-order), and gated products of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.kernels import Activation, Backend, GroupedMatrix, Weight

MakeBackend = Callable[[int], Backend]
MakeMatrix = Callable[..., GroupedMatrix]
Floats = NDArray[np.float32]


def rows_of(count: int, inputs: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, count, inputs]).standard_normal((count, inputs), np.float32)


def order_of(inputs: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng([seed, inputs]).permutation(inputs).astype(np.int32)


def poison(backend: Backend) -> None:
    """What an op leaves to its next record, and what it has not written, is not to be relied on."""
    for scratch in backend._scratches.values():
        scratch.view(np.uint8)[...] = 0xFF


def run(
    backend: Backend,
    weight: Weight,
    x: Floats,
    channels: int,
    *,
    gated: Activation | None = None,
    bias: Floats | None = None,
) -> Floats:
    """`linear`, or with an activation `gated_linear`, on all rows of x, from poisoned memory."""
    out = backend.upload(np.full((len(x) + 1, channels), np.nan, np.float32))
    given = backend.upload(np.concatenate([x, np.full((1, x.shape[1]), np.nan, np.float32)]))
    device_bias = None if bias is None else backend.upload(bias)
    poison(backend)
    if gated:
        backend.gated_linear(given, weight, out, len(x), activation=gated, bias=device_bias)
    else:
        backend.linear(given, weight, out, len(x), bias=device_bias)
    result: Floats = backend.read(out)
    assert np.isnan(result[-1]).all()
    return result[:-1]


def joined(activation: str, g: Floats, u: Floats) -> NDArray[np.float64]:
    gate, up = g.astype(np.float64), u.astype(np.float64)
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 16), (4, 128)])
def test_an_ordered_matrix_reads_its_columns_channels(
    cpu: MakeBackend, random_matrix: MakeMatrix, bits: int, group_size: int
) -> None:
    inputs = 3 * group_size
    plain = random_matrix(70, inputs, bits=bits, group_size=group_size)
    order = order_of(inputs, 1)
    matrix = replace(plain, input_order=order)
    backend = cpu(2)
    x = rows_of(9, inputs)
    result = run(backend, backend.load_matrix([matrix]), x, 70)
    np.testing.assert_allclose(result, x.astype(np.float64) @ matrix.dequantize().astype(np.float64).T, atol=1e-4)
    np.testing.assert_array_equal(result, run(backend, backend.load_matrix([plain]), x[:, order], 70))


@pytest.mark.parametrize(
    "orders",
    [(1, 2, 3), (1, 1, 1), (1, 1, 2), (1, None, 1), (None, None, 4), (None, 4, None)],
    ids=lambda orders: "-".join(str(order) for order in orders),
)
@pytest.mark.parametrize("bits", [(4, 4, 4), (4, 8, 4), (8, 4, 4)])
def test_parts_of_one_product_each_have_an_order_of_their_own(
    cpu: MakeBackend, random_matrix: MakeMatrix, orders: tuple[int | None, ...], bits: tuple[int, ...]
) -> None:
    """Queries, keys and values: what they are stacked with changes none of their bits."""
    parts = [
        replace(
            random_matrix(channels, 96, bits=width, seed=channels),
            input_order=None if order is None else order_of(96, order),
        )
        for channels, width, order in zip((70, 33, 34), bits, orders, strict=True)
    ]
    backend = cpu(3)
    x, bias = rows_of(7, 96), rows_of(1, 137, 1)[0]
    whole = run(backend, backend.load_matrix(parts), x, 137, bias=bias)
    first = 0
    for part in parts:
        end = first + part.shape[0]
        x_part = x if part.input_order is None else x[:, part.input_order]
        plain = backend.load_matrix([replace(part, input_order=None)])
        np.testing.assert_array_equal(whole[:, first:end], run(backend, plain, x_part, end - first) + bias[first:end])
        first = end


def test_rows_of_an_ordered_product_have_the_same_bits_in_every_batch_on_any_threads(
    cpu: MakeBackend, random_matrix: MakeMatrix
) -> None:
    """Also of more rows than are put in order at once."""
    parts = [replace(random_matrix(65, 96, seed=seed), input_order=order_of(96, seed)) for seed in (1, 2)]
    x = rows_of(1100, 96)
    single = cpu(1)
    weight = single.load_matrix(parts)
    alone = np.concatenate([run(single, weight, x[row : row + 1], 130) for row in range(0, len(x), 5)])
    for threads in (1, 2, 3):
        backend = cpu(threads)
        weight = backend.load_matrix(parts)
        for rows in (*range(1, 66, 3), 255, 257, 511, 512, 513, 1025, 1100):
            start = (7 * rows) % (len(x) - rows + 1)
            result = run(backend, weight, x[start : start + rows], 130)
            skip = -start % 5
            np.testing.assert_array_equal(result[skip::5], alone[(start + skip) // 5 :][: len(result[skip::5])])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("channels", [1, 65, 96])
def test_gated_equals_its_definition_for_every_activation(
    cpu: MakeBackend, random_matrix: MakeMatrix, activation: Activation, biased: bool, channels: int
) -> None:
    gate, up = random_matrix(channels, 64, seed=1), random_matrix(channels, 64, bits=8, seed=2)
    backend = cpu(2)
    for rows in (1, 3, 67):
        x = 4 * rows_of(rows, 64)
        bias = 3 * rows_of(1, 2 * channels, 5)[0] if biased else np.zeros(2 * channels, np.float32)
        g, u = (x.astype(np.float64) @ matrix.dequantize().astype(np.float64).T for matrix in (gate, up))
        expected = joined(activation, g + bias[:channels], u + bias[channels:])
        result = run(
            backend, backend.load_gated(gate, up), x, channels, gated=activation, bias=bias if biased else None
        )
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_a_gated_bias_is_one_rounded_addition(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    """For a large gate silu(g) is g: what is left are the products of `linear`, the biases, one multiplication."""
    gate, up = random_matrix(70, 32, seed=1), random_matrix(70, 32, seed=2)
    backend = cpu(2)
    x, bias = 1e4 * rows_of(5, 32), 1e3 * rows_of(1, 140)[0]
    g = run(backend, backend.load_matrix([gate]), x, 70, bias=bias[:70])
    u = run(backend, backend.load_matrix([up]), x, 70, bias=bias[70:])
    large = g > 100
    assert large.any()
    result = run(backend, backend.load_gated(gate, up), x, 70, gated="silu", bias=bias)
    np.testing.assert_array_equal(result[large], (g * u)[large])


@pytest.mark.parametrize("length", [70, 139, 141])
def test_refuses_a_gated_bias_that_is_not_two(cpu: MakeBackend, random_matrix: MakeMatrix, length: int) -> None:
    backend = cpu(1)
    weight = backend.load_gated(random_matrix(70, 32), random_matrix(70, 32, seed=1))
    with pytest.raises(AssertionError, match=r"bias is \(.*, not \[140\]"):
        run(backend, weight, rows_of(1, 32), 70, gated="silu", bias=np.zeros(length, np.float32))


@pytest.mark.parametrize("orders", [(1, 1), (1, 2), (None, 2), (1, None)])
def test_a_gate_and_its_up_may_have_different_orders(
    cpu: MakeBackend, random_matrix: MakeMatrix, orders: tuple[int | None, int | None]
) -> None:
    backend = cpu(2)
    gate, up = random_matrix(70, 96, seed=1), random_matrix(70, 96, seed=2)
    x = rows_of(600, 96)
    gate_order, up_order = (np.arange(96) if order is None else order_of(96, order) for order in orders)
    ordered = backend.load_gated(
        replace(gate, input_order=None if orders[0] is None else gate_order),
        replace(up, input_order=None if orders[1] is None else up_order),
    )
    result = run(backend, ordered, x, 70, gated="silu")
    g = run(backend, backend.load_matrix([gate]), x[:, gate_order], 70)
    u = run(backend, backend.load_matrix([up]), x[:, up_order], 70)
    np.testing.assert_allclose(result, joined("silu", g, u), rtol=1e-5, atol=1e-6)
    if orders[0] == orders[1]:
        plain = run(backend, backend.load_gated(gate, up), x[:, gate_order], 70, gated="silu")
        np.testing.assert_array_equal(result, plain)
    alone = np.concatenate([run(backend, ordered, x[row : row + 1], 70, gated="silu") for row in range(0, 600, 37)])
    np.testing.assert_array_equal(result[::37], alone)


def test_an_ordered_embedding_gives_channels_and_not_columns(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    matrix = replace(random_matrix(70, 96), input_order=order_of(96, 1))
    backend = cpu(2)
    ids = np.arange(70, dtype=np.int32)
    out = backend.empty((70, 96), "float32")
    backend.embedding(backend.upload(ids), backend.load_matrix([matrix]), out, 70)
    np.testing.assert_allclose(backend.read(out), matrix.dequantize(), atol=1e-7)
