"""`shardline demo`: a real model over three unequal stages on a local Ray, eight chats at once, and what it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardline.cluster.build import EngineOptions, Prepared, build_engine
from shardline.cluster.cli.engine import planned
from shardline.cluster.cli.output import say, stdout, table
from shardline.cluster.client import AsyncClient
from shardline.cluster.engine import EngineStatus
from shardline.cluster.planning.placement import PipelinePlan
from shardline.scheduler import SamplingParams

MODEL = "smollm2-135m"
MEMORY_MIB = (64, 100, 76)
"""What the three stages may take: unequal on purpose, and none of them holds the model."""

CONTEXT = 512
CONCURRENCY = 8
REFRESH_SECONDS = 0.2

PROMPTS = (
    "What is gravity? Answer in two sentences.",
    "Write a haiku about the sea.",
    "Name three uses of copper.",
    "Translate to French: The library opens at nine.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Give me a short recipe for pancakes.",
    "Who wrote Don Quixote, and when?",
)


@dataclass(slots=True)
class Chat:
    """One prompt and its answer so far; `first` and `last` are seconds since all were asked."""

    prompt: str
    text: str = ""
    tokens: int = 0
    first: float | None = None
    last: float | None = None


def demo(max_tokens: int) -> None:
    """Run the demonstration. Raises what keeps it from running."""
    began = time.perf_counter()
    options = EngineOptions(
        model=MODEL,
        stages=len(MEMORY_MIB),
        memory=tuple(mib << 20 for mib in MEMORY_MIB),
        context=CONTEXT,
        concurrency=CONCURRENCY,
        max_sequences=CONCURRENCY,
        max_step_tokens=256,
        prefill_chunk=128,
    )
    with planned(options) as prepared:
        say(f"planned and started Ray after {time.perf_counter() - began:.1f} s; loading the stages")
        asyncio.run(_serve(prepared, max_tokens, began))
    stdout().print(f"stopped everything; {time.perf_counter() - began:.1f} s in all")


async def _serve(prepared: Prepared, max_tokens: int, began: float) -> None:
    async with await AsyncClient.over(lambda: build_engine(prepared)) as client:
        say(f"ready after {time.perf_counter() - began:.1f} s; asking {len(PROMPTS)} questions at once")
        chats = [Chat(prompt) for prompt in PROMPTS]
        before = await client.status()
        asked = time.perf_counter()
        watch = _Watch(client, chats, asked)
        showing = asyncio.create_task(watch.show())
        try:
            async with asyncio.TaskGroup() as group:
                for chat in chats:
                    group.create_task(_answer(client, chat, asked, max_tokens, watch.ended))
        except ExceptionGroup as failed:
            # What ends one answer mostly ends them all.
            raise failed.exceptions[0] from failed
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        took = time.perf_counter() - asked
        after = await client.status()
    console = stdout()
    if console.is_terminal:
        for chat in chats:
            _print_answer(chat)
    console.print()
    console.print(_stage_table(prepared.plan, before, after, took, watch.most_blocks))
    first = [chat.first for chat in chats if chat.first is not None]
    tokens = sum(chat.tokens for chat in chats)
    console.print(
        f"time to first token: {min(first):.2f} s for the quickest and {max(first):.2f} s for the slowest of "
        f"{len(chats)} chats asked at once; {asked + min(first) - began:.1f} s from the start of the command"
    )
    console.print(f"aggregate: {tokens} tokens in {took:.1f} s, {tokens / took:.0f} tokens/s")


async def _answer(
    client: AsyncClient, chat: Chat, asked: float, max_tokens: int, ended: Callable[[Chat], None]
) -> None:
    stream = await client.submit([{"role": "user", "content": chat.prompt}], SamplingParams(max_tokens=max_tokens))
    async with stream:
        async for delta in stream:
            now = time.perf_counter() - asked
            chat.first = chat.first or now
            chat.last = now
            chat.text += delta.text
            chat.tokens += len(delta.token_ids)
    ended(chat)


class _Watch:
    """The live view; where stdout is no terminal, each answer as it ends."""

    def __init__(self, client: AsyncClient, chats: Sequence[Chat], asked: float) -> None:
        self._client = client
        self._chats = chats
        self._asked = asked
        self.most_blocks = 0

    async def show(self) -> None:
        """Until cancelled."""
        console = stdout()
        if not console.is_terminal:
            while True:
                await self._look()
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                status = await self._look()
                live.update(self._view(status), refresh=True)

    def ended(self, chat: Chat) -> None:
        """An answer is whole."""
        if not stdout().is_terminal:
            _print_answer(chat)

    async def _look(self) -> EngineStatus:
        await asyncio.sleep(REFRESH_SECONDS)
        status = await self._client.status()
        self.most_blocks = max(self.most_blocks, status.scheduler.blocks_used)
        return status

    def _view(self, status: EngineStatus) -> Group:
        made = Table(box=None, pad_edge=False, expand=True, show_header=False)
        made.add_column(width=24, no_wrap=True, style="bold")
        made.add_column(width=4, justify="right")
        made.add_column(ratio=1, no_wrap=True)
        width = max(20, stdout().width - 32)
        for chat in self._chats:
            tail = " ".join(chat.text.split())
            made.add_row(chat.prompt, str(chat.tokens), tail if len(tail) <= width else f"...{tail[3 - width :]}")
        tokens = sum(chat.tokens for chat in self._chats)
        scheduler = status.scheduler
        return Group(
            made,
            Text(
                f"{tokens} tokens, {tokens / (time.perf_counter() - self._asked):.0f} tokens/s, "
                f"{scheduler.in_flight} microbatches in flight, "
                f"{scheduler.blocks_used} of {scheduler.blocks_total} blocks used",
                style="dim",
            ),
        )


def _print_answer(chat: Chat) -> None:
    console = stdout()
    console.print(f"> {chat.prompt}", style="bold")
    console.print(f"{chat.text.strip()}\n")


def _stage_table(
    plan: PipelinePlan, before: EngineStatus, after: EngineStatus, seconds: float, most_blocks: int
) -> Table:
    """What each stage did between two looks at it."""
    made = table(("stage", "where", "layers", "resident", "blocks used / total", "busy", "tokens/s"), left=3)
    earlier = {stats.spec.index: stats for stats in before.stages}
    for stats in after.stages:
        was, spec = earlier[stats.spec.index], stats.spec
        parts = [f"{spec.first_layer}-{spec.end_layer - 1}"] + ["embed"] * spec.has_embed + ["head"] * spec.has_head
        made.add_row(
            str(spec.index),
            f"{stats.where}, process {stats.pid}",
            " ".join(parts),
            f"{stats.resident_bytes / 2**20:.0f} MiB of {plan.stages[spec.index].device.free_bytes / 2**20:.0f}",
            f"{most_blocks} / {spec.num_blocks}",
            f"{100 * (stats.busy_seconds - was.busy_seconds) / seconds:.0f} %",
            f"{(stats.rows - was.rows) / seconds:.0f}",
        )
    return made
