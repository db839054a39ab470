"""A few layers in this process, without Ray: one card tells what a full pipeline of such cards would give."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardline.cluster.local_pipeline import BackendFactory
from shardline.cluster.stage_options import check_stage_options
from shardline.scheduler import InvalidParameterError, SamplingParams, SequenceRun, SequenceStart, StepPlan
from shardline.stage import ModelSpec, Stage, StageSpec, backend_for, open_checkpoint
from shardline.stage.stage import MAX_BEGUN, PendingStep

WARMUP_STEPS = 3
_MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Decode steps of one number of sequences.

    Attributes:
        sequences: How many decoded at once.
        steps: Timed steps.
        median_seconds, low_seconds, high_seconds: Of a step: the median, the 10th and the 90th percentile.
        layer_seconds: The median step over the layers.
        projected_tokens_per_second: Of a full pipeline of such stages, each with that many sequences: a projection.
    """

    sequences: int
    steps: int
    median_seconds: float
    low_seconds: float
    high_seconds: float
    layer_seconds: float
    projected_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class SubsetReport:
    """What the layers did here, and what they would do in a pipeline.

    Attributes:
        first_layer, end_layer, has_embed, has_head: The part that ran.
        model_layers: Of the whole model.
        weight_bytes, kv_bytes: Resident.
        threads, context, block_size, kv_dtype: As asked for.
        stages_needed: Stages of that many layers for the whole model.
        projection: What the projection assumes.
        batches: One for each number of sequences.
    """

    first_layer: int
    end_layer: int
    has_embed: bool
    has_head: bool
    model_layers: int
    weight_bytes: int
    kv_bytes: int
    threads: int
    context: int
    block_size: int
    kv_dtype: str
    stages_needed: int
    projection: str
    batches: tuple[BatchTimes, ...]


