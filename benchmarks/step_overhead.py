"""What a step costs on the host, part by part, while all sequences decode: no arithmetic, no sockets, no GPU.

    python -m benchmarks.step_overhead [--batches 8 64 256] [--against before.json]

The real scheduler, messages, stage and engine; the stage's backend does nothing, and samples the same token always.
Processor time of the thread in milliseconds a step, so that who else uses the machine hardly counts: the mean over the
steps of a trial (every 16th step takes blocks), the median over trials.

    schedule, update    the scheduler's
    messages            plan and result to bytes and back: the engine's half and the stage's
    stage               `Stage.run`: the check of the plan, block tables, indices, sampling's arguments
    engine              all of an `Engine`'s step on a pipeline that answers at once, with one consumer a sequence:
                        `schedule` and `update` again, text, streams, wake-ups
    hop                 schedule, update and messages: what nothing hides when one plan is in flight
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.drive import greedy, prompt, quiet
from benchmarks.geometries import TINY
from benchmarks.record import RESULTS, machine, say, trials, write

from shardline.cluster.engine import Engine
from shardline.cluster.pipeline import StageStats
from shardline.cluster.request import Request
from shardline.cluster.text.detokenizer import Detokenizer
from shardline.cluster.text.model_text import SequenceText
from shardline.cluster.text.stop import StopMatcher
from shardline.cluster.wire.frames import decode_plan, decode_result, encode_message
from shardline.kernels import Backend, SampleOutput, SamplingBatch
from shardline.kernels.backend import Arrived
from shardline.scheduler import NewRequest, SampledToken, Scheduler, SchedulerConfig, StepPlan, StepResult
from shardline.stage import Stage, StageSpec
from shardline.stage.roles import matrix_shapes, vector_shapes

PROMPT, CONTEXT, BLOCK = 64, 1024, 16
WARM = 8
TOKEN = 65
PARTS = ("schedule", "update", "messages", "stage", "engine", "hop")


class _Nothing(Backend):
    """Arrays on the host, and no op does anything."""

    name = "nothing"

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.empty(shape, dtype)

    def activations(self, rows: int, channels: int) -> Any:
        return np.empty((rows, channels), np.float32)

    def upload(self, host: Any) -> Any:
        return host

    def write(self, target: Any, host: Any) -> None:
        target[: len(host)] = host

    def read_later(self, source: Any) -> Arrived[Any]:
        return Arrived(np.array(source))

    def resident_bytes(self) -> int:
        return 0

    def replay(self, key: Hashable, issue: Callable[[], None]) -> None:
        pass

    def sample_later(
        self, logits: Any, batch: SamplingBatch, last_tokens: Any = None, places: Any = None
    ) -> Arrived[SampleOutput]:
        tokens, none = np.full(batch.rows, TOKEN, np.int32), np.full(batch.rows, np.nan, np.float32)
        listed = np.empty((batch.rows, 0), np.int32), np.empty((batch.rows, 0), np.float32)
        return Arrived(SampleOutput(tokens, none, *listed))


def _no_op(self: object, *arguments: object, **options: object) -> None:
    pass


def _backend() -> Backend:
    ops = dict.fromkeys(_Nothing.__abstractmethods__, _no_op)
    made: Backend = type("Nothing", (_Nothing,), ops)()
    return made


class _Shapes:
    """A checkpoint of shapes alone."""

    spec = TINY

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> Any:
        return np.empty(matrix_shapes(TINY, layer)[role], np.uint8)

    def vector(self, role: str, layer: int | None) -> Any:
        return np.ones(vector_shapes(TINY, layer)[role], np.float32)


def scheduler_config(batch: int) -> SchedulerConfig:
    """One plan in flight, and room for all."""
    return SchedulerConfig(
        num_blocks=batch * CONTEXT // BLOCK,
        block_size=BLOCK,
        max_context=CONTEXT,
        depth=1,
        max_step_tokens=max(512, batch),
        prefill_chunk=512,
        max_sequences=max(batch, 2),
        vocab_size=TINY.vocab_size,
    )


def stage_of(config: SchedulerConfig) -> Stage:
    """All layers of the tiny geometry, without their arithmetic."""
    spec = StageSpec(
        index=0,
        first_layer=0,
        end_layer=TINY.num_layers,
        has_embed=True,
        has_head=True,
        num_blocks=config.num_blocks,
        block_size=BLOCK,
        kv_dtype="float16",
        max_step_tokens=config.max_step_tokens,
        max_sequences=config.max_sequences,
        max_context=CONTEXT,
        num_threads=1,
    )
    return Stage(spec, _Shapes(), _backend())  # type: ignore[arg-type]


class Clock:
    """Processor seconds of this thread, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        made = call(*arguments)
        self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - began
        return made


