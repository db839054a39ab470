"""`shardline verify`: run the matrix, print a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardline.cluster.build import EngineOptions, chosen_gpus, cores, gpu_shares, wanted
from shardline.cluster.checking.verify import PipelineFactory, Verifier
from shardline.cluster.checking.verify_cases import Case, Factors, default_splits
from shardline.cluster.checking.verify_result import CaseResult
from shardline.cluster.cli.output import print_json, say, stderr, stdout, table
from shardline.cluster.models import resolve
from shardline.scheduler import InvalidParameterError
from shardline.stage import StageSpec

MANY = 100
"""Above this many cases the table has only those that failed."""


def verify_command(
    model: str,
    *,
    full: bool,
    splits: tuple[tuple[int, ...], ...] | None,
    block_sizes: tuple[int, ...],
    chunks: tuple[int | None, ...],
    batches: tuple[int, ...],
    new_tokens: int,
    threads: int | None,
    device: str,
    address: str | None,
    gpu_memory: tuple[int, ...] | None,
    kv_dtype: str,
    as_json: bool,
) -> int:
    """See `shardline verify`. Returns the exit code."""
    path = resolve(model, progress=say)
    results: list[CaseResult] = []
    options = EngineOptions(model, address=address, device=device, gpu_memory=gpu_memory, kv_dtype=kv_dtype)
    with (
        over_gpus(path, options) as pipelines,
        Verifier(
            path,
            new_tokens=new_tokens,
            threads=cores() if threads is None else threads,
            kv_dtype=kv_dtype,
            max_batch=max(batches),
            device=device if pipelines is None else "cuda:0",
            pipelines=pipelines,
        ) as verifier,
    ):
        factors = Factors(splits or default_splits(verifier.model.num_layers), block_sizes, chunks, batches)
        cases = factors.product() if full else factors.covering()
        with Progress(
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=stderr(),
            disable=not stderr().is_terminal,
            transient=True,
        ) as progress:
            task = progress.add_task("verifying", total=len(cases))

            def report(result: CaseResult) -> None:
                results.append(result)
                progress.advance(task)
                if not result.passed:
                    progress.console.print(f"{_name(result.case)}: {_reason(result)}", style="red")

            passed = verifier.run_all(cases, report)
    if as_json:
        print_json({"model": str(path), "passed": passed, "cases": [_data(result) for result in results]})
    else:
        _print(results)
    return 0 if passed else 1


@contextmanager
def over_gpus(path: Path, options: EngineOptions) -> Iterator[PipelineFactory | None]:
    """Pipelines over Ray on the GPUs of the options, dealt over them anew for each split; None where the stages run in
    this process. Inside, Ray is connected if it is needed. Raises PlanningError, InvalidParameterError."""
    wanted(options)
    if options.device == "cpu" and options.address is not None:
        raise InvalidParameterError(
            "address", options.address, "--device gpu too: on the CPU stages run in this process"
        )
    if options.gpu_memory is not None and len(options.gpu_memory) > 1:
        raise InvalidParameterError("gpu_memory", options.gpu_memory, "one size: splits differ in their stages")
    if options.device == "cpu" or not options.uses_ray:
        yield None
        return
    from shardline.cluster.ray_pipeline import RayPipeline
    from shardline.cluster.ray_runtime import StagePlacement, connected

    on_cluster = options.address not in (None, "local")
    gpus = chosen_gpus(options, lambda problem: say(f"not used, on {problem}"))

    def make(specs: tuple[StageSpec, ...]) -> RayPipeline:
        shares = gpu_shares(gpus, len(specs), options.gpu_memory)[: len(specs)]
        # A stage's process sees its own GPU alone.
        limited = [
            replace(spec, device="cuda:0", memory_bytes=share.memory_limit)
            for spec, share in zip(specs, shares, strict=True)
        ]
        places = [StagePlacement(share.node if on_cluster else None, gpu=share.gpu) for share in shares]
        return RayPipeline(limited, path, places)

    count = None if on_cluster else 1 + max(gpu.card.index for gpu in gpus)
    with connected(options.address if on_cluster else None, num_gpus=count):
        yield make


def _print(results: Sequence[CaseResult]) -> None:
    console = stdout()
    shown = [result for result in results if not result.passed] if len(results) > MANY else results
    if shown:
        made = table(
            ("split", "sampling", "prefix", "block", "chunk", "batch", "preempted", "ahead", "tokens", "equal"), left=3
        )
        for result in shown:
            made.add_row(*_row(result))
        console.print(made)
    for result in results:
        # Where stdout is a terminal too, they stand there already, as they happened.
        if not result.passed and not (console.is_terminal and stderr().is_terminal):
            console.print(f"{_name(result.case)}: {_reason(result)}", style="red")
    tokens = sum(result.tokens for result in results)
    preemptions = sum(result.preemptions for result in results)
    hits = sum(result.prefix_hit_tokens for result in results)
    ahead = sum(result.plans_ahead for result in results)
    failed = sum(not result.passed for result in results)
    verdict = f"{failed} of {len(results)} cases FAILED" if failed else f"all {len(results)} cases equal, byte for byte"
    console.print(
        f"{verdict}: {sum(result.sequences for result in results)} sequences, {tokens} tokens with logprobs compared, "
        f"{preemptions} preemptions, {hits} prompt tokens from the prefix cache, {ahead} plans made a step ahead, "
        f"{sum(result.seconds for result in results):.0f} s",
        style="red" if failed else "green",
    )


def _row(result: CaseResult) -> list[str]:
    case = result.case
    return [
        "+".join(map(str, case.split)),
        "seeded" if case.seeded else "greedy",
        "warm" if case.warm else "cold",
        str(case.block_size),
        "whole" if case.prefill_chunk is None else str(case.prefill_chunk),
        str(case.batch),
        f"{result.preemptions} times" if case.preempted else "no",
        f"{result.plans_ahead} plans" if case.ahead else "no",
        str(result.tokens),
        "yes" if result.passed else "NO",
    ]


def _name(case: Case) -> str:
    ways = ["seeded" if case.seeded else "greedy", "warm" if case.warm else "cold"] + ["preempted"] * case.preempted
    ways += ["a step ahead"] * case.ahead
    chunk = "whole prompts" if case.prefill_chunk is None else f"chunks of {case.prefill_chunk}"
    split = "+".join(map(str, case.split))
    return f"split {split}, blocks of {case.block_size}, {chunk}, batch {case.batch}, {', '.join(ways)}"


def _reason(result: CaseResult) -> str:
    if result.first is None:
        return f"not a proof: {result.missed}"
    return f"{result.differing} of {result.sequences} sequences differ; first at {result.first}"


def _data(result: CaseResult) -> dict[str, Any]:
    data = dataclasses.asdict(result)
    data["passed"] = result.passed
    return data
