"""How two ends of a data-plane connection make sure of each other before a frame is read.

The side that connects speaks first:

    connector -> HELLO      magic, protocol version, its own index, the index it wants, epoch, plan hash, nonce
    acceptor  -> CHALLENGE  its nonce, and a proof that it knows the key
    connector -> PROOF      a proof of its own
    acceptor  -> WELCOME, or at any point before REFUSAL with a reason

A proof is an HMAC-SHA256 over its side's name, the hello and both nonces, so a recorded one is worth nothing on another
connection and one side's is worth nothing as the other's. Everything has a fixed size except the reason, which has a
bound; nothing is decoded from a peer that has not proved that it knows the key. The stream is neither encrypted nor
signed after that: like Ray's own, it belongs on a network that its owner trusts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from shardline.cluster.errors import TransportError

PROTOCOL_VERSION = 2
ENGINE = -1
"""The engine's index, on both of its ends."""

_MAGIC = b"shardln\n"
_HELLO = struct.Struct("<8sHhhxxI32s32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_WELCOME = b"W"
_REFUSAL = b"R"
_CHALLENGE = b"C"
_MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class Credentials:
    """What both ends must agree on.

    Attributes:
        key: 32 random bytes, drawn by the engine for this pipeline and given to its stages through Ray.
        epoch: Goes up by one with each rewiring: fences processes that outlived an earlier one.
        plan_hash: 32 bytes, of the stages' shares and the checkpoint's fingerprint.
    """

    key: bytes = field(repr=False)
    epoch: int
    plan_hash: bytes


def _proof(key: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, side + hello + nonce, hashlib.sha256)


def _receive_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransportError("the handshake took too long")
        sock.settimeout(left)
        try:
            part = sock.recv(size - len(data))
        except TimeoutError:
            raise TransportError("the handshake took too long") from None
        except OSError as error:
            raise TransportError(f"the connection broke in the handshake: {error}") from error
        if not part:
            raise TransportError(f"the connection was closed in the handshake, {len(data)} of {size} bytes in")
        data += part
    return bytes(data)


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        sock.sendall(data)
    except OSError as error:
        raise TransportError(f"the connection broke in the handshake: {error}") from error


def greet(sock: socket.socket, credentials: Credentials, own: int, peer: int, timeout: float) -> None:
    """The connector's side. Raises TransportError with the acceptor's reason when it refuses."""
    deadline = time.monotonic() + timeout
    hello = _HELLO.pack(
        _MAGIC, PROTOCOL_VERSION, own, peer, credentials.epoch, credentials.plan_hash, secrets.token_bytes(_NONCE_BYTES)
    )
    _send(sock, hello, deadline)
    _expect(sock, _CHALLENGE, deadline)
    nonce = _receive_exactly(sock, _NONCE_BYTES, deadline)
    proof = _receive_exactly(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(credentials.key, b"acceptor", hello, nonce)):
        raise TransportError("the peer that was connected to does not know this pipeline's key")
    _send(sock, _proof(credentials.key, b"connector", hello, nonce), deadline)
    _expect(sock, _WELCOME, deadline)


def _expect(sock: socket.socket, wanted: bytes, deadline: float) -> None:
    answer = _receive_exactly(sock, 1, deadline)
    if answer == wanted:
        return
    if answer == _REFUSAL:
        (size,) = struct.unpack("<H", _receive_exactly(sock, 2, deadline))
        reason = _receive_exactly(sock, min(size, _MAX_REASON), deadline).decode("utf-8", "replace")
        raise TransportError(f"the peer refused the connection: {reason}")
    raise TransportError(f"the peer answered the handshake with {answer!r}: it is not a stage of this version")


def admit(
    sock: socket.socket,
    credentials: Credentials,
    own: int,
    peer: int,
    timeout: float,
    claim: Callable[[], str | None] = lambda: None,
) -> None:
    """The acceptor's side. Tells the connector why it is refused, then raises TransportError with that reason.

    `claim` is asked last, when the peer is known to be the right one; a reason that it returns refuses the peer too.
    """
    deadline = time.monotonic() + timeout
    hello = _receive_exactly(sock, _HELLO.size, deadline)
    magic, version, from_index, to_index, epoch, plan_hash, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise TransportError(f"a stranger connected: its first bytes are {magic!r}")
    if version != PROTOCOL_VERSION:
        refuse(sock, f"protocol version {version}, this end has {PROTOCOL_VERSION}: install one shardline everywhere")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _send(sock, _CHALLENGE + nonce + _proof(credentials.key, b"acceptor", hello, nonce), deadline)
    proof = _receive_exactly(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(credentials.key, b"connector", hello, nonce)):
        refuse(sock, "it does not know this pipeline's key")
    if epoch != credentials.epoch:
        refuse(sock, f"it is of epoch {epoch}, the pipeline is in epoch {credentials.epoch}")
    if plan_hash != credentials.plan_hash:
        refuse(sock, "its plan (the stages' shares and the model file's fingerprint) is another one")
    if (from_index, to_index) != (peer, own):
        refuse(
            sock,
            f"{name(from_index)} wants {name(to_index)}; {name(own)} expects {name(peer)}",
        )
    reason = claim()
    if reason is not None:
        refuse(sock, reason)
    _send(sock, _WELCOME, deadline)


def refuse(sock: socket.socket, reason: str) -> NoReturn:
    """Tell the connector why, as far as it listens, and raise TransportError."""
    text = reason.encode()[:_MAX_REASON]
    try:
        sock.settimeout(1.0)
        sock.sendall(_REFUSAL + struct.pack("<H", len(text)) + text)
    except OSError:
        pass
    raise TransportError(f"a peer was refused: {reason}")


def name(index: int) -> str:
    """An end's name for people."""
    return "the engine" if index == ENGINE else f"stage {index}"
