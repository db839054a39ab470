"""How a model is laid out over devices in a benchmark, and an engine that runs so, with the time that loading took."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import gpu_memory_used

from shardline.cluster.build import EngineOptions, Prepared, build_engine
from shardline.cluster.engine import Engine
from shardline.cluster.pipeline import StageStats
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.stage_loading import LoadedStage, ModelIdentity, StageLoader
from shardline.stage import StageSpec
from shardline.stage.resident.layout import file_name

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay a model out.

    Attributes:
        name: As given.
        stages: How many.
        memory: Bytes that each stage may take; None: what there is.
        ray: The stages are Ray actors; else the one stage is in the benchmark's own process.
    """

    name: str
    stages: int
    memory: tuple[int, ...] | None
    ray: bool


def parse_layout(text: str) -> Layout:
    """Read a layout.

    "one": all in one stage, in this process; "one-ray": the same in a Ray actor; "4": four stages, one a GPU; "4x8GiB":
    four of at most 8 GiB each, on as few GPUs as hold them; "6,8,12,16GiB": four of unequal size. Raises ValueError.
    """
    if text in ("one", "one-ray"):
        return Layout(text, 1, None, text == "one-ray")
    if re.fullmatch(r"[1-9]\d?", text):
        return Layout(text, int(text), None, True)
    found = re.fullmatch(r"(?:(\d+)x)?([\d.,]+)([KMG])i?B?", text)
    if found is None:
        raise ValueError(f"{text!r} is no layout: one, one-ray, 2, 4x8GiB or 6,8,12,16GiB")
    times, sizes, unit = found.groups()
    memory = tuple(int(float(size) * _UNITS[unit]) for size in sizes.split(",")) * int(times or 1)
    return Layout(text, len(memory), memory, True)


def engine_options(layout: Layout, model: Path, device: str, **common: Any) -> EngineOptions:
    """The options of an engine so laid out on "cpu" or "gpu"."""
    chosen: dict[str, Any] = {"model": str(model), "stages": layout.stages, **common}
    if layout.ray:
        chosen["address"] = "local"
    if device == "cpu":
        chosen |= {"memory": layout.memory}
    else:
        chosen |= {"device": "gpu" if layout.ray else "cuda:0", "gpu_memory": layout.memory}
    return EngineOptions(**chosen)


@dataclass(frozen=True, slots=True)
class TimedLoader:
    """Loads as `inner` does; leaves the time in a file of `folder` for each stage, once."""

    inner: StageLoader
    model: Path
    folder: Path

    def identity(self) -> ModelIdentity:
        """See `StageLoader`."""
        return self.inner.identity()

    def load(self, spec: StageSpec) -> LoadedStage:
        """See `StageLoader`. Before the first load the files are read once: it is then from memory, not from a disk."""
        record = self.folder / f"stage-{spec.index}.json"
        read = None if record.exists() else _read(self.model, spec)
        began, processor = time.perf_counter(), time.process_time()
        loaded = self.inner.load(spec)
        if read is not None:
            times = _load_times(time.perf_counter() - began, time.process_time() - processor, *read)
            record.write_text(json.dumps(times))
        return loaded


def _load_times(seconds: float, processor: float, read: float, nbytes: int) -> dict[str, float]:
    """Of one load. Processor time near the whole says that one core bounds it; reading alone, that memory does."""
    return {"seconds": seconds, "processor_seconds": processor, "read_seconds": read, "bytes": nbytes}


def _read(model: Path, spec: StageSpec) -> tuple[float, int]:
    """Seconds that reading a stage's files takes when they are in memory, and how many bytes they are."""
    layers: list[int | None] = [*range(spec.first_layer, spec.end_layer)]
    if spec.has_embed or spec.has_head:
        layers.append(None)
    seconds, total = 0.0, 0
    for warm in (False, True):
        began, total = time.perf_counter(), 0
        for layer in layers:
            with (model / file_name(layer)).open("rb", buffering=0) as file:
                buffer = bytearray(1 << 23)
                while count := file.readinto(buffer):
                    total += count
        if warm:
            seconds = time.perf_counter() - began
    return seconds, total


