"""Times of every tile and split of products for many tokens, and the costs in `tables.py` that they give.

    python -m benchmarks.tiles            measures on this GPU, then fits
    python -m benchmarks.tiles --fit      fits what was measured before; needs no GPU

A tile, and the number of blocks that share its slices of K, change no bit (kernels/cuda/linear.cu): the choice is a
matter of speed alone, and `tables.TILE_COSTS` is a model of it. Weights are 4-bit, in groups of 128, and rotate past
the L2; products add to what is there, gated ones come with the kernel that scales their rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.record import RESULTS

from shardline.kernels.cuda import tables

SHAPES = (
    (12288, 4096, False),
    (6144, 4096, False),
    (4096, 4096, False),
    (12288, 4096, True),
    (4096, 12288, False),
    (5120, 2048, False),
    (2048, 4096, False),
    (151936, 4096, False),
)
"""N (of the gate and of the up each where the product is gated), K, gated."""
TOKENS = (24, 32, 48, 64, 96, 128, 192, 256, 512, 2048)
ROTATED = 120 << 20
PROCESSORS = 132


def choices(tokens: int, blocks: int) -> list[tuple[int, int]]:
    """Places in WHOLE and SPLIT, and blocks that share a tile, that are worth a try."""
    found = []
    for place, whole in enumerate(tables.WHOLE):
        if (tokens > 8 * whole.tokens and whole.tokens < 64) or (whole.tokens == 64 and tokens <= 32):
            continue
        found += [(place, z) for z in tables.blocks_of_a_tile(whole.tokens, tables.slices(blocks), 90)]
    return found


def tiles_of(place: int, z: int, channels: int, tokens: int) -> tuple[int, int, int]:
    """The grid."""
    whole = tables.WHOLE[place]
    return -(-channels // whole.channels), -(-tokens // whole.tokens), z


def measured() -> list[dict[str, Any]]:
    """A row for each shape, number of tokens and choice."""
    backend = importlib.import_module("benchmarks.gpu").BenchBackend(0, None)
    rng, chosen, rows = np.random.default_rng(0), tables.linear_launch, []
    for channels, inputs, gated in SHAPES:
        both = channels * (1 + gated)
        count = max(2, min(6, -(-ROTATED // (both * inputs // 2))))
        matrices = [backend.random(channels, inputs, 128, minimums=False, gated=gated) for _ in range(count)]
        for tokens in TOKENS if channels < 100_000 else TOKENS[:-1]:
            x = backend.activations(tokens, inputs)
            backend.write(x, rng.standard_normal((tokens, inputs)).astype(np.float32))
            out = backend.activations(tokens, channels) if gated else backend.empty((tokens, channels), "float32")

            def issue(
                x: Any = x, out: Any = out, tokens: int = tokens, gated: bool = gated, used: Any = matrices
            ) -> None:
                for matrix in used:
                    if gated:
                        backend.gated_linear(x, matrix, out, tokens)
                    else:
                        backend.linear(x, matrix, out, tokens, accumulate=True)

            for place, z in choices(tokens, inputs // tables.BLOCK_K):
                variant = (tables.SPLIT if z > 1 else tables.WHOLE)[place]
                launch = tables.LinearLaunch(variant, tiles_of(place, z, both, tokens), z)
                tables.linear_launch = lambda *_, launch=launch, **__: launch
                seconds = statistics.median(backend.seconds(issue, 5)) / count
                rows.append(
                    {
                        "channels": both,
                        "inputs": inputs,
                        "gated": gated,
                        "tokens": tokens,
                        "place": place,
                        "blocks_of_a_tile": z,
                        "microseconds": round(seconds * 1e6, 1),
                    }
                )
            tables.linear_launch = chosen
    return rows


Costs = tuple[tables.TileCost, ...]


def estimate(row: dict[str, Any], costs: Costs) -> float:
    """Microseconds of the choice of one row."""
    place, z = row["place"], row["blocks_of_a_tile"]
    tiles = math.prod(tiles_of(place, z, row["channels"], row["tokens"]))
    blocks = row["inputs"] / tables.BLOCK_K / z
    return costs[place].microseconds(tiles, blocks, PROCESSORS, clusters=z > 1, partials=False)


def regret(rows: list[dict[str, Any]], costs: Costs) -> tuple[float, list[str]]:
    """How much longer the model's choices take than the best, on average; and those that take over 5 % longer."""
    cases: dict[tuple[int, int, int, bool], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["channels"], row["inputs"], row["tokens"], row["gated"]), []).append(row)
    total, bad = 0.0, []
    for (channels, inputs, tokens, gated), choices in cases.items():
        taken = min(choices, key=lambda row: estimate(row, costs))["microseconds"]
        best = min(row["microseconds"] for row in choices)
        total += taken / best - 1
        if taken > 1.05 * best:
            kind = "gated " if gated else ""
            bad.append(f"{channels} x {inputs} {kind}at {tokens} tokens: {taken} us, and {best} us can be had")
    return total / len(cases), bad


def error(rows: list[dict[str, Any]], costs: Costs) -> float:
    """How far estimates are from times, on average: costs that choose well among these may else be far from any."""
    return statistics.mean(abs(math.log(estimate(row, costs) / row["microseconds"])) for row in rows)


def fitted(rows: list[dict[str, Any]], rounds: int) -> Costs:
    """Costs with less regret and error, found by random steps from those in `tables.py`; the same for the same rows."""

    def badness(costs: Costs) -> float:
        return regret(rows, costs)[0] + error(rows, costs) / 10

    rng, best = random.Random(0), tables.TILE_COSTS
    least = badness(best)
    for _ in range(rounds):
        costs = list(best)
        for place in rng.sample(range(len(costs)), rng.choice((1, 1, 2))):
            name = rng.choice(("alone", "shared", "fixed", "split"))
            costs[place] = replace(costs[place], **{name: getattr(costs[place], name) * math.exp(rng.gauss(0, 0.12))})
        found = badness(tuple(costs))
        if found <= least:
            best, least = tuple(costs), found
    return best


def main() -> None:
    """Measure or read, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="read the results instead of measuring")
    parser.add_argument("--rounds", type=int, default=2000, help="of the search")
    parser.add_argument("--commit")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu_tiles.json")
    given = parser.parse_args()
    out: Callable[[str], int] = sys.stdout.write
    if given.fit:
        rows = json.loads(given.results.read_text())["rows"]
    else:
        gpu = importlib.import_module("benchmarks.gpu")
        rows = measured()
        gpu.write(given.results, gpu.surroundings(given.commit) | {"rows": rows})
    share, bad = regret(rows, tables.TILE_COSTS)
    out(f"tables.py: {share:.1%} over the best on average\n" + "".join(f"  {line}\n" for line in bad))
    costs = fitted(rows, given.rounds)
    out(f"fitted: {regret(rows, costs)[0]:.1%}\n")
    for cost in costs:
        out("  " + ", ".join(f"{name} {value:.3g}" for name, value in asdict(cost).items()) + "\n")


if __name__ == "__main__":
    main()
