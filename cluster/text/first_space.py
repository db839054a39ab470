"""What becomes of a space at the beginning of a text, which SentencePiece adds when it encodes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum, auto
from typing import Protocol


class FirstSpace(Protocol):
    """A rule that says which bytes a token adds to a text. It keeps no state: the caller carries `begins` along."""

    def begins(self, previous_id: int | None) -> bool:
        """Whether a text begins after that token; None is no token at all."""
        ...

    def step(self, token_id: int, piece: bytes, skipped: bool, begins: bool) -> tuple[bytes, bool]:
        """The bytes that a token adds, and whether the text still begins after it.

        Args:
            token_id: The token.
            piece: Its bytes; none if it is skipped.
            skipped: Whether it is a special token that is left out.
            begins: Whether the text begins before it.
        """
        ...


class KeepSpace:
    """Every token's bytes are the text's: byte-level vocabularies."""

    def begins(self, previous_id: int | None) -> bool:
        return False

    def step(self, token_id: int, piece: bytes, skipped: bool, begins: bool) -> tuple[bytes, bool]:
        return piece, False


class Strips(Enum):
    """Which spaces go at the beginning of a text."""

    ONE = auto()
    """One, of whatever token."""
    FIRST_TOKEN = auto()
    """All that its first token begins with."""
    EACH_TOKEN = auto()
    """One of each token, until there is text: where encoding removes every space at the beginning."""


class StripAtStart:
    """Spaces go at the beginning of a text, and nowhere else: the rule of a Hugging Face folder."""

    def __init__(self, strips: Strips, marks: Container[int]) -> None:
        """`marks`: the tokens after which encoding adds a space too, so that an answer begins a text of its own."""
        self._strips = strips
        self._marks = marks

    def begins(self, previous_id: int | None) -> bool:
        return previous_id is None or previous_id in self._marks

    def step(self, token_id: int, piece: bytes, skipped: bool, begins: bool) -> tuple[bytes, bool]:
        if not begins or not piece:
            return piece, begins
        if self._strips is Strips.FIRST_TOKEN:
            return piece.lstrip(b" "), False
        stripped = piece.removeprefix(b" ")
        return stripped, self._strips is Strips.EACH_TOKEN and not stripped


class StripAfterMarks:
    """A space goes exactly where `encode` of a GGUF vocabulary put it: at the beginning and after each control token.
    So a text with control tokens in it comes back as it was."""

    def __init__(self, strippable: Container[int], control: Container[int], transparent: Sequence[bool]) -> None:
        """
        Args:
            strippable: The tokens that can begin with that space.
            control: The tokens after which encoding adds it.
            transparent: For each token, whether the text after it begins where the text before it ended: it has no
                bytes and is no mark. An id past the end is.
        """
        self._strippable = strippable
        self._control = control
        self._transparent = transparent

    def begins(self, previous_id: int | None) -> bool:
        return previous_id is None or previous_id in self._control

    def step(self, token_id: int, piece: bytes, skipped: bool, begins: bool) -> tuple[bytes, bool]:
        if begins and token_id in self._strippable:
            piece = piece[1:]
        if token_id >= len(self._transparent) or self._transparent[token_id]:
            return piece, begins
        return piece, token_id in self._control
