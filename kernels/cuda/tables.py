"""Every tile, split and launch constant of the CUDA kernels, and the rules that pick a variant.

`slices` is part of the bit contract, a function of the weight's shape alone. The rest is free (`linear.cu` says why).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BLOCK_K = 64
"""Input channels of one packed block."""

PADDED_CHANNELS = 64
PADDED_TOKENS = 128
ATTENTION_SPLIT = 256
"""Absolute positions a split of attention."""

SHARED_LIMIT = 99 * 1024
"""Shared memory a block on consumer cards (sm_86, sm_89, sm_120)."""
HOPPER_SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True, slots=True)
class LinearVariant:
    """One compiled tile of linear.cu.

    Attributes:
        name: The kernel, without the prefix of gated ones.
        tokens, channels: Its tile.
        threads: Of a block.
        stages: Blocks of K in shared memory at once; 0 when it uses none.
        keeps_sums: The sum over slices waits in shared memory.
        gated: It exists for gated matrices too.
    """

    name: str
    tokens: int
    channels: int
    threads: int
    stages: int = 0
    keeps_sums: bool = False
    gated: bool = True

    def shared_bytes(self, bits: int) -> int:
        """Dynamic shared memory of a block."""
        sums = 4 * self.tokens * self.channels if self.keeps_sums else 0
        return self.stages * (self.tokens * (BLOCK_K * 2 + 8) + self.channels * BLOCK_K * bits // 8) + sums


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
    LinearVariant("split_16x128", 16, 128, 128, 4),
    LinearVariant("split_32x128", 32, 128, 128, 4),
    LinearVariant("split_64x128", 64, 128, 128, 4),
    LinearVariant("split_64x256", 64, 256, 256, 5),
)
WHOLE = (
    LinearVariant("whole_16x128", 16, 128, 128, 4, True),
    LinearVariant("whole_32x128", 32, 128, 128, 4, True),
    LinearVariant("whole_64x128", 64, 128, 128, 4, True),
    LinearVariant("whole_64x256", 64, 256, 256, 5, True),
)
"""For more tokens: slices over blocks, or all slices in one block. `num_tiles` says how many of them there are."""


def num_tiles(bits: int, group_size: int, arch: int) -> int:
    """How many of SPLIT and WHOLE exist.

    Scales of groups of 16 leave no registers for 64 tokens, nor do 8 bits in groups of 32 on Blackwell. Cards other
    than Hopper have no memory for the widest.
    """
    if group_size == 16 or (bits == 8 and group_size == 32 and arch >= 100):
        return 2
    return 4 if arch == 90 and bits == 4 else 3


@dataclass(frozen=True, slots=True)
class TileCost:
    """What a tile of SPLIT and WHOLE takes on an H200, in microseconds: enough to compare them.

    Attributes:
        wave: 64 blocks of K in as many tiles as run at once.
        split: To add up slices of several blocks.
        at_once: Tiles that a multiprocessor runs at once.
    """

    wave: float
    split: float
    at_once: int


TILE_COSTS = (TileCost(43, 20, 3), TileCost(46, 12, 3), TileCost(54, 18, 2), TileCost(58, 10, 1))
LAST_WAVE = 0.3
"""How much of a last wave that is not full counts as if it were."""

FEW_TOKENS = 16
MANY_CHANNELS = 32768
"""Beyond these, tiles of 16 tokens in shared memory are faster than those in registers."""


def attention_shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of attention.cu's blocks: tiles of 64 keys and values, two in flight where they fit."""
    tiles_in_flight = 2 if head_dim <= 128 else 1
    return tiles_in_flight * 2 * 64 * (head_dim * 2 + 16)


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

    @property
    def partial_floats(self) -> int:
        """Floats that each slice's sums take while they wait for the last block."""
        return self.grid[0] * self.grid[1] * self.variant.tokens * self.variant.channels if self.grid[2] > 1 else 0


def linear_launch(
    tokens: int, channels: int, blocks: int, bits: int, group_size: int, arch: int, processors: int, *, gated: bool
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
    for place in range(num_tiles(bits, group_size, arch)):
        whole, cost = WHOLE[place], TILE_COSTS[place]
        if any(tokens <= other.tokens < whole.tokens for other in WHOLE):
            continue
        x, y = -(-channels // whole.channels), -(-tokens // whole.tokens)
        for z in (1, 2, 4, 8):
            if num_slices % z:
                continue
            waves = x * y * z / (cost.at_once * processors)
            waves = max(1.0, LAST_WAVE * math.ceil(waves) + (1 - LAST_WAVE) * waves)
            time = waves * (cost.wave * blocks / 64 / z + (cost.split if z > 1 else 0))
            if best is None or time < best[0]:
                best = time, LinearLaunch(SPLIT[place] if z > 1 else whole, (x, y, z))
    assert best is not None
    return best[1]


def row_threads(channels: int) -> int:
    """Threads of activation.cu for a row. Part of the bit contract: they order the sum of squares."""
    return 256 if channels < 2048 else 1024
