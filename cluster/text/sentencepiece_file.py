"""SentencePiece's `tokenizer.model`: a protobuf message, read without the protobuf library and checked throughout.

The layout is sentencepiece_model.proto's, which is published with SentencePiece.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardline.cluster.errors import TokenizerError
from shardline.cluster.text.folder_files import brief
from shardline.cluster.text.folder_marks import MAX_IDS

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

UNIGRAM: Final = 1
BPE: Final = 2
_KINDS = {3: "WORD", 4: "CHAR"}

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""How a line of a vocabulary of tiktoken's looks, which folders have under the same name."""

_Value = int | bytes


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    """A vocabulary, and how text is normalized for it.

    Attributes:
        path: The file.
        pieces, scores, types: Of each token; spaces are written as "▁".
        kind: UNIGRAM or BPE.
        byte_fallback: Whether a character that is no piece becomes its bytes.
        unknown_id: The token of a character that is neither.
        bos_id, eos_id: The begin and the end token, if the vocabulary has them.
        charsmap: How characters are replaced first, as `charsmap.parse_charsmap` reads it; empty for not at all.
        adds_dummy_prefix: Whether a text is encoded as if a space stood before it.
        removes_extra_spaces: Whether spaces at the ends and all but one in a row go first.
    """

    path: Path
    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: int
    byte_fallback: bool
    unknown_id: int
    bos_id: int | None
    eos_id: int | None
    charsmap: bytes
    adds_dummy_prefix: bool
    removes_extra_spaces: bool


