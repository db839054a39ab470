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
from shardline.kernels.errors import UnsupportedOperationError
from shardline.kernels.matrix import GroupedMatrix

TILE = 16
CENTRES = {4: 8, 8: 128}
"""What the kernels subtract from an integer before they multiply."""


@dataclass(frozen=True, slots=True)
class Format:
    """What the kernels of a matrix are compiled for."""

    bits: int
    group_size: int
    has_minimum: bool
    scale_f32: bool

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
class Packed:
    """A matrix on the host in the layout of linear.cu.

    Attributes:
        minimum: One element that nobody reads, where the format has none.
        channels: N; a gated pair counts both.
        blocks: K in blocks of 64, padding included.
        order: int32 [blocks * 64], the input channel of each column; None: they are in order.
    """

    format: Format
    integers: NDArray[np.uint32]
    scale: NDArray[Any]
    minimum: NDArray[Any]
    channels: int
    blocks: int
    order: NDArray[np.int32] | None

    def with_minimum(self) -> Packed:
        """The same weights, with the minimums that stand for the centre that the kernels subtract."""
        if self.format.has_minimum:
            return self
        minimum = minimums_of_centre(self.scale, self.format.bits)
        return replace(self, format=replace(self.format, has_minimum=True), minimum=minimum)


@dataclass(frozen=True, slots=True)
class CudaPart:
    """One matrix that one launch multiplies by.

    Attributes:
        bits, group_size, has_minimum, scale_f32: What its kernels are compiled for.
        integers, scale, minimum: Device arrays.
        channels: N; a gated pair counts both.
        first: Column of the output that its first channel goes to.
        blocks: K in blocks of 64.
        order: See `Packed`; on the device.
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

    @property
    def tiles(self) -> int:
        """Tiles of 16 channels, padding included."""
        return tiles_of(self.channels)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        order = 0 if self.order is None else self.order.nbytes
        return int(self.integers.nbytes + self.scale.nbytes + self.minimum.nbytes + order)

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


def tiles_of(channels: int) -> int:
    """Tiles of 16 channels, padding included."""
    return pad_to(channels, PADDED_CHANNELS) // TILE


def blocks_of(inputs: int) -> int:
    """Blocks of 64 of K input channels; an even number, so that every group size fits."""
    return pad_to(inputs, 2 * BLOCK_K) // BLOCK_K


def load(parts: Sequence[GroupedMatrix]) -> CudaWeight:
    """Stack matrices; neighbours of one format, whose channels fill whole tiles, become one part."""
    inputs = parts[0].shape[1]
    merged: list[list[GroupedMatrix]] = []
    for part in parts:
        assert part.shape[1] == inputs, f"stacked matrices have {part.shape[1]} and {inputs} input channels"
        if merged and _alike(merged[-1][-1], part) and merged[-1][-1].shape[0] % TILE == 0:
            merged[-1].append(part)
        else:
            merged.append([part])
    done: list[CudaPart] = []
    first = 0
    for run in merged:
        done.append(_to_device(pack(run), first, done))
        first += sum(part.shape[0] for part in run)
    return CudaWeight(tuple(done), first, inputs, gated=False)


def load_gated(gate: GroupedMatrix, up: GroupedMatrix) -> CudaWeight:
    """A gate and an up matrix, interleaved if they are of one format."""
    assert gate.shape == up.shape, f"gate is {gate.shape}, up is {up.shape}"
    channels, inputs = gate.shape
    if can_interleave(gate, up):
        parts: tuple[CudaPart, ...] = (_to_device(pack_gated(gate, up), 0, ()),)
    else:
        first = _to_device(pack([gate]), 0, ())
        parts = (first, _to_device(pack([up]), 0, (first,)))
    return CudaWeight(parts, channels, inputs, gated=True)


def can_interleave(gate: GroupedMatrix, up: GroupedMatrix) -> bool:
    """One product makes both: they are of one format, and their columns in one order."""
    return _alike(gate, up)


def pack(run: Sequence[GroupedMatrix]) -> Packed:
    """Matrices of one format, stacked. Raises UnsupportedOperationError."""
    return _pack(
        run[0],
        np.concatenate([part.integers() for part in run]),
        np.concatenate([part.scale for part in run]),
        np.concatenate([part.minimum for part in run]),
    )


def pack_gated(gate: GroupedMatrix, up: GroupedMatrix) -> Packed:
    """A gate and an up of one format by tiles of 16 channels in turn. Raises UnsupportedOperationError."""
    channels = gate.shape[0]
    padded = pad_to(channels, TILE)

    def interleave(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        pair = np.zeros((padded // TILE, 2, TILE, a.shape[1]), a.dtype)
        for index, array in enumerate((a, b)):
            whole = np.zeros((padded, a.shape[1]), a.dtype)
            whole[:channels] = array
            pair[:, index] = whole.reshape(-1, TILE, a.shape[1])
        return pair.reshape(2 * padded, a.shape[1])

    packed = _pack(
        gate,
        interleave(gate.integers(), up.integers()),
        interleave(gate.scale, up.scale),
        interleave(gate.minimum, up.minimum),
    )
    # The last tiles' padding has no column in the output.
    return replace(packed, channels=2 * channels)


def minimums_of_centre(scale: NDArray[Any], bits: int) -> NDArray[Any]:
    """Minimums that say the same as none: a power of two times the scale, so exact."""
    return np.asarray(scale * scale.dtype.type(-CENTRES[bits]), scale.dtype)


def _alike(a: GroupedMatrix, b: GroupedMatrix) -> bool:
    if (a.input_order is None) != (b.input_order is None):
        return False
    in_one_order = a.input_order is None or b.input_order is None or np.array_equal(a.input_order, b.input_order)
    return (a.bits, a.group_size, a.scale.dtype) == (b.bits, b.group_size, b.scale.dtype) and in_one_order


def _pack(like: GroupedMatrix, integers: NDArray[np.uint8], scale: NDArray[Any], minimum: NDArray[Any]) -> Packed:
    channels, inputs = integers.shape
    blocks = blocks_of(inputs)
    rows, columns = pad_to(channels, PADDED_CHANNELS), blocks * BLOCK_K
    centre = CENTRES[like.bits]
    zero = _zero_point(integers, scale, minimum, like.bits)
    if zero is None and like.group_size == 16:
        raise UnsupportedOperationError("groups of 16 with minimums of their own", "cuda")
    if zero is not None:
        # Shifted so that the zero point is the kernels' own centre: no minimum is needed, and no weight changes.
        integers = integers + np.uint8(centre - zero)
    # Padding has scale and minimum 0 and integers at the centre: it multiplies to exact zeros.
    q = np.full((rows, columns), centre, np.uint8)
    q[:channels, :inputs] = integers
    scales = np.zeros((2, rows, columns // like.group_size), scale.dtype)
    scales[0, :channels, : scale.shape[1]] = scale
    scales[1, :channels, : scale.shape[1]] = minimum
    order = None
    if like.input_order is not None:
        order = np.arange(columns, dtype=np.int32)
        order[:inputs] = like.input_order
    return Packed(
        Format(like.bits, like.group_size, zero is None, scale.dtype == np.float32),
        pack_integers(q, like.bits),
        pack_scales(scales[0]),
        # Read only where there are any.
        pack_scales(scales[1]) if zero is None else np.ascontiguousarray(scales[1, :1, :1]),
        channels,
        blocks,
        order,
    )


def _to_device(packed: Packed, first: int, others: Sequence[CudaPart]) -> CudaPart:
    order = None
    if packed.order is not None:
        # One array for parts in one order: what is put in that order for one serves the next.
        same = (other.order for other in others if other.order is not None)
        order = next((one for one in same if np.array_equal(one.get(), packed.order)), None)
        order = cupy.asarray(packed.order) if order is None else order
    form = packed.format
    return CudaPart(
        bits=form.bits,
        group_size=form.group_size,
        has_minimum=form.has_minimum,
        scale_f32=form.scale_f32,
        integers=cupy.asarray(packed.integers),
        scale=cupy.asarray(packed.scale),
        minimum=cupy.asarray(packed.minimum),
        channels=packed.channels,
        first=first,
        blocks=packed.blocks,
        order=order,
    )


def _zero_point(integers: NDArray[np.uint8], scale: NDArray[Any], minimum: NDArray[Any], bits: int) -> int | None:
    """The z with minimum = -z * scale everywhere, exactly, if the integers have room to shift it to the centre."""
    exact, room = scale.astype(np.float64), (1 << bits) - 1 - int(integers.max())
    for zero in (8,) if bits == 4 else (128, 32, 16):
        if CENTRES[bits] - zero <= room and np.array_equal(minimum.astype(np.float64), -zero * exact):
            return zero
    return None
