"""What the data plane costs: stages that only pretend to work, real Ray actors, real sockets.

    python -m benchmarks.pipeline            (or: make bench-pipeline)

Each stage sleeps for `--work-ms` a step and hands on hidden states of a given size, with N + 2 plans in flight for N
stages. The ideal rate is one step per `time.sleep(work)`, as long as that really takes on this machine before and after
each trial: a pipeline cannot beat its slowest stage.

And then turns: the real scheduler, with sequences that decode, so that a step waits for the tokens of the one before.
With N and N + 1 plans in flight and with N + 1 of which one is made ahead (`SchedulerConfig.ahead`). The ideal turn of
a sequence is one step in each stage, whatever else there is. Prints medians and spread of repeated trials; writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardline import __version__
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import connected
from shardline.cluster.stage_loading import LoadedStage, ModelIdentity
from shardline.scheduler import NewRequest, SamplingParams, Scheduler, SchedulerConfig, StepPlan, StepResult
from shardline.scheduler.plan import SampledToken, SequenceRun
from shardline.stage.spec import StageSpec
from shardline.stage.stage import DoneStep, StepOutput

HIDDEN_SIZE = 4096
RESULTS = Path(__file__).parent / "results" / "pipeline.json"


class PretendStage:
    """Sleeps, then gives hidden states that it made itself."""

    def __init__(self, spec: StageSpec, work_seconds: float) -> None:
        self._spec = spec
        self._work_seconds = work_seconds

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> DoneStep:
        """Sleep for one step."""
        if self._work_seconds:
            time.sleep(self._work_seconds)
        if self._spec.has_head:
            tokens = tuple(SampledToken(run.seq_id, plan.step_id) for run in plan.runs if run.samples)
            return DoneStep(StepOutput(None, StepResult(plan.step_id, tokens)))
        # What a backend's `read` does: memory of its own for each step.
        return DoneStep(StepOutput(np.empty((plan.num_tokens, HIDDEN_SIZE), np.float32), None))

    def reset(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class PretendLoader:
    """Makes pretend stages."""

    work_seconds: float

    def identity(self) -> ModelIdentity:
        """There is no model."""
        return ModelIdentity("pretend", HIDDEN_SIZE, 1)

    def load(self, spec: StageSpec) -> LoadedStage:
        """A stage."""
        return LoadedStage(PretendStage(spec, self.work_seconds), self.identity(), "pretend", lambda: 0)


def sleep_seconds(work_seconds: float, count: int = 50) -> float:
    """How long a sleep of that length takes here and now."""
    began = time.perf_counter()
    for _ in range(count):
        time.sleep(work_seconds)
    return (time.perf_counter() - began) / count


def make_specs(num_stages: int, max_rows: int) -> list[StageSpec]:
    """Stages of one empty layer each."""
    return [
        StageSpec(i, i, i + 1, i == 0, i == num_stages - 1, 1, 8, "float32", max_rows, 1, 8, 1)
        for i in range(num_stages)
    ]


async def trial(pipeline: RayPipeline, first: int, steps: int, rows: int, depth: int) -> float:
    """Steps a second with `depth` plans in flight, counted from a full pipeline."""
    warm = 2 * depth
    submitted = finished = 0
    began = 0.0
    while finished < steps + warm:
        while submitted < steps + warm and submitted - finished < depth:
            run = SequenceRun(0, 0, (0,) * rows, (), True)
            await pipeline.submit(StepPlan(first + submitted, (), (), (run,)))
            submitted += 1
        result = await pipeline.result()
        assert result.step_id == first + finished
        finished += 1
        if finished == warm:
            began = time.perf_counter()
    return steps / (time.perf_counter() - began)


async def measure(work_seconds: float, num_stages: int, payloads: Sequence[int], trials: int, steps: int) -> list[dict]:
    """One row a payload."""
    depth = num_stages + 2
    row_bytes = HIDDEN_SIZE * 4
    pipeline = RayPipeline(make_specs(num_stages, max(payloads) // row_bytes), PretendLoader(work_seconds))
    rows = []
    await pipeline.start()
    try:
        first = 0
        for payload in payloads:
            rates, shares = [], []
            for _ in range(trials):
                slept = sleep_seconds(work_seconds)
                rates.append(await trial(pipeline, first, steps, payload // row_bytes, depth))
                shares.append(rates[-1] * (slept + sleep_seconds(work_seconds)) / 2)
                first += steps + 2 * depth
            rows.append({"payload_bytes": payload, "depth": depth, "steps": steps, "rates": rates, "of_ideal": shares})
    finally:
        await pipeline.close()
    return rows


def turning(sequences: int, depth: int, *, ahead: bool) -> Scheduler:
    """A scheduler with so many sequences that never end."""
    config = SchedulerConfig(
        num_blocks=sequences * 64,
        block_size=64,
        max_context=4096,
        depth=depth,
        max_step_tokens=sequences,
        prefill_chunk=1,
        max_sequences=sequences,
        ahead=ahead,
    )
    scheduler = Scheduler(config)
    for index in range(sequences):
        scheduler.add(NewRequest(str(index), (1,), SamplingParams(ignore_eos=True)))
    return scheduler


async def turns(pipeline: RayPipeline, scheduler: Scheduler, sequences: int, count: int) -> float:
    """Seconds in which each sequence has one token, of so many in a row."""
    await pipeline.recover()
    warm, began, tokens = 4 * sequences, 0.0, 0
    while tokens < warm + count * sequences:
        while (plan := scheduler.schedule()) is not None:
            await pipeline.submit(plan)
        result = await pipeline.result()
        tokens += len(scheduler.update(result))
        if not began and tokens >= warm:
            warm, began = tokens, time.perf_counter()
    return (time.perf_counter() - began) / ((tokens - warm) / sequences)


async def measure_turns(
    work_seconds: float, num_stages: int, counts: Sequence[int], trials: int, steps: int
) -> list[dict]:
    """One row for each number of sequences and each way to plan."""
    pipeline = RayPipeline(make_specs(num_stages, max(counts)), PretendLoader(work_seconds))
    ways = ((num_stages, False), (num_stages + 1, False), (num_stages + 1, True))
    rows = []
    await pipeline.start()
    try:
        for sequences in counts:
            made = [
                {"sequences": sequences, "depth": depth, "ahead": ahead, "turn_ms": [], "of_ideal": []}
                for depth, ahead in ways
            ]
            for _ in range(trials):
                # One after the other in each trial: whatever else the machine does meets all of them.
                for row, (depth, ahead) in zip(made, ways, strict=True):
                    slept = sleep_seconds(work_seconds)
                    scheduler = turning(sequences, depth, ahead=ahead)
                    seconds = await turns(pipeline, scheduler, sequences, max(steps // num_stages, 20))
                    row["turn_ms"].append(1e3 * seconds)
                    ideal = num_stages * (slept + sleep_seconds(work_seconds)) / 2
                    row["of_ideal"].append(ideal / seconds)
            rows += made
    finally:
        await pipeline.close()
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--work-ms", type=float, default=5.0)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--payloads", type=int, nargs="+", default=[16 * 1024, 256 * 1024, 2 * 1024 * 1024])
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 4, 64], help="of the turns")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    work = given.work_ms / 1000
    with connected(num_cpus=given.stages):
        rows = asyncio.run(measure(work, given.stages, given.payloads, given.trials, given.steps))
        in_turns = asyncio.run(measure_turns(work, given.stages, given.sequences, given.trials, given.steps))
    out = sys.stdout.write
    out(f"{given.stages} stages, {given.work_ms:g} ms of pretend work each, {rows[0]['depth']} in flight\n")
    for row in rows:
        rates, shares = row["rates"], row["of_ideal"]
        out(
            f"{row['payload_bytes'] / 1024:8.0f} KiB: median {statistics.median(rates):.1f} steps/s "
            f"({min(rates):.1f} to {max(rates):.1f} in {len(rates)} trials)"
        )
        if work:
            out(f", {statistics.median(shares):.1%} of the ideal ({min(shares):.1%} to {max(shares):.1%})")
        out("\n")
    for row in in_turns:
        milliseconds = row["turn_ms"]
        out(
            f"{row['sequences']:4d} sequences, {row['depth']} in flight{', one ahead' if row['ahead'] else '':11s}: "
            f"median {statistics.median(milliseconds):.2f} ms a turn ({min(milliseconds):.2f} to "
            f"{max(milliseconds):.2f}), {statistics.median(row['of_ideal']):.1%} of the ideal\n"
        )
    given.results.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "shardline": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "stages": given.stages,
        "work_ms": given.work_ms,
        "rows": rows,
        "turns": in_turns,
    }
    given.results.write_text(json.dumps(report, indent=1) + "\n")
    out(f"written to {given.results}\n")


if __name__ == "__main__":
    main()
