"""Host integers and scales to the layouts that linear.cu reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_CHANNELS = 16
PADDED_CHANNELS = 64
BLOCK_K = 64


def pad_to(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def pack_integers(q: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """uint8 [N, K] (N a multiple of 16, K of 64) to A fragments, uint32 [N / 16, K / 64, bits / 4, 32, 4]."""
    n, k = q.shape
    # tile, row half, row, block, k16 step, column half, lane column, element
    parts = q.reshape(n // 16, 2, 8, k // 64, 4, 2, 4, 2)
    if bits == 4:
        words = np.zeros((n // 16, k // 64, 8, 4, 4), np.uint32)  # tile, block, row, lane column, step
        for half in range(2):
            for column in range(2):
                for element in range(2):
                    nibbles = parts[:, half, :, :, :, column, :, element].astype(np.uint32)
                    words |= nibbles.transpose(0, 2, 1, 4, 3) << np.uint32(4 * (half + 2 * column + 4 * element))
        return words.reshape(n // 16, k // 64, 1, 32, 4)
    # A step's two words: (a0, a1) and (a2, a3), a byte an element: byte = element + 2 * row half, word = column half.
    octets = parts.transpose(
        0, 3, 4, 2, 6, 5, 1, 7
    )  # tile, block, step, row, lane column, column half, row half, element
    words = np.ascontiguousarray(octets).reshape(-1, 4).view(np.uint32)
    words = words.reshape(n // 16, k // 64, 2, 2, 32, 2)  # tile, block, pair of steps, step of the pair, lane, word
    return np.ascontiguousarray(words.transpose(0, 1, 2, 4, 3, 5)).reshape(n // 16, k // 64, 2, 32, 4)


def pack_scales(scale: NDArray[Any]) -> NDArray[Any]:
    """[N, groups] to [N / 16, groups, 8, 2]: channels r and r + 8 of a tile side by side."""
    n, groups = scale.shape
    return np.ascontiguousarray(scale.reshape(n // 16, 2, 8, groups).transpose(0, 3, 2, 1))
