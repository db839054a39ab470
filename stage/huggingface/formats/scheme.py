"""What the integer formats share: how a module's integers are stored, and how they become a `GroupedMatrix`.

A tensor comes as the array that its bytes are: int32 words, float16 or float32 scales, and uint16 for bfloat16, which
NumPy has no type for. What is wrong with one raises ValueError, which whoever knows the file's and the module's name
adds them to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GROUP_SIZES, GroupedMatrix

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
AnyArray = NDArray[Any]

StoredZeros = Literal["as they are", "minus one", "word minus one"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one module is quantized.

    Attributes:
        bits: 4 or 8.
        group_size: Input channels that share a scale; -1: all of them.
        symmetric: Each zero is the middle of the integers' range, 2^(bits - 1).
        stored_zeros: What the zeros in the file need to become zeros; see `gptq`.
    """

    bits: int
    group_size: int
    symmetric: bool
    stored_zeros: StoredZeros = "as they are"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"{self.bits} bits: 4 and 8 are supported")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"a group size of {self.group_size}: it must be -1 or positive")

    @property
    def middle(self) -> int:
        """The zero of a symmetric matrix."""
        return 1 << (self.bits - 1)

    def num_groups(self, k: int) -> int:
        """Groups that K input channels have in the file; the last may be a smaller one."""
        return 1 if self.group_size == -1 else -(-k // self.group_size)

    def resident_group_size(self, k: int) -> int:
        """Input channels a group of the `GroupedMatrix`: groups of another size are cut into equal ones, scale and
        zero repeated. Raises ValueError: they cannot be."""
        size = k if self.group_size == -1 else self.group_size
        for resident in reversed(GROUP_SIZES):
            if size % resident == 0 and k % resident == 0:
                return resident
        raise ValueError(
            f"groups of {size} of {k} input channels: both must be multiples of {GROUP_SIZES[0]} to be cut into groups "
            f"of {', '.join(map(str, GROUP_SIZES))}"
        )

    def nbytes(self, shape: tuple[int, int], scale_type: str) -> int:
        """What `GroupedMatrix.nbytes` of a matrix (N, K) is, unless its scales leave float16's range.

        scale_type: the stored scales', by safetensors' name ("F16", "BF16", "F32").
        """
        n, k = shape
        scale_bytes = 4 if self.wide(scale_type == "F32") else 2
        return n * k * self.bits // 8 + 2 * n * (k // self.resident_group_size(k)) * scale_bytes

    def wide(self, float32_scales: bool) -> bool:
        """Whether scales and minimums need float32: -scale * zero of an odd zero, or of a full float32, does."""
        return float32_scales or not self.symmetric


@dataclass(frozen=True, slots=True)
class Groups:
    """Which of the file's groups each group of a `GroupedMatrix` comes from.

    Attributes:
        size: Columns a group.
        source: intp [K / size]: the file's group.
        order: As `GroupedMatrix.input_order`.
    """

    size: int
    source: NDArray[np.intp]
    order: NDArray[np.int32] | None


def groups_of(scheme: Scheme, k: int, g_idx: AnyArray | None) -> Groups:
    """The groups of K input channels.

    g_idx: int32 [K], the file's group of each channel (act-order: in any order). Without one, or with one of zeros
    alone (which some writers leave where nothing was reordered), channel i is in group i // group_size.

    Raises ValueError.
    """
    count, size = scheme.num_groups(k), scheme.resident_group_size(k)
    if g_idx is not None:
        expect("g_idx", g_idx, (np.int32, np.int64), (k,))
    if g_idx is None or not g_idx.any():
        return Groups(size, np.arange(0, k, size) // (k if count == 1 else scheme.group_size), None)
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= count:
        raise ValueError(f"g_idx has the group {low if low < 0 else high}: there are {count} groups")
    members = np.bincount(g_idx, minlength=count)
    odd = np.flatnonzero(members % size)
    if odd.size:
        raise ValueError(
            f"g_idx puts {members[odd[0]]} input channels into group {odd[0]}: not a multiple of {size}, as groups of "
            f"{scheme.group_size} should be"
        )
    # Stable, so that channels of one group keep their order, and a file has one resident form.
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    source = g_idx[order[::size]].astype(np.intp)
    in_order = np.array_equal(order, np.arange(k, dtype=np.int32))
    return Groups(size, source, None if in_order else order)


def expect(name: str, array: AnyArray, types: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Check a tensor's type and shape. Raises ValueError."""
    if array.dtype not in [np.dtype(kind) for kind in types]:
        raise ValueError(f"{name} is of {array.dtype}, not {' or '.join(np.dtype(kind).name for kind in types)}")
    if array.shape != shape:
        raise ValueError(f"{name} has the shape {list(array.shape)}, not {list(shape)}")


def expect_matrix(name: str, array: AnyArray, types: tuple[Any, ...]) -> tuple[int, int]:
    """Check that a tensor is a matrix that is not empty; its shape. Raises ValueError."""
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} has the shape {list(array.shape)}: it must be a matrix")
    expect(name, array, types, array.shape)
    return array.shape[0], array.shape[1]


def widened(name: str, array: AnyArray) -> Floats:
    """float16, float32 or (as uint16) bfloat16 to float32, exactly; C-contiguous. Raises ValueError: another type."""
    if array.dtype == np.uint16:
        bits = array.astype(np.uint32, order="C")
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    if array.dtype in (np.float16, np.float32):
        return np.ascontiguousarray(array, np.float32)
    raise ValueError(f"{name} is of {array.dtype}, not float16, bfloat16 or float32")


def floats(name: str, array: AnyArray) -> Floats:
    """As `widened`. Raises ValueError also for what is not a finite number."""
    values = widened(name, array)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} holds something that is not a finite number")
    return values


def bytes_of(words: AnyArray) -> Bytes:
    """int32 [.., n] as its bytes, uint8 [.., 4 n], the lowest first."""
    return np.ascontiguousarray(words, "<i4").view(np.uint8)


def unpack(words: AnyArray, bits: int) -> Bytes:
    """int32 [.., n] to the integers in it, uint8 [.., n * 32 / bits], the lowest bits first."""
    packed = bytes_of(words)
    if bits == 8:
        return packed
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0::2])
    np.right_shift(packed, 4, out=out[..., 1::2])
    return out