@dataclass(slots=True)
class Running:
    """An engine that is ready.

    Attributes:
        engine: The engine.
        prepared: What it was built from.
        start_seconds: From nothing to ready.
        loads: Times of each stage: over Ray as `TimedLoader` wrote them; else of the whole start.
    """

    engine: Engine
    prepared: Prepared
    start_seconds: float
    loads: list[dict[str, float]]

    def describe(self) -> dict[str, Any]:
        """The plan, the load and the memory, for the JSON."""
        plan = self.prepared.plan
        return {
            "split": [spec.num_layers for spec in plan.specs],
            "stages": [
                {
                    "device": stage.device.name,
                    "limit_bytes": stage.device.free_bytes,
                    "weight_bytes": stage.weight_bytes,
                    "kv_bytes": stage.kv_bytes,
                    "predicted_step_seconds": stage.step_seconds,
                }
                for stage in plan.stages
            ],
            "pool_tokens": plan.num_blocks * self.prepared.options.block_size,
            "planned_depth": plan.depth,
            "planned_min_microbatch": plan.min_microbatch,
            "planned_ahead": plan.ahead,
            "start_seconds": self.start_seconds,
            "loads": self.loads,
            "gpu_memory_used_bytes": gpu_memory_used(),
        }

    def set_flight(self, depth: int, min_microbatch: int) -> None:
        """Another number of plans in flight, and their least rows. While nothing runs."""
        scheduler = self.engine._scheduler
        assert not scheduler.has_unfinished()
        scheduler.config = replace(scheduler.config, depth=depth, min_microbatch=min_microbatch)


@asynccontextmanager
async def running(prepared: Prepared, records: Path) -> AsyncIterator[Running]:
    """An engine that is ready; Ray is connected if its stages need it."""
    engine = build_engine(prepared)
    pipeline = engine._pipeline
    if isinstance(pipeline, RayPipeline):
        fleet = pipeline._fleet
        fleet._loader = TimedLoader(fleet._loader, prepared.path, records)
        read = None
    else:
        read = _read(prepared.path, prepared.plan.specs[0])
    began, processor = time.perf_counter(), time.process_time()
    await engine.start()
    try:
        took = time.perf_counter() - began
        if read is not None:
            loads = [_load_times(took, time.process_time() - processor, *read)]
        else:
            files = [records / f"stage-{spec.index}.json" for spec in prepared.plan.specs]
            loads = [json.loads(file.read_text()) for file in files if file.exists()]
        yield Running(engine, prepared, took, loads)
    finally:
        await engine.close()


def reachable_by_workers() -> None:
    """Let Ray's workers import the benchmarks, as this process does. Before Ray is connected."""
    here = str(Path(__file__).parent.parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, paths)])


def between(before: tuple[StageStats, ...], after: tuple[StageStats, ...]) -> list[dict[str, float]]:
    """What each stage did between two snapshots; the time is by its own clock. Empty if one of them was not whole."""
    first = {stats.spec.index: stats for stats in before}
    if set(first) != {stats.spec.index for stats in after}:
        return []
    return [_moved(first[stats.spec.index], stats) for stats in after]


def _moved(a: StageStats, b: StageStats) -> dict[str, float]:
    steps, seconds = b.steps - a.steps, b.wall_seconds - a.wall_seconds
    return {
        "busy_share": (b.busy_seconds - a.busy_seconds) / seconds if seconds else 0.0,
        "busy_seconds": b.busy_seconds - a.busy_seconds,
        "steps": steps,
        "rows_a_step": (b.rows - a.rows) / steps if steps else 0.0,
        "send_seconds_a_step": (b.send_seconds - a.send_seconds) / steps if steps else 0.0,
        "receive_seconds_a_step": (b.receive_seconds - a.receive_seconds) / steps if steps else 0.0,
    }


def stage_facts(stages: tuple[StageStats, ...]) -> list[dict[str, Any]]:
    """Where the stages are and what they hold."""
    return [
        {
            "index": stats.spec.index,
            "layers": [stats.spec.first_layer, stats.spec.end_layer],
            "where": stats.where,
            "resident_bytes": stats.resident_bytes,
        }
        for stats in stages
    ]
