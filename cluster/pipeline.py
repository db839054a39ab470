"""The pipeline as the engine sees it: plans go in, results come out, in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardline.scheduler import StepPlan, StepResult
from shardline.stage import StageSpec


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage's figures, counted since it was created.

    Attributes:
        spec: Its share.
        where: Host and device, for people: "node-a cpu", "node-b GPU 1".
        pid: Its process.
        resident_bytes: Weights and KV pool on its device.
        steps, rows: Steps run and rows in them.
        busy_seconds: Time in which a step was begun and not finished; steps that overlap count once.
        wall_seconds: Time since its first step.
        send_seconds, receive_seconds: Time its data threads spent moving frames (not waiting for them).
        numeric_class: Stages of one class compute the same bits; see `Backend.numeric_class`.
    """

    spec: StageSpec
    where: str
    pid: int
    resident_bytes: int
    steps: int
    rows: int
    busy_seconds: float
    wall_seconds: float
    send_seconds: float = 0.0
    receive_seconds: float = 0.0
    numeric_class: str = ""


class Pipeline(Protocol):
    """Stages in a row. One engine owns it and calls it from one event loop."""

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        """The stages' shares, in order."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        ...

    async def start(self) -> None:
        """Create the stages, load their weights and connect them. Raises what keeps a stage from loading, and
        StageLostError with the worker's own words when its process fails."""
        ...

    async def submit(self, plan: StepPlan) -> None:
        """Send a plan on its way. Raises StageLostError."""
        ...

    async def result(self) -> StepResult:
        """The result of the oldest plan that has none yet; waits for a plan too. Raises StageLostError as soon as a
        stage is lost, whether it has anything to do or not; never waits for ever on a dead stage."""
        ...

    async def recover(self) -> None:
        """After StageLostError: re-create what was lost, keep what was not. Plans in flight are gone and the stages
        know no sequence afterwards. Raises StageLostError when that fails too, and EngineDeadError when it always
        would."""
        ...

    async def stats(self) -> list[StageStats]:
        """Figures of every stage."""
        ...

    async def close(self) -> None:
        """Stop the stages and give everything back. Idempotent; also after a failure."""
        ...
