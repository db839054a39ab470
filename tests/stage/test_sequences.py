"""The table of a stage's sequences: what `AHEAD` stands for, and when a plan may say it."""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from shardline.scheduler import (
    NewRequest,
    SampledToken,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SequenceRun,
    SequenceStart,
    StepPlan,
    StepResult,
)
from shardline.scheduler.plan import AHEAD
from shardline.stage import PlanError
from shardline.stage.sequences import Limits, SequenceTable

LIMITS = Limits(
    num_blocks=12,
    block_size=8,
    max_blocks=6,
    max_context=48,
    max_step_tokens=64,
    max_sequences=4,
    vocab_size=101,
    keeps_histories=True,
    takes_ahead=True,
)
GREEDY = SamplingParams(seed=0)
PENALIZED = SamplingParams(seed=0, presence_penalty=0.5)


def start(seq_id, params=GREEDY):
    return SequenceStart(seq_id, params, 3, (1, 2, 3), ())


def run(seq_id, position, token_ids, new_blocks=(), samples=True):
    return SequenceRun(seq_id, position, tuple(token_ids), tuple(new_blocks), samples)


def plan(step_id, runs, starts=(), forget=()):
    return StepPlan(step_id, tuple(forget), tuple(starts), tuple(runs))


def took(table, one):
    checked = table.check(one)
    table.take(checked)
    return checked


def first_step(table):
    """Sequences 0 and 2 sample; 1 has a chunk only, and 3 has penalties."""
    starts = [start(0), start(1), start(2), start(3, PENALIZED)]
    runs = [
        run(0, 0, [1, 2, 3], [0]),
        run(1, 0, [1, 2], [1], samples=False),
        run(2, 0, [1, 2, 3], [2]),
        run(3, 0, [1, 2, 3], [3]),
    ]
    return took(table, plan(0, runs, starts))


def test_ahead_is_the_place_of_what_was_sampled_last():
    table = SequenceTable(LIMITS)
    checked = first_step(table)
    assert checked.samples.tolist() == [True, False, True, True]
    assert len(set(checked.rows.tolist())) == 4
    row = dict(zip(range(4), checked.rows.tolist(), strict=True))
    for step in range(1, 4):
        # Others before and beside it, known tokens among them, and then once more.
        runs = [run(2, 2 + step, [AHEAD]), run(1, 2, [3]), run(0, 2 + step, [AHEAD])]
        if step > 1:
            runs[1] = run(1, 1 + step, [AHEAD])
        checked = took(table, plan(step, runs))
        ahead = [-1 - row[2], 3 if step == 1 else -1 - row[1], -1 - row[0]]
        assert checked.step.token_ids.dtype == np.int32
        assert checked.step.token_ids.tolist() == ahead
        assert checked.rows.tolist() == [row[2], row[1], row[0]]
    # Its token may come first, too.
    checked = took(table, plan(4, [run(2, 6, [100])]))
    assert checked.step.token_ids.tolist() == [100]


BAD = {
    "of a sequence that has not run": plan(1, [run(9, 0, [AHEAD], [5])], [start(9)], forget=[0]),
    "of one whose last run did not sample": plan(1, [run(1, 2, [AHEAD])]),
    "of one with penalties": plan(1, [run(3, 3, [AHEAD])]),
    "before a known token": plan(1, [run(0, 3, [AHEAD, 5])]),
    "after a known token": plan(1, [run(0, 3, [5, AHEAD])]),
    "two times": plan(1, [run(0, 3, [AHEAD, AHEAD])]),
    "beside one that is right": plan(1, [run(0, 3, [AHEAD]), run(1, 2, [AHEAD])]),
    "of one that was forgotten and started again": plan(1, [run(0, 0, [AHEAD], [5])], [start(0)], forget=[0]),
}


@pytest.mark.parametrize("name", BAD)
def test_ahead_of_nothing_that_was_sampled_is_refused(name):
    table = SequenceTable(LIMITS)
    first_step(table)
    with pytest.raises(PlanError, match=r"token id -1 is not one of 0 to 100"):
        table.check(BAD[name])
    checked = table.check(plan(1, [run(0, 3, [AHEAD]), run(1, 2, [3])]))
    assert checked.step.token_ids.tolist() == [-1 - checked.rows[0], 3]


def test_only_ahead_itself_stands_for_a_token():
    table = SequenceTable(LIMITS)
    first_step(table)
    with pytest.raises(PlanError, match=r"token id -2 is not one of"):
        table.check(plan(1, [run(0, 3, [-2])]))


def test_a_chunk_after_a_token_that_was_sampled_ends_it():
    """What was chosen last is of an earlier position then."""
    table = SequenceTable(LIMITS)
    first_step(table)
    took(table, plan(1, [run(0, 3, [7], samples=False)]))
    with pytest.raises(PlanError, match="token id -1"):
        table.check(plan(2, [run(0, 4, [AHEAD])]))


@pytest.mark.parametrize("name", BAD)
def test_a_stage_that_needs_no_tokens_refuses_the_same(name):
    table = SequenceTable(replace(LIMITS, keeps_histories=False))
    first_step(table)
    with pytest.raises(PlanError, match=r"token id -1 is not one of 0 to 100"):
        table.check(BAD[name])
    table.check(plan(1, [run(0, 3, [AHEAD]), run(1, 2, [3])]))


