"""Matrices resident on the device, in the layout of linear.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from shardline.kernels.cuda.pack import pack_integers, pack_scales, pad_to
from shardline.kernels.cuda.tables import BLOCK_K, PADDED_CHANNELS
from shardline.kernels.matrix import GroupedMatrix

TILE = 16
CENTRES = {4: 8, 8: 128}
"""What the kernels subtract from an integer before they multiply."""


@dataclass(frozen=True, slots=True)
class CudaPart:
    """One matrix that one launch multiplies by.

    Attributes:
        bits, group_size, has_minimum, scale_f32: What its kernels are compiled for.
        integers, scale, minimum: Device arrays.
        channels: N; a gated pair counts both.
        first: Column of the output that its first channel goes to.
        blocks: K in blocks of 64.
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

    @property
    def tiles(self) -> int:
        """Tiles of 16 channels, padding included."""
        return pad_to(self.channels, PADDED_CHANNELS) // TILE

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.integers.nbytes + self.scale.nbytes + self.minimum.nbytes)

    @property
    def defines(self) -> dict[str, int]:
        """Of linear.cu."""
        return {
            "BITS": self.bits,
            "GROUP": self.group_size,
            "HAS_MIN": int(self.has_minimum),
            "SCALE_F32": int(self.scale_f32),
        }


@dataclass(frozen=True, slots=True)
class CudaWeight:
    """Stacked matrices of equal K, or a gate and an up matrix. `channels` are the output's columns."""

    parts: tuple[CudaPart, ...]
    channels: int
    inputs: int
    gated: bool

    @property
    def blocks(self) -> int:
        """K in blocks of 64, padding included; the same for every part."""
        return self.parts[0].blocks

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self.parts)


def blocks_of(inputs: int) -> int:
    """Blocks of 64 of K input channels; an even number, so that every group size fits."""
    return pad_to(inputs, 2 * BLOCK_K) // BLOCK_K


def load(parts: Sequence[GroupedMatrix]) -> CudaWeight:
    """Stack matrices; neighbours of one format, whose channels fill whole tiles, become one part."""
    inputs = parts[0].shape[1]
    blocks = blocks_of(inputs)
    merged: list[list[GroupedMatrix]] = []
    for part in parts:
        assert part.shape[1] == inputs, f"stacked matrices have {part.shape[1]} and {inputs} input channels"
        if merged and _format(merged[-1][-1]) == _format(part) and merged[-1][-1].shape[0] % TILE == 0:
            merged[-1].append(part)
        else:
            merged.append([part])
    done, first = [], 0
    for run in merged:
        integers = np.concatenate([part.integers() for part in run])
        scale = np.concatenate([part.scale for part in run])
        minimum = np.concatenate([part.minimum for part in run])
        done.append(_part(run[0], integers, scale, minimum, first, blocks))
        first += len(integers)
    return CudaWeight(tuple(done), first, inputs, gated=False)


def load_gated(gate: GroupedMatrix, up: GroupedMatrix) -> CudaWeight:
    """Interleave gate and up by tiles of 16 channels. They must be of one format."""
    assert gate.shape == up.shape, f"gate is {gate.shape}, up is {up.shape}"
    assert _format(gate) == _format(up), f"gate is {_format(gate)}, up is {_format(up)}"
    channels, inputs = gate.shape
    padded = pad_to(channels, TILE)
    blocks = blocks_of(inputs)

    def interleave(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        pair = np.zeros((padded // TILE, 2, TILE, a.shape[1]), a.dtype)
        for index, array in enumerate((a, b)):
            whole = np.zeros((padded, a.shape[1]), a.dtype)
            whole[:channels] = array
            pair[:, index] = whole.reshape(-1, TILE, a.shape[1])
        return pair.reshape(2 * padded, a.shape[1])

    part = _part(
        gate,
        interleave(gate.integers(), up.integers()),
        interleave(gate.scale, up.scale),
        interleave(gate.minimum, up.minimum),
        0,
        blocks,
    )
    # The last tiles' padding has no column in the output.
    return CudaWeight((replace(part, channels=2 * channels),), channels, inputs, gated=True)


def _format(matrix: GroupedMatrix) -> tuple[int, int, str]:
    return matrix.bits, matrix.group_size, matrix.scale.dtype.name


def _part(
    like: GroupedMatrix,
    integers: NDArray[np.uint8],
    scale: NDArray[Any],
    minimum: NDArray[Any],
    first: int,
    blocks: int,
) -> CudaPart:
    channels, inputs = integers.shape
    rows, columns = pad_to(channels, PADDED_CHANNELS), blocks * BLOCK_K
    centre = CENTRES[like.bits]
    zero = _zero_point(scale, minimum, like.bits)
    if zero is not None:
        # Shifted so that the zero point is the kernels' own centre: no minimum is needed, and no weight changes.
        integers = integers + np.uint8(centre - zero)
    # Padding has scale and minimum 0 and integers at the centre: it multiplies to exact zeros.
    q = np.full((rows, columns), centre, np.uint8)
    q[:channels, :inputs] = integers
    scales = np.zeros((2, rows, columns // like.group_size), scale.dtype)
    scales[0, :channels, : scale.shape[1]] = scale
    scales[1, :channels, : scale.shape[1]] = minimum
    return CudaPart(
        bits=like.bits,
        group_size=like.group_size,
        has_minimum=zero is None,
        scale_f32=scale.dtype == np.float32,
        integers=cupy.asarray(pack_integers(q, like.bits)),
        scale=cupy.asarray(pack_scales(scales[0])),
        minimum=cupy.asarray(
            pack_scales(scales[1]) if zero is None else scales[1, :1, :1]
        ),  # read only where there are any
        channels=channels,
        first=first,
        blocks=blocks,
    )


def _zero_point(scale: NDArray[Any], minimum: NDArray[Any], bits: int) -> int | None:
    """The z with minimum = -z * scale everywhere, exactly, if there is one that the integers have room to shift to."""
    exact = scale.astype(np.float64)
    for zero in (8,) if bits == 4 else (128, 32, 16):
        if np.array_equal(minimum.astype(np.float64), -zero * exact):
            return zero
    return None
