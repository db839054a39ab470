"""The parts of a benchmark that need an engine: each measures one thing on the layout that is loaded."""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.drive import Window, alone, decode, greedy, read_prompts
from benchmarks.layouts import Running, running, stage_facts
from benchmarks.record import milliseconds, numbers, say, trials, write
from benchmarks.session import BLOCK, Session, predictions, prepared_for, ray_for
from benchmarks.soak import soak
from benchmarks.traffic import closed_loop, open_loop

from shardline.cluster.build import Prepared


def measure(session: Session) -> Session:
    """Load a layout and measure all parts that need an engine. Runs in a process of its own."""
    given, layout = session.given, session.layout
    say(f"{layout.name}:")
    try:
        prepared = prepared_for(layout, session.model, given)
        with ray_for(prepared), tempfile.TemporaryDirectory() as records:
            asyncio.run(_measure(session, prepared, Path(records)))
    except Exception:
        session.result["error"] = traceback.format_exc()
        say(session.result["error"])
    session.result["parity"] = session.parity.data()
    for words in session.parity.different[:5]:
        say(f"  NOT EQUAL: {words}")
    return session


async def _measure(session: Session, prepared: Prepared, records: Path) -> None:
    given, result = session.given, session.result
    async with running(prepared, records) as run:
        result |= run.describe()
        result["predicted_tokens_per_second"] = predictions(prepared, given)
        result["stage_facts"] = stage_facts((await run.engine.status()).stages)
        _say_load(result)
        await _references(session, run)
        steps: list[tuple[str, Callable[[Session, Running], Any]]] = [
            ("decode", _decode),
            ("prefill", _prefill),
            ("overhead", _overhead),
            ("traffic", _traffic),
            ("soak", _soak),
        ]
        for name, part in steps:
            if name in given.parts and not session.late(name):
                async with _restored(run), asyncio.timeout(given.part_seconds):
                    await part(session, run)
                write(session.partial, session.result | {"parity": session.parity.data()})
        result["gpu_memory_used_at_the_end_bytes"] = run.describe()["gpu_memory_used_bytes"]


@asynccontextmanager
async def _restored(run: Running) -> AsyncIterator[None]:
    plan = run.prepared.plan
    yield
    run.set_flight(plan.depth, plan.min_microbatch)


async def _references(session: Session, run: Running) -> None:
    """What sequences give alone: made by the first layout, taken over by the others."""
    given, parity = session.given, session.parity
    parity.alone, parity.seen = dict(session.alone), dict(session.seen)
    if session.alone:
        return
    began = time.perf_counter()
    if {"decode", "prefill", "overhead"} & set(given.parts):
        for index in session.sample:
            params = greedy(index, given.warm + given.steps, logprobs=True)
            parity.alone[f"sequence {index}"] = await alone(run.engine, session.prompt(index), params)
    if {"traffic", "soak"} & set(given.parts):
        # All of them, for a soak has whole outputs to compare.
        for job in session.jobs():
            parity.alone[job.key] = await alone(run.engine, job.ids, job.params)
    distinct = len({token for tokens in parity.alone.values() for token, _ in tokens})
    total = sum(map(len, parity.alone.values()))
    session.alone = dict(parity.alone)
    took = time.perf_counter() - began
    session.result["alone"] = {
        "sequences": len(parity.alone),
        "tokens": total,
        "distinct_tokens": distinct,
        "seconds": took,
    }
    say(f"  alone: {len(parity.alone)} sequences, {total} tokens ({distinct} distinct), {took:.1f} s")


def _fits(session: Session, run: Running, batch: int) -> bool:
    """Whether so many sequences of a window hold their blocks at once. Some are ahead of the last by as many tokens as
    there are steps with prompts."""
    given = session.given
    ahead = run.prepared.plan.depth + 2 + batch * given.prompt // given.step_tokens
    needed = batch * math.ceil((given.prompt + given.warm + given.steps + ahead) / BLOCK)
    if needed <= run.prepared.plan.num_blocks:
        return True
    skipped = session.result.setdefault("does_not_fit", {})
    if str(batch) not in skipped:
        skipped[str(batch)] = f"{needed} blocks of {BLOCK}; the pool has {run.prepared.plan.num_blocks}"
        say(f"  {batch} sequences do not fit: {skipped[str(batch)]}")
    return False


