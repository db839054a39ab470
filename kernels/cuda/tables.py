"""Every tile, split and launch constant of the CUDA kernels, and the rules that pick a variant.

`slices` is part of the bit contract, a function of the weight's shape alone. The rest is free (`linear.cu` says why).
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_K = 64
"""Input channels of one packed block."""

PADDED_CHANNELS = 64
PADDED_TOKENS = 128
ATTENTION_SPLIT = 256
"""Absolute positions a split of attention."""

SHARED_LIMIT = 99 * 1024
"""Shared memory a block on consumer cards (sm_86, sm_89, sm_120)."""


@dataclass(frozen=True, slots=True)
class LinearVariant:
    """One compiled tile of linear.cu.

    Attributes:
        name: The kernel, without the prefix of gated ones.
        tokens, channels: Its tile.
        threads: Of a block.
        stages: Blocks of K in shared memory at once; 0 when it uses none.
        keeps_sums: The sum over slices waits in shared memory.
    """

    name: str
    tokens: int
    channels: int
    threads: int
    stages: int = 0
    keeps_sums: bool = False

    def shared_bytes(self, bits: int) -> int:
        """Dynamic shared memory of a block."""
        sums = 4 * self.tokens * self.channels if self.keeps_sums else 0
        return self.stages * (self.tokens * (BLOCK_K * 2 + 8) + self.channels * BLOCK_K * bits // 8) + sums


FEW = {
    (8, 1): (LinearVariant("few_8x64_s1", 8, 64, 64),),
    (8, 4): (LinearVariant("few_8x32_s4", 8, 32, 256), LinearVariant("few_8x64_s4", 8, 64, 256)),
    (8, 8): (LinearVariant("few_8x16_s8", 8, 16, 256), LinearVariant("few_8x32_s8", 8, 32, 256)),
    (16, 1): (LinearVariant("few_16x64_s1", 16, 64, 64),),
    (16, 4): (LinearVariant("few_16x64_s4", 16, 64, 256),),
    (16, 8): (LinearVariant("few_16x32_s8", 16, 32, 256),),
}
"""By (tokens, slices): a narrow variant for few channels, then a wide one, the only one that exists gated."""

SPLIT = (
    LinearVariant("split_16x128", 16, 128, 128, 4),
    LinearVariant("split_32x128", 32, 128, 128, 4),
    LinearVariant("split_64x128", 64, 128, 128, 4),
)
WHOLE = (
    LinearVariant("whole_16x128", 16, 128, 128, 4, True),
    LinearVariant("whole_32x128", 32, 128, 128, 4, True),
    LinearVariant("whole_64x128", 64, 128, 128, 4, True),
)
"""For more tokens: slices over blocks, or all slices in one block. The widest does not exist for groups of 16."""

FEW_TOKENS = 16
WIDE_CHANNELS = 8192
"""From here on the wide variant for few tokens has enough blocks to fill a large card."""


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
    tokens: int, channels: int, num_slices: int, group_size: int, processors: int, *, gated: bool
) -> LinearLaunch:
    """The variant for a product: a matter of speed alone, measured on an H200.

    channels counts a gated pair twice; processors are the device's.
    """
    if tokens <= 8 or (tokens <= FEW_TOKENS and channels <= WIDE_CHANNELS):
        variants = FEW[8 if tokens <= 8 else 16, num_slices]
        variant = variants[-1] if gated or channels >= WIDE_CHANNELS else variants[0]
        return LinearLaunch(variant, (-(-channels // variant.channels), 1, 1))
    widest = len(WHOLE) - (2 if group_size == 16 else 1)
    # The widest tile that still gives every multiprocessor something to do.
    for place in range(widest, -1, -1):
        variant = WHOLE[place]
        x, y = -(-channels // variant.channels), -(-tokens // variant.tokens)
        too_wide = place > 0 and tokens <= WHOLE[place - 1].tokens
        if not too_wide and x * y >= processors + processors // 4:
            return LinearLaunch(variant, (x, y, 1))
    place = min(widest, 0 if tokens <= 16 else 1 if tokens <= 64 else 2)
    variant = WHOLE[place]
    x, y = -(-channels // variant.channels), -(-tokens // variant.tokens)
    z = 1
    while z < num_slices and x * y * z < processors + processors // 4:
        z *= 2
    return LinearLaunch(SPLIT[place] if z > 1 else variant, (x, y, z))


def row_threads(channels: int) -> int:
    """Threads of activation.cu for a row. Part of the bit contract: they order the sum of squares."""
    return 256 if channels < 2048 else 1024
