"""Requests that kill a stage each time that they run: they alone end, after few losses, and all others as if alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.scheduler import NewRequest, SamplingParams

PREFIX = tuple(position * position % 3 for position in range(80))


def request(name, length=9, first=0, priority=0, **params):
    return NewRequest(name, (first % 3, *PREFIX[: length - 1]), SamplingParams(**params), priority)


class Deadly:
    """Serves a driver's requests on stages that die of some of them.

    `poisons` says from which position on a request kills a stage. The loss is noticed when the result is due, or when
    the pipeline has taken `late` plans more.
    """

    def __init__(self, run, poisons, late=0):
        self.run = run
        self.poisons = poisons
        self.late = late
        self.losses = 0
        self.ended = []

    def kills(self, plan):
        ids = {
            sequence.seq_id: sequence.request.request.request_id for sequence in self.run.scheduler._running.values()
        }
        return any(run.position + len(run.token_ids) > self.poisons.get(ids[run.seq_id], 10**9) for run in plan.runs)

    def lose(self):
        self.losses += 1
        ended = self.run.lose_stage()
        for request_id in ended:
            self.run.abort(request_id)
        self.ended += ended

    def serve(self, most_steps=20_000):
        run = self.run
        deadly = None
        while run.scheduler.has_unfinished() or run.results:
            assert run.stages.next_step < most_steps, "it does not come to an end"
            before = run.stages.next_step
            plan = run.schedule()
            run.scheduler.check_integrity()
            if plan is not None and deadly is None and self.kills(plan):
                deadly = plan.step_id
            if deadly is not None and (plan is None or before - deadly >= self.late):
                # The results of plans before the deadly one have come.
                while run.results[0].step_id < deadly:
                    run.deliver()
                self.lose()
                deadly = None
            elif deadly is None and run.results and (plan is None or len(run.results) == run.config.depth):
                run.deliver()
        run.check_idle()


def test_a_poison_ends_alone_at_the_fourth_loss(driver, config):
    for late in range(4):
        run = driver(config())
        for index in range(8):
            run.add(request(f"r{index}", first=index, max_tokens=20))
        deadly = Deadly(run, {"r3": 0}, late)
        deadly.serve()
        assert deadly.ended == ["r3"]
        assert deadly.losses == 4
        assert run.aborted == {("r3", 0)}


def test_a_poison_that_kills_late_ends_with_the_tokens_that_it_had(driver, config):
    run = driver(config())
    for index in range(6):
        run.add(request(f"r{index}", first=index, max_tokens=20, ignore_eos=True))
    deadly = Deadly(run, {"r2": 20})
    deadly.serve()
    assert (deadly.ended, deadly.losses) == (["r2"], 4)
    # Its prompt has nine tokens, and the token at position 20 is computed after it was sampled.
    assert len(run.outputs["r2", 0]) == 12


def test_several_poisons_are_found_one_after_the_other(driver, config):
    run = driver(config())
    for index in range(8):
        run.add(request(f"r{index}", first=index, max_tokens=20))
    poisons = {"r0": 0, "r1": 5, "r4": 8, "r7": 0}
    deadly = Deadly(run, poisons)
    deadly.serve()
    assert sorted(deadly.ended) == sorted(poisons)
    assert deadly.losses <= 4 * len(poisons)


def test_all_sequences_of_a_poisonous_request_end_with_it(driver, config):
    run = driver(config())
    run.add(request("poison", n=4, max_tokens=8))
    run.add(request("other", first=1, max_tokens=8))
    deadly = Deadly(run, {"poison": 4})
    deadly.serve()
    assert (deadly.ended, deadly.losses) == (["poison"], 4)


def test_a_suspect_runs_alone_until_its_next_token(driver, config):
    run = driver(config(prefill_chunk=4))
    for index in range(3):
        run.add(request(f"r{index}", first=index, max_tokens=30, ignore_eos=True))
    for _ in range(2):
        run.fill()
        assert len(run.results) > 1
        assert run.lose_stage() == []
    assert run.scheduler.has_suspects()
    probe = NewRequest("probe", (0,), SamplingParams(max_tokens=1), priority=-(2**40))
    run.add(probe, alone=True)
    (plan,) = run.fill()
    assert [start.token_ids for start in plan.starts] == [probe.prompt_ids]
    run.deliver()
    alone = []
    while run.scheduler.has_suspects():
        (plan,) = run.fill()
        (one,) = plan.runs
        alone.append((one.position, len(one.token_ids), one.samples))
        run.deliver()
    assert len(alone) >= 2 * 3
    assert alone == [(0, 4, False), (4, 4, False), (8, 1, True)] * (len(alone) // 3)
    # What a sequence was suspected of is forgotten with its token.
    for _ in range(2):
        run.fill()
        assert run.lose_stage() == []
    run.drain()


def test_a_suspect_that_does_not_fit_waits_for_blocks_and_no_other_suspect_gets_company(driver, config):
    run = driver(config(num_blocks=8, depth=1, prefill_chunk=4))
    prompts = {"a": (0,) * 16, "b": (1,) * 16, "large": (2,) * 24, "small": (0, 1) * 4}
    for name, prompt in prompts.items():
        run.add(NewRequest(name, prompt, SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(2):
        (plan,) = run.fill()
        assert len(plan.runs) == 4
        assert run.lose_stage() == []
    while len(run.scheduler._suspects._sequences) > 2:
        run.fill()
        run.deliver()
    # Both that run want one more block now. A more urgent one still fits, and begins as the large one does.
    run.add(NewRequest("urgent", (2,) * 8, SamplingParams(max_tokens=20), priority=-1))
    (plan,) = run.fill()
    assert len(plan.runs) == 3
    run.scheduler.check_integrity()
    run.deliver()
    run.drain()


def test_a_loss_while_nothing_is_in_flight_makes_nobody_suspect(driver, config):
    run = driver(config())
    run.add(request("r", max_tokens=5))
    for _ in range(10):
        assert run.lose_stage() == []
    assert not run.scheduler.has_suspects()
    run.drain()


def test_who_was_aborted_is_no_suspect(driver, config):
    run = driver(config())
    run.add(request("gone", max_tokens=5))
    run.add(request("stays", first=1, max_tokens=5))
    run.fill()
    run.lose_stage()
    run.fill()
    run.abort("gone")
    run.lose_stage()
    (plan,) = run.fill()
    assert plan.num_tokens == 9
    run.drain()


def test_who_was_lost_often_but_had_a_token_between_goes_on(driver, config):
    run = driver(config(depth=1))
    run.add(request("r", max_tokens=30, ignore_eos=True))
    while run.scheduler.has_unfinished():
        for _ in range(2):
            run.fill()
            assert run.lose_stage() == []
        run.fill()
        while not run.deliver():
            run.fill()
    run.check_idle()


def test_a_request_that_is_to_run_alone_is_the_next_and_is_never_refused(driver, config):
    run = driver(config(max_waiting=1))
    run.add(request("first", max_tokens=4))
    run.fill()
    run.add(request("waits", max_tokens=4))
    run.add(request("probe", length=1, max_tokens=1), alone=True)
    assert run.scheduler.schedule() is None, "it waits until nothing is in flight"
    run.deliver()
    plan = run.scheduler.schedule()
    assert [start.prompt_len for start in plan.starts] == [1]
    assert len(plan.runs) == 1
    run.stages.run(plan)
    assert run.scheduler.schedule() is None
    run.scheduler.abort("probe")
    assert not run.scheduler.has_suspects()


@settings(max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    poisons=st.dictionaries(st.integers(0, 11), st.integers(0, 50), max_size=4),
    priorities=st.lists(st.integers(-1, 1), min_size=12, max_size=12),
    late=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2]),
    limits=st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([8, 12, 64]),
            "depth": st.sampled_from([1, 2, 4]),
            "max_step_tokens": st.sampled_from([5, 64]),
            "prefill_chunk": st.sampled_from([5, 16]),
            "max_sequences": st.sampled_from([1, 3, 16]),
            "min_microbatch": st.sampled_from([1, 3]),
            "watermark": st.sampled_from([0, 2]),
            "ahead": st.booleans(),
        }
    ),
)
def test_any_poisons_in_any_company(driver, config, lengths, poisons, priorities, late, n, limits):
    """The driver compares every token of every request with what it gives alone."""
    run = driver(config(max_context=64, **limits))
    for index, length in enumerate(lengths):
        run.add(request(f"r{index}", length, index, priorities[index], max_tokens=12, n=n, seed=index))
    named = {f"r{index}": position for index, position in poisons.items() if index < len(lengths)}
    deadly = Deadly(run, named, late)
    deadly.serve()
    assert set(deadly.ended) <= set(named), "an innocent request was ended"
    assert deadly.losses <= 4 * n * len(named)
    whole = {key for key in run.expected if key[0] not in deadly.ended}
    assert whole <= set(run.finished), "a request was lost"
