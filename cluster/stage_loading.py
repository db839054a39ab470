"""Where a stage of the Ray pipeline comes from: a checkpoint on the node's own disk, fetched there if it has a name."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardline.cluster.errors import ModelNotFoundError
from shardline.cluster.hub import HubModel
from shardline.cluster.wire.stage_worker import StageRunner
from shardline.scheduler import SamplingParams
from shardline.scheduler.plan import SequenceRun, SequenceStart, StepPlan
from shardline.stage.spec import StageSpec

if TYPE_CHECKING:
    from shardline.stage import Checkpoint


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
        numeric_class: See `Backend.numeric_class`.
    """

    runner: StageRunner
    identity: ModelIdentity
    device: str
    resident_bytes: Callable[[], int]
    numeric_class: str = ""


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
    """Loads stages from a model file that every node has at the same path."""

    path: Path

    def identity(self) -> ModelIdentity:
        """See `StageLoader`. Raises ModelNotFoundError, CheckpointError."""
        from shardline.stage import open_checkpoint

        if not os.path.exists(self.path):
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
        from shardline.stage import open_checkpoint

        return load_from(open_checkpoint(self.path), spec, None)


@dataclass(frozen=True, slots=True)
class HubLoader:
    """Loads stages from a model of the Hugging Face hub: every node fetches what its own stage reads."""

    model: HubModel

    @property
    def path(self) -> str:
        """For people."""
        return self.model.name

    def identity(self) -> ModelIdentity:
        """See `StageLoader`. A commit is the same everywhere. Raises ModelNotFoundError, CheckpointError."""
        from shardline.cluster.hub import fetch_small
        from shardline.stage.huggingface.config import read_config

        model = read_config(fetch_small(self.model)).spec
        return ModelIdentity(self.model.fingerprint, model.hidden_size, model.vocab_size)

    def fetch(self, spec: StageSpec) -> Path:
        """Have the files that the stage reads on this node's disk. Raises ModelNotFoundError, CheckpointError."""
        from shardline.cluster.hub import fetch_needed

        return fetch_needed(
            self.model, spec.first_layer, spec.end_layer, has_embed=spec.has_embed, has_head=spec.has_head
        )

    def held_bytes(self) -> int:
        """How far `fetch` is: what this node has of the model."""
        from shardline.cluster.hub import held_bytes

        return held_bytes(self.model)

    def load(self, spec: StageSpec) -> LoadedStage:
        """See `StageLoader`. Raises ModelNotFoundError, CheckpointError."""
        from shardline.stage import open_checkpoint

        return load_from(open_checkpoint(self.fetch(spec)), spec, self.model.fingerprint)


def load_from(checkpoint: Checkpoint, spec: StageSpec, fingerprint: str | None) -> LoadedStage:
    """A stage of an open checkpoint, which is closed. fingerprint: The model's; None: the checkpoint's own.

    Raises CheckpointError.
    """
    from shardline.stage import Stage, backend_for

    try:
        model = checkpoint.spec
        identity = ModelIdentity(fingerprint or checkpoint.fingerprint, model.hidden_size, model.vocab_size)
        backend = backend_for(spec)
        try:
            stage = Stage(spec, checkpoint, backend)
            with one_at_a_time():
                warm_up(stage, spec, model.hidden_size)
        except BaseException:
            backend.close()
            raise
    finally:
        checkpoint.close()
    return LoadedStage(stage, identity, backend.name, backend.resident_bytes, backend.numeric_class)


def warm_up(stage: StageRunner, spec: StageSpec, hidden_size: int) -> None:
    """Run a step of each kind, so that what a backend compiles at first use is compiled now: while a stage is being
    loaded nobody takes it to hang, and the first request does not wait for it."""
    rows = min(2, spec.max_step_tokens, spec.max_context)
    hidden = None if spec.has_embed else np.zeros((rows, hidden_size), np.float32)
    drawn = SamplingParams(
        temperature=1.0,
        top_k=8,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=((0, 0.5),),
        logprobs=2,
        seed=0,
    )
    for step_id, params in enumerate((SamplingParams(seed=0), drawn)):
        start = SequenceStart(step_id, params, rows, (0,) * rows, ())
        run = SequenceRun(step_id, 0, (0,) * rows, (0,), samples=True)
        stage.begin(StepPlan(step_id, tuple(range(step_id)), (start,), (run,)), hidden).wait()
    stage.reset()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for every other process of this user on this host that is in here: the stages of one host need the same
    compiled code, and the first makes it for the others."""
    path = Path(tempfile.gettempdir()) / f"shardline-{os.getuid()}.lock"
    # Never through a link that someone else has put there.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def plan_hash(specs: Sequence[StageSpec], identity: ModelIdentity) -> bytes:
    """32 bytes that are equal only where the stages' shares and the model are."""
    return hashlib.sha256(repr((tuple(specs), identity)).encode()).digest()
