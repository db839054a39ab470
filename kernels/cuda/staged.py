"""Products of few rows that each block brings to shared memory itself, whatever they are made of (staged.cu)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from shardline.kernels.cuda import tables
from shardline.kernels.cuda.core import CudaCore, int32
from shardline.kernels.cuda.pack import TILE
from shardline.kernels.cuda.tables import LinearLaunch, Source
from shardline.kernels.cuda.weights import CudaPart

SOURCES: dict[Source, int] = {"tiles": 0, "gated": 1, "normed": 2}
"""How staged.cuh names them."""


class StagedProducts(CudaCore):
    """What the ops on matrices use where there are few rows."""

    def _start_staged(self, part: CudaPart, *, gated: bool) -> None:
        """Begin to compile for a part, as decoders use it."""
        sources: tuple[Source, ...] = ("normed",) if gated else ("tiles", "gated", "normed")
        for source in sources:
            if tables.STAGED_ROWS[source]:
                self._modules.start("staged", **_defines(source, part, gated=gated))

    def _stages(self, source: Source, rows: int, part: CudaPart, *, gated: bool = False) -> bool:
        """Whether a product of that source goes this way."""
        return self._staged_launch(source, rows, part, gated=gated) is not None

    def _staged_launch(self, source: Source, rows: int, part: CudaPart, *, gated: bool) -> LinearLaunch | None:
        return tables.staged_launch(
            source, rows, part.tiles * TILE, part.blocks, self.arch, self._processors, gated=gated
        )

    def _multiply_staged(
        self,
        source: Source,
        source_arguments: tuple[Any, ...],
        part: CudaPart,
        out: np.uint64,
        stride: int,
        rows: int,
        *,
        bias: np.uint64,
        accumulate: bool = False,
        largest: np.uint64 | None = None,
        defines: Mapping[str, int] = MappingProxyType({}),
    ) -> bool:
        """One part's product as `ProductOps._multiply`; False, and nothing done, where it does not go this way."""
        gated = largest is not None
        launch = self._staged_launch(source, rows, part, gated=gated)
        if launch is None:
            return False
        arguments = (
            part.integers,
            part.scale,
            part.minimum,
            *source_arguments,
            bias,
            out,
            int32(rows),
            int32(part.channels),
            int32(stride),
            int32(part.tiles),
            int32(part.blocks),
            int32(accumulate),
            np.uint64(0) if largest is None else largest,
        )
        self._launch(
            ("staged", launch.variant.name),
            launch.grid,
            launch.variant.threads,
            arguments,
            shared=tables.staged_bytes(source, rows, part.blocks),
            **_defines(source, part, gated=gated),
            **defines,
        )
        return True


def _defines(source: Source, part: CudaPart, *, gated: bool) -> dict[str, int]:
    return part.defines | {"SOURCE": SOURCES[source], "IS_GATED": int(gated)}
