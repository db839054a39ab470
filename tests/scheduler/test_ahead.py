"""Plans made one step ahead: who is in them, what they wait for, and that nothing is lost or gained by them. First of
one group, as where one stage has the whole model, then of several that take turns."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.scheduler import NewRequest, RequestTooLargeError, SamplingParams
from shardline.scheduler.plan import AHEAD

PROMPT = tuple(index * 7 % 3 for index in range(40))  # five blocks of 8


def request(name, length=3, max_tokens=30, priority=0, first=0, **params):
    prompt = tuple((index * 5 + first) % 3 for index in range(length))
    return NewRequest(name, prompt, SamplingParams(**({"ignore_eos": True} | params), max_tokens=max_tokens), priority)


@pytest.fixture
def ahead(driver, config):
    """A driver whose scheduler plans ahead, as on one GPU."""

    def make(**given):
        usual = {"num_blocks": 200, "depth": 2, "ahead": True}
        limits = config(**(usual | given))
        return driver(config(**({"min_microbatch": limits.max_sequences} | usual | given)))

    return make


def step(run):
    """One result, and the plans that follow it."""
    run.deliver()
    return run.fill()


def ids(plan):
    return {item.seq_id for item in plan.runs}


def is_ahead(plan):
    return all(item.token_ids == (AHEAD,) for item in plan.runs)


@pytest.mark.parametrize("min_microbatch", [1, 3, 16])
def test_all_that_decode_are_in_every_plan_and_the_pipeline_never_drains(ahead, min_microbatch):
    run = ahead(min_microbatch=min_microbatch)
    for index in range(10):
        run.add(request(f"r{index}", first=index))
    first, second = run.fill()
    assert not any(item.token_ids == (AHEAD,) for item in first.runs)
    assert is_ahead(second)
    assert ids(first) == ids(second)
    assert len(second.runs) == 10
    for _ in range(28):
        (plan,) = step(run)
        assert len(run.results) == 2
        assert is_ahead(plan)
        assert ids(plan) == ids(first)
    # The last token of each is being sampled.
    assert step(run) == []
    assert run.drain() == 0
    assert run.stages.num_computed_rows == 10 * (3 + 29)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_nobody_is_ahead_by_more_than_one_token_whatever_the_depth(ahead, depth):
    run = ahead(depth=depth)
    run.add(request("r"))
    assert len(run.fill()) == min(depth, 2)
    run.deliver()
    assert len(run.fill()) == 1
    run.drain()
    assert run.plans_ahead == (29 if depth > 1 else 0)


def test_no_plan_is_made_for_a_token_beyond_the_last(ahead):
    run = ahead()
    run.add(request("long", max_tokens=3))
    run.add(request("short", max_tokens=1))
    first, second = run.fill()
    assert [len(plan.runs) for plan in (first, second)] == [2, 1]
    assert run.drain() == 1


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_who_needs_the_token_before_makes_all_wait_and_nobody_is_left_behind(ahead, penalty):
    run = ahead()
    run.add(request("waits", max_tokens=10, **{penalty: 0.5}))
    for index in range(3):
        run.add(request(f"r{index}", first=index))
    (first,) = run.fill()
    for _ in range(8):
        (plan,) = step(run)
        assert ids(plan) == ids(first)
        assert len(run.results) == 1
        assert run.plans_ahead == 0
    # Its last token is being sampled: from here on it holds nobody up.
    assert [len(plan.runs) for plan in step(run)] == [4, 3]
    assert run.plans_ahead == 1
    run.drain()


def test_who_needs_the_token_before_and_has_only_a_prompt_in_flight_holds_nobody_up(ahead):
    run = ahead()
    run.add(request("r", max_tokens=60))
    run.fill()
    run.add(request("waits", length=40, presence_penalty=0.5, max_tokens=1))
    sizes = [[len(item.token_ids) for item in step(run)[0].runs] for _ in range(3)]
    assert sizes == [[1, 16], [1, 16], [1, 8]]
    # It samples the one token that it wants: nothing of it would come after.
    assert is_ahead(step(run)[0])
    run.drain()


def test_chunks_and_newcomers_are_beside_those_that_run_ahead(ahead):
    run = ahead(max_step_tokens=64)
    for index in range(4):
        run.add(request(f"r{index}", first=index))
    run.fill()
    run.add(request("long", length=40, max_tokens=5))
    run.add(request("next", length=3, max_tokens=5, first=1))
    (plan,) = step(run)
    assert [len(item.token_ids) for item in plan.runs] == [1, 1, 1, 1, 16, 3]
    assert sum(item.token_ids == (AHEAD,) for item in plan.runs) == 4
    (plan,) = step(run)
    assert sorted(len(item.token_ids) for item in plan.runs) == [1, 1, 1, 1, 1, 16]
    assert sum(item.token_ids == (AHEAD,) for item in plan.runs) == 5
    run.drain()


def test_chunks_of_a_prompt_follow_each_other(ahead):
    run = ahead()
    run.add(request("long", length=40, max_tokens=2))
    assert [plan.num_tokens for plan in run.fill()] == [16, 16]
    assert [plan.num_tokens for plan in step(run)] == [8]
    (plan,) = step(run)
    assert is_ahead(plan)
    run.drain()


def test_who_ends_while_it_is_ahead_leaves_no_trace(ahead):
    """Its end is seen when its next step has begun, whose result nobody gets."""
    run = ahead(num_blocks=8)
    run.add(NewRequest("ends", (0, 1), SamplingParams(max_tokens=60, seed=5)))
    tokens, reason = run.expected["ends", 0]
    assert (reason, 2 < len(tokens) < 20) == ("stop", True), "choose another seed"
    run.drain()
    assert run.outputs["ends", 0] == tokens
    # One row too many, and the step that it was alone in.
    assert run.stages.num_computed_rows == 2 + len(tokens)
    assert run.stages.next_step == len(tokens) + 1
    assert run.scheduler.stats().blocks_used == 0


def test_the_plan_that_is_left_over_does_not_disturb_those_that_come(ahead):
    run = ahead(num_blocks=3)
    run.add(NewRequest("ends", (0, 1), SamplingParams(max_tokens=20, seed=5)))
    while run.scheduler.has_unfinished():
        run.fill()
        run.deliver()
    assert len(run.results) == 1
    assert run.scheduler.stats().in_flight == 1
    # It needs the blocks that the step in flight still writes to.
    run.add(request("next", length=20, max_tokens=4))
    assert len(run.fill()) == 1
    assert run.deliver() == []
    run.drain()
    # And a loss forgets what is left over.
    run.add(NewRequest("again", (0, 1), SamplingParams(max_tokens=20, seed=5)))
    while run.scheduler.has_unfinished():
        run.fill()
        run.deliver()
    assert run.lose_stage() == []
    run.add(request("last", max_tokens=4))
    run.drain()


@pytest.mark.parametrize("fate", ["abort", "loss"])
def test_who_is_ahead_can_be_aborted_and_lost(ahead, fate):
    run = ahead(num_blocks=18, max_sequences=3)
    for index in range(3):
        run.add(request(f"r{index}", length=10 + index, first=index, max_tokens=40))
    run.fill()
    run.deliver()
    run.fill()
    assert all(sequence.lag == -1 for sequence in run.scheduler._running.values())
    if fate == "abort":
        run.abort("r1")
    else:
        run.lose_stage()
    run.scheduler.check_integrity()
    run.drain()
    assert len(run.finished) == (2 if fate == "abort" else 3)


def test_a_plan_ahead_preempts_nobody(ahead):
    """Whoever lacks a block waits for the result: it may end somebody who has one."""
    run = ahead(num_blocks=8, prefix_cache=False)
    for index in range(4):
        run.add(request(f"r{index}", length=14, first=index, max_tokens=30))
    waited = 0
    while run.scheduler.has_unfinished() or run.results:
        # The driver sees to it that nobody is preempted by a plan while another is in flight.
        if run.schedule() is None:
            waited += len(run.results) == 1
            run.deliver()
        run.scheduler.check_integrity()
    assert run.scheduler.stats().preemptions
    assert waited
    assert run.plans_ahead > 30
    run.check_idle()


def test_an_urgent_request_is_not_kept_out_by_plans_ahead(ahead):
    """It takes the blocks of another class, which a plan ahead does not: so the next plan is none."""
    run = ahead(num_blocks=8, max_sequences=2, prefix_cache=False)
    for index in range(2):
        run.add(request(f"r{index}", length=16, first=index, max_tokens=16))
    run.fill()
    step(run)
    run.add(request("urgent", length=16, priority=-10, max_tokens=4))
    for _ in range(3):
        step(run)
    assert run.scheduler.stats().preemptions == 1
    while ("urgent", 0) not in run.finished:
        run.fill()
        run.deliver()
    assert not run.finished.keys() & {("r0", 0), ("r1", 0)}
    run.drain()


def test_a_step_that_has_no_room_for_all_is_not_made_ahead(ahead):
    run = ahead(max_step_tokens=4, max_sequences=8)
    # As suspects they run one by one up to their first tokens, so that more than four decode then.
    for index in range(6):
        run.add(request(f"r{index}", length=1, first=index, max_tokens=13), alone=True)
    while run.scheduler.has_suspects():
        run.fill()
        run.deliver()
    sizes = []
    while all(len(output) < 11 for output in run.outputs.values()):
        sizes += [len(plan.runs) for plan in run.fill()]
        assert len(run.results) == 1
        assert run.plans_ahead == 0
        run.deliver()
        tokens = [len(output) for output in run.outputs.values()]
        assert max(tokens) - min(tokens) <= 1
    assert set(sizes) == {4}
    run.drain()


def test_the_block_of_a_token_that_came_later_is_found_with_that_token(ahead):
    run = ahead()
    run.add(NewRequest("turn 1", PROMPT, SamplingParams(max_tokens=20, ignore_eos=True)))
    run.drain()
    assert run.plans_ahead == 19
    answer = run.outputs["turn 1", 0]
    # All but the last token are in the pool, 59 of them: 7 full blocks.
    run.add(NewRequest("turn 2", (*PROMPT, *answer, 0, 1), SamplingParams(max_tokens=4, ignore_eos=True)))
    run.drain()
    assert run.cached_tokens["turn 2", 0] == 56


def test_a_block_is_not_found_before_its_last_token_is_known(ahead):
    run = ahead()
    run.add(NewRequest("first", PROMPT[:14], SamplingParams(max_tokens=30, ignore_eos=True)))
    run.fill()
    run.deliver()
    # Positions 14 and 15: the plan ahead, the second of them, fills the block.
    (plan,) = run.fill()
    assert (plan.runs[0].position, plan.runs[0].token_ids) == (15, (AHEAD,))
    known = (*PROMPT[:14], *run.expected["first", 0][0][:2])
    run.add(NewRequest("same", (*known, 0), SamplingParams(max_tokens=2)))
    run.deliver()
    run.fill()
    run.drain()
    # Its prompt was one that nobody could know: with the token, the block was there.
    assert run.cached_tokens["same", 0] == 16


def test_without_ahead_no_plan_is(driver, config):
    """And nobody is in a plan while its token is being sampled: the driver checks each run."""
    run = driver(config(depth=4))
    for index in range(12):
        run.add(request(f"r{index}", first=index))
    run.drain()
    assert run.plans_ahead == 0
    assert all(AHEAD not in item.token_ids for plan in run.stages.plans for item in plan.runs)


requests = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.integers(1, 30),
        st.sampled_from([0, 0, 1, -1]),
        st.booleans(),
        st.sampled_from([0.0, 0.0, 0.0, 0.5]),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=12,
)


def served(run, asked, ignore_eos=None):
    """Serves them; each comes when the given number of results has come after the one before."""
    late = 0
    for index, (length, most, priority, ends, penalty, wait) in enumerate(asked):
        late += wait
        one = request(
            f"r{index}",
            length,
            most,
            priority,
            index,
            ignore_eos=ends if ignore_eos is None else ignore_eos,
            presence_penalty=penalty,
            seed=index,
        )
        for _ in range(wait):
            run.fill()
            if run.results:
                run.deliver()
        try:
            run.add(one)
        except RequestTooLargeError:
            continue
    run.drain()
    return run.stages.next_step


@settings(max_examples=100, deadline=None)
@given(asked=requests)
def test_it_takes_no_more_steps_than_one_at_a_time(driver, config, asked):
    """All come at once, and nobody ends early: then both have the same steps, sequence by sequence."""
    at_once = [(*one[:5], 0) for one in asked]
    alike = {"num_blocks": 400, "max_sequences": 16, "min_microbatch": 16, "max_step_tokens": 512}
    one = driver(config(depth=1, **alike))
    two = driver(config(depth=2, ahead=True, **alike))
    assert served(two, at_once, ignore_eos=True) <= served(one, at_once, ignore_eos=True)
    assert two.stages.num_computed_rows == one.stages.num_computed_rows


@settings(max_examples=200, deadline=None)
@given(
    asked=requests,
    depth=st.sampled_from([2, 3, 5]),
    min_microbatch=st.sampled_from([1, 2, 8]),
    num_blocks=st.sampled_from([6, 9, 40]),
    max_step_tokens=st.sampled_from([5, 64]),
    max_sequences=st.sampled_from([2, 8]),
)
def test_nobody_starves(driver, config, asked, depth, min_microbatch, num_blocks, max_step_tokens, max_sequences):
    """The first in rank has a token in every other turn at the latest, once its prompt is read: under any pressure."""
    run = driver(
        config(
            depth=depth,
            ahead=True,
            num_blocks=num_blocks,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            min_microbatch=min(min_microbatch, max_sequences),
        )
    )
    steps = served(run, asked)
    work = sum(-(-min(length, 40) // min(16, max_step_tokens)) + most for length, most, *_ in asked)
    assert steps <= 3 * work + 10


def test_random_traffic_on_one_gpu_never_leaves_anybody_behind(ahead):
    """In each plan that decodes is whoever was in the one before and has not ended: nobody waits a step."""
    draw = random.Random(3)
    run = ahead(max_sequences=12, max_step_tokens=128)
    behind: set[int] = set()
    for turn in range(600):
        if draw.random() < 0.15 and turn < 500:
            penalty = draw.choice([0.0, 0.0, 0.5])
            run.add(request(f"r{turn}", draw.randint(1, 30), draw.randint(1, 30), 0, turn, presence_penalty=penalty))
        for plan in run.fill():
            running = run.scheduler._running
            sampling = {item.seq_id for item in plan.runs if item.samples}
            left = {seq_id for seq_id in behind - sampling if seq_id in running}
            assert all(running[seq_id].samples_its_last for seq_id in left), "somebody was left behind"
            behind = sampling
        run.scheduler.check_integrity()
        if run.results:
            run.deliver()
    run.drain()
    assert run.plans_ahead > 100


# -- several stages ------------------------------------------------------------------------------------------------


@pytest.fixture
def turns(driver, config):
    """A driver whose scheduler plans ahead for so many stages."""

    def make(stages, **given):
        return driver(config(**({"num_blocks": 200, "depth": stages + 1, "ahead": True} | given)))

    return make


def sampled_by(run, seq_id):
    """The places among the plans in flight of those that sample for a sequence."""
    return [place for place, result in enumerate(run.results) if seq_id in {token.seq_id for token in result.tokens}]


def check_waits_for_the_oldest(run, plan):
    """What it needs comes with the next result: the first stage waits for nothing that is behind another step."""
    for item in plan.runs:
        if item.token_ids == (AHEAD,):
            assert sampled_by(run, item.seq_id)[0] == 0


@pytest.mark.parametrize(
    ("stages", "active", "sizes"), [(2, 8, [4, 4]), (2, 7, [4, 3]), (3, 9, [3, 3, 3]), (4, 4, [1] * 4)]
)
def test_groups_take_turns_and_no_stage_waits_for_a_plan(turns, stages, active, sizes):
    run = turns(stages)
    for index in range(active):
        run.add(request(f"r{index}", first=index))
    *groups, again = run.fill()
    assert sorted((len(plan.runs) for plan in groups), reverse=True) == sizes
    assert not any(item.token_ids == (AHEAD,) for plan in groups for item in plan.runs)
    assert is_ahead(again)
    assert ids(again) == ids(groups[0])
    for turn in range(1, 3 * stages):
        assert len(run.results) == stages + 1
        (plan,) = step(run)
        assert is_ahead(plan)
        assert ids(plan) == ids(groups[turn % stages])
        check_waits_for_the_oldest(run, plan)
    run.drain()
    assert run.stages.num_computed_rows == active * (3 + 29)


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_one_sequence_alone_has_two_plans_in_flight(turns, stages):
    run = turns(stages)
    run.add(request("r"))
    assert len(run.fill()) == 2
    for _ in range(28):
        assert is_ahead(step(run)[0])
        assert len(run.results) == 2
    run.drain()
    assert run.plans_ahead == 29


def test_fewer_sequences_than_slots_have_two_plans_each(turns):
    run = turns(8)
    for index in range(3):
        run.add(request(f"r{index}", first=index))
    first = run.fill()
    assert [len(plan.runs) for plan in first] == [1] * 6
    assert [ids(plan) for plan in first[3:]] == [ids(plan) for plan in first[:3]]
    run.drain()


def test_who_waits_for_blocks_keeps_nobody_from_running_ahead(turns):
    """The queue would make a second group, if only it could enter."""
    run = turns(2, num_blocks=6, prefix_cache=False)
    run.add(request("first", length=40, max_tokens=8))
    run.fill()
    run.add(request("waits", length=40, max_tokens=8))
    while ("first", 0) not in run.finished:
        run.fill()
        run.deliver()
    assert run.plans_ahead == 7
    run.drain()


def test_who_needs_the_token_before_holds_up_its_own_group_alone(turns):
    run = turns(2)
    run.add(request("waits", presence_penalty=0.5))
    for index in range(3):
        run.add(request(f"r{index}", first=index))
    held, free = run.fill()
    assert (len(ids(held)), len(ids(free))) == (2, 2)
    for _ in range(6):
        ready, ahead_of = step(run)
        assert (ids(ready), ids(ahead_of)) == (ids(held), ids(free))
        assert not any(item.token_ids == (AHEAD,) for item in ready.runs)
        assert is_ahead(ahead_of)
        assert step(run) == []
    run.drain()


def test_groups_that_became_uneven_are_even_again_within_a_turn(turns):
    run = turns(2)
    for index in range(10):
        run.add(request(f"r{index}", first=index, max_tokens=60))
    first, *_ = run.fill()
    names = {sequence.seq_id: sequence.request.request.request_id for sequence in run.scheduler._running.values()}
    for seq_id in sorted(ids(first))[:4]:
        run.abort(names[seq_id])
    sizes = [len(plan.runs) for _ in range(8) for plan in step(run)]
    assert sizes[-4:] == [3, 3, 3, 3]
    run.drain()


def test_a_newcomer_takes_the_slot_that_is_free_before_anybody_runs_ahead(turns):
    run = turns(2)
    run.add(request("r", max_tokens=60))
    assert len(run.fill()) == 2
    step(run)
    run.add(request("next", length=3, first=1))
    newcomer, again = step(run)
    assert [len(item.token_ids) for item in newcomer.runs] == [3]
    assert is_ahead(again)
    assert not ids(newcomer) & ids(again)
    for _ in range(4):
        step(run)
    assert len(run.results) == 3
    assert [len(result.tokens) for result in run.results] == [1, 1, 1]
    run.drain()


@pytest.mark.parametrize("stages", [2, 3])
def test_with_every_slot_taken_nobody_is_preempted_and_else_as_ever(turns, stages):
    """The driver sees to the first half."""
    run = turns(stages, num_blocks=8, prefix_cache=False)
    for index in range(4):
        run.add(request(f"r{index}", length=14, first=index, max_tokens=30))
    run.drain()
    assert run.scheduler.stats().preemptions
    assert run.plans_ahead > 30


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("fate", ["abort", "loss"])
def test_who_is_ahead_in_turns_can_be_aborted_and_lost(turns, stages, fate):
    run = turns(stages, num_blocks=18, max_sequences=3)
    for index in range(3):
        run.add(request(f"r{index}", length=10 + index, first=index, max_tokens=40))
    for _ in range(5):
        run.fill()
        run.deliver()
    run.fill()
    assert any(sequence.lag == -1 for sequence in run.scheduler._running.values())
    if fate == "abort":
        run.abort("r1")
    else:
        run.lose_stage()
    run.scheduler.check_integrity()
    run.drain()
    assert len(run.finished) == (2 if fate == "abort" else 3)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_random_traffic_in_turns_waits_for_no_step_in_the_middle(turns, stages):
    """Whatever comes and goes: where every slot is taken, a plan ahead needs the oldest plan's tokens at most."""
    draw = random.Random(stages)
    run = turns(stages, max_sequences=12, max_step_tokens=128)
    full = 0
    for turn in range(800):
        if draw.random() < 0.1 and turn < 700:
            penalty = draw.choice([0.0, 0.0, 0.0, 0.5])
            run.add(request(f"r{turn}", draw.randint(1, 30), draw.randint(1, 40), 0, turn, presence_penalty=penalty))
        while (plan := run.schedule()) is not None:
            if len(run.results) == stages + 1:
                full += 1
                waits = [sampled_by(run, item.seq_id)[0] for item in plan.runs if item.token_ids == (AHEAD,)]
                running = len(run.scheduler._running)
                assert max(waits, default=0) <= max(0, stages - running), "a slot stands empty"
        run.scheduler.check_integrity()
        if run.results:
            run.deliver()
    run.drain()
    assert full > 100
    assert run.plans_ahead > 100


@settings(max_examples=100, deadline=None)
@given(asked=requests, stages=st.sampled_from([2, 3, 5]))
def test_it_computes_the_rows_of_one_step_at_a_time(driver, config, asked, stages):
    at_once = [(*one[:5], 0) for one in asked]
    alike = {"num_blocks": 400, "max_sequences": 16, "max_step_tokens": 512}
    one = driver(config(depth=1, **alike))
    several = driver(config(depth=stages + 1, ahead=True, **alike))
    served(one, at_once, ignore_eos=True)
    served(several, at_once, ignore_eos=True)
    # What is found in the cache hangs on who has ended.
    rows = [run.stages.num_computed_rows + sum(run.cached_tokens.values()) for run in (one, several)]
    assert rows[0] == rows[1]
