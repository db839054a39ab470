"""SentencePiece's unigram model: the way through a text whose pieces score best together."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

_UNKNOWN_PENALTY = 10.0
# The score that a vocabulary without positive scores has as its largest: the smallest normal 32-bit number.
_SMALLEST = 2.0**-126


class UnigramModel:
    """Text to ids by scores. Has no special tokens: every text is only text to it.

    Sums are kept in 32 bits as SentencePiece keeps them, so that equal sums are equal here too.
    """

    def __init__(
        self,
        scores: Mapping[str, tuple[int, float]],
        user_defined: Mapping[str, int],
        spell_unknown: Callable[[str], list[int]],
    ) -> None:
        """
        Args:
            scores: (id, 32-bit score) of every piece that text can become, spaces written as "▁".
            user_defined: The ids of the pieces that are always taken whole, whatever the scores.
            spell_unknown: The ids of a character that is no piece.
        """
        numbers = [score for _, score in scores.values()]
        largest = max([*numbers, _SMALLEST])
        unknown = array("f", [min(numbers, default=0.0) - _UNKNOWN_PENALTY])
        self._unknown_score = unknown[0]
        self._pieces: dict[str, tuple[int, float]] = {
            **scores,
            **{piece: (i, len(piece.encode()) * largest - 0.1) for piece, i in user_defined.items()},
        }
        self._spell_unknown = spell_unknown
        lengths: dict[str, set[int]] = {}
        for piece in self._pieces:
            lengths.setdefault(piece[0], set()).add(len(piece))
        self._lengths = {first: tuple(sorted(found)) for first, found in lengths.items()}

    def encode(self, text: str) -> list[int]:
        """The ids of a normalized text."""
        size = len(text)
        best = array("f", bytes(4 * (size + 1)))
        rounded = array("f", [0.0])
        came_from = [-1] * (size + 1)
        taken: list[int | None] = [None] * (size + 1)
        for start in range(size):
            till_here = best[start]
            is_piece = False
            for length in self._lengths.get(text[start], ()):
                end = start + length
                if end > size:
                    break
                entry = self._pieces.get(text[start:end])
                if entry is None:
                    continue
                rounded[0] = entry[1] + till_here
                if came_from[end] < 0 or rounded[0] > best[end]:
                    best[end], came_from[end], taken[end] = rounded[0], start, entry[0]
                if length == 1:
                    is_piece = True
            if not is_piece:
                end = start + 1
                rounded[0] = self._unknown_score + till_here
                if came_from[end] < 0 or rounded[0] > best[end]:
                    best[end], came_from[end], taken[end] = rounded[0], start, None
        backwards: list[tuple[int, int]] = []
        end = size
        while end > 0:
            backwards.append((came_from[end], end))
            end = came_from[end]
        ids: list[int] = []
        for start, end in reversed(backwards):
            token_id = taken[end]
            ids += [token_id] if token_id is not None else self._spell_unknown(text[start:end])
        return ids
