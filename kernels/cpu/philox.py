"""Philox 4x32-10, the counter generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), and the Gumbel noise that sampling takes from it: a function of seed, position and token id alone.
"""

from __future__ import annotations

import numpy as np

from shardline.kernels.cpu.jit import jit, jit_inlined
from shardline.kernels.cpu.logarithm import log_f64

NOISE_BLOCK = 64
"""Token ids whose noise is drawn together: a multiple of the generator's four words."""

_QUARTER = NOISE_BLOCK // 4

GUMBEL_BOUND = 22.88
"""No noise is larger: -ln(-ln(1 - 2^-33)) is 22.8739..."""

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_KEY_STEP_0 = np.uint32(0x9E3779B9)
_KEY_STEP_1 = np.uint32(0xBB67AE85)
_32 = np.uint64(32)


@jit_inlined
def philox_4x32_10(c0, c1, c2, c3, k0, k1):
    """Four uint32 of a counter of four uint32 and a key of two."""
    for _ in range(10):
        a = np.uint64(c0) * _MULTIPLIER_0
        b = np.uint64(c2) * _MULTIPLIER_1
        c0 = np.uint32(np.uint32(b >> _32) ^ c1 ^ k0)
        c1 = np.uint32(b)
        c2 = np.uint32(np.uint32(a >> _32) ^ c3 ^ k1)
        c3 = np.uint32(a)
        k0 = np.uint32(k0 + _KEY_STEP_0)
        k1 = np.uint32(k1 + _KEY_STEP_1)
    return c0, c1, c2, c3


@jit
def gumbel_noise(seed, position, block, words, noise):
    """The noise of ids block * NOISE_BLOCK and the NOISE_BLOCK - 1 after it, id i of them at `noise_index(i)`.

    The key is the seed's two words; the counter is (id // 4, position, 0, 0), the word id % 4; a word u becomes
    -ln(-ln((u + 0.5) / 2^32)). words uint32 [NOISE_BLOCK], scratch; noise float64 [NOISE_BLOCK].
    """
    k0 = np.uint32(seed)
    k1 = np.uint32(np.uint64(seed) >> _32)
    c1 = np.uint32(position)
    zero = np.uint32(0)
    for i in range(_QUARTER):
        a, b, c, d = philox_4x32_10(np.uint32(block * _QUARTER + i), c1, zero, zero, k0, k1)
        words[i] = a
        words[_QUARTER + i] = b
        words[2 * _QUARTER + i] = c
        words[3 * _QUARTER + i] = d
    for i in range(NOISE_BLOCK):
        uniform = (np.float64(np.int64(words[i])) + 0.5) * 2.0**-32
        noise[i] = -log_f64(-log_f64(uniform))


@jit
def noise_index(offset):
    """Where `gumbel_noise` puts id `offset` of a block: the first words come first, then the second ones."""
    return (offset % 4) * _QUARTER + offset // 4