def test_a_stage_that_embeds_and_does_not_sample_knows_no_token_but_those_of_the_plan():
    table = SequenceTable(replace(LIMITS, keeps_histories=False, takes_ahead=False))
    first_step(table)
    with pytest.raises(PlanError, match="token id -1"):
        table.check(plan(1, [run(0, 3, [AHEAD])]))


def test_after_a_reset_nothing_was_sampled():
    table = SequenceTable(LIMITS)
    first_step(table)
    table.clear()
    with pytest.raises(PlanError, match="token id -1"):
        table.check(plan(5, [run(7, 0, [AHEAD], [0])], [start(7)]))


def test_a_row_has_one_sequence_in_two_steps_that_follow():
    """What one step writes late cannot reach what the next one writes for another sequence."""
    draw = random.Random(5)
    table = SequenceTable(LIMITS)
    known: list[int] = []
    before: dict[int, int] = {}
    next_id = reused = 0
    seen: set[int] = set()
    for step in range(400):
        forget = draw.sample(known, draw.randint(len(known) == 4, len(known)))
        known = [seq_id for seq_id in known if seq_id not in forget]
        new = list(range(next_id, next_id + draw.randint(1, 4 - len(known))))
        next_id += len(new)
        known += new
        runs = [run(seq_id, 0, [1], [block]) for block, seq_id in enumerate(new)]
        checked = took(table, plan(step, runs, [start(seq_id) for seq_id in new], forget))
        now = {row: seq_id for seq_id, row in checked.row_of.items()}
        assert all(now.get(row, seq_id) == seq_id for row, seq_id in before.items())
        reused += sum(row in seen for row, seq_id in now.items() if seq_id in new)
        seen |= set(now)
        before = now
    assert reused > 100


def next_token(token_ids, seed):
    draw = zlib.crc32(bytes(token_ids), seed)
    return 3 if draw % 23 == 0 else draw % 101


def expected_of(request):
    tokens, end = list(request.prompt_ids), len(request.prompt_ids) + request.params.max_tokens
    while len(tokens) < end:
        tokens.append(next_token(tokens, request.params.seed))
        if tokens[-1] == 3:
            break
    return tokens[len(request.prompt_ids) :]


class Device:
    """What a stage's device keeps: the last tokens by row, and as its pool the tokens themselves, by slot."""

    def __init__(self):
        self.table = SequenceTable(LIMITS)
        self.last_tokens = np.full(2 * LIMITS.max_sequences, 55, np.int32)
        self.pool = np.full(LIMITS.num_blocks * LIMITS.block_size, 77, np.int64)
        self.seeds = {}
        self.resolved = 0

    def run(self, one):
        checked = took(self.table, one)
        self.seeds.update((begun.seq_id, begun.params.seed) for begun in one.starts)
        ids = checked.step.token_ids
        self.resolved += int((ids < 0).sum())
        self.pool[checked.step.slots] = np.where(ids < 0, self.last_tokens[np.where(ids < 0, -1 - ids, 0)], ids)
        tokens = []
        for index in np.flatnonzero(checked.samples).tolist():
            positions = np.arange(checked.ends[index])
            blocks = checked.step.block_tables[index][positions // LIMITS.block_size]
            history = self.pool[blocks * LIMITS.block_size + positions % LIMITS.block_size].tolist()
            seq_id = one.runs[index].seq_id
            tokens.append(SampledToken(seq_id, next_token(history, self.seeds[seq_id])))
        self.last_tokens[checked.rows[checked.samples]] = [token.token_id for token in tokens]
        return StepResult(one.step_id, tuple(tokens))


@pytest.mark.parametrize("seed", range(12))
def test_a_scheduler_that_plans_ahead_gets_the_tokens_of_each_sequence_alone(seed):
    """Sequences come, end, are preempted and aborted; rows and blocks change hands while steps are in flight."""
    draw = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=draw.choice([7, 9, 12]),
            block_size=LIMITS.block_size,
            max_context=LIMITS.max_context,
            depth=2,
            max_step_tokens=LIMITS.max_step_tokens,
            prefill_chunk=7,
            max_sequences=LIMITS.max_sequences,
            min_microbatch=LIMITS.max_sequences,
            eos_token_ids=(3,),
            vocab_size=LIMITS.vocab_size,
            ahead=True,
        )
    )
    device, results, requests, outputs = Device(), deque(), {}, {}
    ended = 0
    while len(requests) < 60 or scheduler.has_unfinished() or results:
        if len(requests) < 60 and draw.random() < 0.2:
            prompt = tuple(draw.randrange(4, 101) for _ in range(draw.randint(1, 20)))
            params = SamplingParams(max_tokens=draw.randint(1, 25), seed=draw.randrange(3))
            request = NewRequest(str(len(requests)), prompt, params)
            scheduler.add(request)
            requests[request.request_id], outputs[request.request_id] = request, []
        if requests and draw.random() < 0.02:
            scheduler.abort(draw.choice(list(requests)))
        while (one := scheduler.schedule()) is not None:
            results.append(device.run(one))
        scheduler.check_integrity()
        if results:
            for update in scheduler.update(results.popleft()):
                outputs[update.request_id].append(update.token.token_id)
                ended += update.finish_reason is not None
    for request_id, request in requests.items():
        expected = expected_of(request)
        assert outputs[request_id] == expected[: len(outputs[request_id])]
    assert ended > 40
    assert device.resolved > 200
