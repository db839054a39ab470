"""Blocks in segments: never two in one place, all of it back in the end, and little of it lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.kernels.cuda.arena import BIG_BYTES, PAGE_BYTES, ROUNDING, SEGMENT_BYTES, Arena

MIB = 2**20


class Device:
    """Hands out memory whose segments touch each other, up to a limit."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.next, self.held, self.takes = limit, PAGE_BYTES, {}, 0
        self.held: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        assert size % PAGE_BYTES == 0
        if sum(self.held.values()) + size > self.limit:
            return None
        start, self.next = self.next, self.next + size
        self.held[start] = size
        self.takes += 1
        return start

    def give(self, start: int) -> None:
        del self.held[start]


sizes = st.one_of(st.integers(1, 5000), st.integers(1, 3 * MIB), st.integers(MIB, 40 * MIB))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 1 << 30)), max_size=120))
def test_blocks_lie_apart_inside_segments_and_all_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    device = Device()
    arena = Arena(device.take, device.give)
    blocks: dict[int, int] = {}
    for releases, size, pick in steps:
        if releases and blocks:
            address = sorted(blocks)[pick % len(blocks)]
            del blocks[address]
            arena.release(address)
        else:
            address = arena.allocate(size)
            assert address is not None
            assert address % ROUNDING == 0
            blocks[address] = size
        ends = [0]
        for start in sorted(blocks):
            assert start >= ends[-1], "two blocks in one place"
            ends.append(start + blocks[start])
            assert any(at <= start and ends[-1] <= at + room for at, room in device.held.items()), "outside"
        assert arena.held_bytes == sum(device.held.values())
    for address in blocks:
        arena.release(address)
    arena.trim()
    assert not device.held
    assert arena.held_bytes == 0


def test_what_was_released_is_used_again_as_a_whole() -> None:
    device = Device()
    arena = Arena(device.take, device.give)
    blocks = [arena.allocate(MIB) for _ in range(SEGMENT_BYTES // MIB)]
    assert device.takes == 1
    for place in (3, 1, 2, 0, *range(4, len(blocks))):
        arena.release(blocks[place])
    assert arena.allocate(SEGMENT_BYTES) == blocks[0]
    assert device.takes == 1


def test_segments_that_touch_are_not_joined() -> None:
    device = Device()
    arena = Arena(device.take, device.give)
    one, other = arena.allocate(BIG_BYTES), arena.allocate(BIG_BYTES)
    assert one + BIG_BYTES == other
    arena.release(other)
    arena.release(one)
    assert arena.allocate(2 * BIG_BYTES) not in (one, other)
    arena.trim()
    assert len(device.held) == 1


def test_weights_of_a_model_lose_little() -> None:
    """Integers, scales and minimums of 36 layers, in the driver's pages, against their own bytes."""
    device = Device()
    arena = Arena(device.take, device.give)
    layer = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
    wanted = 0
    for _ in range(36):
        for channels, inputs in layer:
            for size in (channels * inputs // 2, channels * inputs // 64, channels * inputs // 64):
                wanted += size
                arena.allocate(size)
            arena.allocate(4 * inputs)
            wanted += 4 * inputs
    assert sum(device.held.values()) <= 1.01 * wanted + SEGMENT_BYTES


def test_at_the_limit_it_takes_no_more_than_it_needs_and_what_it_kept_goes_first() -> None:
    device = Device(limit=SEGMENT_BYTES + 2 * PAGE_BYTES)
    arena = Arena(device.take, device.give)
    small = arena.allocate(MIB)
    assert arena.held_bytes == SEGMENT_BYTES
    assert arena.allocate(SEGMENT_BYTES) is None
    assert arena.allocate(3 * PAGE_BYTES) is not None  # in what is left of the segment
    assert arena.allocate(MIB + MIB // 2) is not None  # in a segment of a page, not of SEGMENT_BYTES
    assert arena.held_bytes == SEGMENT_BYTES + PAGE_BYTES
    assert arena.allocate(2 * PAGE_BYTES) is None
    device = Device(limit=20 * PAGE_BYTES)
    arena = Arena(device.take, device.give)
    arena.release(arena.allocate(30 * MIB))
    assert arena.allocate(39 * MIB) is not None
    assert small is not None
