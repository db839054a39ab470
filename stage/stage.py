"""One stage: its layers, its KV arrays, the sequences it knows, and one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import Backend
from shardline.scheduler.plan import StepPlan, StepResult
from shardline.stage.checkpoint import Checkpoint
from shardline.stage.spec import StageSpec


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a stage made of a plan: hidden states for the next stage, or the result on the last."""

    hidden: NDArray[np.float32] | None
    result: StepResult | None


class Stage:
    """Runs plans on its share of the model. Used by one thread at a time."""

    def __init__(self, spec: StageSpec, checkpoint: Checkpoint, backend: Backend) -> None:
        """Load this stage's own tensors, one in flight, and allocate its pool and workspace."""
        self.spec = spec

    def run(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> StepOutput:
        """Run one plan.

        Args:
            plan: The next plan in order.
            hidden: float32 [plan.num_tokens, hidden_size] from the stage before; None on the first.

        Raises:
            PlanError: the plan does not fit what this stage knows; its state is unchanged.
        """
        raise NotImplementedError

    def logits(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Like `run` on a last stage, but logits of *every* row, float32 [plan.num_tokens, vocab]; nothing is sampled."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every sequence; the next plan may have any step id. Weights and pool stay."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back the backend's memory and threads."""
        raise NotImplementedError
