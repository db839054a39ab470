"""launch.sh on one machine: the worker lives in a network namespace of its own, reached by a stand-in for ssh."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import shardline.cluster
from shardline.cluster import node_tool

LAUNCH = Path(shardline.cluster.__file__).parent / "launch.sh"


def run(*arguments: object, check: bool = True, timeout: float = 280, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "SHARDLINE_PYTHON": sys.executable, **env},
        stdin=subprocess.DEVNULL,
    )
    assert not check or done.returncode == 0, f"{done.args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def script(path: Path, text: str) -> Path:
    path.write_text("#!/usr/bin/env bash\n" + textwrap.dedent(text))
    path.chmod(0o755)
    return path


# -- what needs no cluster -------------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    run(shellcheck, LAUNCH)


def test_help_says_what_to_write_and_how_to_undo_it():
    text = run(LAUNCH, "--help").stdout
    for word in ("HOSTS_FILE", "[user@]host [address]", "--down", "--print", "--head-ip", "SHARDLINE_SSH"):
        assert word in text


@pytest.mark.parametrize(
    ("hosts", "options", "words"),
    [
        ("", (), "lists no host"),
        ("# nothing\n\n   # here\n", (), "lists no host"),
        ("-oProxyCommand=x 10.9.9.9", (), "hosts:1: not a host: -oProxyCommand=x"),
        ("fine 10.9.9.9\na;b 10.9.9.8", (), "hosts:2: not a host: a;b"),
        ("a b c", (), "hosts:1: too many words"),
        ("a $(reboot)", (), "not an IP address: $(reboot)"),
        ("no-such-name.invalid", (), "the name no-such-name.invalid is not known here"),
        ("localhost", (), "where other hosts cannot reach it"),
        ("a 10.9.9.9\nb 10.9.9.9", (), "hosts:2: two hosts with the address 10.9.9.9"),
        ("a 10.9.9.9", ("--head-ip", "10.9.9.9"), "10.9.9.9 is this machine"),
        ("a 10.9.9.9", ("--port", "70000x"), "--port 70000x is not a port"),
        ("a 10.9.9.9", ("--port", "65536"), "--port 65536 is not a port"),
        ("a 10.9.9.9", ("--timeout", "soon"), "--timeout soon is not a number"),
        ("a 10.9.9.9", ("--python", "/no/such/python"), "there is no /no/such/python here"),
        ("a 10.9.9.9", ("--python", "/a b/python"), "characters that a remote shell would change"),
        ("a 10.9.9.9", ("--what",), "unknown option --what"),
        ("a 10.9.9.9", ("--port",), "--port needs a value"),
    ],
)
def test_a_mistake_is_named_before_anything_is_started(tmp_path, hosts, options, words):
    (tmp_path / "hosts").write_text(hosts)
    ssh = script(tmp_path / "ssh", "touch called")
    done = run(LAUNCH, tmp_path / "hosts", *options, check=False, SHARDLINE_SSH=str(ssh))
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert not (tmp_path / "called").exists()


def test_print_gives_the_two_commands_and_starts_nothing(tmp_path):
    (tmp_path / "hosts").write_text("me@gpu-box 10.9.9.9 # in the cellar\n")
    done = run(LAUNCH, "--print", "--head-ip", "10.9.9.1", "--port", "7000", tmp_path / "hosts", SHARDLINE_SSH="false")
    head, worker = (line.strip() for line in done.stdout.splitlines() if " start --" in line)
    ray = Path(sys.executable).parent / "ray"
    assert f"{ray} start --head --node-ip-address=10.9.9.1 --port=7000" in head
    assert f"{ray} start --address=10.9.9.1:7000 --node-ip-address=10.9.9.9" in worker
    for command in (head, worker):
        assert "RAY_AUTH_MODE=token" in command
        assert "RAY_worker_niceness=0" in command
        assert "RAY_health_check_period_ms=" in command


def test_a_folder_is_no_hosts_file(tmp_path):
    done = run(LAUNCH, tmp_path, check=False, SHARDLINE_SSH="false")
    assert (done.returncode, done.stderr) == (1, f"launch.sh: {tmp_path} is a folder, not a file of hosts\n")


def test_the_printed_commands_begin_with_the_token_that_ray_wants(tmp_path):
    (tmp_path / "hosts").write_text("gpu-box 10.9.9.9\n")
    done = run(LAUNCH, "--print", "--head-ip", "10.9.9.1", tmp_path / "hosts", SHARDLINE_SSH="false")
    commands = [line.strip() for line in done.stdout.splitlines() if line.startswith("    ")]
    home = tmp_path / "home"
    home.mkdir()
    run("bash", "-c", commands[0], HOME=str(home), RAY_AUTH_TOKEN_PATH="")
    token = home / ".ray" / "auth_token"
    assert token.read_text()
    assert token.stat().st_mode & 0o777 == 0o600


def test_the_settings_are_those_of_a_local_cluster():
    from shardline.cluster.ray_runtime import SETTINGS

    text = LAUNCH.read_text()
    for name, value in SETTINGS.items():
        assert f"{name}={value}" in text


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        (
            "echo ray 1.0.0, shardline 0.0.1, Python 3.9",
            "other has ray 1.0.0, shardline 0.0.1, Python 3.9; this machine has",
        ),
        ("echo No module named shardline >&2; exit 1", "No module named shardline"),
    ],
)
def test_a_host_with_other_versions_is_named_with_both(tmp_path, versions, words):
    (tmp_path / "hosts").write_text("other 10.9.9.9\n")
    ssh = script(tmp_path / "ssh", f'case $2 in *" versions") {versions};; *) exit 7;; esac')
    done = run(
        LAUNCH, "--head-ip", "10.9.9.1", tmp_path / "hosts", check=False, SHARDLINE_SSH=str(ssh), HOME=str(tmp_path)
    )
    assert done.returncode == 1
    assert words in done.stderr
    assert not (tmp_path / ".ray").exists()


# -- the tool that runs on each host -----------------------------------------------------------------------------------


def test_a_token_is_kept_for_this_user_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    token = node_tool.make_token()
    path = tmp_path / ".ray" / "auth_token"
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)  # as Ray itself leaves it
    assert node_tool.make_token() == token
    assert path.stat().st_mode & 0o777 == 0o600
    node_tool.take_token("f" * 64)
    assert path.read_text() == "f" * 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["auth_token"]


def test_stop_ends_what_has_the_mark_and_nothing_else():
    def sleeper(mark: str, stubborn: bool) -> subprocess.Popen[bytes]:
        code = "import signal, sys, time\n"
        code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
        code += "sys.stdout.write('up'); sys.stdout.flush(); time.sleep(100)"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, node_tool.MARK_VARIABLE: mark}
        )
        assert process.stdout is not None
        assert process.stdout.read(2) == b"up"
        return process

    mark = f"test-{os.getpid()}"
    with sleeper(mark, False) as ours, sleeper(mark, True) as stubborn, sleeper(mark + "0", False) as other:
        assert sorted(node_tool.marked_processes(mark)) == sorted([ours.pid, stubborn.pid])
        assert node_tool.stop(mark, seconds=2.0) == 2
        assert ours.wait(60) == -signal.SIGTERM
        assert stubborn.wait(60) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


# -- a cluster of two nodes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """This machine and one more, which is a network namespace.

    Attributes:
        head, worker: Their addresses.
        env: For launch.sh and for what uses the cluster: a home and a Ray folder of their own.
        folder: For files.
        mark: Of what launch.sh starts.
    """

    head: str
    worker: str
    env: dict[str, str]
    folder: Path
    mark: str


_numbers = itertools.count()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command 'ip' (package iproute2)")
    # A namespace and its link go away some time after they were deleted: each test has others.
    number = next(_numbers)
    name = f"sl{os.getpid() % 100000}x{number}"
    subnet = f"10.213.{(os.getpid() + number) % 251}"
    head, worker = f"{subnet}.1", f"{subnet}.2"
    mark = f"{head}:6399"
    if run("ip", "netns", "add", name, check=False).returncode != 0:
        pytest.skip("this machine does not allow network namespaces")
    # Ray's sockets have paths of 107 characters at most.
    ray_folder = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))
    try:
        run("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        run("ip", "addr", "add", f"{head}/30", "dev", f"{name}a")
        run("ip", "link", "set", f"{name}a", "up")
        run("ip", "-n", name, "addr", "add", f"{worker}/30", "dev", f"{name}b")
        run("ip", "-n", name, "link", "set", f"{name}b", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        # A host of its own has shared memory of its own, too.
        ssh = script(
            tmp_path / "ssh",
            f"""
            [[ $1 == me@worker ]] || {{ echo "Could not resolve hostname $1" >&2; exit 255; }}
            exec ip netns exec {name} unshare -m sh -c 'mount -t tmpfs tmpfs /dev/shm && exec sh -c "$1"' sh "$2"
            """,
        )
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        env = {
            "SHARDLINE_SSH": str(ssh),
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": cache,
            "RAY_TMPDIR": str(ray_folder),
        }
        yield Hosts(head, worker, env, tmp_path, mark)
    finally:
        node_tool.stop(mark)
        run("ip", "netns", "del", name)
        shutil.rmtree(ray_folder)


@pytest.mark.ray
def test_a_cluster_comes_up_serves_and_goes_down(hosts: Hosts, smollm2: Path):
    hosts_file = hosts.folder / "hosts"
    hosts_file.write_text(f"# the other box\n\nme@worker {hosts.worker}\n")
    up = run(LAUNCH, "--port", "6399", hosts_file, **hosts.env)
    assert f"this-machine ({hosts.head}) has joined" in up.stderr
    assert f"me@worker ({hosts.worker}) has joined" in up.stderr
    assert f"All 2 nodes have joined the cluster at {hosts.mark}" in up.stdout
    assert (hosts.folder / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600

    again = run(LAUNCH, "--port", "6399", hosts_file, check=False, **hosts.env)
    assert again.returncode == 1
    assert "a cluster that launch.sh started runs at" in again.stderr
    assert node_tool.marked_processes(hosts.mark), "a second launch must not take down the first one's cluster"

    stranger = run(sys.executable, "-c", STRANGER, hosts.mark, check=False, **{**hosts.env, "HOME": "/nonexistent"})
    assert "joined" not in stranger.stdout

    user = run(sys.executable, "-c", USER, smollm2, hosts.head, hosts.worker, **hosts.env)
    assert user.stdout.endswith("same bytes\n"), user.stdout

    (down_command,) = (line.split() for line in up.stdout.splitlines() if "--down" in line)
    down = run(*down_command, **hosts.env)
    assert "Stopped what launch.sh started" in down.stdout
    assert node_tool.marked_processes(hosts.mark) == []


@pytest.mark.ray
def test_a_host_that_does_not_join_is_named_and_nothing_is_left(hosts: Hosts):
    """It answers to ssh, and its Ray seems to start; but it never reaches the head."""
    ssh = script(
        hosts.folder / "ssh2",
        f"""
        if [[ $1 == lost && $2 == *"ray start"* ]]; then exit 0; fi
        if [[ $1 == lost ]]; then exec {hosts.env["SHARDLINE_SSH"]} me@worker "$2"; fi
        exec {hosts.env["SHARDLINE_SSH"]} "$@"
        """,
    )
    hosts_file = hosts.folder / "hosts"
    hosts_file.write_text(f"me@worker {hosts.worker}\nlost 10.99.99.99\n")
    options = ("--port", "6399", "--timeout", "3")
    done = run(LAUNCH, *options, hosts_file, check=False, **{**hosts.env, "SHARDLINE_SSH": str(ssh)})
    assert done.returncode == 1
    assert "lost (10.99.99.99) has not joined within 3 s" in done.stderr
    assert f"me@worker ({hosts.worker}) has joined" in done.stderr
    assert "not all hosts have joined; everything was stopped again" in done.stderr
    assert node_tool.marked_processes(hosts.mark) == []


def test_a_host_that_ssh_cannot_reach_is_named(hosts: Hosts):
    hosts_file = hosts.folder / "hosts"
    hosts_file.write_text(f"me@worker {hosts.worker}\nghost 10.99.99.99\n")
    done = run(LAUNCH, "--port", "6399", hosts_file, check=False, **hosts.env)
    assert done.returncode == 1
    assert "ghost: failed:" in done.stderr
    assert "Could not resolve hostname ghost" in done.stderr
    assert "me@worker: failed" not in done.stderr
    assert node_tool.marked_processes(hosts.mark) == []


STRANGER = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
sys.stdout.write("joined")
"""

