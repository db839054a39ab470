"""`shardline run`: one answer, or a chat in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardline.cluster.build import EngineOptions
from shardline.cluster.cli.engine import running
from shardline.cluster.cli.interrupts import Interrupts
from shardline.cluster.cli.output import say
from shardline.cluster.client import Client
from shardline.cluster.errors import ShardlineError, TemplateError
from shardline.cluster.models import cache_folder
from shardline.cluster.request import Delta, Message, Request
from shardline.scheduler import InvalidParameterError, SamplingParams, SchedulerError

HELP = "Ctrl-C stops an answer, /reset forgets the chat, Ctrl-D quits."


def run_command(
    options: EngineOptions, prompt: str | None, system: str | None, raw: bool, given: Mapping[str, Any]
) -> None:
    """See `shardline run`. `given` are the fields of `SamplingParams` that are not left to the model."""
    if raw and system is not None:
        raise InvalidParameterError("system", system, "no system text with --raw, which uses no chat template")
    if prompt is None and not sys.stdin.isatty():
        prompt = "-"
    if prompt is None and raw:
        raise InvalidParameterError("prompt", prompt, "a text with --raw, which cannot chat")
    if prompt == "-":
        prompt = sys.stdin.read()
        # What `echo` and editors add is not meant.
        prompt = prompt.removesuffix("\n")
    if prompt is not None and not prompt:
        raise InvalidParameterError("prompt", prompt, "a text that is not empty")
    with running(options) as client:
        params = _sampling(client, given)
        if prompt is None:
            Chat(client, system, params).run()
            return
        if raw:
            request = Request(text=prompt, params=params)
        else:
            request = Request(messages=(*_opening(system), {"role": "user", "content": prompt}), params=params)
        try:
            for _ in answer(client, request):
                pass
        except TemplateError as error:
            raise TemplateError(f"{error}. Use --raw to continue the prompt without a chat template") from error


def _sampling(client: Client, given: Mapping[str, Any]) -> SamplingParams:
    defaults = client.generation_defaults()
    told = defaults.told(**given)
    if told:
        say(f"sampling: {told} (from {defaults.source}; --temperature 0 for greedy)")
    return defaults.params(**given)


def answer(client: Client, request: Request) -> Generator[str]:
    """Stream an answer to stdout, giving its pieces too; leaving it early ends the request."""
    began = time.perf_counter()
    first: float | None = None
    last: Delta | None = None
    with client.submit(request) as stream:
        for delta in stream:
            first = first or time.perf_counter()
            last = delta
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            yield delta.text
    sys.stdout.write("\n")
    sys.stdout.flush()
    if last is not None and first is not None and sys.stderr.isatty():
        _tell(last, first - began, time.perf_counter() - first)


def _tell(last: Delta, waited: float, streamed: float) -> None:
    count = last.usage.completion_tokens
    rate = f", {(count - 1) / streamed:.0f} tokens/s" if count > 1 and streamed > 0 else ""
    end = ", ended by the token limit" if last.finish_reason == "length" else ""
    say(f"{last.usage.prompt_tokens} + {count} tokens, first after {waited:.2f} s{rate}{end}")


def _opening(system: str | None) -> tuple[Message, ...]:
    return () if system is None else ({"role": "system", "content": system},)


class Chat:
    """A conversation in the terminal."""

    def __init__(self, client: Client, system: str | None, params: SamplingParams) -> None:
        self._client = client
        self._system = system
        self._params = params
        self._messages: list[Message] = list(_opening(system))

    def run(self) -> None:
        """Read and answer until Ctrl-D."""
        say(HELP)
        with Interrupts() as ctrl_c, _history():
            while True:
                try:
                    with ctrl_c.heard():
                        line = input("> ").strip()
                except EOFError:
                    sys.stdout.write("\n")
                    return
                except KeyboardInterrupt:
                    sys.stdout.write("\n")
                    say(HELP)
                    continue
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._turn(line, ctrl_c)

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._messages = list(_opening(self._system))
            say("the chat was forgotten")
        else:
            say(HELP)

    def _turn(self, line: str, ctrl_c: Interrupts) -> None:
        self._messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        request = Request(messages=tuple(self._messages), params=self._params)
        try:
            with ctrl_c.heard(), contextlib.closing(answer(self._client, request)) as streamed:
                pieces.extend(streamed)
        except KeyboardInterrupt:
            # What was said stays said.
            sys.stdout.write("\n")
            say("stopped")
        except (ShardlineError, SchedulerError) as error:
            self._messages.pop()
            say(f"{error}. /reset forgets the chat", style="red")
            return
        self._messages.append({"role": "assistant", "content": "".join(pieces)})


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing and the lines of earlier chats, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path: Path = cache_folder().parent / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