def parts(batch: int, steps: int) -> dict[str, float]:
    """Milliseconds a step of everything but the engine."""
    config = scheduler_config(batch)
    scheduler, stage = Scheduler(config), stage_of(config)
    for index in range(batch):
        ids = prompt(TINY.vocab_size, PROMPT, index, 0)
        scheduler.add(NewRequest(str(index), ids, greedy(index, PROMPT + WARM + steps + 64)))

    def step(clock: Clock) -> StepResult:
        plan: StepPlan = clock("schedule", scheduler.schedule)
        sent = clock("messages", encode_message, plan)
        taken = clock("messages", decode_plan, sent)
        result = clock("stage", stage.run, taken, None).result
        back = clock("messages", encode_message, result)
        made: StepResult = clock("messages", decode_result, back)
        clock("update", scheduler.update, made)
        return made

    while len(step(Clock()).tokens) < batch:
        pass
    for _ in range(WARM):
        step(Clock())
    clock = Clock()
    for _ in range(steps):
        assert len(step(clock).tokens) == batch
    made = {part: seconds / steps * 1e3 for part, seconds in clock.seconds.items()}
    return made | {"hop": made["schedule"] + made["update"] + made["messages"]}


class _Echo:
    """Implements `Pipeline`: every sequence's next token is the same, and comes at once.

    It calls `at_step` with the number of sequences of each plan that has no prompt in it.
    """

    vocab_size = TINY.vocab_size

    def __init__(self, at_step: Callable[[int], None]) -> None:
        self._results: deque[StepResult] = deque()
        self._filled = asyncio.Event()
        self._at_step = at_step

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        return ()

    async def submit(self, plan: StepPlan) -> None:
        tokens = tuple(SampledToken(run.seq_id, TOKEN) for run in plan.runs if run.samples)
        self._results.append(StepResult(plan.step_id, tokens))
        self._filled.set()
        if all(len(run.token_ids) == 1 for run in plan.runs):
            self._at_step(len(plan.runs))

    async def result(self) -> StepResult:
        while not self._results:
            self._filled.clear()
            await self._filled.wait()
        return self._results.popleft()

    async def start(self) -> None:
        pass

    async def stats(self) -> list[StageStats]:
        return []

    async def recover(self) -> None:
        raise AssertionError("nothing is lost here")

    async def close(self) -> None:
        pass


class _Spelling:
    """A tokenizer of one letter a token; only its streaming half."""

    def begins(self, previous_id: int | None) -> bool:
        return False

    def spell(self, token_id: int, skip_special: bool, begins: bool) -> tuple[bytes, bool]:
        return bytes((token_id & 127,)), False


class _Text:
    """As `ModelText`, for prompts that are ids."""

    async def prompt_ids(self, request: Request, max_context: int) -> tuple[int, ...]:
        assert request.token_ids is not None
        return request.token_ids

    def sequence(self, prompt_ids: tuple[int, ...], stops: tuple[str, ...]) -> SequenceText:
        return SequenceText(Detokenizer(_Spelling(), previous_id=prompt_ids[-1]), StopMatcher(stops))  # type: ignore[arg-type]

    def close(self) -> None:
        pass


async def engine_step(batch: int, steps: int) -> float:
    """Milliseconds of an engine's step with that many consumers."""
    moments: list[float] = []

    def at_step(sequences: int) -> None:
        if sequences == batch:
            moments.append(time.thread_time())
            if len(moments) == WARM + steps + 1:
                for index in range(batch):
                    engine.cancel(str(index))

    engine = Engine(_Echo(at_step), _Text(), scheduler_config(batch))  # type: ignore[arg-type]
    await engine.start()
    moments.clear()

    async def consume(index: int) -> None:
        ids = prompt(TINY.vocab_size, PROMPT, index, 0)
        async for _ in engine.generate(Request(token_ids=ids, params=greedy(index), request_id=str(index))):
            pass

    async with asyncio.TaskGroup() as group:
        for index in range(batch):
            group.create_task(consume(index))
    await quiet(engine)
    await engine.close()
    return (moments[WARM + steps] - moments[WARM]) / steps * 1e3


def measure(batch: int, steps: int, repeats: int) -> dict[str, Any]:
    """One row of the report: each part's trials."""
    rows = [parts(batch, steps) | {"engine": asyncio.run(engine_step(batch, steps))} for _ in range(repeats)]
    return {"batch": batch} | {part: trials([row[part] for row in rows]) for part in PARTS}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--steps", type=int, default=96, help="of a trial; a multiple of the block's 16 tokens")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--against", type=Path, help="an earlier report, to print beside this one")
    parser.add_argument("--commit", help="where there is no checkout")
    parser.add_argument("--results", type=Path, default=RESULTS / "step_overhead.json")
    given = parser.parse_args()
    before: dict[int, Any] = {}
    if given.against is not None:
        before = {row["batch"]: row for row in json.loads(given.against.read_text())["rows"]}
    report: dict[str, Any] = {"benchmark": "step_overhead", "unit": "ms of one core a step"}
    report |= machine(given.commit, "benchmarks.step_overhead")
    report["rows"] = rows = []
    say("ms a step  " + "".join(f"{part:>18s}" for part in PARTS))
    for batch in given.batches:
        row = measure(batch, given.steps, given.trials)
        rows.append(row)
        cells = []
        for part in PARTS:
            was = f"{before[batch][part]['median']:.3f} > " if batch in before else ""
            cells.append(f"{was}{statistics.median(row[part]['trials']):.3f}")
        say(f"{batch:4d} rows  " + "".join(f"{cell:>18s}" for cell in cells))
    write(given.results, report)


if __name__ == "__main__":
    main()
