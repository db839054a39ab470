"""The tables of docs/benchmarks.md about several GPUs, made of what `benchmarks.gpu_pipeline` wrote.

python -m benchmarks.report            writes them between the marks
python -m benchmarks.report --check    exit code 1 if they are not what the JSON gives
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, milliseconds, numbers

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- gpu_pipeline: written by `python -m benchmarks.report` -->"
END = "<!-- gpu_pipeline: end -->"
FLIGHTS = {"planned": "as planned", "cards": "as on cards of their own"}


def page_of(page: str, reports: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The page with the tables of these reports, each with its file's name. Raises ValueError without the marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must have one line {BEGIN} and after it one line {END}")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    parts = ["\n".join(section(name, report)) for name, report in reports] or ["Nothing has been measured yet."]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def section(name: str, report: dict[str, Any]) -> Iterator[str]:
    """One report."""
    gpus = [gpu["name"] for gpu in report["gpus"]]
    where = ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or report["processor"]
    driver = next((gpu["driver"] for gpu in report["gpus"]), None) or report["driver"]
    versions = ", ".join(f"{what} {version}" for what, version in report["versions"].items())
    model, options = report["model"], report["options"]
    yield f"### {model['geometry']}, {model['layers']} layers, {model['weights']} weights, on {where}"
    yield ""
    yield (
        f"`{report['command']}`, commit {(report['commit'] or 'unknown')[:12]}, "
        + (f"driver {driver}, " if driver else "")
        + f"{versions}; seed {options['seed']}, prompts of {options['prompt']} tokens, windows of {options['steps']} "
        f"tokens after {options['warm']}. Medians of {_counts(report['layouts'])} trials with their range (of five: a "
        f"94 % interval of the median). Raw figures: `benchmarks/results/{name}`."
    )
    layouts = report["layouts"]
    for table in (loads, parity, rates, projections, overheads, hop_times, traffic, soaks):
        lines = list(table(report, layouts))
        if lines:
            yield ""
            yield from lines


def _counts(found: Any) -> str:
    """How many trials the figures of a report have: where its time was up some have fewer."""

    def counts(part: Any) -> Iterator[int]:
        if isinstance(part, dict):
            if isinstance(part.get("trials"), list):
                yield len(part["trials"])
            for one in part.values():
                yield from counts(one)
        elif isinstance(part, list):
            for one in part:
                yield from counts(one)

    seen = sorted(set(counts(found)))
    return f"{seen[0]} to {seen[-1]}" if len(seen) > 1 else str(seen[0] if seen else 0)


def rows_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table, if it has rows."""
    made = list(rows)
    if made:
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        for row in made:
            yield f"| {' | '.join(row)} |"


def loads(_: dict[str, Any], layouts: dict[str, Any]) -> Iterator[str]:
    """The splits, and what loading took."""
    rows = []
    for name, result in layouts.items():
        if "error" in result:
            rows.append([name, "failed", "", "", "", ""])
        if "split" not in result:
            continue
        times = result["loads"]
        rows.append(
            [
                name,
                ", ".join(map(str, result["split"])),
                ", ".join(f"{stage['resident_bytes'] / 2**30:.1f}" for stage in result["stage_facts"]),
                f"{result['start_seconds']:.1f}",
                ", ".join(f"{load['bytes'] / load['seconds'] / 1e9:.2f}" for load in times),
                ", ".join(f"{load['processor_seconds'] / load['seconds']:.0%}" for load in times),
            ]
        )
    head = ("layout", "layers", "GiB held", "ready in s", "loaded at GB/s a stage", "a core busy meanwhile")
    yield from rows_of(head, rows)


def parity(_: dict[str, Any], layouts: dict[str, Any]) -> Iterator[str]:
    """In one sentence."""
    checked = [result["parity"] for result in layouts.values() if "parity" in result]
    if not checked:
        return
    alone = sum(each["sequences_compared_with_one_stream"] for each in checked)
    seen = sum(each["sequences_compared_with_another_layout_or_batch"] for each in checked)
    logprobs = sum(each["logprobs_compared"] for each in checked)
    different = [words for each in checked for words in each["different"]]
    yield (
        f"Bytes: {alone} sequences of these runs were compared with the same prompt alone in one stage, {seen} more "
        f"with what they had in other batches or layouts, {logprobs} logprobs among them; "
        + (f"**{len(different)} were different** ({different[0]})." if different else "all were equal.")
    )


def rates(_: dict[str, Any], layouts: dict[str, Any]) -> Iterator[str]:
    """Decode and prefill."""
    base: dict[int, float] = {}
    rows = []
    for name, result in layouts.items():
        for row in result.get("decode", []):
            rate = row["tokens_per_second"]
            first = base.setdefault(row["batch"], rate["median"])
            predicted = result.get("predicted_tokens_per_second", {}).get(str(row["batch"]))
            rows.append(
                [
                    name,
                    f"{FLIGHTS[row['flight']]} ({row['depth']})",
                    str(row["batch"]),
                    numbers(rate),
                    f"{rate['median'] / first:.2f}",
                    f"{predicted:.0f}" if predicted and row["flight"] == "planned" else "",
                    f"{row['rows_a_step']:.1f}",
                    ", ".join(f"{busy['median']:.0%}" for busy in row["busy_shares"]),
                    f"{row['engine_core_share']['median']:.0%}",
                ]
            )
    head = (
        "layout",
        "microbatches in flight",
        "sequences",
        "decode, tokens/s",
        "of the first layout",
        "planner said",
        "rows a step",
        "stages busy",
        "a core of the engine's process busy",
    )
    yield from rows_of(head, rows)
    prefills = [
        f"{name} {numbers(result['prefill']['tokens_per_second'])}"
        for name, result in layouts.items()
        if "prefill" in result
    ]
    if prefills:
        yield ""
        yield f"Prompts, tokens/s: {'; '.join(prefills)}."


