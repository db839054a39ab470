"""The header of a GGUF file, read with every length, count and offset checked against the file before it is used.

The constants (value types, tensor types, block sizes) are the `gguf` package's. Its reader is not used: it trusts what
it reads, so that a damaged file can make it allocate without bound, loop, or hand out arrays of the wrong length.

Nothing here allocates or loops by a number from the file that was not first compared with the bytes that remain, and a
header may not be longer than `HEADER_LIMIT` at all (a file may be sparse, and so as long as it likes).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from shardline.stage.errors import CheckpointError, shown

HEADER_LIMIT = 128 << 20
"""Bytes; vocabularies of a quarter of a million tokens with their merges take about 16 MB."""

MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 255
MAX_ARRAY_DEPTH = 3
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

_READ_AHEAD = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_SCALARS: dict[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("<u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}

# The fewest bytes that one key with its value, one tensor's description and one element of an array can take.
_MIN_PAIR = 8 + 4 + 1
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8
_MIN_ELEMENT = {
    **{kind: dtype.itemsize for kind, dtype in _SCALARS.items()},
    GGUFValueType.STRING: 8,
    GGUFValueType.ARRAY: 12,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: Its name in the file.
        shape: Slowest dimension first, as NumPy has it (the file has it the other way round).
        kind: How its elements are stored.
        offset: Of its first byte, from the start of the file.
        nbytes: Its length; offset + nbytes lies inside the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What precedes the tensors.

    Attributes:
        metadata: Key-value pairs, arrays as lists.
        tensors: By name, in the file's order; no two overlap.
        digest: SHA-256 of the header's bytes and the file's size.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    digest: bytes


class _ProblemError(Exception):
    """What is wrong at the cursor; the caller knows which field it was reading."""


class _Cursor:
    """Reads a file's leading bytes as they are needed, and nothing past its end or the header's limit."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._limit = min(size, HEADER_LIMIT)
        self._data = bytearray()
        self.position = 0

    @property
    def remaining(self) -> int:
        return self._limit - self.position

    def _need(self, count: int) -> None:
        """Have `count` bytes from the position on in memory."""
        end = self.position + count
        if end > self._limit:
            if self._size > self._limit:
                raise _ProblemError(f"the header goes on past {HEADER_LIMIT} bytes, the most that is read")
            raise _ProblemError(f"needs {count} bytes at {self.position}, but the file ends at {self._size}")
        while len(self._data) < end:
            wanted = min(max(end - len(self._data), _READ_AHEAD), self._limit - len(self._data))
            piece = os.pread(self._descriptor, wanted, len(self._data))
            if not piece:
                raise _ProblemError(f"the file became shorter while it was read: it ends at {len(self._data)}")
            self._data += piece

    def take(self, count: int) -> bytes:
        self._need(count)
        start = self.position
        self.position = start + count
        return bytes(self._data[start : self.position])

    def u32(self) -> int:
        self._need(4)
        value: int = _U32.unpack_from(self._data, self.position)[0]
        self.position += 4
        return value

    def u64(self) -> int:
        self._need(8)
        value: int = _U64.unpack_from(self._data, self.position)[0]
        self.position += 8
        return value

    def count(self, what: str, smallest: int) -> int:
        """A number of things of at least `smallest` bytes that are to follow."""
        value = self.u64()
        if value > self.remaining // smallest:
            raise _ProblemError(f"{value} {what} cannot fit in the {self.remaining} bytes that are left")
        return value

    def string(self, most: int = HEADER_LIMIT) -> str:
        length = self.u64()
        start = self.position
        if length > most:
            raise _ProblemError(f"a text of {length} bytes; at most {most} are allowed")
        self._need(length)
        self.position = start + length
        try:
            return self._data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise _ProblemError(f"a text that is not UTF-8 (byte {error.start} of {length})") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise _ProblemError(f"value type {kind} is unknown")
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        if depth == MAX_ARRAY_DEPTH:
            raise _ProblemError(f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        kind = self.u32()
        if kind not in _MIN_ELEMENT:
            raise _ProblemError(f"element type {kind} is unknown")
        count = self.count("elements", _MIN_ELEMENT[kind])
        if kind in _SCALARS:
            return self._numbers(kind, count)
        values = []
        for index in range(count):
            try:
                values.append(self.value(kind, depth + 1))
            except _ProblemError as problem:
                raise _ProblemError(f"element {index} of {count}: {problem}") from None
        return values

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = _SCALARS[kind]
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == GGUFValueType.BOOL:
            if (values > 1).any():
                raise _ProblemError(f"a truth value of {values.max()}")
            values = values.astype(bool)
        numbers: list[Any] = values.tolist()
        return numbers

    def digest(self) -> bytes:
        digest = hashlib.sha256(self._data[: self.position])
        digest.update(_U64.pack(self._size))
        return digest.digest()


def read_header(path: Path, descriptor: int, size: int) -> GgufHeader:
    """Read and check the header of an open file of that size. Raises CheckpointError."""
    cursor = _Cursor(descriptor, size)
    field = "magic"
    try:
        magic = cursor.take(4)
        if magic != b"GGUF":
            raise _ProblemError(f"not a GGUF file: it begins with {magic!r}")
        field = "version"
        version = cursor.u32()
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (2, 3):
                raise _ProblemError("a big-endian GGUF file; only little-endian ones are supported")
            raise _ProblemError(f"GGUF version {version} is not supported; 2 and 3 are")
        field = "tensor_count"
        num_tensors = cursor.count("tensors", _MIN_TENSOR)
        field = "metadata_kv_count"
        num_pairs = cursor.count("keys", _MIN_PAIR)

        metadata: dict[str, Any] = {}
        for index in range(num_pairs):
            field = f"metadata key {index + 1} of {num_pairs}"
            key = cursor.string(MAX_KEY_BYTES)
            field = shown(key)
            if key in metadata:
                raise _ProblemError("the key occurs twice")
            kind = cursor.u32()
            if key == "general.alignment" and kind != GGUFValueType.UINT32:
                raise _ProblemError(f"has value type {kind}, not {GGUFValueType.UINT32:d} (UINT32)")
            metadata[key] = cursor.value(kind)

        field = "general.alignment"
        alignment: int = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise _ProblemError(f"{alignment} is not a power of two from 1 to {MAX_ALIGNMENT}")

        tensors: dict[str, TensorInfo] = {}
        for index in range(num_tensors):
            field = f"tensor {index + 1} of {num_tensors}"
            name = cursor.string(MAX_NAME_BYTES)
            field = f"tensor {shown(name)}"
            if name in tensors:
                raise _ProblemError("the name occurs twice")
            tensors[name] = _tensor(cursor, name, alignment)

        data_start = -(-cursor.position // alignment) * alignment
        placed = {
            name: TensorInfo(name, info.shape, info.kind, data_start + info.offset, info.nbytes)
            for name, info in tensors.items()
        }
        previous = None
        for info in sorted(placed.values(), key=lambda info: info.offset):
            field = f"tensor {shown(info.name)}"
            if info.offset + info.nbytes > size:
                raise _ProblemError(f"ends at byte {info.offset + info.nbytes}, but the file ends at {size}")
            if previous is not None and info.offset < previous.offset + previous.nbytes:
                raise _ProblemError(f"overlaps with tensor {shown(previous.name)}")
            previous = info
    except _ProblemError as problem:
        raise CheckpointError(path, field, str(problem)) from None
    except OSError as error:
        raise CheckpointError(path, field, f"cannot be read: {error.strerror}") from error
    return GgufHeader(metadata, placed, cursor.digest())


def _tensor(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """One tensor's description, its offset still counted from the start of the data."""
    num_dimensions = cursor.u32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise _ProblemError(f"{num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    dimensions = [cursor.u64() for _ in range(num_dimensions)]
    kind = cursor.u32()
    offset = cursor.u64()
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise _ProblemError(f"tensor type {kind} is unknown") from None
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    elements = 1
    for dimension in dimensions:
        elements *= dimension
    if not 1 <= elements < 1 << 63:
        raise _ProblemError(f"has dimensions {dimensions}")
    if dimensions[0] % block_size:
        raise _ProblemError(
            f"has rows of {dimensions[0]} elements, not a multiple of the {block_size} of a {quantization.name} block"
        )
    if offset % alignment:
        raise _ProblemError(f"its offset {offset} is not a multiple of the alignment {alignment}")
    return TensorInfo(name, tuple(reversed(dimensions)), quantization, offset, elements // block_size * block_bytes)
