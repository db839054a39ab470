"""A layer's experts resident on the device, in the layout of linear.cu, one expert at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from shardline.kernels.cuda.pack import pad_to
from shardline.kernels.cuda.weights import (
    Format,
    Packed,
    can_interleave,
    minimums_of_centre,
    pack,
    pack_gated,
    tiles_of,
)
from shardline.kernels.errors import UnsupportedOperationError
from shardline.kernels.experts import Activation, Expert

MOST_EXPERTS = 512
"""Of one layer: what route.cu compares, and the counts that dispatch.cu keeps in shared memory."""

CHUNK_BYTES = 64 << 20
"""Of an allocation, of whole experts. How many come is known after the last; the last one is cut to size then."""

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix of every expert of a layer.

    Attributes:
        table: Device uint64 [experts, 3]: addresses of integers, scales and minimums.
        chunks: Device bytes that they lie in.
        channels: N; a gated pair counts both.
        blocks: K in blocks of 64.
        orders: Device int32 [experts, blocks * 64], the input channel of each column; None: all are in order.
    """

    format: Format
    table: Any
    chunks: tuple[Any, ...]
    channels: int
    blocks: int
    orders: Any

    @property
    def tiles(self) -> int:
        """Tiles of 16 channels, padding included."""
        return tiles_of(self.channels)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        orders = 0 if self.orders is None else self.orders.nbytes
        return int(self.table.nbytes + sum(chunk.nbytes for chunk in self.chunks) + orders)


@dataclass(frozen=True, slots=True)
class CudaExperts:
    """The experts of one layer.

    Attributes:
        gate_up: Interleaved; or the gates and the ups, where they are of different formats.
        down: [K, F] each.
        gate_bias, up_bias, down_bias: See `Backend.load_experts`.
        count, width, inputs: How many; F; K.
    """

    gate_up: tuple[ExpertMatrices, ...]
    down: ExpertMatrices
    activation: Activation
    gate_bias: Any
    up_bias: Any
    down_bias: Any
    count: int
    width: int
    inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without biases."""
        return sum(matrices.nbytes for matrices in (*self.gate_up, self.down))


class _Stack:
    """Grows by an expert's matrix at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._format: Format | None = None
        self._chunks: list[Any] = []
        self._orders: list[NDArray[np.int32] | None] = []
        self._count = 0

    def add(self, packed: Packed) -> None:
        if self._format is None:
            self._format, self._channels, self._blocks = packed.format, packed.channels, packed.blocks
            self._scales = packed.scale.shape
            self._lay_out()
        if self._format.has_minimum:
            packed = packed.with_minimum()
        elif packed.format.has_minimum and packed.format == Format(
            self._format.bits, self._format.group_size, True, self._format.scale_f32
        ):
            self._give_minimums()
        shape = packed.format, packed.channels, packed.blocks
        if shape != (self._format, self._channels, self._blocks):
            raise UnsupportedOperationError(f"experts of one layer in different formats ({self._name})", "cuda")
        self._put(self._count, packed.integers, packed.scale, packed.minimum)
        self._orders.append(packed.order)
        self._count += 1

    def finish(self) -> ExpertMatrices:
        assert self._format is not None, "a layer without experts"
        used = self._count - (len(self._chunks) - 1) * self._a_chunk
        if used < self._a_chunk:
            self._chunks[-1] = _copied(self._chunks[-1], used)
        table = np.zeros((self._count, 3), np.uint64)  # a minimum that there is not stays at 0
        for expert in range(self._count):
            chunk, row = divmod(expert, self._a_chunk)
            start = self._chunks[chunk].data.ptr + row * self._places[-1]
            table[expert, : len(self._places) - 1] = [start + place for place in self._places[:-1]]
        orders = None
        if any(order is not None for order in self._orders):
            plain = np.arange(self._blocks * 64, dtype=np.int32)
            orders = cupy.asarray(np.stack([plain if order is None else order for order in self._orders]))
        return ExpertMatrices(
            self._format, cupy.asarray(table), tuple(self._chunks), self._channels, self._blocks, orders
        )

    def _lay_out(self) -> None:
        """Where integers, scales and, if there are any, minimums of an expert start in its bytes; and their number."""
        assert self._format is not None
        scale = int(np.prod(self._scales)) * (4 if self._format.scale_f32 else 2)
        integers = tiles_of(self._channels) * 16 * self._blocks * 64 * self._format.bits // 8
        self._places = [0]
        for size in (integers, scale, scale) if self._format.has_minimum else (integers, scale):
            self._places.append(pad_to(self._places[-1] + size, _ALIGNMENT))
        self._a_chunk = max(1, CHUNK_BYTES // self._places[-1])

    def _put(self, expert: int, *arrays: NDArray[Any]) -> None:
        chunk, row = divmod(expert, self._a_chunk)
        if chunk == len(self._chunks):
            self._chunks.append(cupy.empty((self._a_chunk, self._places[-1]), cupy.uint8))
        # A minimum that nobody reads has no place.
        for array, place in zip(arrays, self._places[:-1], strict=False):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._chunks[chunk][row, place : place + raw.size].set(raw, stream=cupy.cuda.get_current_stream())

    def _give_minimums(self) -> None:
        """An expert has minimums of its own: those before it get the ones that change nothing."""
        assert self._format is not None
        before, places, a_chunk = self._chunks, self._places, self._a_chunk
        self._format = Format(self._format.bits, self._format.group_size, True, self._format.scale_f32)
        self._chunks = []
        self._lay_out()
        dtype = np.dtype(np.float32 if self._format.scale_f32 else np.float16)
        size = int(np.prod(self._scales)) * dtype.itemsize
        for expert in range(self._count):
            chunk, row = divmod(expert, a_chunk)
            old = before[chunk][row].get()
            scale = old[places[1] : places[1] + size].view(dtype)
            self._put(expert, old[: places[1]], scale, minimums_of_centre(scale, self._format.bits))


def load(
    experts: Iterable[Expert],
    activation: Activation,
    gate_bias: Any,
    up_bias: Any,
    down_bias: Any,
) -> CudaExperts:
    """Bring them to the device as they come. Raises UnsupportedOperationError."""
    gate_up: Sequence[_Stack] = ()
    down, count, width, inputs = _Stack("down"), 0, 0, 0
    for expert in experts:
        joined = can_interleave(expert.gate, expert.up)
        if count == 0:
            width, inputs = expert.gate.shape
            gate_up = [_Stack("gate and up")] if joined else [_Stack("gate"), _Stack("up")]
        if joined and len(gate_up) == 1:
            gate_up[0].add(pack_gated(expert.gate, expert.up))
        elif len(gate_up) == 2:
            gate_up[0].add(pack([expert.gate]))
            gate_up[1].add(pack([expert.up]))
        else:
            raise UnsupportedOperationError("experts of one layer in different formats (gate and up)", "cuda")
        down.add(pack([expert.down]))
        count += 1
        if count > MOST_EXPERTS:
            raise UnsupportedOperationError(f"more than {MOST_EXPERTS} experts a layer", "cuda")
    return CudaExperts(
        tuple(stack.finish() for stack in gate_up),
        down.finish(),
        activation,
        gate_bias,
        up_bias,
        down_bias,
        count,
        width,
        inputs,
    )


def _copied(chunk: Any, rows: int) -> Any:
    part = cupy.empty((rows, chunk.shape[1]), cupy.uint8)
    part.data.copy_from_device_async(chunk.data, part.nbytes, cupy.cuda.get_current_stream())
    return part
