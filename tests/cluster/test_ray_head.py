"""Addresses where no Ray head listens: found out at once, and told with the remedy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from shardline.cluster import EngineNotFoundError, ray_head
from shardline.cluster.ray_head import require_head
from shardline.cluster.ray_runtime import connected

SETTINGS = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + bytes((0, 3, 0, 0, 0, 100))
GOAWAY = bytes((0, 0, 8, 7, 0, 0, 0, 0, 0)) + bytes(8)

Serve = Callable[[bytes, bool], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts something that says a few bytes to each client, and then hangs up or keeps the connection; its address."""
    with ExitStack() as stack:

        def start(words: bytes, hangs_up: bool) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            clients: list[socket.socket] = []

            def run() -> None:
                while True:
                    try:
                        client, _ = server.accept()
                    except OSError:
                        break
                    clients.append(client)
                    # Who knows enough may have hung up already.
                    with suppress(OSError):
                        client.sendall(words)
                        if hangs_up:
                            client.shutdown(socket.SHUT_WR)
                for client in clients:
                    client.close()

            thread = threading.Thread(target=run)
            thread.start()
            stack.callback(thread.join)
            # Wakes the thread, which closing the socket does not.
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            host, port = server.getsockname()
            return f"{host}:{port}"

        yield start


@pytest.mark.parametrize(
    ("words", "hangs_up", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, r"it said b'HTTP/1\.1 '"),
        (b"-ERR unknown command\r\n", False, "it said b'-ERR unkn'"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False, r"it said b'SSH-2\.0-O'"),
        (b"hm", True, "it said b'hm' and closed the connection"),
        (b"", True, "it said b'' and closed the connection"),
        (b"", False, r"it said b'' in 0\.2 s"),
        (GOAWAY, False, "it said"),
    ],
)
def test_another_service_on_the_port_is_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, words: bytes, hangs_up: bool, told: str
) -> None:
    monkeypatch.setattr(ray_head, "HEAD_SECONDS", 0.2 if not words else 60.0)
    address = serve(words, hangs_up)
    with pytest.raises(EngineNotFoundError, match=f"{address}: what listens there is no Ray head: {told}.*launch.sh"):
        require_head(address)
    # So does whoever joins a cluster; that it does not come to Ray shows in the words.
    with pytest.raises(EngineNotFoundError, match="no Ray head"), connected(address):
        pass


def test_what_speaks_as_a_head_does_is_left_to_ray(serve: Serve) -> None:
    require_head(serve(SETTINGS, False))


def test_a_head_that_wants_tls_is_left_to_ray(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    require_head(serve(b"", True))


def test_auto_names_the_cluster_that_was_started_last(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    require_head("auto")
    (tmp_path / "ray").mkdir()
    address = serve(b"HTTP/1.1 400 Bad Request\r\n\r\n", True)
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    with pytest.raises(EngineNotFoundError, match=rf"at auto \({address}\): what listens there is no Ray head"):
        require_head("auto")


@pytest.mark.ray
def test_a_head_is_known_as_one() -> None:
    import ray

    with connected(num_cpus=1):
        require_head(ray.get_runtime_context().gcs_address)
