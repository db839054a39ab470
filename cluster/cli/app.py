"""The commands by name. Each imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardline._version import __version__
from shardline.cluster.cli import options as o

if TYPE_CHECKING:
    from shardline.cluster.build import EngineOptions

app = typer.Typer(
    name="shardline",
    help="Serve one large language model from several small, unequal devices, with the same bytes every time.",
    epilog="A first answer:  shardline run smollm2-135m -p 'What is gravity?'    Each command has its own --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


SAMPLING = "Sampling"


@app.command(
    epilog="Examples:  shardline run smollm2-135m -p 'Hello'    "
    "cat letter.txt | shardline run smollm2-135m --system 'Summarise.' -p -    "
    "shardline run model.gguf --split 12,10,8    shardline run model.gguf --stages 3 --address auto    "
    "shardline run model.gguf --device gpu --gpu-memory 7.5GiB"
)
def run(
    model: o.Model,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT|-", help="One question; - reads it from stdin. Without: a chat."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the chat.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="The most tokens of an answer; up to the context when left out.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 takes the likeliest token. This and the next four are the model's own when left out; if it says "
            "nothing, 0 and off.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest; 0: all.", rich_help_panel=SAMPLING)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep what makes up this much; 1: all.", rich_help_panel=SAMPLING)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep what is this likely next to the likeliest; 0: all.", rich_help_panel=SAMPLING),
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1: off.", rich_help_panel=SAMPLING)] = None,
    presence_penalty: Annotated[float, typer.Option(help="0: off.", rich_help_panel=SAMPLING)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0: off.", rich_help_panel=SAMPLING)] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="With the same seed the answer is the same; drawn if left out.", rich_help_panel=SAMPLING),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End at this text; may be given often.", rich_help_panel=SAMPLING)
    ] = None,
    stages: o.Stages = None,
    split: o.Split = None,
    address: o.Address = None,
    memory: o.Memory = None,
    gpu_memory: o.GpuMemory = None,
    threads: o.Threads = None,
    device: o.Device = "cpu",
    context: o.Context = None,
    concurrency: o.Concurrency = 1,
    block_size: o.BlockSize = 16,
    kv_dtype: o.KvDtype = "float16",
) -> None:
    """Answer one question, or chat: in this process, or split over stages on Ray."""
    from shardline.cluster.cli.chat import run_command
    from shardline.scheduler import SamplingParams

    models_own = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
        **{name: value for name, value in models_own.items() if value is not None},
    }
    # What is wrong is told before a model is loaded.
    SamplingParams(**given)
    wish = _engine_options(
        model, stages, split, address, memory, threads, context, concurrency, block_size, kv_dtype, device, gpu_memory
    )
    run_command(wish, prompt, system, raw, given)


@app.command(
    epilog="Examples:  shardline plan smollm2-135m --memory 60M,90M,75M    "
    "shardline plan model.gguf --stages 4 --context 8192 --json    shardline plan model.gguf --address auto    "
    "shardline plan model.gguf --device gpu --gpu-memory 6GiB,8GiB,12GiB,16GiB"
)
def plan(
    model: o.Model,
    stages: o.Stages = None,
    split: o.Split = None,
    address: o.Address = None,
    memory: o.Memory = None,
    gpu_memory: o.GpuMemory = None,
    threads: o.Threads = None,
    device: o.Device = "cpu",
    context: o.Context = None,
    concurrency: o.Concurrency = 8,
    block_size: o.BlockSize = 16,
    kv_dtype: o.KvDtype = "float16",
    as_json: o.Json = False,
) -> None:
    """Show which layers would go where, what fits and how fast it should be. Reads no weights."""
    from shardline.cluster.cli.inspect import plan_command

    plan_command(
        _engine_options(
            model,
            stages,
            split,
            address,
            memory,
            threads,
            context,
            concurrency,
            block_size,
            kv_dtype,
            device,
            gpu_memory,
        ),
        as_json=as_json,
    )


@app.command(
    epilog="Examples:  shardline verify smollm2-135m    shardline verify model.gguf --full --json > matrix.json    "
    "shardline verify model.gguf --batches 1,5 --splits 30/10,12,8    "
    "shardline verify model.gguf --device gpu --gpu-memory 4GiB"
)
def verify(
    model: o.Model,
    full: Annotated[bool, typer.Option("--full", help="Every combination, not only every pair of values.")] = False,
    splits: Annotated[
        str | None, typer.Option(metavar="A,B/C,D,E/...", help="Splits to try; 1, 2, 3 stages and two uneven ones.")
    ] = None,
    block_sizes: Annotated[str, typer.Option(metavar="N,...", help="Tokens a block.")] = "8,16,64",
    chunks: Annotated[str, typer.Option(metavar="N,...", help="Prefill chunks; 0 is the whole prompt.")] = "7,64,0",
    batches: Annotated[str, typer.Option(metavar="N,...", help="Sequences at once.")] = "1,2,5,17,33,64",
    tokens: Annotated[int, typer.Option(help="Tokens that each sequence generates.")] = 6,
    address: o.Address = None,
    gpu_memory: o.GpuMemory = None,
    threads: o.Threads = None,
    device: o.Device = "cpu",
    kv_dtype: o.KvDtype = "float16",
    as_json: o.Json = False,
) -> None:
    """Prove on this machine that a request's bytes do not depend on its batch, the split, blocks, chunks, the prefix
    cache or preemption. Exit code 1 on any difference."""
    from shardline.cluster.cli.verify import verify_command

    code = verify_command(
        model,
        full=full,
        splits=None if splits is None else tuple(o.parse_split(part) for part in splits.split("/")),
        block_sizes=o.parse_numbers(block_sizes),
        chunks=tuple(None if part == "0" else o.parse_numbers(part)[0] for part in chunks.split(",")),
        batches=o.parse_numbers(batches),
        new_tokens=tokens,
        threads=threads,
        device=device,
        address=address,
        gpu_memory=None if gpu_memory is None else o.parse_sizes(gpu_memory),
        kv_dtype=kv_dtype,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command(epilog="Example:  shardline subset smollm2-135m --layers 10:20 --batches 1,8,32 --context 256")
def subset(
    model: o.Model,
    layers: Annotated[str, typer.Option(metavar="A:B", help="Layers A up to, not with, B.")],
    batches: Annotated[str, typer.Option(metavar="N,...", help="Sequences that decode at once.")] = "1,8,32",
    context: Annotated[int, typer.Option(help="Tokens that each sequence has behind it.")] = 128,
    steps: Annotated[int, typer.Option(help="Timed steps of each batch.")] = 30,
    threads: o.Threads = None,
    device: o.OneDevice = "cpu",
    block_size: o.BlockSize = 16,
    kv_dtype: o.KvDtype = "float16",
    as_json: o.Json = False,
) -> None:
    """Load only some layers here, without Ray, decode with them, and say what a full pipeline of such stages would
    give."""
    from shardline.cluster.cli.inspect import subset_command

    first, end = o.parse_layers(layers)
    subset_command(
        model,
        first,
        end,
        batches=o.parse_numbers(batches),
        context=context,
        steps=steps,
        threads=threads,
        device=device,
        block_size=block_size,
        kv_dtype=kv_dtype,
        as_json=as_json,
    )


@app.command(epilog="Then, in Python:  from shardline import Client;  Client.connect('auto').submit('Hello').text()")
def serve(
    model: o.Model,
    name: Annotated[str | None, typer.Option(help="Under which clients find it, if several run there.")] = None,
    stages: o.Stages = None,
    split: o.Split = None,
    address: o.Address = "auto",
    memory: o.Memory = None,
    gpu_memory: o.GpuMemory = None,
    threads: o.Threads = None,
    device: o.Device = "cpu",
    context: o.Context = None,
    concurrency: o.Concurrency = 8,
    block_size: o.BlockSize = 16,
    kv_dtype: o.KvDtype = "float16",
) -> None:
    """Run an engine on a Ray cluster, for Python clients anywhere on it, until Ctrl-C. --address local starts a
    cluster."""
    from shardline.cluster.cli.serve import serve_command

    wish = _engine_options(
        model, stages, split, address, memory, threads, context, concurrency, block_size, kv_dtype, device, gpu_memory
    )
    serve_command(wish, name)


@app.command()
def stop(
    name: Annotated[str | None, typer.Option(help="Which, if several run there.")] = None,
    address: Annotated[
        str, typer.Option(metavar="auto|HOST:PORT", help="The Ray cluster.", rich_help_panel=o.PLACEMENT)
    ] = "auto",
) -> None:
    """Stop an engine whose `shardline serve` was killed, or runs elsewhere."""
    from shardline.cluster.cli.serve import stop_command

    stop_command(address, name)


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 48,
) -> None:
    """Fetch a small model, split it over three unequal stages on a local Ray, and answer eight prompts at once."""
    from shardline.cluster.demo import demo as run_demo

    run_demo(max_tokens)


@app.command(
    epilog="Examples:  shardline convert smollm2-135m smollm2    "
    "shardline convert ./Qwen3-30B-A3B qwen3 --bits 4 --group-size 64    shardline run ./smollm2"
)
def convert(
    model: o.Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    bits: Annotated[
        int | None, typer.Option(metavar="4|8", help="What a layer's floats are quantized to; 4 when left out.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(metavar="16|32|64|128", help="Floats that share a scale; 32 when left out.")
    ] = None,
) -> None:
    """Write a model as a folder of one file a layer, in the form in which it is kept in memory, so that it loads as
    fast as the disk gives it. The model stays the same to the bit."""
    from shardline.cluster.cli.convert import convert_command

    convert_command(model, out, bits=bits, group_size=group_size)


@app.command()
def models(
    check: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Instead: read all of a converted folder and compare its files' hashes."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """List the models that are known by name."""
    if check is not None:
        from shardline.cluster.cli.convert import check_command

        check_command(check)
        return
    from shardline.cluster.cli.inspect import models_command

    models_command(as_json=as_json)


@app.command()
def doctor(as_json: o.Json = False) -> None:
    """Show what this machine offers and what is missing. Exit code 1 if something needed is."""
    from shardline.cluster.cli.doctor import doctor_command

    raise typer.Exit(doctor_command(as_json=as_json))


def _engine_options(
    model: str,
    stages: int | None,
    split: str | None,
    address: str | None,
    memory: str | None,
    threads: int | None,
    context: int | None,
    concurrency: int,
    block_size: int,
    kv_dtype: str,
    device: str,
    gpu_memory: str | None,
) -> EngineOptions:
    from shardline.cluster.build import EngineOptions

    return EngineOptions(
        model=model,
        stages=stages,
        split=None if split is None else o.parse_split(split),
        address=address,
        context=context,
        concurrency=concurrency,
        threads=threads,
        memory=None if memory is None else o.parse_sizes(memory),
        block_size=block_size,
        kv_dtype=kv_dtype,
        device=device,
        gpu_memory=None if gpu_memory is None else o.parse_sizes(gpu_memory),
    )
