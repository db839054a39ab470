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
from shardline.kernels.cuda.tensor_maps import tensor_maps


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
    maps: Any = None  # describes the tiles to wide.cu, in boxes of each of its numbers of tokens

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


def new_activations(rows: int, channels: int, arch: int) -> Activations:
    """Zero-filled tiles, on the current stream."""
    blocks = blocks_of(channels)
    tokens = pad_to(rows, tables.PADDED_TOKENS)
    fragments = cupy.zeros((tokens // 8, blocks, 2, 32, 4), cupy.uint32)
    return Activations(
        cupy.empty((rows, channels), cupy.float32),
        fragments,
        # Not cupy.ones: CuPy would compile a kernel for it.
        cupy.asarray(np.ones(tokens, np.float32)),
        cupy.zeros((tokens // 8, blocks, 2, 8), cupy.float32),
        cupy.zeros(tokens, cupy.uint32),
        cupy.zeros(tokens, cupy.uint32),
        blocks,
        _maps_of(fragments) if arch == tables.WIDE_ARCH else None,
    )


def _maps_of(fragments: Any) -> Any:
    tiles, blocks = fragments.shape[:2]
    stage = tables.BLOCKS_A_STAGE * 1024
    # A block of wide.cu reads half of a tile's tokens for both of its cluster.
    return tensor_maps(
        [(fragments.data.ptr, tiles, blocks * 1024, tokens // 16, stage) for tokens in tables.WIDE_TOKENS]
    )


@dataclass(frozen=True, slots=True)
class CudaKVCache:
    """A pool: keys and values [layers, blocks, Hkv, block size, D].

    Of float16 (uint16) or of integers (uint8 that hold int8) with float16 scales [layers, blocks, Hkv, block size];
    see `KVLayout`.
    """

    layout: KVLayout
    keys: Any
    values: Any
    key_scales: Any = None
    value_scales: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        arrays = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    @property
    def defines(self) -> dict[str, int]:
        """What kernels that touch it are compiled for."""
        eight_bits = {"KV_BITS": 8} if self.key_scales is not None else {}
        return {"HEAD_DIM": self.layout.head_dim} | eight_bits

    def scales(self, layer: int) -> tuple[Any, ...]:
        """What those kernels are given last."""
        return () if self.key_scales is None else (self.key_scales[layer], self.value_scales[layer])


def new_pool(layout: KVLayout) -> CudaKVCache:
    """A zero-filled pool, on the current stream."""
    shape = (layout.num_layers, layout.num_blocks, layout.num_kv_heads, layout.block_size)
    eight_bits = layout.dtype == "int8"
    stored = cupy.uint8 if eight_bits else cupy.uint16
    scales = (cupy.zeros(shape, cupy.uint16) for _ in range(2 * eight_bits))
    return CudaKVCache(layout, *(cupy.zeros((*shape, layout.head_dim), stored) for _ in range(2)), *scales)
