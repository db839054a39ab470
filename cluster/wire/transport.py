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
from shardline.cluster.wire.frames import HEADER_BYTES, Frame, FrameHeader, FrameLimits
from shardline.cluster.wire.handshake import Credentials, admit, greet, name

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


def _paused(error: OSError) -> bool:
    # The socket's own timeout; the kernel's ETIMEDOUT for a peer that is gone is of the same class.
    return isinstance(error, TimeoutError) and error.errno is None


class _Guard:
    """One connected socket that one thread uses and any thread may close.

    The descriptor is given back only when nobody is inside a call on it: its number may belong to the next connection a
    moment later, and a thread that was about to read would read from that one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._used = False
        self._closed = False

    def __enter__(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise ChannelClosedError("closed on this side")
            self._used = True
        return self.sock

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._used = False
            if self._closed:
                self.sock.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            # Only a shutdown wakes a thread that waits in this socket.
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            if not self._used:
                self.sock.close()


class TcpSender:
    """Frames out of a connected socket."""

    def __init__(self, sock: socket.socket, peer: str, stall_seconds: float = STALL_SECONDS) -> None:
        self._guard = _Guard(sock)
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
        with self._guard as sock:
            began = time.perf_counter()
            try:
                while parts:
                    sent = sock.sendmsg(parts)
                    while parts and sent >= len(parts[0]):
                        sent -= len(parts.pop(0))
                    if sent:
                        parts[0] = parts[0][sent:]
            except OSError as error:
                if _paused(error):
                    raise TransportError(f"{self._peer} has not taken a byte for {self._stall:g} s") from None
                raise TransportError(f"sending to {self._peer} failed: {error}") from error
            self.seconds += time.perf_counter() - began

    def close(self) -> None:
        self._guard.close()


class TcpReceiver:
    """Frames out of a connected socket's stream, into memory that the caller owns."""

    def __init__(
        self, sock: socket.socket, peer: str, limits: FrameLimits, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._guard = _Guard(sock)
        self._peer = peer
        self._limits = limits
        self._stall = stall_seconds
        self._header = bytearray(HEADER_BYTES)
        self.seconds = 0.0
        sock.settimeout(stall_seconds)

    def receive(self, epoch: int, slot: Slot) -> Frame:
        with self._guard as sock:
            self._fill(sock, memoryview(self._header), between_frames=True)
            began = time.perf_counter()
            header = FrameHeader.unpack(self._header, self._limits, epoch)
            meta = bytearray(header.meta_bytes)
            self._fill(sock, memoryview(meta))
            hidden = None
            if header.rows:
                data = slot[: header.payload_bytes]
                self._fill(sock, data.data)
                hidden = data.view(np.float32).reshape(header.rows, header.columns)
            self.seconds += time.perf_counter() - began
            return Frame(header.kind, header.step_id, meta, hidden)

    def _fill(self, sock: socket.socket, view: memoryview, *, between_frames: bool = False) -> None:
        got = 0
        while got < len(view):
            try:
                part = sock.recv_into(view[got:])
            except OSError as error:
                if _paused(error):
                    if between_frames and got == 0:
                        continue
                    raise TransportError(f"{self._peer} stopped in mid-frame for {self._stall:g} s") from None
                raise TransportError(f"receiving from {self._peer} failed: {error}") from error
            if part == 0:
                if between_frames and got == 0:
                    raise ChannelClosedError(f"{self._peer} closed the connection")
                raise TransportError(f"{self._peer} closed the connection in mid-frame")
            got += part

    def close(self) -> None:
        self._guard.close()


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
        self._claimed = False
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
                self._admitted.close()
                self._admitted = None
            self._changed.notify_all()
        # Wakes the listening thread, which alone closes the socket.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._closed:
                    self._sock.close()
                    return
                # A peer that gave up in the queue, or this process is out of descriptors for the moment.
                time.sleep(0.05)
                continue
            if not self._candidates.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._examine, args=(sock,), name="handshake", daemon=True).start()

    def _examine(self, sock: socket.socket) -> None:
        claimed = False

        def claim() -> str | None:
            nonlocal claimed
            with self._changed:
                if self._claimed or self._closed:
                    return f"{name(self._peer)} is connected already"
                self._claimed = claimed = True
            return None

        try:
            _prepare(sock)
            admit(sock, self._credentials, self._own, self._peer, self._handshake_seconds, claim)
            with self._changed:
                if self._closed:
                    raise TransportError("the listener was closed")
                self._admitted = sock
                self._changed.notify_all()
        except (TransportError, OSError) as error:
            # Before the candidate can see that it was refused.
            with self._changed:
                self._refusals.append(str(error))
                if claimed:
                    self._claimed = False
            sock.close()
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
            sock.close()
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
