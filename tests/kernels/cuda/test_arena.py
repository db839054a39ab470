"""Blocks in segments: never two in one place, all of it back in the end, and little of it lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.cluster.planning.stage_costs import GPU_PADDING_BYTES, GPU_PADDING_SHARE
from shardline.kernels.cuda.arena import BIG_BYTES, PAGE_BYTES, ROUNDING, SEGMENT_BYTES, Arena
from shardline.kernels.cuda.pack import PIECE_BYTES

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


def test_a_small_block_does_not_keep_what_a_large_one_left() -> None:
    device = Device()
    arena = Arena(device.take, device.give)
    left = arena.allocate(300 * MIB)
    arena.release(left)
    small, middle = arena.allocate(1000), arena.allocate(40 * MIB)
    assert len(device.held) == 3
    assert arena.allocate(300 * MIB) == left
    arena.release(left)
    arena.trim()
    assert sum(device.held.values()) == SEGMENT_BYTES + 40 * MIB
    # Where there is no other room it goes for that of what holds nothing.
    device = Device(limit=302 * MIB)
    arena = Arena(device.take, device.give)
    arena.release(arena.allocate(300 * MIB))
    assert arena.allocate(1000) is not None
    assert arena.allocate(290 * MIB) is not None
    assert None not in (small, middle)


MODELS = {
    "135M": (30, 576, 576 + 2 * 192, 1536, 49152),
    "1.5B": (28, 1536, 1536 + 2 * 256, 8960, 151936),
    "8B": (32, 4096, 4096 + 2 * 1024, 14336, 128256),
    "27B": (62, 5376, 4096 + 2 * 2048, 21504, 262208),
    "70B": (80, 8192, 8192 + 2 * 1024, 28672, 128256),
}
"""Layers, hidden, channels of q, k and v, width of the MLP, vocabulary."""


def stage_loads(device: Device, name: str, layers: int, group: int, has_minimum: bool) -> int:
    """Loads a stage as weights.py and pack.py do, with what each matrix takes on its way, then the arrays of a step.

    Returns bytes of all that stays.
    """
    most, hidden, qkv, width, vocab = MODELS[name]
    arena = Arena(device.take, device.give)
    kept = 0

    def place(size: int) -> int:
        nonlocal kept
        address = arena.allocate(size)
        assert address is not None, "no room, although it was planned"
        kept += size
        return address

    def copies(sizes: list[int]) -> None:
        nonlocal kept
        for address in [place(size) for size in sizes]:
            arena.release(address)
        kept -= sum(sizes)

    def matrix(channels: int, inputs: int, sources: int = 1) -> None:
        sizes = [channels * inputs // 2] + [2 * channels * inputs // group] * (1 + has_minimum)
        for size in sizes:
            place(size)
        for size in sizes:
            for start in range(0, size // sources, PIECE_BYTES):
                copies([min(PIECE_BYTES, size // sources - start)] * sources)

    if layers in (0, 80):
        matrix(vocab, hidden)
    for _ in range(min(layers, most)):
        place(4 * hidden)
        matrix(qkv, hidden)
        matrix(hidden, hidden)
        place(4 * hidden)
        matrix(2 * width, hidden, 2)
        matrix(hidden, width)
    weights = kept
    for size in (4 * hidden, 4 * 512 * hidden, 4 * 64 * vocab, 4 * 512 * qkv, 4 * 512 * width, 20 * MIB, 20 * MIB):
        place(size)
    arena.trim()
    assert arena.held_bytes <= kept + weights // GPU_PADDING_SHARE + GPU_PADDING_BYTES
    return kept + weights // GPU_PADDING_SHARE


@pytest.mark.parametrize(("group", "has_minimum"), [(128, False), (32, True)])
@pytest.mark.parametrize("layers", [0, 1, 5, 80])
@pytest.mark.parametrize("name", MODELS)
def test_of_a_stage_no_more_is_held_than_the_planner_adds_and_it_loads_within_that(
    name: str, layers: int, group: int, has_minimum: bool
) -> None:
    planned = stage_loads(Device(), name, layers, group, has_minimum) + GPU_PADDING_BYTES
    stage_loads(Device(planned), name, layers, group, has_minimum)
