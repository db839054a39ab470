"""Any interleaving of add, schedule, update, abort and stage loss: the same tokens, no leak, no double use, an end."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shardline.scheduler import NewRequest, RequestTooLargeError, SamplingParams, SchedulerConfig

# Few prefixes and a tiny vocabulary: prompts share beginnings, and end at, before and after the borders of blocks.
PREFIX = (0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1, 0, 2, 1, 0, 0, 2, 2, 1, 1, 0, 2, 0, 1, 0, 1, 2, 2, 1, 0, 0, 1)

configs = st.builds(
    SchedulerConfig,
    num_blocks=st.sampled_from([4, 6, 9, 40]),
    block_size=st.just(8),
    max_context=st.sampled_from([12, 40, 100]),
    depth=st.sampled_from([1, 2, 3, 4]),
    max_step_tokens=st.sampled_from([3, 9, 64]),
    prefill_chunk=st.sampled_from([5, 8, 32]),
    max_sequences=st.sampled_from([1, 3, 16]),
    min_microbatch=st.sampled_from([1, 1, 3, 16]),
    watermark=st.sampled_from([0, 2]),
    prefix_cache=st.sampled_from([True, True, True, False]),
    eos_token_ids=st.just((3,)),
    vocab_size=st.just(4),
    priority_span=st.sampled_from([2, 1024]),
    ahead=st.booleans(),
)
prompts = st.one_of(
    st.integers(1, len(PREFIX)).map(lambda length: PREFIX[:length]),
    st.tuples(st.integers(0, 24), st.lists(st.integers(0, 2), min_size=1, max_size=16)).map(
        lambda parts: PREFIX[: parts[0]] + tuple(parts[1])
    ),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([None, 1, 2, 9, 30]),
    seed=st.sampled_from([None, 1, 2]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (2,)]),
    n=st.sampled_from([1, 1, 1, 2, 4]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
)


def machine_of(driver, hash_of=None):
    class Machine(RuleBasedStateMachine):
        @initialize(config=configs)
        def begin(self, config):
            self.driver = driver(config)
            if hash_of is not None:
                self.driver.scheduler._pool.hash_of = hash_of
            self.added = 0

        @rule(prompt=prompts, params=sampling, priority=st.sampled_from([0, 0, 1, -1]))
        def add(self, prompt, params, priority):
            request = NewRequest(f"r{self.added}", prompt, params, priority)
            try:
                self.driver.add(request)
            except RequestTooLargeError:
                return
            self.added += 1

        @rule()
        def schedule(self):
            self.driver.schedule()

        @rule()
        def fill(self):
            self.driver.fill()

        @precondition(lambda self: self.driver.results)
        @rule()
        def deliver(self):
            self.driver.deliver()

        @rule(rounds=st.integers(1, 12))
        def serve(self, rounds):
            for _ in range(rounds):
                self.driver.fill()
                if self.driver.results:
                    self.driver.deliver()

        @rule(which=st.integers(0, 50), index=st.sampled_from([None, 0, 1, 3]))
        def abort(self, which, index):
            self.driver.abort(f"r{which % (self.added + 1)}", index)

        @rule()
        def lose_stage(self):
            self.driver.lose_stage()

        @invariant()
        def holds(self):
            if hasattr(self, "driver"):
                self.driver.scheduler.check_integrity()

        def teardown(self):
            if hasattr(self, "driver"):
                self.driver.drain()

    return Machine


def test_any_interleaving(driver):
    run_state_machine_as_test(
        machine_of(driver),
        settings=settings(
            max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_any_interleaving_when_hashes_collide(driver):
    """A hash only finds a candidate: with two hash values for everything, nobody reads another's keys and values."""
    run_state_machine_as_test(
        machine_of(driver, hash_of=lambda parent, token_ids: token_ids[0] % 2),
        settings=settings(
            max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
