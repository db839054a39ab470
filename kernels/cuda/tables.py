"""Every tile, split and launch constant of the CUDA kernels, and the rules that pick a variant.

`slices` is part of the bit contract, a function of the weight's shape alone. The rest is free (`linear.cu` says why).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

BLOCK_K = 64
"""Input channels of one packed block."""

PADDED_CHANNELS = 64
PADDED_TOKENS = 128
ATTENTION_SPLIT = 256
"""Absolute positions a split of attention."""

SHARED_LIMIT = 99 * 1024
"""Shared memory a block on consumer cards (sm_86, sm_89, sm_120)."""
HOPPER_SHARED_LIMIT = 227 * 1024
WIDE_STATIC = 1024
"""Static shared memory of wide.cu's kernels; they take the rest of a multiprocessor's."""


class Form(Protocol):
    """What a matrix's kernels are compiled for."""

    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def has_minimum(self) -> bool: ...
    @property
    def scale_f32(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class LinearVariant:
    """One compiled tile of linear.cu.

    Attributes:
        name: The kernel, without the prefix of gated ones.
        tokens, channels: Its tile.
        threads: Of a block.
        staged: Blocks of K go through shared memory, several at once (`stages`).
        keeps_sums: The sum over slices waits in shared memory.
        gated: It exists for gated matrices too.
    """

    name: str
    tokens: int
    channels: int
    threads: int
    staged: bool = False
    keeps_sums: bool = False
    gated: bool = True
    wide: bool = False

    def shared_bytes(self, form: Form, arch: int) -> int:
        """Dynamic shared memory of a block."""
        if self.wide:
            return HOPPER_SHARED_LIMIT - WIDE_STATIC
        if not self.staged:
            return 0
        sums = 4 * self.tokens * self.channels if self.keeps_sums else 0
        return stages(form, arch) * self.stage_bytes(form) + sums

    def stage_bytes(self, form: Form) -> int:
        """A block of K: activations, integers, sums of activations where they are needed, scales and minimums."""
        per_channel = BLOCK_K * form.bits // 8 + scale_bytes(form) * (1 + form.has_minimum)
        return self.tokens * (BLOCK_K * 2 + 8 * form.has_minimum) + self.channels * per_channel


def scale_bytes(form: Form) -> int:
    """Of the groups that end in a block of K, of one channel."""
    return (4 if form.scale_f32 else 2) * max(1, BLOCK_K // form.group_size)


def stages(form: Form, arch: int) -> int:
    """Blocks of K in shared memory at once: on an H200 more are worth their room, which other cards do not have."""
    if arch == 90:
        return 6 if form.bits == 4 else 4
    return 3 if form.bits == 8 and (form.has_minimum or scale_bytes(form) > 4) else 4


FEW = {
    (8, 1): (LinearVariant("few_8x64_s1", 8, 64, 64),),
    (8, 4): (LinearVariant("few_8x32_s4", 8, 32, 256, gated=False), LinearVariant("few_8x64_s4", 8, 64, 256)),
    (8, 8): (
        LinearVariant("few_8x16_s8", 8, 16, 256, gated=False),
        LinearVariant("few_8x32_s8", 8, 32, 256),
        LinearVariant("few_8x32_s8_light", 8, 32, 256),
    ),
    (16, 1): (LinearVariant("few_16x64_s1", 16, 64, 64),),
    (16, 4): (LinearVariant("few_16x64_s4", 16, 64, 256),),
    (16, 8): (LinearVariant("few_16x32_s8", 16, 32, 256),),
}
"""By (tokens, slices), from few channels to many."""

SPLIT = (
    LinearVariant("split_16x128", 16, 128, 128, staged=True),
    LinearVariant("split_32x128", 32, 128, 128, staged=True),
    LinearVariant("split_64x128", 64, 128, 128, staged=True),
    LinearVariant("split_64x256", 64, 256, 256, staged=True),
)
WHOLE = (
    LinearVariant("whole_16x128", 16, 128, 128, staged=True, keeps_sums=True),
    LinearVariant("whole_32x128", 32, 128, 128, staged=True, keeps_sums=True),
    LinearVariant("whole_64x128", 64, 128, 128, staged=True, keeps_sums=True),
    LinearVariant("whole_64x256", 64, 256, 256, staged=True, keeps_sums=True),
)
"""For more tokens: slices over blocks, or all slices in one block. `num_tiles` says how many of them there are."""


WIDE_ARCH = 90
"""The arch whose instructions wide.cu is made of."""

WIDE_TOKENS = (32, 64, 128)
WIDE_CHANNELS = (128, 192)
"""Of its tiles."""
BLOCKS_A_STAGE = 2
"""Blocks of K that its copies bring at once, of groups of 128."""
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class WideTile:
    """A tile of wide.cu and what it takes on an H200, in microseconds: enough to compare.

    Attributes:
        variant: Its kernel.
        stage: A group of K.
        only_gated: There are no registers for it otherwise.
    """

    variant: LinearVariant
    stage: float
    only_gated: bool = False


WIDE = (
    WideTile(LinearVariant("wide_32x192", 32, 192, 512, staged=True, wide=True), 0.56),
    WideTile(LinearVariant("wide_64x128", 64, 128, 384, staged=True, wide=True), 0.48),
    WideTile(LinearVariant("wide_64x192", 64, 192, 512, staged=True, wide=True), 0.72),
    WideTile(LinearVariant("wide_128x128", 128, 128, 384, staged=True, wide=True), 0.95, only_gated=True),
)
WIDE_FIXED = 6.0
"""To begin, and to store."""

WIDE_CLUSTER = 2


def is_wide_format(bits: int, group_size: int, has_minimum: bool, arch: int) -> bool:
    """Whether products of such a matrix may go to wide.cu: what it was measured with."""
    return arch == WIDE_ARCH and bits == 4 and group_size == 128 and not has_minimum


def wide_launch(tokens: int, channels: int, blocks: int, processors: int, *, gated: bool) -> tuple[float, LinearLaunch]:
    """The quickest of WIDE, after the microseconds that it is thought to take."""
    found = []
    for tile in WIDE:
        if tile.only_gated and not gated:
            continue
        variant = tile.variant
        tiles = -(-channels // (WIDE_CLUSTER * variant.channels)) * -(-tokens // variant.tokens)
        # Not more clusters than tiles: who waits for another's sums would wait for its whole work.
        clusters = min(processors // WIDE_CLUSTER, tiles)
        stages = -(-tiles * slices(blocks) // clusters) * blocks / BLOCKS_A_STAGE / slices(blocks)
        launch = LinearLaunch(variant, (clusters, 1, WIDE_CLUSTER), WIDE_CLUSTER)
        found.append((WIDE_FIXED + stages * tile.stage, launch))
    return min(found, key=lambda one: one[0])


def num_tiles(bits: int, group_size: int, has_minimum: bool, arch: int) -> int:
    """How many of SPLIT and WHOLE exist.

    Scales of groups of 16 leave no registers for 64 tokens, nor do 8 bits in groups of 32 on Blackwell, nor 4 bits in
    groups of 32 without minimums on all but Hopper. Other cards have no memory for the widest.
    """
    if group_size == 16 or (bits == 8 and group_size == 32 and arch >= 100):
        return 2
    if bits == 4 and group_size == 32 and not has_minimum and arch != 90:
        return 2
    return 4 if arch == 90 and bits == 4 else 3


@dataclass(frozen=True, slots=True)
class TileCost:
    """What a tile of SPLIT and WHOLE takes on an H200, in microseconds: enough to compare them.

    Attributes:
        alone: 64 blocks of K, by the only tile of its multiprocessor.
        shared: The same with others beside it, divided by their number.
        fixed: To begin, and to store.
        split: To add up the slices of a cluster's blocks.
        at_once: Tiles that a multiprocessor runs at once.
    """

    alone: float
    shared: float
    fixed: float
    split: float
    at_once: int

    def microseconds(self, tiles: int, blocks: float, processors: int, *, clusters: bool, partials: bool) -> float:
        """Of that many tiles of so many blocks of K each; partials: sums of slices go through global memory."""
        fixed = self.fixed + (self.split if clusters else 0) + (SPLIT_PARTIALS if partials else 0)
        slots = self.at_once * processors * (CLUSTER_SLOTS if clusters else 1)
        if tiles <= slots:
            return blocks / 64 * max(self.alone, -(-tiles // processors) * self.shared) + fixed
        waves = tiles / slots
        waves = LAST_WAVE * math.ceil(waves) + (1 - LAST_WAVE) * waves
        return waves * (blocks / 64 * max(self.alone, self.at_once * self.shared) + fixed)


TILE_COSTS = (
    TileCost(1.23, 11.3, 3.58, 0, 3),
    TileCost(17.5, 13.4, 3.17, 1.01, 3),
    TileCost(26.5, 22.2, 3.42, 1.92, 2),
    TileCost(47.9, 1.38, 1.74, 5.76, 1),
)
"""Fitted to times of all tiles and splits of eight shapes and ten numbers of tokens: 0.3 % off the best on average."""

SPLIT_PARTIALS = 12
CLUSTER_SLOTS = 0.967
"""Not every place for a block has the others of its cluster near it."""
CLUSTERS_FROM = 90
"""The oldest arch whose blocks can read each other's shared memory (many_tokens.cuh)."""

LAST_WAVE = 0.63
"""How much of a last wave that is not full counts as if it were."""

FEW_TOKENS = 16
MANY_CHANNELS = 32768
"""Beyond these, tiles of 16 tokens in shared memory are faster than those in registers."""


def attention_shared_bytes(head_dim: int, kv_bits: int = 16) -> int:
    """Dynamic shared memory of attention.cu's blocks: tiles of 64 keys and values, two in flight where they fit."""
    if kv_bits == 8:
        # Rows of an odd number of 16 bytes; a float16 scale a position.
        return 2 * 2 * 64 * ((head_dim // 16 | 1) * 16 + 2)
    tiles_in_flight = 2 if head_dim <= 128 else 1
    return tiles_in_flight * 2 * 64 * (head_dim * 2 + 16)


def splits_of_window(window: int) -> int:
    """Splits that a tile of up to 16 rows can see."""
    return (window + 13) // ATTENTION_SPLIT + 2


def slices(blocks: int) -> int:
    """How many K slices a matrix of that many blocks is summed in. Part of the bit contract."""
    if blocks < 8:
        return 1
    return 4 if blocks < 64 else 8


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """A variant and its grid."""

    variant: LinearVariant
    grid: tuple[int, int, int]

    cluster: int = 1
    """Blocks along z that add up their slices through shared memory."""

    @property
    def partial_floats(self) -> int:
        """Floats that each slice's sums take in global memory while they wait for the last block."""
        if self.grid[2] == 1 or self.cluster > 1:
            return 0
        return self.grid[0] * self.grid[1] * self.variant.tokens * self.variant.channels

    def waiting_floats(self, num_slices: int) -> int:
        """All floats of sums that wait in global memory; of wide.cu, one tile a block, handed on to the next."""
        if self.variant.wide:
            return self.grid[0] * self.grid[2] * self.variant.tokens * self.variant.channels
        return num_slices * self.partial_floats

    def shared_bytes(self, form: Form, arch: int) -> int:
        """Dynamic shared memory of a block. Of a cluster's, the last slice's sums lie where the stages were."""
        in_tile = self.cluster > 1 and not self.variant.wide
        tile = 4 * self.variant.tokens * self.variant.channels if in_tile else 0
        return self.variant.shared_bytes(form, arch) + tile


def blocks_of_a_tile(tokens: int, num_slices: int, arch: int) -> list[int]:
    """Over how many blocks the slices of a tile may be split, 1 first."""
    whole = [z for z in (1, 2, 4, 8) if num_slices % z == 0]
    if arch < CLUSTERS_FROM:
        return whole
    # A block of a cluster keeps the sums of two slices at most, and adds up two tokens of its own at least.
    return [z for z in whole if z == 1 or (num_slices <= 2 * z and tokens >= 4 * z)]


def linear_launch(
    tokens: int,
    channels: int,
    blocks: int,
    bits: int,
    group_size: int,
    has_minimum: bool,
    arch: int,
    processors: int,
    *,
    gated: bool,
) -> LinearLaunch:
    """The variant for a product: a matter of speed alone, measured on an H200.

    channels counts a gated pair twice; blocks are those of K; arch and processors are the device's.
    """
    num_slices = slices(blocks)
    if tokens <= 8 or (tokens <= FEW_TOKENS and channels <= MANY_CHANNELS):
        variants = FEW[8 if tokens <= 8 else 16, num_slices]
        # The widest tile that still gives every multiprocessor two blocks.
        fitting = [v for v in variants if -(-channels // v.channels) > processors and (v.gated or not gated)]
        variant = fitting[-1] if fitting else next(v for v in variants if v.gated or not gated)
        if variant.name.endswith("light") and (group_size < 128 or channels < 16384):
            variant = variants[-2]
        return LinearLaunch(variant, (-(-channels // variant.channels), 1, 1))
    best: tuple[float, LinearLaunch] | None = None
    for place in range(num_tiles(bits, group_size, has_minimum, arch)):
        whole, cost = WHOLE[place], TILE_COSTS[place]
        if any(tokens <= other.tokens < whole.tokens for other in WHOLE):
            continue
        x, y = -(-channels // whole.channels), -(-tokens // whole.tokens)
        for z in blocks_of_a_tile(whole.tokens, num_slices, arch):
            clusters = z > 1 and arch >= CLUSTERS_FROM
            time = cost.microseconds(
                x * y * z, blocks / z, processors, clusters=clusters, partials=z > 1 and not clusters
            )
            if best is None or time < best[0]:
                best = (
                    time,
                    LinearLaunch(SPLIT[place] if z > 1 else whole, (x, y, z), z if clusters else 1),
                )
    assert best is not None
    if is_wide_format(bits, group_size, has_minimum, arch):
        time, launch = wide_launch(tokens, channels, blocks, processors, gated=gated)
        if time < best[0]:
            return launch
    return best[1]


Source = Literal["tiles", "gated", "normed"]
"""What the rows of a product of staged.cu are made of: activations; gated rows; rows before their norm."""

STAGED = {
    1: (LinearVariant("staged_64_s1", 4, 64, 64),),
    4: (LinearVariant("staged_32_s4", 4, 32, 256), LinearVariant("staged_64_s4", 4, 64, 256)),
    8: (LinearVariant("staged_16_s8", 4, 16, 256, gated=False), LinearVariant("staged_32_s8", 4, 32, 256)),
}
"""Tiles of staged.cu by slices, from few channels to many."""

STAGED_ROWS: dict[Source, int] = {"tiles": 2, "gated": 2, "normed": 2}
"""Up to so many rows, at most 4, staged.cu is used; every one of its blocks reads them all. 0: never."""

STAGED_SLICES = 4
"""And of so many slices: for longer rows an H200 took 2.38 ms for the layers of an 8B with it, 2.25 ms without."""

STAGED_CHANNELS = 65536
"""And up to so many channels: a head's products have a kernel that is near the roof."""

STAGED_AT_ONCE = 2
"""Blocks of 256 threads a multiprocessor, at most 2. With 1 the next kernel's fit beside them, to read ahead."""

STAGED_STATIC = 12 * 1024
"""Static shared memory of its kernels, and what the driver takes of a block's."""


def staged_bytes(source: Source, rows: int, blocks: int) -> int:
    """Dynamic shared memory of staged.cu (staged.cuh says what lies there)."""
    return rows * blocks * (BLOCK_K * 2 + 8 + (BLOCK_K * 4 if source == "normed" else 0))


def staged_launch(
    source: Source, rows: int, channels: int, blocks: int, arch: int, processors: int, *, gated: bool
) -> LinearLaunch | None:
    """The variant of staged.cu for a product, or None: a matter of speed alone. channels as for `linear_launch`."""
    room = (HOPPER_SHARED_LIMIT if arch == 90 else SHARED_LIMIT) // 2 - STAGED_STATIC
    if rows > STAGED_ROWS[source] or channels > STAGED_CHANNELS or slices(blocks) > STAGED_SLICES:
        return None
    if staged_bytes(source, rows, blocks) > room:
        return None
    variants = [variant for variant in STAGED[slices(blocks)] if variant.gated or not gated]
    fitting = [variant for variant in variants if -(-channels // variant.channels) > processors]
    variant = fitting[-1] if fitting else variants[0]
    # As many blocks as run at once: each goes on to the next tile with its rows at hand.
    at_once = processors * STAGED_AT_ONCE * (1 if variant.threads > 64 else 2)
    return LinearLaunch(variant, (min(-(-channels // variant.channels), at_once), 1, 1))


EXPERT_FEW = {
    (8, 1): (LinearVariant("few_8x64_s1", 8, 64, 64),),
    (8, 4): (LinearVariant("few_8x32_s4", 8, 32, 256), LinearVariant("few_8x64_s4", 8, 64, 256)),
    (8, 8): (LinearVariant("few_8x32_s8", 8, 32, 256),),
    (16, 1): (LinearVariant("few_16x64_s1", 16, 64, 64),),
    (16, 4): (LinearVariant("few_16x64_s4", 16, 64, 256),),
    (16, 8): (LinearVariant("few_16x32_s8", 16, 32, 256),),
}
"""Tiles of experts.cu by (pairs, slices), from few channels to many."""

EXPERT_WHOLE = (
    LinearVariant("whole_16x128", 16, 128, 128, staged=True, keeps_sums=True),
    LinearVariant("whole_32x128", 32, 128, 128, staged=True, keeps_sums=True),
    LinearVariant("whole_64x128_wide", 64, 128, 256, staged=True, keeps_sums=True),
    LinearVariant("whole_64x128", 64, 128, 128, staged=True, keeps_sums=True),
)
"""For more pairs; the last only where there are warpgroups (`num_expert_tiles`)."""

MOST_ALONE = 4
"""Pairs go without sorting, each in a tile of its own, while experts are at least so many times as many as they."""


def num_expert_tiles(group_size: int, arch: int) -> int:
    """How many of EXPERT_WHOLE exist."""
    return 4 if arch == 90 and group_size > 16 else 3


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """How a step's pairs of a row and one of its experts are cut into tiles; a function of their number alone.

    Attributes:
        tile_pairs: The most pairs of one expert that a tile takes.
        tiles: The most tiles that there can be; the device knows how many there are.
        sorted: By expert, on the device; else each pair is a tile.
    """

    tile_pairs: int
    tiles: int
    sorted: bool


def expert_plan(rows: int, chosen: int, experts: int) -> ExpertPlan:
    """A matter of speed alone (experts.cu says why)."""
    pairs = rows * chosen
    if rows == 1 or pairs * MOST_ALONE <= experts:
        return ExpertPlan(8, pairs, sorted=False)
    tile = next((tile for most, tile in ((5, 8), (28, 16), (80, 32)) if pairs <= most * experts), 64)
    return sorted_plan(tile, pairs, experts)


def sorted_plan(tile_pairs: int, pairs: int, experts: int) -> ExpertPlan:
    """Tiles of up to `tile_pairs` pairs."""
    # Every expert that has pairs has one tile that may not be full.
    used = min(pairs, experts)
    return ExpertPlan(tile_pairs, used + (pairs - used) // tile_pairs, sorted=True)


CHOICES_ROWS = 4
"""Up to so many rows, whose pairs are not sorted, choices.cu multiplies by the last matrices and adds up. 0: never."""

MOST_CHOICES = 16
CHOICES_BLOCKS = 48
"""Blocks of K that one of its warps walks at most."""
CHOICES_SHARED = SHARED_LIMIT - 2048
"""Dynamic shared memory of its blocks at most."""


def adds_choices(plan: ExpertPlan, rows: int, chosen: int, blocks: int) -> bool:
    """Whether choices.cu does the last product of experts and their sum: a matter of speed alone."""
    fits = chosen <= MOST_CHOICES and blocks <= CHOICES_BLOCKS and choices_bytes(chosen, blocks) <= CHOICES_SHARED
    return fits and rows <= CHOICES_ROWS and not plan.sorted


def choices_bytes(chosen: int, blocks: int) -> int:
    """Dynamic shared memory of choices.cu."""
    return chosen * -(-staged_bytes("gated", 1, blocks) // 16) * 16


def expert_variant(
    plan: ExpertPlan, channels: int, blocks: int, group_size: int, arch: int, processors: int
) -> LinearVariant:
    """The kernel of experts.cu for a plan: a matter of speed alone. channels counts a gated pair twice."""
    few = EXPERT_FEW.get((plan.tile_pairs, slices(blocks)))
    if few is not None and (plan.tile_pairs == 8 or plan.tiles * channels <= MANY_CHANNELS):
        fitting = [v for v in few if plan.tiles * -(-channels // v.channels) > processors]
        return fitting[-1] if fitting else few[0]
    there = EXPERT_WHOLE[: num_expert_tiles(group_size, arch)]
    return [variant for variant in there if variant.tokens == plan.tile_pairs][-1]


@dataclass(frozen=True, slots=True)
class RouteVariant:
    """One kernel of route.cu.

    Attributes:
        name: The kernel.
        experts, rows: Of a block.
        threads: Of a block.
        warp_experts: Experts of one warp.
    """

    name: str
    experts: int
    rows: int
    threads: int
    warp_experts: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: rows, 2048 channels under way and those at work."""
        stages, steps = self.warp_experts + 1, 8 // self.warp_experts
        return stages * steps * 32 * self.rows * 16


ROUTE_ONE = RouteVariant("route_2x1", 2, 1, 64, 1)
"""For one row."""

ROUTE = (
    RouteVariant("route_2x8", 2, 8, 256, 1),
    RouteVariant("route_4x8", 4, 8, 256, 1),
    RouteVariant("route_8x8", 8, 8, 256, 2),
    RouteVariant("route_16x8", 16, 8, 256, 4),
    RouteVariant("route_16x16", 16, 16, 256, 4),
)
"""For more, from little work a block to much."""


def route_variant(rows: int, experts: int, processors: int) -> RouteVariant:
    """The kernel of route.cu, a matter of speed alone: the one of least work a block whose blocks all run at once."""
    if rows == 1:
        return ROUTE_ONE
    at_once = (v for v in ROUTE if -(-experts // v.experts) * -(-rows // v.rows) <= processors)
    return next(at_once, ROUTE[-1])


def lane_experts(experts: int) -> int:
    """Experts that a lane of route.cu compares: what its kernels are compiled for."""
    return 1 << max(0, (-(-experts // 32) - 1).bit_length())


def row_threads(channels: int) -> int:
    """Threads of activation.cu for a row. Part of the bit contract: they order the sum of squares."""
    return 256 if channels < 2048 else 1024
