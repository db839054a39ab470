"""A stage as the scheduler must imagine it, and a driver that runs a scheduler against it."""

from __future__ import annotations

import zlib
from collections import Counter, deque

import pytest

from shardline.scheduler import (
    NewRequest,
    SampledToken,
    Scheduler,
    SchedulerConfig,
    SequenceUpdate,
    StepPlan,
    StepResult,
)
from shardline.scheduler.plan import AHEAD
from shardline.scheduler.sequence import derived_seed

EOS = 3
VOCAB = 4


def next_token(token_ids, seed):
    """The stand-in for model and sampling: any function of the whole prefix and the seed, with an end now and then."""
    draw = zlib.crc32(bytes(token_ids), seed & 0xFFFFFFFF)
    draw = (draw * 2654435761 + seed) >> 7
    return EOS if draw % 17 == 0 else draw % EOS


class ShadowStages:
    """Replays plans as a stage would, and fails on whatever a stage would compute wrongly.

    A slot of its pool keeps the id of the token prefix whose keys and values were written there: exact, not a hash. A
    run may only read slots that hold its own prefix, written by an earlier plan or by itself.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self._prefix_ids = {}
        self.next_step = 0
        self.num_computed_rows = 0
        self.plans = []
        self.reset()

    def reset(self):
        self.slots = {}
        self.sequences = {}

    def prefix_id(self, parent, token_id):
        return self._prefix_ids.setdefault((parent, token_id), len(self._prefix_ids) + 1)

    def run(self, plan: StepPlan) -> StepResult:
        config, size = self.config, self.config.block_size
        self.plans.append(plan)
        assert plan.step_id == self.next_step
        self.next_step += 1
        assert plan.runs
        assert plan.num_tokens <= config.max_step_tokens
        assert len(set(plan.forget)) == len(plan.forget)
        for seq_id in plan.forget:
            del self.sequences[seq_id]
        for start in plan.starts:
            assert start.seq_id not in self.sequences
            assert 0 < start.prompt_len <= len(start.token_ids)
            self.sequences[start.seq_id] = {
                "table": list(start.block_ids),
                "tokens": list(start.token_ids),
                "prefixes": [],
                "seed": start.params.seed,
                "next": len(start.block_ids) * size,
                "last": None,
                "needs_history": start.params.needs_history,
            }
        assert len(self.sequences) <= config.max_sequences
        assert len({run.seq_id for run in plan.runs}) == len(plan.runs)
        written = {}
        for run in plan.runs:
            sequence = self.sequences[run.seq_id]
            end = run.position + len(run.token_ids)
            assert run.position == sequence["next"], "a run does not continue where the one before ended"
            assert 1 <= len(run.token_ids) <= max(1, config.prefill_chunk)
            token_ids = tuple(sequence["tokens"][run.position : end])
            if AHEAD in run.token_ids:
                assert config.ahead
                assert not sequence["needs_history"], "the penalties of a run ahead lack the token before"
                # As in a stage: what it chose last, which is the token at this position if the run before sampled.
                assert token_ids == (sequence["last"],), "a run ahead of nothing that was sampled"
                assert run.token_ids == (AHEAD,)
            else:
                assert token_ids == run.token_ids, "a run has another's tokens"
            assert end <= config.max_context
            assert run.samples == (end == len(sequence["tokens"]))
            sequence["table"].extend(run.new_block_ids)
            assert len(sequence["table"]) * size >= end
            assert all(0 <= block < config.num_blocks for block in sequence["table"])
            for position in range(len(sequence["prefixes"]), end):
                parent = sequence["prefixes"][-1] if sequence["prefixes"] else 0
                sequence["prefixes"].append(self.prefix_id(parent, sequence["tokens"][position]))
            for position in range(run.position):
                assert self.slots.get(self.slot(sequence, position)) == sequence["prefixes"][position], (
                    "a run reads what its own prefix did not write, or not yet"
                )
            for position in range(run.position, end):
                slot = self.slot(sequence, position)
                assert slot not in written, "two runs of one plan write to one slot"
                written[slot] = sequence["prefixes"][position]
            sequence["next"] = end
            self.num_computed_rows += len(run.token_ids)
        self.slots.update(written)
        tokens = []
        for run in plan.runs:
            sequence = self.sequences[run.seq_id]
            for position in range(sequence["next"]):
                assert self.slots[self.slot(sequence, position)] == sequence["prefixes"][position], (
                    "another run of the same plan wrote over a run's prefix"
                )
            if run.samples:
                token_id = next_token(sequence["tokens"], sequence["seed"])
                sequence["tokens"].append(token_id)
                sequence["last"] = token_id
                tokens.append(SampledToken(run.seq_id, token_id))
        return StepResult(plan.step_id, tuple(tokens))

    def slot(self, sequence, position):
        block, offset = divmod(position, self.config.block_size)
        return sequence["table"][block], offset


def reference(request: NewRequest, index: int, config: SchedulerConfig):
    """What sequence `index` of a request gives when it runs all alone: (tokens, finish reason)."""
    params = request.params
    seed = derived_seed(params.seed or 0, index)
    limit = min(config.max_context, config.num_blocks * config.block_size + 1)
    if params.max_tokens is not None:
        limit = min(limit, len(request.prompt_ids) + params.max_tokens)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos_token_ids))
    tokens = list(request.prompt_ids)
    while True:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stops:
            return tokens[len(request.prompt_ids) :], "stop"
        if len(tokens) == limit:
            return tokens[len(request.prompt_ids) :], "length"


class Driver:
    """A scheduler with shadow stages: checks every plan and every update, and that nothing is lost or comes twice."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.scheduler = Scheduler(config)
        self.stages = ShadowStages(config)
        self.results: deque[StepResult] = deque()
        self.requests: dict[str, NewRequest] = {}
        self.expected = {}
        self.outputs = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.cached_tokens = {}
        self.plans_ahead = 0

    def add(self, request: NewRequest, **how) -> None:
        self.scheduler.add(request, **how)
        self.requests[request.request_id] = request
        for index in range(request.params.n):
            key = (request.request_id, index)
            self.expected[key] = reference(request, index, self.config)
            self.outputs[key] = []

    def schedule(self) -> StepPlan | None:
        before = self.scheduler.stats().preemptions
        plan = self.scheduler.schedule()
        is_ahead = plan is not None and any(run.token_ids == (AHEAD,) for run in plan.runs)
        if is_ahead or (self.config.ahead and len(self.results) >= self.config.depth - 1 > 0):
            assert self.scheduler.stats().preemptions == before, "somebody was preempted for a plan that can wait"
        if plan is None:
            assert self.results or not self.scheduler.has_unfinished(), "stuck: nothing in flight, nothing planned"
        else:
            self.check_ahead(plan)
            self.results.append(self.stages.run(plan))
            assert len(self.results) <= self.config.depth
        return plan

    def check_ahead(self, plan: StepPlan) -> None:
        """A run says AHEAD if and only if the token before is in flight; then it needs no more than that one."""
        waits = Counter(token.seq_id for result in self.results for token in result.tokens)
        for run in plan.runs:
            assert waits[run.seq_id] == (run.token_ids == (AHEAD,)), "a run ahead of two tokens, or of a known one"
        if any(run.token_ids == (AHEAD,) for run in plan.runs):
            self.plans_ahead += 1

    def deliver(self) -> list[SequenceUpdate]:
        updates = self.scheduler.update(self.results.popleft())
        for update in updates:
            key = (update.request_id, update.index)
            assert key not in self.aborted, "an aborted sequence got a token"
            assert key not in self.finished, "a sequence got a token after its end"
            tokens, reason = self.expected[key]
            self.outputs[key].append(update.token.token_id)
            assert self.outputs[key] == tokens[: len(self.outputs[key])]
            ended = len(self.outputs[key]) == len(tokens)
            assert update.finish_reason == (reason if ended else None)
            if ended:
                self.finished[key] = update.finish_reason
            self.cached_tokens.setdefault(key, update.cached_tokens)
            assert self.cached_tokens[key] == update.cached_tokens < len(self.requests[update.request_id].prompt_ids)
        return updates

    def fill(self) -> list[StepPlan]:
        """Plan until the pipeline is full or nothing can run."""
        plans = []
        while (plan := self.schedule()) is not None:
            plans.append(plan)
        return plans

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.scheduler.abort(request_id, index)
        request = self.requests.get(request_id)
        for i in range(request.params.n if request else 0):
            if index in (None, i) and (request_id, i) not in self.finished:
                self.aborted.add((request_id, i))

    def lose_stage(self) -> list[str]:
        blamed = self.scheduler.drop_in_flight()
        self.results.clear()
        self.stages.reset()
        return blamed

    def drain(self, most_steps: int = 20_000) -> int:
        """Run until everything has ended; the number of steps it took."""
        first = self.stages.next_step
        while self.scheduler.has_unfinished() or self.results:
            self.fill()
            self.scheduler.check_integrity()
            if self.results:
                self.deliver()
            assert self.stages.next_step - first <= most_steps, "it does not come to an end"
        self.check_idle()
        return self.stages.next_step - first

    def check_idle(self) -> None:
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.waiting, stats.running, stats.in_flight, stats.blocks_used) == (0, 0, 0, 0)
        assert self.scheduler.unfinished() == []
        assert set(self.finished) | self.aborted == set(self.expected)
        assert not set(self.finished) & self.aborted


@pytest.fixture(scope="session")
def driver():
    """The class `Driver`."""
    return Driver


@pytest.fixture(scope="session")
def config():
    """A `SchedulerConfig` of this room's tests' usual size, but for what is given."""

    def make(**given) -> SchedulerConfig:
        usual = {
            "num_blocks": 64,
            "block_size": 8,
            "max_context": 128,
            "depth": 4,
            "max_step_tokens": 64,
            "prefill_chunk": 16,
            "max_sequences": 16,
            "eos_token_ids": (EOS,),
            "vocab_size": VOCAB,
        }
        return SchedulerConfig(**(usual | given))

    return make
