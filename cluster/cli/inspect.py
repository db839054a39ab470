"""`shardline plan`, `subset` and `models`: what can be said without serving."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from shardline.cluster.build import EngineOptions, cores, prepare
from shardline.cluster.cli.output import plan_data, plan_lines, plan_table, print_json, say, stdout, table, waiting
from shardline.cluster.models import KNOWN_MODELS, cache_folder, resolve
from shardline.cluster.planning.stage_costs import mib


def plan_command(options: EngineOptions, *, as_json: bool) -> None:
    """See `shardline plan`."""
    with ExitStack() as stack:
        if options.address not in (None, "local"):
            from shardline.cluster.ray_runtime import connected

            stack.enter_context(connected(options.address))
        plan = prepare(options, progress=say).plan
    if as_json:
        print_json(plan_data(plan))
        return
    console = stdout()
    console.print(plan_table(plan))
    for line in plan_lines(plan, options.concurrency):
        console.print(line)


def subset_command(
    model: str,
    first: int,
    end: int,
    *,
    batches: Sequence[int],
    context: int,
    steps: int,
    threads: int | None,
    device: str,
    block_size: int,
    kv_dtype: str,
    as_json: bool,
) -> None:
    """See `shardline subset`."""
    from shardline.cluster.subset import measure_subset

    path = resolve(model, progress=say)
    with waiting(f"running layers {first} to {end - 1}"):
        report = measure_subset(
            path,
            first,
            end,
            batches=batches,
            context=context,
            steps=steps,
            threads=cores() if threads is None else threads,
            device=device,
            block_size=block_size,
            kv_dtype=kv_dtype,
        )
    if as_json:
        print_json(report)
        return
    console = stdout()
    parts = ", with the embedding" * report.has_embed + ", with the head" * report.has_head
    console.print(
        f"layers {first} to {end - 1} of {report.model_layers}{parts}: {mib(report.weight_bytes)} of weights, "
        f"{mib(report.kv_bytes)} of KV pool, {report.threads} threads, {report.context} tokens of context",
    )
    made = table(
        ("sequences", "step ms", "10 % - 90 %", "ms a layer", "stages for all layers", "projected tokens/s"), left=0
    )
    for batch in report.batches:
        made.add_row(
            str(batch.sequences),
            f"{1000 * batch.median_seconds:.2f}",
            f"{1000 * batch.low_seconds:.2f} - {1000 * batch.high_seconds:.2f}",
            f"{1000 * batch.layer_seconds:.3f}",
            str(report.stages_needed),
            f"{batch.projected_tokens_per_second:.0f}",
        )
    console.print(made)
    console.print(f"projection: {report.projection}", style="dim")


def models_command(*, as_json: bool) -> None:
    """See `shardline models`."""
    folder = cache_folder()
    fetched = {name: folder / known.file_name for name, known in KNOWN_MODELS.items()}
    fetched = {name: path for name, path in fetched.items() if path.exists()}
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "file": known.file_name,
                    "bytes": known.size,
                    "licence": known.licence,
                    "path": str(fetched[name]) if name in fetched else None,
                }
                for name, known in KNOWN_MODELS.items()
            ]
        )
        return
    made = table(("name", "file", "licence", "where", "size"), left=4)
    for name, known in KNOWN_MODELS.items():
        made.add_row(name, known.file_name, known.licence, str(fetched.get(name, "not fetched yet")), mib(known.size))
    stdout().print(made)
