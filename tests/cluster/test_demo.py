"""The demonstration, `run` and `serve` over a real local Ray: what they show, and that nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardline.cluster.demo import MEMORY_MIB, PROMPTS

pytestmark = pytest.mark.ray

COMMAND = [sys.executable, "-c", "import sys; from shardline.cluster.cli import main; sys.exit(main())"]
SECONDS = 280


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Something in the environment by which the processes of a test are known, whoever their parent is."""
    mark = f"SHARDLINE_TEST_MARK={tmp_path}"
    yield mark
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> dict[int, str]:
    """Processes that have the mark: their pids and command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def left_over(mark: str) -> dict[int, str]:
    """What still runs after a fair while."""
    deadline = time.monotonic() + 60
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@contextmanager
def started(mark: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that is killed at the end if it still runs."""
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_the_demonstration(smollm2: Path, mark: str) -> None:
    with started(mark, "demo", "--max-tokens", "12") as process:
        shown, told = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, told
    for prompt in PROMPTS:
        assert f"> {prompt}\n" in shown
    rows = re.findall(
        r"^([012]) +\S.*, process (\d+) +(\d+)-(\d+)[ a-z]* +(\d+) MiB of (\d+) +(\d+) / (\d+) +(\d+) % +(\d+)$",
        shown,
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["0", "1", "2"]
    pids, first, last, resident, limit, used, total, busy, rate = zip(*(map(int, row[1:]) for row in rows), strict=True)
    assert len(set(pids)) == 3
    assert (first[0], *last) == (0, first[1] - 1, first[2] - 1, 29)
    assert limit == MEMORY_MIB
    assert all(have <= may for have, may in zip(resident, limit, strict=True))
    assert len({end - begin for begin, end in zip(first, last, strict=True)}) == 3
    assert all(0 < some <= every for some, every in zip(used, total, strict=True))
    assert all(0 < share <= 100 for share in busy)
    assert all(value > 0 for value in rate)
    assert re.search(r"aggregate: \d+ tokens in [\d.]+ s, \d+ tokens/s", shown)
    assert "time to first token" in shown
    # Ray's own talk is kept away.
    assert "raylet" not in told
    assert "Traceback" not in told
    assert left_over(mark) == {}


def test_run_over_stages_leaves_nothing_after_ctrl_c(smollm2: Path, mark: str) -> None:
    arguments = ["run", str(smollm2), "--split", "12,10,8", "--context", "2048", "--raw", "-p", "1, 2, 3,"]
    with started(mark, *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        assert len([line for line in marked(mark).values() if "StageActor" in line]) == 3
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert left_over(mark) == {}


def test_serve_until_terminated(smollm2: Path, mark: str) -> None:
    script = (
        "import sys; from shardline import Client, SamplingParams\n"
        "with Client.connect(sys.argv[1], name='test') as client:\n"
        "    stream = client.submit([{'role': 'user', 'content': 'Say hello.'}], SamplingParams(max_tokens=4))\n"
        "    sys.stdout.write(stream.text())\n"
    )
    arguments = ["serve", str(smollm2), "--address", "local", "--stages", "2", "--context", "256", "--name", "test"]
    with started(mark, *arguments) as process:
        assert process.stderr is not None
        address = None
        for line in process.stderr:
            if (found := re.search(r"Client\.connect\('([^']+)', name='test'\)", line)) is not None:
                address = found[1]
                break
        assert address is not None
        asked = subprocess.run(
            [sys.executable, "-c", script, address], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert (asked.returncode, asked.stdout != "") == (0, True), asked.stderr
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=SECONDS)
    assert process.returncode == 143
    assert "Traceback" not in told
    assert left_over(mark) == {}
