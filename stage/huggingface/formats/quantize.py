"""Our own quantizer, for folders of float weights: the one place where weights are rounded.

4 bits for the matrices of the layers and 8 for what a model is more sensitive to (embedding, head): per group of input
channels an integer grid with scale and minimum in float16, searched for the least squared error (`kernels/cpu/quantize`
says how). On weights as language models have them the squared error in 4 bits and groups of 32 is a fifth below that of
GGUF's Q4_1, which is as large; in 8 bits and groups of 32 it is a third below Q8_0's.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shardline.kernels import GROUP_SIZES, GroupedMatrix, quantize_groups
from shardline.stage.huggingface.formats.scheme import AnyArray, widened

_ELEMENTS = 1 << 20
"""About as many are widened to float32 and quantized at a time by a thread."""


def quantized_bytes(shape: tuple[int, int], bits: int, group_size: int) -> int:
    """What `GroupedMatrix.nbytes` of a matrix (N, K) will be."""
    n, k = shape
    return n * k * bits // 8 + 4 * n * (k // group_size)


def quantize(
    pieces: Iterable[AnyArray], shape: tuple[int, int], bits: int = 4, group_size: int = 32, num_threads: int = 1
) -> GroupedMatrix:
    """Quantize a matrix, which may come in pieces: besides the result, one piece is in memory at a time.

    Neither the pieces nor the threads change a bit of it.

    Args:
        pieces: float32, float16 or (as uint16) bfloat16 [rows, K]: all N rows, in order.
        shape: (N, K).
        bits: 4 or 8.
        group_size: One of `GROUP_SIZES`; must divide K.
        num_threads: How many may work on it.

    Raises:
        ValueError: K and the group size do not fit, a piece is of another shape or type, or an element is not a finite
            number or larger than 32768.
    """
    n, k = shape
    assert bits in (4, 8), bits
    assert group_size in GROUP_SIZES, group_size
    if k % group_size:
        raise ValueError(f"{k} input channels are not a multiple of the group size {group_size}")
    q = np.empty((n, k * bits // 8), np.uint8)
    scale = np.empty((n, k // group_size), np.float16)
    minimum = np.empty_like(scale)

    def work(rows: AnyArray, start: int) -> None:
        end = start + len(rows)
        values = widened(f"rows {start} and on", rows)
        q[start:end], scale[start:end], minimum[start:end] = quantize_groups(values, bits, group_size)

    step = max(1, _ELEMENTS // k)
    start = 0
    with ThreadPoolExecutor(num_threads) as threads:
        for piece in pieces:
            if piece.ndim != 2 or piece.shape[1] != k or start + len(piece) > n:
                raise ValueError(f"rows {start} and on have the shape {list(piece.shape)}, in a matrix {list(shape)}")
            starts = range(0, len(piece), step)
            for _ in threads.map(work, (piece[at : at + step] for at in starts), (start + at for at in starts)):
                pass
            start += len(piece)
    if start != n:
        raise ValueError(f"it has {start} rows, not {n}")
    return GroupedMatrix(bits, group_size, q, scale, minimum)
