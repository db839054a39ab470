"""Steps that a stage begins before the one before has been waited for, and tokens that it takes from its own device."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from shardline.scheduler import NewRequest, SamplingParams, Scheduler, SchedulerConfig, SequenceRun, SequenceStart
from shardline.scheduler.plan import AHEAD, StepPlan
from shardline.stage import PlanError

PROMPT = np.random.default_rng(3).integers(0, 101, 40).tolist()
VARIED = [
    SamplingParams(seed=11, temperature=0.9),
    SamplingParams(seed=12, temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    SamplingParams(seed=2**64 - 1, temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(seed=15, logit_bias=((7, 3.0), (8, -2.0)), logprobs=0),
    SamplingParams(seed=16),
]


def first(seq_id: int, params: SamplingParams) -> tuple[SequenceStart, SequenceRun]:
    tokens = tuple(PROMPT[: 10 + seq_id])
    start = SequenceStart(seq_id, params, len(tokens), tokens, ())
    return start, SequenceRun(seq_id, 0, tokens, tuple(range(4 * seq_id, 4 * seq_id + 4)), True)


def test_tokens_of_the_step_before_are_taken_from_the_device(tiny_model, stage_row):
    """Each step is begun before the host knows what the one before chose; the tokens are those of one after another."""
    path, count = tiny_model(), 24
    seq_ids = (0, 1, 3, 4)

    def plans(step, known):
        if step == 0:
            starts, runs = zip(*(first(seq_id, VARIED[seq_id]) for seq_id in seq_ids), strict=True)
            return StepPlan(0, (), starts, runs)
        tokens = known or dict.fromkeys(seq_ids, AHEAD)
        # Another order each time: a place in the step is no place in the table.
        order = seq_ids[step % 4 :] + seq_ids[: step % 4]
        return StepPlan(step, (), (), tuple(SequenceRun(i, 9 + i + step, (tokens[i],), (), True) for i in order))

    plain, known, expected = stage_row(path).stages[0], {}, []
    for step in range(count):
        expected.append(plain.run(plans(step, known), None).result)
        known = {token.seq_id: token.token_id for token in expected[-1].tokens}
    assert len({token.token_id for result in expected for token in result.tokens}) > 20

    ahead = stage_row(path).stages[0]
    got, begun = [], deque()
    for step in range(count):
        begun.append(ahead.begin(plans(step, {}), None))
        if len(begun) == 2:
            got.append(begun.popleft().wait().result)
    got.append(begun.popleft().wait().result)
    assert got == expected


def test_two_steps_at_once_and_no_more(tiny_model, stage_row):
    stage = stage_row(tiny_model()).stages[0]
    runs = [first(seq_id, VARIED[0]) for seq_id in range(3)]
    plans = [StepPlan(step, (), (start,), (run,)) for step, (start, run) in enumerate(runs)]
    begun = [stage.begin(plan, None) for plan in plans[:2]]
    with pytest.raises(AssertionError, match="2 steps are begun already"):
        stage.begin(plans[2], None)
    begun[0].wait()
    with pytest.raises(AssertionError, match="1 steps have not been waited for"):
        stage.reset()
    begun[1].wait()
    # The plan that came too soon has left nothing behind.
    stage.run(plans[2], None)
    stage.reset()
    stage.run(plans[0], None)


@pytest.mark.parametrize("place", ["hidden", "no sample", "sample"])
def test_an_error_of_the_device_comes_out_of_the_wait(tiny_model, stage_row, place):
    class Broken:
        ready = False

        def wait(self):
            raise RuntimeError("the device has gone")

    row = stage_row(tiny_model(), (1,))
    plan = row.plan({0: PROMPT}, samples=place == "sample")
    hidden = row.stages[0].run(plan, None).hidden
    number = 0 if place == "hidden" else 1
    stage = row.stages[number]
    stage.reset()
    stage._backend.read_later = stage._backend.sample_later = lambda *_: Broken()
    step = stage.begin(plan, hidden if number else None)
    assert not step.ready
    with pytest.raises(RuntimeError, match="the device has gone"):
        step.wait()
    # It has been waited for, so that the stage may go on, or be reset.
    stage.reset()


def test_the_history_of_a_forgotten_sequence_takes_its_last_token_to_nobody_else(tiny_model, stage_row):
    """A sequence with penalties is forgotten and started again while its token is being sampled."""
    path = tiny_model()
    start, run = first(2, VARIED[2])
    back = replace(start, token_ids=(*start.token_ids, 5), prompt_len=start.prompt_len)
    again = SequenceRun(2, 0, back.token_ids, (20, 21, 22), True)
    expected = stage_row(path).stages[0].run(StepPlan(0, (), (back,), (again,)), None).result.tokens
    stage = stage_row(path).stages[0]
    begun = [stage.begin(StepPlan(0, (), (start,), (run,)), None)]
    begun.append(stage.begin(StepPlan(1, (2,), (back,), (again,)), None))
    begun[0].wait()
    assert begun[1].wait().result.tokens == expected


@pytest.mark.parametrize("cuts", [(1,)])
def test_a_stage_without_both_ends_takes_no_token_from_its_device(tiny_model, stage_row, cuts):
    row = stage_row(tiny_model(), cuts)
    start, run = first(0, VARIED[0])
    row.run(StepPlan(0, (), (start,), (run,)))
    with pytest.raises(PlanError, match="token id -1"):
        row.stages[0].run(StepPlan(1, (), (), (SequenceRun(0, 10, (AHEAD,), (), True),)), None)


def generated(stage, *, ahead: bool) -> tuple[dict[str, list], int]:
    """What requests of every kind get through the real scheduler, and how many runs were planned ahead."""
    config = SchedulerConfig(
        num_blocks=24,
        block_size=16,
        max_context=100,
        depth=2 if ahead else 1,
        max_step_tokens=64,
        prefill_chunk=16,
        max_sequences=4,
        vocab_size=101,
        ahead=ahead,
    )
    scheduler = Scheduler(config)
    for index in range(12):
        params = replace(VARIED[index % 5], seed=index, max_tokens=5 + 3 * index, ignore_eos=True)
        scheduler.add(NewRequest(str(index), tuple(PROMPT[: 3 + 2 * index]), params))
    out, planned, begun = {}, 0, deque()
    while scheduler.has_unfinished() or begun:
        plan = scheduler.schedule() if len(begun) < config.depth else None
        if plan is not None:
            planned += sum(run.token_ids == (AHEAD,) for run in plan.runs)
            begun.append(stage.begin(plan, None))
            continue
        for update in scheduler.update(begun.popleft().wait().result):
            out.setdefault(update.request_id, []).append((update.token[1:], update.finish_reason))
    scheduler.check_integrity()
    return out, planned


def test_a_scheduler_that_plans_ahead_gets_the_same(tiny_model, stage_row):
    """With penalties beside plain requests, chunks, a cache, more requests than places, and blocks that run short."""
    path = tiny_model()
    limits = {"num_blocks": 24, "max_context": 100, "max_step_tokens": 64, "max_sequences": 4}
    expected, none = generated(stage_row(path, **limits).stages[0], ahead=False)
    got, planned = generated(stage_row(path, **limits).stages[0], ahead=True)
    assert none == 0
    assert planned > 50
    assert got == expected
    assert [len(got[str(index)]) for index in range(12)] == [5 + 3 * index for index in range(12)]
