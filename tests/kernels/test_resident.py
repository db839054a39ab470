"""The resident arrangement: nothing is lost in it, and its size is known before it is made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardline.kernels import GROUP_SIZES, GroupedMatrix, KVLayout, cpu_backend, cpu_resident_bytes
from shardline.kernels.cpu.resident import LANES, pack, unpack


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


def test_refuses_parts_of_unequal_inputs(random_matrix: Callable[..., GroupedMatrix]) -> None:
    with pytest.raises(AssertionError, match=r"\(8, 64\).*\(8, 32\)"):
        pack([random_matrix(8, 64), random_matrix(8, 32)])


def test_blocks_start_on_cache_lines(random_matrix: Callable[..., GroupedMatrix]) -> None:
    for seed in range(5):
        part = pack([random_matrix(70, 48, group_size=16, seed=seed)]).parts[0]
        assert [array.ctypes.data % 64 for array in (part.q, part.scale, part.minimum)] == [0, 0, 0]


def test_the_backend_counts_what_it_holds(random_matrix: Callable[..., GroupedMatrix]) -> None:
    backend = cpu_backend(1)
    try:
        assert backend.resident_bytes() == 0
        gate, up = random_matrix(100, 64), random_matrix(100, 64, bits=8, dtype="float32")
        gated = backend.load_gated(gate, up)
        both = cpu_resident_bytes(4, 100, 64, 32, 2) + cpu_resident_bytes(8, 100, 64, 32, 4)
        assert backend.resident_bytes() == both
        layout = KVLayout(num_layers=2, num_blocks=3, block_size=16, num_kv_heads=2, head_dim=64, dtype="float16")
        cache = backend.allocate_kv(layout)
        assert backend.resident_bytes() == both + layout.nbytes
        del gated
        assert backend.resident_bytes() == layout.nbytes
        del cache
        assert backend.resident_bytes() == 0
    finally:
        backend.close()
