"""Each stage alone on the device, and what the whole would give of that; and what a step costs between processes."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks.layouts import reachable_by_workers
from benchmarks.pipeline import HIDDEN_SIZE, PretendLoader, make_specs, trial
from benchmarks.record import numbers, say, trials
from benchmarks.session import Session, prepared_for

from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import connected
from shardline.cluster.subset import measure_subset

HOP_ROWS = (1, 16, 64, 512)


def subset(session: Session) -> Session:
    """Time each stage of a layout alone on the device, and say what cards of their own would give."""
    given, layout = session.given, session.layout
    try:
        plan = prepared_for(layout, session.model, given).plan
        shared = {"planned": (plan.depth, plan.min_microbatch), "cards": (len(plan.specs) + 1, 1)}
        # As the scheduler shares sequences out.
        rows = {
            name: {b: math.ceil(b / max(1, min(depth, b // least))) for b in given.batches}
            for name, (depth, least) in shared.items()
        }
        wanted = sorted({row for each in rows.values() for row in each.values()})
        stages = []
        for spec in plan.specs:
            if session.late(f"subset: stages from {spec.index}") or spec.num_layers == 0:
                return session
            report = measure_subset(
                session.model,
                spec.first_layer,
                spec.end_layer,
                batches=wanted,
                context=given.prompt + given.warm,
                steps=given.subset_steps,
                threads=spec.num_threads,
                device="cpu" if given.device == "cpu" else "cuda:0",
            )
            stages.append({batch.sequences: batch for batch in report.batches})
            say(
                f"  stage {spec.index} alone, {spec.num_layers} layers: "
                + ", ".join(f"{b.sequences} rows {b.median_seconds * 1e3:.2f} ms" for b in report.batches)
            )
        session.result["subset"] = [
            projected(name, batch, rows[name][batch], stages) for name in shared for batch in given.batches
        ]
    except Exception:
        session.result["subset_error"] = traceback.format_exc()
        say(session.result["subset_error"])
    return session


def projected(name: str, batch: int, rows: int, stages: Sequence[dict[int, Any]]) -> dict[str, Any]:
    """From each stage's step alone, the rates of all of them together, hops left out.

    On cards of their own a round takes the longer of a microbatch's way through all stages and of the slowest stage's
    work on every microbatch; where stages take turns on one device it takes all of their work on every microbatch.
    """
    times = [stage[rows].median_seconds for stage in stages]
    flying = math.ceil(batch / rows)
    cards = max(sum(times), flying * max(times))
    return {
        "flight": name,
        "batch": batch,
        "rows": rows,
        "stage_seconds": times,
        "stage_seconds_low": [stage[rows].low_seconds for stage in stages],
        "stage_seconds_high": [stage[rows].high_seconds for stage in stages],
        "cards_tokens_per_second": batch / cards,
        "one_device_tokens_per_second": batch / (flying * sum(times)),
    }


def hops(session: Session) -> Session:
    """Steps through pretend stages that do nothing, one at a time: the slope over the number of stages is a hop."""

    few, many = 2, 5

    async def seconds(stages: int) -> dict[int, list[float]]:
        pipeline = RayPipeline(make_specs(stages, max(HOP_ROWS)), PretendLoader(0.0))
        await pipeline.start()
        try:
            first, made = 0, {}
            for rows in HOP_ROWS:
                steps = 400 if rows <= 64 else 100
                made[rows] = []
                for _ in range(session.given.trials):
                    made[rows].append(1 / await trial(pipeline, first, steps, rows, 1))
                    first += steps + 2
            return made
        finally:
            await pipeline.close()

    try:
        reachable_by_workers()
        with connected(None, num_cpus=many):
            short, long = asyncio.run(seconds(few)), asyncio.run(seconds(many))
        result = []
        for rows in HOP_ROWS:
            each = [(b - a) / (many - few) for a, b in zip(short[rows], long[rows], strict=True)]
            result.append({"rows": rows, "bytes": rows * HIDDEN_SIZE * 4, "seconds": trials(each)})
            say(f"  hop of {rows} rows of {HIDDEN_SIZE}: {numbers(result[-1]['seconds'], 1e3, 3)} ms")
        session.result["hops"] = {"transport": "tcp, one host", "hops": result}
    except Exception:
        session.result["hops_error"] = traceback.format_exc()
        say(session.result["hops_error"])
    return session