def flights(session: Session, run: Running) -> dict[str, tuple[int, int]]:
    """Name -> plans in flight and their least rows."""
    plan = run.prepared.plan
    made = {"planned": (plan.depth, plan.min_microbatch)}
    cards = (len(plan.specs) + 1, 1)
    if len(plan.specs) > 1 and cards != made["planned"]:
        made["cards"] = cards
    return {name: flight for name, flight in made.items() if name in session.given.flights}


async def _window(
    session: Session, run: Running, batch: int, steps: int, where: str, *, logprobs: bool = False
) -> Window:
    prompts = [session.prompt(index) for index in range(batch)]
    window = await decode(run.engine, prompts, session.given.warm, steps, logprobs=logprobs)
    for index, out in enumerate(window.outputs):
        session.parity.check(f"sequence {index}", out[: session.given.warm + session.given.steps], where)
    return window


async def _decode(session: Session, run: Running) -> None:
    given, rows = session.given, {}
    order = [(name, batch) for name in flights(session, run) for batch in given.batches if _fits(session, run, batch)]
    for name, batch in order:
        # Once before it counts, with logprobs, which are compared too: graphs are recorded, kernels compiled.
        if session.late("decode"):
            return
        run.set_flight(*flights(session, run)[name])
        where = f"{session.layout.name}, {name} {batch}"
        await _window(session, run, batch, min(16, given.steps), where, logprobs=True)
    for trial in range(given.trials):
        for name, batch in order:
            if session.late(f"decode, {name} {batch}: trials from {trial}"):
                continue
            run.set_flight(*flights(session, run)[name])
            window = await _window(session, run, batch, given.steps, f"{session.layout.name}, {name} {batch}")
            rows.setdefault((name, batch), []).append(window)
            session.result["decode"] = [
                _decode_row(*key, flights(session, run)[key[0]], windows) for key, windows in rows.items()
            ]
    for row in session.result.get("decode", []):
        busy = ", ".join(f"{share['median']:.0%}" for share in row["busy_shares"])
        say(
            f"  decode {row['flight']:8s}{row['batch']:4d}: {numbers(row['tokens_per_second'])} tok/s, busy {busy}, "
            f"{row['rows_a_step']:.1f} rows a step, engine {row['engine_core_share']['median']:.0%} of a core"
            + f"; {row['preemptions']} PREEMPTIONS"
            * bool(row["preemptions"])
        )


def _decode_row(name: str, batch: int, flight: tuple[int, int], windows: Sequence[Window]) -> dict[str, Any]:
    stages = [window.stages for window in windows if window.stages]
    by_stage = list(zip(*stages, strict=True))
    return {
        "flight": name,
        "depth": flight[0],
        "min_microbatch": flight[1],
        "batch": batch,
        "tokens_per_second": trials([window.rate for window in windows]),
        "busy_shares": [trials([one["busy_share"] for one in each]) for each in by_stage],
        "busy_seconds_a_step": [
            trials([one["busy_seconds"] / max(1, one["steps"]) for one in each]) for each in by_stage
        ],
        "rows_a_step": statistics.median(one["rows_a_step"] for one in by_stage[0]) if by_stage else 0.0,
        "send_seconds_a_step": [statistics.median(one["send_seconds_a_step"] for one in each) for each in by_stage],
        "receive_seconds_a_step": [
            statistics.median(one["receive_seconds_a_step"] for one in each) for each in by_stage
        ],
        "preemptions": windows[-1].preemptions,
        "engine_core_share": trials([window.processor_share for window in windows]),
    }


async def _prefill(session: Session, run: Running) -> None:
    given = session.given
    count = max(batch for batch in given.batches if batch <= 64 or batch == min(given.batches))
    rates = []
    for trial in range(given.trials + 1):
        if session.late(f"prefill: trials from {trial}"):
            break
        rate, outputs = await read_prompts(run.engine, [session.prompt(index) for index in range(count)])
        for index, out in enumerate(outputs):
            session.parity.check(f"sequence {index}", out, f"{session.layout.name}, prefill")
        rates.append(rate)
    if len(rates) > 1:
        session.result["prefill"] = {
            "prompts": count,
            "prompt_tokens": given.prompt,
            "tokens_per_second": trials(rates[1:]),
        }
        say(f"  prefill {count} x {given.prompt}: {numbers(session.result['prefill']['tokens_per_second'])} tok/s")


