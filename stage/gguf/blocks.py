"""GGUF's block formats as `GroupedMatrix`: integers, scales and minimums re-arranged, nothing rounded.

Each block type is `w = scale * q + minimum` already; what differs is how the bits lie:

    type   bits  group  scale               minimum              dtype
    Q4_0   4     32     d                   -8 d                 float16
    Q4_1   4     32     d                   m                    float16
    Q5_0   8     32     d                   -16 d                float16
    Q5_1   8     32     d                   m                    float16
    Q8_0   8     32     d                   -128 d, q = x + 128  float16
    Q4_K   4     32     d * sc, exact       -(dmin * m), exact   float32
    Q5_K   8     32     d * sc, exact       -(dmin * m), exact   float32
    Q6_K   8     16     d * sc, exact       -32 d * sc           float32
    MXFP4  8     32     2^(e - 128)         -12 * 2^(e - 128)    float16, where that holds them

(A product of a float16, 11 bits, and a 6- or 8-bit integer fits float32's 24 bits.) Also `scale * q` is exact in
float32 for all of them, so `GroupedMatrix.dequantize` rounds where the format's own definition does: in the sum only.

Two kinds of matrices are rounded when they are read, and the reader warns of it. F32, F16 and BF16 have no integer
form: they become Q8_0. Q2_K, Q3_K (groups of 16) and IQ4_NL, IQ4_XS (sixteen levels that are not evenly spaced) would
be exact only in forms of 8 to 10 bits a weight, for which nobody who chose such a file has room: they are requantized
to 4 bits in groups of 32, 5 bits a weight, by the kernels' search for the least squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gguf.quants
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix, pack_nibbles, quantize_groups

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Parts = tuple[Bytes, Floats, Floats]
"""q [blocks, channels a block] one a byte, scale and minimum [blocks, groups a block], of some blocks."""

_LOW, _FOUR = np.uint8(15), np.uint8(4)

FLOAT_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)

REQUANTIZED = (
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.IQ4_NL,
    GGMLQuantizationType.IQ4_XS,
)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block type as `GroupedMatrix`. `wide`: its scales need float32. `unpack`: from uint8 [blocks, bytes]."""

    bits: int
    group_size: int
    wide: bool
    unpack: Callable[[Bytes], Parts]

    def nbytes(self, shape: tuple[int, int]) -> int:
        """What `GroupedMatrix.nbytes` of a matrix of that shape is, unless its scales leave float16's range."""
        n, k = shape
        return n * k * self.bits // 8 + 2 * n * (k // self.group_size) * (4 if self.wide else 2)


def _half(raw: Bytes) -> Floats:
    """Little-endian float16 bytes [blocks, 2] to float32 [blocks, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """[blocks, 16]: channels 0..15 in the low nibbles, 16..31 in the high ones."""
    return np.concatenate([raw & _LOW, raw >> _FOUR], axis=1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """[blocks, 4] to [blocks, 32]: bit i is channel i's, moved to place 4."""
    return np.unpackbits(raw, axis=1, bitorder="little") << _FOUR


def _q4_0(blocks: Bytes) -> Parts:
    scale = _half(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Parts:
    scale = _half(blocks[:, :2])
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Bytes) -> Parts:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return q, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Parts:
    scale = _half(blocks[:, :2])
    # Two's complement to offset binary: x + 128.
    return blocks[:, 2:] ^ np.uint8(128), scale, -128 * scale


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the eight groups of Q4_K and Q5_K: 6-bit integers in 12 bytes, times two float16."""
    packed = blocks[:, 4:16]
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    return _half(blocks[:, 0:2]) * scale, -(_half(blocks[:, 2:4]) * minimum)


def _k_nibbles(raw: Bytes) -> Bytes:
    """[blocks, 128] in four runs of 32 bytes: a run's low nibbles are one group, its high nibbles the next."""
    runs = raw.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & _LOW, runs >> _FOUR], axis=2).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Parts:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    # Byte j of the high bits holds channel j of each of the eight groups, group g in bit g.
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _k_nibbles(blocks[:, 48:]) | high.reshape(-1, 256) << _FOUR, *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    # Two halves of 128 channels, each in four runs of 32: low nibbles in 64 bytes (runs 0, 1, then 2, 3 above them),
    # the upper two bits of all four runs in 32 bytes.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & _LOW, low >> _FOUR], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    scale = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8)
    return (low | high << _FOUR).reshape(-1, 256), scale, -32 * scale


# Twice the sixteen floats of two exponent bits and one of mantissa, moved by 12 to be no integers below zero.
_E2M1 = np.array([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], np.uint8)
# Beyond it 24 steps leave float32's range.
_LARGEST_EXPONENT = 251


def _mxfp4(blocks: Bytes) -> Parts:
    exponent = blocks[:, :1].astype(np.int32)
    scale = np.where(exponent > _LARGEST_EXPONENT, np.inf, np.ldexp(np.float32(1), exponent - 128)).astype(np.float32)
    return _E2M1[_nibbles(blocks[:, 1:])], scale, -12 * scale