def measure_subset(
    model: Path,
    first: int,
    end: int,
    *,
    batches: Sequence[int] = (1, 8, 32),
    context: int = 128,
    steps: int = 30,
    threads: int = 1,
    block_size: int = 16,
    kv_dtype: str = "float16",
    device: str = "cpu",
    backend_factory: BackendFactory = backend_for,
) -> SubsetReport:
    """Load layers first <= i < end, give each sequence its own context, and time decode steps.

    The first layer brings the embedding with it and the last one the head, as in a pipeline. Other layers get random
    hidden states of root mean square 1: what an RMSNorm leaves of their scale is nothing.

    Args:
        model: The model file.
        first, end: The layers.
        batches: Numbers of sequences that decode at once.
        context: Tokens that each sequence has behind it at the first timed step.
        steps: Timed steps.
        threads, block_size, kv_dtype, device: Of the stage.
        backend_factory: Makes its backend.

    Raises:
        InvalidParameterError: a number is out of range.
        CheckpointError: the file cannot be used.
    """
    check_stage_options(block_size=block_size, kv_dtype=kv_dtype, threads=threads, device=device)
    checkpoint = open_checkpoint(model)
    try:
        shape = checkpoint.spec
        longest = context + WARMUP_STEPS + steps
        _check(shape, first, end, batches, context, steps, longest)
        blocks = -(-longest // block_size)
        spec = StageSpec(
            index=0,
            first_layer=first,
            end_layer=end,
            has_embed=first == 0,
            has_head=end == shape.num_layers,
            num_blocks=max(batches) * blocks,
            block_size=block_size,
            kv_dtype=kv_dtype,
            max_step_tokens=max(_MAX_ROWS, *batches),
            max_sequences=max(batches),
            max_context=longest,
            num_threads=threads,
            device=device,
        )
        backend = backend_factory(spec)
        try:
            stage = Stage(spec, checkpoint, backend)
            kv_bytes = spec.num_layers * spec.num_blocks * block_size * shape.kv_bytes_per_token(kv_dtype)
            weight_bytes = backend.resident_bytes() - kv_bytes
            runner = _Runner(stage, shape, blocks)
            times = tuple(
                _summary(sequences, runner.decode(sequences, context, steps), end - first) for sequences in batches
            )
        finally:
            backend.close()
    finally:
        checkpoint.close()
    stages = math.ceil(shape.num_layers / (end - first))
    missing = [name for name, there in (("the embedding", spec.has_embed), ("the head", spec.has_head)) if not there]
    without = f", without {' and '.join(missing)}" if missing else ""
    return SubsetReport(
        first_layer=first,
        end_layer=end,
        has_embed=spec.has_embed,
        has_head=spec.has_head,
        model_layers=shape.num_layers,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        threads=threads,
        context=context,
        block_size=block_size,
        kv_dtype=kv_dtype,
        stages_needed=stages,
        projection=(
            f"{stages} stages, each on a device of its own like this one, each always busy with a microbatch of that "
            f"many sequences; the slowest takes the step measured here{without}; hops are hidden"
        ),
        batches=times,
    )


def _check(
    shape: ModelSpec, first: int, end: int, batches: Sequence[int], context: int, steps: int, longest: int
) -> None:
    if not 0 <= first < end <= shape.num_layers:
        raise InvalidParameterError("layers", f"{first}:{end}", f"a part of 0:{shape.num_layers}")
    if not batches or min(batches) < 1:
        raise InvalidParameterError("batches", tuple(batches), "numbers from 1 up")
    for field, value in (("context", context), ("steps", steps)):
        if value < 1:
            raise InvalidParameterError(field, value, "an integer from 1 up")
    if longest > shape.context_length:
        raise InvalidParameterError(
            "context", context, f"at most {shape.context_length - longest + context} with {steps} steps of this model"
        )


class _Runner:
    """Plans for one stage: its sequences, their blocks, and random input."""

    def __init__(self, stage: Stage, shape: ModelSpec, blocks: int) -> None:
        self._stage = stage
        self._shape = shape
        self._blocks = blocks
        self._draw = np.random.default_rng(0)

    def decode(self, sequences: int, context: int, steps: int) -> list[float]:
        """Seconds of each timed step."""
        self._stage.reset()
        self._next = 0
        for seq_id in range(sequences):
            for position in range(0, context, _MAX_ROWS):
                plan = self._plan([(seq_id, position, min(_MAX_ROWS, context - position))])
                self._stage.run(plan, self._hidden(plan.num_tokens))
        # Made before, so that they take no time of the steps.
        plans = [
            self._plan([(seq_id, position, 1) for seq_id in range(sequences)])
            for position in range(context, context + WARMUP_STEPS + steps)
        ]
        return self._run_all(plans, self._hidden(sequences))[-steps:]

    def _run_all(self, plans: Sequence[StepPlan], hidden: NDArray[np.float32] | None) -> list[float]:
        """Seconds from each step's end to the next one's, begun before that end: as in a pipeline that is full."""
        begun: deque[PendingStep] = deque()
        ends = []
        for plan in plans:
            begun.append(self._stage.begin(plan, hidden))
            while len(begun) == MAX_BEGUN or (begun and plan is plans[-1]):
                begun.popleft().wait()
                ends.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends)]

    def _plan(self, rows: Sequence[tuple[int, int, int]]) -> StepPlan:
        """One step of (sequence, position, tokens) rows. A sequence's blocks come with its first run."""
        params = SamplingParams(ignore_eos=True, seed=0)
        starts, runs = [], []
        for seq_id, position, count in rows:
            new: tuple[int, ...] = ()
            if position == 0:
                starts.append(SequenceStart(seq_id, params, 1, (0,), ()))
                new = tuple(range(seq_id * self._blocks, (seq_id + 1) * self._blocks))
            runs.append(SequenceRun(seq_id, position, self._tokens(count), new, samples=count == 1))
        plan = StepPlan(self._next, (), tuple(starts), tuple(runs))
        self._next += 1
        return plan

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(map(int, self._draw.integers(self._shape.vocab_size, size=count)))

    def _hidden(self, rows: int) -> NDArray[np.float32] | None:
        if self._stage.spec.has_embed:
            return None
        return self._draw.standard_normal((rows, self._shape.hidden_size), np.float32)


def _summary(sequences: int, times: Sequence[float], layers: int) -> BatchTimes:
    median = statistics.median(times)
    low, high = (float(value) for value in np.percentile(times, (10, 90)))
    return BatchTimes(
        sequences=sequences,
        steps=len(times),
        median_seconds=median,
        low_seconds=low,
        high_seconds=high,
        layer_seconds=median / layers,
        projected_tokens_per_second=sequences / median,
    )
