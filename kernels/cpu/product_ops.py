"""Products with resident matrices, as ops of the backend; `linear.py` has their arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import checks
from shardline.kernels.backend import Array, Weight
from shardline.kernels.cpu import linear
from shardline.kernels.cpu.activation import CODES
from shardline.kernels.cpu.blocks import describe
from shardline.kernels.cpu.commands import address, row_address
from shardline.kernels.cpu.ops import SPAN_ROWS, CpuOps, spans
from shardline.kernels.cpu.resident import GatedMatrix, Matrix, pack, pack_gated
from shardline.kernels.experts import Activation
from shardline.kernels.matrix import GroupedMatrix


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CpuWeight:
    """A resident matrix (or a gate and an up matrix) and what the compiled code knows of it."""

    matrix: Matrix | GatedMatrix
    parts: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return self.matrix.nbytes

    @property
    def ordered(self) -> bool:
        """Whether a product has to bring x into the order of some part's columns."""
        matrices = (self.matrix.gate, self.matrix.up) if isinstance(self.matrix, GatedMatrix) else (self.matrix,)
        return any(part.order is not None for matrix in matrices for part in matrix.parts)

    @property
    def channels(self) -> int:
        """N."""
        return self.matrix.gate.channels if isinstance(self.matrix, GatedMatrix) else self.matrix.channels

    @property
    def inputs(self) -> int:
        """K."""
        return self.matrix.gate.inputs if isinstance(self.matrix, GatedMatrix) else self.matrix.inputs


class ProductOps(CpuOps):
    """load_matrix, load_gated, linear, gated_linear."""

    def load_matrix(self, parts: Sequence[GroupedMatrix]) -> Weight:
        matrix = pack(parts)
        return self._keep(CpuWeight(matrix, describe(matrix)))

    def load_gated(self, gate: GroupedMatrix, up: GroupedMatrix) -> Weight:
        pair = pack_gated(gate, up)
        return self._keep(CpuWeight(pair, np.concatenate([describe(pair.gate), describe(pair.up)])))

    def linear(
        self, x: Array, weight: Weight, out: Array, rows: int, *, bias: Array | None = None, accumulate: bool = False
    ) -> None:
        checks.linear(x, weight.channels, weight.inputs, out, rows, bias)
        assert isinstance(weight.matrix, Matrix), "linear wants a weight of load_matrix"
        for first, count in _spans(weight, rows):
            order, source = None, row_address(x, first)
            for part, words in zip(weight.matrix.parts, weight.parts, strict=True):
                if part.order is not order:
                    order, source = part.order, self._in_order("ordered", part.order, x, first, count)
                self._enqueue(
                    linear.linear,
                    self._shares(linear.tasks(weight.channels, count), linear.task_work(weight.inputs, count)),
                    (
                        address(words),
                        source,
                        weight.inputs,
                        row_address(out, first),
                        weight.channels,
                        count,
                        address(bias),
                        accumulate,
                        address(self._workspace),
                    ),
                    (x, weight, out, bias, self._workspace),
                )

    def gated_linear(
        self,
        x: Array,
        weight: Weight,
        out: Array,
        rows: int,
        *,
        activation: Activation = "silu",
        bias: Array | None = None,
    ) -> None:
        checks.gated_linear(x, weight.channels, weight.inputs, out, rows, bias)
        assert isinstance(weight.matrix, GatedMatrix), "gated_linear wants a weight of load_gated"
        gate_order, up_order = weight.matrix.gate.parts[0].order, weight.matrix.up.parts[0].order
        gate, up = weight.parts
        for first, count in _spans(weight, rows):
            for_gate = self._in_order("ordered", gate_order, x, first, count)
            for_up = for_gate if up_order is gate_order else self._in_order("ordered up", up_order, x, first, count)
            self._enqueue(
                linear.gated_linear,
                self._shares(linear.tasks(weight.channels, count), 2 * linear.task_work(weight.inputs, count)),
                (
                    address(gate),
                    address(up),
                    for_gate,
                    for_up,
                    weight.inputs,
                    row_address(out, first),
                    weight.channels,
                    count,
                    CODES[activation],
                    address(bias),
                    address(self._workspace),
                ),
                (x, weight, out, bias, self._workspace),
            )

    def _in_order(self, name: str, order: NDArray[np.int32] | None, x: Array, first: int, count: int) -> int:
        """The address of `count` rows of x from `first` on, enqueued to be in an order of columns if there is one."""
        if order is None:
            return row_address(x, first)
        inputs = x.shape[1]
        scratch = self._scratch(name, 4 * min(len(x), SPAN_ROWS) * inputs)
        self._enqueue(
            linear.order_columns,
            self._shares(count, 4 * inputs),
            (row_address(x, first), address(order), address(scratch), inputs, count),
            (x, order, scratch),
        )
        return address(scratch)

    def _keep(self, weight: CpuWeight) -> CpuWeight:
        self._held.add(weight)
        return weight


def _spans(weight: CpuWeight, rows: int) -> Iterable[tuple[int, int]]:
    return spans(rows) if weight.ordered else ((0, rows),)
