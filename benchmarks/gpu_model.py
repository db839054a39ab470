"""Decode and prefill of a whole model with random weights on one GPU, in one stage, through `Stage.run`.

    python -m benchmarks.gpu_model [--geometry qwen3-30b-a3b]

Each sequence has a prompt of 128 tokens and decodes 64; the time of a step is from the plan to the tokens on the host.
`graphs` are the device's times of the recorded layers and head: the rest of a step is copies, sampling and Python.
`experts_chosen` is how many different experts the last layer of the last step had rows for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.geometries import QWEN3_8B, QWEN3_30B_A3B
from benchmarks.gpu import RESULTS, BenchBackend, spread, surroundings, write

from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SequenceRun, SequenceStart, StepPlan
from shardline.stage import ModelSpec, Stage, StageSpec
from shardline.stage.roles import matrix_shapes, vector_shapes

PROMPT, DECODED, CONTEXT, BLOCK = 128, 64, 256, 16
BATCHES = (1, 4, 16, 64, 128, 256)
PREFILLS = (512, 2048)
GEOMETRIES: dict[str, tuple[ModelSpec, dict[Any, int], str]] = {
    "qwen3-8b": (
        QWEN3_8B,
        {1: 500, 4: 1900, 16: 6000, 64: 15000, 128: 20000, 256: 25000, "prefill": 20000},
        "gpu_model.json",
    ),
    "qwen3-30b-a3b": (
        QWEN3_30B_A3B,
        {1: 500, 4: 1400, 16: 3200, 64: 9000, 128: 14000, 256: 20000},
        "gpu_model_experts.json",
    ),
}
"""Geometry, what decode and prefill should reach in tokens a second, and the results' file."""


