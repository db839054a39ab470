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
"""Shared memory a block on consumer cards (sm_86, sm_89, sm_120); no variant asks for more."""


@dataclass(frozen=True, slots=True)
class LinearVariant:
    """One compiled tile of linear.cu.

    Attributes:
        name: The kernel.
        tokens, channels: Its tile.
        threads: Of a block.
        slices: The slice count that it is for; 0 takes any, as an argument.
        stages: Blocks of K in shared memory at once; 0 when it uses none.
    """

    name: str
    tokens: int
    channels: int
    threads: int
    slices: int
    stages: int = 0

    def shared_bytes(self, bits: int) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * (self.tokens * BLOCK_K * 2 + self.channels * BLOCK_K * bits // 8)


FEW = {
    (8, False, 1): (LinearVariant("few_8x64_s1", 8, 64, 64, 1),),
    (8, False, 4): (LinearVariant("few_8x32_s4", 8, 32, 256, 4), LinearVariant("few_8x64_s4", 8, 64, 256, 4)),
    (8, False, 8): (LinearVariant("few_8x16_s8", 8, 16, 256, 8), LinearVariant("few_8x32_s8", 8, 32, 256, 8)),
    (8, True, 1): (LinearVariant("gated_8x64_s1", 8, 64, 64, 1),),
    (8, True, 4): (LinearVariant("gated_8x64_s4", 8, 64, 256, 4),),
    (8, True, 8): (LinearVariant("gated_8x32_s8", 8, 32, 256, 8),),
    (16, False, 1): (LinearVariant("few_16x64_s1", 16, 64, 64, 1),),
    (16, False, 4): (LinearVariant("few_16x64_s4", 16, 64, 256, 4),),
    (16, False, 8): (LinearVariant("few_16x32_s8", 16, 32, 256, 8),),
    (16, True, 1): (LinearVariant("gated_16x64_s1", 16, 64, 64, 1),),
    (16, True, 4): (LinearVariant("gated_16x64_s4", 16, 64, 256, 4),),
    (16, True, 8): (LinearVariant("gated_16x32_s8", 16, 32, 256, 8),),
}
"""By (tokens, gated, slices): a narrow variant for few channels, then a wide one."""

MANY = {
    False: (
        LinearVariant("many_32x128", 32, 128, 128, 0, 4),
        LinearVariant("many_64x128", 64, 128, 256, 0, 4),
    ),
    True: (
        LinearVariant("gated_32x128", 32, 128, 128, 0, 4),
        LinearVariant("gated_64x128", 64, 128, 256, 0, 4),
    ),
}

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


def few_tokens(tokens: int, gated: bool, num_slices: int, channels: int) -> LinearVariant:
    """The variant for up to 16 tokens."""
    variants = FEW[8 if tokens <= 8 else 16, gated, num_slices]
    return variants[-1] if channels >= WIDE_CHANNELS else variants[0]


def many_tokens(tokens: int, gated: bool) -> LinearVariant:
    """The variant for more than 16 tokens."""
    return MANY[gated][0]
