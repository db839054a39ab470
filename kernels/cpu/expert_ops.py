"""A mixture of experts, as ops of the backend; `experts.py` and `router.py` have their arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import checks
from shardline.kernels.backend import Array, Weight
from shardline.kernels.cpu import experts as compiled
from shardline.kernels.cpu import router as routing
from shardline.kernels.cpu.activation import CODES
from shardline.kernels.cpu.blocks import describe
from shardline.kernels.cpu.commands import address, float_bits, row_address
from shardline.kernels.cpu.ops import SPAN_ROWS, CpuOps, spans
from shardline.kernels.cpu.resident import ExpertMatrices, aligned_empty, pack_expert
from shardline.kernels.experts import Activation, Expert, RouterRule


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CpuExperts:
    """A layer's experts and what the compiled code knows of them.

    Attributes:
        matrices: One an expert.
        table: int64 [experts, 3, words], their gate, up and down part.
        activation: What joins gate and up.
        gate_bias, up_bias: float32 [experts, F], in the order of the down matrix's columns, or None.
        down_bias: float32 [experts, K], or None.
    """

    matrices: tuple[ExpertMatrices, ...]
    table: NDArray[np.int64]
    activation: Activation
    gate_bias: Array | None
    up_bias: Array | None
    down_bias: Array | None

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return sum(expert.nbytes for expert in self.matrices)

    @property
    def count(self) -> int:
        """How many."""
        return len(self.matrices)

    @property
    def width(self) -> int:
        """F."""
        return self.matrices[0].down.inputs

    @property
    def inputs(self) -> int:
        """K."""
        return self.matrices[0].down.channels

    @property
    def orders(self) -> int:
        """In how many ways x has to be ordered for one expert: 0, 1 for gate and up alike, or 2."""
        pairs = [(e.gated.gate.parts[0].order, e.gated.up.parts[0].order) for e in self.matrices]
        if any(gate is not up for gate, up in pairs):
            return 2
        return int(any(gate is not None for gate, _ in pairs))


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
        matrices: list[ExpertMatrices] = []
        orders: list[NDArray[np.int32] | None] = []
        for expert in experts:
            matrices.append(pack_expert(expert))
            orders.append(expert.down.input_order)
            del expert  # or it would stay until the next one has been read
        shapes = {(packed.down.inputs, packed.down.channels) for packed in matrices}
        assert len(shapes) == 1, f"experts of shapes {sorted(shapes)}"
        ((width, inputs),) = shapes
        checks.expert_biases(len(matrices), width, inputs, gate_bias, up_bias, down_bias)
        rows = [describe(matrix)[0] for packed in matrices for matrix in packed.in_order]
        loaded = CpuExperts(
            tuple(matrices),
            np.array(rows).reshape(len(matrices), 3, -1),
            activation,
            _channels_in(gate_bias, orders),
            _channels_in(up_bias, orders),
            down_bias,
        )
        self._held.add(loaded)
        return loaded

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
        checks.route(router, rule, expert_ids, shares, rows, bias, choice_bias)
        experts, inputs = router.shape
        checks.table("x", x, rows, inputs)
        assert experts <= routing.MAX_EXPERTS, f"{experts} experts"
        for first, count in spans(rows):
            logits = self._scratch("logits", 4 * min(len(x), SPAN_ROWS) * experts)
            self._enqueue(
                routing.logits,
                self._shares(-(-experts // routing.TILE) * count, routing.TILE * inputs),
                (row_address(x, first), address(router), inputs, experts, count, address(bias), address(logits)),
                (x, router, bias, logits),
            )
            self._enqueue(
                routing.choose,
                self._shares(count, 8 * experts * rule.experts_per_token),
                (
                    address(logits),
                    experts,
                    count,
                    rule.experts_per_token,
                    routing.SCORINGS[rule.scoring],
                    rule.normalise,
                    float_bits(rule.scale),
                    rule.num_groups,
                    rule.groups_kept,
                    address(choice_bias),
                    row_address(expert_ids, first),
                    row_address(shares, first),
                    address(self._workspace),
                ),
                (logits, choice_bias, expert_ids, shares, self._workspace),
            )

    def expert_mlp(self, x: Array, experts: Weight, expert_ids: Array, shares: Array, out: Array, rows: int) -> None:
        assert isinstance(experts, CpuExperts), "expert_mlp wants experts of load_experts"
        checks.expert_mlp(experts.inputs, expert_ids, shares, out, rows)
        checks.table("x", x, rows, experts.inputs)
        assert x is not out, "out overlaps x"
        for first, count in spans(rows):
            self._expert_mlp(x, experts, expert_ids, shares, out, first, count)

    def _expert_mlp(
        self, x: Array, experts: CpuExperts, expert_ids: Array, shares: Array, out: Array, first: int, rows: int
    ) -> None:
        """The op on `rows` rows from `first` on: see `experts.py`."""
        inputs, width, number, chosen = experts.inputs, experts.width, experts.count, expert_ids.shape[1]
        pairs = rows * chosen
        most = min(len(x), SPAN_ROWS) * chosen
        plan = self._scratch("plan", 8 * compiled.plan_words(most, number))
        hidden = self._scratch("hidden", 4 * most * width)
        # First x by pair, in an order of columns; then the results.
        by_pair = self._scratch("by pair", 4 * most * inputs)
        by_pair_up = self._scratch("by pair up", 4 * most * inputs) if experts.orders == 2 else by_pair
        arrays = (x, experts, expert_ids, shares, out, plan, hidden, by_pair, by_pair_up, self._workspace)
        table, x_gate, x_up = address(experts.table), row_address(x, first), row_address(x, first)
        self._enqueue(compiled.group, 1, (row_address(expert_ids, first), rows, chosen, number, address(plan)), arrays)
        if experts.orders:
            x_gate, x_up = address(by_pair), address(by_pair_up)
            for part, target in ((compiled.GATE, x_gate), (compiled.UP, x_up))[: experts.orders]:
                self._enqueue(
                    compiled.order_columns,
                    self._shares(pairs, 4 * inputs),
                    (table, part, row_address(x, first), inputs, target, pairs, number, address(plan)),
                    arrays,
                )
        self._enqueue(
            compiled.gated,
            self._shares(compiled.tasks(pairs, number, width), 2 * compiled.task_work(inputs, pairs, number)),
            (
                table,
                x_gate,
                x_up,
                experts.orders > 0,
                inputs,
                address(hidden),
                pairs,
                number,
                address(plan),
                CODES[experts.activation],
                address(experts.gate_bias),
                address(experts.up_bias),
                address(self._workspace),
            ),
            arrays,
        )
        self._enqueue(
            compiled.down,
            self._shares(compiled.tasks(pairs, number, inputs), compiled.task_work(width, pairs, number)),
            (
                table,
                address(hidden),
                width,
                address(by_pair),
                pairs,
                number,
                address(plan),
                address(experts.down_bias),
                address(self._workspace),
            ),
            arrays,
        )
        self._enqueue(
            compiled.combine,
            self._shares(rows, chosen * inputs),
            (
                row_address(expert_ids, first),
                row_address(shares, first),
                address(by_pair),
                row_address(out, first),
                rows,
                chosen,
                inputs,
                number,
            ),
            arrays,
        )

    def add_gated(self, x: Array, gate: Array, y: Array, out: Array, rows: int) -> None:
        checks.add_gated(gate, y, out, rows)
        checks.table("x", x, rows, gate.shape[0])
        self._enqueue(
            routing.add_gated,
            self._shares(rows, gate.shape[0] + y.shape[1]),
            (address(x), address(gate), gate.shape[0], address(y), address(out), y.shape[1], rows),
            (x, gate, y, out),
        )


def _channels_in(bias: Array | None, orders: list[NDArray[np.int32] | None]) -> Array | None:
    """[experts, F] with each row in an order, as `pack_expert` brings gate and up into it."""
    if bias is None or all(order is None for order in orders):
        return bias
    ordered = aligned_empty(bias.shape, "float32")
    for expert, order in enumerate(orders):
        ordered[expert] = bias[expert] if order is None else bias[expert][order]
    return ordered
