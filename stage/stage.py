"""One stage: its layers, its KV arrays, the sequences it knows, and one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import Backend
from shardline.scheduler.plan import StepPlan, StepResult
from shardline.stage.checkpoint import Checkpoint
from shardline.stage.decoder import Decoder
from shardline.stage.errors import PlanError
from shardline.stage.sampling import sampled_tokens
from shardline.stage.sequences import CheckedPlan, Limits, SequenceTable
from shardline.stage.spec import StageSpec
from shardline.stage.vocabulary import without_padding


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a stage made of a plan: hidden states for the next stage, or the result on the last."""

    hidden: NDArray[np.float32] | None
    result: StepResult | None


class Stage:
    """Runs plans on its share of the model. Used by one thread at a time."""

    def __init__(self, spec: StageSpec, checkpoint: Checkpoint, backend: Backend) -> None:
        """Load this stage's own tensors, one in flight, and allocate its pool and workspace."""
        checkpoint = without_padding(checkpoint, spec.num_tokens)
        self.spec = spec
        self._hidden_size = checkpoint.spec.hidden_size
        self._vocab_size = checkpoint.spec.vocab_size
        self._backend = backend
        self._decoder = Decoder(spec, checkpoint, backend)
        limits = Limits(
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            max_blocks=self._decoder.max_blocks,
            max_context=spec.max_context,
            max_step_tokens=spec.max_step_tokens,
            max_sequences=spec.max_sequences,
            vocab_size=checkpoint.spec.vocab_size,
            keeps_histories=spec.has_head,
        )
        self._sequences = SequenceTable(limits)
        self._next_step: int | None = None

    def run(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> StepOutput:
        """Run one plan.

        Args:
            plan: The next plan in order.
            hidden: float32 [plan.num_tokens, hidden_size] from the stage before; None on the first.

        Raises:
            PlanError: the plan does not fit what this stage knows; its state is unchanged.
        """
        with self._backend.entered():
            checked = self._forward(plan, hidden)
            if not self.spec.has_head:
                return StepOutput(self._decoder.hidden(plan.num_tokens), None)
            return StepOutput(None, self._sample(plan, checked))

    def logits(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Like `run` on a last stage, but logits of *every* row, float32 [plan.num_tokens, vocab]; none is sampled."""
        assert self.spec.has_head, "only the last stage has logits"
        self._forward(plan, hidden)
        out = np.empty((plan.num_tokens, self._vocab_size), np.float32)
        for start in range(0, plan.num_tokens, self._decoder.max_head_rows):
            end = min(start + self._decoder.max_head_rows, plan.num_tokens)
            logits = self._decoder.logits(np.arange(start, end, dtype=np.int32))
            out[start:end] = self._backend.read(logits[: end - start])
        return out

    def reset(self) -> None:
        """Forget every sequence; the next plan may have any step id. Weights and pool stay."""
        self._sequences.clear()
        self._next_step = None

    def close(self) -> None:
        """Give back the backend's memory and threads."""
        self._backend.close()

    def _forward(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> CheckedPlan:
        """Check the plan, take it over, and enqueue its layers."""
        if self._next_step is not None and plan.step_id != self._next_step:
            raise PlanError(f"plan {plan.step_id} came where plan {self._next_step} was due")
        checked = self._sequences.check(plan)
        self._check_hidden(plan, hidden)

        self._next_step = plan.step_id + 1
        self._sequences.take(checked)
        self._decoder.forward(checked.step, hidden)
        return checked

    def _check_hidden(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> None:
        if self.spec.has_embed:
            if hidden is not None:
                raise PlanError(f"plan {plan.step_id} came with hidden states, but this stage has the embedding")
        elif hidden is None:
            raise PlanError(f"plan {plan.step_id} came without hidden states")
        elif hidden.dtype != np.float32 or hidden.shape != (plan.num_tokens, self._hidden_size):
            raise PlanError(
                f"plan {plan.step_id} came with hidden states {hidden.dtype} {list(hidden.shape)}, "
                f"not float32 {[plan.num_tokens, self._hidden_size]}"
            )

    def _sample(self, plan: StepPlan, checked: CheckedPlan) -> StepResult:
        table = self._sequences.sampling
        assert table is not None, "only the last stage samples"
        samples = np.array([run.samples for run in plan.runs])
        if not samples.any():
            self._backend.synchronize()
            return StepResult(plan.step_id, ())
        rows = checked.rows[samples]
        batch = table.batch(rows, checked.ends[samples])
        last_rows = np.cumsum(checked.counts)[samples] - 1
        output = self._backend.sample(self._decoder.logits(last_rows.astype(np.int32)), batch)
        table.take(rows, output.token_ids)
        seq_ids = [run.seq_id for run in plan.runs if run.samples]
        return StepResult(plan.step_id, sampled_tokens(seq_ids, batch.logprobs, output))
