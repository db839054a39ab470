"""What launch.sh runs on each host: `python -m shardline.cluster.node_tool COMMAND`. Its users are scripts, not people.

versions                    the versions that every node must share, on one line
make-token                  print Ray's token of this user; make one first if there is none
take-token                  read a token from standard input and keep it, readable for this user only
wait ADDRESS SECONDS NAME=IP ...
                            wait until nodes with these IPs have joined; names those that have not
running MARK                print how many processes of this user have SHARDLINE_LAUNCHED=MARK in their environment
stop MARK                   end them, and print how many there were
"""

from __future__ import annotations

import os
import platform
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shardline._version import __version__

MARK_VARIABLE = "SHARDLINE_LAUNCHED"
_TERM_SECONDS = 4.0


def versions() -> str:
    """Ray's, shardline's and Python's: all three must be equal on all nodes of a Ray cluster."""
    import ray

    return f"ray {ray.__version__}, shardline {__version__}, Python {'.'.join(platform.python_version_tuple()[:2])}"


def token_path() -> Path:
    """Where Ray looks for its token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def make_token() -> str:
    """This user's token, made if there is none."""
    path = token_path()
    if path.is_file() and (token := path.read_text().strip()):
        path.chmod(0o600)
        return token
    token = secrets.token_hex(32)
    take_token(token)
    return token


def take_token(token: str) -> None:
    """Keep a token. Never readable for others, not even for a moment, and never half written."""
    path = token_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_file() and path.read_text().strip() == token:
        path.chmod(0o600)
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix="auth_token.")
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    os.replace(name, path)


def wait_for_nodes(
    address: str, expected: Mapping[str, str], seconds: float, say: Callable[[str], object]
) -> dict[str, str]:
    """Wait until every node has joined a cluster.

    Args:
        address: The head's "host:port".
        expected: Name of each host by its IP address.
        seconds: How long.
        say: Is told of each arrival.

    Returns:
        Those that have not joined: name by IP address.
    """
    from shardline.cluster.ray_runtime import connected, describe_cluster

    missing = dict(expected)
    deadline = time.monotonic() + seconds
    with connected(address):
        while True:
            for node in describe_cluster():
                name = missing.pop(node.address, None)
                if name is not None:
                    say(f"{name} ({node.address}) has joined: {node.cpus:g} CPUs, {node.gpus:g} GPUs")
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.25)


def marked_processes(mark: str) -> list[int]:
    """Processes of this user that were started with the mark, in no order; never this one."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def stop(mark: str, seconds: float = _TERM_SECONDS) -> int:
    """End what was started with the mark; those that do not end when asked are killed. Returns how many there were.

    Raises RuntimeError if some cannot be ended.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + seconds
    while processes := marked_processes(mark):
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + seconds:
            raise RuntimeError(f"{platform.node()}: processes {processes} cannot be ended")
        for pid in processes:
            if late or pid not in ended:
                ended.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)
    return len(ended)


def main(arguments: Sequence[str]) -> int:
    """Run one command; 1 means that it did not reach its end."""
    match list(arguments):
        case ["versions"]:
            sys.stdout.write(f"{versions()}\n")
        case ["make-token"]:
            sys.stdout.write(make_token())
        case ["take-token"]:
            take_token(sys.stdin.read().strip())
        case ["wait", address, seconds, *hosts]:
            expected = {ip: name for name, _, ip in (host.rpartition("=") for host in hosts)}
            missing = wait_for_nodes(address, expected, float(seconds), lambda line: sys.stderr.write(f"{line}\n"))
            for ip, name in missing.items():
                sys.stderr.write(f"{name} ({ip}) has not joined within {seconds} s\n")
            return 1 if missing else 0
        case ["running", mark]:
            sys.stdout.write(f"{len(marked_processes(mark))}\n")
        case ["stop", mark]:
            sys.stdout.write(f"{stop(mark)}\n")
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
