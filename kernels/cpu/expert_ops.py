"""A mixture of experts, as ops of the backend; `experts.py` and `router.py` have their arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from shardline.kernels.backend import Array, Weight
from shardline.kernels.cpu.ops import CpuOps
from shardline.kernels.errors import UnsupportedOperationError
from shardline.kernels.experts import Activation, Expert, RouterRule


class ExpertOps(CpuOps):
    """load_experts, route, expert_mlp, add_gated."""

    def load_experts(
        self,
        experts: Iterable[Expert],
        *,
        activation: Activation = "silu",
        gate_bias: Array | None = None,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> Weight:
        raise UnsupportedOperationError("a mixture of experts", self.name)

    def route(
        self,
        x: Array,
        router: Array,
        rule: RouterRule,
        expert_ids: Array,
        shares: Array,
        rows: int,
        *,
        bias: Array | None = None,
        choice_bias: Array | None = None,
    ) -> None:
        raise UnsupportedOperationError("a mixture of experts", self.name)

    def expert_mlp(self, x: Array, experts: Weight, expert_ids: Array, shares: Array, out: Array, rows: int) -> None:
        raise UnsupportedOperationError("a mixture of experts", self.name)

    def add_gated(self, x: Array, gate: Array, y: Array, out: Array, rows: int) -> None:
        raise UnsupportedOperationError("a mixture of experts", self.name)
