"""shardline on the CPU against llama.cpp: the same file, threads and prompts, trials of both in turn.

    python -m benchmarks.cpu            (or: make bench-cpu)

Ours is the whole engine (scheduler, sampling, text); llama.cpp's is `llama_decode` alone. Then three stages over Ray
against one stage in this process, and a warm start from the command line to the first token. Prints medians and
spreads, and writes all trials as JSON. llama-cpp-python is taken from this Python or from `--peer-python`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from shardline import __version__
from shardline.cluster.build import EngineOptions, Prepared, build_engine, cores, prepare
from shardline.cluster.cli.output import say, table
from shardline.cluster.engine import Engine
from shardline.cluster.ray_runtime import connected
from shardline.cluster.request import Request
from shardline.scheduler import SamplingParams

RESULTS = Path(__file__).parent / "results" / "cpu.json"
PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 512
WARM_TOKENS = 8
CONTEXT = 768
STEP_TOKENS = 512
STAGES = 3
PARTS = ("llama.cpp", "ray", "start")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: trials of ours and of what it is compared with, in turn.

    Attributes:
        name: What was measured.
        unit: Of the trials.
        ours, other: Trials; `other` is empty where nothing is compared.
        against: What `other` is.
        target: The least (or, for seconds and shares, the most) of `value` that is wanted.
        value: The median of the trials' ratios, or of ours where nothing is compared.
        met: Whether the target is.
    """

    name: str
    unit: str
    ours: tuple[float, ...]
    other: tuple[float, ...]
    against: str
    target: float
    value: float
    met: bool


def compared(name: str, unit: str, ours: Sequence[float], other: Sequence[float], against: str, target: float) -> Row:
    """A row whose value is a ratio: the median over pairs of trials that ran one after the other."""
    value = statistics.median(a / b for a, b in zip(ours, other, strict=True))
    return Row(name, unit, tuple(ours), tuple(other), against, target, value, value >= target)


def bounded(name: str, unit: str, ours: Sequence[float], target: float) -> Row:
    """A row whose value must stay below the target."""
    value = statistics.median(ours)
    return Row(name, unit, tuple(ours), (), "", target, value, value < target)


