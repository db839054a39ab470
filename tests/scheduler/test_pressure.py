"""A pool that is too small for all: who is preempted, that nothing is lost, and that everybody ends."""

from __future__ import annotations

import pytest

from shardline.scheduler import NewRequest, SamplingParams


def request(name, length=8, max_tokens=40, priority=0, first=0, **params):
    # The first token differs, so that no two prompts share a block.
    prompt = (first % 3, first // 3 % 3, first // 9 % 3, *(index % 3 for index in range(length - 3)))
    return NewRequest(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params), priority)


def running(run):
    return [sequence.request.request.request_id for sequence in run.scheduler._running.values()]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_preemption_keeps_every_token(driver, config, depth, prefix_cache):
    run = driver(config(num_blocks=8, depth=depth, prefix_cache=prefix_cache))
    for index in range(4):
        run.add(request(f"r{index}", first=index))
    run.drain()
    stats = run.scheduler.stats()
    assert stats.preemptions > 0
    assert all(len(output) == 40 for output in run.outputs.values())
    # Every preempted sequence came back with what it had generated: the driver compared each token with a run alone.
    starts = [start for plan in run.stages.plans for start in plan.starts]
    assert len(starts) == 4 + stats.preemptions
    assert any(len(start.token_ids) > start.prompt_len for start in starts)


def test_the_newest_of_the_lowest_priority_is_preempted(driver, config):
    run = driver(config(num_blocks=8, depth=1, prefill_chunk=32))
    for name, priority in (("old", 0), ("low", 1), ("new", 0), ("low new", 1)):
        run.add(request(name, length=15, priority=priority, first=len(run.requests)))
    run.schedule()
    run.deliver()
    assert set(running(run)) == {"old", "low", "new", "low new"}
    gone = []
    while len(running(run)) > 1 and not run.finished:
        before = set(running(run))
        run.schedule()
        run.deliver()
        gone.extend(before - set(running(run)))
    assert gone[:3] == ["low new", "low", "new"]
    run.drain()


def test_the_first_in_rank_is_never_preempted(driver, config):
    run = driver(config(num_blocks=6, depth=2))
    for index in range(6):
        run.add(request(f"r{index}", first=index))
    run.drain()
    for plan in run.stages.plans:
        for start in plan.starts:
            if start.token_ids[:3] == (0, 0, 0):
                assert len(start.token_ids) == start.prompt_len, "the oldest came back from a preemption"
    assert run.scheduler.stats().preemptions > 0


def test_the_preempted_goes_before_those_that_came_later(driver, config):
    run = driver(config(num_blocks=8, depth=1))
    for index in range(5):
        run.add(request(f"r{index}", length=20, first=index))
    ends = []
    while run.scheduler.has_unfinished():
        run.schedule()
        ends.extend(update.request_id for update in run.deliver() if update.finish_reason)
    assert run.scheduler.stats().preemptions > 0
    assert ends == sorted(ends), "equal requests end in the order in which they came"


def test_a_result_for_a_preempted_sequence_is_ignored_even_when_it_is_back(driver, config):
    """Preempted while its sample is in flight, and back before the result: it must not take the token twice."""
    run = driver(config(num_blocks=4))
    run.add(request("first", length=15, max_tokens=12))
    run.add(request("victim", length=15, first=1, max_tokens=12))
    assert [len(plan.runs) for plan in run.fill()] == [1, 1]
    for _ in range(2):
        run.deliver()
        assert len(run.fill()) == 1
    assert [result.tokens[0].seq_id for result in run.results] == [0, 1]
    run.deliver()
    (plan,) = run.fill()  # the first needs a third block
    assert plan.forget == (1,)
    run.abort("first")
    plan, *_ = run.fill()
    assert (plan.starts[0].seq_id, len(plan.starts[0].token_ids)) == (2, 16)
    assert run.results[0].tokens[0].seq_id == 1
    assert run.deliver() == []
    run.drain()
    assert len(run.outputs["victim", 0]) == 12


