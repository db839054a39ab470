"""A checkpoint without the padding of its vocabulary.

Many models have more rows in their embedding and head than their tokenizer has ids. Such a row stands for no text, and
was never trained; whoever sampled it would get a token that means nothing. So neither is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix
from shardline.stage.checkpoint import Checkpoint
from shardline.stage.spec import ModelSpec


def without_padding(checkpoint: Checkpoint, num_tokens: int) -> Checkpoint:
    """The checkpoint with a vocabulary of its first `num_tokens` ids; with all of them if that is 0."""
    assert 0 <= num_tokens <= checkpoint.spec.vocab_size, (num_tokens, checkpoint.spec.vocab_size)
    if num_tokens in (0, checkpoint.spec.vocab_size):
        return checkpoint
    return _WithoutPadding(checkpoint, num_tokens)


class _WithoutPadding:
    """See `Checkpoint`."""

    path: Path
    spec: ModelSpec

    def __init__(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        self._checkpoint = checkpoint
        self.path = checkpoint.path
        self.spec = replace(checkpoint.spec, vocab_size=num_tokens)

    @property
    def text_folder(self) -> Path | None:
        return self._checkpoint.text_folder

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._checkpoint.metadata

    @property
    def fingerprint(self) -> str:
        return self._checkpoint.fingerprint

    def matrix_bytes(self, role: str, layer: int | None) -> int:
        whole = self._checkpoint.matrix_bytes(role, layer)
        if layer is not None:
            return whole
        return whole // self._checkpoint.spec.vocab_size * self.spec.vocab_size

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> GroupedMatrix:
        whole = self._checkpoint.matrix(role, layer, expert)
        if layer is not None:
            return whole
        count = self.spec.vocab_size
        return replace(whole, q=whole.q[:count], scale=whole.scale[:count], minimum=whole.minimum[:count])

    def vector(self, role: str, layer: int | None) -> NDArray[np.float32]:
        return self._checkpoint.vector(role, layer)

    def close(self) -> None:
        self._checkpoint.close()
