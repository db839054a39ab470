"""A pipeline whose last stage speaks from a script: it checks the plans as a stage would, and runs no arithmetic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from shardline.cluster import StageLostError
from shardline.cluster.pipeline import StageStats
from shardline.scheduler import SampledToken, SequenceStart, StepPlan, StepResult
from shardline.stage import StageSpec

Script = Callable[[tuple[int, ...], int], int]


class _Known:
    """What a stage remembers of a sequence."""

    def __init__(self, start: SequenceStart, block_size: int) -> None:
        self.prompt = start.token_ids[: start.prompt_len]
        self.tokens = list(start.token_ids[: len(start.block_ids) * block_size])
        self.blocks = list(start.block_ids)
        self.wants_logprobs = start.params.logprobs is not None


class ScriptedPipeline:
    """Implements `Pipeline`. The token at position p of a sequence is `script(prompt, p - len(prompt))`.

    Attributes:
        lose_at: Ordinals (from 0, over the pipeline's life) of steps whose result is the loss of a stage.
        lose_on_submit: Ordinals of steps whose submission is.
        deadly: A stage is lost of each step that takes a sequence of such a prompt to so many tokens or more.
        failing_recoveries: How many of the next recoveries fail.
        gate: Results wait for it; open at first.
    """

    def __init__(self, script: Script, *, vocab_size: int = 49152, block_size: int = 16) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.lose_at: set[int] = set()
        self.lose_on_submit: set[int] = set()
        self.deadly: dict[tuple[int, ...], int] = {}
        self.failing_recoveries = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.plans: list[StepPlan] = []
        self.recoveries = 0
        self.closed = False
        self._known: dict[int, _Known] = {}
        self._next_step: int | None = None
        self._lost = False
        self._waiting: deque[tuple[int, StepPlan, StepResult]] = deque()
        self._arrived = asyncio.Event()

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        return ()

    async def start(self) -> None:
        pass

    async def submit(self, plan: StepPlan) -> None:
        await asyncio.sleep(0)
        ordinal = len(self.plans)
        self.plans.append(plan)
        if self._lost or ordinal in self.lose_on_submit:
            self._lost = True
            raise StageLostError(1, f"scripted loss on submission {ordinal}")
        self._waiting.append((ordinal, plan, self._run(plan)))
        self._arrived.set()

    async def result(self) -> StepResult:
        while not self._waiting:
            if self._lost:
                raise StageLostError(1, "scripted loss at rest")
            self._arrived.clear()
            await self._arrived.wait()
        await self.gate.wait()
        await asyncio.sleep(0)
        ordinal, _, result = self._waiting.popleft()
        if self._lost or ordinal in self.lose_at:
            self._lost = True
            raise StageLostError(1, f"scripted loss at step {ordinal}")
        return result

    def lose(self) -> None:
        """Lose a stage now, whether it has anything to do or not."""
        self._lost = True
        self._arrived.set()

    async def recover(self) -> None:
        await asyncio.sleep(0)
        self.recoveries += 1
        self._known.clear()
        self._waiting.clear()
        self._next_step = None
        if self.failing_recoveries:
            self.failing_recoveries -= 1
            raise StageLostError(1, "scripted: cannot come back")
        self._lost = False

    async def stats(self) -> list[StageStats]:
        return []

    async def close(self) -> None:
        self.closed = True

    def _run(self, plan: StepPlan) -> StepResult:
        assert self._next_step is None or plan.step_id == self._next_step
        self._next_step = plan.step_id + 1
        for seq_id in plan.forget:
            del self._known[seq_id]
        for start in plan.starts:
            assert start.seq_id not in self._known
            self._known[start.seq_id] = _Known(start, self.block_size)
        assert plan.runs
        sampled = []
        for run in plan.runs:
            known = self._known[run.seq_id]
            assert run.position == len(known.tokens), "a plan runs the tokens after those that are computed"
            known.tokens.extend(run.token_ids)
            known.blocks.extend(run.new_block_ids)
            assert len(known.tokens) <= len(known.blocks) * self.block_size
            if len(known.tokens) >= self.deadly.get(known.prompt, len(known.tokens) + 1):
                self.lose_at.add(len(self.plans) - 1)
            if run.samples:
                token = self.script(known.prompt, len(known.tokens) - len(known.prompt))
                if known.wants_logprobs:
                    # One that tells sequences and places apart.
                    logprob = -(len(known.tokens) + token / self.vocab_size)
                    sampled.append(SampledToken(run.seq_id, token, logprob, ((token, logprob),)))
                else:
                    sampled.append(SampledToken(run.seq_id, token))
        return StepResult(plan.step_id, tuple(sampled))


@pytest.fixture(scope="session")
def scripted_pipeline() -> type[ScriptedPipeline]:
    """The class."""
    return ScriptedPipeline


@pytest.fixture(scope="session")
def scripted_by_prompt() -> Callable[[Sequence[tuple[Sequence[int], Sequence[int]]], int], Script]:
    """Makes a script of (prompt ids, output ids) pairs; past an output's end, and for other prompts, comes `filler`."""

    def make(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], filler: int) -> Script:
        outputs = {tuple(prompt): tuple(output) for prompt, output in pairs}

        def script(prompt: tuple[int, ...], place: int) -> int:
            output = outputs.get(prompt, ())
            return output[place] if place < len(output) else filler

        return script

    return make
