"""Streams of frames between neighbours: the interface, and TCP.

A channel carries frames one way, in order, and fails for good: there is no reconnection inside an epoch. What is above
it (stage_worker.py, engine_link.py) knows only `FrameSender`, `FrameReceiver` and `Listener`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardline.cluster.errors import TransportError
from shardline.cluster.frames import HEADER_BYTES, Frame, FrameHeader, FrameLimits
from shardline.cluster.handshake import Credentials, admit, greet, name, refuse

HANDSHAKE_SECONDS = 5.0
STALL_SECONDS = 10.0
"""The longest pause inside a frame, sending or receiving; between frames a channel waits for as long as it takes."""

_DEAD_PEER_MS = 4000
_MAX_CANDIDATES = 16

Slot = NDArray[np.uint8]
"""Memory for one frame's payload."""


class ChannelClosedError(TransportError):
    """The peer, or this side, closed the channel between two frames."""


class FrameSender(Protocol):
    """The sending end. One thread calls `send`; any thread may call `close`."""

    seconds: float
    """Time spent moving frames."""

    def send(self, epoch: int, frame: Frame) -> None:
        """Send a whole frame, waiting while the peer has no room. Raises TransportError."""
        ...

    def close(self) -> None:
        """Close it; a `send` in progress fails."""
        ...


class FrameReceiver(Protocol):
    """The receiving end. One thread calls `receive`; any thread may call `close`."""

    seconds: float
    """Time spent moving frames, not waiting for them."""

    def receive(self, epoch: int, slot: Slot) -> Frame:
        """The next frame, its rows in `slot`. Raises ChannelClosedError between frames, else TransportError."""
        ...

    def close(self) -> None:
        """Close it; a `receive` in progress fails."""
        ...


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that is gone is noticed in about 4 s, idle (keepalive) or not (user timeout).
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_MS)


def _close(sock: socket.socket) -> None:
    # Only a shutdown wakes a thread that waits in this socket; a close alone does not.
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class TcpSender:
    """Frames out of a connected socket."""

    def __init__(self, sock: socket.socket, peer: str, stall_seconds: float = STALL_SECONDS) -> None:
        self._sock = sock
        self._peer = peer
        self._stall = stall_seconds
        self.seconds = 0.0
        sock.settimeout(stall_seconds)

    def send(self, epoch: int, frame: Frame) -> None:
        rows, columns = frame.hidden.shape if frame.hidden is not None and frame.hidden.size else (0, 0)
        header = FrameHeader(frame.kind, epoch, frame.step_id, len(frame.meta), rows, columns)
        parts = [memoryview(header.pack()), memoryview(frame.meta)]
        if rows:
            assert frame.hidden is not None
            assert frame.hidden.dtype == np.float32
            assert frame.hidden.flags.c_contiguous
            parts.append(frame.hidden.reshape(-1).view(np.uint8).data)
        began = time.perf_counter()
        try:
            while parts:
                sent = self._sock.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except TimeoutError:
            raise TransportError(f"{self._peer} has not taken a byte for {self._stall:g} s") from None
        except OSError as error:
            raise TransportError(f"sending to {self._peer} failed: {error}") from error
        self.seconds += time.perf_counter() - began

    def close(self) -> None:
        _close(self._sock)


