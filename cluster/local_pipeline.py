"""All stages in this process: one device, tests, and `Client.local`. The same protocol as the pipeline over Ray."""

from __future__ import annotations

import asyncio
import os
import platform
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardline.cluster.errors import EngineDeadError, StageLostError
from shardline.cluster.last_tokens import LastTokens
from shardline.cluster.pipeline import StageStats
from shardline.cluster.stage_thread import StageThread
from shardline.cluster.step_times import StepTimes
from shardline.kernels import Backend
from shardline.scheduler import InvalidParameterError, StepPlan, StepResult
from shardline.stage import Checkpoint, ModelSpec, Stage, StageSpec, backend_for, open_checkpoint
from shardline.stage.stage import MAX_BEGUN, PendingStep

BackendFactory = Callable[[StageSpec], Backend]

STEP_SECONDS = 900.0
"""Longer than the pipeline over Ray waits: the first steps may have to compile their kernels here, and a false alarm
cannot be made good."""


class _Slot:
    """One stage and its counters. Only the worker thread calls the stage."""

    def __init__(self, stage: Stage, backend: Backend) -> None:
        self.stage = stage
        self.backend = backend
        self.times = StepTimes()
        # A step failed after it had been begun: those after it ran on what it left behind.
        self.failed = False


class LocalPipeline:
    """Implements `Pipeline` with stages that one worker thread runs one after the other.

    One thread, because the stages share this machine's cores anyway and a backend's threads then never compete; the
    event loop never waits for arithmetic. Where the last stage's step still runs on its device once it has been begun,
    a second thread waits for it, and the worker goes on to the next plan. A stage that raises is lost, like a stage
    whose process died: `recover` creates it anew from the checkpoint and the others keep their weights. A stage that
    hangs is lost for good: neither its threads nor its device can be had back inside this process, so `recover` says
    that the engine is dead.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        checkpoint: Checkpoint | Path | str,
        backend_factory: BackendFactory = backend_for,
        *,
        owns_checkpoint: bool = False,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        """
        Args:
            specs: The stages' shares, in order.
            checkpoint: A model file, opened and closed here; or an open one.
            backend_factory: Makes the backend of one stage, in the worker thread.
            owns_checkpoint: Close an open one too.
            step_seconds: The longest time without any result while plans are in flight; then a stage is taken to hang.

        Raises:
            CheckpointError: the file cannot be used.
        """
        self._specs = tuple(specs)
        self._owns_checkpoint = owns_checkpoint or isinstance(checkpoint, (Path, str))
        self._checkpoint = open_checkpoint(checkpoint) if isinstance(checkpoint, (Path, str)) else checkpoint
        self._backend_factory = backend_factory
        self._step_seconds = step_seconds
        self._worker = StageThread("shardline-stages")
        self._slots: list[_Slot | None] = [None] * len(self._specs)
        self._results: deque[Future[StepResult]] = deque()
        self._submitted = asyncio.Event()
        self._lost: StageLostError | None = None
        # Waits for steps of the last stage; made for the first one that has to be waited for.
        self._finisher: StageThread | None = None
        # Of those, the ones that it may still wait for; the worker thread's own.
        self._begun: deque[Future[None]] = deque()
        # Where one stage embeds and another samples.
        self._last_tokens = LastTokens() if len(self._specs) > 1 else None
        # Lost stages that still hold their memory.
        self._dead: deque[_Slot] = deque()
        self._hangs = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        """The stages' shares, in order."""
        return self._specs

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._checkpoint.spec.vocab_size

    async def start(self) -> None:
        """Load every stage. Raises what the stage raises: a damaged file is not a lost stage."""
        await self._in_worker(self._load_missing)

    async def submit(self, plan: StepPlan) -> None:
        """Queue a plan for the worker thread."""
        self._raise_if_lost()
        result: Future[StepResult] = Future()
        self._results.append(result)
        self._worker.submit(self._step, plan, result)
        self._submitted.set()

    async def result(self) -> StepResult:
        """The oldest plan's result. Here a stage is only ever lost in a step."""
        while not self._results:
            self._submitted.clear()
            await self._submitted.wait()
        try:
            async with asyncio.timeout(self._step_seconds):
                return await asyncio.wrap_future(self._results.popleft())
        except TimeoutError:
            step, stage = self._oldest_running()
            self._hangs = True
            self._lost = StageLostError(stage, f"it has been computing step {step} for {self._step_seconds:g} s")
            raise StageLostError(self._lost.stage, self._lost.reason) from None

    async def recover(self) -> None:
        """Create the lost stage anew; every stage forgets its sequences. Raises EngineDeadError when a stage hangs."""
        self._results.clear()
        if self._hangs:
            raise EngineDeadError(
                f"{self._lost}. What hangs in this process cannot be replaced: start the program again. A stage that "
                "hangs in a process of its own is replaced: --stages or --split with more than one"
            )
        try:
            await self._in_worker(self._reset)
        except Exception as error:
            raise StageLostError(None, "".join(traceback.format_exception(error))) from error

    async def stats(self) -> list[StageStats]:
        """Figures of every stage that is loaded."""
        return [
            StageStats(
                spec=slot.stage.spec,
                where=f"{platform.node()} {slot.backend.name}",
                pid=os.getpid(),
                resident_bytes=slot.backend.resident_bytes(),
                steps=slot.times.steps,
                rows=slot.times.rows,
                busy_seconds=slot.times.busy_seconds,
                wall_seconds=slot.times.wall_seconds,
                numeric_class=slot.backend.numeric_class,
            )
            for slot in self._slots
            if slot is not None
        ]

    async def close(self) -> None:
        """Let the step that runs end, drop the others, and give the memory back; a step that hangs keeps its own."""
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.create_task(self._close())
        # It goes on when a caller is cancelled, and a second caller waits for it.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for waiting in self._results:
            waiting.cancel()
        self._results.clear()
        if not self._hangs:
            unloading = asyncio.wrap_future(self._worker.submit(self._unload))
            await asyncio.wait([unloading], timeout=self._step_seconds)
            self._hangs = not unloading.done()
        if self._hangs:
            # It may still read the checkpoint.
            self._worker.abandon()
            if self._finisher is not None:
                self._finisher.abandon()
            return
        unloading.result()
        # They have nothing left to do, so this does not wait.
        self._worker.close()
        if self._finisher is not None:
            self._finisher.close()
        if self._owns_checkpoint:
            self._checkpoint.close()

    async def _in_worker(self, work: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._worker.submit(work))

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise StageLostError(self._lost.stage, self._lost.reason)

    def _oldest_running(self) -> tuple[int | None, int | None]:
        """The oldest step that runs, and the stage that it is in."""
        running = [(slot.times.running, index) for index, slot in enumerate(self._slots) if slot is not None]
        oldest = [(step[0], index) for step, index in running if step is not None]
        return min(oldest, default=(None, None))

    # -- in the worker thread ----------------------------------------------------------------------------------------

    def _load_missing(self) -> None:
        for index, spec in enumerate(self._specs):
            if self._closed:
                raise StageLostError(index, "the pipeline was closed while its stages were being loaded")
            if self._slots[index] is None:
                backend = self._backend_factory(spec)
                try:
                    self._slots[index] = _Slot(Stage(spec, self._checkpoint, backend), backend)
                except BaseException:
                    backend.close()
                    raise

    def _step(self, plan: StepPlan, result: Future[StepResult]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            self._raise_if_lost()
            plan = self._filled_in(plan)
            hidden = None
            for index in range(len(self._slots) - 1):
                hidden = self._run(index, plan, hidden)
            self._wait_for_room()
            self._raise_if_lost()
            if self._closed:
                raise StageLostError(None, f"the pipeline was closed before step {plan.step_id} was begun")
            self._run_last(plan, hidden, result)
        except BaseException as error:
            result.set_exception(error)

    def _filled_in(self, plan: StepPlan) -> StepPlan:
        """With the tokens of a step before, for which it may have to wait."""
        if self._last_tokens is None:
            return plan
        filled = self._last_tokens.fill_in(plan)
        if filled is None:
            self._raise_if_lost()
        assert filled is not None, "no more tokens come, though no stage was lost"
        return filled

    def _run(self, index: int, plan: StepPlan, hidden: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        slot, pending = self._begin(index, plan, hidden)
        try:
            output = pending.wait()
        except Exception as error:
            raise self._lose(index, slot, error) from error
        slot.times.finish(plan.num_tokens)
        return output.hidden

    def _run_last(self, plan: StepPlan, hidden: NDArray[np.float32] | None, result: Future[StepResult]) -> None:
        slot, pending = self._begin(len(self._slots) - 1, plan, hidden)
        if pending.ready and not self._begun:
            self._finish(plan, slot, pending, result)
            return
        if self._finisher is None:
            self._finisher = StageThread("shardline-stages-finish")
        self._begun.append(self._finisher.submit(self._finish, plan, slot, pending, result))

    def _begin(self, index: int, plan: StepPlan, hidden: NDArray[np.float32] | None) -> tuple[_Slot, PendingStep]:
        slot = self._slots[index]
        if slot is None:
            # It may have failed in the other thread this very moment.
            self._raise_if_lost()
            raise AssertionError("a plan before start()")
        slot.times.begin(plan.step_id)
        try:
            return slot, slot.stage.begin(plan, hidden)
        except Exception as error:
            raise self._lose(index, slot, error) from error

    def _wait_for_room(self) -> None:
        """Until the last stage may begin one more."""
        while self._begun and (len(self._begun) == MAX_BEGUN or self._begun[0].done()):
            self._begun.popleft().result()

    def _reset(self) -> None:
        self._close_dead()
        self._load_missing()
        for slot in self._slots:
            assert slot is not None
            slot.stage.reset()
        if self._last_tokens is not None:
            self._last_tokens = LastTokens()
        self._lost = None

    def _close_dead(self) -> None:
        """When no step runs on any device any more."""
        wait(self._begun)
        self._begun.clear()
        while self._dead:
            self._dead.popleft().stage.close()

    def _unload(self) -> None:
        self._close_dead()
        for index, slot in enumerate(self._slots):
            if slot is not None:
                self._slots[index] = None
                slot.stage.close()

    # -- in the worker thread, or in the one that waits for the last stage --------------------------------------------

    def _finish(self, plan: StepPlan, slot: _Slot, pending: PendingStep, result: Future[StepResult]) -> None:
        try:
            try:
                output = pending.wait()
            except Exception as error:
                if not slot.failed:
                    slot.failed = True
                    raise self._lose(len(self._slots) - 1, slot, error) from error
            if slot.failed:
                self._raise_if_lost()
            slot.times.finish(plan.num_tokens)
            assert output.result is not None, "the last stage gave no result"
            if self._last_tokens is not None and output.result.tokens:
                self._last_tokens.arrive(plan.step_id, [token.token_id for token in output.result.tokens])
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(output.result)

    def _lose(self, index: int, slot: _Slot, error: Exception) -> StageLostError:
        """Take a stage out. It gives its memory back when none of its steps runs any more."""
        lost = StageLostError(index, "".join(traceback.format_exception(error)))
        if self._lost is None:
            self._lost = lost
        if self._last_tokens is not None:
            self._last_tokens.close()
        # Its steps may fail one after the other.
        if self._slots[index] is slot:
            self._slots[index] = None
            self._dead.append(slot)
            self._worker.submit(self._close_dead)
        return lost


def stage_specs(
    model: ModelSpec,
    split: Sequence[int],
    *,
    num_blocks: int,
    block_size: int,
    kv_dtype: str,
    max_step_tokens: int,
    max_sequences: int,
    max_context: int,
    num_threads: int,
    device: str = "cpu",
) -> tuple[StageSpec, ...]:
    """Stages with that many layers each, alike in all else: the first embeds, the last has the head.

    Raises:
        InvalidParameterError: `split` does not add up to the model's layers.
    """
    if not split or any(count < 0 for count in split) or sum(split) != model.num_layers:
        raise InvalidParameterError("split", tuple(split), f"layer counts that add up to {model.num_layers}")
    ends = [sum(split[: index + 1]) for index in range(len(split))]
    return tuple(
        StageSpec(
            index=index,
            first_layer=end - count,
            end_layer=end,
            has_embed=index == 0,
            has_head=index == len(split) - 1,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_dtype=kv_dtype,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            max_context=max_context,
            num_threads=num_threads,
            device=device,
        )
        for index, (count, end) in enumerate(zip(split, ends, strict=True))
    )
