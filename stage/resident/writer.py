"""Writing a folder in the resident format, one tensor in flight."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix
from shardline.stage.checkpoint import Checkpoint
from shardline.stage.huggingface.header import BITS, HEADER_LIMIT
from shardline.stage.resident import layout
from shardline.stage.resident.checkpoint import hash_file
from shardline.stage.resident.layout import Form
from shardline.stage.resident.manifest import Shard
from shardline.stage.roles import EXPERT_ROLES, matrix_shapes, vector_shapes
from shardline.stage.spec import ModelSpec

# What one tensor's entry in a header takes at most, with room to spare.
_ENTRY_BYTES = 256
_PAGE = 4096


def write_shard(folder: Path, checkpoint: Checkpoint, layer: int | None) -> Shard:
    """Write one layer's file, or that of the embedding, the head and the final norm.

    Besides what the reader needs, one matrix is in memory at a time: of experts, one expert's. Raises CheckpointError,
    OSError.
    """
    spec = checkpoint.spec
    path = folder / layout.file_name(layer)
    with _File(path, _header_bytes(spec, layer)) as file:
        forms = {}
        for role in matrix_shapes(spec, layer):
            if role in EXPERT_ROLES:
                assert spec.experts is not None
                forms[role] = _write_experts(file, checkpoint, role, layer, spec.experts.num_experts)
            else:
                forms[role] = (_write_matrix(file, role, checkpoint.matrix(role, layer)),)
        for role in vector_shapes(spec, layer):
            values = checkpoint.vector(role, layer)
            file.write(file.tensor(role, "F32", values.shape), values)
        file.finish()
    return Shard(hash_file(path), forms)


def shard_bytes(checkpoint: Checkpoint, layer: int | None) -> int:
    """About what that file will take: without orders of columns, and if no scale needs a wider type than foreseen."""
    spec = checkpoint.spec
    matrices = sum(checkpoint.matrix_bytes(role, layer) for role in matrix_shapes(spec, layer))
    vectors = 4 * sum(math.prod(shape) for shape in vector_shapes(spec, layer).values())
    return matrices + vectors + _header_bytes(spec, layer)


def _header_bytes(spec: ModelSpec, layer: int | None) -> int:
    """Room for the header, which is known last and lies first."""
    matrices = matrix_shapes(spec, layer)
    count = len(matrices) + len(vector_shapes(spec, layer))
    if spec.experts is not None:
        count += spec.experts.num_experts * sum(role in EXPERT_ROLES for role in matrices)
    room = -(-(4 * count * _ENTRY_BYTES + 8) // _PAGE) * _PAGE
    assert room <= HEADER_LIMIT, room
    return room


def _write_matrix(file: _File, name: str, matrix: GroupedMatrix) -> Form:
    form = Form.of(matrix)
    for part, (dtype, shape) in form.tensors(matrix.shape).items():
        file.write(file.tensor(f"{name}.{part}", dtype, shape), _part(matrix, part))
    return form


def _write_experts(file: _File, checkpoint: Checkpoint, role: str, layer: int | None, count: int) -> tuple[Form, ...]:
    start = file.end
    form: Form | None = None
    places: dict[str, int] = {}
    for expert in range(count):
        matrix = checkpoint.matrix(role, layer, expert)
        if form is None:
            form = Form.of(matrix)
            places = {
                part: file.tensor(f"{role}.{part}", dtype, (count, *shape))
                for part, (dtype, shape) in form.tensors(matrix.shape).items()
            }
        elif Form.of(matrix) != form:
            file.forget(start)
            return tuple(
                _write_matrix(file, f"{role}.{each}", checkpoint.matrix(role, layer, each)) for each in range(count)
            )
        for part, place in places.items():
            values = _part(matrix, part)
            file.write(place + expert * values.nbytes, values)
    assert form is not None
    return (form,)


def _part(matrix: GroupedMatrix, part: str) -> NDArray[Any]:
    values = {"q": matrix.q, "scale": matrix.scale, "minimum": matrix.minimum, "order": matrix.input_order}[part]
    assert values is not None
    return values


class _File:
    """A safetensors file whose header is written last, into room that was left for it."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._header_bytes = header_bytes
        self._entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self.end = header_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Take the next bytes of the file for a tensor; returns where they begin."""
        start = self.end
        self.end += math.prod(shape) * BITS[dtype] // 8
        self._entries[name] = dtype, shape, start, self.end
        return start

    def write(self, place: int, values: NDArray[Any]) -> None:
        """Put an array's bytes there."""
        little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        view = little.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], place + done)

    def forget(self, start: int) -> None:
        """Drop the tensors from that place on."""
        self._entries = {name: entry for name, entry in self._entries.items() if entry[2] < start}
        self.end = start
        os.ftruncate(self._descriptor, start)

    def finish(self) -> None:
        """Write the header, and have all of the file on the disk."""
        data = {
            name: {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [start - self._header_bytes, end - self._header_bytes],
            }
            for name, (dtype, shape, start, end) in self._entries.items()
        }
        text = json.dumps(data, separators=(",", ":")).encode()
        length = self._header_bytes - 8
        assert len(text) <= length, (len(text), length)
        self.write(0, np.frombuffer(length.to_bytes(8, "little") + text.ljust(length), np.uint8))
        os.fsync(self._descriptor)
