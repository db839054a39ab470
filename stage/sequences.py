"""The sequences that a stage knows, and the check of a plan against them.

A plan is checked whole before anything of it is taken over: `checked` returns the state that the plan leads to, and the
stage keeps its old one when it raises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SequenceRun, SequenceStart, StepPlan
from shardline.stage.decoder import StepRows
from shardline.stage.errors import PlanError
from shardline.stage.sampling import History


@dataclass(frozen=True, slots=True)
class Limits:
    """What plans may ask for.

    Attributes:
        num_blocks, block_size: Of the pool.
        max_blocks: The most blocks of one sequence.
        max_context: The most tokens of one sequence.
        max_step_tokens: The most rows of one step.
        max_sequences: The most sequences known at once.
        vocab_size: Token ids lie below it.
        keeps_histories: The stage samples, and so keeps the tokens that penalties look at.
    """

    num_blocks: int
    block_size: int
    max_blocks: int
    max_context: int
    max_step_tokens: int
    max_sequences: int
    vocab_size: int
    keeps_histories: bool


@dataclass(frozen=True, slots=True)
class Sequence:
    """One known sequence.

    Attributes:
        params: How its tokens are chosen.
        blocks: int32, its block table so far.
        position: Where its next run begins; None before its first, which may begin behind a cached prefix.
        history: Its tokens, on a stage that samples and if its parameters need them.
    """

    params: SamplingParams
    blocks: NDArray[np.int32]
    position: int | None
    history: History | None


def checked(plan: StepPlan, known: Mapping[int, Sequence], limits: Limits) -> dict[int, Sequence]:
    """The sequences known after the plan, each run counted as done. Raises PlanError; changes nothing."""
    after = dict(known)
    for seq_id in plan.forget:
        if after.pop(seq_id, None) is None:
            raise PlanError(f"plan {plan.step_id} forgets sequence {seq_id}, which is not known here")
    for start in plan.starts:
        if start.seq_id in after:
            raise PlanError(f"plan {plan.step_id} starts sequence {start.seq_id}, which is known already")
        after[start.seq_id] = _started(plan.step_id, start, limits)
    if len(after) > limits.max_sequences:
        raise PlanError(f"plan {plan.step_id} makes {len(after)} sequences known; the most is {limits.max_sequences}")
    if not plan.runs:
        raise PlanError(f"plan {plan.step_id} runs nothing")
    if plan.num_tokens > limits.max_step_tokens:
        raise PlanError(f"plan {plan.step_id} has {plan.num_tokens} rows; the most is {limits.max_step_tokens}")
    run_ids = set()
    for run in plan.runs:
        if run.seq_id in run_ids:
            raise PlanError(f"plan {plan.step_id} runs sequence {run.seq_id} twice")
        run_ids.add(run.seq_id)
        sequence = after.get(run.seq_id)
        if sequence is None:
            raise PlanError(f"plan {plan.step_id} runs sequence {run.seq_id}, which is not known here")
        after[run.seq_id] = _advanced(plan.step_id, run, sequence, limits)
    return after


def _started(step_id: int, start: SequenceStart, limits: Limits) -> Sequence:
    what = f"plan {step_id}, start of sequence {start.seq_id}"
    _check_ids(what, "block", start.block_ids, limits.num_blocks)
    if len(start.block_ids) > limits.max_blocks:
        raise PlanError(f"{what}: {len(start.block_ids)} blocks; the most of one sequence is {limits.max_blocks}")
    _check_ids(what, "token", start.token_ids, limits.vocab_size)
    _check_ids(what, "logit_bias token", [token_id for token_id, _ in start.params.logit_bias], limits.vocab_size)
    if not 0 <= start.prompt_len <= len(start.token_ids):
        raise PlanError(f"{what}: a prompt of {start.prompt_len} of {len(start.token_ids)} tokens")
    needed = limits.keeps_histories and start.params.needs_history
    history = History(start.token_ids, start.prompt_len) if needed else None
    return Sequence(start.params, np.array(start.block_ids, np.int32), None, history)


def _advanced(step_id: int, run: SequenceRun, sequence: Sequence, limits: Limits) -> Sequence:
    what = f"plan {step_id}, run of sequence {run.seq_id}"
    if not run.token_ids:
        raise PlanError(f"{what}: no tokens")
    _check_ids(what, "token", run.token_ids, limits.vocab_size)
    _check_ids(what, "block", run.new_block_ids, limits.num_blocks)
    cached = len(sequence.blocks) * limits.block_size
    if sequence.position is None:
        if not 0 <= run.position <= cached:
            raise PlanError(f"{what}: begins at {run.position}, but its cached prefix has {cached} tokens")
    elif run.position != sequence.position:
        raise PlanError(f"{what}: begins at {run.position}, not where it left off, {sequence.position}")
    blocks = sequence.blocks
    if run.new_block_ids:
        blocks = np.concatenate([blocks, np.array(run.new_block_ids, np.int32)])
    end = run.position + len(run.token_ids)
    if end > min(limits.max_context, len(blocks) * limits.block_size) or len(blocks) > limits.max_blocks:
        raise PlanError(
            f"{what}: ends at {end} with {len(blocks)} blocks of {limits.block_size}; "
            f"the most is {limits.max_context} tokens in {limits.max_blocks} blocks"
        )
    return replace(sequence, blocks=blocks, position=end)


def _check_ids(what: str, kind: str, ids: Collection[int], end: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= end):
        wrong = next(number for number in ids if not 0 <= number < end)
        raise PlanError(f"{what}: {kind} id {wrong} is not one of 0 to {end - 1}")


def step_rows(plan: StepPlan, after: Mapping[int, Sequence], limits: Limits) -> StepRows:
    """The rows of a checked plan. Raises PlanError if two of them would write to the same place of the pool."""
    counts = np.array([len(run.token_ids) for run in plan.runs])
    tables = np.zeros((len(plan.runs), limits.max_blocks), np.int32)
    for row, run in enumerate(plan.runs):
        blocks = after[run.seq_id].blocks
        tables[row, : len(blocks)] = blocks
    sequences = np.repeat(np.arange(len(plan.runs), dtype=np.int32), counts)
    first_rows = np.cumsum(counts) - counts
    starts = np.array([run.position for run in plan.runs])
    positions = (np.arange(len(sequences)) + np.repeat(starts - first_rows, counts)).astype(np.int32)
    block, offset = np.divmod(positions, limits.block_size)
    slots = tables[sequences, block] * np.int32(limits.block_size) + offset
    if len(np.unique(slots)) != len(slots):
        raise PlanError(f"plan {plan.step_id} writes to one place of the pool twice: two runs share a block")
    return StepRows(
        token_ids=np.array([token_id for run in plan.runs for token_id in run.token_ids], np.int32),
        positions=positions,
        slots=slots.astype(np.int32),
        sequences=sequences,
        block_tables=tables,
    )
