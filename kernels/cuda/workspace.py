"""What the ops of a step keep on a GPU besides their arguments, in numbers: for the planner, and to reserve at load.

Whoever adds a buffer to an op adds it here; `test_memory_cuda.py` fails where a step still allocates. Nothing here
imports cupy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shardline.kernels.backend import StepShape
from shardline.kernels.cuda import tables

ARRIVALS = 1 << 14
"""Counters of blocks that are done, for kernels whose last block goes on; zero between launches. Every backend has
them, 4 bytes each."""

BIAS_ENTRIES = 1024
"""Logit biases of one row that room is reserved for; more make the buffer grow, in a step."""

ROUNDING = 512
"""Each array takes a multiple of it."""

_SAMPLING_ROW = 64
"""Bytes of a row of sample.cu's inputs, besides biases and histories."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix as linear.cu multiplies by it.

    Attributes:
        channels: N, padding included; a gated pair counts both.
        blocks: K in blocks of 64, padding included.
        bits, group_size, has_minimum: Its format.
        gated: A gate and an up in one.
    """

    channels: int
    blocks: int
    bits: int
    group_size: int
    has_minimum: bool
    gated: bool

    @classmethod
    def of(cls, channels: int, inputs: int, bits: int, group_size: int, has_minimum: bool, *, gated: bool) -> Product:
        """From N and K."""
        padded = -(-channels // tables.PADDED_CHANNELS) * tables.PADDED_CHANNELS
        return cls(padded, _blocks(inputs), bits, group_size, has_minimum, gated)


FORMATS = ((4, 128, False), (4, 32, True), (4, 32, False), (4, 16, False), (8, 32, False))
"""(bits, group size, has minimums), one of each kind that has tiles of its own: for who does not know the formats."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A layer's experts.

    Attributes:
        count, width, inputs: How many; F; K.
        apart: Gate and up are of different formats.
        ordered: The gate's and up's columns, or the down's, are in an order of their own.
    """

    count: int
    width: int
    inputs: int
    apart: bool
    ordered: tuple[bool, bool]


@dataclass(slots=True)
class WeightShapes:
    """What of a stage's weights decides how much its ops keep.

    Attributes:
        products: All kinds of matrices.
        apart: F of gates and ups that are of different formats.
        ordered: (place in its stack, K) of matrices whose columns are in an order of their own.
        experts: All kinds of experts.
    """

    products: set[Product] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    ordered: set[tuple[int, int]] = field(default_factory=set)
    experts: set[ExpertsShape] = field(default_factory=set)


@dataclass(slots=True)
class Workspace:
    """Buffers by the names that ops ask for them under.

    Attributes:
        flat: Name -> (elements, dtype).
        rows: (name, channels) -> rows of activations.
    """

    flat: dict[str, tuple[int, str]] = field(default_factory=dict)
    rows: dict[tuple[str, int], int] = field(default_factory=dict)

    def want(self, name: str, elements: int, dtype: str = "float32") -> None:
        """At least so much under that name."""
        known = self.flat.get(name, (0, dtype))[0]
        if elements > known:
            self.flat[name] = (elements, dtype)

    def want_rows(self, name: str, rows: int, channels: int) -> None:
        """Activations, at least so many rows of them."""
        self.rows[name, channels] = max(rows, self.rows.get((name, channels), 0))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        flat = sum(_rounded(elements * np.dtype(dtype).itemsize) for elements, dtype in self.flat.values())
        return flat + sum(activations_bytes(rows, channels) for (_, channels), rows in self.rows.items())


def activations_bytes(rows: int, channels: int) -> int:
    """Device bytes of `Backend.activations`."""
    tokens = -(-rows // tables.PADDED_TOKENS) * tables.PADDED_TOKENS
    blocks = _blocks(channels)
    # Values; tiles of halves; eight sums a tile and half block; scales, largest magnitudes, counters; tensor maps.
    maps = tables.TENSOR_MAP_BYTES * len(tables.WIDE_TOKENS)
    sizes = (4 * rows * channels, tokens * blocks * 128, tokens * blocks * 8, 4 * tokens, 4 * tokens, 4 * tokens, maps)
    return sum(_rounded(size) for size in sizes)


def step_workspace(step: StepShape, weights: WeightShapes, arch: int, processors: int) -> Workspace:
    """All that the ops of a step of up to that shape keep, whatever its number of rows."""
    found = Workspace()
    most = max(step.rows, step.sampled_rows)
    found.want("slice sums", max((slice_sums(p, most, arch, processors) for p in weights.products), default=1))
    for channels in weights.apart:
        found.want("gate", step.rows * channels)
        found.want("up", step.rows * channels)
    for place, inputs in weights.ordered:
        found.want_rows(f"ordered {place}", most, inputs)
    if step.kv_heads:
        found.want("query tiles", 2 * step.rows, "int32")
        found.want("split sums", _most_split_sums(step, processors))
    for experts in weights.experts:
        _want_experts(found, step, experts)
    if step.sampled_rows:
        entries = BIAS_ENTRIES + step.distinct_ids
        found.want("adjusted logits", step.sampled_rows * step.vocab)
        found.want("sampling", step.sampled_rows * (_SAMPLING_ROW + 8 * entries) + 256, "uint8")
        found.want("sampled", step.sampled_rows * (2 + 2 * step.logprobs), "int32")
    return found


def _want_experts(found: Workspace, step: StepShape, experts: ExpertsShape) -> None:
    pairs = step.rows * step.experts_per_token
    found.want("router logits", step.rows * experts.count)
    found.want("pairs by expert", pairs, "int32")
    found.want("tiles of pairs", 4 * tables.sorted_plan(8, pairs, experts.count).tiles, "int32")
    found.want("expert results", pairs * experts.inputs)
    found.want_rows("experts", pairs, experts.width)
    if experts.apart:
        found.want("gate", pairs * experts.width)
        found.want("up", pairs * experts.width)
    if experts.ordered[0]:
        found.want_rows("ordered pairs", pairs, experts.inputs)
    if experts.ordered[1]:
        found.want_rows("ordered pairs", pairs, experts.width)


@lru_cache(maxsize=4096)
def slice_sums(product: Product, rows: int, arch: int, processors: int) -> int:
    """The most floats that slices of a product's K wait in, with any number of rows up to that."""
    slices = tables.slices(product.blocks)
    # A launch is a matter of whole tiles of tokens, none of which is narrower than 8.
    counts = {*range(8, rows, 8), rows}
    launches = (
        tables.linear_launch(
            count,
            product.channels,
            product.blocks,
            product.bits,
            product.group_size,
            product.has_minimum,
            arch,
            processors,
            gated=product.gated,
        )
        for count in counts
    )
    return max(1, *(launch.waiting_floats(slices) for launch in launches))


def attends_whole(rows: int, kv_heads: int, group: int, processors: int) -> bool:
    """Whether a block of attention.cu walks all of its rows' positions: there are blocks enough without splits."""
    return rows * kv_heads >= 4 * processors * (16 // group)


def split_sums(rows: int, query_heads: int, head_dim: int, max_splits: int) -> int:
    """Floats that the splits of attention wait in, where they are of different blocks."""
    return rows * query_heads * max_splits * (head_dim + 2)


def _most_split_sums(step: StepShape, processors: int) -> int:
    group = step.query_heads // step.kv_heads
    max_splits = -(-step.max_positions // tables.ATTENTION_SPLIT)
    rows = next(
        (rows for rows in range(step.rows, 0, -1) if not attends_whole(rows, step.kv_heads, group, processors)), 0
    )
    return max(1, split_sums(rows, step.query_heads, step.head_dim, max_splits))


def _blocks(inputs: int) -> int:
    """Of 64, an even number (`pack.blocks_of`)."""
    return -(-inputs // (2 * tables.BLOCK_K)) * 2


def _rounded(size: int) -> int:
    return -(-max(size, 1) // ROUNDING) * ROUNDING
