"""Matrix products of the CUDA backend, and the ops on single rows around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shardline.kernels import checks
from shardline.kernels.backend import Array, Weight
from shardline.kernels.cuda import tables, weights
from shardline.kernels.cuda.arrays import Activations
from shardline.kernels.cuda.core import PREPARE_THREADS, address, float32, int32
from shardline.kernels.cuda.pack import TILE
from shardline.kernels.cuda.staged import StagedProducts
from shardline.kernels.cuda.wide import WideProducts
from shardline.kernels.experts import Activation
from shardline.kernels.matrix import GroupedMatrix

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
"""How gate.cuh names them."""

GATHERING = {"BITS": 4, "GROUP": 32, "HAS_MIN": 0, "SCALE_F32": 0}
"""Defines of rows.cu where its embedding is not wanted."""

POINTWISE_THREADS = 256


class ProductOps(StagedProducts, WideProducts):
    """The ops of `Backend` on rows and resident matrices."""

    def load_matrix(self, parts: Sequence[GroupedMatrix]) -> Weight:
        with self._stream:
            return self._kept_product(weights.load(parts, self._packer))

    def load_gated(self, gate: GroupedMatrix, up: GroupedMatrix) -> Weight:
        with self._stream:
            return self._kept_product(weights.load_gated(gate, up, self._packer))

    def _kept_product(self, weight: weights.CudaWeight) -> weights.CudaWeight:
        for part in weight.parts:
            self._modules.start("linear", **part.defines)
            if tables.is_wide_format(part.bits, part.group_size, part.has_minimum, self.arch):
                self._modules.start("wide", **part.defines)
            self._start_staged(part, gated=weight.gated and not weight.apart)
        kept: weights.CudaWeight = self._keep(self.described(weight))
        self._settle()
        return kept

    def embedding(
        self,
        token_ids: Array,
        weight: Weight,
        out: Array,
        rows: int,
        *,
        scale: float = 1.0,
        last_tokens: Array | None = None,
    ) -> None:
        checks.embedding(token_ids, weight.inputs, out, rows, last_tokens)
        (part,) = weight.parts
        arguments: list[Any] = [token_ids, part.integers, part.scale, part.minimum, out]
        arguments += [int32(weight.inputs), int32(part.blocks), int32(weight.channels)]
        defines = dict(part.defines)
        if scale != 1.0:
            arguments.append(float32(scale))
            defines["SCALED"] = 1
        if part.order is not None:
            arguments.append(part.order)
            defines["ORDERED"] = 1
        if last_tokens is not None:
            arguments += [last_tokens, int32(last_tokens.shape[0])]
            defines["LAST_TOKENS"] = 1
        self._launch(("rows", "embedding"), (rows,), 256, tuple(arguments), **defines)

    def gather_rows(self, x: Array, indices: Array, out: Array, count: int) -> None:
        checks.gather_rows(x, indices, out, count)
        arguments = (x, indices, out, int32(x.shape[1]))
        self._launch(("rows", "gather_rows"), (count,), 256, arguments, **GATHERING)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        size = weight.shape[0]
        arguments = (x, weight, float32(eps), out.fragments, out.scales, out.sums, int32(size), int32(out.blocks))
        threads = tables.row_threads(size)
        self._launch(
            ("activation", "rms_norm_rows"), (rows,), threads, arguments, shared=out.blocks * 256, THREADS=threads
        )

    def add_rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        checks.rms_norm(x, weight, out, rows)
        size = weight.shape[0]
        threads = tables.row_threads(size)
        arguments = (x, weight, float32(eps), out, int32(size))
        self._launch(("norms", "add_rms_norm"), (rows,), threads, arguments, THREADS=threads)

    def soft_cap(self, x: Array, cap: float, rows: int) -> None:
        checks.soft_cap(x, cap, rows)
        count = rows * x.shape[1]
        arguments = (x, float32(cap), np.uint64(count))
        grid = (-(-count // (4 * POINTWISE_THREADS)),)
        self._launch(("pointwise", "soft_cap"), grid, POINTWISE_THREADS, arguments, ACTIVATION=0)

    def add_gated(self, x: Array, gate: Array, y: Array, out: Array, rows: int) -> None:
        checks.add_gated(gate, y, out, rows)
        assert x.shape[1] == gate.shape[0], f"x has {x.shape[1]} channels, the gate {gate.shape[0]}"
        assert gate.shape[0] % 8 == 0, f"{gate.shape[0]} channels are no multiple of 8"
        assert y.shape[1] % 4 == 0, f"{y.shape[1]} channels are no multiple of 4"
        arguments = (x.fragments, x.scales, gate, y, out)
        sizes = (int32(gate.shape[0]), int32(x.blocks), int32(y.shape[1]))
        self._launch(("pointwise", "add_gated"), (rows,), POINTWISE_THREADS, (*arguments, *sizes), ACTIVATION=0)

    def linear(
        self, x: Array, weight: Weight, out: Array, rows: int, *, bias: Array | None = None, accumulate: bool = False
    ) -> None:
        assert not weight.gated, "linear wants a weight of load_matrix"
        checks.table("out", out, rows, weight.channels)
        for part, own in self._in_order(x, weight, rows):
            self._multiply(
                own,
                part,
                address(out, part.first),
                weight.channels,
                rows,
                bias=address(bias, part.first if bias is not None else 0),
                accumulate=accumulate,
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
        self._multiply_gated(x, weight, out, rows, activation, bias)
        self._make_gated_fragments(out, rows)

    def norm_linear(
        self,
        x: Array,
        norm: Array,
        eps: float,
        normed: Array,
        weight: Weight,
        out: Array,
        rows: int,
        *,
        bias: Array | None = None,
    ) -> None:
        source = _normed(x, norm, eps)
        if any(part.order is not None or not self._stages("normed", rows, part) for part in weight.parts):
            super().norm_linear(x, norm, eps, normed, weight, out, rows, bias=bias)
            return
        assert not weight.gated, "norm_linear wants a weight of load_matrix"
        checks.table("out", out, rows, weight.channels)
        for part in weight.parts:
            own_bias = address(bias, part.first if bias is not None else 0)
            to = address(out, part.first)
            self._multiply_staged("normed", source, part, to, weight.channels, rows, bias=own_bias)

    def norm_mlp(
        self,
        x: Array,
        norm: Array,
        eps: float,
        normed: Array,
        gate_up: Weight,
        gated: Array,
        down: Weight,
        out: Array,
        rows: int,
        *,
        activation: Activation = "silu",
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
        accumulate: bool = False,
    ) -> None:
        part = gate_up.parts[0]
        if gate_up.apart or part.order is not None or not self._stages("normed", rows, part, gated=True):
            self.rms_norm(x, norm, eps, normed, rows)
            self._multiply_gated(normed, gate_up, gated, rows, activation, gate_up_bias)
        else:
            self._multiply_staged(
                "normed",
                _normed(x, norm, eps),
                part,
                address(gated.values),
                gate_up.channels,
                rows,
                bias=address(gate_up_bias),
                largest=address(gated.largest),
                defines=_gated_defines(activation, gate_up_bias),
            )
        part = down.parts[0]
        if len(down.parts) > 1 or part.order is not None or not self._stages("gated", rows, part):
            self._make_gated_fragments(gated, rows)
            self.linear(gated, down, out, rows, bias=down_bias, accumulate=accumulate)
            return
        checks.table("out", out, rows, down.channels)
        source = (gated.values, gated.largest, gated.done, int32(gated.shape[1]))
        bias = address(down_bias)
        to = address(out)
        self._multiply_staged("gated", source, part, to, down.channels, rows, bias=bias, accumulate=accumulate)

    def _multiply_gated(
        self,
        x: Activations,
        weight: weights.CudaWeight,
        out: Activations,
        rows: int,
        activation: Activation,
        bias: Array | None,
    ) -> None:
        """Gated rows as float32, and their largest magnitudes."""
        assert weight.gated, "gated_linear wants a weight of load_gated"
        if bias is not None:
            checks.vector("bias", bias, 2 * weight.channels)
        if weight.apart:
            self._multiply_apart(x, weight, out, rows, activation, bias)
            return
        ((part, own),) = self._in_order(x, weight, rows)
        self._multiply(
            own,
            part,
            address(out.values),
            weight.channels,
            rows,
            bias=address(bias),
            largest=address(out.largest),
            defines=_gated_defines(activation, bias),
        )

    def _multiply_apart(
        self,
        x: Activations,
        weight: weights.CudaWeight,
        out: Activations,
        rows: int,
        activation: Activation,
        bias: Array | None,
    ) -> None:
        """A gate and an up of different formats: a product each, then what joins them."""
        channels = weight.channels
        halves = [self._buffer(name, x.shape[0] * channels) for name in ("gate", "up")]
        for index, (part, own) in enumerate(self._in_order(x, weight, rows)):
            half_bias = address(bias, index * channels if bias is not None else 0)
            self._multiply(own, part, address(halves[index]), channels, rows, bias=half_bias)
        self._join(halves, out, rows, activation)

    def _join(self, halves: Sequence[Array], out: Activations, rows: int, activation: Activation) -> None:
        channels = out.shape[1]
        self._launch(
            ("pointwise", "join_rows"),
            (rows, -(-channels // (4 * POINTWISE_THREADS))),
            POINTWISE_THREADS,
            (*halves, out.values, out.largest, int32(channels)),
            ACTIVATION=ACTIVATIONS[activation],
        )

    def _in_order(
        self, x: Activations, weight: weights.CudaWeight, rows: int
    ) -> list[tuple[weights.CudaPart, Activations]]:
        """Each part, and x with its channels in the order of the part's columns."""
        assert x.blocks == weight.blocks, f"x has {x.shape[1]} channels, the weight takes {weight.inputs}"
        found: list[tuple[weights.CudaPart, Activations]] = []
        for index, part in enumerate(weight.parts):
            own = x
            if part.order is not None:
                done = (before for other, before in found if other.order is part.order)
                own = next(done, None) or self._reordered(f"ordered {index}", x, rows, part.order)
            found.append((part, own))
        return found

    def _reordered(
        self, name: str, x: Activations, rows: int, order: Array, expert_ids: Array | None = None, a_source: int = 1
    ) -> Activations:
        """Row m is row m // a_source of x, in the order of its expert where there are experts."""
        copy = self._rows_between(name, x.shape[0] * a_source, x.shape[1])
        self._launch(
            ("reorder", "reorder_channels"),
            (rows, -(-x.blocks * 16 // PREPARE_THREADS)),
            PREPARE_THREADS,
            (
                x.fragments,
                x.scales,
                order,
                address(expert_ids),
                copy.fragments,
                copy.scales,
                copy.sums,
                int32(x.blocks),
                int32(a_source),
            ),
            THREADS=PREPARE_THREADS,
        )
        return copy

    def _multiply(
        self,
        x: Activations,
        part: weights.CudaPart,
        out: np.uint64,
        stride: int,
        rows: int,
        *,
        bias: np.uint64,
        accumulate: bool = False,
        largest: np.uint64 | None = None,
        defines: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """One part's product to rows of `stride` floats at `out`. With `largest` it is a gate and an up."""
        tiles = (x.fragments, x.sums, x.scales, int32(x.shape[1]))
        if self._multiply_staged(
            "tiles",
            tiles,
            part,
            out,
            stride,
            rows,
            bias=bias,
            accumulate=accumulate,
            largest=largest,
            defines=defines,
        ):
            return
        gated = largest is not None
        num_slices = tables.slices(part.blocks)
        launch = tables.linear_launch(
            rows,
            part.tiles * TILE,
            part.blocks,
            part.bits,
            part.group_size,
            part.has_minimum,
            self.arch,
            self._processors,
            gated=gated,
        )
        if launch.variant.wide:
            self._multiply_wide(
                launch,
                x,
                part,
                out,
                stride,
                rows,
                bias=bias,
                accumulate=accumulate,
                largest=largest,
                defines=defines,
            )
            return
        partial = self._buffer("slice sums", launch.waiting_floats(num_slices))
        arguments = (
            part.integers,
            part.scale,
            part.minimum,
            x.fragments,
            x.sums,
            x.scales,
            bias,
            out,
            int32(rows),
            int32(part.channels),
            int32(stride),
            int32(part.tiles),
            int32(part.blocks),
            int32(accumulate),
            partial,
            self._arrived,
            int32(num_slices),
            np.uint64(0) if largest is None else largest,
        )
        name = ("gated_" if gated else "") + launch.variant.name
        self._launch(
            ("linear", name),
            launch.grid,
            launch.variant.threads,
            arguments,
            shared=launch.shared_bytes(part, self.arch),
            cluster=launch.cluster,
            **part.defines,
            **defines,
        )


def _normed(x: Array, norm: Array, eps: float) -> tuple[Any, ...]:
    """Arguments of a product that norms its rows itself."""
    size = norm.shape[0]
    return (x, norm, float32(eps), int32(tables.row_threads(size)), int32(size))


def _gated_defines(activation: Activation, bias: Array | None) -> dict[str, int]:
    """The plain kernels are compiled with neither, and for more than gated products."""
    defines = {"ACTIVATION": ACTIVATIONS[activation], "GATED_BIAS": int(bias is not None)}
    return {name: value for name, value in defines.items() if value}
