"""Token ids to text while they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from shardline.cluster.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence's new tokens, in pieces.

    Whatever way the ids are cut into calls, the joined pieces equal
    `tokenizer.decode(all_ids, skip_special=..., previous_id=...)`: a character comes when its last byte has come, and
    never in halves. The prompt's text is no part of it, not even when the prompt ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, previous_id: int | None = None) -> None:
        """`previous_id`: the prompt's last token, None if there is no prompt; it decides on a space that SentencePiece
        puts at the beginning of a text."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._begins = tokenizer.begins(previous_id)
        self._utf8 = _UTF8(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join(map(self.push, ids))

    def push(self, token_id: int) -> str:
        """The text that one token completes; may be empty."""
        piece, self._begins = self._tokenizer.spell(token_id, self._skip_special, self._begins)
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for the bytes of a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)
