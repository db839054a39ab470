"""Patterns over module names, as quantization configs write them, in time that no pattern can blow up.

A config comes from a stranger, and Python's `re` takes exponential time on some patterns. Here a pattern is matched by
the set of places that each of its parts can end at, a bit a place, which takes a few steps a part; a pattern that nests
repetitions until it takes thousands is refused.

What patterns over names use is supported: literals, `.`, classes, `\\d \\w \\s \\b` and their opposites, groups, `|`,
`* + ? {m,n}` (greedy or lazy: it makes no difference to whether a name matches), `^ $`, and lookahead. Whatever else
`re` knows is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_MAX_LENGTH, _MAX_DEPTH, _MAX_COUNT, _MAX_NAME, _MAX_LOOKS = 2000, 20, 1000, 1000, 2_000_000


class _Name:
    """A name that is being matched, and how many looks at its characters that has taken."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_NAME:
            raise ValueError(f"a name of {len(text)} characters: more than {_MAX_NAME} are not supported")
        self.text = text
        self.looks = 0

    def look(self) -> None:
        self.looks += len(self.text)
        if self.looks > _MAX_LOOKS:
            raise ValueError("it takes too long")


_Places = int
"""A set of offsets into a name: bit i is set if offset i is in it."""

_Node = Callable[[_Name, _Places], _Places]
"""Where a part of a pattern can end in a name, given where it can begin."""

_BRACES = re.compile(r"\{(\d{0,9})(?:(,)(\d{0,9}))?\}")

_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}


class Pattern:
    """A regular expression over module names."""

    def __init__(self, text: str) -> None:
        """Raises ValueError: it is no pattern, or uses what is not supported."""
        self.text = text
        self._node = _Parser(text).pattern()

    def matches(self, name: str) -> bool:
        """Whether it matches at the name's beginning, as `re.match` does: what follows the match may be anything.

        Raises ValueError: the pattern is one of those that take too long.
        """
        try:
            return self._node(_Name(name), 1) != 0
        except ValueError as error:
            raise ValueError(f"the pattern {_shown(self.text)!r} on the name {_shown(name)!r}: {error}") from None


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"a pattern of {len(text)} characters: more than {_MAX_LENGTH} are not supported")

    def pattern(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("a closing parenthesis that nothing opened")
        return node

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"the pattern {_shown(self._text)!r}: {problem}, at character {self._at}")

    def _take(self, token: str) -> bool:
        if self._text.startswith(token, self._at):
            self._at += len(token)
            return True
        return False

    def _next(self) -> str:
        if self._at == len(self._text):
            raise self._error("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"groups more than {_MAX_DEPTH} deep")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else _any_of(options)

    def _sequence(self) -> _Node:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return _in_turn(parts)

    def _repeated(self, node: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return node
        low, high = bounds
        self._take("?")
        if self._take("+"):
            raise self._error("possessive repetition is not supported")
        if self._bounds() is not None:
            raise self._error("a repetition of a repetition")
        return _repeat(node, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        for token, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(token):
                return bounds
        braces = _BRACES.match(self._text, self._at)
        if braces is None or braces[0] == "{}":
            return None
        self._at = braces.end()
        low = int(braces[1] or 0)
        high = low if braces[2] is None else int(braces[3]) if braces[3] else None
        if max(low, high or 0) > _MAX_COUNT or (high is not None and high < low):
            raise self._error(f"a repetition {braces[0]} that is not between 0 and {_MAX_COUNT}")
        return low, high

    def _atom(self) -> _Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return _one(self._char_class())
        if char == ".":
            return _one(lambda char: char != "\n")
        if char == "^":
            return lambda name, places: places & 1
        if char == "$":
            return lambda name, places: places & (1 << len(name.text))
        if char in "*+?":
            raise self._error(f"a {char} with nothing to repeat")
        if char == "\\":
            return self._escape()
        return _one(char.__eq__)

    def _group(self) -> _Node:
        look: bool | None = None
        if self._take("?"):
            if self._take("=") or self._take("!"):
                look = self._text[self._at - 1] == "="
            elif self._take("P<"):
                end = self._text.find(">", self._at)
                if end < 0 or not self._text[self._at : end].isidentifier():
                    raise self._error("a group without a proper name")
                self._at = end + 1
            elif not self._take(":"):
                raise self._error("this kind of group is not supported")
        node = self._alternatives()
        if not self._take(")"):
            raise self._error("a parenthesis that nothing closes")
        return node if look is None else _look_ahead(node, look)

    def _escape(self) -> _Node:
        char = self._next()
        if char in "bB":
            return _boundary(char == "b")
        if char == "A":
            return lambda name, places: places & 1
        if char == "Z":
            return lambda name, places: places & (1 << len(name.text))
        return _one(self._escaped(char))

    def _escaped(self, char: str) -> Callable[[str], bool]:
        known = _CLASSES.get(char.lower())
        if known is not None:
            return known if char.islower() else lambda other: not known(other)
        if char.isalnum():
            raise self._error(f"\\{char} is not supported")
        return char.__eq__

    def _char_class(self) -> Callable[[str], bool]:
        negated = self._take("^")
        tests: list[Callable[[str], bool]] = []
        first = True
        while first or not self._take("]"):
            first = False
            char = self._next()
            if char == "\\":
                char = self._next()
                if char.isalnum():
                    tests.append(self._escaped(char))
                    continue
            last = char
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._next()
                if last == "\\":
                    last = self._next()
                    if last.isalnum():
                        raise self._error("a range that ends in a class")
                if last < char:
                    raise self._error(f"a range {char}-{last} that is the wrong way round")
            tests.append(_between(char, last))
        return lambda char: any(test(char) for test in tests) != negated


def _shown(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda char: low <= char <= high


def _one(test: Callable[[str], bool]) -> _Node:
    def ends(name: _Name, places: _Places) -> _Places:
        name.look()
        found = 0
        for at, char in enumerate(name.text):
            if places >> at & 1 and test(char):
                found |= 2 << at
        return found

    return ends


def _in_turn(parts: list[_Node]) -> _Node:
    def ends(name: _Name, places: _Places) -> _Places:
        for part in parts:
            if not places:
                break
            places = part(name, places)
        return places

    return ends


def _any_of(options: list[_Node]) -> _Node:
    def ends(name: _Name, places: _Places) -> _Places:
        found = 0
        for option in options:
            found |= option(name, places)
        return found

    return ends


def _repeat(node: _Node, low: int, high: int | None) -> _Node:
    def ends(name: _Name, places: _Places) -> _Places:
        for _ in range(low):
            before, places = places, node(name, places)
            if places in (0, before):
                break
        found = new = places
        remaining = high - low if high is not None else len(name.text) + 1
        while new and remaining:
            new = node(name, new) & ~found
            found |= new
            remaining -= 1
        return found

    return ends


def _look_ahead(node: _Node, wanted: bool) -> _Node:
    def ends(name: _Name, places: _Places) -> _Places:
        found = 0
        for at in range(len(name.text) + 1):
            if places >> at & 1 and (node(name, 1 << at) != 0) == wanted:
                found |= 1 << at
        return found

    return ends


def _boundary(wanted: bool) -> _Node:
    word = _CLASSES["w"]

    def ends(name: _Name, places: _Places) -> _Places:
        name.look()
        found, text = 0, name.text
        for at in range(len(text) + 1):
            before, after = at > 0 and word(text[at - 1]), at < len(text) and word(text[at])
            if places >> at & 1 and (before != after) == wanted:
                found |= 1 << at
        return found

    return ends
