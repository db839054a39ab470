"""One GGUF file: opened, its header checked, its tensors read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardline.stage.errors import CheckpointError, shown
from shardline.stage.gguf.header import TensorInfo, read_header

# Bytes of a tensor that are unpacked at a time: they and what comes of them stay in a core's cache.
_PIECE = 1 << 18


class GgufFile:
    """Tensors are read, not mapped: a file that is cut while in use is an error, not a SIGBUS.

    Attributes:
        path: The file.
        header: What precedes the tensors.

    Raises:
        CheckpointError: the file cannot be read or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
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
            self.header = read_header(path, self._descriptor, status.st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def rows(self, info: TensorInfo, first: int, count: int) -> Iterator[NDArray[np.uint8]]:
        """The bytes of some rows of a tensor, uint8 [rows, bytes a row], some at a time.

        A row is its fastest dimension; rows first <= i < first + count of the others, as one run.
        """
        row_bytes = info.nbytes * info.shape[-1] // _elements(info)
        step = max(1, _PIECE // row_bytes)
        for start in range(first, first + count, step):
            piece = np.empty((min(step, first + count - start), row_bytes), np.uint8)
            self.read(info, piece, start * row_bytes)
            yield piece

    def read(self, info: TensorInfo, piece: NDArray[np.uint8], offset: int) -> None:
        """Fill `piece` with a tensor's bytes from `offset` on."""
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


def _elements(info: TensorInfo) -> int:
    elements = 1
    for size in info.shape:
        elements *= size
    return elements
