"""SentencePiece's BPE: pieces with scores, merged best first, with bytes for what no piece covers."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping

SPACE = "▁"

_WORD_STARTS = re.compile(f"(?<=[^{SPACE}])(?={SPACE})")
_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 32


class ScoredPieceModel:
    """Text to ids by scores. Has no special tokens: every text is only text to it."""

    def __init__(
        self,
        scores: Mapping[str, tuple[int, float]],
        unused: frozenset[str],
        bytes_: Mapping[int, int],
        unknown_id: int | None,
    ) -> None:
        """
        Args:
            scores: (id, score) of every piece that text can become, spaces written as "▁", and of the unused ones.
            unused: Pieces that merges may go through, but that are taken apart again at the end.
            bytes_: The ids of the byte tokens, by byte.
            unknown_id: What stands for a character that is no piece when a byte token is missing; None drops it.
        """
        self._scores = scores
        self._unused = unused
        self._bytes = bytes_
        self._unknown_id = unknown_id
        # No merge crosses a border between two words if no piece does, so words can be encoded, and remembered, alone.
        self._by_word = not any(_WORD_STARTS.search(piece) for piece in scores)
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Spaces in it become "▁"; a prefix space is up to the caller."""
        text = text.replace(" ", SPACE)
        if not self._by_word:
            return self._merge(text)
        ids: list[int] = []
        for word in _WORD_STARTS.split(text):
            known = self._cache.get(word)
            if known is None:
                known = tuple(self._merge(word))
                if len(word) <= _CACHED_LENGTH:
                    if len(self._cache) >= _CACHED_WORDS:
                        self._cache.clear()
                    self._cache[word] = known
            ids.extend(known)
        return ids

    def _merge(self, text: str) -> list[int]:
        """Merge the pair whose result scores best, the leftmost of equals, until no pair makes a piece."""
        symbols = list(text)
        count = len(symbols)
        before = list(range(-1, count - 1))
        after = [*range(1, count), -1] if count else []
        heap: list[tuple[float, int, int, int]] = []
        parts: dict[str, tuple[str, str]] = {}

        def consider(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            joined = symbols[left] + symbols[right]
            entry = self._scores.get(joined)
            if entry is None:
                return
            heapq.heappush(heap, (-entry[1], left, right, len(joined)))
            if joined in self._unused:
                parts[joined] = (symbols[left], symbols[right])

        for left in range(count - 1):
            consider(left, left + 1)
        while heap:
            _, left, right, length = heapq.heappop(heap)
            # A symbol that was merged away is empty, and one that grew gives another length.
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])

        ids: list[int] = []
        for symbol in symbols:
            if symbol:
                self._emit(symbol, parts, ids)
        return ids

    def _emit(self, symbol: str, parts: Mapping[str, tuple[str, str]], ids: list[int]) -> None:
        pending = [symbol]
        while pending:
            piece = pending.pop()
            entry = self._scores.get(piece)
            if entry is not None and piece not in self._unused:
                ids.append(entry[0])
            elif piece in parts:
                left, right = parts[piece]
                pending += (right, left)
            else:
                encoded = piece.encode("utf-8")
                if all(byte in self._bytes for byte in encoded):
                    ids.extend(self._bytes[byte] for byte in encoded)
                elif self._unknown_id is not None:
                    ids.append(self._unknown_id)
