"""`shardline convert`, and the check of what it wrote."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardline.cluster.cli.output import say, stderr, stdout
from shardline.cluster.convert import Written, convert
from shardline.cluster.planning.stage_costs import mib
from shardline.stage.resident.checkpoint import check_files


def convert_command(model: str, out: Path, *, bits: int | None, group_size: int | None) -> None:
    """See `shardline convert`."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("files", total=None)

        def written(file: Written) -> None:
            bar.console.print(f"{file.name}  {mib(file.nbytes)}", style="dim")
            bar.update(task, completed=file.done, total=file.files)

        nbytes = convert(model, out, bits=bits, group_size=group_size, progress=say, written=written)
    stdout().print(f"{out}: {mib(nbytes)}. Run it:  shardline run {out}")


def check_command(folder: Path) -> None:
    """See `shardline models --check`."""
    count, total = 0, 0
    for name, nbytes in check_files(folder):
        say(f"{name}  {mib(nbytes)}")
        count, total = count + 1, total + nbytes
    stdout().print(f"{folder}: {count} files, {mib(total)}, all as they were written")
