"""Plans: how sequences are spread over the pipeline's slots, how chunks and decodes mix."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.scheduler import NewRequest, SamplingParams
from shardline.scheduler.microbatch import fair_share


def request(name, length=3, max_tokens=30, priority=0, first=0):
    prompt = tuple((index * 5 + first) % 3 for index in range(length))
    return NewRequest(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), priority)


def one_round(run):
    """The sizes of the plans that follow when each plan in flight comes back once."""
    sizes = []
    for _ in range(len(run.results)):
        run.deliver()
        sizes.extend(len(plan.runs) for plan in run.fill())
    return sizes


@given(active=st.integers(0, 200), depth=st.integers(1, 12), least=st.integers(1, 20))
def test_shares_add_up_evenly(active, depth, least):
    sizes = []
    left = active
    while left and len(sizes) < depth:
        sizes.append(min(left, fair_share(active, depth, least, sizes)))
        left -= sizes[-1]
    assert left == 0
    if sizes:
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= min(least, active)
        assert len(sizes) == max(1, min(depth, active // least))


@pytest.mark.parametrize(
    ("active", "sizes"), [(1, [1]), (3, [1, 1, 1]), (4, [1] * 4), (8, [2] * 4), (9, [3, 2, 2, 2]), (16, [4] * 4)]
)
def test_arrivals_fill_the_pipeline_evenly(driver, config, active, sizes):
    run = driver(config(num_blocks=200))
    for index in range(active):
        run.add(request(f"r{index}", first=index))
    assert [len(plan.runs) for plan in run.fill()] == sizes
    for _ in range(3):
        assert sorted(one_round(run), reverse=True) == sizes
    run.drain()


@pytest.mark.parametrize(("active", "sizes"), [(2, [2]), (7, [7]), (8, [4, 4]), (9, [5, 4]), (20, [5, 5, 5, 5])])
def test_never_thinner_than_asked(driver, config, active, sizes):
    run = driver(config(num_blocks=200, max_sequences=32, min_microbatch=4))
    for index in range(active):
        run.add(request(f"r{index}", length=1, first=index))
    assert [len(plan.runs) for plan in run.fill()] == sizes
    for _ in range(3):
        assert sorted(one_round(run), reverse=True) == sizes
    run.drain()


def test_thin_groups_merge(driver, config):
    """Sequences that come one by one end up in one microbatch, where that is what was asked for."""
    run = driver(config(min_microbatch=4))
    for index in range(3):
        run.add(request(f"r{index}", length=1, first=index))
        run.fill()
    assert len(run.results) == 1, "a second plan would have been thinner than asked"
    run.deliver()
    (plan,) = run.fill()
    assert len(plan.runs) == 3
    run.drain()


@given(seed=st.integers(0, 2**32), active=st.integers(5, 30), depth=st.integers(2, 6), gone=st.integers(0, 20))
def test_lopsided_groups_even_out(driver, config, seed, active, depth, gone):
    """Whoever ends or comes, two rounds later the decodes are spread evenly again."""
    run = driver(config(num_blocks=400, max_sequences=64, depth=depth))
    for index in range(active):
        run.add(request(f"r{index}", first=index, max_tokens=60))
    for _ in range(2 * depth):
        run.fill()
        run.deliver()
    draw = random.Random(seed)
    left = sorted(draw.sample(range(active), max(1, active - gone)))
    # The worst case: those that end sit together, as they came.
    for index in set(range(active)) - set(left):
        run.abort(f"r{index}")
    for _ in range(3):
        run.fill()
        one_round(run)
    sizes = sorted(len(result.tokens) for result in run.results)
    assert sum(sizes) == len(left)
    assert len(sizes) == min(depth, len(left))
    assert sizes[-1] - sizes[0] <= 1


def test_one_long_prompt_fills_the_pipeline(driver, config):
    run = driver(config())
    run.add(request("long", length=100))
    plans = run.fill()
    assert [(plan.runs[0].position, plan.num_tokens, plan.runs[0].samples) for plan in plans] == [
        (0, 16, False),
        (16, 16, False),
        (32, 16, False),
        (48, 16, False),
    ]
    run.drain()


def test_decodes_go_on_beside_a_long_prompt_in_every_plan(driver, config):
    run = driver(config(num_blocks=200, max_step_tokens=18))
    for index in range(8):
        run.add(request(f"r{index}", first=index))
    run.fill()
    for _ in range(8):
        run.deliver()
        run.fill()
    run.add(request("long", length=120, max_tokens=1))
    served = []
    while ("long", 0) not in run.finished:
        run.deliver()
        served.extend(run.fill())
    for plan in served[:8]:
        assert any(len(item.token_ids) > 1 for item in plan.runs), "each plan from the arrival on has a chunk"
        assert [len(item.token_ids) for item in plan.runs[:2]] == [1, 1], "and the decodes whose turn it was"
    run.drain()


def test_a_step_keeps_its_budget_with_decodes_first(driver, config):
    run = driver(config(depth=1, max_step_tokens=10, prefill_chunk=8))
    for index in range(4):
        run.add(request(f"r{index}", first=index))
    while any(not output for output in run.outputs.values()):
        run.fill()
        run.deliver()
    run.add(request("long", length=20))
    run.add(request("next", length=20, first=1))
    plan = run.schedule()
    assert [len(item.token_ids) for item in plan.runs] == [1, 1, 1, 1, 6]
    run.drain()


def test_at_most_depth_plans(driver, config):
    run = driver(config(depth=3))
    for index in range(10):
        run.add(request(f"r{index}", first=index))
    assert len(run.fill()) == 3
    assert run.scheduler.schedule() is None
    assert run.scheduler.stats().in_flight == 3
    run.drain()


def test_results_come_in_the_order_of_the_plans(driver, config):
    run = driver(config())
    run.add(request("a"))
    run.add(request("b", first=1))
    run.fill()
    run.results.reverse()
    with pytest.raises(AssertionError, match="before step 0"):
        run.deliver()