def test_urgent_requests_displace_less_urgent_ones(driver, config):
    run = driver(config(num_blocks=10, depth=1, prefill_chunk=64))
    for index in range(2):
        run.add(request(f"low {index}", length=30, priority=1, first=index))
    run.schedule()
    run.deliver()
    run.add(request("urgent", length=30, priority=0, first=5))
    plan = run.schedule()
    assert [start.token_ids[0] for start in plan.starts] == [5 % 3]
    assert running(run) == ["low 0", "urgent"]
    run.drain()


def test_urgent_requests_displace_nobody_in_vain(driver, config):
    run = driver(config(num_blocks=10, depth=1, prefill_chunk=64))
    run.add(request("same", length=60, priority=0, max_tokens=15))
    run.add(request("low", length=8, priority=1, first=1))
    run.schedule()
    run.deliver()
    run.add(request("urgent", length=40, priority=0, first=2))
    run.schedule()
    assert running(run) == ["same", "low"], "without the low one it would not fit either"
    run.drain()


@pytest.mark.parametrize(("num_blocks", "enters"), [(10, False), (11, True)])
def test_what_the_urgent_one_shares_with_a_victim_does_not_become_available(driver, config, num_blocks, enters):
    run = driver(config(num_blocks=num_blocks, depth=1, prefill_chunk=64, max_step_tokens=128))
    run.add(request("same", length=9, first=1, max_tokens=10))
    run.add(request("low", length=41, priority=1, max_tokens=10))
    run.schedule()
    run.deliver()
    # Two blocks are another's, and five of nine are found with the low one, which has only one more to give.
    low = run.requests["low"].prompt_ids
    run.add(NewRequest("urgent", low[:40] + (2,) * 32, SamplingParams(max_tokens=1)))
    run.schedule()
    assert running(run) == (["same", "urgent"] if enters else ["same", "low"])
    run.drain()


def test_equals_do_not_displace_each_other(driver, config):
    """Not even one that came later, and passed while the other waited for a prefix."""
    run = driver(config(depth=1, max_sequences=2))
    for name, first in (("owner", 0), ("waits", 0), ("later", 1)):
        run.add(request(name, length=20, first=first))
    run.schedule()
    assert running(run) == ["owner", "later"]
    run.drain()
    assert run.scheduler.stats().preemptions == 0


def test_nobody_is_displaced_for_a_place(driver, config):
    run = driver(config(num_blocks=64, max_sequences=2))
    for index in range(6):
        run.add(request(f"r{index}", first=index, max_tokens=10))
    run.drain()
    assert run.scheduler.stats().preemptions == 0


def test_everybody_ends_soon_under_constant_pressure(driver, config):
    """The queue never empties; each request still ends within a bound that the requests before it set."""
    run = driver(config(num_blocks=10, depth=2, max_sequences=8))
    began, took = {}, []
    for step in range(1500):
        if len(run.scheduler.unfinished()) < 12:
            name = f"r{len(run.requests)}"
            long = len(run.requests) % 5 == 0
            run.add(request(name, length=50 if long else 9, max_tokens=20, first=len(run.requests)))
            began[name] = step
        run.fill()
        if run.results:
            ended = [update.request_id for update in run.deliver() if update.finish_reason]
            took.extend(step - began[name] for name in ended)
        run.scheduler.check_integrity()
    assert run.scheduler.stats().preemptions > 10
    assert len(took) > 60
    # Twelve requests of at most 20 + 50 / 16 steps each, two plans in flight, were they to run one after the other.
    assert max(took) < 12 * 24 * 2
    run.drain()


