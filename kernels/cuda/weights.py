"""Matrices resident on the device, in the layout of linear.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.cuda.pack import (
    TILE,
    Format,
    Packer,
    alike,
    can_interleave,
    order_of,
    shape_of,
    tiles_of,
)
from shardline.kernels.cuda.workspace import Product, WeightShapes
from shardline.kernels.matrix import GroupedMatrix


@dataclass(frozen=True, slots=True)
class CudaPart:
    """One matrix that one launch multiplies by.

    Attributes:
        bits, group_size, has_minimum, scale_f32: What its kernels are compiled for.
        integers, scale, minimum: Device arrays.
        channels: N; a gated pair counts both.
        first: Column of the output that its first channel goes to.
        blocks: K in blocks of 64.
        order: Device int32 [blocks * 64], the input channel of each column; None: they are in order.
        maps: What describes the arrays to wide.cu, where it may be used.
    """

    bits: int
    group_size: int
    has_minimum: bool
    scale_f32: bool
    integers: Any
    scale: Any
    minimum: Any
    channels: int
    first: int
    blocks: int
    order: Any = None
    maps: Any = None

    @property
    def tiles(self) -> int:
        """Tiles of 16 channels, padding included."""
        return tiles_of(self.channels)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        order = 0 if self.order is None else self.order.nbytes
        maps = 0 if self.maps is None else self.maps.nbytes
        return int(self.integers.nbytes + self.scale.nbytes + self.minimum.nbytes + order + maps)

    @property
    def defines(self) -> dict[str, int]:
        """Of linear.cu."""
        return Format(self.bits, self.group_size, self.has_minimum, self.scale_f32).defines


@dataclass(frozen=True, slots=True)
class CudaWeight:
    """Stacked matrices of equal K, or a gate and an up matrix. `channels` are the output's columns.

    A gate and an up of one format lie interleaved in one part; else they are two.
    """

    parts: tuple[CudaPart, ...]
    channels: int
    inputs: int
    gated: bool

    @property
    def blocks(self) -> int:
        """K in blocks of 64, padding included; the same for every part."""
        return self.parts[0].blocks

    @property
    def apart(self) -> bool:
        """A gate and an up that are two parts."""
        return self.gated and len(self.parts) == 2

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self.parts)

    def describe(self, shapes: WeightShapes) -> None:
        """Add it to what decides the workspace."""
        for place, part in enumerate(self.parts):
            gated = self.gated and not self.apart
            shapes.products.add(
                Product(part.tiles * TILE, part.blocks, part.bits, part.group_size, part.has_minimum, gated)
            )
            if part.order is not None:
                shapes.ordered.add((place, self.inputs))
        if self.apart:
            shapes.apart.add(self.channels)


def load(parts: Sequence[GroupedMatrix], packer: Packer) -> CudaWeight:
    """Stack matrices; neighbours of one format, whose channels fill whole tiles, become one part."""
    inputs = parts[0].shape[1]
    merged: list[list[GroupedMatrix]] = []
    for part in parts:
        assert part.shape[1] == inputs, f"stacked matrices have {part.shape[1]} and {inputs} input channels"
        if merged and alike(merged[-1][-1], part) and merged[-1][-1].shape[0] % TILE == 0:
            merged[-1].append(part)
        else:
            merged.append([part])
    done: list[CudaPart] = []
    first = 0
    for run in merged:
        done.append(_part(run, packer, first, done))
        first += sum(part.shape[0] for part in run)
    return CudaWeight(tuple(done), first, inputs, gated=False)


def load_gated(gate: GroupedMatrix, up: GroupedMatrix, packer: Packer) -> CudaWeight:
    """A gate and an up matrix, interleaved if they are of one format."""
    assert gate.shape == up.shape, f"gate is {gate.shape}, up is {up.shape}"
    channels, inputs = gate.shape
    if can_interleave(gate, up):
        parts = [_part([gate, up], packer, 0, (), gated=True)]
    else:
        parts = [_part([gate], packer, 0, ())]
        parts.append(_part([up], packer, 0, parts))
    return CudaWeight(tuple(parts), channels, inputs, gated=True)


def _part(
    run: Sequence[GroupedMatrix], packer: Packer, first: int, others: Sequence[CudaPart], *, gated: bool = False
) -> CudaPart:
    shape = shape_of(run, gated=gated)
    form = shape.format
    integers = cupy.empty(shape.integer_bytes // 4, cupy.uint32)
    scale = cupy.empty(shape.scale_bytes, cupy.uint8)
    # Read only where there are any.
    minimum = cupy.empty(shape.scale_bytes if form.has_minimum else 4, cupy.uint8)
    packer.pack(run, shape, integers.data.ptr, scale.data.ptr, minimum.data.ptr, gated=gated)
    order, columns = None, order_of(run[0])
    if columns is not None:
        # One array for parts in one order: what is put in that order for one serves the next.
        same = (other.order for other in others if other.order is not None)
        order = next((one for one in same if np.array_equal(one.get(), columns)), None)
        order = cupy.asarray(columns) if order is None else order
    return CudaPart(
        form.bits,
        form.group_size,
        form.has_minimum,
        form.scale_f32,
        integers,
        scale,
        minimum,
        shape.channels,
        first,
        shape.blocks,
        order,
    )
