"""One stage: its layers, its KV arrays, the sequences it knows, and one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import Backend, Pending, SampleOutput
from shardline.scheduler.plan import StepPlan, StepResult
from shardline.stage.checkpoint import Checkpoint
from shardline.stage.decoder import Decoder
from shardline.stage.errors import PlanError
from shardline.stage.sampling import sampled_tokens
from shardline.stage.sequences import CheckedPlan, Limits, SequenceTable
from shardline.stage.spec import StageSpec
from shardline.stage.vocabulary import without_padding

MAX_BEGUN = 2
"""Steps that may be begun and not waited for: one that computes, and one behind it so that the device never idles."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a stage made of a plan: hidden states for the next stage, or the result on the last."""

    hidden: NDArray[np.float32] | None
    result: StepResult | None


class PendingStep(Protocol):
    """A step that has been begun. Each is waited for, in the order in which they were begun, before a `Stage.reset`."""

    @property
    def ready(self) -> bool:
        """Whether `wait` would not wait for a device."""
        ...

    def wait(self) -> StepOutput:
        """What the stage made of the plan; once, from any thread, while another begins the next step.

        Raises what the device says of any step so far.
        """
        ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A `PendingStep` of a runner that had done all when it began it."""

    output: StepOutput

    @property
    def ready(self) -> bool:
        """True."""
        return True

    def wait(self) -> StepOutput:
        """The output."""
        return self.output


class _BegunStep(Generic[T]):
    """What is on its way from the device, and what is made of it on the host."""

    __slots__ = ("_finish", "_pending", "_waited")

    def __init__(self, pending: Pending[T], finish: Callable[[T], StepOutput], waited: Callable[[], None]) -> None:
        self._pending, self._finish, self._waited = pending, finish, waited

    @property
    def ready(self) -> bool:
        return self._pending.ready

    def wait(self) -> StepOutput:
        try:
            arrived = self._pending.wait()
        finally:
            self._waited()
        return self._finish(arrived)


class Stage:
    """Runs plans on its share of the model.

    One thread at a time calls it. Another may wait for the steps that it has begun, of which there are never more than
    MAX_BEGUN that have not been waited for.
    """

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
            takes_ahead=spec.has_head or not spec.has_embed,
        )
        self._sequences = SequenceTable(limits)
        self._next_step: int | None = None
        # Two counters, because each is written by one thread alone: the one that begins, and the one that waits.
        self._begun = 0
        self._waited = 0

    def run(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> StepOutput:
        """`begin` a plan and wait for it."""
        return self.begin(plan, hidden).wait()

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> PendingStep:
        """Take a plan over and put its work on the device's stream, behind that of the plans before.

        Args:
            plan: The next plan in order.
            hidden: float32 [plan.num_tokens, hidden_size] from the stage before; None on the first. It may be changed
                as soon as this returns.

        Raises:
            PlanError: the plan does not fit what this stage knows; its state is unchanged.
        """
        assert self._begun - self._waited < MAX_BEGUN, f"{self._begun - self._waited} steps are begun already"
        with self._backend.entered():
            checked = self._forward(plan, hidden)
            step: PendingStep
            if not self.spec.has_head:
                step = _BegunStep(self._decoder.hidden(plan.num_tokens), _hidden_output, self._count_waited)
            elif checked.samples.any():
                step = self._sample(plan, checked)
            else:
                nothing = StepOutput(None, StepResult(plan.step_id, ()))
                step = _BegunStep(self._decoder.passed(), lambda _: nothing, self._count_waited)
        self._begun += 1
        return step

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
        """Forget every sequence; the next plan may have any step id. Weights and pool stay.

        Every step that was begun has been waited for.
        """
        assert self._begun == self._waited, f"{self._begun - self._waited} steps have not been waited for"
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

    def _sample(self, plan: StepPlan, checked: CheckedPlan) -> PendingStep:
        table = self._sequences.sampling
        assert table is not None, "only the last stage samples"
        samples = checked.samples
        rows = checked.rows[samples]
        batch = table.batch(rows, checked.ends[samples])
        last_rows = np.cumsum(checked.counts)[samples] - 1
        pending = self._decoder.sample(last_rows.astype(np.int32), batch, rows.astype(np.int32))
        # Not their rows: by the time that the tokens are known, these may have been given to other sequences.
        histories = table.histories(rows)
        seq_ids = [run.seq_id for run in plan.runs if run.samples]

        def finish(output: SampleOutput) -> StepOutput:
            for at, history in histories:
                history.add(int(output.token_ids[at]))
            return StepOutput(None, StepResult(plan.step_id, sampled_tokens(seq_ids, batch.logprobs, output)))

        return _BegunStep(pending, finish, self._count_waited)

    def _count_waited(self) -> None:
        self._waited += 1


def _hidden_output(hidden: NDArray[np.float32]) -> StepOutput:
    return StepOutput(hidden, None)
