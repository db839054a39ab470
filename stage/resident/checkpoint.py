"""A folder in the resident format as a `Checkpoint`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix
from shardline.stage.errors import CheckpointError, shown
from shardline.stage.huggingface.files import open_file, read_exactly, read_json
from shardline.stage.huggingface.header import TensorInfo, read_header
from shardline.stage.resident import layout
from shardline.stage.resident.layout import MANIFEST, METADATA, SCALE_TYPES, Form
from shardline.stage.resident.manifest import FileRecord, Manifest, read_manifest
from shardline.stage.roles import EXPERT_ROLES, matrix_shapes, vector_shapes
from shardline.stage.spec import ModelSpec

METADATA_LIMIT = 128 << 20
"""Bytes; as much as a GGUF file's header may have."""

_PIECE = 1 << 20


class ResidentCheckpoint:
    """See `Checkpoint`. Opening reads `shardline.json`; a shard is opened when something of its layer is first read,
    and its tensors go as they are into the arrays of a `GroupedMatrix`.

    Raises:
        CheckpointError: a file cannot be read, is damaged or is another than `shardline.json` says.
    """

    path: Path
    spec: ModelSpec

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest, raw = read_manifest(path)
        self._fingerprint = hashlib.sha256(raw).hexdigest()[:16]
        self.spec = self._manifest.spec
        self._metadata: Mapping[str, Any] | None = None
        self._open: dict[int | None, tuple[int, Mapping[str, TensorInfo]]] = {}
        self._closed = False

    @property
    def text_folder(self) -> Path | None:
        """See `Checkpoint`."""
        return None if METADATA in self._manifest.text else self.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """See `Checkpoint`. Of a GGUF file: what its tokenizer and template are built from."""
        if METADATA not in self._manifest.text:
            return {}
        if self._metadata is None:
            self._metadata = read_json(self.path / METADATA, METADATA_LIMIT)[0]
        return self._metadata

    @property
    def fingerprint(self) -> str:
        """See `Checkpoint`. Of `shardline.json`, which has a hash of every file."""
        return self._fingerprint

    @property
    def manifest(self) -> Manifest:
        """What `shardline.json` says."""
        return self._manifest

    def matrix_bytes(self, role: str, layer: int | None) -> int:
        """See `Checkpoint`."""
        role = self._stored_role(role)
        shape = matrix_shapes(self.spec, layer)[role]
        forms = self._manifest.shards[layer].forms[role]
        alike = self.spec.experts.num_experts if self.spec.experts and role in EXPERT_ROLES and len(forms) == 1 else 1
        return alike * sum(form.nbytes(shape) for form in forms)

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> GroupedMatrix:
        """See `Checkpoint`."""
        role = self._stored_role(role)
        assert (expert is not None) == (role in EXPERT_ROLES), (role, expert)
        forms = self._manifest.shards[layer].forms[role]
        form, name, index = forms[0], role, expert or 0
        if expert is not None and len(forms) > 1:
            form, name, index = forms[expert], f"{role}.{expert}", 0
        parts = self._parts(form, name, layer, matrix_shapes(self.spec, layer)[role], index)
        for part in ("scale", "minimum"):
            if not np.isfinite(parts[part]).all():
                raise self._error(layer, f"{name}.{part}", "an element is not a finite number")
        order = parts.get("order")
        if order is not None and not np.array_equal(np.sort(order), np.arange(len(order))):
            raise self._error(layer, f"{name}.order", "does not name every input channel once")
        return GroupedMatrix(form.bits, form.group_size, parts["q"], parts["scale"], parts["minimum"], order)

    def vector(self, role: str, layer: int | None) -> NDArray[np.float32]:
        """See `Checkpoint`."""
        values = self._read(layer, role, "<f4", vector_shapes(self.spec, layer)[role], 0)
        if not np.isfinite(values).all():
            raise self._error(layer, role, "an element is not a finite number")
        return values

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._closed = True
        while self._open:
            os.close(self._open.popitem()[1][0])

    def _stored_role(self, role: str) -> str:
        return "embed" if role == "head" and self.spec.tied_embeddings else role

    def _parts(
        self, form: Form, name: str, layer: int | None, shape: tuple[int, int], index: int
    ) -> dict[str, NDArray[Any]]:
        dtypes = {
            "U8": "u1",
            "I32": "<i4",
            **{kind: f"<f{np.dtype(name).itemsize}" for kind, name in SCALE_TYPES.items()},
        }
        return {
            part: self._read(layer, f"{name}.{part}", dtypes[dtype], part_shape, index)
            for part, (dtype, part_shape) in form.tensors(shape).items()
        }

    def _read(self, layer: int | None, name: str, dtype: str, shape: tuple[int, ...], index: int) -> NDArray[Any]:
        """Entry `index` of a stacked tensor; of one that is not, all of it."""
        descriptor, infos = self._shard(layer)
        out = np.empty(shape, dtype)
        where = infos[name].offset + index * out.nbytes
        path = self.path / layout.file_name(layer)
        if out.nbytes:
            read_exactly(path, descriptor, out.reshape(-1).view(np.uint8).data, where, f"tensor {name}")
        return out

    def _shard(self, layer: int | None) -> tuple[int, Mapping[str, TensorInfo]]:
        found = self._open.get(layer)
        if found is None:
            path = self.path / layout.file_name(layer)
            if self._closed:
                raise CheckpointError(path, "file", "is closed")
            descriptor, size = open_file(path)
            try:
                found = descriptor, self._checked(path, layer, descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
            self._open[layer] = found
        return found

    def _checked(self, path: Path, layer: int | None, descriptor: int, size: int) -> Mapping[str, TensorInfo]:
        shard = self._manifest.shards[layer]
        if size != shard.record.nbytes:
            raise CheckpointError(path, "file", f"has {size} bytes; {MANIFEST} says {shard.record.nbytes}")
        infos = read_header(path, descriptor, size).tensors
        wanted = layout.tensors(self.spec, layer, shard.forms)
        for name, (dtype, shape) in wanted.items():
            info = infos.get(name)
            if info is None:
                raise CheckpointError(path, f"tensor {name}", "is missing")
            if (info.dtype, info.shape) != (dtype, shape):
                found = f"{info.dtype} {list(info.shape)}"
                raise CheckpointError(path, f"tensor {name}", f"is {found}; {MANIFEST} says {dtype} {list(shape)}")
        if len(infos) > len(wanted):
            other = next(name for name in infos if name not in wanted)
            raise CheckpointError(path, f"tensor {shown(other)}", f"is not one that {MANIFEST} knows")
        return infos

    def _error(self, layer: int | None, name: str, problem: str) -> CheckpointError:
        return CheckpointError(self.path / layout.file_name(layer), f"tensor {name}", problem)


def check_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Read every file that a folder's `shardline.json` names, and compare its hash; gives each name and size in bytes
    as it is done. Raises CheckpointError: a file is missing, or another than was written."""
    manifest, _ = read_manifest(folder)
    records = {layout.file_name(layer): shard.record for layer, shard in manifest.shards.items()}
    for name, record in (records | dict(manifest.text)).items():
        found = hash_file(folder / name)
        if found != record:
            raise CheckpointError(
                folder / name,
                "file",
                f"is another than was written ({found.nbytes} bytes, SHA-256 {found.sha256}; {MANIFEST} says "
                f"{record.nbytes}, {record.sha256}): copy it again, or convert the model again",
            )
        yield name, record.nbytes


def hash_file(path: Path) -> FileRecord:
    """A file's size and hash. Raises CheckpointError."""
    descriptor, size = open_file(path)
    try:
        digest = hashlib.sha256()
        for start in range(0, size, _PIECE):
            piece = bytearray(min(_PIECE, size - start))
            read_exactly(path, descriptor, memoryview(piece), start, "file")
            digest.update(piece)
        return FileRecord(size, digest.hexdigest())
    finally:
        os.close(descriptor)
