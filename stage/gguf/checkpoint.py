"""A GGUF file as a `Checkpoint`."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix
from shardline.stage.errors import CheckpointError, shown
from shardline.stage.gguf.architectures import UnsupportedError, read_spec, tensor_name
from shardline.stage.gguf.blocks import FLOAT_TYPES, assemble, format_of, to_float32
from shardline.stage.gguf.header import TensorInfo, read_header
from shardline.stage.spec import ModelSpec

_logger = logging.getLogger(__name__)

# Bytes of a tensor that are unpacked at a time: they and what comes of them stay in a core's cache.
_PIECE = 1 << 18

# Bytes from the middle of each tensor that its file's fingerprint depends on.
_SAMPLE = 1 << 10


class GgufCheckpoint:
    """See `Checkpoint`. Tensors are read, not mapped: a file that is cut while in use is an error, not a SIGBUS.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or holds what is not supported.
    """

    path: Path
    spec: ModelSpec

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._told_of_floats = False
        self._fingerprint: str | None = None
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._descriptor)
        except OSError as error:
            self.close()
            raise CheckpointError(path, "file", f"cannot be opened: {error.strerror}") from error
        try:
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(path, "file", "is not a regular file")
            self._header = read_header(path, self._descriptor, status.st_size)
            try:
                self.spec = read_spec(self._header.metadata, self._header.tensors, self._floats)
            except UnsupportedError as error:
                raise CheckpointError(path, error.field, error.problem) from None
        except BaseException:
            self.close()
            raise

    @property
    def text_folder(self) -> Path | None:
        """See `Checkpoint`."""
        return None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """See `Checkpoint`."""
        return self._header.metadata

    @property
    def fingerprint(self) -> str:
        """See `Checkpoint`. Read at the first use, while the file is open."""
        if self._fingerprint is None:
            digest = hashlib.sha256(self._header.digest)
            for info in self._header.tensors.values():
                sample = np.empty(min(_SAMPLE, info.nbytes), np.uint8)
                self._read(info, sample, (info.nbytes - len(sample)) // 2)
                digest.update(sample.data)
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def matrix_bytes(self, role: str, layer: int | None) -> int:
        """See `Checkpoint`."""
        info = self._info(role, layer)
        n, k = info.shape
        return format_of(info.kind).nbytes((n, k))

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> GroupedMatrix:
        """See `Checkpoint`. Matrices of float types are quantized to 8 bits, with a warning."""
        assert expert is None, expert
        info = self._info(role, layer)
        if info.kind in FLOAT_TYPES and not self._told_of_floats:
            self._told_of_floats = True
            _logger.warning(
                "%s: %s and maybe other matrices are %s; they are quantized to 8 bits in groups of 32 as they are "
                "read, so the model is not exactly the file's",
                self.path,
                info.name,
                info.kind.name,
            )
        n, k = info.shape
        try:
            return assemble(self._pieces(info), info.kind, (n, k))
        except ValueError as error:
            raise CheckpointError(self.path, f"tensor {shown(info.name)}", str(error)) from None

    def vector(self, role: str, layer: int | None) -> NDArray[np.float32]:
        """See `Checkpoint`."""
        return self._floats(self._info(role, layer))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _floats(self, info: TensorInfo) -> NDArray[np.float32]:
        values = to_float32(np.concatenate(list(self._pieces(info))), info.kind).reshape(info.shape)
        if not np.isfinite(values).all():
            raise CheckpointError(self.path, f"tensor {shown(info.name)}", "an element is not a finite number")
        return values

    def _info(self, role: str, layer: int | None) -> TensorInfo:
        if role == "head" and self.spec.tied_embeddings:
            role = "embed"
        return self._header.tensors[tensor_name(role, layer)]

    def _pieces(self, info: TensorInfo) -> Iterator[NDArray[np.uint8]]:
        """A tensor's bytes, uint8 [rows, bytes a row], some rows at a time."""
        rows = info.shape[0] if len(info.shape) == 2 else 1
        row_bytes = info.nbytes // rows
        step = max(1, _PIECE // row_bytes)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            piece = np.empty((count, row_bytes), np.uint8)
            self._read(info, piece, start * row_bytes)
            yield piece

    def _read(self, info: TensorInfo, piece: NDArray[np.uint8], offset: int) -> None:
        if self._descriptor is None:
            raise CheckpointError(self.path, f"tensor {shown(info.name)}", "the file is closed")
        view = piece.data.cast("B")
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], info.offset + offset + done)
            except OSError as error:
                raise CheckpointError(
                    self.path, f"tensor {shown(info.name)}", f"cannot be read: {error.strerror}"
                ) from error
            if count == 0:
                raise CheckpointError(
                    self.path, f"tensor {shown(info.name)}", "the file became shorter since it was opened"
                )
            done += count