FORMATS: dict[GGMLQuantizationType, BlockFormat] = {
    GGMLQuantizationType.Q4_0: BlockFormat(4, 32, False, _q4_0),
    GGMLQuantizationType.Q4_1: BlockFormat(4, 32, False, _q4_1),
    GGMLQuantizationType.Q5_0: BlockFormat(8, 32, False, _q5_0),
    GGMLQuantizationType.Q5_1: BlockFormat(8, 32, False, _q5_1),
    GGMLQuantizationType.Q8_0: BlockFormat(8, 32, False, _q8_0),
    GGMLQuantizationType.Q4_K: BlockFormat(4, 32, True, _q4_k),
    GGMLQuantizationType.Q5_K: BlockFormat(8, 32, True, _q5_k),
    GGMLQuantizationType.Q6_K: BlockFormat(8, 16, True, _q6_k),
    GGMLQuantizationType.MXFP4: BlockFormat(8, 32, False, _mxfp4),
}

SUPPORTED = (*FLOAT_TYPES, *FORMATS, *REQUANTIZED)
"""Types of matrices that can be read."""


def format_of(kind: GGMLQuantizationType) -> BlockFormat:
    """The format that a matrix of that type is read into. Raises KeyError for a type that is not supported."""
    if kind in FLOAT_TYPES:
        return FORMATS[GGMLQuantizationType.Q8_0]
    return FORMATS[GGMLQuantizationType.Q4_1 if kind in REQUANTIZED else kind]


def rounding(kind: GGMLQuantizationType) -> str | None:
    """What is done to a matrix of a type that is not read exactly, for people."""
    if kind in FLOAT_TYPES:
        return "quantized to 8 bits in groups of 32"
    return "requantized to 4 bits in groups of 32" if kind in REQUANTIZED else None


def to_float32(raw: Bytes, kind: GGMLQuantizationType) -> Floats:
    """Elements of a float type, exactly. raw uint8 [.., bytes], result float32 [.., elements]."""
    if kind == GGMLQuantizationType.F32:
        return raw.view("<f4").astype(np.float32, copy=False)
    if kind == GGMLQuantizationType.F16:
        return raw.view("<f2").astype(np.float32)
    assert kind == GGMLQuantizationType.BF16, kind
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def assemble(pieces: Iterable[Bytes], kind: GGMLQuantizationType, shape: tuple[int, int]) -> GroupedMatrix:
    """A matrix from the bytes of its rows.

    Args:
        pieces: uint8 [rows, bytes a row]; all N rows, in order, in pieces of any size: only one is unpacked at a time.
        kind: Their type, one of `SUPPORTED`.
        shape: (N, K).

    Raises:
        ValueError: a scale, a minimum or an element is not finite.
    """
    target = format_of(kind)
    n, k = shape
    groups = k // target.group_size
    q = np.empty((n, k * target.bits // 8), np.uint8)
    dtype: Any = np.float32 if target.wide else np.float16
    scale, minimum = np.empty((n, groups), dtype), np.empty((n, groups), dtype)
    start = 0
    for piece in pieces:
        end = start + len(piece)
        part_q, part_scale, part_minimum = _parts(piece, kind, target, start)
        if scale.dtype == np.float16 and not (_fits(part_scale) and _fits(part_minimum)):
            # -8 d and the like can leave float16's range where d does not, and MXFP4's powers of two too; but in no
            # sane file.
            scale, minimum = scale.astype(np.float32), minimum.astype(np.float32)
        q[start:end] = part_q.reshape(end - start, -1)
        scale[start:end] = part_scale.reshape(end - start, groups)
        minimum[start:end] = part_minimum.reshape(end - start, groups)
        start = end
    assert start == n, (start, n)
    return GroupedMatrix(target.bits, target.group_size, q, scale, minimum)


def _parts(
    piece: Bytes, kind: GGMLQuantizationType, target: BlockFormat, start: int
) -> tuple[Bytes, NDArray[Any], NDArray[Any]]:
    """Of the rows from `start` on: q packed as in `GroupedMatrix`, scale and minimum."""
    # What is no number is looked for at the end; until then it may pass through the arithmetic.
    with np.errstate(invalid="ignore", over="ignore"):
        if kind in REQUANTIZED:
            values = gguf.quants.dequantize(piece, kind)
            return quantize_groups(np.ascontiguousarray(values), target.bits, target.group_size)
        if kind in FLOAT_TYPES:
            piece, kind = _as_q8_0(to_float32(piece, kind)), GGMLQuantizationType.Q8_0
        q, scale, minimum = target.unpack(piece.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
        raise ValueError(f"a scale or minimum in rows {start} to {start + len(piece) - 1} is not a finite number")
    return pack_nibbles(q) if target.bits == 4 else q, scale, minimum


def _fits(values: NDArray[Any]) -> bool:
    """Whether float16 holds them exactly."""
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())


def _as_q8_0(rows: Floats) -> Bytes:
    """float32 [rows, K] to Q8_0 bytes [rows, K / 32 * 34]."""
    if not np.isfinite(rows).all():
        raise ValueError("an element is not a finite number")
    # Groups of denormals make its 1 / d overflow, and groups of huge ones its float16: the first become zero whatever
    # the integers are, the second are found by the check of the scales.
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(rows, GGMLQuantizationType.Q8_0)
