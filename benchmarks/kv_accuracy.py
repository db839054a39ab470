"""What a pool of fewer bits costs in accuracy: SmolLM2's distributions with float16 and int8 against float32.

    python -m benchmarks.kv_accuracy [MODEL]

The prompts are those of tests/stage/data; each position's whole distribution over the vocabulary is compared, on the
CPU backend, where nothing but the pool differs. Divergences are natural logarithms, KL(float32 || other).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from shardline.cluster.cli.output import table
from shardline.cluster.models import fetch
from shardline.kernels import cpu_backend
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan
from shardline.stage import Stage, StageSpec, open_checkpoint

PROMPTS = Path(__file__).parents[1] / "tests" / "stage" / "data" / "smollm2_logits.npz"
BLOCK_SIZE = 16


def logits_of(model: Path, kv_dtype: str, prompts: list[list[int]]) -> Iterator[NDArray[np.float32]]:
    """[tokens, vocab] of each prompt, alone and in one step."""
    checkpoint = open_checkpoint(model)
    longest = max(map(len, prompts))
    spec = StageSpec(
        index=0,
        first_layer=0,
        end_layer=checkpoint.spec.num_layers,
        has_embed=True,
        has_head=True,
        num_blocks=-(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        kv_dtype=kv_dtype,
        max_step_tokens=longest,
        max_sequences=longest,
        max_context=longest,
        num_threads=2,
    )
    stage = Stage(spec, checkpoint, cpu_backend(spec.num_threads))
    checkpoint.close()
    for tokens in prompts:
        stage.reset()
        start = SequenceStart(0, SamplingParams(seed=0), len(tokens), tuple(tokens), ())
        run = SequenceRun(0, 0, tuple(tokens), tuple(range(-(-len(tokens) // BLOCK_SIZE))), False)
        yield stage.logits(StepPlan(0, (), (start,), (run,)), None)
    stage.close()


def divergences(expected: NDArray[np.float32], got: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL of each position, [tokens]."""
    ours, theirs = (x - np.logaddexp.reduce(x.astype(np.float64), axis=1)[:, None] for x in (expected, got))
    return np.asarray((np.exp(ours) * (ours - theirs)).sum(axis=1))


def main() -> None:
    """Print the table."""
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else fetch("smollm2-135m")
    with np.load(PROMPTS) as file:
        prompts = [file[name].tolist() for name in file.files if name.endswith(".token_ids")]
    expected = list(logits_of(model, "float32", prompts))
    report = table(("KV", "positions", "mean KL", "largest", "same first token"))
    for dtype in ("float16", "int8"):
        found = list(logits_of(model, dtype, prompts))
        kl = np.concatenate([divergences(*pair) for pair in zip(expected, found, strict=True)])
        same = np.concatenate([a.argmax(1) == b.argmax(1) for a, b in zip(expected, found, strict=True)])
        report.add_row(dtype, str(len(kl)), f"{kl.mean():.2e}", f"{kl.max():.2e}", f"{same.mean():.2%}")
    Console().print(report)


if __name__ == "__main__":
    main()
