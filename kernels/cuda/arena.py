"""Places blocks of memory in segments that were taken from a device: the arithmetic alone, on addresses."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

ROUNDING = 512
"""A block takes a multiple of it."""

PAGE_BYTES = 2 << 20
"""The driver hands out whole pages of this size; so segments are, or the rest of a page would be lost."""

BIG_BYTES = 2 << 20
"""From here on a block has a segment of its own, whose last page has room for small ones."""

SEGMENT_BYTES = 8 << 20
"""Of a segment for small blocks."""


class Arena:
    """Best fit, with neighbours joined when they are free. One thread at a time uses it.

    A segment that holds no block goes only to a block it would have been taken for: a small one in what a large copy
    leaves behind would keep all of that from being given back.
    """

    def __init__(self, take: Callable[[int], int | None], give: Callable[[int], None]) -> None:
        """
        Args:
            take: From bytes to the address of so much new memory, or None when there is none.
            give: Gives such an address back.
        """
        self._take, self._give = take, give
        self._segments: dict[int, int] = {}  # start -> size
        self._used: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []

    @property
    def held_bytes(self) -> int:
        """Of all segments."""
        return sum(self._segments.values())

    def allocate(self, size: int) -> int | None:
        """The address of a new block, or None when it fits nowhere and `take` gave none."""
        size = _up(size, ROUNDING)
        place = self._best_fit(size)
        if place is None:
            place = self._grow(size)
            if place is None:
                return None
        room = self._remove_free(place)
        self._used[place] = size
        if room > size:
            self._add_free(place + size, room - size)
        return place

    def release(self, address: int) -> None:
        """Give a block back, for later ones."""
        start, size = address, self._used.pop(address)
        before = self._free_ends.get(start)
        if before is not None and start not in self._segments:
            size += self._remove_free(before)
            start = before
        end = start + size
        if end in self._free and end not in self._segments:
            size += self._remove_free(end)
        self._add_free(start, size)

    def trim(self) -> None:
        """Give segments back that hold no block."""
        for start, size in list(self._segments.items()):
            if self._free.get(start) == size:
                self._remove_free(start)
                del self._segments[start]
                self._give(start)

    def close(self) -> None:
        """Give everything back, blocks and all."""
        segments, self._segments = self._segments, {}
        for start in segments:
            self._give(start)

    def _best_fit(self, size: int) -> int | None:
        wanted = _segment_bytes(size)
        for place in range(bisect_left(self._by_size, (size, -1)), len(self._by_size)):
            room, start = self._by_size[place]
            if room <= wanted or self._segments.get(start) != room:
                return start
        return None

    def _grow(self, size: int) -> int | None:
        wanted = _segment_bytes(size)
        start = self._take(wanted)
        if start is None:
            # What holds no block was left alone above; now it makes room.
            self.trim()
            wanted = _up(size, PAGE_BYTES)
            start = self._take(wanted)
        if start is not None:
            self._segments[start] = wanted
            self._add_free(start, wanted)
        return start

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_ends[start + size] = start
        insort(self._by_size, (size, start))

    def _remove_free(self, start: int) -> int:
        size = self._free.pop(start)
        del self._free_ends[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size


def _segment_bytes(size: int) -> int:
    """Of the segment that is taken for a block of that size."""
    return _up(size, PAGE_BYTES) if size >= BIG_BYTES else SEGMENT_BYTES


def _up(size: int, multiple: int) -> int:
    return -(-max(size, 1) // multiple) * multiple
