"""What travels between the engine and the stages: one frame a step, with its plan and its hidden states.

A frame is a fixed header, `meta_bytes` of encoded message, and `rows * columns` float32 values, little-endian. Lengths
are checked against what the receiver expects before anything is allocated or decoded; and nothing is decoded before
the peer has proved that it knows the pipeline's key (see handshake.py).
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.cluster.errors import TransportError
from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SequenceStart, StepPlan, StepResult, plan_of_columns, result_of_columns

_MAGIC = b"SLfr"
_HEADER = struct.Struct("<4sB3xIQIII")
HEADER_BYTES = _HEADER.size
MAX_FAILURE_TEXT = 16 * 1024


class FrameKind(IntEnum):
    """What a frame carries."""

    STEP = 1  # a StepPlan, and the hidden states of its rows on every hop but the first
    RESULT = 2  # a StepResult, from the last stage to the engine
    FAILURE = 3  # a StageFailure, in the place of the step that met it
    PROBE = 4  # one byte for each stage that it passed: its index
    TOKENS = 5  # the tokens that a step sampled, int32, from the last stage to the first


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a receiver takes.

    Attributes:
        max_meta_bytes: The longest encoded message.
        max_rows: The most rows of hidden states; 0 where none are expected (into the first stage, into the engine).
        columns: The hidden size, exactly.
    """

    max_meta_bytes: int
    max_rows: int
    columns: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest payload."""
        return self.max_rows * self.columns * 4


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The fixed part of a frame."""

    kind: FrameKind
    epoch: int
    step_id: int
    meta_bytes: int
    rows: int
    columns: int

    @property
    def payload_bytes(self) -> int:
        """Bytes after the message."""
        return self.rows * self.columns * 4

    def pack(self) -> bytes:
        """As it goes over the wire."""
        return _HEADER.pack(_MAGIC, self.kind, self.epoch, self.step_id, self.meta_bytes, self.rows, self.columns)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, limits: FrameLimits, epoch: int) -> FrameHeader:
        """Read and check a header. Raises TransportError, so that no unchecked length is ever acted on."""
        magic, kind, frame_epoch, step_id, meta_bytes, rows, columns = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise TransportError(f"a frame starts with {bytes(magic)!r}: the stream is out of step")
        if frame_epoch != epoch:
            raise TransportError(f"a frame of epoch {frame_epoch} came in epoch {epoch}")
        try:
            kind = FrameKind(kind)
        except ValueError:
            raise TransportError(f"a frame of unknown kind {kind}") from None
        if meta_bytes > limits.max_meta_bytes:
            raise TransportError(f"a frame's message of {meta_bytes} bytes is over the limit {limits.max_meta_bytes}")
        if rows > limits.max_rows:
            raise TransportError(f"a frame of {rows} rows is over the limit {limits.max_rows}")
        if columns != (limits.columns if rows else 0):
            raise TransportError(f"a frame's rows have {columns} columns instead of {limits.columns}")
        if rows and kind is not FrameKind.STEP:
            raise TransportError(f"a frame of kind {kind.name} carries {rows} rows")
        return cls(kind, frame_epoch, step_id, meta_bytes, rows, columns)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame in memory: `meta` is the encoded message, `hidden` float32 [rows, columns] or None."""

    kind: FrameKind
    step_id: int
    meta: bytes | bytearray
    hidden: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the message and the rows."""
        return len(self.meta) + (0 if self.hidden is None else self.hidden.nbytes)


@dataclass(frozen=True, slots=True)
class StageFailure:
    """An exception inside a stage, in place of the step's result.

    Attributes:
        stage: Where.
        error: The exception's class name.
        text: The exception's own words, and where in the code it was raised.
        keeps_state: The stage is as it was before the step; otherwise it is not to be trusted any more.
    """

    stage: int
    error: str
    text: str
    keeps_state: bool


def encode_tokens(result: StepResult) -> bytes:
    """What of a result goes to the first stage: int32 [tokens], in the plan's order."""
    return np.array([token.token_id for token in result.tokens], "<i4").tobytes()


def decode_tokens(data: bytes | bytearray) -> list[int]:
    """A TOKENS frame's message. Raises TransportError."""
    if len(data) % 4:
        raise TransportError(f"tokens of {len(data)} bytes came, where each has 4")
    tokens: list[int] = np.frombuffer(data, "<i4").tolist()
    return tokens


def encode_message(message: StepPlan | StepResult | StageFailure) -> bytes:
    """A message as bytes."""
    if isinstance(message, StageFailure):
        text = message.text
        if len(text) > MAX_FAILURE_TEXT:
            text = text[: MAX_FAILURE_TEXT // 2] + " ... " + text[-MAX_FAILURE_TEXT // 2 :]
        return json.dumps([message.stage, message.error[:200], text, message.keeps_state]).encode()
    return pickle.dumps(message, protocol=5)


# A message is a tree of what these make and of builtin scalars, strings and tuples; anything else in it is refused.
_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    (make.__module__, make.__qualname__): make
    for make in (SamplingParams, SequenceStart, plan_of_columns, result_of_columns)
}


class _MessageUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _MAKERS[module_name, global_name]
        except KeyError:
            raise TransportError(f"a message names {module_name}.{global_name}, which no message has") from None


def _decode_pickle(data: bytes | bytearray) -> Any:
    try:
        return _MessageUnpickler(io.BytesIO(data)).load()
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(f"a message of {len(data)} bytes cannot be decoded: {error!r}") from error


def decode_plan(data: bytes | bytearray) -> StepPlan:
    """A STEP frame's message. Raises TransportError."""
    plan = _decode_pickle(data)
    if not isinstance(plan, StepPlan):
        raise TransportError(f"a step's message is a {type(plan).__name__}, not a StepPlan")
    return plan


def decode_result(data: bytes | bytearray) -> StepResult:
    """A RESULT frame's message. Raises TransportError."""
    result = _decode_pickle(data)
    if not isinstance(result, StepResult):
        raise TransportError(f"a result's message is a {type(result).__name__}, not a StepResult")
    return result


def decode_failure(data: bytes | bytearray) -> StageFailure:
    """A FAILURE frame's message. Raises TransportError."""
    try:
        stage, error, text, keeps_state = json.loads(bytes(data))
    except (ValueError, TypeError) as problem:
        raise TransportError(f"a failure's message of {len(data)} bytes cannot be decoded: {problem!r}") from problem
    return StageFailure(int(stage), str(error), str(text), bool(keeps_state))
