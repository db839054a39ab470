"""Tokens that are found in a text as they are written, before it is encoded."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

_WHITE_SPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    chr(0x2000 + i) for i in range(11)
}
"""Unicode's property White_Space."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A token that is found by its name.

    Attributes:
        name: What is looked for; not empty.
        token_id: What it becomes.
        special: Whether it is found only where special tokens are parsed.
        lstrip, rstrip: Whether white space before or after it becomes part of it.
        single_word: Whether it is found only where no letter, digit or "_" touches it.
    """

    name: str
    token_id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class LiteralTokens:
    """Finds literals: the leftmost first, the longest of those that begin there."""

    def __init__(self, literals: Iterable[Literal]) -> None:
        self._by_name = {literal.name: literal for literal in literals}
        names = sorted(self._by_name, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None

    def cut(self, text: str) -> Iterator[tuple[str, int | None]]:
        """The text's stretches in order: (text, None) between literals, (name, id) for each of them."""
        end = 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            literal = self._by_name[match.group()]
            start, stop = match.span()
            if start < end:
                # Its beginning was white space that the literal before took.
                continue
            if literal.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[stop : stop + 1])):
                continue
            while literal.lstrip and start > end and text[start - 1] in _WHITE_SPACE:
                start -= 1
            while literal.rstrip and stop < len(text) and text[stop] in _WHITE_SPACE:
                stop += 1
            if start > end:
                yield text[end:start], None
            yield literal.name, literal.token_id
            end = stop
        if end < len(text):
            yield text[end:], None


class LiteralEncoder:
    """An `Encoder` that cuts a text at literals and encodes the stretches between them."""

    def __init__(
        self,
        literals: Iterable[Literal],
        encode_stretch: Callable[[str, bool], list[int]],
        *,
        restarts: Container[int] = frozenset(),
        transparent: Container[int] = frozenset(),
    ) -> None:
        """
        Args:
            literals: The tokens to find.
            encode_stretch: The ids of a stretch, given whether a text begins with it.
            restarts: Literals after which a text begins anew.
            transparent: Literals after which it begins if it would have begun without them.
        """
        literals = tuple(literals)
        self._all = LiteralTokens(literals)
        self._plain = LiteralTokens(literal for literal in literals if not literal.special)
        self._encode_stretch = encode_stretch
        self._restarts = restarts
        self._transparent = transparent

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids: list[int] = []
        begins = True
        for stretch, token_id in (self._all if parse_special else self._plain).cut(text):
            if token_id is None:
                ids += self._encode_stretch(stretch, begins)
                begins = False
            else:
                ids.append(token_id)
                if token_id not in self._transparent:
                    begins = token_id in self._restarts
        return ids


def _is_word(character: str) -> bool:
    return re.match(r"\w", character) is not None
