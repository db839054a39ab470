"""Products and decode attention on one GPU, beside torch's bf16 product and int4 (tinygemm) where torch is there.

    python -m benchmarks.kernels

Weights rotate over more than twice the L2, launches are recorded and replayed, times are the device's. The two limits
that a product is held against are measured in the same run: a device-to-device copy (bytes read and written), and the
rate of mma.sync on registers alone. `of_roof` is the least time that both allow over the time taken.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu import RESULTS, BenchBackend, limits, spread, surroundings, write

from shardline.kernels import KVLayout, RouterRule, Rows

SHAPES = ((4096, 4096), (12288, 4096), (4096, 12288), (8192, 8192), (151936, 4096))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
ROTATED = 160 << 20
"""Bytes of weights that a round goes over: more than twice the L2 of an H200."""

# Anchors: share of the roof, by tokens, for 8192 x 8192 and for weights of 250 MB and more.
TARGETS = {1: (0.65, 0.80), 16: (0.58, 0.70), 64: (0.45, 0.60), 256: (0.65, 0.72)}


def product(backend: BenchBackend, channels: int, inputs: int, tokens: tuple[int, ...], group_size: int) -> list[dict]:
    """One row a number of tokens."""
    minimums = group_size < 128
    count = max(2, -(-ROTATED // (channels * inputs // 2)))
    matrices = [backend.random(channels, inputs, group_size, minimums=minimums) for _ in range(count)]
    rows = []
    for m in tokens:
        x, out = backend.activations(m, inputs), backend.empty((m, channels), "float32")
        backend.write(x, np.random.default_rng(m).standard_normal((m, inputs)).astype(np.float32))
        used = matrices if m <= 256 else matrices[:2]

        def issue(x: Any = x, out: Any = out, m: int = m, used: Any = used) -> None:
            for matrix in used:
                backend.linear(x, matrix, out, m)

        times = [seconds / len(used) for seconds in backend.seconds(issue)]
        rows.append({"tokens": m, "weight_bytes": matrices[0].nbytes, "seconds": spread(times)})
    return rows


def torch_products(channels: int, inputs: int, tokens: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Seconds of torch's products, recorded and rotated alike; nothing where torch is missing."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return {}
    count = max(2, -(-ROTATED // (channels * inputs * 2)))
    dense = [torch.randn(channels, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    packed = []
    with contextlib.suppress(RuntimeError, AttributeError):
        for _ in range(max(2, -(-ROTATED // (channels * inputs // 2)))):
            integers = torch.randint(0, 256, (channels, inputs // 2), device="cuda", dtype=torch.uint8)
            scales = torch.rand(inputs // 128, channels, 2, device="cuda", dtype=torch.bfloat16)
            packed.append((torch._convert_weight_to_int4pack(integers, 8), scales))
    found: dict[int, dict[str, float]] = {}
    for m in tokens:
        x = torch.randn(m, inputs, device="cuda", dtype=torch.bfloat16)
        ways = {"torch_bf16": [lambda w=w, x=x: x @ w.T for w in dense]}
        if packed and m <= 64:
            ways["tinygemm_int4"] = [lambda p=p, x=x: torch._weight_int4pack_mm(x, p[0], 128, p[1]) for p in packed]
        found[m] = {}
        for name, calls in ways.items():
            for call in calls[:2]:
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            graph.replay()
            times = []
            for _ in range(5):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e-3 / len(calls))
            found[m][name] = statistics.median(times)
    return found


def attention(backend: BenchBackend, sequences: int, context: int) -> dict[str, Any]:
    """Decode: 32 query heads on 8 KV heads of 128; each layer's keys and values are read once a round."""
    layers = max(2, -(-(160 << 20) // (sequences * context * 8 * 128 * 4)))
    blocks = sequences * context // 16
    cache = backend.allocate_kv(KVLayout(layers, blocks, 16, 8, 128, "float16"))
    order = np.random.default_rng(0).permutation(blocks).astype(np.int32).reshape(sequences, -1)
    positions = backend.upload(np.full(sequences, context - 1, np.int32))
    rows = Rows(
        sequences, positions, positions, backend.upload(np.arange(sequences, dtype=np.int32)), backend.upload(order)
    )
    qkv = backend.upload(np.random.default_rng(1).standard_normal((sequences, 48 * 128)).astype(np.float32))
    out = backend.activations(sequences, 4096)
    backend.begin_step(rows, cache, 32)

    def issue() -> None:
        for layer in range(layers):
            backend.paged_attention(qkv, rows, cache, layer, 128**-0.5, out)

    times = [seconds / layers for seconds in backend.seconds(issue)]
    read = sequences * context * 8 * 128 * 4
    return {"sequences": sequences, "context": context, "kv_bytes": read, "seconds": spread(times)}


def mixture(backend: BenchBackend, tokens: tuple[int, ...], group_size: int) -> list[dict[str, Any]]:
    """One row a number of tokens: a layer of Qwen3-30B-A3B's experts, 128 of 768 on 2048 channels, 8 a token."""
    count, chosen, width, hidden = 128, 8, 768, 2048
    layers = [backend.random_experts(count, width, hidden, group_size, minimums=group_size < 128) for _ in range(2)]
    rng = np.random.default_rng(2)
    router = backend.upload((rng.standard_normal((count, hidden)) / np.sqrt(hidden)).astype(np.float32))
    rule, rows = RouterRule(chosen), []
    for m in tokens:
        x, out = backend.activations(m, hidden), backend.upload(np.zeros((m, hidden), np.float32))
        backend.write(x, rng.standard_normal((m, hidden)).astype(np.float32))
        ids, shares = backend.empty((m, chosen), "int32"), backend.empty((m, chosen), "float32")
        backend.route(x, router, rule, ids, shares, m)
        used = len(np.unique(backend.read(ids)))

        def route(x: Any = x, ids: Any = ids, shares: Any = shares, m: int = m) -> None:
            for _ in layers:
                backend.route(x, router, rule, ids, shares, m)

        def mlp(x: Any = x, ids: Any = ids, shares: Any = shares, out: Any = out, m: int = m) -> None:
            for layer in layers:
                backend.expert_mlp(x, layer, ids, shares, out, m)

        rows.append(
            {
                "tokens": m,
                "experts_used": used,
                "weight_bytes": layers[0].nbytes * used // count,
                "operations": 6 * m * chosen * width * hidden,
                "route_seconds": spread([seconds / len(layers) for seconds in backend.seconds(route)]),
                "seconds": spread([seconds / len(layers) for seconds in backend.seconds(mlp)]),
            }
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group-size", type=int, default=128, help="128 without minimums, smaller with")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--commit")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu_kernels.json")
    given = parser.parse_args()
    out, backend = sys.stdout.write, BenchBackend(0, None)
    copy, flops = limits(backend)
    out(f"copy {copy / 1e12:.2f} TB/s, mma.sync {flops / 1e12:.0f} TFLOP/s\n")
    tokens, products = tuple(given.tokens), []
    for channels, inputs in SHAPES:
        others = torch_products(channels, inputs, tokens)
        for row in product(backend, channels, inputs, tokens, given.group_size):
            m, seconds = row["tokens"], row["seconds"]["median"]
            operations = 2 * m * channels * inputs
            # Activations in halves once, and the result in float32 once.
            moved = row["weight_bytes"] + m * inputs * 2 + m * channels * 4
            row |= {
                "channels": channels,
                "inputs": inputs,
                "bytes_per_second": moved / seconds,
                "flops": operations / seconds,
                "of_roof": max(moved / copy, operations / flops) / seconds,
                "others": others.get(m, {}),
            }
            if m in TARGETS and (channels, inputs) in ((8192, 8192), (151936, 4096)):
                row["target"] = TARGETS[m][channels > 8192]
            products.append(row)
            beside = ", ".join(f"{name} {value * 1e6:.1f}" for name, value in row["others"].items())
            target = f" (target {row['target']:.0%})" if "target" in row else ""
            out(
                f"{channels:6d} x {inputs:5d}, {m:4d} tokens: {seconds * 1e6:7.1f} us, "
                f"{moved / seconds / 1e12:.2f} TB/s, {operations / seconds / 1e12:4.0f} TFLOP/s, "
                f"{row['of_roof']:.0%} of the roof{target}; {beside}\n"
            )
    attentions = []
    for sequences, context in ((1, 4096), (1, 32768), (8, 4096), (64, 1024), (64, 4096), (256, 512)):
        row = attention(backend, sequences, context)
        row["of_copy"] = row["kv_bytes"] / row["seconds"]["median"] / copy
        attentions.append(row)
        out(
            f"attention {sequences:3d} x {context:5d}: {row['seconds']['median'] * 1e6:7.1f} us, "
            f"{row['kv_bytes'] / 1e6:.0f} MB, {row['of_copy']:.0%} of copy\n"
        )
    mixtures = mixture(backend, tokens, given.group_size)
    for row in mixtures:
        seconds = row["seconds"]["median"]
        row["of_roof"] = max(row["weight_bytes"] / copy, row["operations"] / flops) / seconds
        out(
            f"experts 8 of 128, {row['tokens']:4d} tokens: {seconds * 1e6:7.1f} us for {row['experts_used']} experts' "
            f"{row['weight_bytes'] / 1e6:.0f} MB, {row['operations'] / seconds / 1e12:4.0f} TFLOP/s, "
            f"{row['of_roof']:.0%} of the roof; router {row['route_seconds']['median'] * 1e6:.1f} us\n"
        )
    report = surroundings(given.commit) | {
        "group_size": given.group_size,
        "copy_bytes_per_second": copy,
        "mma_flops": flops,
        "products": products,
        "attention": attentions,
        "experts": mixtures,
    }
    write(given.results, report)


if __name__ == "__main__":
    main()
