"""What the CUDA backend's ops work on besides plain CuPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.backend import KVLayout
from shardline.kernels.cuda import tables
from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.cuda.pack import blocks_of, pad_to


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows that a matrix product reads: as float32 where an op writes them so, and as the tiles of linear.cu.

    rms_norm and most attention write the tiles at once; of what gated_linear writes they are made right after, with the
    rows' largest magnitudes that it found (`largest`; `done` counts blocks; both are zero between ops).
    """

    values: Any
    fragments: Any
    scales: Any
    sums: Any
    largest: Any
    done: Any
    blocks: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, channels)."""
        rows, channels = self.values.shape
        return int(rows), int(channels)

    def read(self, stream: Any) -> NDArray[np.float32]:
        """Wait, then return what the tiles hold, float32 [rows, channels]: what a product sees."""
        words: NDArray[np.uint32] = self.fragments.get(stream=stream, blocking=True)
        scales: NDArray[np.float32] = self.scales.get(stream=stream, blocking=True)
        tiles, blocks = words.shape[:2]
        # tile, block, eight channels, token, channel
        halves = words.view(np.float16).reshape(tiles, blocks, 8, 8, 8)
        rows = halves.transpose(0, 3, 1, 2, 4).reshape(tiles * 8, blocks * tables.BLOCK_K)
        values = rows.astype(np.float32) * scales[:, None]
        return np.ascontiguousarray(values[: self.shape[0], : self.shape[1]])


def new_activations(rows: int, channels: int) -> Activations:
    """Zero-filled tiles, on the current stream."""
    blocks = blocks_of(channels)
    tokens = pad_to(rows, tables.PADDED_TOKENS)
    return Activations(
        cupy.empty((rows, channels), cupy.float32),
        cupy.zeros((tokens // 8, blocks, 2, 32, 4), cupy.uint32),
        # Not cupy.ones: CuPy would compile a kernel for it.
        cupy.asarray(np.ones(tokens, np.float32)),
        cupy.zeros((tokens // 8, blocks, 2, 8), cupy.float32),
        cupy.zeros(tokens, cupy.uint32),
        cupy.zeros(tokens, cupy.uint32),
        blocks,
    )


@dataclass(frozen=True, slots=True)
class CudaKVCache:
    """A pool: half-precision keys and values [layers, blocks, Hkv, block size, D]."""

    layout: KVLayout
    keys: Any
    values: Any

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.keys.nbytes + self.values.nbytes)
