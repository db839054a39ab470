from __future__ import annotations

import numpy as np
import pytest

from shardline.kernels.cpu import philox
from shardline.kernels.cpu.logarithm import log_f64


def words(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(word) for word in philox.philox_4x32_10(*(np.uint32(word) for word in (*counter, *key))))


# Of the Random123 distribution (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert words(counter, key) == expected


def block_noise(seed: int, position: int, block: int) -> np.ndarray:
    scratch, noise = np.zeros(philox.NOISE_BLOCK, np.uint32), np.full(philox.NOISE_BLOCK, np.nan)
    philox.gumbel_noise(np.uint64(seed), np.int64(position), np.int64(block), scratch, noise)
    return noise[[philox.noise_index(i) for i in range(philox.NOISE_BLOCK)]]


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**64 - 1, 0x123456789ABCDEF0])
@pytest.mark.parametrize(("position", "block"), [(0, 0), (5, 3), (131071, 767)])
def test_noise_is_a_function_of_seed_position_and_id(seed: int, position: int, block: int) -> None:
    noise = block_noise(seed, position, block)
    for offset in range(philox.NOISE_BLOCK):
        token = block * philox.NOISE_BLOCK + offset
        word = words((token // 4, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[token % 4]
        assert noise[offset] == pytest.approx(-np.log(-np.log((word + 0.5) / 2**32)), rel=1e-13, abs=1e-14)


def test_no_noise_passes_the_bound() -> None:
    largest = -log_f64(-log_f64((2**32 - 0.5) / 2**32))
    assert 22.87 < largest < philox.GUMBEL_BOUND


def test_logarithm() -> None:
    rng = np.random.default_rng(0)
    near = 2.0 ** -np.arange(8.0, 53.0)
    values = np.concatenate([rng.random(2000), 10.0 ** rng.uniform(-300, 300, 2000), 1 - near / 2, 1 + near])
    ours = np.array([log_f64(value) for value in values])
    true = np.log(values.astype(np.longdouble))
    # 4 half-ulps; near 1 this is relative to the small result.
    assert float(np.max(np.abs(ours - true) / np.abs(true))) < 4 * 2.0**-53
    assert log_f64(1.0) == 0.0
