"""The model's tokenizer, built from what its GGUF file says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from shardline.cluster.errors import TokenizerError
from shardline.cluster.text.byte_level import PRE_TOKENIZERS, ByteLevelModel, spelled_bytes
from shardline.cluster.text.scored_pieces import SPACE, ScoredPieceModel

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
"""Control tokens that end a turn or a document wherever they exist; files often name only one of theirs."""

_BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _TextModel(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """Text to token ids and back. Immutable and safe to use from several threads.

    Attributes:
        vocab_size: Number of tokens; the model's own vocabulary may be larger by padding.
        bos_id: The begin token; None if the model has none.
        eos_ids: The tokens that end a generation.
        adds_bos, adds_eos: What `encode(add_special=True)` adds.
        prefixes_space: SentencePiece only: whether text at the beginning, or after a control token, is encoded as if a
            space stood before it, which `decode` takes away again.
    """

    def __init__(
        self,
        texts: list[str],
        types: list[int],
        piece_bytes: list[bytes],
        model: _TextModel,
        *,
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: frozenset[int],
        adds_bos: bool,
        adds_eos: bool,
        prefixes_space: bool,
    ) -> None:
        """Not for direct use: see `from_metadata`."""
        self.vocab_size = len(texts)
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.adds_bos = adds_bos
        self.adds_eos = adds_eos
        self.prefixes_space = prefixes_space
        self._eos_id = eos_id
        self._texts = texts
        self._types = types
        self._bytes = piece_bytes
        self._model = model
        self._user_defined = _literals({texts[i]: i for i, kind in enumerate(types) if kind == _USER_DEFINED})
        self._all_special = _literals(
            {texts[i]: i for i, kind in enumerate(types) if kind in (_USER_DEFINED, _CONTROL, _UNKNOWN)}
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build it from a GGUF file's key-value pairs (`Checkpoint.metadata`).

        Raises TokenizerError, which names the field, when one is missing, damaged or not supported.
        """
        fields = _Fields(metadata)
        kind = fields.text("model")
        if kind not in ("gpt2", "llama"):
            raise fields.error(
                "model", f"{kind!r} is not supported; gpt2 (byte-level BPE) and llama (SentencePiece) are"
            )
        texts = fields.texts("tokens")
        types = fields.types(len(texts))
        bos_id = fields.token_id("bos_token_id", len(texts))
        ends = {field: fields.token_id(field, len(texts)) for field in _END_FIELDS}
        if kind == "gpt2":
            adds_bos, prefixes_space = False, False
            name = fields.text("pre", default="default")
            pre_tokenizer = PRE_TOKENIZERS.get(name)
            if pre_tokenizer is None:
                raise fields.error(
                    "pre", f"the pre-tokenizer {name!r} is not supported; {', '.join(PRE_TOKENIZERS)} are"
                )
            adds_bos = pre_tokenizer.adds_bos and bos_id is not None
            plain = {text: i for i, text in enumerate(texts) if types[i] not in (_UNKNOWN, _CONTROL, _UNUSED) and text}
            model: _TextModel = ByteLevelModel(plain, _merges(fields, plain, texts), pre_tokenizer)
            piece_bytes = [_byte_level_bytes(text, types[i]) for i, text in enumerate(texts)]
        else:
            if bos_id is None and "<s>" in texts:
                bos_id = texts.index("<s>")
            if ends["eos_token_id"] is None and "</s>" in texts:
                ends["eos_token_id"] = texts.index("</s>")
            adds_bos = bos_id is not None
            prefixes_space = fields.flag("add_space_prefix", default=True)
            model = _scored_model(fields, texts, types)
            piece_bytes = [_scored_bytes(text, types[i]) for i, text in enumerate(texts)]
        adds_bos = fields.flag("add_bos_token", default=adds_bos)
        adds_eos = fields.flag("add_eos_token", default=False)
        eos_id = ends["eos_token_id"]
        if adds_bos and bos_id is None:
            raise fields.error("add_bos_token", "is true, but bos_token_id is missing")
        if adds_eos and eos_id is None:
            raise fields.error("add_eos_token", "is true, but eos_token_id is missing")
        known_ends = {i for i, text in enumerate(texts) if types[i] == _CONTROL and text in _END_TEXTS}
        return cls(
            texts,
            types,
            piece_bytes,
            model,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=frozenset(known_ends | {i for i in ends.values() if i is not None}),
            adds_bos=adds_bos,
            adds_eos=adds_eos,
            prefixes_space=prefixes_space,
        )

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The ids of a text.

        Args:
            text: Any text. A surrogate without its other half, which no UTF-8 can hold, is taken as U+FFFD.
            add_special: Put the begin token before it and the end token after it, if this model wants them, unless the
                parsed text has them there already: a chat template that writes its own begin token gives one, not two.
            parse_special: Read control tokens that are written out in the text, such as "<|im_start|>". A rendered chat
                prompt needs it. The template mixes what a user wrote with its own marks, so a user's text can then hold
                control tokens too, here as in every engine that renders to text; a caller who must rule that out
                refuses such text before it is rendered. With False they are ordinary characters.
        """
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        special = self._all_special if parse_special else self._user_defined
        at_start = True
        for piece, special_id in _cut(text, special):
            if special_id is None:
                ids += self._model.encode(" " + piece if at_start and self.prefixes_space else piece)
                at_start = False
            else:
                ids.append(special_id)
                if not self.is_transparent(special_id):
                    at_start = self._types[special_id] == _CONTROL
        if add_special:
            if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
            if self.adds_eos and self._eos_id is not None and ids[-1:] != [self._eos_id]:
                ids.append(self._eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, previous_id: int | None = None) -> str:
        """The text of tokens. Bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: The tokens.
            skip_special: Leave out control, unknown and end tokens instead of writing their names.
            previous_id: The token before them, None at the beginning of a text: see `strips_space`.
        """
        parts: list[bytes] = []
        for token_id in ids:
            if not (skip_special and self.is_special(token_id)):
                piece = self.token_bytes(token_id)
                parts.append(piece[1:] if self.strips_space(token_id, previous_id) else piece)
            if not self.is_transparent(token_id):
                previous_id = token_id
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; of a special token its name's, of an unused or padding one none."""
        assert token_id >= 0, f"token id {token_id} is negative"
        return self._bytes[token_id] if token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty past its end."""
        assert token_id >= 0, f"token id {token_id} is negative"
        return self._texts[token_id] if token_id < self.vocab_size else ""

    def is_special(self, token_id: int) -> bool:
        """Whether it is no text of its own: a control, unknown or end token."""
        if token_id in self.eos_ids:
            return True
        return token_id < self.vocab_size and self._types[token_id] in (_CONTROL, _UNKNOWN)

    def is_transparent(self, token_id: int) -> bool:
        """Whether the text after this token begins where the text before it ended: it has no bytes and is no mark."""
        return token_id >= self.vocab_size or self._types[token_id] in (_UNKNOWN, _UNUSED)

    def strips_space(self, token_id: int, previous_id: int | None) -> bool:
        """Whether `encode` put the space there that this token begins with: at the beginning and after a control token.

        `previous_id` is the last token before it that is not transparent.
        """
        if not self.prefixes_space or token_id >= self.vocab_size:
            return False
        if previous_id is not None and not (previous_id < self.vocab_size and self._types[previous_id] == _CONTROL):
            return False
        return self._types[token_id] in (_UNDEFINED, _NORMAL) and self._texts[token_id].startswith(SPACE)


def _literals(special: Mapping[str, int]) -> tuple[re.Pattern[str], Mapping[str, int]] | None:
    """A pattern that finds the leftmost special token, the longest of those that begin there."""
    names = sorted((name for name in special if name), key=len, reverse=True)
    if not names:
        return None
    return re.compile("|".join(map(re.escape, names))), special


def _cut(text: str, special: tuple[re.Pattern[str], Mapping[str, int]] | None) -> Iterable[tuple[str, int | None]]:
    """The text's stretches in order: (text, None) between special tokens, (name, id) for each of them."""
    end = 0
    if special is not None:
        pattern, ids = special
        for match in pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()], None
            yield match.group(), ids[match.group()]
            end = match.end()
    if end < len(text):
        yield text[end:], None


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
