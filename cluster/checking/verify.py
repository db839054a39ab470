"""The bit contract, checked on the user's own machine and model.

A case (see `verify_cases`) is one way to run a batch. In every case each sequence must have the tokens and the bytes of
the logprobs that it has when it runs alone, in one stage, with one plan at a time. A case that did not do what it is
for (no preemption, no prefix found, no plan made ahead) counts as failed too: it would prove nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from shardline.cluster.checking.verify_cases import Case
from shardline.cluster.checking.verify_result import CaseResult, first_difference
from shardline.cluster.checking.verify_run import Played, Rehearsal, play
from shardline.cluster.local_pipeline import BackendFactory, LocalPipeline, stage_specs
from shardline.cluster.pipeline import Pipeline
from shardline.cluster.stage_options import check_stage_options
from shardline.scheduler import (
    InvalidParameterError,
    NewRequest,
    SampledToken,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
)
from shardline.stage import ModelSpec, StageSpec, backend_for, open_checkpoint

T = TypeVar("T")

PipelineFactory = Callable[[tuple[StageSpec, ...]], Pipeline]


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    params: SamplingParams


class Verifier:
    """Runs cases on one model with stages in this process. Close it, or use `with`."""

    def __init__(
        self,
        model: Path,
        *,
        new_tokens: int = 6,
        threads: int = 2,
        kv_dtype: str = "float16",
        max_batch: int = 64,
        device: str = "cpu",
        backend_factory: BackendFactory = backend_for,
        pipelines: PipelineFactory | None = None,
    ) -> None:
        """
        Args:
            model: The model file.
            new_tokens: Tokens that each sequence generates.
            threads: CPU threads of each stage.
            kv_dtype: "float16", "float32" or "int8".
            max_batch: The most sequences of a case.
            device: What computes the stages; see `StageSpec`.
            backend_factory: Makes a stage's backend.
            pipelines: Makes a pipeline, and only one at a time has its devices; None: stages in this process.

        Raises:
            CheckpointError: the file cannot be used.
            InvalidParameterError: a number is out of range.
        """
        if not 2 <= new_tokens <= 64:
            raise InvalidParameterError("new_tokens", new_tokens, "an integer from 2 to 64")
        self._checkpoint = open_checkpoint(model)
        self.model: ModelSpec = self._checkpoint.spec
        self._new_tokens = new_tokens
        self._threads = threads
        self._kv_dtype = kv_dtype
        self._device = device
        self._max_batch = max_batch
        self._backend_factory = backend_factory
        self._pipelines = pipelines
        draw = random.Random(-1)
        self._common = tuple(draw.randrange(self.model.vocab_size) for _ in range(64))
        self._references: dict[_Prompt, tuple[SampledToken, ...]] = {}
        self._loop = asyncio.new_event_loop()
        self._loaded: tuple[tuple[int, ...], int, Pipeline] | None = None
        self._alone: Pipeline | None = None

    def run(self, case: Case) -> CaseResult:
        """Run a case and compare."""
        began = time.perf_counter()
        prompts = self._prompts(case)
        expected = [self._reference(prompt) for prompt in prompts]
        got, played = self._batch(case, prompts)
        differing, first = 0, None
        for index, (reference, tokens) in enumerate(zip(expected, got, strict=True)):
            difference = first_difference(index, reference, tokens)
            differing += difference is not None
            first = first or difference
        missed = ""
        if case.preempted and not played.preemptions:
            missed = "no sequence was preempted"
        elif case.warm and not played.prefix_hit_tokens:
            missed = "no prefix was found in the cache"
        elif not case.warm and played.prefix_hit_tokens:
            missed = "a prefix was found in a cache that is off"
        elif case.ahead != bool(played.plans_ahead):
            missed = f"{played.plans_ahead} plans were made ahead"
        return CaseResult(
            case=case,
            sequences=len(prompts),
            tokens=sum(map(len, expected)),
            differing=differing,
            first=first,
            missed=missed,
            preemptions=played.preemptions,
            prefix_hit_tokens=played.prefix_hit_tokens,
            plans_ahead=played.plans_ahead,
            seconds=time.perf_counter() - began,
        )

    def run_all(self, cases: Iterable[Case], report: Callable[[CaseResult], None]) -> bool:
        """Run cases, and report each as it ends. Whether all passed."""
        cases, passed = list(cases), True
        if self._pipelines is not None:
            # All of them first: the stage that they run on, and the cases' stages, have to make room for each other.
            for case in cases:
                for prompt in self._prompts(case):
                    self._reference(prompt)
        for case in cases:
            result = self.run(case)
            report(result)
            passed &= result.passed
        return passed

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            # Interrupted, perhaps: it must not go on when `close` runs the loop again.
            task.cancel()
            self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._loop.is_closed():
            return
        self._unload()
        self._unload_alone()
        self._loop.close()
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what runs ---------------------------------------------------------------------------------------------------

    def _prompts(self, case: Case) -> list[_Prompt]:
        return [self._prompt(index, case) for index in range(case.batch)]

    def _prompt(self, index: int, case: Case) -> _Prompt:
        """The batch's prompt of that number.

        It ends one to three tokens before a block of 16 does, every fourth before one of 64, so that a full pool runs
        out as soon as they generate. Every eighth is longer than a block and a chunk of 64. All begin with the same 8,
        16, 32 or 64 tokens.
        """
        length, common = {0: (128, 64), 4: (64, 32)}.get(index % 8, (16 * (1 + index % 2), 8 * (1 + index % 2)))
        draw = random.Random(index)
        own = (draw.randrange(self.model.vocab_size) for _ in range(length - 3 + index % 3 - common))
        return _Prompt(self._common[:common] + tuple(own), self._params(index, case))

    def _params(self, index: int, case: Case) -> SamplingParams:
        common: dict[str, Any] = {
            "max_tokens": self._new_tokens,
            "ignore_eos": True,
            "logprobs": 2,
            "seed": 1000 + index,
        }
        if not case.seeded:
            return SamplingParams(**common)
        # Who has penalties waits for its tokens, and lets the whole batch wait with it.
        penalties = {} if case.ahead else {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
        ways: list[dict[str, Any]] = [
            {"temperature": 1.0},
            {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
            {"temperature": 1.2, **penalties},
            {"temperature": 0.7, "min_p": 0.02, "logit_bias": ((7, 2.0), (11, -3.0))},
        ]
        return SamplingParams(**common, **ways[index % len(ways)])

    def _reference(self, prompt: _Prompt) -> tuple[SampledToken, ...]:
        """The tokens of one sequence alone in one stage, its prompt in one piece."""
        if prompt not in self._references:
            if self._alone is None:
                if self._pipelines is not None:
                    self._unload()
                self._alone = self._pipeline((self.model.num_layers,), 16, 1)
            self._wait(self._alone.recover())
            scheduler = self._scheduler(
                16,
                prefill_chunk=None,
                depth=1,
                max_sequences=1,
                num_blocks=self._alone.specs[0].num_blocks,
                prefix_cache=False,
            )
            request = NewRequest("0", prompt.token_ids, prompt.params)
            self._references[prompt] = tuple(self._wait(play(self._alone, scheduler, [request])).tokens["0"])
        return self._references[prompt]

    def _batch(self, case: Case, prompts: Sequence[_Prompt]) -> tuple[list[list[SampledToken]], Played]:
        """The tokens of each sequence, and what came of all."""
        pipeline = self._pipeline_of(case.split, case.block_size)
        # One sequence alone is never preempted: it needs an older one that takes its blocks.
        rivals = [self._rival(case, prompts[0])] if case.preempted and case.batch == 1 else []
        running = rivals + list(prompts)
        num_blocks = self._few_blocks(case, running) if case.preempted else pipeline.specs[0].num_blocks
        played = self._play(pipeline, case, running, num_blocks)
        return [played.tokens[str(index)] for index in range(len(rivals), len(running))], played

    def _play(self, pipeline: Pipeline | Rehearsal, case: Case, running: Sequence[_Prompt], num_blocks: int) -> Played:
        scheduler = self._scheduler(
            case.block_size,
            prefill_chunk=case.prefill_chunk,
            depth=len(case.split) + 1,
            max_sequences=len(running),
            num_blocks=num_blocks,
            prefix_cache=case.warm,
            ahead=case.ahead,
        )
        if case.warm:
            params = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
            warming = [
                NewRequest(f"warm {index}", prompt.token_ids, params) for index, prompt in enumerate(running[:2])
            ]
            self._wait(play(pipeline, scheduler, warming))
        requests = [NewRequest(str(index), prompt.token_ids, prompt.params) for index, prompt in enumerate(running)]
        # Blocks are taken from newer sequences: let these come when the oldest is about to need one.
        at_once = 1 if case.preempted else len(requests)
        return self._wait(play(pipeline, scheduler, requests[:at_once], later=requests[at_once:]))

    def _few_blocks(self, case: Case, running: Sequence[_Prompt]) -> int:
        """A pool in which sequences get preempted: the largest tried in which a quarter of them, at least one, do.

        Which one that is depends on all that the scheduler does, so it is tried out, with a pipeline that computes
        nothing.
        """
        needs = [-(-(len(p.token_ids) + (p.params.max_tokens or 0)) // case.block_size) for p in running]
        least, most = max(needs), sum(needs)
        best = least, 0
        for num_blocks in sorted({least + (most - least) * part // 24 for part in range(24)}, reverse=True):
            preemptions = self._play(Rehearsal(), case, running, num_blocks).preemptions
            if preemptions > best[1]:
                best = num_blocks, preemptions
            if best[1] >= max(1, len(running) // 4):
                break
        return best[0]

    def _rival(self, case: Case, victim: _Prompt) -> _Prompt:
        """A sequence that needs one more block, of whatever size, soon after the victim has all of its own."""
        steps = -(-len(victim.token_ids) // (case.prefill_chunk or _STEP_TOKENS)) + 2
        params = SamplingParams(max_tokens=steps + self._new_tokens, ignore_eos=True, seed=1)
        return _Prompt(victim.token_ids[::-1][: 64 - steps], params)

    # -- what it runs on ---------------------------------------------------------------------------------------------

    def _pipeline_of(self, split: tuple[int, ...], block_size: int) -> Pipeline:
        if self._pipelines is not None:
            self._unload_alone()
        if self._loaded is None or self._loaded[:2] != (split, block_size):
            self._unload()
            self._loaded = (split, block_size, self._pipeline(split, block_size, self._max_batch))
        pipeline = self._loaded[2]
        # The last case's sequences and step numbers are of no use to the next.
        self._wait(pipeline.recover())
        return pipeline

    def _unload(self) -> None:
        if self._loaded is not None:
            self._wait(self._loaded[2].close())
            self._loaded = None

    def _unload_alone(self) -> None:
        if self._alone is not None:
            self._wait(self._alone.close())
            self._alone = None

    def _pipeline(self, split: tuple[int, ...], block_size: int, sequences: int) -> Pipeline:
        longest = _LONGEST_PROMPT + self._new_tokens
        if longest > self.model.context_length:
            raise InvalidParameterError(
                "new_tokens", self._new_tokens, f"at most {self.model.context_length - _LONGEST_PROMPT} for this model"
            )
        check_stage_options(block_size=block_size, kv_dtype=self._kv_dtype, threads=self._threads, device=self._device)
        # One more: the older sequence that takes the blocks of a batch of one.
        num_blocks = (sequences + 1) * (-(-longest // block_size) + 1)
        specs = stage_specs(
            self.model,
            split,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_dtype=self._kv_dtype,
            max_step_tokens=_STEP_TOKENS,
            max_sequences=sequences + 1,
            max_context=longest,
            num_threads=self._threads,
            device=self._device,
        )
        pipeline = (
            LocalPipeline(specs, self._checkpoint, self._backend_factory)
            if self._pipelines is None
            else self._pipelines(specs)
        )
        self._wait(pipeline.start())
        return pipeline

    def _scheduler(
        self,
        block_size: int,
        *,
        prefill_chunk: int | None,
        depth: int,
        max_sequences: int,
        num_blocks: int,
        prefix_cache: bool,
        ahead: bool = False,
    ) -> Scheduler:
        return Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_context=_LONGEST_PROMPT + self._new_tokens,
                depth=depth,
                max_step_tokens=_STEP_TOKENS,
                prefill_chunk=prefill_chunk or _STEP_TOKENS,
                max_sequences=max_sequences,
                prefix_cache=prefix_cache,
                vocab_size=self.model.vocab_size,
                ahead=ahead,
            )
        )


_LONGEST_PROMPT = 127
_STEP_TOKENS = 512
