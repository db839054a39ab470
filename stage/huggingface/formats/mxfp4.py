"""MXFP4, as gpt-oss folders have their experts: blocks of 32 four-bit floats under one power of two.

The experts of a layer are one tensor each of

    *_blocks  uint8 [experts, N, K / 32, 16]   two e2m1 numbers a byte, the first in the low nibble
    *_scales  uint8 [experts, N, K / 32]       e8m0: 2^(e - 127); 255 is not a number

An e2m1 number is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign. No grid of sixteen equal steps holds them all, but
twice each is an integer of -12 to 12. So a matrix is exact in the 8-bit form, with group 32, half the power of two as
scale and 12 as zero: nothing is rounded. The price is memory: 9 bits a weight (scale and minimum in float16; 10 where
they need float32) for the file's 4.25.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardline.kernels import GroupedMatrix
from shardline.stage.huggingface.formats.config import refuse_unknown
from shardline.stage.huggingface.formats.scheme import AnyArray, Groups, Scheme, expect, matrix

GROUP, ZERO = 32, 12

_INTEGERS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice each e2m1 number."""

_PAIRS = np.empty((256, 2), np.uint8)
"""The two integers, with the zero added, in a byte of a block."""
_PAIRS[:, 0] = (_INTEGERS + ZERO).astype(np.uint8)[np.arange(256) & 15]
_PAIRS[:, 1] = (_INTEGERS + ZERO).astype(np.uint8)[np.arange(256) >> 4]

_MAX_EXPONENT = 251
"""Past it 24 steps of half the power of two leave float32's range."""


def mxfp4_matrix(blocks: AnyArray, scales: AnyArray) -> GroupedMatrix:
    """One matrix, exactly.

    Args:
        blocks: uint8 [N, K / 32, 16].
        scales: uint8 [N, K / 32].

    Raises:
        ValueError: a shape, a type, or a scale that is not a number or leaves float32's range.
    """
    if blocks.ndim != 3 or 0 in blocks.shape:
        raise ValueError(f"the blocks have the shape {list(blocks.shape)}, not [N, K / 32, 16]")
    n, count, _ = blocks.shape
    expect("the blocks", blocks, (np.uint8,), (n, count, 16))
    expect("the scales", scales, (np.uint8,), (n, count))
    highest = int(scales.max())
    if highest > _MAX_EXPONENT:
        raise ValueError("a scale is not a number" if highest == 255 else f"a scale is 2^{highest - 127}: too large")
    # No byte is out of the range; "clip" only spares the look.
    pairs = np.take(_PAIRS.view(np.uint16)[:, 0], np.ascontiguousarray(blocks).reshape(n, -1), mode="clip")
    # 2^(e - 127) / 2, subnormal for the smallest, and exact.
    powers = np.ldexp(np.float32(1), np.asarray(scales).astype(np.int32) - 128)
    groups = Groups(GROUP, np.arange(count), None)
    return matrix(Scheme(8, GROUP, True), pairs.view(np.uint8), powers, ZERO, groups, False)


def mxfp4_expert(blocks: AnyArray, scales: AnyArray, expert: int, rows: slice = slice(None)) -> GroupedMatrix:
    """One expert's matrix of a layer's tensors, which may lie in a file: only that expert's bytes are read.

    Args:
        blocks: uint8 [experts, N, K / 32, 16], or whatever gives one expert when indexed with its number.
        scales: uint8 [experts, N, K / 32], likewise.
        expert: Its number.
        rows: Which of its N output channels. Where gate and up lie between each other, every second one.

    Raises ValueError as `mxfp4_matrix`.
    """
    return mxfp4_matrix(blocks[expert][rows], scales[expert][rows])


class Mxfp4Format:
    """The `quantization_config` of a folder with MXFP4 experts."""

    name = "MXFP4"
    tensors = ("blocks", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError: the config says something that is not supported."""
        refuse_unknown(config, {"quant_method", "modules_to_not_convert"})

    def nbytes(self, shape: tuple[int, int]) -> int:
        """What `GroupedMatrix.nbytes` of a matrix (N, K) is, unless its scales leave float16's range."""
        return Scheme(8, GROUP, True).nbytes(shape, "F16")