class TcpReceiver:
    """Frames out of a connected socket's stream, into memory that the caller owns."""

    def __init__(
        self, sock: socket.socket, peer: str, limits: FrameLimits, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._sock = sock
        self._peer = peer
        self._limits = limits
        self._stall = stall_seconds
        self._header = bytearray(HEADER_BYTES)
        self.seconds = 0.0
        sock.settimeout(stall_seconds)

    def receive(self, epoch: int, slot: Slot) -> Frame:
        self._fill(memoryview(self._header), between_frames=True)
        began = time.perf_counter()
        header = FrameHeader.unpack(self._header, self._limits, epoch)
        meta = bytearray(header.meta_bytes)
        self._fill(memoryview(meta))
        hidden = None
        if header.rows:
            data = slot[: header.payload_bytes]
            self._fill(data.data)
            hidden = data.view(np.float32).reshape(header.rows, header.columns)
        self.seconds += time.perf_counter() - began
        return Frame(header.kind, header.step_id, meta, hidden)

    def _fill(self, view: memoryview, *, between_frames: bool = False) -> None:
        got = 0
        while got < len(view):
            try:
                part = self._sock.recv_into(view[got:])
            except TimeoutError:
                if between_frames and got == 0:
                    continue
                raise TransportError(f"{self._peer} stopped in the middle of a frame for {self._stall:g} s") from None
            except OSError as error:
                raise TransportError(f"receiving from {self._peer} failed: {error}") from error
            if part == 0:
                if between_frames and got == 0:
                    raise ChannelClosedError(f"{self._peer} closed the connection")
                raise TransportError(f"{self._peer} closed the connection in the middle of a frame")
            got += part

    def close(self) -> None:
        _close(self._sock)


class Listener:
    """Waits at an address for one rightful peer and refuses everyone else with a reason.

    Each candidate is examined on a thread of its own, so that a stranger who connects and says nothing cannot keep the
    rightful peer waiting; at most `_MAX_CANDIDATES` are examined at a time.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        own: int,
        peer: int,
        limits: FrameLimits,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        try:
            self._sock = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_MAX_CANDIDATES
            )
        except OSError as error:
            raise TransportError(
                f"cannot listen at {host}: {error}. Set SHARDLINE_HOST_IP on that host to one of its own addresses"
            ) from error
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        self._credentials = credentials
        self._own = own
        self._peer = peer
        self._limits = limits
        self._handshake_seconds = handshake_seconds
        self._candidates = threading.Semaphore(_MAX_CANDIDATES)
        self._changed = threading.Condition()
        self._admitted: socket.socket | None = None
        self._given = False
        self._closed = False
        self._refusals: deque[str] = deque(maxlen=4)
        threading.Thread(target=self._listen, name="accept", daemon=True).start()

    def accept(self, timeout: float) -> TcpReceiver:
        """Wait for the peer. Raises TransportError, naming who was refused meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._admitted is not None or self._closed, timeout)
            if self._admitted is None:
                what = "the listener was closed" if self._closed else f"{name(self._peer)} did not connect"
                others = f"; {'; '.join(self._refusals)}" if self._refusals else ""
                raise TransportError(f"{what} to {name(self._own)} within {timeout:g} s{others}")
            assert not self._given
            self._given = True
            return TcpReceiver(self._admitted, name(self._peer), self._limits)

    def close(self) -> None:
        """Stop listening. A connection that `accept` has given away is not touched."""
        with self._changed:
            self._closed = True
            if self._admitted is not None and not self._given:
                _close(self._admitted)
                self._admitted = None
            self._changed.notify_all()
        _close(self._sock)

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            if not self._candidates.acquire(blocking=False):
                _close(sock)
                continue
            threading.Thread(target=self._examine, args=(sock,), name="handshake", daemon=True).start()

    def _examine(self, sock: socket.socket) -> None:
        try:
            _prepare(sock)
            admit(sock, self._credentials, self._own, self._peer, self._handshake_seconds)
            with self._changed:
                if self._admitted is not None or self._closed:
                    refuse(sock, f"{name(self._peer)} is connected already")
                self._admitted = sock
                self._changed.notify_all()
        except (TransportError, OSError) as error:
            _close(sock)
            with self._changed:
                self._refusals.append(str(error))
        finally:
            self._candidates.release()


def connect(
    address: tuple[str, int],
    credentials: Credentials,
    own: int,
    peer: int,
    handshake_seconds: float = HANDSHAKE_SECONDS,
) -> TcpSender:
    """Connect to a peer's listener. Raises TransportError with the address and the peer's reason."""
    sock = None
    try:
        sock = socket.create_connection(address, timeout=handshake_seconds)
        _prepare(sock)
        greet(sock, credentials, own, peer, handshake_seconds)
    except (TransportError, OSError) as error:
        if sock is not None:
            _close(sock)
        raise TransportError(
            f"{name(own)} cannot connect to {name(peer)} at {address[0]}:{address[1]}: {error}"
        ) from error
    return TcpSender(sock, name(peer))


T = TypeVar("T")


class Handoff(Generic[T]):
    """A queue between two threads that can be closed, which wakes both. Bounded by what its users put in."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._closed = False

    def put(self, item: T) -> None:
        """Add an item; dropped silently once closed."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify()

    def get(self) -> T:
        """Wait for an item. Raises ChannelClosedError once closed, even with items left."""
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ChannelClosedError("closed on this side")
            return self._items.popleft()

    def close(self) -> None:
        """Wake everyone and drop what is left."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