USER = """
import asyncio, sys
from shardline.cluster import Request
from shardline.cluster.build import EngineOptions, build_engine, prepare
from shardline.cluster.ray_runtime import connected, describe_cluster
from shardline.scheduler import SamplingParams

model, head, worker = sys.argv[1:]
OPTIONS = dict(model=model, context=256, concurrency=2, threads=1, max_step_tokens=64, prefill_chunk=64)

async def answer(engine):
    try:
        await engine.start()
        request = Request(text="The capital of France is", params=SamplingParams(max_tokens=12, logprobs=1, seed=1))
        deltas = [delta async for delta in engine.generate(request)]
        fleet = getattr(engine._pipeline, "_fleet", None)
        return [(d.token_ids, d.logprobs) for d in deltas if d.token_ids], fleet and fleet.nodes()
    finally:
        await engine.close()

def joined(answer):
    return [sum((part[i] for part in answer), ()) for i in (0, 1)]

with connected("auto"):
    nodes = describe_cluster()
    assert [node.address for node in nodes] == [head, worker], nodes
    assert nodes[0].is_this and not nodes[1].is_this
    prepared = prepare(EngineOptions(address="auto", **OPTIONS))
    assert sorted(prepared.node_ids) == sorted(node.node_id for node in nodes), prepared.node_ids
    split, placed = asyncio.run(answer(build_engine(prepared)))
    assert placed == list(prepared.node_ids)
whole, _ = asyncio.run(answer(build_engine(prepare(EngineOptions(stages=1, **OPTIONS)))))
assert joined(split) == joined(whole), (split, whole)
sys.stdout.write("same bytes\\n")
"""
