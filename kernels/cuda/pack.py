"""Matrices as they come to the layout of linear.cu, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.cuda.tables import BLOCK_K, PADDED_CHANNELS
from shardline.kernels.errors import UnsupportedOperationError
from shardline.kernels.matrix import GroupedMatrix

TILE = 16
CENTRES = {4: 8, 8: 128}
"""What the kernels subtract from an integer before they multiply."""

ZERO_POINTS = {4: (8,), 8: (128, 32, 16, 12)}
"""Of the formats that have one for all their weights."""

PIECE_BYTES = 8 << 20
"""Of a matrix as it comes that are on the device at once, in whole tiles of channels; of a gated pair twice that. So
loading wants little more than what stays, however large a head is."""

_THREADS = 256


def pad_to(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def blocks_of(inputs: int) -> int:
    """Blocks of 64 of K input channels; an even number, so that every group size fits."""
    return pad_to(inputs, 2 * BLOCK_K) // BLOCK_K


def tiles_of(channels: int) -> int:
    """Tiles of 16 channels, padding included."""
    return pad_to(channels, PADDED_CHANNELS) // TILE


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
class Shape:
    """What a matrix becomes.

    Attributes:
        channels: N; a gated pair counts both.
        inputs: K.
        zero: Of a format without minimums, the integer that stands for 0 as they come.
    """

    format: Format
    channels: int
    inputs: int
    zero: int

    @property
    def blocks(self) -> int:
        """K in blocks of 64, padding included."""
        return blocks_of(self.inputs)

    @property
    def tiles(self) -> int:
        """Tiles of 16 channels, padding included."""
        return tiles_of(self.channels)

    @property
    def integer_bytes(self) -> int:
        """Bytes of the integers."""
        return self.tiles * TILE * self.blocks * BLOCK_K * self.format.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, and of the minimums if there are any."""
        return self.tiles * TILE * self.blocks * BLOCK_K // self.format.group_size * (4 if self.format.scale_f32 else 2)


def can_interleave(gate: GroupedMatrix, up: GroupedMatrix) -> bool:
    """One product makes both: they are of one format, and their columns in one order."""
    return alike(gate, up)


def alike(a: GroupedMatrix, b: GroupedMatrix) -> bool:
    """They are of one format, and their columns in one order."""
    if (a.bits, a.group_size, a.scale.dtype) != (b.bits, b.group_size, b.scale.dtype):
        return False
    if a.input_order is None or b.input_order is None:
        return a.input_order is b.input_order
    return np.array_equal(a.input_order, b.input_order)


def shape_of(run: Sequence[GroupedMatrix], *, gated: bool = False, minimums: bool = False) -> Shape:
    """What matrices that are `alike` become, stacked or (two of one shape) as a gated pair.

    minimums: Keep those that say no more than a zero point does. Raises UnsupportedOperationError.
    """
    first = run[0]
    zero = None if minimums else _zero_point(run)
    if zero is None and first.group_size == 16:
        raise UnsupportedOperationError("groups of 16 with minimums of their own", "cuda")
    form = Format(first.bits, first.group_size, zero is None, first.scale.dtype == np.float32)
    channels, inputs = sum(matrix.shape[0] for matrix in run), first.shape[1]
    if gated:
        # Tiles of gate and up alternate, so each is padded to whole ones; the padding has no column in the output.
        assert run[0].shape == run[1].shape, f"gate is {run[0].shape}, up is {run[1].shape}"
    return Shape(form, channels, inputs, CENTRES[first.bits] if zero is None else zero)


def order_of(matrix: GroupedMatrix) -> NDArray[np.int32] | None:
    """int32 [blocks * 64], the input channel of each column, padding included; None: they are in order."""
    if matrix.input_order is None:
        return None
    inputs = matrix.shape[1]
    order = np.arange(blocks_of(inputs) * BLOCK_K, dtype=np.int32)
    order[:inputs] = matrix.input_order
    return order


