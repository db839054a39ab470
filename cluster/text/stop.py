"""Stop strings, found over token borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes a sequence's text on until a stop string is complete, and none of that string ever.

    Text that may still become a stop string is held back. Which string ends the text, and where, does not depend on how
    the text is cut into calls: the first to be complete does; of several that are complete at the same character, the
    longest. The text ends right before it.

    Attributes:
        matched: The stop string that ended the text; None while it goes on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty; no stops pass all text through."""
        assert all(stops), "an empty stop string would end every text"
        # The longest first: of those complete at one character it is the one that began first.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        # For each stop, how many of its characters the text ends with.
        self._lengths = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take new text; give what is certain to be part of the output. Text after the stop string is dropped."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        lengths = self._lengths
        for position, character in enumerate(text):
            for index, stop in enumerate(self._stops):
                length = lengths[index]
                while length and stop[length] != character:
                    length = self._borders[index][length - 1]
                if stop[length] == character:
                    length += 1
                lengths[index] = length
                if length == len(stop):
                    self.matched = stop
                    seen = self._held + text[: position + 1]
                    self._held = ""
                    return seen[: len(seen) - len(stop)]
        seen = self._held + text
        keep = len(seen) - max(lengths)
        self._held = seen[keep:]
        return seen[:keep]

    def finish(self) -> str:
        """The text that was held back and did not become a stop string, when the sequence ends for another reason."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return held


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that also ends it (Knuth-Morris-Pratt)."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = borders[length - 1]
        if stop[position] == stop[length]:
            length += 1
        borders[position] = length
    return borders
