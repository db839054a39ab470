"""A matrix as this backend keeps it: 64 output channels side by side, so that they are the lanes of a vector.

`q[block, group, k, bytes]`: for 4 bits 32 bytes, channel j of the block in the low and j + 32 in the high nibble of
byte j; for 8 bits 64 bytes, one a channel. `scale` and `minimum` are [block, group, 64]. A lane sums its channel over k
in plain ascending order: there is no sum across lanes, whose order a compiler or a batch size could change. N is padded
to a multiple of 64 inside the last block, with zeros that are never written out.

Where the columns are not in the order of the input channels (act-order), `order` says which channel each one is, and a
product reads x through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.experts import Expert
from shardline.kernels.matrix import GroupedMatrix

LANES = 64
"""Channels of a block."""

ALIGNMENT = 64
"""Bytes; a cache line and the widest vector."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive channels of one matrix that have the same bits, group size, scale dtype and order of columns.

    Attributes:
        bits, group_size: As in `GroupedMatrix`.
        first: The first channel's place in the whole matrix.
        channels: How many.
        q: uint8 [blocks, groups, group size, 8 * bits].
        scale, minimum: float16 or float32 [blocks, groups, 64].
        order: int32 [K], the input channel of each column, or None if they are in order. Parts that have the same one
            share the array.
    """

    bits: int
    group_size: int
    first: int
    channels: int
    q: NDArray[np.uint8]
    scale: NDArray[np.float16] | NDArray[np.float32]
    minimum: NDArray[np.float16] | NDArray[np.float32]
    order: NDArray[np.int32] | None

    @property
    def nbytes(self) -> int:
        """Bytes resident, without the order, which may be shared."""
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
        return _nbytes(self.parts)


@dataclass(frozen=True, slots=True)
class GatedMatrix:
    """A gate and an up matrix of one shape."""

    gate: Matrix
    up: Matrix

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return _nbytes(self.gate.parts + self.up.parts)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One expert: a gate and an up matrix, and the down matrix, whose columns are in the order of their channels."""

    gated: GatedMatrix
    down: Matrix

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return self.gated.nbytes + self.down.nbytes

    @property
    def in_order(self) -> tuple[Matrix, Matrix, Matrix]:
        """Gate, up, down."""
        return self.gated.gate, self.gated.up, self.down


