"""Files of a folder that a stranger made: opened without waiting, JSON read within bounds."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from shardline.stage.errors import CheckpointError, shown

MAX_JSON_PARTS = 1 << 21
"""Of one JSON text: its commas, colons and opening brackets. A model of 36,000 matrices in four tensors each has 1.5
million in its index; and what Python makes of so many stays below half a gigabyte."""


def open_file(path: Path) -> tuple[int, int]:
    """A descriptor and the size of a regular file. Raises CheckpointError."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise CheckpointError(path, "file", f"cannot be opened: {_reason(error)}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(path, "file", "is not a regular file")
    return descriptor, status.st_size


def read_exactly(path: Path, descriptor: int, into: memoryview, offset: int, field: str) -> None:
    """Fill `into` from that offset of the file. Raises CheckpointError."""
    done = 0
    while done < len(into):
        try:
            count = os.preadv(descriptor, [into[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(path, field, f"cannot be read: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(path, field, "the file became shorter since it was opened")
        done += count


def read_json(path: Path, most: int) -> tuple[dict[str, Any], bytes]:
    """A file with one JSON object of at most that many bytes: the object, and the bytes. Raises CheckpointError."""
    descriptor, size = open_file(path)
    try:
        if size > most:
            raise CheckpointError(path, "file", f"has {size} bytes, more than the {most} that are read")
        raw = bytearray(size)
        read_exactly(path, descriptor, memoryview(raw), 0, "file")
    finally:
        os.close(descriptor)
    return parse_object(path, bytes(raw), "file"), bytes(raw)


def parse_object(path: Path, raw: bytes, field: str) -> dict[str, Any]:
    """The JSON object that a text holds. Raises CheckpointError: it is none, or a key occurs twice in an object."""
    parts = sum(raw.count(mark) for mark in (b",", b":", b"[", b"{"))
    if parts > MAX_JSON_PARTS:
        raise CheckpointError(path, field, f"its JSON has {parts} parts, more than the {MAX_JSON_PARTS} that are read")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, field, f"is no JSON that can be read: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, field, f"holds {shown(value)}, not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise ValueError(f"the key {shown(key)} occurs twice")
            keys.add(key)
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return shown(getattr(error, "strerror", None) or str(error), 200)
