"""The resident arrangement: nothing is lost in it, and its size is known before it is made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.kernels import GROUP_SIZES, Expert, GroupedMatrix, KVLayout, cpu_backend, cpu_resident_bytes
from shardline.kernels.cpu.resident import LANES, pack, pack_expert, pack_gated, unpack


def order_of(inputs: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng([seed, inputs]).permutation(inputs).astype(np.int32)


def assert_same(actual: GroupedMatrix, expected: GroupedMatrix) -> None:
    assert (actual.bits, actual.group_size) == (expected.bits, expected.group_size)
    for name in ("q", "scale", "minimum"):
        left, right = getattr(actual, name), getattr(expected, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("channels", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unpacks_to_what_was_packed(
    random_matrix: Callable[..., GroupedMatrix], bits: int, group_size: int, channels: int, dtype: str
) -> None:
    given = random_matrix(channels, 3 * group_size, bits=bits, group_size=group_size, dtype=dtype)
    matrix = pack([given])
    assert (matrix.channels, matrix.inputs, len(matrix.parts)) == (channels, 3 * group_size, 1)
    assert_same(unpack(matrix.parts[0]), given)
    assert matrix.nbytes == cpu_resident_bytes(bits, channels, 3 * group_size, group_size, np.dtype(dtype).itemsize)


def test_a_channel_of_a_block_is_a_lane(random_matrix: Callable[..., GroupedMatrix]) -> None:
    four, eight = random_matrix(130, 64), random_matrix(130, 64, bits=8)
    q4, q8 = pack([four]).parts[0].q, pack([eight]).parts[0].q
    assert q4.shape == (3, 2, 32, LANES // 2)
    assert q8.shape == (3, 2, 32, LANES)
    for channel, k in [(0, 0), (31, 1), (32, 1), (63, 33), (64, 63), (100, 40), (129, 5)]:
        block, lane = divmod(channel, LANES)
        byte = q4[block, k // 32, k % 32, lane % 32]
        assert (byte & 15 if lane < 32 else byte >> 4) == four.integers()[channel, k]
        assert q8[block, k // 32, k % 32, lane] == eight.q[channel, k]


def test_parts_of_one_kind_are_stacked_without_padding_between(random_matrix: Callable[..., GroupedMatrix]) -> None:
    parts = [random_matrix(channels, 64, seed=channels) for channels in (10, 100, 30)]
    matrix = pack(parts)
    assert len(matrix.parts) == 1
    stacked = unpack(matrix.parts[0])
    np.testing.assert_array_equal(stacked.dequantize(), np.concatenate([part.dequantize() for part in parts]))


def test_parts_of_different_kinds_stay_apart(random_matrix: Callable[..., GroupedMatrix]) -> None:
    parts = [
        random_matrix(10, 128),
        random_matrix(20, 128),
        random_matrix(70, 128, bits=8),
        random_matrix(5, 128, group_size=16),
        random_matrix(6, 128, group_size=16, dtype="float32"),
    ]
    matrix = pack(parts)
    assert [(part.first, part.channels) for part in matrix.parts] == [(0, 30), (30, 70), (100, 5), (105, 6)]
    assert matrix.channels == 111
    for part, expected in zip(matrix.parts[1:], parts[2:], strict=True):
        assert_same(unpack(part), expected)


def test_parts_are_stacked_by_their_order_and_share_it(random_matrix: Callable[..., GroupedMatrix]) -> None:
    one, two = order_of(64, 1), order_of(64, 2)
    given = [
        replace(random_matrix(10, 64, bits=bits, seed=i), input_order=order)
        for i, (order, bits) in enumerate([(one, 4), (one.copy(), 4), (one.copy(), 8), (two, 8), (None, 8)])
    ]
    matrix = pack(given)
    assert [(part.first, part.channels, part.bits) for part in matrix.parts] == [
        (0, 20, 4),
        (20, 10, 8),
        (30, 10, 8),
        (40, 10, 8),
    ]
    assert matrix.parts[0].order is matrix.parts[1].order
    for part, expected in zip(matrix.parts, (one, one, two, None), strict=True):
        np.testing.assert_array_equal(part.order, expected)
    sizes = [(4, 20, True), (8, 10, False), (8, 10, True), (8, 10, False)]
    counted = [cpu_resident_bytes(bits, channels, 64, 32, 2, ordered=own) for bits, channels, own in sizes]
    assert matrix.nbytes == sum(counted)
    stacked = unpack(matrix.parts[0])
    np.testing.assert_array_equal(stacked.dequantize(), np.concatenate([part.dequantize() for part in given[:2]]))


def test_an_order_that_changes_nothing_is_not_kept(random_matrix: Callable[..., GroupedMatrix]) -> None:
    plain = random_matrix(10, 64)
    matrix = pack([replace(plain, input_order=np.arange(64, dtype=np.int32)), plain])
    assert [(part.channels, part.order) for part in matrix.parts] == [(20, None)]
    assert matrix.nbytes == cpu_resident_bytes(4, 20, 64, 32, 2)


@pytest.mark.parametrize("wrong", [-1, 0, 64, 2**31 - 1])
def test_refuses_an_order_that_leads_out_of_the_row(random_matrix: Callable[..., GroupedMatrix], wrong: int) -> None:
    order = order_of(64, 1)
    order[order == 5] = wrong
    matrix = replace(random_matrix(64, 64), input_order=order)
    for load in (
        lambda: pack([matrix]),
        lambda: pack_gated(matrix, matrix),
        lambda: pack_expert(Expert(random_matrix(64, 64), random_matrix(64, 64), matrix)),
    ):
        with pytest.raises(AssertionError, match="no permutation"):
            load()


def test_a_pair_of_one_order_keeps_it_once(random_matrix: Callable[..., GroupedMatrix]) -> None:
    gate, up = random_matrix(10, 64), random_matrix(10, 64, bits=8)
    one, two = order_of(64, 1), order_of(64, 2)
    plain = cpu_resident_bytes(4, 10, 64, 32, 2) + cpu_resident_bytes(8, 10, 64, 32, 2)
    for orders, kept in (((one, one.copy()), 1), ((one, two), 2), ((None, two), 1)):
        pair = pack_gated(replace(gate, input_order=orders[0]), replace(up, input_order=orders[1]))
        assert pair.nbytes == plain + 4 * 64 * kept


def test_the_order_of_an_experts_down_matrix_goes_into_the_channels_before_it(
    random_matrix: Callable[..., GroupedMatrix],
) -> None:
    gate, up, down = random_matrix(64, 96), random_matrix(64, 96, bits=8, seed=1), random_matrix(96, 64, seed=2)
    order = order_of(64, 1)
    packed = pack_expert(Expert(gate, up, replace(down, input_order=order)))
    for matrix, expected in zip(packed.in_order, (gate.dequantize()[order], up.dequantize()[order]), strict=False):
        np.testing.assert_array_equal(unpack(matrix.parts[0]).dequantize(), expected)
    assert_same(unpack(packed.down.parts[0]), down)
    assert packed.nbytes == pack_expert(Expert(gate, up, down)).nbytes


def test_refuses_parts_of_unequal_inputs(random_matrix: Callable[..., GroupedMatrix]) -> None:
    with pytest.raises(AssertionError, match=r"\(8, 64\).*\(8, 32\)"):
        pack([random_matrix(8, 64), random_matrix(8, 32)])


def test_blocks_start_on_cache_lines(random_matrix: Callable[..., GroupedMatrix]) -> None:
    for seed in range(5):
        part = pack([random_matrix(70, 48, group_size=16, seed=seed)]).parts[0]
        assert [array.ctypes.data % 64 for array in (part.q, part.scale, part.minimum)] == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_backend_counts_what_it_holds(random_matrix: Callable[..., GroupedMatrix], dtype: str) -> None:
    backend = cpu_backend(1)
    try:
        assert backend.resident_bytes() == 0
        gate, up = random_matrix(100, 64), random_matrix(100, 64, bits=8, dtype="float32")
        gated = backend.load_gated(gate, up)
        both = cpu_resident_bytes(4, 100, 64, 32, 2) + cpu_resident_bytes(8, 100, 64, 32, 4)
        assert backend.resident_bytes() == both
        layout = KVLayout(num_layers=2, num_blocks=3, block_size=16, num_kv_heads=2, head_dim=64, dtype=dtype)
        cache = backend.allocate_kv(layout)
        assert layout.nbytes == 2 * 2 * 3 * 16 * 2 * {"float32": 256, "float16": 128, "int8": 64 + 2}[dtype]
        assert backend.resident_bytes() == both + layout.nbytes
        del gated
        assert backend.resident_bytes() == layout.nbytes
        del cache
        assert backend.resident_bytes() == 0
    finally:
        backend.close()


def test_the_backend_counts_experts_and_holds_no_source(random_matrix: Callable[..., GroupedMatrix]) -> None:
    alive: list[weakref.ref[NDArray[np.uint8]]] = []

    def read() -> Iterator[Expert]:
        for seed in range(5):
            assert not any(q() is not None for q in alive), "more than one expert is in flight"
            gate, up = random_matrix(96, 64, seed=seed), random_matrix(96, 64, bits=8, dtype="float32", seed=seed)
            expert = Expert(gate, up, random_matrix(64, 96, seed=seed))
            alive.extend(weakref.ref(matrix.q) for matrix in (gate, up, expert.down))
            del gate, up
            yield expert
            del expert
            gc.collect()

    backend = cpu_backend(1)
    try:
        experts = backend.load_experts(read())
        assert len(alive) == 15
        each = ((4, 96, 64, 32, 2), (8, 96, 64, 32, 4), (4, 64, 96, 32, 2))
        assert backend.resident_bytes() == 5 * sum(cpu_resident_bytes(*matrix) for matrix in each)
        del experts
        assert backend.resident_bytes() == 0
    finally:
        backend.close()
