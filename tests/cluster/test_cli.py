"""The command line as a user meets it: answers on stdout, one clear line on errors, exit codes, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline import __version__
from shardline.cluster.build import EngineOptions
from shardline.cluster.cli import main
from shardline.cluster.cli.options import parse_layers, parse_numbers, parse_sizes, parse_split
from shardline.cluster.cli.output import print_json
from shardline.cluster.client import Client
from shardline.scheduler import SampledToken, SamplingParams, StepResult

QUESTION = "What is gravity?"
COMMAND = [sys.executable, "-c", "import sys; from shardline.cluster.cli import main; sys.exit(main())"]
SECONDS = 240


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> str:
    """The greedy answer to the question, through the Python client."""
    with Client.local(str(smollm2), context=256) as client:
        return client.submit([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=16)).text()


def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


# -- one answer ------------------------------------------------------------------------------------------------------


def test_stdout_has_the_answer_alone(smollm2: Path, expected: str) -> None:
    done = run("run", str(smollm2), "-p", QUESTION, "--max-tokens", "16", "--context", "256")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


@pytest.mark.parametrize("arguments", [["-p", "-"], []])
def test_a_piped_prompt(smollm2: Path, expected: str, arguments: list[str]) -> None:
    done = run("run", str(smollm2), *arguments, "--max-tokens", "16", "--context", "256", stdin=QUESTION + "\n")
    assert (done.returncode, done.stdout) == (0, expected + "\n")


def test_seeds_and_raw_text(smollm2: Path, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*options: str) -> str:
        assert main(["run", str(smollm2), "-p", QUESTION, "--context", "256", "--max-tokens", "16", *options]) == 0
        return capsys.readouterr().out

    assert answer("--temperature", "1.5", "--seed", "7") == answer("--temperature", "1.5", "--seed", "7")
    assert answer("--temperature", "1.5", "--seed", "8") != answer("--temperature", "1.5", "--seed", "7")
    assert answer("--raw") != expected + "\n"
    word = expected.split()[2]
    assert answer("--stop", word) == expected[: expected.index(word)] + "\n"


def test_every_option_of_run_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("shardline.cluster.cli.chat.run_command", lambda *arguments: seen.extend(arguments))
    text = (
        "run some.gguf -p Hello --system Short --max-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.6 --min-p 0.07 "
        "--repetition-penalty 1.8 --presence-penalty 0.9 --frequency-penalty 0.1 --seed 11 --stop a --stop b "
        "--stages 2 --split 12,18 --address auto --memory 80M,90M --threads 3 --context 512 --concurrency 6 "
        "--block-size 32 --kv-dtype float32"
    )
    assert main(text.split()) == 0
    assert seen == [
        EngineOptions(
            model="some.gguf",
            stages=2,
            split=(12, 18),
            address="auto",
            context=512,
            concurrency=6,
            threads=3,
            memory=(80 << 20, 90 << 20),
            block_size=32,
            kv_dtype="float32",
        ),
        "Hello",
        "Short",
        False,
        {
            "max_tokens": 3,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.6,
            "min_p": 0.07,
            "repetition_penalty": 1.8,
            "presence_penalty": 0.9,
            "frequency_penalty": 0.1,
            "seed": 11,
            "stop": ("a", "b"),
        },
    ]
    seen.clear()
    assert main(["run", "some.gguf", "--temperature", "0", "--top-k", "0"]) == 0
    assert set(seen[-1]) == {
        "max_tokens",
        "temperature",
        "top_k",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
    }


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", "no-such-model", "-p", "x"], 1, "no model 'no-such-model'.*smollm2-135m"),
        (["run", "smollm2-135", "-p", "x"], 1, "Did you mean 'smollm2-135m'"),
        (["plan", "/dev/null"], 1, "/dev/null: file: is not a regular file"),
        (["plan", "MODEL", "--context", "100000"], 1, "context 100000 is not possible.*1 to 8192"),
        (["plan", "MODEL", "--split", "10,10,11"], 1, "split 10,10,11 has 31 layers, but the model has 30"),
        (["plan", "MODEL", "--memory", "20M,20M,20M"], 1, "lacks .* MiB"),
        (["plan", "MODEL", "--stages", "2", "--memory", "80M"], 2, "memory=.*one number for each of 2 stages"),
        (["plan", "MODEL", "--stages", "0"], 1, "0 stages are not possible"),
        (["plan", "MODEL", "--block-size", "12"], 2, "block_size=12"),
        (["plan", "MODEL", "--kv-dtype", "int4"], 2, "kv_dtype='int4'.*float16, float32 or int8"),
        (["plan", "MODEL", "--threads", "0"], 2, "threads=0"),
        (["plan", "MODEL", "--concurrency", "0"], 2, "concurrency=0"),
        (["plan", "MODEL", "--concurrency", "100000000000000000000"], 2, "concurrency=1000.*1 to 1048576"),
        (["run", "MODEL", "-p", "x", "--temperature=-1"], 2, "temperature=-1"),
        (["run", "MODEL", "-p", "x", "--top-p", "0"], 2, "top_p=0"),
        (["run", "MODEL", "-p", "x", "--max-tokens", "0"], 2, "max_tokens=0"),
        (["run", "MODEL", "-p", "x", "--stop", ""], 2, "stop=''"),
        (["run", "MODEL", "-p", ""], 2, "prompt=''"),
        (["run", "MODEL", "--raw", "--system", "x", "-p", "x"], 2, "--raw"),
        (["run", "MODEL", "-p", "word " * 300, "--context", "64"], 1, "prompt has .* tokens"),
        (["subset", "MODEL", "--layers", "20:40"], 2, "layers='20:40'.*0:30"),
        (["subset", "MODEL", "--layers", "0:1", "--context", "9000"], 2, "context=9000"),
        (["subset", "MODEL", "--layers", "0:1", "--threads", "0"], 2, "threads=0"),
        (["subset", "MODEL", "--layers", "0:1", "--batches", "1000000000000"], 1, "out of memory: .*fewer sequences"),
        (["verify", "MODEL", "--tokens", "1"], 2, "new_tokens=1"),
        (["verify", "MODEL", "--threads", "0"], 2, "threads=0"),
        (["verify", "MODEL", "--kv-dtype", "int4"], 2, "kv_dtype='int4'"),
        (["verify", "MODEL", "--device", "tpu"], 2, "device='tpu'"),
        (["verify", "MODEL", "--block-sizes", "7"], 2, "block_size=7"),
        (["verify", "MODEL", "--splits", "10,10"], 2, "split=.*add up to 30"),
        (["run", "MODEL", "-p", "x", "--address", "127.0.0.1:1"], 1, "no Ray cluster can be reached at 127.0.0.1:1"),
        (
            ["run", "MODEL", "-p", "x", "--address", "ray://a:1"],
            1,
            "ray://a:1 is no address of a Ray cluster: give auto",
        ),
    ],
)
def test_an_error_is_one_line(
    smollm2: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    import re

    assert main([str(smollm2) if part == "MODEL" else part for part in arguments]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardline: ")
    assert captured.err.count("\n") == 1
    assert re.search(told, captured.err), captured.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-command"], "No such command 'no-such-command'"),
        (["run"], "Missing argument 'MODEL'"),
        (["run", "x", "--no-such-option"], "No such option"),
        (["run", "x", "--max-tokens", "many"], "unable to parse string as an integer"),
        (["plan", "x", "--memory", "60X"], "'60X' is not a size such as 80M"),
        (["plan", "x", "--split", "a,b"], "'a,b' is not a list of layer counts"),
        (["subset", "x", "--layers", "3"], "'3' is not a range of layers"),
        (["verify", "x", "--batches", "0"], "'0' is not a list of numbers"),
        (["demo", "--max-tokens", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in " ".join(captured.err.replace("│", " ").split())


def test_a_fault_of_ours_shows_where_only_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("the moon\nis down")

    monkeypatch.setattr("shardline.cluster.cli.inspect.models_command", broken)
    assert main(["models"]) == 1
    told = capsys.readouterr().err
    assert "a fault of shardline: RuntimeError: the moon ... is down. Set SHARDLINE_DEBUG=1" in told
    assert told.count("\n") == 1
    monkeypatch.setenv("SHARDLINE_DEBUG", "1")
    assert main(["models"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_values() -> None:
    assert parse_sizes("80M,1.5G,1024,2kib") == (80 << 20, 3 << 29, 1024, 2048)
    assert parse_split("12,10,8") == (12, 10, 8)
    assert parse_layers("0:30") == (0, 30)
    assert parse_numbers("1,8") == (1, 8)


# -- what can be said without serving --------------------------------------------------------------------------------


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for command in ("run", "plan", "verify", "subset", "serve", "demo", "models", "doctor"):
        assert command in told
        assert main([command, "--help"]) == 0
        assert "--help" in capsys.readouterr().out
    assert "shardline run smollm2-135m -p" in told


def test_help_and_version_do_not_wait_for_heavy_imports() -> None:
    script = (
        "import sys; from shardline.cluster.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'ray', 'numba', 'gguf', 'tokenizers'} & set(sys.modules); sys.exit(f'{code} {heavy}')"
    )
    for arguments in (["--version"], ["--help"], ["run", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.stderr.strip() == "0 set()", done.stderr
    assert run("--version").stdout == f"shardline {__version__}\n"


def test_plan_as_table_and_json(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(smollm2), "--memory", "64M,100M,76M", "--context", "1024"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    layers = [(stage["spec"]["first_layer"], stage["spec"]["end_layer"]) for stage in document["stages"]]
    assert [first for first, _ in layers] == [0, *(end for _, end in layers[:-1])]
    assert layers[-1][1] == 30
    assert len({end - first for first, end in layers}) > 1
    for first, end in layers:
        assert f"{first}-{end - 1}" in table
    assert str(document["num_blocks"]) in table


def test_plan_tells_what_the_stage_will_hold(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(smollm2), "--context", "256", "--concurrency", "2", "--json"]) == 0
    stage = json.loads(capsys.readouterr().out)["stages"][0]
    with Client.local(str(smollm2), context=256, concurrency=2) as client:
        (stats,) = client.status().stages
    # The few norm vectors are not the backend's to count.
    assert stage["weight_bytes"] + stage["kv_bytes"] == pytest.approx(stats.resident_bytes, rel=2e-3)


def test_models_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    assert any(model["name"] == "smollm2-135m" for model in json.loads(capsys.readouterr().out))
    assert main(["doctor"]) == 0
    assert "processor" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["shardline"]["value"].startswith(__version__)
    assert {"Python", "ray", "numba", "cores", "memory", "compiled kernels"} <= set(found)


def test_a_cache_that_cannot_be_one_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "file"))
    assert main(["doctor"]) == 1
    assert "cannot be written: set SHARDLINE_CACHE" in capsys.readouterr().out


def test_brackets_and_colons_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smollm2: Path
) -> None:
    cache = tmp_path / "[/odd] :smile: [red]"
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    monkeypatch.setenv("SHARDLINE_CACHE", str(cache))
    for command in ("doctor", "models"):
        main([command])
        assert str(cache) in capsys.readouterr().out


# -- a terminal ------------------------------------------------------------------------------------------------------


class Terminal:
    """A program with a terminal of its own."""

    def __init__(self, command: list[str], cache: Path) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # Ctrl-C reaches the foreground group of the terminal that the session owns.
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb", "HOME": str(cache), "XDG_CACHE_HOME": os.path.expanduser("~/.cache")},
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str, since: int = 0) -> int:
        """Read until `text` comes after the first `since` characters; returns where it ends."""
        deadline = time.monotonic() + SECONDS
        while (place := self.seen.find(text, since)) < 0:
            readable, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{text!r} did not come; seen: {self.seen!r}"
            try:
                self.seen += os.read(self.master, 65536).decode()
            except OSError:
                pytest.fail(f"the command ended before {text!r}; seen: {self.seen!r}")
        return place + len(text)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[[list[str]], Terminal]]:
    """Starts a program in a terminal."""
    with contextlib.ExitStack() as stack:

        def start(command: list[str]) -> Terminal:
            started = Terminal(command, tmp_path)
            stack.callback(started.close)
            return started

        yield start


CTRL_C, CTRL_D = "\x03", "\x04"


def test_a_chat(terminal: Callable[[list[str]], Terminal], smollm2: Path) -> None:
    chat = terminal([*COMMAND, "run", str(smollm2), "--context", "2048"])
    at = chat.wait_for("> ")
    chat.type("What is the capital of France?\r")
    at = chat.wait_for("Paris", at)
    at = chat.wait_for("tokens/s", at)
    at = chat.wait_for("> ", at)
    # It remembers what was said, until told not to.
    chat.type("Repeat your last answer.\r")
    at = chat.wait_for("Paris", chat.wait_for("answer.", at))
    at = chat.wait_for("> ", chat.wait_for("tokens/s", at))
    chat.type("/reset\r")
    at = chat.wait_for("> ", chat.wait_for("forgotten", at))
    # Ctrl-C stops a long answer, and the chat goes on.
    chat.type("Count from 1 to 1000, one number a line.\r")
    at = chat.wait_for("\n", chat.wait_for("line.", at))
    at = chat.wait_for(" ", at)
    chat.type(CTRL_C)
    at = chat.wait_for("> ", chat.wait_for("stopped", at))
    chat.type("Say hello.\r")
    at = chat.wait_for("> ", chat.wait_for("tokens/s", at))
    # Ctrl-C on an empty line only explains.
    chat.type(CTRL_C)
    at = chat.wait_for("> ", chat.wait_for("Ctrl-D quits", at))
    chat.type(CTRL_D)
    assert chat.process.wait(SECONDS) == 0
    assert "Traceback" not in chat.seen


ALONE = """
import shardline.cluster.cli.chat as chat
from shardline import SamplingParams
{}
chat.Chat(None, None, SamplingParams()).run()
"""
"""A chat with nobody who answers."""

PRESSED_BEFORE_READLINE_WAITS = """
import ctypes, functools, readline, signal
# Once, as the last before the wait at the first prompt; no Python code runs after it that would see the signal.
press = map(ctypes.CDLL(None)["raise"], [int(signal.SIGINT)])
readline.set_pre_input_hook(functools.partial(next, press, 0))
"""

PRESSED_WHILE_IT_IS_ANSWERED = """
import os, signal
say, lines = chat.say, 0

