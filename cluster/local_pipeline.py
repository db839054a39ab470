"""All stages in this process: one device, tests, and `Client.local`. The same protocol as the pipeline over Ray."""

from __future__ import annotations

import asyncio
import os
import platform
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from shardline.cluster.errors import EngineDeadError, StageLostError
from shardline.cluster.pipeline import StageStats
from shardline.cluster.stage_thread import StageThread
from shardline.kernels import Backend
from shardline.scheduler import InvalidParameterError, StepPlan, StepResult
from shardline.stage import Checkpoint, ModelSpec, Stage, StageSpec, backend_for, open_checkpoint

BackendFactory = Callable[[StageSpec], Backend]

STEP_SECONDS = 900.0
"""Longer than the pipeline over Ray waits: the first steps may have to compile their kernels here, and a false alarm
cannot be made good."""


class _Slot:
    """One stage and its counters. Only the worker thread touches it, apart from reading numbers."""

    def __init__(self, stage: Stage, backend: Backend) -> None:
        self.stage = stage
        self.backend = backend
        self.steps = 0
        self.rows = 0
        self.busy_seconds = 0.0
        self.first_step: float | None = None


class LocalPipeline:
    """Implements `Pipeline` with stages that one worker thread runs one after the other.

    One thread, because the stages share this machine's cores anyway and a backend's threads then never compete; the
    event loop never waits for arithmetic. A stage that raises is lost, like a stage whose process died: `recover`
    creates it anew from the checkpoint and the others keep their weights. A stage that hangs is lost for good: neither
    its thread nor its device can be had back inside this process, so `recover` says that the engine is dead.
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
        # What the worker thread runs: the step's id and the stage.
        self._running: tuple[int, int] | None = None
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
        self._results.append(self._worker.submit(self._step, plan))
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
            step, stage = self._running or (None, None)
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
        now = time.perf_counter()
        return [
            StageStats(
                spec=slot.stage.spec,
                where=f"{platform.node()} {slot.backend.name}",
                pid=os.getpid(),
                resident_bytes=slot.backend.resident_bytes(),
                steps=slot.steps,
                rows=slot.rows,
                busy_seconds=slot.busy_seconds,
                wall_seconds=0.0 if slot.first_step is None else now - slot.first_step,
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
            return
        unloading.result()
        # It has nothing left to do, so this does not wait.
        self._worker.close()
        if self._owns_checkpoint:
            self._checkpoint.close()

    async def _in_worker(self, work: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._worker.submit(work))

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise StageLostError(self._lost.stage, self._lost.reason)

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

    def _step(self, plan: StepPlan) -> StepResult:
        self._raise_if_lost()
        hidden = None
        result = None
        for index, slot in enumerate(self._slots):
            assert slot is not None, "a plan before start()"
            self._running = (plan.step_id, index)
            began = time.perf_counter()
            if slot.first_step is None:
                slot.first_step = began
            try:
                output = slot.stage.run(plan, hidden)
            except Exception as error:
                self._slots[index] = None
                self._lost = StageLostError(index, "".join(traceback.format_exception(error)))
                slot.stage.close()
                raise self._lost from error
            slot.busy_seconds += time.perf_counter() - began
            slot.steps += 1
            slot.rows += plan.num_tokens
            hidden, result = output.hidden, output.result
        assert result is not None, "the last stage gave no result"
        return result

    def _reset(self) -> None:
        self._load_missing()
        for slot in self._slots:
            assert slot is not None
            slot.stage.reset()
        self._lost = None

    def _unload(self) -> None:
        for index, slot in enumerate(self._slots):
            if slot is not None:
                self._slots[index] = None
                slot.stage.close()


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