def parse_sentencepiece(path: Path, content: bytes) -> SentencePieceFile:
    """Raises TokenizerError, which names the field, where something is damaged or not supported."""
    if _TIKTOKEN.match(content):
        raise TokenizerError(
            str(path),
            "is written in tiktoken's format, which is not supported. Save the tokenizer with transformers'"
            " save_pretrained, which writes a tokenizer.json, and put that here",
        )
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    denormalizer: dict[int, _Value] = {}
    for number, value in _fields(path, "", content):
        if number == 1:
            piece, score, kind = _piece(path, f"pieces[{len(pieces)}]", value)
            pieces.append(piece)
            scores.append(score)
            types.append(kind)
            if len(pieces) > MAX_IDS:
                raise TokenizerError(f"{path}: pieces", f"has more than {MAX_IDS} tokens")
        elif number in (2, 3, 5):
            part, name = {
                2: (trainer, "trainer_spec"),
                3: (normalizer, "normalizer_spec"),
                5: (denormalizer, "denormalizer_spec"),
            }[number]
            part.update(_fields(path, name, _bytes(path, name, value)))
    if not pieces:
        raise TokenizerError(str(path), "holds no SentencePiece vocabulary: it has no pieces")
    kind = _number(path, "trainer_spec.model_type", trainer.get(3), UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        name = _KINDS.get(kind, str(kind))
        raise TokenizerError(f"{path}: trainer_spec.model_type", f"{name} is not supported; UNIGRAM and BPE are")
    if _number(path, "trainer_spec.treat_whitespace_as_suffix", trainer.get(24), 0):
        raise TokenizerError(f"{path}: trainer_spec.treat_whitespace_as_suffix", "is true, which is not supported")
    if not _number(path, "normalizer_spec.escape_whitespaces", normalizer.get(5), 1):
        raise TokenizerError(f"{path}: normalizer_spec.escape_whitespaces", "is false, which is not supported")
    if _bytes(path, "denormalizer_spec.precompiled_charsmap", denormalizer.get(2, b"")):
        raise TokenizerError(f"{path}: denormalizer_spec", "changes the model's own text, which is not supported")
    byte_fallback = bool(_number(path, "trainer_spec.byte_fallback", trainer.get(35), 0))
    unknown_id = _check_pieces(path, pieces, types, byte_fallback)
    return SentencePieceFile(
        path,
        pieces,
        scores,
        types,
        kind,
        byte_fallback,
        unknown_id,
        _control(types, _number(path, "trainer_spec.bos_id", trainer.get(41), 1)),
        _control(types, _number(path, "trainer_spec.eos_id", trainer.get(42), 2)),
        _bytes(path, "normalizer_spec.precompiled_charsmap", normalizer.get(2, b"")),
        bool(_number(path, "normalizer_spec.add_dummy_prefix", normalizer.get(3), 1)),
        bool(_number(path, "normalizer_spec.remove_extra_whitespaces", normalizer.get(4), 1)),
    )


def byte_of(piece: str) -> int | None:
    """The byte that a token such as "<0x0A>" names."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])[0]
        except (ValueError, IndexError):
            return None
    return None


def _check_pieces(path: Path, pieces: list[str], types: list[int], byte_fallback: bool) -> int:
    """Check what SentencePiece itself demands; give the unknown token."""
    text_ids: dict[str, int] = {}
    mark_ids: dict[str, int] = {}
    unknown_id: int | None = None
    found: set[int] = set()
    for token_id, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
        field = f"{path}: pieces[{token_id}]"
        # Text can become the ones; the others have their names from elsewhere and may look like text.
        ids = text_ids if kind in (NORMAL, USER_DEFINED, UNUSED) else mark_ids
        if ids.setdefault(piece, token_id) != token_id:
            raise TokenizerError(field, f"is {brief(piece)}, and so is pieces[{ids[piece]}]")
        if kind == UNKNOWN:
            if unknown_id is not None:
                raise TokenizerError(field, f"is a second unknown token; pieces[{unknown_id}] is one")
            unknown_id = token_id
        elif kind == BYTE:
            byte = byte_of(piece)
            if byte is None or not byte_fallback:
                raise TokenizerError(field, f"is {brief(piece)}, which is no byte token of a vocabulary with bytes")
            found.add(byte)
    if unknown_id is None:
        raise TokenizerError(f"{path}: pieces", "has no unknown token")
    if byte_fallback and len(found) != 256:
        raise TokenizerError(f"{path}: pieces", f"has {len(found)} of the 256 byte tokens that byte_fallback needs")
    return unknown_id


def _control(types: list[int], token_id: int) -> int | None:
    return token_id if 0 <= token_id < len(types) and types[token_id] == CONTROL else None


def _piece(path: Path, field: str, value: _Value) -> tuple[str, float, int]:
    piece, score, kind = "", 0.0, NORMAL
    for number, entry in _fields(path, field, _bytes(path, field, value)):
        if number == 1:
            try:
                piece = _bytes(path, f"{field}.piece", entry).decode("utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{path}: {field}.piece", "is no UTF-8 text") from error
        elif number == 2:
            raw = entry if isinstance(entry, bytes) else b""
            if len(raw) != 4:
                raise TokenizerError(f"{path}: {field}.score", "is no 32-bit number")
            (score,) = struct.unpack("<f", raw)
        elif number == 3:
            kind = _number(path, f"{field}.type", entry, NORMAL)
    if not piece:
        raise TokenizerError(f"{path}: {field}.piece", "is empty")
    if not math.isfinite(score):
        raise TokenizerError(f"{path}: {field}.score", f"is {score}")
    if not NORMAL <= kind <= BYTE:
        raise TokenizerError(f"{path}: {field}.type", f"is {kind}; types are {NORMAL} to {BYTE}")
    return piece, score, kind


def _number(path: Path, field: str, value: _Value | None, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int):
        raise TokenizerError(f"{path}: {field}", "is no integer")
    # Negative numbers are written with all 64 bits.
    return value - (1 << 64) if value >> 63 else value


def _bytes(path: Path, field: str, value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise TokenizerError(f"{path}: {field}", "is a number, not bytes")
    return value


def _fields(path: Path, field: str, content: bytes) -> Iterator[tuple[int, _Value]]:
    """A message's fields in order: (number, an integer or the bytes of any other kind)."""
    where = f"{path}: {field}" if field else str(path)
    position, end = 0, len(content)
    while position < end:
        key, position = _varint(where, content, position)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise TokenizerError(where, f"is no SentencePiece file, or damaged: a field 0 at byte {position}")
        if wire_type == _VARINT:
            value, position = _varint(where, content, position)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, position = _varint(where, content, position)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise TokenizerError(
                where, f"is no SentencePiece file, or damaged: a field of the kind {wire_type} at byte {position}"
            )
        if size > end - position:
            raise TokenizerError(
                where,
                f"is no SentencePiece file, or damaged: {size} bytes at byte {position}, and {end - position} are left",
            )
        yield number, content[position : position + size]
        position += size


def _varint(where: str, content: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(content):
            raise TokenizerError(where, f"is no SentencePiece file, or damaged: it ends inside a number at {position}")
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
    raise TokenizerError(where, f"is no SentencePiece file, or damaged: a number of more than 10 bytes at {position}")
