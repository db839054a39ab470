"""A layer's experts resident on the device, in the layout of linear.cu, one expert at a time."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.cuda.pack import (
    CENTRES,
    Format,
    Packer,
    Shape,
    can_interleave,
    order_of,
    pad_to,
    shape_of,
    tiles_of,
)
from shardline.kernels.cuda.workspace import ExpertsShape, WeightShapes
from shardline.kernels.errors import UnsupportedOperationError
from shardline.kernels.experts import Activation, Expert
from shardline.kernels.matrix import GroupedMatrix

MOST_EXPERTS = 512
"""Of one layer: what route.cu compares, and the counts that dispatch.cu keeps in shared memory."""

CHUNK_BYTES = 64 << 20
"""Of an allocation, of whole experts, or of as many as are still expected. Where nobody said how many come, the last
one is cut to size after the last: its copy and it lie side by side for a while."""

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

    def describe(self, shapes: WeightShapes) -> None:
        """Add them to what decides the workspace."""
        ordered = any(matrices.orders is not None for matrices in self.gate_up), self.down.orders is not None
        shapes.experts.add(ExpertsShape(self.count, self.width, self.inputs, len(self.gate_up) > 1, ordered))


class _Stack:
    """Grows by an expert's matrix at a time."""

    def __init__(self, name: str, packer: Packer, expected: int) -> None:
        """expected: How many come; 0: nobody knows."""
        self._name = name
        self._expected = expected
        self._packer = packer
        self._shape: Shape | None = None
        self._chunks: list[Any] = []
        self._orders: list[NDArray[np.int32] | None] = []
        self._count = 0

    def add(self, run: Sequence[GroupedMatrix], *, gated: bool = False) -> None:
        """A matrix, or a gate and an up of one format."""
        if self._shape is None:
            self._shape = shape_of(run, gated=gated)
            self._lay_out()
        shape = shape_of(run, gated=gated, minimums=self._shape.format.has_minimum)
        if shape.format == replace(self._shape.format, has_minimum=True) != self._shape.format:
            self._give_minimums()
        if (shape.format, shape.channels, shape.inputs) != (
            self._shape.format,
            self._shape.channels,
            self._shape.inputs,
        ):
            raise UnsupportedOperationError(f"experts of one layer in different formats ({self._name})", "cuda")
        start = self._place(self._count)
        places = [start + place for place in (*self._places, 0)][:3]
        self._packer.pack(run, shape, *places, gated=gated)
        self._orders.append(order_of(run[0]))
        self._count += 1

    def finish(self) -> ExpertMatrices:
        assert self._shape is not None, "a layer without experts"
        used = self._count - (len(self._chunks) - 1) * self._a_chunk
        if used < self._chunks[-1].shape[0]:
            self._chunks[-1] = _copied(self._chunks[-1], used)
        table = np.zeros((self._count, 3), np.uint64)  # a minimum that there is not stays at 0
        for expert in range(self._count):
            table[expert, : len(self._places) - 1] = [self._place(expert) + place for place in self._places[:-1]]
        orders = None
        if any(order is not None for order in self._orders):
            plain = np.arange(self._shape.blocks * 64, dtype=np.int32)
            orders = cupy.asarray(np.stack([plain if order is None else order for order in self._orders]))
        return ExpertMatrices(
            self._shape.format,
            cupy.asarray(table),
            tuple(self._chunks),
            self._shape.channels,
            self._shape.blocks,
            orders,
        )

    def _lay_out(self) -> None:
        """Where integers, scales and, if there are any, minimums of an expert start in its bytes; and their number."""
        assert self._shape is not None
        shape, self._places = self._shape, [0]
        scales = [shape.scale_bytes] * (1 + shape.format.has_minimum)
        for size in (shape.integer_bytes, *scales):
            self._places.append(pad_to(self._places[-1] + size, _ALIGNMENT))
        self._a_chunk = max(1, CHUNK_BYTES // self._places[-1])

    def _place(self, expert: int) -> int:
        """The address of an expert's bytes; the next one's chunk is made when it is asked for."""
        chunk, row = divmod(expert, self._a_chunk)
        if chunk == len(self._chunks):
            left = self._expected - expert
            experts = min(left, self._a_chunk) if left > 0 else self._a_chunk
            self._chunks.append(cupy.empty((experts, self._places[-1]), cupy.uint8))
        assert row < self._chunks[chunk].shape[0], f"more experts than the {self._expected} that were said to come"
        return int(self._chunks[chunk].data.ptr) + row * self._places[-1]

    def _give_minimums(self) -> None:
        """An expert has minimums of its own: those before it get the ones that stand for their zero point."""
        assert self._shape is not None
        before, a_chunk, form = self._chunks, self._a_chunk, self._shape.format
        sizes = self._shape.integer_bytes, self._shape.scale_bytes
        places = self._places
        self._shape = replace(self._shape, format=replace(form, has_minimum=True))
        self._chunks = []
        self._lay_out()
        for expert in range(self._count):
            chunk, row = divmod(expert, a_chunk)
            old = before[chunk][row].get()
            integers, scale = (old[place : place + size] for place, size in zip(places, sizes, strict=False))
            values = scale.view(np.float32 if form.scale_f32 else np.float16)
            # Where they are now, the zero point is the centre. A power of two times the scale: exact.
            minimum = (values * values.dtype.type(-CENTRES[form.bits])).view(np.uint8)
            self._place(expert)
            new, row = self._chunks[-1], expert % self._a_chunk
            for place, array in zip(self._places, (integers, scale, minimum), strict=False):
                new[row, place : place + array.size].set(array, stream=cupy.cuda.get_current_stream())


def load(
    experts: Iterable[Expert],
    activation: Activation,
    gate_bias: Any,
    up_bias: Any,
    down_bias: Any,
    packer: Packer,
) -> CudaExperts:
    """Bring them to the device as they come. Raises UnsupportedOperationError."""
    gate_up: Sequence[_Stack] = ()
    expected = operator.length_hint(experts)
    down, count, width, inputs = _Stack("down", packer, expected), 0, 0, 0
    for expert in experts:
        joined = can_interleave(expert.gate, expert.up)
        if count == 0:
            width, inputs = expert.gate.shape
            gate_up = [_Stack(name, packer, expected) for name in (("gate and up",) if joined else ("gate", "up"))]
        if joined and len(gate_up) == 1:
            gate_up[0].add([expert.gate, expert.up], gated=True)
        elif len(gate_up) == 2:
            gate_up[0].add([expert.gate])
            gate_up[1].add([expert.up])
        else:
            raise UnsupportedOperationError("experts of one layer in different formats (gate and up)", "cuda")
        down.add([expert.down])
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
