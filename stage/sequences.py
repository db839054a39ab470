"""The sequences that a stage knows, and the check of a plan against them.

A plan is checked whole before anything of it is taken over: `check` says what the plan leads to, and a stage that it
raises in goes on as if the plan had not come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shardline.scheduler.plan import AHEAD, SequenceStart, StepPlan
from shardline.stage.decoder import StepRows
from shardline.stage.errors import PlanError
from shardline.stage.sampling import SamplingTable
from shardline.stage.spec import table_rows

_NOT_RUN = -1

Numbers = NDArray[np.int64]


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
        takes_ahead: A plan may call a token `AHEAD`: the stage has no embedding, or chose the token itself. Of several
            stages the first one is told it.
    """

    num_blocks: int
    block_size: int
    max_blocks: int
    max_context: int
    max_step_tokens: int
    max_sequences: int
    vocab_size: int
    keeps_histories: bool
    takes_ahead: bool


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """What a plan leads to.

    Attributes:
        rows: int64 [runs], the table's row of each run's sequence: where what is sampled for it has its place.
        counts: int64 [runs], its tokens.
        ends: int64 [runs], the position behind its last token.
        num_blocks: int64 [runs], of its block table.
        samples: bool [runs], whether a token is sampled from it.
        row_of: The row of each sequence known afterwards, by id.
        freed: Rows of the forgotten ones.
        num_started: Of the free rows, how many from the end are taken.
        step: The step's rows. Among `token_ids`, -1 - r stands for the token that was chosen last for the sequence in
            row r of the table; where the stage has no embedding, no id is looked at.
    """

    rows: Numbers
    counts: Numbers
    ends: Numbers
    num_blocks: Numbers
    samples: NDArray[np.bool_]
    row_of: dict[int, int]
    freed: list[int]
    num_started: int
    step: StepRows


