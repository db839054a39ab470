"""The paged pool of keys and values, and how a record names one layer of it. `rope.kv_shapes` says how it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.backend import KVLayout
from shardline.kernels.cpu import rope
from shardline.kernels.cpu.commands import address
from shardline.kernels.cpu.resident import aligned_zeros


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CpuKVCache:
    """A pool: keys and values, one array a layer, and of int8 their scales."""

    layout: KVLayout
    keys: NDArray[Any]
    values: NDArray[Any]
    key_scales: NDArray[np.uint16]
    value_scales: NDArray[np.uint16]

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return sum(array.nbytes for array in (self.keys, self.values, self.key_scales, self.value_scales))

    def words(self, layer: int) -> tuple[int, ...]:
        """Of a record: one layer's keys and values, blocks, Hkv, block size, D, value stride, scales of both."""
        layout = self.layout
        return (
            address(self.keys[layer]),
            address(self.values[layer]),
            layout.num_blocks,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
            self.values.shape[-1],
            address(self.key_scales[layer]),
            address(self.value_scales[layer]),
        )


def allocate(layout: KVLayout) -> CpuKVCache:
    """A pool of that shape, zero-filled."""
    key_shape, value_shape = rope.kv_shapes(layout)
    dtype, scales = rope.kv_dtype(layout), (layout.num_layers, *rope.scale_shape(layout))
    return CpuKVCache(
        layout,
        aligned_zeros((layout.num_layers, *key_shape), dtype),
        aligned_zeros((layout.num_layers, *value_shape), dtype),
        aligned_zeros(scales, np.uint16),
        aligned_zeros(scales, np.uint16),
    )
