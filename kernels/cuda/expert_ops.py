"""A mixture of experts on the CUDA backend: router, sorting of pairs, products, sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from shardline.kernels import checks
from shardline.kernels.backend import Array, Weight
from shardline.kernels.cuda import experts as resident
from shardline.kernels.cuda import tables
from shardline.kernels.cuda.arrays import Activations
from shardline.kernels.cuda.core import address, float32, int32
from shardline.kernels.cuda.experts import CudaExperts, ExpertMatrices
from shardline.kernels.cuda.pack import TILE
from shardline.kernels.cuda.products import ACTIVATIONS, ProductOps
from shardline.kernels.cuda.staged import SOURCES
from shardline.kernels.cuda.tables import ExpertPlan
from shardline.kernels.errors import UnsupportedOperationError
from shardline.kernels.experts import Activation, Expert, RouterRule

SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}
"""How route.cu names them."""

MOST_CHOSEN = 32
"""Experts a row, and groups of experts: a lane of route.cu has one."""

SORT_THREADS = 1024
COMBINE_CHANNELS = 1024
"""Of one block of dispatch.cu's combine."""


class ExpertOps(ProductOps):
    """The ops of `Backend` on experts."""

    def load_experts(
        self,
        experts: Iterable[Expert],
        *,
        activation: Activation = "silu",
        gate_bias: Array | None = None,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> Weight:
        with self._stream:
            weight = resident.load(experts, activation, gate_bias, up_bias, down_bias, self._packer)
        checks.expert_biases(weight.count, weight.width, weight.inputs, gate_bias, up_bias, down_bias)
        self._modules.start("dispatch")
        for matrices, joined in ((weight.gate_up[0], len(weight.gate_up) == 1), (weight.down, False)):
            self._modules.start("experts", **_defines(weight, matrices, joined=joined))
        self._modules.start("choices", **weight.down.format.defines, SOURCE=SOURCES["gated"])
        kept: CudaExperts = self._keep(weight)
        self._settle()
        return kept

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
        assert x.shape[1] == inputs, f"x has {x.shape[1]} channels, the router takes {inputs}"
        assert inputs % 8 == 0, f"{inputs} channels are no multiple of 8"
        if experts > resident.MOST_EXPERTS:
            raise UnsupportedOperationError(f"more than {resident.MOST_EXPERTS} experts a layer", "cuda")
        if max(rule.experts_per_token, rule.num_groups) > MOST_CHOSEN:
            raise UnsupportedOperationError(f"more than {MOST_CHOSEN} experts a token, or groups of them", "cuda")
        variant = tables.route_variant(rows, experts, self._processors)
        self._launch(
            ("route", variant.name),
            (-(-experts // variant.experts), -(-rows // variant.rows)),
            variant.threads,
            (
                x.fragments,
                x.scales,
                router,
                address(bias),
                address(choice_bias),
                self._buffer("router logits", x.shape[0] * experts),
                self._arrived,
                expert_ids,
                shares,
                int32(rows),
                int32(inputs),
                int32(x.blocks),
                int32(experts),
                int32(rule.experts_per_token),
                int32(rule.num_groups),
                int32(rule.groups_kept),
                int32(rule.normalise),
                float32(rule.scale),
            ),
            shared=variant.shared_bytes,
            LANE_EXPERTS=tables.lane_experts(experts),
            SCORING=SCORINGS[rule.scoring],
        )

    def expert_mlp(self, x: Array, experts: Weight, expert_ids: Array, shares: Array, out: Array, rows: int) -> None:
        checks.expert_mlp(experts.inputs, expert_ids, shares, out, rows)
        assert x.shape[1] == experts.inputs, f"x has {x.shape[1]} channels, the experts take {experts.inputs}"
        chosen = expert_ids.shape[1]
        pairs, most = rows * chosen, x.shape[0] * chosen
        plan = tables.expert_plan(rows, chosen, experts.count)
        tiles = self._group(expert_ids, experts.count, pairs, most, plan)
        between = self._rows_between("experts", most, experts.width)
        if len(experts.gate_up) == 1:
            (matrices,) = experts.gate_up
            self._multiply_pairs(
                x, experts, matrices, plan, tiles, expert_ids, pairs, chosen, address(between.values), joins=between
            )
        else:
            halves = [self._buffer(name, most * experts.width) for name in ("gate", "up")]
            biases = (experts.gate_bias, experts.up_bias)
            for matrices, half, bias in zip(experts.gate_up, halves, biases, strict=True):
                self._multiply_pairs(
                    x, experts, matrices, plan, tiles, expert_ids, pairs, chosen, address(half), bias=bias
                )
            self._join(halves, between, pairs, experts.activation)
        if experts.down.orders is None and tables.adds_choices(plan, rows, chosen, between.blocks):
            self._add_choices(experts, between, expert_ids, shares, out, rows)
            return
        self._make_gated_fragments(between, pairs)
        results = self._buffer("expert results", most * experts.inputs)
        self._multiply_pairs(
            between,
            experts,
            experts.down,
            plan,
            tiles,
            expert_ids,
            pairs,
            1,
            address(results),
            bias=experts.down_bias,
        )
        grid = (rows, -(-experts.inputs // COMBINE_CHANNELS))
        arguments = (results, shares, out, int32(experts.inputs), int32(chosen))
        self._launch(("dispatch", "combine"), grid, 256, arguments)

    def _add_choices(
        self, experts: CudaExperts, gated: Activations, expert_ids: Array, shares: Array, out: Array, rows: int
    ) -> None:
        """The last products of the rows' pairs, and their sums."""
        matrices, chosen = experts.down, expert_ids.shape[1]
        # After experts.cu's product, and no other kernel, it may read ahead.
        early = len(experts.gate_up) == 1
        self._launch(
            ("choices", "add_choices"),
            (matrices.tiles, rows),
            32 * chosen,
            (
                matrices.table,
                expert_ids,
                shares,
                gated.values,
                gated.largest,
                gated.done,
                address(experts.down_bias),
                out,
                int32(experts.inputs),
                int32(experts.width),
                int32(matrices.blocks),
                int32(tables.slices(matrices.blocks)),
                int32(chosen),
                int32(early),
            ),
            shared=tables.choices_bytes(chosen, matrices.blocks),
            **matrices.format.defines,
            SOURCE=SOURCES["gated"],
        )

    def _group(
        self, expert_ids: Array, experts: int, pairs: int, most: int, plan: ExpertPlan
    ) -> tuple[np.uint64, np.uint64]:
        """Addresses of the tiles and of the pairs in their order; 0 where each pair is a tile."""
        if not plan.sorted:
            return np.uint64(0), np.uint64(0)
        order = self._buffer("pairs by expert", most, "int32")
        # The smallest tiles are the most.
        tiles = self._buffer("tiles of pairs", 4 * tables.sorted_plan(8, most, experts).tiles, "int32")
        self._launch(
            ("dispatch", "group_pairs"),
            (1,),
            SORT_THREADS,
            (expert_ids, order, tiles, int32(pairs), int32(experts), int32(plan.tile_pairs), int32(plan.tiles)),
            shared=4 * 32 * experts,
        )
        return address(tiles), address(order)

    def _multiply_pairs(
        self,
        x: Activations,
        experts: CudaExperts,
        matrices: ExpertMatrices,
        plan: ExpertPlan,
        tiles: tuple[np.uint64, np.uint64],
        expert_ids: Array,
        pairs: int,
        a_row: int,
        out: np.uint64,
        *,
        bias: Any = None,
        joins: Activations | None = None,
    ) -> None:
        """Each pair's product with its expert's matrix: row m // a_row of x to row m at `out`.

        With `joins`, the gate and the up in one, whose largest magnitudes go there.
        """
        assert x.blocks == matrices.blocks, f"x has {x.blocks} blocks of channels, the experts take {matrices.blocks}"
        if matrices.orders is not None:
            x, a_row = self._reordered("ordered pairs", x, pairs, matrices.orders, expert_ids, a_row), 1
        joined = joins is not None
        variant = tables.expert_variant(
            plan, matrices.tiles * TILE, matrices.blocks, matrices.format.group_size, self.arch, self._processors
        )
        self._launch(
            ("experts", variant.name),
            (-(-matrices.tiles * TILE // variant.channels), plan.tiles),
            variant.threads,
            (
                matrices.table,
                *tiles,
                expert_ids,
                x.fragments,
                x.sums,
                x.scales,
                address(experts.gate_bias if joined else bias),
                address(experts.up_bias if joined else None),
                out,
                int32(matrices.channels),
                int32(matrices.channels // 2 if joined else matrices.channels),
                int32(matrices.tiles),
                int32(matrices.blocks),
                int32(tables.slices(matrices.blocks)),
                int32(a_row),
                address(None if joins is None else joins.largest),
            ),
            shared=variant.shared_bytes(matrices.format, self.arch),
            **_defines(experts, matrices, joined=joined),
        )


def _defines(experts: CudaExperts, matrices: ExpertMatrices, *, joined: bool) -> dict[str, int]:
    defines = matrices.format.defines | {"EXPERTS": 1, "IS_GATED": int(joined)}
    if joined:
        defines |= {"ACTIVATION": ACTIVATIONS[experts.activation], "GATED_BIAS": int(experts.gate_bias is not None)}
    return defines
