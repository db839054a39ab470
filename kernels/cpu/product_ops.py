"""Products with resident matrices, as ops of the backend; `linear.py` has their arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import checks
from shardline.kernels.backend import Array, Weight
from shardline.kernels.cpu import linear
from shardline.kernels.cpu.commands import address
from shardline.kernels.cpu.ops import CpuOps
from shardline.kernels.cpu.resident import GatedMatrix, Matrix, pack
from shardline.kernels.errors import UnsupportedOperationError
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
        return self._keep(matrix, linear.describe(matrix))

    def load_gated(self, gate: GroupedMatrix, up: GroupedMatrix) -> Weight:
        assert gate.shape == up.shape, f"gate is {gate.shape}, up is {up.shape}"
        pair = GatedMatrix(pack([gate]), pack([up]))
        return self._keep(pair, np.concatenate([linear.describe(pair.gate), linear.describe(pair.up)]))

    def linear(
        self, x: Array, weight: Weight, out: Array, rows: int, *, bias: Array | None = None, accumulate: bool = False
    ) -> None:
        checks.linear(x, weight.channels, weight.inputs, out, rows, bias)
        assert isinstance(weight.matrix, Matrix), "linear wants a weight of load_matrix"
        for part in weight.parts:
            self._enqueue(
                linear.linear,
                self._shares(linear.tasks(weight.channels, rows), linear.task_work(weight.inputs, rows)),
                (
                    address(part),
                    address(x),
                    weight.inputs,
                    address(out),
                    weight.channels,
                    rows,
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
        if activation != "silu" or bias is not None:
            raise UnsupportedOperationError(f"an MLP with {activation} or biases", self.name)
        checks.linear(x, weight.channels, weight.inputs, out, rows, None)
        assert isinstance(weight.matrix, GatedMatrix), "gated_linear wants a weight of load_gated"
        gate, up = weight.parts
        self._enqueue(
            linear.gated_linear,
            self._shares(linear.tasks(weight.channels, rows), 2 * linear.task_work(weight.inputs, rows)),
            (
                address(gate),
                address(up),
                address(x),
                weight.inputs,
                address(out),
                weight.channels,
                rows,
                address(self._workspace),
            ),
            (x, weight, out, self._workspace),
        )

    def _keep(self, matrix: Matrix | GatedMatrix, parts: NDArray[np.int64]) -> CpuWeight:
        weight = CpuWeight(matrix, parts)
        self._held.add(weight)
        return weight
