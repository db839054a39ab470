"""The header of a safetensors file: every length, shape and offset is checked against the file before it is used.

The format (github.com/huggingface/safetensors, "Format"): 8 bytes, the header's length N in little-endian order; N
bytes of JSON, one object from a tensor's name to its dtype, shape and place; then the tensors, one after another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.stage.errors import CheckpointError, shown
from shardline.stage.huggingface.files import parse_object, read_exactly

HEADER_LIMIT = 32 << 20
"""Bytes; 144,000 tensors in one file take about 18 MB."""

MAX_NAME = 512
MAX_DIMENSIONS = 8

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Of an element of each dtype."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: Its name in the file.
        dtype: As the header names it.
        shape: Slowest dimension first.
        offset: Of its first byte, from the start of the file.
        nbytes: Its length; offset + nbytes lies inside the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What precedes the tensors.

    Attributes:
        tensors: By name, in the order in which they lie.
        digest: SHA-256 of the header's bytes and the file's size.
    """

    tensors: Mapping[str, TensorInfo]
    digest: bytes


def read_header(path: Path, descriptor: int, size: int) -> Header:
    """Read and check the header of an open file of that size. Raises CheckpointError."""
    if size < 8:
        raise CheckpointError(path, "header", f"the file has {size} bytes; not a safetensors file")
    start = bytearray(8)
    read_exactly(path, descriptor, memoryview(start), 0, "header")
    length = int.from_bytes(start, "little")
    if length > size - 8:
        raise CheckpointError(
            path, "header", f"a length of {length}, but the file ends at {size}: it is cut, or no safetensors file"
        )
    if length > HEADER_LIMIT:
        raise CheckpointError(path, "header", f"a length of {length}, more than the {HEADER_LIMIT} that are read")
    raw = bytearray(length)
    read_exactly(path, descriptor, memoryview(raw), 8, "header")
    entries = parse_object(path, bytes(raw), "header")
    _check_metadata(path, entries.pop("__metadata__", None))
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    end, previous = 8 + length, "the header"
    for info in tensors:
        if info.offset != end:
            what = "overlaps with" if info.offset < end else f"leaves {info.offset - end} bytes unused after"
            raise CheckpointError(path, f"tensor {shown(info.name)}", f"{what} {shown(previous)}")
        end, previous = info.offset + info.nbytes, info.name
    if end != size:
        raise CheckpointError(path, "file", f"ends at byte {size}, but its tensors at {end}: it is cut, or damaged")
    digest = hashlib.sha256(raw)
    digest.update(size.to_bytes(8, "little"))
    return Header({info.name: info for info in tensors}, digest.digest())


def _check_metadata(path: Path, metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(path, "__metadata__", "is not an object of texts")


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    field = f"tensor {shown(name)}"
    if not 0 < len(name) <= MAX_NAME:
        raise CheckpointError(path, field, f"a name of {len(name)} characters; 1 to {MAX_NAME} are allowed")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(path, field, f"{shown(entry)} is not a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(path, field, f"the dtype {shown(dtype)} is unknown")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(path, field, f"the shape {shown(shape)} is not a list of up to {MAX_DIMENSIONS} counts")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(path, field, f"the data_offsets {shown(offsets)} are not a beginning and an end")
    start, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or bits // 8 != end - start:
        raise CheckpointError(
            path, field, f"{end - start} bytes lie at {shown(offsets)}, but {dtype} {shown(shape)} takes {bits / 8:g}"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + start, end - start)


def _counts(values: Any) -> bool:
    """Whether it is a list of integers from 0 to what a file can hold."""
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 for value in values
    )