class SequenceTable:
    """The sequences that a stage knows, a row each in arrays: a step of hundreds takes a few operations on arrays.

    Free rows, and what lies past a row's number of blocks, say nothing: there `check` writes what a plan brings, before
    it knows whether the plan is taken over.

    A plan may forget a sequence for which a step that has been begun and not waited for samples. What that step chooses
    still goes to the sequence's row, and is never taken for another's: on the device all happens in the order of the
    plans, so a sequence that has the row later overwrites it before a run of its own may say `AHEAD`. And a row that a
    plan frees is given out by the next plan at the earliest: of two steps begun, no row has two sequences.

    Attributes:
        sampling: How the tokens of the sequence in each row are chosen; None on a stage that does not sample.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_rows = table_rows(limits.max_sequences)
        self._tables = np.zeros((self._num_rows, limits.max_blocks), np.int32)
        self._num_blocks = np.zeros(self._num_rows, np.int64)
        # Where its next run begins; _NOT_RUN before its first, which may begin behind a cached prefix.
        self._positions = np.zeros(self._num_rows, np.int64)
        # Whether its next run may say AHEAD: its last one sampled.
        self._may_run_ahead = np.zeros(self._num_rows, np.bool_)
        # Whether a token can be chosen before the host knows the one before it.
        self._is_free_of_history = np.zeros(self._num_rows, np.bool_)
        self.sampling = SamplingTable(self._num_rows) if limits.keeps_histories else None
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        self._row_of: dict[int, int] = {}
        self._free = list(range(self._num_rows))

    def take(self, plan: CheckedPlan) -> None:
        """Take over what `check` returned last; each run counts as done."""
        self._row_of = plan.row_of
        self._free = self._free[: len(self._free) - plan.num_started] + plan.freed
        self._positions[plan.rows] = plan.ends
        self._num_blocks[plan.rows] = plan.num_blocks
        self._may_run_ahead[plan.rows] = plan.samples & self._is_free_of_history[plan.rows]

    def check(self, plan: StepPlan) -> CheckedPlan:
        """What a plan leads to. Raises PlanError; what is known stays as it is."""
        limits, what = self._limits, f"plan {plan.step_id}"
        row_of, freed = self._learned(plan)
        if not plan.runs:
            raise PlanError(f"{what} runs nothing")
        seq_ids, positions, token_ids, new_block_ids, samples = zip(*plan.runs, strict=True)
        try:
            rows = np.array([row_of[seq_id] for seq_id in seq_ids])
        except KeyError as unknown:
            raise PlanError(f"{what} runs sequence {unknown.args[0]}, which is not known here") from None
        if len(set(seq_ids)) != len(seq_ids):
            twice = next(seq_id for seq_id in seq_ids if seq_ids.count(seq_id) > 1)
            raise PlanError(f"{what} runs sequence {twice} twice")
        counts = np.array([len(ids) for ids in token_ids])
        if counts.sum() > limits.max_step_tokens:
            raise PlanError(f"{what} has {counts.sum()} rows; the most is {limits.max_step_tokens}")
        if not counts.all():
            raise PlanError(f"{what}, run of sequence {seq_ids[int(counts.argmin())]}: no tokens")
        sequences = np.repeat(np.arange(len(seq_ids), dtype=np.int32), counts)
        tokens = _numbers(what, chain.from_iterable(token_ids))
        # A run of several tokens would need to know the later ones before the first is sampled.
        ahead = (tokens == AHEAD) & (self._may_run_ahead[rows] & (counts == 1))[sequences]
        _check_run_ids(plan, "token", np.where(ahead, 0, tokens), limits.vocab_size, sequences)
        tokens = np.where(ahead, -1 - rows[sequences], tokens)
        starts = _numbers(what, positions)
        self._check_starts(plan, rows, starts)
        num_blocks = self._append(plan, rows, new_block_ids, starts + counts)
        tables = self._tables[rows]
        step = _step_rows(what, tokens, starts, counts, sequences, tables, limits.block_size)
        return CheckedPlan(
            rows,
            counts,
            starts + counts,
            num_blocks,
            np.array(samples, np.bool_),
            row_of,
            freed,
            len(plan.starts),
            step,
        )

    def _learned(self, plan: StepPlan) -> tuple[dict[int, int], list[int]]:
        """The rows of the sequences known after a plan's `forget` and `starts`, and the rows of those forgotten."""
        what, row_of, freed = f"plan {plan.step_id}", dict(self._row_of), []
        for seq_id in plan.forget:
            if seq_id not in row_of:
                raise PlanError(f"{what} forgets sequence {seq_id}, which is not known here")
            freed.append(row_of.pop(seq_id))
        known = len(row_of) + len(plan.starts)
        for row, start in zip(reversed(self._free), plan.starts, strict=False):
            if start.seq_id in row_of:
                raise PlanError(f"{what} starts sequence {start.seq_id}, which is known already")
            self._write_start(f"{what}, start of sequence {start.seq_id}", row, start)
            row_of[start.seq_id] = row
        if known > self._limits.max_sequences:
            raise PlanError(f"{what} makes {known} sequences known; the most is {self._limits.max_sequences}")
        return row_of, freed

    def _write_start(self, what: str, row: int, start: SequenceStart) -> None:
        limits = self._limits
        _check_ids(what, "block", start.block_ids, limits.num_blocks)
        if len(start.block_ids) > limits.max_blocks:
            raise PlanError(f"{what}: {len(start.block_ids)} blocks; the most of one sequence is {limits.max_blocks}")
        _check_ids(what, "token", start.token_ids, limits.vocab_size)
        _check_ids(what, "logit_bias token", [token_id for token_id, _ in start.params.logit_bias], limits.vocab_size)
        if not 0 <= start.prompt_len <= len(start.token_ids):
            raise PlanError(f"{what}: a prompt of {start.prompt_len} of {len(start.token_ids)} tokens")
        self._tables[row] = 0
        self._tables[row, : len(start.block_ids)] = start.block_ids
        self._num_blocks[row] = len(start.block_ids)
        self._positions[row] = _NOT_RUN
        self._may_run_ahead[row] = False
        self._is_free_of_history[row] = limits.takes_ahead and not start.params.needs_history
        if self.sampling is not None:
            self.sampling.write(row, start)

    def _check_starts(self, plan: StepPlan, rows: Numbers, starts: Numbers) -> None:
        """Each run begins where the one before it ended, and a first one behind no more than its cached prefix."""
        due = self._positions[rows]
        first = due == _NOT_RUN
        cached = self._num_blocks[rows] * self._limits.block_size
        wrong = np.where(first, (starts < 0) | (starts > cached), starts != due)
        if wrong.any():
            at = int(wrong.argmax())
            what = f"plan {plan.step_id}, run of sequence {plan.runs[at].seq_id}: begins at {starts[at]}"
            if first[at]:
                raise PlanError(f"{what}, but its cached prefix has {cached[at]} tokens")
            raise PlanError(f"{what}, not where it left off, {due[at]}")

    def _append(
        self, plan: StepPlan, rows: Numbers, new_block_ids: tuple[tuple[int, ...], ...], ends: Numbers
    ) -> Numbers:
        """Write the runs' new blocks behind those of their tables. Returns how many each has then."""
        limits = self._limits
        num_blocks = before = self._num_blocks[rows]
        blocks = _numbers(f"plan {plan.step_id}", chain.from_iterable(new_block_ids))
        if len(blocks):
            num_new = np.array([len(ids) for ids in new_block_ids])
            sequences = np.repeat(np.arange(len(rows)), num_new)
            _check_run_ids(plan, "block", blocks, limits.num_blocks, sequences)
            num_blocks = before + num_new
        room = np.minimum(limits.max_context, num_blocks * limits.block_size)
        wrong = (ends > room) | (num_blocks > limits.max_blocks)
        if wrong.any():
            at = int(wrong.argmax())
            raise PlanError(
                f"plan {plan.step_id}, run of sequence {plan.runs[at].seq_id}: ends at {ends[at]} with "
                f"{num_blocks[at]} blocks of {limits.block_size}; the most is {limits.max_context} tokens in "
                f"{limits.max_blocks} blocks"
            )
        if len(blocks):
            # The k-th new block of a run is the k-th of its stretch of `blocks`.
            within = np.arange(len(blocks)) - np.repeat(np.cumsum(num_new) - num_new, num_new)
            self._tables[rows[sequences], before[sequences] + within] = blocks
        return num_blocks


