"""Where a stage of the Ray pipeline comes from: a checkpoint on the node's own disk."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardline.cluster.errors import ModelNotFoundError
from shardline.cluster.stage_worker import StageRunner
from shardline.stage.spec import StageSpec


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What the engine and every stage must agree on.

    Attributes:
        fingerprint: Of the model file.
        hidden_size: Columns of the hidden states between stages.
        vocab_size: Of the model.
    """

    fingerprint: str
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage in memory, ready to run.

    Attributes:
        runner: The stage.
        identity: Of the file that it was loaded from.
        device: For people: "cpu", "GPU 1".
        resident_bytes: Asks how much it holds now.
    """

    runner: StageRunner
    identity: ModelIdentity
    device: str
    resident_bytes: Callable[[], int]


class StageLoader(Protocol):
    """How a node gets its stage. It is pickled to the stage's process, so it holds names, not data."""

    def identity(self) -> ModelIdentity:
        """Read what identifies the model here, without its weights."""
        ...

    def load(self, spec: StageSpec) -> LoadedStage:
        """Load a stage here."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointLoader:
    """Loads stages from a model file that every node has at the same path, on the CPU."""

    path: Path

    def identity(self) -> ModelIdentity:
        """See `StageLoader`. Raises ModelNotFoundError, CheckpointError."""
        from shardline.stage import open_checkpoint

        if not self.path.is_file():
            raise ModelNotFoundError(
                f"{platform.node()} has no file {self.path}: every node needs the model at the same path"
            )
        checkpoint = open_checkpoint(self.path)
        try:
            return ModelIdentity(checkpoint.fingerprint, checkpoint.spec.hidden_size, checkpoint.spec.vocab_size)
        finally:
            checkpoint.close()

    def load(self, spec: StageSpec) -> LoadedStage:
        """See `StageLoader`. Raises CheckpointError."""
        from shardline.kernels import cpu_backend
        from shardline.stage import Stage, open_checkpoint

        checkpoint = open_checkpoint(self.path)
        try:
            model = checkpoint.spec
            identity = ModelIdentity(checkpoint.fingerprint, model.hidden_size, model.vocab_size)
            backend = cpu_backend(spec.num_threads)
            try:
                stage = Stage(spec, checkpoint, backend)
            except BaseException:
                backend.close()
                raise
        finally:
            checkpoint.close()
        return LoadedStage(stage, identity, backend.name, backend.resident_bytes)


def plan_hash(specs: Sequence[StageSpec], identity: ModelIdentity) -> bytes:
    """32 bytes that are equal only where the stages' shares and the model are."""
    return hashlib.sha256(repr((tuple(specs), identity)).encode()).digest()