_ROWS = 256
"""Output channels that are reordered at a time, so that the unpacked integers take little room."""


def reordered(q: Bytes, bits: int, order: NDArray[np.int32] | None) -> Bytes:
    """The columns of a packed matrix (as `GroupedMatrix.q`) in another order, packed again."""
    if order is None:
        return q
    if bits == 8:
        return np.ascontiguousarray(q[:, order])
    out = np.empty_like(q)
    low, high = order[0::2], order[1::2]
    for start in range(0, len(q), _ROWS):
        # Columns as rows: whole runs of bytes change places then, not single ones.
        packed = np.ascontiguousarray(q[start : start + _ROWS].T)
        integers = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=1).reshape(len(order), -1)
        out[start : start + _ROWS] = (integers[low] | integers[high] << np.uint8(4)).T
    return out


def matrix(
    scheme: Scheme, q: Bytes, scales: Floats, zeros: AnyArray | int, groups: Groups, float32_scales: bool
) -> GroupedMatrix:
    """The matrix w = scale * (q - zero).

    Args:
        scheme: Says bits and dtype.
        q: As `GroupedMatrix.q`, columns in the order of the groups.
        scales: [N, the file's groups].
        zeros: Integers [N, the file's groups], or one for all.
        groups: The file's groups in the matrix's.
        float32_scales: The file's scales are float32.
    """
    # Exact for scales of 16 bits: their 11 bits and a zero's 8 fit float32's 24. The difference is never minus zero.
    with np.errstate(over="ignore"):
        minimums = np.float32(0) - scales * np.asarray(zeros, np.float32)
    if not np.isfinite(minimums).all():
        raise ValueError("a scale times its zero leaves the range of float32")
    if not scheme.wide(float32_scales):
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16), minimums.astype(np.float16)
        if np.array_equal(halves[0], scales) and np.array_equal(halves[1], minimums):
            return _repeated(scheme.bits, q, *halves, groups)
    return _repeated(scheme.bits, q, scales, minimums, groups)


def _repeated(bits: int, q: Bytes, scales: AnyArray, minimums: AnyArray, groups: Groups) -> GroupedMatrix:
    scale, minimum = (np.ascontiguousarray(part[:, groups.source]) for part in (scales, minimums))
    return GroupedMatrix(bits, groups.size, q, scale, minimum, groups.order)
