"""The engine's two ends of the data plane: into the first stage, out of the last. No Ray in here."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from shardline.cluster.errors import TransportError
from shardline.cluster.wire.frames import Frame, FrameKind, FrameLimits
from shardline.cluster.wire.handshake import ENGINE, Credentials
from shardline.cluster.wire.transport import FrameReceiver, FrameSender, Handoff, Listener, connect

MAX_RESULT_BYTES = 16 * 1024 * 1024

SENT_AT_ONCE = 8 * 1024
"""Bytes of a frame that the engine's own thread sends. A few of them never fill a socket's buffers."""


class EngineLink:
    """One epoch of the engine's side: frames in by `send`, frames out by a callback.

    Args:
        host: The engine's own address, where the last stage connects.
        credentials: Of this epoch.
        num_stages: In the pipeline.
        on_frame: Called with each frame that comes out of the last stage, on the link's own thread.
        on_end: Called once with the reason when a channel breaks, on one of the link's threads; not after `close`.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        num_stages: int,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._credentials = credentials
        self._on_frame = on_frame
        self._on_end = on_end
        self._listener = Listener(
            host, credentials, ENGINE, num_stages - 1, FrameLimits(MAX_RESULT_BYTES, max_rows=0, columns=0)
        )
        self._outbox: Handoff[Frame] = Handoff()
        self._lock = threading.Lock()
        self._ended = False
        self._unsent = 0  # frames that the sending thread has not sent yet
        self._sender: FrameSender | None = None
        self._receiver: FrameReceiver | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where the last stage connects."""
        return self._listener.address

    def open(self, first: tuple[str, int], timeout: float) -> None:
        """Connect to the first stage and wait for the last one. Raises TransportError."""
        try:
            sender = connect(first, self._credentials, ENGINE, 0)
            with self._lock:
                self._sender = sender
            receiver = self._listener.accept(timeout)
            with self._lock:
                self._receiver = receiver
                ended = self._ended
        except TransportError:
            self.close()
            raise
        self._listener.close()
        if ended:
            self.close()
            raise TransportError("the pipeline was closed while it was being connected")
        for role, loop in (("engine-send", self._send_loop), ("engine-receive", self._receive_loop)):
            threading.Thread(target=loop, name=f"{role}-{self._credentials.epoch}", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Put a frame on its way; returns at once. What it may hold is bounded by what the caller keeps in flight.

        Called by one thread. A small frame fits into the socket's buffers whatever the stage does, and goes at once:
        waking the sending thread takes longer.
        """
        with self._lock:
            sender = self._sender if self._unsent == 0 and frame.nbytes <= SENT_AT_ONCE else None
            if sender is None:
                self._unsent += 1
        if sender is None:
            self._outbox.put(frame)
            return
        try:
            sender.send(self._credentials.epoch, frame)
        except TransportError as error:
            self._end(str(error))

    def close(self) -> None:
        """Close both channels. Idempotent."""
        with self._lock:
            self._ended = True
            channels = (self._sender, self._receiver)
        self._outbox.close()
        self._listener.close()
        for channel in channels:
            if channel is not None:
                channel.close()

    def _end(self, reason: str) -> None:
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            self._on_end(reason)
        self.close()

    def _send_loop(self) -> None:
        assert self._sender is not None
        try:
            while True:
                self._sender.send(self._credentials.epoch, self._outbox.get())
                with self._lock:
                    self._unsent -= 1
        except TransportError as error:
            self._end(str(error))

    def _receive_loop(self) -> None:
        assert self._receiver is not None
        nothing = np.empty(0, np.uint8)
        try:
            while True:
                frame = self._receiver.receive(self._credentials.epoch, nothing)
                if frame.kind in (FrameKind.STEP, FrameKind.TOKENS):
                    raise TransportError(f"the last stage sent a frame of kind {frame.kind.name} to the engine")
                self._on_frame(frame)
        except TransportError as error:
            self._end(str(error))
