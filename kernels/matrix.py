"""The canonical group-wise integer format that every 4-bit source maps into without requantizing.

`w[n, k] = scale[n, g] * q[n, k] + minimum[n, g]` with g = k // group_size: n is an output channel, k an input channel.
It is the host's exchange format between a checkpoint reader and a backend, which repacks it for its own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """One [N, K] weight matrix in 4 or 8 bits.

    Attributes:
        bits: 4 or 8.
        group_size: Input channels that share a scale; divides K.
        q: uint8 [N, K // 2] for 4 bits (channel 2i in the low nibble, 2i + 1 in the high one), uint8 [N, K] for 8.
        scale: float16 or float32 [N, K // group_size]. float16 whenever that holds the source's scales and minimums
            exactly; float32 otherwise (K-quants multiply two of them), so that the weights are the source's own.
        minimum: Of the same dtype and shape as `scale`. A source with zero points has `minimum = -scale * zero`.
        input_order: int32 [K], a permutation: column j is input channel input_order[j], and a group is a run of
            columns. None: the columns are in order. (GPTQ's act-order puts channels of like importance in one group.)
    """

    bits: int
    group_size: int
    q: NDArray[np.uint8]
    scale: NDArray[np.float16] | NDArray[np.float32]
    minimum: NDArray[np.float16] | NDArray[np.float32]
    input_order: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        assert self.bits in (4, 8), self.bits
        assert self.group_size in GROUP_SIZES, self.group_size
        n, groups = self.scale.shape
        assert self.q.dtype == np.uint8, self.q.dtype
        assert self.q.shape == (n, groups * self.group_size * self.bits // 8), self.q.shape
        assert self.scale.dtype in (np.float16, np.float32), self.scale.dtype
        assert self.minimum.shape == self.scale.shape, (self.minimum.shape, self.scale.shape)
        assert self.minimum.dtype == self.scale.dtype, (self.minimum.dtype, self.scale.dtype)
        if self.input_order is not None:
            assert self.input_order.dtype == np.int32, self.input_order.dtype
            assert self.input_order.shape == (groups * self.group_size,), self.input_order.shape

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): output and input channels."""
        return self.scale.shape[0], self.scale.shape[1] * self.group_size

    @property
    def nbytes(self) -> int:
        """Bytes of the integers, scales and minimums; what a backend keeps resident is this plus its padding."""
        return self.q.nbytes + self.scale.nbytes + self.minimum.nbytes

    def integers(self) -> NDArray[np.uint8]:
        """The integers unpacked, uint8 [N, K], in the order of the columns."""
        if self.bits == 8:
            return self.q
        out = np.empty((self.q.shape[0], self.q.shape[1] * 2), np.uint8)
        out[:, 0::2] = self.q & 15
        out[:, 1::2] = self.q >> 4
        return out

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [N, K]: the weights by input channel, for tests and references; the engine never calls it."""
        n, k = self.shape
        q = self.integers().astype(np.float32).reshape(n, -1, self.group_size)
        scale = self.scale.astype(np.float32)[:, :, None]
        minimum = self.minimum.astype(np.float32)[:, :, None]
        columns = (q * scale + minimum).reshape(n, k)
        if self.input_order is None:
            return columns
        weights = np.empty_like(columns)
        weights[:, self.input_order] = columns
        return weights


def pack_nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, K] integers 0..15 to the packed [N, K // 2] of `GroupedMatrix.q`."""
    return np.ascontiguousarray(q[:, 0::2] | (q[:, 1::2] << 4))
