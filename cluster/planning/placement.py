"""What the planner takes and gives: plain data.

Devices are data: a share of a host's cores and memory, or a GPU. Stages whose devices have the same `compute` take
turns on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardline.stage import StageSpec
from shardline.stage.workspace import PLAIN_FILE, FileTraits


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes that each part of a model takes once it is resident.

    Attributes:
        layers: One number a layer.
        embed, head: The embedding matrix, and the head with the final norm. A tied matrix counts as both; a stage that
            has both holds it once.
        tied: Whether they are one matrix.
        experts: How much of each layer are its experts; empty without them.
        traits: What else of the file decides what a stage on a GPU keeps.
    """

    layers: tuple[int, ...]
    embed: int
    head: int
    tied: bool
    experts: tuple[int, ...] = ()
    traits: FileTraits = PLAIN_FILE

    def of(self, first: int, end: int, *, embed: bool, head: bool) -> int:
        """Bytes of a stage with these parts."""
        ends = max(self.embed, self.head) if embed and head and self.tied else self.embed * embed + self.head * head
        return sum(self.layers[first:end]) + ends

    @property
    def total(self) -> int:
        """Bytes of the whole model on one device."""
        return self.of(0, len(self.layers), embed=True, head=True)


@dataclass(frozen=True, slots=True)
class Device:
    """What a stage may be placed on.

    Attributes:
        name: For people, unique: "node-a cpu", "node-b GPU 1".
        node: Its host.
        free_bytes: What a stage there may take: weights, workspace and KV pool.
        bytes_per_second: At which a step streams its weights.
        flops_per_second: Of the rows' arithmetic; None when it is not known, and arithmetic then costs nothing.
        threads: CPU threads of a stage there.
        compute: What does the work; devices with the same `compute` take turns. None: the device has its own.
        step_seconds: Fixed cost of one step there: launches and the hop to the next stage.
        layer_seconds, experts_seconds: Fixed cost of each layer, and of one with experts besides.
        numeric_class: Devices of one class give the same bits.
        backend: What computes there: see `StageSpec.device`.
        gpu: The PCI address of its GPU; None: it is none, or nobody needs to find it.
        memory_limit: See `StageSpec.memory_bytes`.
        arch, processors: Its GPU's, 86 for sm_86: they decide what products and attention keep; 0 for a CPU.
    """

    name: str
    node: str
    free_bytes: int
    bytes_per_second: float
    flops_per_second: float | None = None
    threads: int = 1
    compute: str | None = None
    step_seconds: float = 0.0
    layer_seconds: float = 0.0
    experts_seconds: float = 0.0
    numeric_class: str = "cpu"
    backend: str = "cpu"
    gpu: str | None = None
    memory_limit: int | None = None
    arch: int = 0
    processors: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the pipeline is for.

    Attributes:
        context: Tokens of the longest sequence that must fit; None takes the model's own limit, or what fits.
        concurrency: Sequences of that length at once that should fit: the pool's size.
        block_size: Tokens a block.
        kv_dtype: "float16", "float32" or "int8".
        max_step_tokens: The most rows of one step.
        max_sequences: The most sequences at once.
        stages: How many stages; None takes the number that serves best.
        split: Layers of each stage, to force it: (10, 12, 8).
        fill_memory: Give all the memory that is left to the pool, not only what `concurrency` needs.
    """

    context: int | None = None
    concurrency: int = 8
    block_size: int = 16
    kv_dtype: str = "float16"
    max_step_tokens: int = 512
    max_sequences: int = 64
    stages: int | None = None
    split: tuple[int, ...] | None = None
    fill_memory: bool = False


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage as planned.

    Attributes:
        spec: Its share.
        device: Where.
        weight_bytes, workspace_bytes, kv_bytes: What it will take.
        capacity_blocks: Blocks that its own memory holds; None when it has no layer and so no pool.
        step_seconds: Predicted time of one step of one microbatch.
    """

    spec: StageSpec
    device: Device
    weight_bytes: int
    workspace_bytes: int
    kv_bytes: int
    capacity_blocks: int | None
    step_seconds: float

    @property
    def total_bytes(self) -> int:
        """All that it takes of its device."""
        return self.weight_bytes + self.workspace_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A pipeline as planned.

    Attributes:
        stages: In order.
        context: Tokens of the longest sequence.
        concurrency: Sequences of that length that fit at once.
        max_context: The longest sequence that one request alone could have.
        microbatch_rows: Sequences in one microbatch when `Wanted.concurrency` sequences decode.
        tokens_per_second: Predicted decode rate of all of them together.
        single_tokens_per_second: Predicted decode rate of one sequence alone.
        memory_bound_by: Index of the stage whose memory limits the pool.
        speed_bound_by: Index of the slowest stage.
        depth, min_microbatch, ahead: For the scheduler: see `SchedulerConfig`.
        notes: What the user should know, for people.
    """

    stages: tuple[StagePlan, ...]
    context: int
    concurrency: int
    max_context: int
    microbatch_rows: int
    tokens_per_second: float
    single_tokens_per_second: float
    memory_bound_by: int
    speed_bound_by: int
    depth: int
    min_microbatch: int
    ahead: bool
    notes: tuple[str, ...]

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        """The stages' shares."""
        return tuple(stage.spec for stage in self.stages)

    @property
    def num_blocks(self) -> int:
        """Blocks of every stage's pool."""
        return self.stages[0].spec.num_blocks
