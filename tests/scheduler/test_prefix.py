"""Sharing of prompt beginnings: what is found, what is saved, and when one waits for another."""

from __future__ import annotations

import pytest

from shardline.scheduler import NewRequest, SamplingParams

PROMPT = tuple(index * 7 % 3 for index in range(40))  # five blocks of 8


def request(name, prompt=PROMPT, priority=0, **params):
    return NewRequest(name, tuple(prompt), SamplingParams(**({"max_tokens": 4, "ignore_eos": True} | params)), priority)


def test_a_second_request_computes_only_what_differs(driver, config):
    run = driver(config())
    run.add(request("first"))
    run.drain()
    before = run.stages.num_computed_rows
    run.add(request("again"))
    run.add(request("longer", (*PROMPT, 1, 1, 2)))
    run.add(request("other", (1, *PROMPT[1:])))
    run.drain()
    # At least one token is left to compute, so the last of five blocks is computed again for an equal prompt.
    assert run.cached_tokens == {("first", 0): 0, ("again", 0): 32, ("longer", 0): 40, ("other", 0): 0}
    assert run.scheduler.stats().prefix_hit_tokens == 72
    assert run.stages.num_computed_rows - before == (8 + 3) + (3 + 3) + (40 + 3)


def test_the_generated_part_is_found_too(driver, config):
    run = driver(config())
    run.add(request("turn 1", max_tokens=20))
    run.drain()
    answer = run.outputs["turn 1", 0]
    run.add(request("turn 2", (*PROMPT, *answer, 0, 1)))
    run.drain()
    # The last token of the answer was never run: 59 of the 60 tokens are in the pool, 7 full blocks.
    assert run.cached_tokens["turn 2", 0] == 56


def test_without_prefix_cache_nothing_is_found_or_kept(driver, config):
    run = driver(config(prefix_cache=False))
    for name in ("first", "again"):
        run.add(request(name, n=2))
        run.drain()
        assert run.scheduler.stats().blocks_cached == 0
    assert run.scheduler.stats().prefix_hit_tokens == 0


def test_blocks_are_shared_as_soon_as_their_plan_is_issued(driver, config):
    run = driver(config(depth=8))
    run.add(request("first"))
    assert [plan.num_tokens for plan in run.fill()] == [16, 16, 8]
    run.add(request("again"))
    (plan,) = run.fill()
    assert plan.starts[0].block_ids == run.stages.plans[0].runs[0].new_block_ids + (
        run.stages.plans[1].runs[0].new_block_ids
    )
    run.drain()


def test_siblings_wait_for_the_prompt_and_share_it(driver, config):
    run = driver(config(num_blocks=14))
    run.add(request("many", n=5, max_tokens=6, temperature=1.0, seed=3))
    first, *_ = run.fill()
    assert len(first.starts) == 1, "the siblings would have computed the same prompt"
    # Of 45 tokens that run, 32 are in 4 shared blocks, and the rest in 2 of each one's own. Alone, each takes 6.
    while not all(run.outputs.values()):
        run.deliver()
        run.fill()
    assert run.scheduler.stats().running == 5
    assert run.scheduler.stats().blocks_used == 4 + 5 * 2
    run.drain()
    assert run.scheduler.stats().preemptions == 0
    assert [run.cached_tokens["many", index] for index in range(5)] == [0, 32, 32, 32, 32]


def test_requests_behind_one_system_prompt_compute_it_once(driver, config):
    run = driver(config(max_sequences=8))
    for index in range(8):
        run.add(request(f"user {index}", (*PROMPT, index % 3, index // 3)))
    run.drain()
    assert run.stages.num_computed_rows == 40 + 8 * (2 + 3)


def test_who_waits_for_a_prefix_lets_others_pass(driver, config):
    run = driver(config(depth=1))
    run.add(request("owner"))
    run.add(request("waits"))
    run.add(request("other", (2, 2, 2)))
    plan = run.schedule()
    assert [start.token_ids for start in plan.starts] == [PROMPT, (2, 2, 2)]
    run.drain()
    assert run.cached_tokens["waits", 0] == 32


@pytest.mark.parametrize("fate", ["abort", "loss"])
def test_who_waits_for_a_prefix_goes_on_when_nobody_computes_it_any_more(driver, config, fate):
    run = driver(config(depth=1))
    run.add(request("owner"))
    run.add(request("waits"))
    run.schedule()
    run.deliver()
    if fate == "abort":
        run.abort("owner")
    else:
        run.lose_stage()
    plan = run.schedule()
    assert len(plan.starts) == 1
    assert len(plan.starts[0].block_ids) == (2 if fate == "abort" else 0)
    run.drain()


def test_nothing_is_found_after_the_loss_of_a_stage(driver, config):
    run = driver(config())
    run.add(request("first"))
    run.drain()
    assert run.scheduler.stats().blocks_cached == 5
    run.lose_stage()
    assert run.scheduler.stats().blocks_cached == 0
    run.add(request("again"))
    run.drain()
    assert run.cached_tokens["again", 0] == 0


def test_pressure_evicts_what_nobody_holds(driver, config):
    run = driver(config(num_blocks=8))
    for index in range(12):
        run.add(request(f"r{index}", (index % 3, index // 3, *PROMPT)))
        run.drain()
    assert run.scheduler.stats().preemptions == 0
