"""A GGUF file, or several parts of one model, as a `Checkpoint`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix
from shardline.stage.errors import CheckpointError, shown
from shardline.stage.gguf.architectures import read_model
from shardline.stage.gguf.blocks import assemble, format_of, rounding, to_float32
from shardline.stage.gguf.header import TensorInfo
from shardline.stage.gguf.keys import UnsupportedError
from shardline.stage.gguf.parts import GgufParts
from shardline.stage.gguf.tensors import Source
from shardline.stage.spec import ModelSpec

_logger = logging.getLogger(__name__)

# Bytes from the middle of each tensor that its file's fingerprint depends on.
_SAMPLE = 1 << 10


class GgufCheckpoint:
    """See `Checkpoint`. The path may be any part's of a model in several.

    Raises:
        CheckpointError: a file cannot be read, is damaged, or holds what is not supported.
    """

    path: Path
    spec: ModelSpec

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: set[str] = set()
        self._fingerprint: str | None = None
        self._parts = GgufParts(path)
        try:
            try:
                model = read_model(self._parts.metadata, self._parts.tensors, self._floats)
            except UnsupportedError as error:
                raise CheckpointError(path, error.field, error.problem) from None
        except BaseException:
            self.close()
            raise
        self.spec, self._sources = model.spec, model.sources

    @property
    def text_folder(self) -> Path | None:
        """See `Checkpoint`."""
        return None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """See `Checkpoint`."""
        return self._parts.metadata

    @property
    def fingerprint(self) -> str:
        """See `Checkpoint`. Read at the first use, while the file is open."""
        if self._fingerprint is None:
            digest = hashlib.sha256(b"".join(file.header.digest for file in self._parts.files))
            for info in self._parts.tensors.values():
                sample = np.empty(min(_SAMPLE, info.nbytes), np.uint8)
                self._parts.file_of(info).read(info, sample, (info.nbytes - len(sample)) // 2)
                digest.update(sample.data)
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def matrix_bytes(self, role: str, layer: int | None) -> int:
        """See `Checkpoint`."""
        source = self._source(role, layer)
        infos = source.tensors
        rows = source.rows * (infos[0].shape[0] if source.stride else 1)
        return sum(format_of(info.kind).nbytes((rows, info.shape[-1])) for info in infos)

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> GroupedMatrix:
        """See `Checkpoint`. A type that is rounded as it is read is told of once, in a warning."""
        source = self._source(role, layer)
        info, first = source.of(expert)
        how = rounding(info.kind)
        if how is not None and how not in self._told:
            self._told.add(how)
            _logger.warning(
                "%s: %s and maybe other matrices are %s; they are %s as they are read, so the model is not exactly the "
                "file's",
                self.path,
                info.name,
                info.kind.name,
                how,
            )
        try:
            return assemble(self._rows(info, first, source.rows), info.kind, (source.rows, info.shape[-1]))
        except ValueError as error:
            raise self._error(info, str(error)) from None

    def vector(self, role: str, layer: int | None) -> NDArray[np.float32]:
        """See `Checkpoint`."""
        source = self._source(role, layer)
        info, first = source.of(None)
        return self._floats(info)[first : first + source.rows]

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._parts.close()

    def _source(self, role: str, layer: int | None) -> Source:
        if role == "head" and self.spec.tied_embeddings:
            role = "embed"
        return self._sources[role, layer]

    def _floats(self, info: TensorInfo) -> NDArray[np.float32]:
        rows = 1
        for size in info.shape[:-1]:
            rows *= size
        values = to_float32(np.concatenate(list(self._rows(info, 0, rows))), info.kind).reshape(info.shape)
        if not np.isfinite(values).all():
            raise self._error(info, "an element is not a finite number")
        return values

    def _rows(self, info: TensorInfo, first: int, count: int) -> Iterator[NDArray[np.uint8]]:
        return self._parts.file_of(info).rows(info, first, count)

    def _error(self, info: TensorInfo, problem: str) -> CheckpointError:
        return CheckpointError(self._parts.file_of(info).path, f"tensor {shown(info.name)}", problem)
