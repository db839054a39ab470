"""Decode and prefill of a whole model with random weights on one GPU, in one stage, through `Stage.run`.

    python -m benchmarks.gpu_model

Each sequence has a prompt of 128 tokens and decodes 64; the time of a step is from the plan to the tokens on the host.
`graphs` are the device's times of the recorded layers and head: the rest of a step is copies, sampling and Python.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu import RESULTS, BenchBackend, spread, surroundings, write

from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SequenceRun, SequenceStart, StepPlan
from shardline.stage import LayerSpec, ModelSpec, RopeSpec, Stage, StageSpec

QWEN3_8B = ModelSpec(
    architecture="qwen3",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    context_length=4096,
    norm_eps=1e-6,
    layers=(LayerSpec(),) * 36,
    ropes=(RopeSpec(1e6, 128, False),),
    qk_norm="head",
    tied_embeddings=False,
)
PROMPT, DECODED, CONTEXT, BLOCK = 128, 64, 256, 16
BATCHES = (1, 4, 16, 64, 128, 256)
PREFILLS = (512, 2048)
TARGETS = {1: 500, 4: 1900, 16: 6000, 64: 15000, 128: 20000, 256: 25000, "prefill": 20000}


class Shapes:
    """A checkpoint of shapes alone."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def matrix(self, role: str, layer: int | None) -> tuple[int, int]:
        """(N, K)."""
        spec = self.spec
        hidden, wide = spec.hidden_size, spec.intermediate_size
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return {
            "embed": (spec.vocab_size, hidden),
            "head": (spec.vocab_size, hidden),
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
            "gate": (wide, hidden),
            "up": (wide, hidden),
            "down": (hidden, wide),
        }[role]

    def vector(self, role: str, layer: int | None) -> Any:
        """Ones."""
        return np.ones(self.spec.head_dim if role in ("q_norm", "k_norm") else self.spec.hidden_size, np.float32)


class ModelBackend(BenchBackend):
    """Makes each weight of a model from its shape."""

    group_size, minimums = 128, False

    def load_matrix(self, parts: Any) -> Any:
        return self.random(sum(n for n, _ in parts), parts[0][1], self.group_size, minimums=self.minimums)

    def load_gated(self, gate: Any, up: Any) -> Any:
        return self.random(*gate, self.group_size, minimums=self.minimums, gated=True)


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
    return {"batch": batch, "step_seconds": spread(times), "tokens_per_second": rate, "graphs": graphs}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group-size", type=int, default=128, help="128 without minimums, smaller with")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--commit")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu_model.json")
    given = parser.parse_args()
    out = sys.stdout.write
    run = Run(QWEN3_8B, given.group_size)
    out(f"Qwen3-8B's geometry, group {given.group_size}: {run.backend.resident_bytes() / 1e9:.2f} GB resident\n")
    rows = []
    for batch in given.batches:
        row = decode(run, batch)
        rows.append(row)
        graphs = row["graphs"]
        out(
            f"decode {batch:4d}: {row['tokens_per_second']:7.0f} tok/s (target {TARGETS.get(batch, 0)}), step "
            f"{row['step_seconds']['median'] * 1e3:.2f} ms ({row['step_seconds']['least'] * 1e3:.2f} to "
            f"{row['step_seconds']['most'] * 1e3:.2f}), layers {graphs['layers'] * 1e3:.2f}, head "
            f"{graphs['head'] * 1e3:.2f}\n"
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
        out(f"prefill {rows_a_step:4d} rows a step: {rate:7.0f} tok/s (target {TARGETS['prefill']})\n")
    report = surroundings(given.commit) | {
        "geometry": "Qwen3-8B",
        "group_size": given.group_size,
        "targets": {str(key): value for key, value in TARGETS.items()},
        "decode": rows,
        "prefill": prefills,
    }
    write(given.results, report)


if __name__ == "__main__":
    main()
