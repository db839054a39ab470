"""Traffic of mixed lengths: a fixed trace of long-tailed prompts and outputs, closed loop and Poisson arrivals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.drive import Answer, Parity, Tokens, answered, prompt, quiet
from benchmarks.record import quantiles

from shardline.cluster.engine import Engine
from shardline.cluster.request import Request
from shardline.scheduler import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """A request of the trace.

    Attributes:
        key: For parity.
        ids: The prompt.
        params: Greedy, or drawn with a seed of its own.
        gap: Exponential of mean 1: times a mean gap, the time since the job before it.
        cancel_after: For a soak: end it after that many tokens; None: let it end.
    """

    key: str
    ids: Tokens
    params: SamplingParams
    gap: float
    cancel_after: int | None = None


@dataclass(slots=True)
class Served:
    """What became of a job.

    Attributes:
        job: The job.
        arrived, first, last: Moments: of its arrival, of its first and its last token.
        tokens: Its tokens and their logprobs.
        ended: "length", "stop", "abort", or the name of an error.
    """

    job: Job
    arrived: float
    first: float = 0.0
    last: float = 0.0
    tokens: Answer = ()
    ended: str = ""

    @property
    def wait(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrived

    @property
    def pace(self) -> float:
        """Seconds a token after the first."""
        return (self.last - self.first) / max(1, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths: medians, the spread of their logarithm, and the most of each."""

    prompt: int = 128
    output: int = 64
    sigma: float = 0.9
    most_prompt: int = 640
    most_output: int = 320


def trace(count: int, vocab: int, seed: int, lengths: Lengths, *, cancels: float = 0.0) -> list[Job]:
    """The same jobs for the same seed; every other one draws its tokens. `cancels`: the share that is cancelled."""
    draw = np.random.default_rng([seed, 77])
    prompts = np.exp(draw.normal(np.log(lengths.prompt), lengths.sigma, count)).astype(int)
    outputs = np.exp(draw.normal(np.log(lengths.output), lengths.sigma, count)).astype(int)
    gaps, cancelled, after = draw.exponential(1.0, count), draw.random(count) < cancels, draw.random(count)
    jobs = []
    for index in range(count):
        size = int(np.clip(prompts[index], 4, lengths.most_prompt))
        most = int(np.clip(outputs[index], 4, lengths.most_output))
        drawn = {"temperature": 0.8, "top_p": 0.95} if index % 2 else {}
        params = SamplingParams(max_tokens=most, ignore_eos=True, seed=index, logprobs=0, **drawn)
        stop = int(after[index] * most) if cancelled[index] else None
        ids = prompt(vocab, size, index, seed + 1)
        jobs.append(Job(f"job {index}", ids, params, float(gaps[index]), stop))
    return jobs


async def serve(engine: Engine, job: Job) -> Served:
    """Run a job; an error ends it and is kept."""
    served = Served(job, time.perf_counter())
    out: list[tuple[int, float | None]] = []
    request = Request(token_ids=job.ids, params=job.params)
    try:
        stream = engine.generate(request)
        try:
            async for delta in stream:
                now = time.perf_counter()
                if delta.token_ids:
                    served.first = served.first or now
                    served.last = now
                    out.extend(answered(delta))
                served.ended = delta.finish_reason or served.ended
                if job.cancel_after is not None and len(out) >= job.cancel_after and not served.ended:
                    served.ended = "abort"
                    break
        finally:
            await stream.aclose()
    except Exception as error:
        served.ended = f"{type(error).__name__}: {error}"
    served.tokens = tuple(out)
    return served


async def closed_loop(engine: Engine, jobs: Sequence[Job], clients: int, seconds: float) -> dict[str, float]:
    """Requests and tokens a second when `clients` always have one running: what Poisson arrivals are a share of."""
    served: list[Served] = []
    began = time.perf_counter()
    until, position = began + seconds, 0

    async def client() -> None:
        nonlocal position
        while time.perf_counter() < until:
            job = jobs[position % len(jobs)]
            position += 1
            served.append(await serve(engine, job))

    # Without the beginning, when prompts alone run, and the end, when clients stop.
    marks: list[tuple[float, int]] = []

    async def watch() -> None:
        for share in (0.25, 1.0):
            await asyncio.sleep(began + share * seconds - time.perf_counter())
            marks.append((time.perf_counter(), (await engine.status()).generated_tokens))

    await asyncio.gather(watch(), *(client() for _ in range(clients)))
    await quiet(engine)
    (a, first), (b, last) = marks
    mean_output = float(np.mean([len(one.tokens) for one in served]))
    return {
        "clients": clients,
        "requests": len(served),
        "tokens_per_second": (last - first) / (b - a),
        "requests_per_second": (last - first) / (b - a) / mean_output,
        "mean_output_tokens": mean_output,
    }


async def open_loop(
    engine: Engine, jobs: Sequence[Job], rate: float, seconds: float, limits: tuple[float, float], parity: Parity
) -> dict[str, Any]:
    """Poisson arrivals at `rate` requests a second for a time; all that arrived are waited for.

    limits: Seconds to the first token, and a token after it, within which a request counts for the goodput.
    """
    tasks: list[asyncio.Task[Served]] = []
    began = time.perf_counter()
    due, position, late = 0.0, 0, 0.0
    while True:
        job = jobs[position % len(jobs)]
        due += job.gap / rate
        if due > seconds:
            break
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        late = max(late, time.perf_counter() - began - due)
        tasks.append(asyncio.create_task(serve(engine, job)))
        position += 1
    served = await asyncio.gather(*tasks)
    took = time.perf_counter() - began
    await quiet(engine)
    whole = [one for one in served if one.ended == "length"]
    for one in whole:
        parity.check(one.job.key, one.tokens, f"arrivals at {rate:.2f} a second", ended=True)
    good = [one for one in whole if one.wait <= limits[0] and one.pace <= limits[1]]
    return {
        "requests_per_second_offered": rate,
        "requests": len(served),
        "failed": [one.ended for one in served if one.ended != "length"][:5],
        "seconds": took,
        "latest_arrival_late_seconds": late,
        "output_tokens_per_second": sum(len(one.tokens) for one in whole) / took,
        "first_token_seconds": quantiles([one.wait for one in whole]),
        "token_seconds": quantiles([one.pace for one in whole if len(one.tokens) > 1]),
        "limits_seconds": {"first_token": limits[0], "token": limits[1]},
        "good_share": len(good) / len(served) if served else None,
        "goodput_requests_per_second": len(good) / took,
    }