class Peer:
    """llama.cpp in its own process."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        worker = Path(__file__).with_name("llama_cpp_worker.py")
        self._process = subprocess.Popen([python, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self.ask("open", path=str(model), threads=threads, length=CONTEXT, batch=STEP_TOKENS)

    def ask(self, do: str, **arguments: Any) -> Any:
        """One command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(self._last_words())
        return json.loads(answer)

    def _last_words(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGILL:
            return (
                "llama.cpp used an instruction that this machine traps, as its AMX kernels do in some virtual machines."
                " Build it without: CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON' (and so on, what the processor has)"
                " pip install --force-reinstall --no-deps llama-cpp-python"
            )
        return f"llama.cpp's process ended ({code}): is llama-cpp-python installed for --peer-python?"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def prompts(vocab: int, count: int, length: int, trial: int) -> list[list[int]]:
    """Token ids that no other trial has, so that no cache helps."""
    return [[(7919 * (i + 1) + 104729 * trial + 31 * j * (i + 3)) % vocab for j in range(length)] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Decoding:
    """One decode trial: tokens a second, and the share of a step that no stage was busy."""

    rate: float
    idle_share: float


async def decode(engine: Engine, ids: Sequence[Sequence[int]], steps: int) -> Decoding:
    """All prompts at once; counted while all of them decode."""
    total = WARM_TOKENS + steps
    marks: dict[int, float] = {}
    counts = [0] * len(ids)
    busy: dict[int, float] = {}

    async def one(index: int) -> None:
        params = SamplingParams(max_tokens=total + WARM_TOKENS, ignore_eos=True, seed=0)
        async for delta in engine.generate(Request(token_ids=tuple(ids[index]), params=params)):
            counts[index] += len(delta.token_ids)
            least = min(counts)
            if least in (WARM_TOKENS, total) and least not in marks:
                marks[least] = time.perf_counter()
                busy[least] = sum(stage.busy_seconds for stage in (await engine.status()).stages)

    await asyncio.gather(*(one(index) for index in range(len(ids))))
    seconds = marks[total] - marks[WARM_TOKENS]
    return Decoding(len(ids) * steps / seconds, 1 - (busy[total] - busy[WARM_TOKENS]) / seconds)


async def read_prompt(engine: Engine, ids: Sequence[int]) -> float:
    """Prompt tokens a second up to the first token."""
    began = time.perf_counter()
    params = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
    async for _ in engine.generate(Request(token_ids=tuple(ids), params=params)):
        pass
    return len(ids) / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def running(prepared: Prepared) -> AsyncIterator[Engine]:
    """An engine that is ready."""
    engine = build_engine(prepared)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def against_llama_cpp(given: argparse.Namespace, one: Prepared, peer: Peer, vocab: int) -> list[Row]:
    """Decode and prompt, one stage."""
    rows = []
    async with running(one) as engine:
        for count in given.batches:
            ours, theirs = [], []
            for trial in range(given.trials):
                ids = prompts(vocab, count, PROMPT_TOKENS, trial)
                ours.append((await decode(engine, ids, given.steps)).rate)
                theirs.append(peer.ask("decode", prompts=ids, warm=WARM_TOKENS, steps=given.steps))
            target = 1.8 if count >= 8 else 1.0
            rows.append(compared(f"decode, {count} at once", "tokens/s", ours, theirs, "llama.cpp", target))
        ours, theirs = [], []
        for trial in range(given.trials):
            (ids,) = prompts(vocab, 1, LONG_PROMPT_TOKENS, 1000 + trial)
            ours.append(await read_prompt(engine, ids))
            theirs.append(peer.ask("prompt", tokens=ids))
        rows.append(compared(f"prompt of {LONG_PROMPT_TOKENS}", "tokens/s", ours, theirs, "llama.cpp", 1.3))
    return rows


async def over_ray(given: argparse.Namespace, one: Prepared, three: Prepared, vocab: int) -> list[Row]:
    """Three stages over Ray against one here, and the part of a step that no stage is busy."""
    rows = []
    async with running(one) as local, running(three) as engine:
        for count in (batch for batch in given.batches if batch >= 8):
            ours, theirs = [], []
            for trial in range(given.trials):
                ids = prompts(vocab, count, PROMPT_TOKENS, trial)
                ours.append((await decode(engine, ids, given.steps)).rate)
                theirs.append((await decode(local, ids, given.steps)).rate)
            name = f"{STAGES} stages over Ray, {count} at once"
            rows.append(compared(name, "tokens/s", ours, theirs, "one stage", 0.85))
    # One microbatch at a time, so that no stage's work hides another's wait.
    alone = replace(three, plan=replace(three.plan, depth=1))
    async with running(alone) as engine:
        for count in (batch for batch in given.batches if batch >= 8):
            shares = [
                (await decode(engine, prompts(vocab, count, PROMPT_TOKENS, trial), given.steps)).idle_share
                for trial in range(given.trials)
            ]
            rows.append(bounded(f"Ray, transport and scheduler, {count} at once", "of a step", shares, 0.10))
    return rows


def first_token(model: Path, trials: int) -> Iterator[Row]:
    """From the command to the first token, with compiled code on disk."""
    for name, options in (("one stage", ()), (f"{STAGES} stages over Ray", ("--stages", str(STAGES)))):
        seconds = []
        for _ in range(trials):
            command = [sys.executable, "-m", "shardline.cluster.cli", "run", str(model), "--context", str(CONTEXT)]
            began = time.perf_counter()
            with subprocess.Popen(
                [*command, *options, "-p", "Hello", "--max-tokens", "4"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as process:
                assert process.stdout is not None
                if not process.stdout.read(1):
                    raise SystemExit(f"{' '.join(command)} gave no answer")
                seconds.append(time.perf_counter() - began)
                process.stdout.read()
        yield bounded(f"warm start to first token, {name}", "s", seconds, 10.0)


def show(rows: Sequence[Row]) -> None:
    """The table."""

    def trials(values: Sequence[float]) -> str:
        if not values:
            return ""
        digits = 0 if statistics.median(values) >= 10 else 3
        middle, low, high = statistics.median(values), min(values), max(values)
        return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"

    made = table(("", "shardline: median (range)", "against", "median (range)", "ratio", "target", ""), left=1)
    for row in rows:
        better = ">=" if row.other else "<"
        made.add_row(
            f"{row.name}, {row.unit}",
            trials(row.ours),
            row.against,
            trials(row.other),
            f"{row.value:.2f}" if row.other else "",
            f"{better} {row.target:g}",
            "met" if row.met else "MISSED",
        )
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(made)


def commit() -> str:
    """Of the checkout, with a plus if it has changes; empty outside of one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", Path(__file__).parent, *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def processor() -> str:
    """Its name, as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> int:
    """Measure, print, write. Returns 1 if a target is missed and `--check` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--peer-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument(
        "--only", nargs="+", choices=("llama.cpp", "ray", "start"), default=["llama.cpp", "ray", "start"]
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 when a target is missed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    if load > 0.5:
        # llama.cpp's threads wait for each other at every op: with other work on the cores it all but stands still.
        sys.stderr.write(f"other work is running here (load {load:.1f}): the figures will not mean much\n")
    most = max(given.batches)
    options = EngineOptions(
        model=given.model,
        context=CONTEXT,
        concurrency=most,
        threads=given.threads,
        max_sequences=most,
        max_step_tokens=STEP_TOKENS,
        prefill_chunk=STEP_TOKENS,
        prefix_cache=False,
    )
    one = prepare(options, progress=say)
    three = prepare(replace(options, stages=STAGES, address="local"))
    vocab = 32000
    rows: list[Row] = []
    about: dict[str, str] = {}
    if "llama.cpp" in given.only:
        with Peer(given.peer_python, one.path, given.threads) as peer:
            about = peer.about
            rows += asyncio.run(against_llama_cpp(given, one, peer, vocab))
    if "ray" in given.only:
        with connected(None, num_cpus=STAGES):
            rows += asyncio.run(over_ray(given, one, three, vocab))
    if "start" in given.only:
        rows += first_token(one.path, given.trials)
    show(rows)
    report = {
        "command": " ".join(["python -m benchmarks.cpu", *sys.argv[1:]]),
        "commit": commit(),
        "model": one.path.name,
        "threads": given.threads,
        "cores": os.cpu_count(),
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": load,
        "versions": {
            "shardline": __version__,
            "python": platform.python_version(),
            "llama-cpp-python": about.get("version"),
            "llama.cpp": about.get("system"),
            **{name: importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy", "ray")},
        },
        "prompt_tokens": PROMPT_TOKENS,
        "steps": given.steps,
        "split": [spec.num_layers for spec in three.plan.specs],
        "rows": [asdict(row) for row in rows],
    }
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"written to {given.results}\n")
    return 1 if given.check and not all(row.met for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