class Shapes:
    """A checkpoint of shapes alone."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> tuple[int, int]:
        """(N, K)."""
        return matrix_shapes(self.spec, layer)[role]

    def vector(self, role: str, layer: int | None) -> Any:
        """Ones; of a router, random numbers that spread rows over its experts."""
        shape = vector_shapes(self.spec, layer)[role]
        if role != "router":
            return np.ones(shape, np.float32)
        spread_out = np.random.default_rng([1, layer or 0]).standard_normal(shape)
        return (spread_out / np.sqrt(shape[1])).astype(np.float32)


class ModelBackend(BenchBackend):
    """Makes each weight of a model from its shape."""

    group_size, minimums = 128, False

    def load_matrix(self, parts: Any) -> Any:
        return self.random(sum(n for n, _ in parts), parts[0][1], self.group_size, minimums=self.minimums)

    def load_gated(self, gate: Any, up: Any) -> Any:
        return self.random(*gate, self.group_size, minimums=self.minimums, gated=True)

    def load_experts(self, experts: Iterable[Any], **options: Any) -> Any:
        shapes = [expert.gate for expert in experts]
        return self.random_experts(len(shapes), *shapes[0], self.group_size, minimums=self.minimums)


class Run:
    """One stage, its sequences and their next tokens."""

    def __init__(self, spec: ModelSpec, group_size: int) -> None:
        self.backend = ModelBackend(0, None)
        self.backend.group_size, self.backend.minimums = group_size, group_size < 128
        share = StageSpec(
            index=0,
            first_layer=0,
            end_layer=spec.num_layers,
            has_embed=True,
            has_head=True,
            num_blocks=max(BATCHES) * CONTEXT // BLOCK,
            block_size=BLOCK,
            kv_dtype="float16",
            max_step_tokens=max(PREFILLS),
            max_sequences=max(BATCHES),
            max_context=CONTEXT,
            num_threads=1,
        )
        self.stage = Stage(share, Shapes(spec), self.backend)
        self.rng, self.spec = np.random.default_rng(0), spec
        self.reset()

    def reset(self) -> None:
        """Forget all sequences."""
        self.stage.reset()
        self.step = 0
        self.next: dict[int, int] = {}

    def run(self, runs: list[SequenceRun], starts: list[SequenceStart]) -> float:
        """Seconds of one step."""
        plan = StepPlan(self.step, (), tuple(starts), tuple(runs))
        self.step += 1
        began = time.perf_counter()
        result = self.stage.run(plan, None).result
        took = time.perf_counter() - began
        assert result is not None
        self.next |= {token.seq_id: token.token_id for token in result.tokens}
        return took

    def prefill(self, ids: range) -> float:
        """Seconds for whole prompts of these sequences."""
        params, a_sequence = SamplingParams(seed=1), CONTEXT // BLOCK
        starts, runs = [], []
        for i in ids:
            tokens = tuple(int(t) for t in self.rng.integers(0, self.spec.vocab_size, PROMPT))
            blocks = tuple(range(i * a_sequence, i * a_sequence + PROMPT // BLOCK))
            starts.append(SequenceStart(i, params, PROMPT, tokens, ()))
            runs.append(SequenceRun(i, 0, tokens, blocks, True))
        return self.run(runs, starts)

    def decode(self, batch: int, position: int) -> float:
        """Seconds for one token of each sequence."""
        a_sequence = CONTEXT // BLOCK
        new = position % BLOCK == 0
        return self.run(
            [
                SequenceRun(i, position, (self.next[i],), (i * a_sequence + position // BLOCK,) if new else (), True)
                for i in range(batch)
            ],
            [],
        )


def decode(run: Run, batch: int) -> dict[str, Any]:
    """One row."""
    import cupy

    run.reset()
    for first in range(0, batch, max(PREFILLS) // PROMPT):
        run.prefill(range(first, min(first + max(PREFILLS) // PROMPT, batch)))
    times = [run.decode(batch, PROMPT + t) for t in range(DECODED)][8:]
    graphs = {}
    stream = run.backend._stream
    for part in ("layers", "head"):
        graph = run.backend._graphs[part, batch]
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        run.backend.synchronize()
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        graphs[part] = cupy.cuda.get_elapsed_time(begin, end) * 1e-3
    rate = batch / statistics.median(times)
    row = {"batch": batch, "step_seconds": spread(times), "tokens_per_second": rate, "graphs": graphs}
    if run.spec.experts is not None:
        # The last layer's of the last step.
        chosen = run.backend.read(run.stage._decoder._expert_ids)[:batch]
        row["experts_chosen"] = len(np.unique(chosen))
    return row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b")
    parser.add_argument("--group-size", type=int, default=128, help="128 without minimums, smaller with")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--commit")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    out = sys.stdout.write
    spec, targets, results = GEOMETRIES[given.geometry]
    run = Run(spec, given.group_size)
    out(f"{given.geometry}, group {given.group_size}: {run.backend.resident_bytes() / 1e9:.2f} GB resident\n")
    rows = []
    for batch in given.batches:
        row = decode(run, batch)
        rows.append(row)
        graphs = row["graphs"]
        out(
            f"decode {batch:4d}: {row['tokens_per_second']:7.0f} tok/s (target {targets.get(batch, 0)}), step "
            f"{row['step_seconds']['median'] * 1e3:.2f} ms ({row['step_seconds']['least'] * 1e3:.2f} to "
            f"{row['step_seconds']['most'] * 1e3:.2f}), layers {graphs['layers'] * 1e3:.2f}, head "
            f"{graphs['head'] * 1e3:.2f}"
            + (f", {row['experts_chosen']} experts in the last layer\n" if "experts_chosen" in row else "\n")
        )
    prefills = []
    for rows_a_step in PREFILLS:
        times = []
        for _ in range(6):
            run.reset()
            times.append(run.prefill(range(rows_a_step // PROMPT)))
        times = times[2:]
        rate = rows_a_step / statistics.median(times)
        prefills.append({"rows": rows_a_step, "seconds": spread(times), "tokens_per_second": rate})
        out(f"prefill {rows_a_step:4d} rows a step: {rate:7.0f} tok/s (target {targets.get('prefill', 0)})\n")
    report = surroundings(given.commit) | {
        "geometry": given.geometry,
        "group_size": given.group_size,
        "targets": {str(key): value for key, value in targets.items()},
        "decode": rows,
        "prefill": prefills,
    }
    write(given.results or RESULTS / results, report)


if __name__ == "__main__":
    main()
