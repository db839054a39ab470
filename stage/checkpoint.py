"""A checkpoint: one model file seen as named roles, whatever the file calls its tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix
from shardline.stage.errors import CheckpointError
from shardline.stage.spec import ModelSpec


class Checkpoint(Protocol):
    """An open model file or folder. Opening reads headers only; `matrix` and `vector` read one tensor each.

    `roles` lists the roles of a layer's tensors, and their shapes.
    """

    path: Path
    spec: ModelSpec

    @property
    def text_folder(self) -> Path | None:
        """The folder with the tokenizer's files; None when `metadata` has the tokenizer."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's key-value pairs, arrays as lists: what the tokenizer is built from."""
        ...

    @property
    def fingerprint(self) -> str:
        """A short hash of the header, the file's size and a sample of every tensor: equal on every host that has the
        same file, another for another training of the same model. Damage outside the samples it does not show."""
        ...

    def matrix_bytes(self, role: str, layer: int | None) -> int:
        """What `GroupedMatrix.nbytes` of that matrix will be, from the header alone; in an expert role, of all."""
        ...

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> GroupedMatrix:
        """One matrix, mapped exactly. "head" gives the embedding matrix when they are tied. `expert`: for an expert
        role, which one."""
        ...

    def vector(self, role: str, layer: int | None) -> NDArray[np.float32]:
        """One float tensor, float32, in the shape that `roles.vector_shapes` says."""
        ...

    def close(self) -> None:
        """Unmap the file."""
        ...


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder or one that `shardline convert` wrote, and check what it says of itself.

    Raises CheckpointError.
    """
    path = Path(path)
    if path.is_dir():
        if os.path.lexists(path / "shardline.json"):
            from shardline.stage.resident.checkpoint import ResidentCheckpoint

            return ResidentCheckpoint(path)
        from shardline.stage.huggingface.checkpoint import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    if path.name in ("config.json", "shardline.json") or path.name.endswith(
        (".safetensors", ".safetensors.index.json")
    ):
        raise CheckpointError(path, "file", "is one of several that make a model: give the folder that they are in")
    from shardline.stage.gguf.checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)