def _numbers(what: str, values: Iterable[int]) -> Numbers:
    try:
        return np.fromiter(values, np.int64)
    except OverflowError:
        raise PlanError(f"{what} has a number beyond 64 bits") from None


def _check_ids(what: str, kind: str, ids: Collection[int], end: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= end):
        wrong = next(number for number in ids if not 0 <= number < end)
        raise PlanError(f"{what}: {kind} id {wrong} is not one of 0 to {end - 1}")


def _check_run_ids(plan: StepPlan, kind: str, ids: Numbers, end: int, sequences: NDArray[np.integer]) -> None:
    """As `_check_ids`, of all runs at once; `sequences` says which run each is of."""
    wrong = (ids < 0) | (ids >= end)
    if wrong.any():
        at = int(wrong.argmax())
        seq_id = plan.runs[sequences[at]].seq_id
        raise PlanError(
            f"plan {plan.step_id}, run of sequence {seq_id}: {kind} id {ids[at]} is not one of 0 to {end - 1}"
        )


def _step_rows(
    what: str,
    tokens: Numbers,
    starts: Numbers,
    counts: Numbers,
    sequences: NDArray[np.int32],
    tables: NDArray[np.int32],
    block_size: int,
) -> StepRows:
    """The rows of a checked plan. Raises PlanError if two of them would write to the same place of the pool."""
    first_rows = np.cumsum(counts) - counts
    positions = (np.arange(len(sequences)) + np.repeat(starts - first_rows, counts)).astype(np.int32)
    block, offset = np.divmod(positions, block_size)
    slots = tables[sequences, block] * np.int32(block_size) + offset
    if len(set(slots.tolist())) != len(slots):
        raise PlanError(f"{what} writes to one place of the pool twice: two runs share a block")
    return StepRows(
        token_ids=tokens.astype(np.int32),
        positions=positions,
        slots=slots.astype(np.int32),
        sequences=sequences,
        block_tables=tables,
    )