def say_while_pressed(text):
    global lines
    lines += 1
    pressed = lines in (2, 3)
    if pressed:
        os.kill(os.getpid(), signal.SIGINT)
    say(text)
    if pressed:
        os.kill(os.getpid(), signal.SIGINT)

chat.say = say_while_pressed
"""


def test_ctrl_c_just_before_readline_waits_is_not_lost(terminal: Callable[[list[str]], Terminal]) -> None:
    chat = terminal([sys.executable, "-c", ALONE.format(PRESSED_BEFORE_READLINE_WAITS)])
    at = chat.wait_for("> ", chat.wait_for("Ctrl-D quits"))
    # Nothing is typed.
    chat.wait_for("> ", chat.wait_for("Ctrl-D quits", at))
    chat.type(CTRL_D)
    assert chat.process.wait(SECONDS) == 0


def test_ctrl_c_while_the_last_one_is_answered_waits_its_turn(terminal: Callable[[list[str]], Terminal]) -> None:
    chat = terminal([sys.executable, "-c", ALONE.format(PRESSED_WHILE_IT_IS_ANSWERED)])
    at = chat.wait_for("> ", chat.wait_for("Ctrl-D quits"))
    chat.type(CTRL_C)
    for _ in range(3):
        at = chat.wait_for("Ctrl-D quits", at)
    chat.wait_for("> ", at)
    chat.type(CTRL_D)
    assert chat.process.wait(SECONDS) == 0
    assert chat.seen.count("Ctrl-D quits") == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_running_answer(smollm2: Path, number: int, code: int) -> None:
    command = [*COMMAND, "run", str(smollm2), "--raw", "-p", "1, 2, 3,", "--context", "4096"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(number)
        _, told = process.communicate(timeout=SECONDS)
    assert process.returncode == code
    assert "Traceback" not in told


def test_a_reader_that_goes_away_is_no_fault(smollm2: Path) -> None:
    command = [*COMMAND, "run", str(smollm2), "--raw", "-p", "1, 2, 3,", "--context", "4096"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(SECONDS) == 1
    assert told == ""


def test_named_tuples_inside_a_dataclass_keep_their_names_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(StepResult(3, (SampledToken(7, 5, float("-inf"), ((5, -0.5),)),)))
    token = {"seq_id": 7, "token_id": 5, "logprob": "-inf", "top_logprobs": [[5, -0.5]]}
    assert json.loads(capsys.readouterr().out) == {"step_id": 3, "tokens": [token]}
