"""A whole model over several GPUs, or over several small shares of one: aggregate, fill, hops, traffic, losses, parity.

    python -m benchmarks.gpu_pipeline --geometry qwen3-30b-a3b --layouts one 4x8GiB 6,8,12,16GiB
    python -m benchmarks.gpu_pipeline --geometry qwen3-8b --layouts one 2 2x12GiB --parts decode overhead
    python -m benchmarks.gpu_pipeline --device cpu --geometry tiny --layouts one 2      (anywhere)

Through the real engine and pipeline, with random weights (`benchmarks.random_model`) or a `shardline convert` folder.
Layouts: "one" (one stage in a process of its own), "one-ray" (that as a Ray actor), "4" (one stage a GPU), "4x8GiB",
"6,8,12,16GiB" (stages of at most so much memory, as many on a GPU as it holds).

Parts:
    decode    tokens a second while all sequences decode, for each of --batches: with the flight that is planned, and
              "cards": with as many microbatches in flight as stages on cards of their own have
    prefill   prompt tokens a second
    overhead  one microbatch in flight, so that no stage's work hides a wait: the share of a step that no stage computes
    subset    each stage alone on the device: what stages on cards of their own would give, and stages that take turns
    traffic   lengths with a long tail, Poisson arrivals at shares of what a closed loop gives
    soak      that with cancels and kill -9 of stages, on layouts that have their stages in Ray actors
    hops      what a step costs from process to process, by rows, with stages that do nothing

Each layout runs in a process of its own, so that no one's memory is left to the next. The tokens of every sequence are
compared: with the same prompt alone on the first layout (a sample), and with what other layouts and batches gave (all);
outside of timed windows logprobs too, bit for bit.
Exit code 1: something differed. 2: something failed, or a soak was not clean. What is measured is written after each
layout, and after each part of one beside it (`.partial.json`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.drive import Answer
from benchmarks.geometries import MODELS
from benchmarks.layouts import Layout, parse_layout
from benchmarks.parts import measure
from benchmarks.random_model import model_folder
from benchmarks.record import RESULTS, machine, say, write
from benchmarks.session import Session, apart
from benchmarks.stages_alone import hops, subset

from shardline.cluster.gpus import gpus_here
from shardline.stage import open_checkpoint

PARTS = ("decode", "prefill", "overhead", "subset", "traffic", "soak", "hops")


def run_all(given: argparse.Namespace, report: dict[str, Any]) -> int:
    """Every layout; the report grows as they come. Returns the exit code."""
    began = time.perf_counter()
    model = given.model or model_folder(given.geometry, given.work, layers=given.layers, seed=given.seed)
    checkpoint = open_checkpoint(model)
    spec, fingerprint = checkpoint.spec, checkpoint.fingerprint
    checkpoint.close()
    report["model"] = {
        "geometry": given.geometry if given.model is None else model.name,
        "layers": spec.num_layers,
        "weights": "random" if given.model is None else "of the folder",
        "fingerprint": fingerprint,
        "folder_seconds": time.perf_counter() - began,
    }
    say(f"{model}: {spec.num_layers} layers, ready in {report['model']['folder_seconds']:.1f} s")
    alone_tokens: dict[str, Answer] = {}
    seen: dict[str, Answer] = {}
    deadline = time.monotonic() + given.budget - (time.perf_counter() - began)

    def session_of(layout: Layout) -> Session:
        return Session(given, layout, model, spec.vocab_size, alone_tokens, seen, deadline)

    with_engine = bool(set(given.parts) - {"subset", "hops"})
    report["layouts"] = {}
    for layout in given.layouts:
        result = report["layouts"][layout.name] = {}
        if with_engine:
            session = session_of(layout)
            if session.late("everything"):
                result |= session.result
                continue
            session = apart(measure, session)
            result |= session.result
            alone_tokens = alone_tokens or session.alone
            seen = session.parity.seen
        if "subset" in given.parts and layout.stages > 1:
            result |= apart(subset, session_of(layout)).result
        write(given.results, report)
        session_of(layout).partial.unlink(missing_ok=True)
    last = session_of(given.layouts[0])
    if "hops" in given.parts and not last.late("hops"):
        report |= apart(hops, last).result
    report["seconds"] = time.perf_counter() - began
    report["code"] = code_of(report, with_engine)
    write(given.results, report)
    return report["code"]


def code_of(report: dict[str, Any], with_engine: bool) -> int:
    """0, 1 where tokens differ, 2 where something failed."""
    results = list(report["layouts"].values())
    if any(not result["parity"]["equal"] for result in results if "parity" in result):
        return 1
    failed = any(name.endswith("error") for result in [report, *results] for name in result)
    unclean = any(not result["soak"]["clean"] for result in results if "soak" in result)
    unproven = with_engine and not any(_compared(result) for result in results)
    return 2 if failed or unclean or unproven else 0


def _compared(result: dict[str, Any]) -> int:
    return int(result.get("parity", {}).get("sequences_compared_with_one_stream", 0))


def lines_of(report: dict[str, Any]) -> Iterator[str]:
    """The short table at the end: tokens a second by layout and batch, and against the first layout."""
    layouts = report["layouts"]
    rates = {
        (name, row["flight"], row["batch"]): row["tokens_per_second"]
        for name, result in layouts.items()
        for row in result.get("decode", [])
    }
    if rates:
        batches = sorted({batch for _, _, batch in rates})
        first = next(iter(layouts))
        yield f"{'decode, tokens/s':28s}" + "".join(f"{batch:>18d}" for batch in batches)
        for name, flight in dict.fromkeys((name, flight) for name, flight, _ in rates):
            cells = []
            for batch in batches:
                rate, base = rates.get((name, flight, batch)), rates.get((first, "planned", batch))
                ratio = f" {rate['median'] / base['median']:5.2f}" if rate and base else ""
                cells.append(f"{rate['median']:.0f}{ratio}" if rate else "-")
            yield f"{f'{name}, {flight}':28s}" + "".join(f"{cell:>18s}" for cell in cells)
    for name, result in layouts.items():
        parity = result.get("parity")
        if parity:
            words = "equal" if parity["equal"] else f"NOT EQUAL ({len(parity['different'])} or more)"
            yield (
                f"{name}: {words}; {parity['sequences_compared_with_one_stream']} sequences against one alone, "
                f"{parity['sequences_compared_with_another_layout_or_batch']} against other company"
            )
        for error in (name for name in result if name.endswith("error")):
            yield f"{name}: {error}: {result[error].strip().splitlines()[-1]}"


def arguments() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--geometry", choices=MODELS, default="qwen3-30b-a3b")
    add("--layers", type=int, help="fewer than the geometry has")
    add("--model", type=Path, help="a folder of `shardline convert` in place of random weights")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "shardline-bench", help="where random models go")
    add("--device", choices=("cpu", "gpu"), default="gpu")
    add("--threads", type=int, help="CPU threads of a stage")
    add("--layouts", type=parse_layout, nargs="+", default=[parse_layout("one"), parse_layout("4x8GiB")])
    add("--parts", "--only", choices=PARTS, nargs="+", default=["decode", "prefill", "overhead"])
    add("--batches", type=int, nargs="+", default=[8, 32, 64, 128, 256])
    add("--flights", choices=("planned", "cards"), nargs="+", default=["planned", "cards"])
    add("--trials", type=int, default=5)
    add("--prompt", type=int, default=128, help="prompt tokens of sequences that decode")
    add("--warm", type=int, default=8, help="tokens of each before the window")
    add("--steps", type=int, default=64, help="tokens of the slowest in the window")
    add("--subset-steps", type=int, default=15)
    add("--context", type=int, default=1024, help="of the engine")
    add("--pool", type=int, default=72 * 1024, help="tokens that all sequences hold together")
    add("--step-tokens", type=int, default=2048, help="rows of a step")
    add("--seconds", type=float, default=20.0, help="of each rate of traffic")
    add("--shares", type=float, nargs="+", default=[0.5, 0.8, 0.95], help="of capacity, at which requests arrive")
    add("--median-prompt", type=int, default=128)
    add("--median-output", type=int, default=64)
    add("--most-prompt", type=int, default=640)
    add("--most-output", type=int, default=320)
    add("--first-token-limit", type=float, default=1.0, help="seconds, for a request to count in the goodput")
    add("--token-limit", type=float, default=0.1, help="seconds")
    add("--soak", type=float, default=240.0, help="seconds")
    add("--kill-every", type=float, default=60.0, help="seconds between two kills in a soak")
    add("--clients", type=int, default=48, help="requests that a soak always has running")
    add("--seed", type=int, default=0)
    add("--budget", type=float, default=480.0, help="seconds after which nothing more is begun")
    add("--part-seconds", type=float, default=400.0, help="after which a part is given up as hanging")
    add(
        "--spoil",
        action="store_true",
        help="change a token of one prompt once it has run alone: the command must end with 1",
    )
    add("--commit", help="where there is no checkout")
    add("--results", type=Path)
    return parser


def main() -> int:
    """Measure, print, write."""
    parser = arguments()
    given = parser.parse_args()
    if {"traffic", "soak"} & set(given.parts) and given.most_prompt + given.most_output > given.context:
        parser.error("--most-prompt and --most-output together must be within --context")
    if given.soak + 60 > given.part_seconds:
        given.part_seconds = given.soak + 60
    name = given.geometry if given.model is None else given.model.name
    given.results = given.results or RESULTS / f"gpu_pipeline_{name}.json"
    report: dict[str, Any] = {"benchmark": "gpu_pipeline"}
    report |= machine(given.commit, "benchmarks.gpu_pipeline")
    if given.device == "gpu" and not report["gpus"]:
        # Without nvidia-smi.
        cards = [gpu.card for gpu in gpus_here()]
        report["gpus"] = [{"name": card.name, "driver": None, "memory_bytes": card.total_bytes} for card in cards]
    report["options"] = {
        key: [each.name for each in value] if key == "layouts" else str(value) if isinstance(value, Path) else value
        for key, value in vars(given).items()
    }
    code = run_all(given, report)
    for line in lines_of(report):
        say(line)
    say(f"written to {given.results}, {report['seconds']:.0f} s, exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
