"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from shardline.cluster.models import KNOWN_MODELS

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

PLACEMENT = "Placement"
POOL = "Context and pool"


def parse_split(text: str) -> tuple[int, ...]:
    """ "12,10,8" to layer counts."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of layer counts such as 12,10,8") from None


def parse_sizes(text: str) -> tuple[int, ...]:
    """ "80M,1.5G" to bytes; K, M, G and T are powers of 1024."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", part, re.IGNORECASE)
        if match is None:
            raise typer.BadParameter(f"{part!r} is not a size such as 80M or 1.5G")
        sizes.append(int(float(match[1]) * _UNITS[match[2].upper()]))
    return tuple(sizes)


def parse_layers(text: str) -> tuple[int, int]:
    """ "10:20" to (10, 20)."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(f"{text!r} is not a range of layers such as 10:20 (the 20th is not part of it)")
    return int(match[1]), int(match[2])


def parse_numbers(text: str) -> tuple[int, ...]:
    """ "1,8,32" to numbers above 0."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,8,32")
    return numbers


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a Hugging Face folder, one that `shardline convert` wrote, or a name that is fetched: "
        f"hf:OWNER/NAME[@REVISION], {', '.join(sorted(KNOWN_MODELS))}.",
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(help="How many stages. More than one run as Ray actors.", rich_help_panel=PLACEMENT),
]
Split = Annotated[
    str | None,
    typer.Option(metavar="A,B,...", help="Layers of each stage; planned when left out.", rich_help_panel=PLACEMENT),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="auto|local|HOST:PORT",
        help="The Ray cluster for the stages: a running one, or a local one for this command.",
        rich_help_panel=PLACEMENT,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE,...",
        help="What each CPU stage may take, as 80M,120M; an equal share of the free memory when left out.",
        rich_help_panel=PLACEMENT,
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE[,...]",
        help="What each stage may take of its GPU, CUDA's own half GiB included: one size for all, as 7.5GiB, or one a "
        "stage; what is free when left out. More sizes than GPUs put several stages on one: on a machine with one GPU "
        "6GiB,8GiB,12GiB makes three stages on it.",
        rich_help_panel=PLACEMENT,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads of each stage; all cores when left out.", rich_help_panel=PLACEMENT),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="cpu|gpu|cuda:N,...",
        help="What computes: the CPU; all GPUs of the cluster, one stage on each; or GPUs here by number. cuda:N alone "
        "runs one stage without Ray.",
        rich_help_panel=PLACEMENT,
    ),
]
OneDevice = Annotated[
    str,
    typer.Option(metavar="cpu|cuda:N", help="What computes: the CPU, or the Nth GPU here.", rich_help_panel=PLACEMENT),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Tokens of the longest sequence; what the model and the memory allow when left out.", rich_help_panel=POOL
    ),
]
Concurrency = Annotated[
    int, typer.Option(help="Sequences of that length that the pool is made for.", rich_help_panel=POOL)
]
BlockSize = Annotated[int, typer.Option(help="Tokens a block of the pool.", rich_help_panel=POOL)]
KvDtype = Annotated[
    str, typer.Option(metavar="float16|float32|int8", help="How keys and values are kept.", rich_help_panel=POOL)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout instead of a table.")]
