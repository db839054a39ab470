"""Whether a Ray cluster's head listens at an address: Ray itself would wait for minutes to find out."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from shardline.cluster.errors import EngineNotFoundError

HEAD_SECONDS = 10.0
"""How long a cluster's head may take to accept a connection, and then to say its first word."""

# HTTP/2, which gRPC and so Ray speak (RFC 9113, sections 3.4, 4.1 and 6.5): a client begins with these words and an
# empty SETTINGS frame; a server's first frame is one, too.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4


def require_head(address: str) -> None:
    """Refuse at once an address where nothing listens, or something else than Ray.

    Args:
        address: "host:port"; or "auto" for the cluster in RAY_ADDRESS or the one that was started on this machine last,
            which may have died without a word.

    Raises:
        EngineNotFoundError: no Ray listens there, or it is no address.
    """
    if address == "local":
        return
    told = address
    if address == "auto":
        found = os.environ.get("RAY_ADDRESS") or _last_started()
        if found is None:
            # Ray looks for running processes then, and says at once when there are none.
            return
        told, address = f"auto ({found})", found
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise EngineNotFoundError(f"{told} is no address of a Ray cluster: give auto, local or HOST:PORT")
    host = host.strip("[]")
    # Ray takes a loopback address for this machine, whose head may listen on its other address only.
    hosts = [host]
    if host in ("127.0.0.1", "localhost", "::1"):
        import ray

        # Many of Ray's functions have no types.
        util: Any = ray.util
        hosts.append(util.get_node_ip_address())
    told_why = []
    for name in hosts:
        try:
            refusal = _refusal(name, int(port))
        except OSError as error:
            told_why.append(str(error))
            continue
        if refusal is None:
            return
        told_why.insert(0, f"what listens there is no Ray head: {refusal}")
    raise EngineNotFoundError(
        f"no Ray cluster can be reached at {told}: {told_why[0]}. Give the address of a cluster's head, start one with "
        "cluster/launch.sh (--port for another port), or leave the address out for a local one"
    )


def _last_started() -> str | None:
    """The head's address that `ray start` left on this machine."""
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(temporary) / "ray" / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def _refusal(host: str, port: int) -> str | None:
    """Why what listens there is no Ray head; None if it may be one. Raises OSError where nothing listens."""
    with socket.create_connection((host, port), HEAD_SECONDS) as sock:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            # It waits for a handshake that is Ray's to make.
            return None
        deadline = time.monotonic() + HEAD_SECONDS
        heard = b""
        try:
            sock.sendall(_GREETING)
            while len(heard) < _FRAME_HEADER_BYTES:
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                part = sock.recv(_FRAME_HEADER_BYTES - len(heard))
                if not part:
                    return f"it said {heard!r} and closed the connection"
                heard += part
        except TimeoutError:
            return f"it said {heard!r} in {HEAD_SECONDS:g} s"
        except OSError as error:
            return str(error)
    return None if heard[3] == _SETTINGS and heard[5:] == bytes(4) else f"it said {heard!r}"