def cpu_resident_bytes(
    bits: int, channels: int, inputs: int, group_size: int, scale_bytes: int, *, ordered: bool = False
) -> int:
    """What `load_matrix` of one [channels, inputs] matrix keeps; scale_bytes is the size of a scale: 2 or 4.

    `load_gated` keeps this for the gate and for the up, `load_experts` for each expert's gate, up and down. With
    `ordered` it includes the order of the matrix's columns: an order that both gate and up have, or several matrices of
    one `load_matrix`, counts once, and that of an expert's down not at all.
    """
    padded = -(-channels // LANES) * LANES
    return padded * (inputs * bits // 8 + 2 * scale_bytes * (inputs // group_size)) + 4 * inputs * ordered


def pack(parts: Sequence[GroupedMatrix]) -> Matrix:
    """Stack matrices of equal K along the channels in the resident arrangement."""
    return _pack(parts, [])


def pack_gated(gate: GroupedMatrix, up: GroupedMatrix) -> GatedMatrix:
    """A gate and an up matrix of equal shape in the resident arrangement."""
    assert gate.shape == up.shape, f"gate is {gate.shape}, up is {up.shape}"
    orders: list[NDArray[np.int32]] = []
    return GatedMatrix(_pack([gate], orders), _pack([up], orders))


def pack_expert(expert: Expert) -> ExpertMatrices:
    """An expert in the resident arrangement.

    An order of the down matrix's columns goes into the channels of gate and up, which then make them in that order.
    """
    width, inputs = expert.gate.shape
    assert expert.down.shape == (inputs, width), f"gate is {expert.gate.shape}, down is {expert.down.shape}"
    gate, up, down = expert.gate, expert.up, expert.down
    if down.input_order is not None:
        _check_order(down.input_order)
        gate, up = (_channels_in(matrix, down.input_order) for matrix in (gate, up))
        down = replace(down, input_order=None)
    return ExpertMatrices(pack_gated(gate, up), pack([down]))


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

    return GroupedMatrix(
        part.bits, group_size, np.ascontiguousarray(integers), rows(part.scale), rows(part.minimum), part.order
    )


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


def _nbytes(parts: Sequence[Part]) -> int:
    orders = {id(part.order): part.order.nbytes for part in parts if part.order is not None}
    return sum(part.nbytes for part in parts) + sum(orders.values())


def _check_order(order: NDArray[np.int32]) -> None:
    # Compiled code reads x through it, unchecked.
    assert np.array_equal(np.sort(order), np.arange(len(order))), "input_order is no permutation"


def _channels_in(matrix: GroupedMatrix, order: NDArray[np.int32]) -> GroupedMatrix:
    """Channel i becomes what channel order[i] was."""
    return replace(matrix, q=matrix.q[order], scale=matrix.scale[order], minimum=matrix.minimum[order])


def _known(order: NDArray[np.int32] | None, orders: list[NDArray[np.int32]]) -> NDArray[np.int32] | None:
    """The one of `orders` that equals this, which is added if none does; None for the order of the channels."""
    if order is None:
        return None
    for known in orders:
        if np.array_equal(known, order):
            return known
    _check_order(order)
    if np.array_equal(order, np.arange(len(order))):
        return None
    orders.append(aligned_empty(order.shape, "int32"))
    orders[-1][...] = order
    return orders[-1]


def _pack(parts: Sequence[GroupedMatrix], orders: list[NDArray[np.int32]]) -> Matrix:
    inputs = parts[0].shape[1]
    assert all(part.shape[1] == inputs for part in parts), [part.shape for part in parts]
    runs: list[tuple[Any, NDArray[np.int32] | None, list[GroupedMatrix]]] = []
    for part in parts:
        order = _known(part.input_order, orders)
        kind = part.bits, part.group_size, part.scale.dtype, id(order)
        if runs and runs[-1][0] == kind:
            runs[-1][2].append(part)
        else:
            runs.append((kind, order, [part]))
    packed = []
    first = 0
    for _, order, run in runs:
        packed.append(_pack_run(run, first, order))
        first += packed[-1].channels
    return Matrix(first, inputs, tuple(packed))


def _pack_run(run: Sequence[GroupedMatrix], first: int, order: NDArray[np.int32] | None) -> Part:
    bits, group_size, scale_dtype = run[0].bits, run[0].group_size, run[0].scale.dtype
    groups = run[0].shape[1] // group_size
    source = run[0].q if len(run) == 1 else np.concatenate([matrix.q for matrix in run])
    channels = len(source)
    blocks = -(-channels // LANES)
    q = aligned_empty((blocks, groups, group_size, 8 * bits), "uint8")
    # Compiled code; who only asks how large a matrix becomes does without.
    from shardline.kernels.cpu.interleave import interleave

    whole = channels // LANES
    blocked = q.reshape(blocks, groups * group_size, 8 * bits)
    interleave(np.ascontiguousarray(source[: whole * LANES]), bits, blocked[:whole])
    if whole < blocks:
        padded = np.zeros((LANES, source.shape[1]), np.uint8)
        padded[: channels - whole * LANES] = source[whole * LANES :]
        interleave(padded, bits, blocked[whole:])
    return Part(
        bits,
        group_size,
        first,
        channels,
        q,
        _pack_scales([matrix.scale for matrix in run], blocks, scale_dtype),
        _pack_scales([matrix.minimum for matrix in run], blocks, scale_dtype),
        order,
    )


def _pack_scales(run: Sequence[NDArray[Any]], blocks: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    values = np.concatenate(run)
    channels, groups = values.shape
    padded = np.zeros((blocks * LANES, groups), dtype)
    padded[:channels] = values
    packed = aligned_empty((blocks, groups, LANES), dtype)
    packed[...] = padded.reshape(blocks, LANES, groups).transpose(0, 2, 1)
    return packed
