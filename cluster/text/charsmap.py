"""SentencePiece's rules of normalization: a trie of texts and what each of them is replaced by."""

from __future__ import annotations

import sys
from array import array

_MAX_RULE_BYTES = 256


class DamagedCharsmapError(ValueError):
    """The rules cannot be read; says why."""


class Charsmap:
    """The rules of a `precompiled_charsmap`.

    The blob is the length of a double-array trie (little-endian, 4 bytes), the trie in Darts-clone's units of 4 bytes,
    and the replacements, each ended by a zero byte; a key's value is where its replacement begins. The trie is walked
    as it is: it has hundreds of thousands of ways through few units.
    """

    def __init__(self, blob: bytes) -> None:
        """`blob`: empty for no rules. Raises DamagedCharsmapError."""
        size = int.from_bytes(blob[:4], "little")
        if blob and (size % 4 or not 4 <= size <= len(blob) - 4):
            raise DamagedCharsmapError(f"a trie of {size} bytes in {len(blob)} bytes")
        units = array("I")
        units.frombytes(blob[4 : 4 + size])
        if sys.byteorder == "big":
            units.byteswap()
        self._units = units.tolist()
        self._replacements = blob[4 + size :]
        self._known: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._units)

    def longest(self, text: bytes, start: int) -> tuple[str, int] | None:
        """The rule for the longest stretch of a UTF-8 text that begins at byte `start` and has one: what replaces it,
        and the byte after it.

        Raises DamagedCharsmapError.
        """
        units = self._units
        node = _offset(units[0])
        value = end = -1
        for position in range(start, min(len(text), start + _MAX_RULE_BYTES)):
            byte = text[position]
            node ^= byte
            # The top bit marks a value, which is no way on.
            if node >= len(units) or units[node] & 0x800000FF != byte:
                break
            unit = units[node]
            node ^= _offset(unit)
            if unit & 0x100:
                if node >= len(units):
                    raise DamagedCharsmapError(f"a value in unit {node} of {len(units)}")
                value, end = units[node] & 0x7FFFFFFF, position + 1
        if end < 0:
            return None
        if end < len(text) and text[end] & 0xC0 == 0x80:
            raise DamagedCharsmapError("a rule that ends inside a character")
        known = self._known.get(value)
        if known is None:
            known = self._known[value] = self._replacement(value)
        return known, end

    def _replacement(self, start: int) -> str:
        stop = self._replacements.find(b"\0", start)
        if stop < 0:
            raise DamagedCharsmapError(f"a replacement at byte {start} of {len(self._replacements)}")
        try:
            return self._replacements[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DamagedCharsmapError("a replacement that is no UTF-8") from error


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
