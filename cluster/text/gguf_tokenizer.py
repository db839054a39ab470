"""The tokenizer that a GGUF file's key-value pairs describe."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from shardline.cluster.errors import TokenizerError
from shardline.cluster.text.byte_level import PRE_TOKENIZERS, ByteLevelModel, PreTokenizer, spelled_bytes
from shardline.cluster.text.first_space import FirstSpace, KeepSpace, StripAfterMarks
from shardline.cluster.text.literal_tokens import Literal, LiteralEncoder
from shardline.cluster.text.scored_pieces import SPACE, ScoredPieceModel
from shardline.cluster.text.tokenizer import Coverage, Marks, Tokenizer

_PREFIX = "tokenizer.ggml."

# tokenizer.ggml.token_type
_UNDEFINED: Final = 0
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
_BYTE: Final = 6

_NO_ID = 0xFFFFFFFF
"""How some writers say "none" in an unsigned field."""

_END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {"</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
)
"""Tokens that end a turn or a document wherever they exist; files often name only one of theirs."""
_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})

_PHI3_KEEPS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""All other special tokens of Phi-3's SentencePiece vocabulary take the white space after them. No field says so."""

_BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build it from `Checkpoint.metadata`.

    Raises TokenizerError, which names the field, when one is missing, damaged or not supported.
    """
    fields = _Fields(metadata)
    kind = fields.text("model")
    if kind not in ("gpt2", "llama"):
        raise fields.error("model", f"{kind!r} is not supported; gpt2 (byte-level BPE) and llama (SentencePiece) are")
    texts = fields.texts("tokens")
    types = fields.types(len(texts))
    bos_id = fields.token_id("bos_token_id", len(texts))
    ends = {field: fields.token_id(field, len(texts)) for field in _END_FIELDS}
    first_space: FirstSpace = KeepSpace()
    literals = _literals(texts, types, squeezes=kind == "llama" and metadata.get("general.architecture") == "phi3")
    if kind == "gpt2":
        pre_tokenizer = _pre_tokenizer(fields)
        adds_bos = pre_tokenizer.adds_bos and bos_id is not None
        plain = {text: i for i, text in enumerate(texts) if types[i] not in (_UNKNOWN, _CONTROL, _UNUSED) and text}
        byte_level = ByteLevelModel(plain, _merges(fields, plain, texts), pre_tokenizer)
        encoder = LiteralEncoder(literals, lambda text, begins: byte_level.encode(text))
        pieces = [_byte_level_bytes(text, types[i]) for i, text in enumerate(texts)]
    else:
        if bos_id is None and "<s>" in texts:
            bos_id = texts.index("<s>")
        if ends["eos_token_id"] is None and "</s>" in texts:
            ends["eos_token_id"] = texts.index("</s>")
        adds_bos = bos_id is not None
        prefixes_space = fields.flag("add_space_prefix", default=True)
        scored = _scored_model(fields, texts, types)
        control = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL)
        transparent = [kind in (_UNKNOWN, _UNUSED) for kind in types]
        encoder = LiteralEncoder(
            literals,
            lambda text, begins: scored.encode(" " + text if begins and prefixes_space else text),
            restarts=control,
            transparent=frozenset(i for i, is_transparent in enumerate(transparent) if is_transparent),
        )
        if prefixes_space:
            normal = enumerate(zip(texts, types, strict=True))
            strippable = frozenset(
                i for i, (text, kind) in normal if kind in (_UNDEFINED, _NORMAL) and text.startswith(SPACE)
            )
            first_space = StripAfterMarks(strippable, control, transparent)
        pieces = [_scored_bytes(text, types[i]) for i, text in enumerate(texts)]
    special = [i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)]
    # Composed characters are the one way in which a text gets shorter than it was, by less than four.
    coverage = Coverage(4 * max(1, *map(len, pieces)), any(literal.rstrip for literal in literals))
    adds_bos = fields.flag("add_bos_token", default=adds_bos)
    marks = _marks(fields, texts, types, bos_id, ends, adds_bos)
    return Tokenizer(texts, pieces, special, encoder, first_space, marks, coverage)


def _pre_tokenizer(fields: _Fields) -> PreTokenizer:
    name = fields.text("pre", default="default")
    pre_tokenizer = PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise fields.error("pre", f"the pre-tokenizer {name!r} is not supported; {', '.join(PRE_TOKENIZERS)} are")
    return pre_tokenizer


def _marks(
    fields: _Fields,
    texts: list[str],
    types: list[int],
    bos_id: int | None,
    ends: Mapping[str, int | None],
    adds_bos: bool,
) -> Marks:
    eos_id = ends["eos_token_id"]
    adds_eos = fields.flag("add_eos_token", default=False)
    if adds_bos and bos_id is None:
        raise fields.error("add_bos_token", "is true, but bos_token_id is missing")
    if adds_eos and eos_id is None:
        raise fields.error("add_eos_token", "is true, but eos_token_id is missing")
    known = _END_TEXTS
    if set(texts) >= _HARMONY_ENDS:
        # Harmony's format: there it ends one of an answer's several messages.
        known = (known - {"<|end|>"}) | _HARMONY_ENDS
    template = fields.template()
    known_ends = {
        i
        for i, text in enumerate(texts)
        # Files of Phi-3 and Gemma 2 call theirs user-defined; where the template writes it, it is no word of a text.
        if text in known and (types[i] == _CONTROL or (types[i] == _USER_DEFINED and text in template))
    }
    named_ends = {i for i in ends.values() if i is not None} | set(fields.token_ids("eos_token_ids", len(texts)))
    return Marks(
        bos_id,
        frozenset(known_ends | named_ends),
        prefix=(bos_id,) if adds_bos and bos_id is not None else (),
        suffix=(eos_id,) if adds_eos and eos_id is not None else (),
    )


def _literals(texts: list[str], types: list[int], squeezes: bool) -> list[Literal]:
    return [
        Literal(texts[i], i, special=kind != _USER_DEFINED, rstrip=squeezes and texts[i] not in _PHI3_KEEPS)
        for i, kind in enumerate(types)
        if kind in (_USER_DEFINED, _CONTROL, _UNKNOWN) and texts[i]
    ]


def _byte_level_bytes(text: str, kind: int) -> bytes:
    if kind == _UNUSED:
        return b""
    if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
        return text.encode("utf-8", "replace")
    named = _BYTE_TEXT.fullmatch(text) if kind == _BYTE else None
    return bytes([int(named[1], 16)]) if named else spelled_bytes(text)


def _scored_bytes(text: str, kind: int) -> bytes:
    if kind == _UNUSED:
        return b""
    if kind == _BYTE:
        return bytes([int(text[3:5], 16)])
    if kind in (_UNKNOWN, _CONTROL):
        return text.encode("utf-8", "replace")
    return text.replace(SPACE, " ").encode("utf-8", "replace")


def _merges(fields: _Fields, plain: Mapping[str, int], texts: list[str]) -> list[tuple[str, str]]:
    known = frozenset(texts)
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(fields.strings("merges")):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise fields.error(f"merges[{index}]", f"{line!r} is not two tokens with one space between them")
        for token in (left, right, left + right):
            if token not in known:
                raise fields.error(f"merges[{index}]", f"{line!r} needs the token {token!r}, which is not in tokens")
        # Ordinary text never becomes a control token, whatever the merges say.
        if left in plain and right in plain and left + right in plain:
            merges.append((left, right))
    return merges


def _scored_model(fields: _Fields, texts: list[str], types: list[int]) -> ScoredPieceModel:
    scores = fields.numbers("scores", len(texts))
    byte_ids: dict[int, int] = {}
    for token_id, text in enumerate(texts):
        if types[token_id] == _BYTE:
            named = _BYTE_TEXT.fullmatch(text)
            if named is None:
                raise fields.error(f"tokens[{token_id}]", f"{text!r} has the type of a byte, but is not like <0x0A>")
            byte_ids[int(named[1], 16)] = token_id
    unknown_id = fields.token_id("unknown_token_id", len(texts))
    if unknown_id is None:
        unknown_id = next((i for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    pieces = {
        text: (i, scores[i]) for i, text in enumerate(texts) if types[i] in (_UNDEFINED, _NORMAL, _UNUSED) and text
    }
    unused = frozenset(text for text, (i, _) in pieces.items() if types[i] == _UNUSED)
    return ScoredPieceModel(pieces, unused, byte_ids, unknown_id)


class _Fields:
    """Checked access to `tokenizer.ggml.*`: a value of a wrong type, length or range gives an error that names it."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def error(self, field: str, problem: str) -> TokenizerError:
        return TokenizerError(_PREFIX + field, problem)

    def text(self, field: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + field, default)
        if value is None:
            raise self.error(field, "is missing: the file holds no tokenizer that can be used")
        if not isinstance(value, str):
            raise self.error(field, f"is {_brief(value)}, not a text")
        return value

    def flag(self, field: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"is {_brief(value)}, not true or false")
        return value

    def template(self) -> str:
        """The chat template; empty if there is none. Its own reader says what is wrong with one."""
        value = self._metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else ""

    def token_ids(self, field: str, count: int) -> list[int]:
        """A list of ids; empty if there is none."""
        if _PREFIX + field not in self._metadata:
            return []
        return self._array(
            field,
            None,
            f"token ids from 0 to {count - 1}",
            lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count,
        )

    def token_id(self, field: str, count: int) -> int | None:
        value = self._metadata.get(_PREFIX + field)
        if value is None or value == _NO_ID:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(field, f"is {_brief(value)}, not a token id")
        if not 0 <= value < count:
            raise self.error(field, f"is {value}, but the tokens are 0 to {count - 1}")
        return value

    def strings(self, field: str) -> list[str]:
        return self._array(field, None, "texts", lambda value: isinstance(value, str))

    def texts(self, field: str) -> list[str]:
        """The tokens: each its own text. Empty ones, which can be neither read nor written, may repeat."""
        texts = self.strings(field)
        if not texts:
            raise self.error(field, "is empty")
        first: dict[str, int] = {}
        for token_id, text in enumerate(texts):
            if text and first.setdefault(text, token_id) != token_id:
                raise self.error(field, f"the ids {first[text]} and {token_id} are the same token {text!r}")
        return texts

    def types(self, count: int) -> list[int]:
        """One type for each token; where the file has none, the tokens that it names by id are control tokens."""
        if _PREFIX + "token_type" not in self._metadata:
            types = [_NORMAL] * count
            for field in ("bos_token_id", *_END_FIELDS):
                token_id = self.token_id(field, count)
                if token_id is not None:
                    types[token_id] = _CONTROL
            return types
        return self._array(
            "token_type",
            count,
            f"types from {_UNDEFINED} to {_BYTE}",
            lambda value: isinstance(value, int) and not isinstance(value, bool) and _UNDEFINED <= value <= _BYTE,
        )

    def numbers(self, field: str, count: int) -> list[float]:
        return self._array(
            field,
            count,
            "numbers",
            lambda value: isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value),
        )

    def _array(self, field: str, count: int | None, what: str, valid: Callable[[Any], bool]) -> list[Any]:
        value = self._metadata.get(_PREFIX + field)
        if value is None:
            raise self.error(field, "is missing")
        if not isinstance(value, list):
            raise self.error(field, f"is {_brief(value)}, not a list of {what}")
        if count is not None and len(value) != count:
            raise self.error(field, f"has {len(value)} entries for {count} tokens")
        for index, entry in enumerate(value):
            if not valid(entry):
                raise self.error(f"{field}[{index}]", f"is {_brief(entry)}; the list holds {what}")
        return value


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