def projections(_: dict[str, Any], layouts: dict[str, Any]) -> Iterator[str]:
    """Each stage alone, and what the whole gives."""
    rows = []
    for name, result in layouts.items():
        measured = {(row["flight"], row["batch"]): row["tokens_per_second"] for row in result.get("decode", [])}
        for row in result.get("subset", []):
            found = measured.get((row["flight"], row["batch"]))
            turns = row["one_device_tokens_per_second"]
            rows.append(
                [
                    name,
                    FLIGHTS[row["flight"]],
                    str(row["batch"]),
                    str(row["rows"]),
                    ", ".join(f"{seconds * 1e3:.2f}" for seconds in row["stage_seconds"]),
                    f"{row['cards_tokens_per_second']:.0f}",
                    f"{turns:.0f}",
                    f"{found['median']:.0f}" if found else "",
                    f"{found['median'] / turns:.2f}" if found else "",
                ]
            )
    head = (
        "layout",
        "microbatches",
        "sequences",
        "rows of one",
        "each stage alone, ms a step",
        "cards of their own (projected), tokens/s",
        "taking turns without a loss, tokens/s",
        "measured",
        "of taking turns",
    )
    yield from rows_of(head, rows)


def overheads(_: dict[str, Any], layouts: dict[str, Any]) -> Iterator[str]:
    """What no stage computes."""
    rows = [
        [
            name,
            str(row["batch"]),
            numbers({key: 100 * row["share_of_a_step"][key] for key in ("median", "least", "most")}, digits=1),
            numbers(row["seconds_a_hop"], 1e3, 2),
        ]
        for name, result in layouts.items()
        for row in result.get("overhead", [])
    ]
    yield from rows_of(
        ("layout, one microbatch", "sequences", "% of a step in which no stage computes", "ms for each hop"), rows
    )


def hop_times(report: dict[str, Any], _: dict[str, Any]) -> Iterator[str]:
    """From process to process."""
    found = report.get("hops")
    if found:
        rows = [
            [str(hop["rows"]), f"{hop['bytes'] / 1024:.0f}", numbers(hop["seconds"], 1e3, 3)] for hop in found["hops"]
        ]
        yield from rows_of((f"rows of a hop ({found['transport']})", "KiB", "ms"), rows)


def traffic(_: dict[str, Any], layouts: dict[str, Any]) -> Iterator[str]:
    """Poisson arrivals."""
    rows = []
    for name, result in layouts.items():
        for row in result.get("traffic", {}).get("rates", []):
            first, token = row["first_token_seconds"], row["token_seconds"]
            rows.append(
                [
                    name,
                    f"{row['share_of_capacity']:.0%} ({row['requests_per_second_offered']:.1f})",
                    str(row["requests"]),
                    " / ".join(map(milliseconds, first.values())),
                    " / ".join(map(milliseconds, token.values())),
                    f"{row['output_tokens_per_second']:.0f}",
                    f"{row['goodput_requests_per_second']:.1f} ({row['good_share'] or 0:.0%})",
                ]
            )
    head = (
        "layout",
        "of capacity (requests/s)",
        "requests",
        "first token, ms (p50 / p95 / p99)",
        "a token, ms (p50 / p95 / p99)",
        "tokens/s",
        "goodput, requests/s",
    )
    yield from rows_of(head, rows)


def soaks(_: dict[str, Any], layouts: dict[str, Any]) -> Iterator[str]:
    """Losses."""
    rows = []
    for name, result in layouts.items():
        soak = result.get("soak")
        if soak:
            requests, recovery = soak["requests"], soak["recovery_seconds"]["p50"]
            rows.append(
                [
                    name,
                    f"{soak['seconds'] / 60:.1f}",
                    f"{requests['whole']} / {requests['cancelled']} / {requests['failed']}",
                    str(len(soak["kills"])),
                    "" if recovery is None else f"{recovery:.1f}",
                    str(soak["blocks_used_at_the_end"]),
                    ", ".join(
                        f"{what.removesuffix('_bytes')} {memory['middle'] / 2**20:.0f} to {memory['last'] / 2**20:.0f}"
                        for what, memory in soak["memory"].items()
                        if memory["last"] is not None
                    ),
                ]
            )
    head = (
        "layout",
        "minutes",
        "requests whole / cancelled / failed",
        "stages killed",
        "s to the next token",
        "blocks left",
        "MiB, second third to last",
    )
    yield from rows_of(head, rows)


def read_reports(folder: Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """What is there, by name."""
    paths = [path for path in sorted(folder.glob("gpu_pipeline*.json")) if ".partial." not in path.name]
    return [(path.name, json.loads(path.read_text())) for path in paths]


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    page = PAGE.read_text()
    made = page_of(page, read_reports())
    if given.check:
        if made != page:
            sys.stderr.write(f"{PAGE} is not what the results give: python -m benchmarks.report\n")
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
