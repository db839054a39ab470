"""Requests at the door and at their end: what is refused, how a sequence ends, abort at any moment, seeds."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest

from shardline.scheduler import (
    InvalidParameterError,
    NewRequest,
    QueueFullError,
    RequestTooLargeError,
    SamplingParams,
    Scheduler,
)
from shardline.scheduler.sequence import derived_seed

PROMPT = (0, 1, 2, 0, 1)


def request(name="r", prompt=PROMPT, priority=0, **params):
    return NewRequest(name, tuple(prompt), SamplingParams(**params), priority)


@pytest.mark.parametrize(
    ("changes", "params", "text"),
    [
        ({"length": 128}, {}, r"prompt has 128 tokens.*context holds 128.*shorten the prompt to 127"),
        ({"length": 500}, {"max_tokens": 1}, r"prompt has 500 tokens.*context holds 128.*shorten"),
        ({"length": 81, "num_blocks": 10}, {}, r"81 tokens needs 11 blocks of 8.*pool has 10 \(80 tokens\).*to 80"),
        (
            {"length": 70, "num_blocks": 10},
            {"max_tokens": 12},
            r"70 tokens with max_tokens=12 needs 11 blocks of 8 tokens.*has 10 \(80 tokens\): lower max_tokens to 11",
        ),
    ],
)
def test_what_can_never_fit_is_refused_with_numbers_and_remedy(config, changes, params, text):
    length = changes.pop("length")
    scheduler = Scheduler(config(**changes))
    with pytest.raises(RequestTooLargeError, match=text) as caught:
        scheduler.add(request(prompt=[0] * length, **params))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not scheduler.has_unfinished()
    assert scheduler.schedule() is None
    scheduler.add(request())  # others are unharmed, and the id is free
    assert scheduler.schedule() is not None


def test_the_remedies_are_exact(driver, config):
    run = driver(config(num_blocks=10))
    run.add(request("prompt", prompt=[0] * 80, ignore_eos=True))
    run.add(request("output", prompt=[1] * 70, max_tokens=11, ignore_eos=True))
    run.drain()
    assert len(run.outputs["prompt", 0]) == 1
    assert len(run.outputs["output", 0]) == 11
    run = driver(config(num_blocks=64))
    run.add(request("context", prompt=[0] * 127, ignore_eos=True, max_tokens=50))
    run.drain()
    assert run.finished["context", 0] == "length"
    assert len(run.outputs["context", 0]) == 1


def test_without_max_tokens_a_sequence_ends_with_the_context_or_the_pool(driver, config):
    for num_blocks, total in ((64, 128), (5, 41)):
        run = driver(config(num_blocks=num_blocks))
        run.add(request(ignore_eos=True))
        run.drain()
        assert len(PROMPT) + len(run.outputs["r", 0]) == total
        assert run.finished["r", 0] == "length"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (request(prompt=()), "prompt_ids"),
        (request(prompt=(0, 4)), "prompt_ids"),
        (request(prompt=(0, -1)), "prompt_ids"),
        (request(prompt=(0, True)), "prompt_ids"),
        (request(prompt=(0, 1.0)), "prompt_ids"),
        (request(stop_token_ids=(4,)), "stop_token_ids"),
        (request(logit_bias=((9, 1.0),)), "logit_bias"),
        (request(temperature=1.0), "seed"),
        (dataclasses.replace(request(), priority=1.5), "priority"),
        (request("taken"), "request_id"),
    ],
)
def test_wrong_requests_are_refused_and_leave_no_trace(driver, config, wrong, field):
    run = driver(config())
    run.add(request("taken"))
    with pytest.raises(InvalidParameterError, match=re.escape(field)) as caught:
        run.scheduler.add(wrong)
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)
    assert run.scheduler.unfinished() == ["taken"]
    run.drain()


def test_an_id_is_free_again_after_its_end(driver, config):
    run = driver(config())
    for _ in range(2):
        run.add(request(max_tokens=2))
        run.drain()
        run.finished.clear()
        run.cached_tokens.clear()


def test_the_queue_is_bounded(driver, config):
    run = driver(config(max_waiting=3, max_sequences=2))
    for index in range(3):
        run.add(request(f"r{index}", n=4, max_tokens=3))
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        run.scheduler.add(request("one too many"))
    run.scheduler.check_integrity()
    run.drain()
    run.add(request("later"))
    run.drain()


def test_ends(driver, config):
    run = driver(config(eos_token_ids=(3,)))
    run.add(request("eos"))
    run.add(request("on", ignore_eos=True, max_tokens=60))
    run.add(request("stop", stop_token_ids=(2,), ignore_eos=True))
    run.add(request("one", max_tokens=1, ignore_eos=True))
    run.drain()
    assert run.outputs["eos", 0][-1] == 3
    assert 3 not in run.outputs["eos", 0][:-1]
    assert run.finished["eos", 0] == "stop"
    assert 3 in run.outputs["on", 0]
    assert len(run.outputs["on", 0]) == 60
    assert run.finished["on", 0] == "length"
    assert run.outputs["stop", 0].index(2) == len(run.outputs["stop", 0]) - 1
    assert run.finished["stop", 0] == "stop"
    assert (len(run.outputs["one", 0]), run.finished["one", 0]) == (1, "length")


def test_a_stop_token_at_the_length_limit_is_a_stop(driver, config):
    run = driver(config())
    run.add(request("free", stop_token_ids=(2,), ignore_eos=True))
    run.drain()
    length = len(run.outputs["free", 0])
    run.add(request("tight", stop_token_ids=(2,), ignore_eos=True, max_tokens=length))
    run.drain()
    assert run.finished["tight", 0] == "stop"


def test_seeds_of_the_sequences_of_a_request():
    # Frozen: a change would change what users get for a seed.
    assert [derived_seed(1, index) for index in range(4)] == [
        1,
        10451216379200822465,
        13757245211066428519,
        17911839290282890590,
    ]
    assert len({derived_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(128)}) == 3 * 128
    assert all(0 <= derived_seed(2**64 - 1, index) < 2**64 for index in range(128))


def test_each_sequence_of_a_request_starts_with_a_seed_of_its_own(driver, config):
    run = driver(config())
    run.add(request("many", n=4, seed=9, temperature=1.0, max_tokens=8))
    run.add(request("greedy", n=2, max_tokens=4))
    run.drain()
    seeds = [start.params.seed for plan in run.stages.plans for start in plan.starts]
    assert sorted(seeds) == sorted([derived_seed(9, i) for i in range(4)] + [derived_seed(0, i) for i in range(2)])


# Abort, in each state that a sequence can be in.


def test_abort_in_the_queue(driver, config):
    run = driver(config(max_sequences=1))
    run.add(request("first", max_tokens=5))
    run.add(request("queued"))
    run.fill()
    run.abort("queued")
    assert run.scheduler.unfinished() == ["first"]
    run.drain()
    assert run.outputs["queued", 0] == []


@pytest.mark.parametrize("chunks_back", range(5))
def test_abort_in_any_chunk_of_a_prompt(driver, config, chunks_back):
    """Some chunks are back, some in flight, some not planned; the last one samples a token that nobody may get."""
    run = driver(config(depth=2))
    run.add(request("r", prompt=[index % 3 for index in range(64)]))
    run.add(request("other", prompt=[1] * 20, max_tokens=8))
    run.fill()
    for _ in range(chunks_back):
        run.deliver()
        run.fill()
    used = run.scheduler.stats().blocks_used
    run.abort("r")
    run.scheduler.check_integrity()
    assert run.scheduler.stats().blocks_used < used
    run.add(request("next", prompt=[2] * 30, max_tokens=5))
    run.drain()


def test_abort_while_a_sample_is_in_flight_frees_its_blocks_for_the_next_plan(driver, config):
    run = driver(config(num_blocks=3, depth=3, prefix_cache=False))
    run.add(request("r", prompt=[0] * 20, max_tokens=4))
    run.fill()
    run.abort("r")
    run.add(request("next", prompt=[1] * 24, max_tokens=1))
    plan = run.schedule()
    assert plan.forget == (0,)
    assert len(plan.runs[0].new_block_ids) == 2
    run.drain()


def test_abort_of_a_preempted_sequence(driver, config):
    run = driver(config(num_blocks=6, depth=1))
    for index in range(3):
        run.add(request(f"r{index}", prompt=[index] * 14, max_tokens=30, ignore_eos=True))
    while not run.scheduler.stats().preemptions:
        run.fill()
        run.deliver()
    run.abort("r2")
    run.scheduler.check_integrity()
    run.drain()


def test_abort_of_one_sequence_leaves_the_others(driver, config):
    run = driver(config())
    run.add(request("many", n=3, max_tokens=6, ignore_eos=True))
    run.fill()
    run.abort("many", 1)
    run.abort("many", 7)
    assert run.scheduler.unfinished() == ["many"]
    run.drain()
    assert set(run.finished) == {("many", 0), ("many", 2)}


def test_abort_of_the_first_sibling_lets_the_others_compute_the_prompt(driver, config):
    run = driver(config(depth=1, prefill_chunk=8))
    run.add(request("many", prompt=[index % 3 for index in range(40)], n=3, max_tokens=2))
    run.schedule()
    run.abort("many", 0)
    run.deliver()
    run.drain()
    assert set(run.finished) == {("many", 1), ("many", 2)}


def test_abort_of_what_is_not_there_is_no_error(driver, config):
    run = driver(config())
    run.scheduler.abort("never")
    run.add(request("r", max_tokens=1))
    run.drain()
    run.scheduler.abort("r")
    run.scheduler.abort("r", 0)
    run.check_idle()


def test_forgotten_ids_are_named_once_and_before_they_could_be_used_again(driver, config):
    run = driver(config())
    for index in range(6):
        run.add(request(f"r{index}", max_tokens=3, n=2))
        run.drain()
    starts = [start.seq_id for plan in run.stages.plans for start in plan.starts]
    forgotten = [seq_id for plan in run.stages.plans for seq_id in plan.forget]
    assert len(set(starts)) == len(starts) == 12
    assert len(set(forgotten)) == len(forgotten) == 10  # the last two wait for a next plan


@pytest.mark.parametrize("fate", ["abort", "loss", "end"])
def test_stages_never_hear_of_a_sequence_whose_plan_was_not_made(driver, config, fate):
    """It entered, but its plan would have been too thin; whatever becomes of it, no stage is told to forget it."""
    run = driver(config(min_microbatch=4))
    run.add(request("running", prompt=[1] * 20, max_tokens=9, ignore_eos=True))
    run.fill()
    run.add(request("thin", max_tokens=2, prompt=[0]))
    assert run.schedule() is None
    assert run.scheduler.stats().running == 2
    run.scheduler.check_integrity()
    if fate == "abort":
        run.abort("thin")
    elif fate == "loss":
        run.lose_stage()
    run.drain()
    forgotten = [seq_id for plan in run.stages.plans for seq_id in plan.forget]
    assert (1 in forgotten) == (fate == "end")


def test_loss_of_a_stage_keeps_tokens_ids_and_order(driver, config):
    run = driver(config())
    for index in range(8):
        run.add(request(f"r{index}", prompt=[index % 3] * (10 + index), max_tokens=12, ignore_eos=True))
    for _ in range(20):
        run.fill()
        run.deliver()
    generated = sum(map(len, run.outputs.values()))
    assert generated > 0
    steps = run.stages.next_step
    run.lose_stage()
    stats = run.scheduler.stats()
    assert (stats.running, stats.waiting, stats.in_flight, stats.blocks_used, stats.blocks_cached) == (0, 8, 0, 0, 0)
    plan = run.schedule()
    assert plan.step_id == steps
    assert plan.forget == ()
    run.drain()
    assert all(len(output) == 12 for output in run.outputs.values())
    assert run.scheduler.stats().preemptions == 0
