"""Products of many tokens by the kernels of wide.cu, where the device has their instructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardline.kernels.cuda import tables
from shardline.kernels.cuda.arrays import Activations
from shardline.kernels.cuda.core import CudaCore, int32
from shardline.kernels.cuda.tensor_maps import tensor_maps
from shardline.kernels.cuda.weights import CudaPart, CudaWeight

_MATRIX_MAPS = 2
"""Of each kind of tile: integers, scales."""


class WideProducts(CudaCore):
    """What the ops on matrices use where there are many rows."""

    def described(self, weight: CudaWeight) -> CudaWeight:
        """The weight with tensor maps of the parts that may go this way."""
        return replace(
            weight,
            parts=tuple(
                replace(part, maps=_maps_of(part))
                if tables.is_wide_format(part.bits, part.group_size, part.has_minimum, self.arch)
                else part
                for part in weight.parts
            ),
        )

    def _multiply_wide(
        self,
        launch: tables.LinearLaunch,
        x: Activations,
        part: CudaPart,
        out: np.uint64,
        stride: int,
        rows: int,
        *,
        bias: np.uint64,
        accumulate: bool,
        largest: np.uint64 | None,
        defines: Mapping[str, int],
    ) -> None:
        """One part's product as `ProductOps._multiply`, by a launch of `tables.WIDE`."""
        variant, slices = launch.variant, tables.slices(part.blocks)
        assert part.maps is not None, "the weight was not described"
        assert x.maps is not None, "rows of a device that has no wide.cu"
        matrix = tables.WIDE_CHANNELS.index(variant.channels) * _MATRIX_MAPS
        arguments = (
            np.uint64(part.maps.data.ptr + matrix * tables.TENSOR_MAP_BYTES),
            np.uint64(x.maps.data.ptr + tables.WIDE_TOKENS.index(variant.tokens) * tables.TENSOR_MAP_BYTES),
            x.scales,
            bias,
            out,
            int32(rows),
            int32(part.channels),
            int32(stride),
            int32(part.tiles),
            int32(part.blocks),
            int32(accumulate),
            self._buffer("slice sums", launch.waiting_floats(slices)),
            self._arrived,
            int32(slices),
            np.uint64(0) if largest is None else largest,
        )
        self._launch(
            ("wide", ("" if largest is None else "gated_") + variant.name),
            launch.grid,
            variant.threads,
            arguments,
            shared=launch.shared_bytes(part, self.arch),
            cluster=launch.cluster,
            **part.defines,
            **defines,
        )


def _maps_of(part: CudaPart) -> Any:
    blocks = part.group_size // tables.BLOCK_K
    groups = part.blocks // blocks
    integers, pair = 512 * part.bits // 4, 8 if part.scale_f32 else 4
    return tensor_maps(
        [
            table
            for channels in tables.WIDE_CHANNELS
            for table in (
                (part.integers.data.ptr, part.tiles, part.blocks * integers, channels // 16, blocks * integers),
                (part.scale.data.ptr, part.tiles, groups * 8 * pair, channels // 16, 8 * pair),
            )
        ]
    )