async def _overhead(session: Session, run: Running) -> None:
    """With one plan in flight a step is the stages' work, one after the other, and the rest is ours and Ray's."""
    given, rows = session.given, []
    run.set_flight(1, 1)
    for batch in [batch for batch in given.batches if _fits(session, run, batch)]:
        shares, hops = [], []
        for trial in range(given.trials + 1):
            if session.late(f"overhead, {batch}: trials from {trial}"):
                break
            window = await _window(session, run, batch, min(32, given.steps), f"{session.layout.name}, alone {batch}")
            if trial == 0 or not window.stages:
                continue
            busy = sum(stage["busy_share"] for stage in window.stages)
            shares.append(1 - busy)
            steps = window.tokens / batch
            hops.append((1 - busy) * window.seconds / steps / (len(window.stages) + 1))
        if shares:
            rows.append({"batch": batch, "share_of_a_step": trials(shares), "seconds_a_hop": trials(hops)})
            say(
                f"  overhead {batch:4d}: {statistics.median(shares):.1%} of a step, "
                f"{statistics.median(hops) * 1e3:.2f} ms for each of {len(run.prepared.plan.specs) + 1} hops"
            )
        session.result["overhead"] = rows


async def _traffic(session: Session, run: Running) -> None:
    given, jobs = session.given, session.jobs()
    capacity = await closed_loop(run.engine, jobs, max(given.batches), given.seconds)
    session.result["traffic"] = {
        "capacity": capacity,
        "median_prompt": given.median_prompt,
        "median_output": given.median_output,
        "most_prompt": given.most_prompt,
        "most_output": given.most_output,
        "rates": (rates := []),
    }
    say(
        f"  traffic, closed loop of {capacity['clients']}: {capacity['tokens_per_second']:.0f} tok/s, "
        f"{capacity['requests_per_second']:.1f} requests/s"
    )
    for share in given.shares:
        if session.late(f"traffic at {share:.0%}"):
            return
        row = await open_loop(
            run.engine,
            jobs,
            share * capacity["requests_per_second"],
            given.seconds,
            (given.first_token_limit, given.token_limit),
            session.parity,
        )
        rates.append({"share_of_capacity": share} | row)
        first, token = row["first_token_seconds"], row["token_seconds"]
        say(
            f"  traffic at {share:.0%}: {row['requests']} requests, first token "
            f"{' / '.join(map(milliseconds, first.values()))} ms, a token "
            f"{' / '.join(map(milliseconds, token.values()))} ms (p50 / p95 / p99), "
            f"goodput {row['goodput_requests_per_second']:.1f} requests/s"
        )


async def _soak(session: Session, run: Running) -> None:
    if not session.layout.ray:
        # Its only process is the benchmark's own.
        return
    given, jobs = session.given, session.jobs(cancels=0.15)
    seconds = min(given.soak, session.deadline - time.monotonic())
    report = await soak(run.engine, jobs, given.clients, seconds, given.kill_every, given.seed, session.parity)
    session.result["soak"] = report
    say(
        f"  soak of {report['seconds']:.0f} s: {report['requests']['whole']} whole, {report['requests']['cancelled']} "
        f"cancelled, {report['requests']['failed']} failed; {len(report['kills'])} kills, next token after "
        f"{report['recovery_seconds']['p50'] or math.nan:.1f} s; blocks left {report['blocks_used_at_the_end']}, "
        + ", ".join(f"{name} flat: {memory['flat']}" for name, memory in report["memory"].items())
    )


def _say_load(result: dict[str, Any]) -> None:
    say(
        f"  split {','.join(map(str, result['split']))}, pool of {result['pool_tokens']} tokens, ready in "
        f"{result['start_seconds']:.1f} s, GPU memory in use "
        f"{', '.join(f'{used / 2**30:.1f} GiB' for used in result['gpu_memory_used_bytes']) or 'not known'}"
    )
    for index, load in enumerate(result["loads"]):
        say(
            f"  stage {index} loaded in {load['seconds']:.1f} s: {load['bytes'] / 1e9:.2f} GB, of which reading takes "
            f"{load['read_seconds']:.1f} s; a core was busy for {load['processor_seconds']:.1f} s"
        )
