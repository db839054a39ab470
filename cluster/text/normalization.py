"""SentencePiece's normalization: characters replaced by rules, spaces put in order, spaces written as "▁"."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardline.cluster.text.charsmap import Charsmap
from shardline.cluster.text.scored_pieces import SPACE


class SentencePieceNormalizer:
    """Does to a text what SentencePiece does before it looks for pieces."""

    def __init__(self, charsmap: Charsmap, literals: Collection[str], removes_extra_spaces: bool) -> None:
        """
        Args:
            charsmap: What is replaced by what.
            literals: Texts that no rule touches; not empty ones.
            removes_extra_spaces: Whether spaces at the ends go, and all but one in a row.
        """
        self._charsmap = charsmap
        self._removes = removes_extra_spaces
        self._literals = frozenset(literal.encode("utf-8") for literal in literals)
        lengths: dict[int, set[int]] = {}
        for literal in self._literals:
            lengths.setdefault(literal[0], set()).add(len(literal))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}

    @property
    def keeps_length(self) -> bool:
        """Whether a text is known to become no shorter."""
        return not self._charsmap and not self._removes

    def normalize(self, text: str, dummy_prefix: bool) -> str:
        """The text with "▁" for spaces.

        Args:
            text: Any text without surrogates.
            dummy_prefix: Whether it gets one more at its beginning, unless nothing is left of it.

        Raises:
            DamagedCharsmapError: A rule for it is damaged.
        """
        if not text:
            return ""
        prefix = SPACE if dummy_prefix else ""
        if self.keeps_length:
            return prefix + text.replace(" ", SPACE)
        parts = self._parts(text.encode("utf-8"))
        if not self._removes:
            return prefix + "".join(parts).replace(" ", SPACE)
        kept: list[str] = []
        after_space = True
        for part in parts:
            if after_space:
                part = part.lstrip(" ")
            if part:
                kept.append(part)
                after_space = part.endswith(" ")
        return (prefix + "".join(kept).replace(" ", SPACE)).rstrip(SPACE)

    def _parts(self, text: bytes) -> Iterator[str]:
        """The text in pieces: what a rule or a literal gives, and characters without either."""
        start, size = 0, len(text)
        while start < size:
            first = text[start]
            for length in self._lengths.get(first, ()):
                if text[start : start + length] in self._literals:
                    yield text[start : start + length].decode("utf-8")
                    start += length
                    break
            else:
                rule = self._charsmap.longest(text, start) if self._charsmap else None
                if rule is not None:
                    replacement, start = rule
                    yield replacement
                    continue
                end = start + 1
                if first >= 0xC0:
                    while end < size and text[end] & 0xC0 == 0x80:
                        end += 1
                yield text[start:end].decode("utf-8")
                start = end