class Packer:
    """Brings matrices to the device and packs them there, one at a time."""

    def __init__(self, launch: Callable[..., None], upload: Callable[[NDArray[Any]], Any]) -> None:
        self._launch, self._upload = launch, upload

    def pack(
        self,
        run: Sequence[GroupedMatrix],
        shape: Shape,
        integers: int,
        scale: int,
        minimum: int,
        *,
        gated: bool = False,
    ) -> None:
        """Enqueue: `run`, which `shape_of` described, to these device addresses, as large as the shape says."""
        sources: Sequence[tuple[GroupedMatrix, GroupedMatrix | None]]
        sources = [(run[0], run[1])] if gated else [(matrix, None) for matrix in run]
        tile = 0
        for index, (a, b) in enumerate(sources):
            # The last also fills the padding.
            tiles = shape.tiles - tile if index == len(sources) - 1 else a.shape[0] // TILE
            self._integers(a, b, shape, integers + shape.integer_bytes // shape.tiles * tile, tiles)
            a_tile = shape.scale_bytes // shape.tiles
            self._scales(a.scale, None if b is None else b.scale, shape, scale + a_tile * tile, tiles)
            if shape.format.has_minimum:
                self._scales(a.minimum, None if b is None else b.minimum, shape, minimum + a_tile * tile, tiles)
            tile += tiles

    def _integers(self, a: GroupedMatrix, b: GroupedMatrix | None, shape: Shape, out: int, tiles: int) -> None:
        shift = CENTRES[shape.format.bits] - shape.zero
        words = shape.blocks * shape.format.bits * 32
        numbers = (shape.inputs, shape.blocks, shift)
        self._run("pack_integers", shape, (words, tiles), (a.q, None if b is None else b.q), out, numbers)

    def _scales(self, a: NDArray[Any], b: NDArray[Any] | None, shape: Shape, out: int, tiles: int) -> None:
        groups = shape.blocks * BLOCK_K // shape.format.group_size
        self._run("pack_scales", shape, (groups * TILE, tiles), (a, b), out, (a.shape[1], groups))

    def _run(
        self,
        kernel: str,
        shape: Shape,
        size: tuple[int, int],
        arrays: tuple[NDArray[Any], NDArray[Any] | None],
        out: int,
        numbers: tuple[int, ...],
    ) -> None:
        """size: Elements that a tile becomes, and tiles. numbers: The kernel's, but the channels of a piece."""
        elements, tiles = size
        first, second = arrays
        element_bytes = 4 if kernel == "pack_integers" else first.itemsize
        channels = max(1, PIECE_BYTES // (TILE * first.shape[1] * first.itemsize)) * TILE
        most_tiles = channels // TILE * (1 if second is None else 2)
        for piece, start in enumerate(range(0, first.shape[0], channels)):
            tile, end = piece * most_tiles, min(start + channels, first.shape[0])
            # The last also makes the padding.
            own_tiles = tiles - tile if end == first.shape[0] else most_tiles
            # The stream keeps the order in which what a copy leaves behind is used again.
            copies = [None if array is None else self._upload(array[start:end]) for array in arrays]
            addresses = [np.uint64(0 if copy is None else copy.data.ptr) for copy in copies]
            to = np.uint64(out + tile * elements * element_bytes)
            self._launch(
                ("pack", kernel),
                (-(-elements // _THREADS), own_tiles),
                _THREADS,
                (*addresses, to, np.int32(end - start), *(np.int32(number) for number in numbers)),
                BITS=shape.format.bits,
                SCALE_F32=int(shape.format.scale_f32),
            )
            del copies  # or the next piece would lie beside it


def _zero_point(run: Sequence[GroupedMatrix]) -> int | None:
    """The z with minimum = -z * scale everywhere, exactly, if the integers have room to shift it to the centre."""
    bits = run[0].bits
    for zero in ZERO_POINTS[bits]:
        shift = CENTRES[bits] - zero
        if all(_has_zero_point(matrix, zero) and (not shift or _fits(matrix, shift)) for matrix in run):
            return zero
    return None


def _has_zero_point(matrix: GroupedMatrix, zero: int) -> bool:
    # Most matrices that have none show it in their first channels.
    return all(
        np.array_equal(matrix.minimum[rows].astype(np.float64), -zero * matrix.scale[rows].astype(np.float64))
        for rows in (slice(0, 1), slice(1, None))
    )


def _fits(matrix: GroupedMatrix, shift: int) -> bool:
    assert matrix.bits == 8, "4 bits have one zero point: the centre"
    return int(matrix.q.max()) + shift <= 255