def test_a_stream_of_urgent_requests_does_not_starve_the_others(driver, config):
    run = driver(config(num_blocks=6, depth=1, max_sequences=1, priority_span=10))
    run.add(request("patient", priority=2, max_tokens=3))
    passed = 0
    for step in range(4000):
        if len(run.scheduler.unfinished()) < 4:
            run.add(request(f"urgent {step}", priority=0, max_tokens=3, first=step))
        run.fill()
        passed += sum(update.finish_reason is not None for update in run.deliver())
        if ("patient", 0) in run.finished:
            break
    assert passed - 1 <= 2 * 10, "it was overtaken by more than priority_span for each priority"
    assert passed - 1 >= 10, "priorities mean nothing if nobody overtakes"
    run.drain()


def test_classes_are_served_in_order(driver, config):
    run = driver(config(max_sequences=1))
    for index, priority in enumerate((1, 0, 2, -1, 0, 1)):
        run.add(request(f"{priority} {index}", priority=priority, max_tokens=2, first=index))
    ends = []
    while run.scheduler.has_unfinished():
        run.fill()
        ends.extend(update.request_id for update in run.deliver() if update.finish_reason)
    assert ends == ["-1 3", "0 1", "0 4", "1 0", "1 5", "2 2"]


def test_a_long_prompt_is_not_passed_for_ever_by_short_ones(driver, config):
    run = driver(config(num_blocks=8, depth=1))
    run.add(request("running", length=24, max_tokens=20))
    run.fill()
    run.add(request("long", length=48, max_tokens=2, first=1))
    run.add(request("short", length=8, max_tokens=2, first=2))
    run.drain()
    starts = [len(start.token_ids) for plan in run.stages.plans for start in plan.starts]
    assert starts == [24, 48, 8], "there was room for the short one first, but then always is"


def test_two_long_prompts_do_not_enter_together_to_take_each_others_blocks(driver, config):
    run = driver(config(num_blocks=10, depth=1))
    for index in range(2):
        run.add(request(f"r{index}", length=60, max_tokens=4, first=index))
    run.schedule()
    assert running(run) == ["r0"], "the plan has room for a chunk of both, the pool has not for all of both"
    run.drain()
    assert run.scheduler.stats().preemptions == 0


def test_a_chunk_may_take_the_blocks_of_another_that_was_to_follow_in_the_plan(driver, config):
    """Decodes grew into what was free when two prompts entered; the older one takes the newer one's blocks."""
    run = driver(config(num_blocks=11, depth=1, max_step_tokens=4, prefill_chunk=2))
    for index, length in enumerate((14, 46, 16)):
        run.add(request(f"r{index}", length=length, first=index))
    catching_up = run.scheduler._catching_up
    taken = False
    while run.scheduler.has_unfinished():
        before, preemptions = set(catching_up), run.scheduler.stats().preemptions
        plan = run.schedule()
        run.scheduler.check_integrity()
        if run.scheduler.stats().preemptions > preemptions:
            chunks = {item.seq_id for item in plan.runs if len(item.token_ids) > 1}
            taken |= bool(before - set(catching_up) and chunks & before)
        run.deliver()
    assert taken, "the case did not come up"
    run.check_idle()


@pytest.mark.parametrize(("watermark", "enter"), [(0, 3), (1, 2), (3, 2), (4, 1)])
def test_the_watermark_stays_free(driver, config, watermark, enter):
    run = driver(config(num_blocks=9, watermark=watermark, prefill_chunk=64))
    for index in range(4):
        run.add(request(f"r{index}", length=20, max_tokens=4, first=index))
    run.fill()
    assert len(running(run)) == enter
    run.drain()


def test_whoever_is_alone_may_use_what_the_watermark_keeps(driver, config):
    alone = driver(config(num_blocks=8, watermark=7))
    alone.add(request("all", length=60, max_tokens=4))
    alone.drain()


def test_a_preempted_sequence_does_not_come_back_to_be_preempted_at_once(driver, config):
    """Less than one preemption each; about two if it came back as soon as its own tokens fit."""
    run = driver(config(num_blocks=64, depth=2, max_context=200))
    for index in range(16):
        run.add(request(f"r{index}", length=8, max_tokens=100, first=index))
    run.drain()
    assert 0 < run.scheduler.stats().preemptions < 16
