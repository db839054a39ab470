"""A matrix as this backend keeps it: 64 output channels side by side, so that they are the lanes of a vector.

`q[block, group, k, bytes]`: for 4 bits 32 bytes, channel j of the block in the low and j + 32 in the high nibble of
byte j; for 8 bits 64 bytes, one a channel. `scale` and `minimum` are [block, group, 64]. A lane sums its channel over k
in plain ascending order: there is no sum across lanes, whose order a compiler or a batch size could change. N is padded
to a multiple of 64 inside the last block, with zeros that are never written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.matrix import GroupedMatrix

LANES = 64
"""Channels of a block."""

ALIGNMENT = 64
"""Bytes; a cache line and the widest vector."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive channels of one matrix that have the same bits, group size and scale dtype.

    Attributes:
        bits, group_size: As in `GroupedMatrix`.
        first: The first channel's place in the whole matrix.
        channels: How many.
        q: uint8 [blocks, groups, group size, 8 * bits].
        scale, minimum: float16 or float32 [blocks, groups, 64].
    """

    bits: int
    group_size: int
    first: int
    channels: int
    q: NDArray[np.uint8]
    scale: NDArray[np.float16] | NDArray[np.float32]
    minimum: NDArray[np.float16] | NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return self.q.nbytes + self.scale.nbytes + self.minimum.nbytes


@dataclass(frozen=True, slots=True)
class Matrix:
    """A resident [channels, inputs] matrix; `parts` follow each other along the channels."""

    channels: int
    inputs: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class GatedMatrix:
    """A gate and an up matrix of one shape."""

    gate: Matrix
    up: Matrix

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return self.gate.nbytes + self.up.nbytes


def cpu_resident_bytes(bits: int, channels: int, inputs: int, group_size: int, scale_bytes: int) -> int:
    """What `load_matrix` of one [channels, inputs] matrix keeps; scale_bytes is the size of a scale: 2 or 4."""
    padded = -(-channels // LANES) * LANES
    return padded * (inputs * bits // 8 + 2 * scale_bytes * (inputs // group_size))


def pack(parts: Sequence[GroupedMatrix]) -> Matrix:
    """Stack matrices of equal K along the channels in the resident arrangement."""
    inputs = parts[0].shape[1]
    assert all(part.shape[1] == inputs for part in parts), [part.shape for part in parts]
    runs: list[list[GroupedMatrix]] = []
    for part in parts:
        if runs and _kind(runs[-1][0]) == _kind(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    packed = []
    first = 0
    for run in runs:
        packed.append(_pack_run(run, first))
        first += packed[-1].channels
    return Matrix(first, inputs, tuple(packed))


def unpack(part: Part) -> GroupedMatrix:
    """The matrix that `pack` was given."""
    blocks, groups, group_size, _ = part.q.shape
    q = part.q if part.bits == 8 else np.concatenate([part.q & 15, part.q >> 4], axis=3)
    integers = q.transpose(0, 3, 1, 2).reshape(blocks * LANES, groups * group_size)[: part.channels]
    if part.bits == 4:
        integers = integers[:, 0::2] | (integers[:, 1::2] << 4)

    def rows(values: NDArray[Any]) -> NDArray[Any]:
        flat = values.transpose(0, 2, 1).reshape(blocks * LANES, groups)[: part.channels]
        return np.ascontiguousarray(flat)

    return GroupedMatrix(part.bits, group_size, np.ascontiguousarray(integers), rows(part.scale), rows(part.minimum))


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An unwritten array that starts on a cache line."""
    return _aligned(np.empty, shape, dtype)


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A zero-filled array that starts on a cache line; its memory is taken as it is first written."""
    return _aligned(np.zeros, shape, dtype)


def _aligned(allocate: Any, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = allocate(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    array: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return array


def _kind(matrix: GroupedMatrix) -> tuple[int, int, np.dtype[Any]]:
    return matrix.bits, matrix.group_size, matrix.scale.dtype


def _pack_run(run: Sequence[GroupedMatrix], first: int) -> Part:
    bits, group_size, scale_dtype = _kind(run[0])
    groups = run[0].shape[1] // group_size
    source = run[0].q if len(run) == 1 else np.concatenate([matrix.q for matrix in run])
    channels = len(source)
    blocks = -(-channels // LANES)
    q = aligned_empty((blocks, groups, group_size, 8 * bits), "uint8")
    # A block at a time, so that the unpacked integers stay small.
    for block in range(blocks):
        rows = source[block * LANES : (block + 1) * LANES]
        if bits == 4:
            integers = np.zeros((LANES, groups * group_size), np.uint8)
            integers[: len(rows), 0::2] = rows & 15
            integers[: len(rows), 1::2] = rows >> 4
            lanes = integers[: LANES // 2] | (integers[LANES // 2 :] << 4)
        else:
            lanes = np.zeros((LANES, groups * group_size), np.uint8)
            lanes[: len(rows)] = rows
        q[block] = lanes.T.reshape(groups, group_size, 8 * bits)
    return Part(
        bits,
        group_size,
        first,
        channels,
        q,
        _pack_scales([matrix.scale for matrix in run], blocks, scale_dtype),
        _pack_scales([matrix.minimum for matrix in run], blocks, scale_dtype),
    )


def _pack_scales(run: Sequence[NDArray[Any]], blocks: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    values = np.concatenate(run)
    channels, groups = values.shape
    padded = np.zeros((blocks * LANES, groups), dtype)
    padded[:channels] = values
    packed = aligned_empty((blocks, groups, LANES), dtype)
    packed[...] = padded.reshape(blocks, LANES, groups).transpose(0, 2, 1)
    return packed
