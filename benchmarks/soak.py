"""Hours of trouble in minutes: mixed load, random cancels, and `kill -9` of a stage every so often."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.drive import Parity, quiet
from benchmarks.record import gpu_memory_used, quantiles
from benchmarks.traffic import Job, Served, serve

from shardline.cluster.engine import Engine

SAMPLE_SECONDS = 5.0
GROWTH = 1.05
"""Of memory from the first third of a soak to the last, above which it is not called flat."""

SLACK_BYTES = 64 << 20


@dataclass(slots=True)
class Log:
    """What happened.

    Attributes:
        served: Every request.
        kills: Moment, stage, and how long no token came then, for each process that was killed.
        memory: Moments, and bytes: of this process, of the stages' processes, of what these say that they hold on
            their devices, and in use on each GPU.
    """

    served: list[Served] = field(default_factory=list)
    kills: list[dict[str, float]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)


async def soak(
    engine: Engine, jobs: Sequence[Job], clients: int, seconds: float, kill_every: float, seed: int, parity: Parity
) -> dict[str, Any]:
    """Run it. Every finished request is compared as a whole, a cancelled one as far as it came."""
    log, draw = Log(), random.Random(seed)
    over = asyncio.Event()
    began = time.perf_counter()

    async def client() -> None:
        while not over.is_set():
            log.served.append(await serve(engine, draw.choice(jobs)))

    async def killer() -> None:
        while not await _within(over, kill_every):
            stages = (await engine.status()).stages
            victims = [stats for stats in stages if stats.pid != os.getpid()]
            if not victims:
                continue
            victim = draw.choice(victims)
            losses = (await engine.status()).losses
            killed = time.perf_counter()
            os.kill(victim.pid, signal.SIGKILL)
            tokens = await _first_token_after(engine, losses, over)
            log.kills.append(
                {"at": killed - began, "stage": victim.spec.index, "seconds_to_next_token": tokens - killed}
            )

    async def sampler() -> None:
        while not await _within(over, min(SAMPLE_SECONDS, seconds / 20)):
            stages = (await engine.status()).stages
            pids = [stats.pid for stats in stages if stats.pid != os.getpid()]
            whole = len(stages) == len(engine._pipeline.specs)
            log.memory.append(
                {
                    "at": time.perf_counter() - began,
                    "engine_bytes": resident(os.getpid()),
                    "stages_bytes": sum(map(resident, pids)) if whole and pids else None,
                    "arrays_bytes": sum(stats.resident_bytes for stats in stages) if whole else None,
                    "gpus_bytes": await asyncio.to_thread(gpu_memory_used),
                }
            )

    workers = [asyncio.create_task(work) for work in (killer(), sampler(), *(client() for _ in range(clients)))]
    await asyncio.sleep(seconds)
    over.set()
    await asyncio.gather(*workers)
    await quiet(engine)
    return await _report(engine, log, time.perf_counter() - began, parity)


async def _first_token_after(engine: Engine, losses: int, over: asyncio.Event) -> float:
    """The moment of the first token after the next loss was made good."""
    while True:
        status = await engine.status()
        if status.state in ("dead", "closed"):
            return float("nan")
        if status.losses > losses and status.state == "ready":
            break
        await asyncio.sleep(0.01)
    generated = status.generated_tokens
    while (await engine.status()).generated_tokens == generated and not over.is_set():
        await asyncio.sleep(0.005)
    return time.perf_counter()


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether it is set before that time is over."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _report(engine: Engine, log: Log, took: float, parity: Parity) -> dict[str, Any]:
    whole = [one for one in log.served if one.ended == "length"]
    cancelled = [one for one in log.served if one.ended == "abort"]
    failed = [one.ended for one in log.served if one.ended not in ("length", "abort")]
    for one in whole:
        parity.check(one.job.key, one.tokens, "soak", ended=True)
    for one in cancelled:
        parity.check(one.job.key, one.tokens, "soak, cancelled")
    status = await engine.status()
    try:
        engine._scheduler.check_integrity()
        integrity = ""
    except AssertionError as error:
        integrity = str(error) or "an assertion without words"
    memory = {key: flat([one[key] for one in log.memory]) for key in ("engine_bytes", "stages_bytes", "arrays_bytes")}
    gpus = [sum(one["gpus_bytes"]) for one in log.memory if one["gpus_bytes"]]
    return {
        "seconds": took,
        "requests": {"whole": len(whole), "cancelled": len(cancelled), "failed": len(failed), "words": failed[:5]},
        "tokens_per_second": sum(len(one.tokens) for one in log.served) / took,
        "kills": log.kills,
        "losses": status.losses,
        "recovery_seconds": quantiles([kill["seconds_to_next_token"] for kill in log.kills]),
        "state": status.state,
        "blocks_used_at_the_end": status.scheduler.blocks_used,
        "integrity": integrity,
        "memory": memory | {"gpus_bytes": flat(gpus)},
        "peak_engine_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "samples": log.memory,
        "clean": not failed and not integrity and status.state == "ready" and status.scheduler.blocks_used == 0,
    }


def flat(values: Sequence[int | None]) -> dict[str, Any]:
    """The median of the second third and of the last one, and whether it did not grow from one to the other.

    Not of the first third: caches fill there, and code is compiled. None where it was not measured.
    """
    known = [value for value in values if value is not None]
    third = len(known) // 3
    if third == 0:
        return {"middle": None, "last": None, "flat": None}
    middle, last = sorted(known[third : 2 * third])[third // 2], sorted(known[-third:])[third // 2]
    return {"middle": middle, "last": last, "flat": last <= max(GROWTH * middle, middle + SLACK_BYTES)}


def resident(pid: int) -> int:
    """Bytes that a process has in memory; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
