"""How the commands speak: tables to stdout, progress to stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from shardline.cluster.planning.placement import PipelinePlan
from shardline.cluster.planning.stage_costs import mib

WIDE = 240


def stdout() -> Console:
    """For results. As wide as they are where no terminal is: the reader may be a program."""
    return _console(stderr=False, wide=not sys.stdout.isatty())


def stderr() -> Console:
    """For progress."""
    return _console(stderr=True, wide=not sys.stderr.isatty())


def _console(*, stderr: bool, wide: bool) -> Console:
    # Paths, names and answers are shown as they are: brackets are no markup, and :smile: is no emoji.
    return Console(
        stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, width=WIDE if wide else None
    )


def say(text: str, style: str = "dim") -> None:
    """One line of progress."""
    stderr().print(text, style=style)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner while something takes long; nothing where stderr is no terminal."""
    console = stderr()
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        yield


def print_json(value: Any) -> None:
    """A dataclass or plain data as one JSON document; a number that JSON has not becomes its name."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    sys.stdout.write(json.dumps(_finite(plain), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if hasattr(value, "_asdict"):
        # A named tuple; dataclasses.asdict leaves it as it is.
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def table(columns: Iterable[str], *, title: str | None = None, left: int = 1) -> Table:
    """A table whose first `left` columns are text and the others numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return made


def plan_table(plan: PipelinePlan) -> Table:
    """The stages of a plan."""
    made = table(("stage", "device", "layers", "weights", "KV pool", "workspace", "of", "step"), left=2)
    for stage in plan.stages:
        spec = stage.spec
        parts = [f"{spec.first_layer}-{spec.end_layer - 1}"] if spec.num_layers else []
        parts += ["embed"] * spec.has_embed + ["head"] * spec.has_head
        made.add_row(
            str(spec.index),
            stage.device.name,
            " ".join(parts),
            mib(stage.weight_bytes),
            mib(stage.kv_bytes),
            mib(stage.workspace_bytes),
            mib(stage.device.free_bytes),
            f"{1000 * stage.step_seconds:.1f} ms",
        )
    return made


def plan_lines(plan: PipelinePlan, concurrency: int) -> list[str]:
    """What a plan gives, for people."""
    memory, speed = plan.stages[plan.memory_bound_by], plan.stages[plan.speed_bound_by]
    sequences = "1 sequence" if plan.concurrency == 1 else f"{plan.concurrency} sequences"
    lines = [
        f"pool: {plan.num_blocks} blocks of {memory.spec.block_size} tokens on every stage, for {sequences} of "
        f"{plan.context} tokens at once, or one of {plan.max_context}",
        f"predicted with contexts half full: {plan.single_tokens_per_second:.0f} tokens/s for one sequence, "
        f"{plan.tokens_per_second:.0f} for {concurrency} (microbatches of {plan.microbatch_rows}, {plan.depth} plans "
        "in flight)",
    ]
    # Where the pool is as large as was wanted, memory binds nothing.
    full = memory.capacity_blocks == plan.num_blocks
    bounds = [f"memory of stage {memory.spec.index} ({memory.device.name})"] * full
    bounds += [f"speed of stage {speed.spec.index} ({speed.device.name})"] * (len(plan.stages) > 1)
    if bounds:
        lines.append(f"bound by: {', '.join(bounds)}")
    return lines + [f"note: {note}" for note in plan.notes]


def plan_data(plan: PipelinePlan) -> dict[str, Any]:
    """A plan as plain data."""
    data = dataclasses.asdict(plan)
    data["num_blocks"] = plan.num_blocks
    return data
