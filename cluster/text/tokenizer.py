"""A model's tokenizer: text to token ids and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardline.cluster.text.first_space import FirstSpace


class Encoder(Protocol):
    """Text to ids, with nothing added at its ends. Safe to use from several threads."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """The ids of a text, which holds no surrogates."""
        ...


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens around a text.

    Attributes:
        bos_id: The begin token; None if the model has none.
        eos_ids: The tokens that end a generation.
        prefix, suffix: What `encode(add_special=True)` adds.
    """

    bos_id: int | None
    eos_ids: frozenset[int]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much text a token can stand for: a bound on how few tokens a text can become.

    Attributes:
        characters: The most characters of one token; None if there is no bound.
        squeezes_space: Whether white space may vanish without a token.
    """

    characters: int | None
    squeezes_space: bool = False


class Tokenizer:
    """Text to token ids and back. Immutable and safe to use from several threads.

    Attributes:
        vocab_size: The number of ids: one more than the largest that has a token. The model's own vocabulary may be
            larger by padding.
        bos_id: The begin token; None if the model has none.
        eos_ids: The tokens that end a generation.
        marks: These two, and what `encode(add_special=True)` adds.
    """

    def __init__(
        self,
        texts: Sequence[str],
        pieces: Sequence[bytes],
        special: Collection[int],
        encoder: Encoder,
        first_space: FirstSpace,
        marks: Marks,
        coverage: Coverage,
    ) -> None:
        """
        Args:
            texts: Each token as the vocabulary spells it; empty for an id without a token.
            pieces: Its bytes; of a special token its name's.
            special: The tokens that are no text of their own.
            encoder: Text to ids.
            first_space: What becomes of a space at the beginning of a text.
            marks: The tokens around a text.
            coverage: How much text a token can stand for.
        """
        assert len(texts) == len(pieces)
        self.vocab_size = len(texts)
        self.bos_id = marks.bos_id
        self.eos_ids = marks.eos_ids
        self.marks = marks
        self._texts = texts
        self._pieces = pieces
        self._special = frozenset(special) | marks.eos_ids
        self._encoder = encoder
        self._first_space = first_space
        self._coverage = coverage

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build it from a GGUF file's key-value pairs (`Checkpoint.metadata`).

        Raises TokenizerError, which names the field, when one is missing, damaged or not supported.
        """
        from shardline.cluster.text.gguf_tokenizer import tokenizer_from_metadata

        return tokenizer_from_metadata(metadata)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Build it from a Hugging Face folder: `tokenizer.json`, else SentencePiece's `tokenizer.model`.

        Raises TokenizerError, which names the file and the field, when one is missing, damaged or not supported.
        """
        from shardline.cluster.text.folder_tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(folder)

    @property
    def adds_bos(self) -> bool:
        """Whether `encode(add_special=True)` puts the begin token before a text."""
        return self.bos_id is not None and self.bos_id in self.marks.prefix

    @property
    def adds_eos(self) -> bool:
        """Whether `encode(add_special=True)` puts an end token after a text."""
        return not self.eos_ids.isdisjoint(self.marks.suffix)

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

        Raises:
            TokenizerError: The model's tokenizer fails on this text: its file is damaged.
        """
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._encoder.encode(text, parse_special=parse_special)
        if add_special:
            prefix, suffix = self.marks.prefix, self.marks.suffix
            if tuple(ids[: len(prefix)]) != prefix:
                ids = [*prefix, *ids]
            if suffix and tuple(ids[-len(suffix) :]) != suffix:
                ids = [*ids, *suffix]
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A bound from below on how many tokens a text becomes, without encoding it."""
        most = self._coverage.characters
        if most is None:
            return 0
        if self._coverage.squeezes_space:
            return sum(map(len, text.split())) // most
        return len(text) // most

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, previous_id: int | None = None) -> str:
        """The text of tokens. Bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: The tokens.
            skip_special: Leave out control, unknown and end tokens instead of writing their names.
            previous_id: The token before them, None at the beginning of a text; it decides on a space that belongs to
                the encoding and not to the text.
        """
        parts: list[bytes] = []
        begins = self.begins(previous_id)
        for token_id in ids:
            piece, begins = self.spell(token_id, skip_special, begins)
            parts.append(piece)
        return b"".join(parts).decode("utf-8", "replace")

    def begins(self, previous_id: int | None) -> bool:
        """Whether a text begins after that token: at the very beginning (None), or after a mark."""
        return self._first_space.begins(previous_id)

    def spell(self, token_id: int, skip_special: bool, begins: bool) -> tuple[bytes, bool]:
        """The bytes that a token adds to a text, and whether the text still begins after it.

        `begins`: whether it begins before it, from `begins` or from the token before.
        """
        skipped = skip_special and self.is_special(token_id)
        return self._first_space.step(token_id, b"" if skipped else self.token_bytes(token_id), skipped, begins)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; of a special token its name's, of an unused or padding one none."""
        assert token_id >= 0, f"token id {token_id} is negative"
        return self._pieces[token_id] if token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty past its end."""
        assert token_id >= 0, f"token id {token_id} is negative"
        return self._texts[token_id] if token_id < self.vocab_size else ""

    def is_special(self, token_id: int) -> bool:
        """Whether it is no text of its own: a control, unknown or end token."""
        return token_id in self._special
