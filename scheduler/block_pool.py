"""The pool of block ids: who holds which block, and which tokens' keys and values a full block keeps.

A block is in exactly one of three states:

    free        nothing of use in it
    held        by one or more sequences
    idle        by none, but it is published: its content may be found again, until the block is needed (LRU)

A *published* block is full, and is found by the hash of a chain: its parent's hash with its own tokens. A hash only
finds a candidate. The candidate is taken only if its tokens are equal and its parent is the very block that was matched
before it, so that two prefixes with one hash are never mixed up.

Holders of a block hold all blocks before it in the chain too, and release the last first. So a parent is never idle
while a child is held, and in the LRU order a child comes before its parent: evicting never cuts a chain in two.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

HashBlock = Callable[[int, tuple[int, ...]], int]

ROOT_HASH = 0
_ROOT_SERIAL = 0


def hash_block(parent: int, token_ids: tuple[int, ...]) -> int:
    """The chain's hash of a full block after a block with hash `parent` (`ROOT_HASH` for the first)."""
    return hash((parent, token_ids))


@dataclass(frozen=True, slots=True)
class _Published:
    """What a published block keeps. A serial is never used twice, while block ids are: so it names the parent."""

    block_id: int
    chain_hash: int
    token_ids: tuple[int, ...]
    serial: int
    parent_serial: int


class BlockPool:
    """Block ids 0 .. num_blocks - 1 of `block_size` tokens each. `hash_of` is for tests that want collisions."""

    def __init__(self, num_blocks: int, block_size: int, hash_of: HashBlock = hash_block) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hash_of = hash_of
        self._serial = _ROOT_SERIAL
        self.reset()

    def reset(self) -> None:
        """Every block is free and nothing is published: what the stages kept is lost."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._holders = [0] * self.num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._published: list[_Published | None] = [None] * self.num_blocks
        self._by_hash: dict[int, _Published] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: the free and the idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Published blocks that nobody holds."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks that many tokens take."""
        return -(-num_tokens // self.block_size)

    def holders(self, block_id: int) -> int:
        """How many sequences hold the block."""
        return self._holders[block_id]

    def take(self, count: int) -> list[int]:
        """Give `count` blocks to one holder: free ones first, then the idle ones that were not used for longest."""
        assert 0 <= count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        taken = []
        for _ in range(count):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _none = self._idle.popitem(last=False)
                self._unpublish(block_id)
            self._holders[block_id] = 1
            taken.append(block_id)
        return taken

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add a holder to each of these blocks, which `match` found."""
        for block_id in block_ids:
            assert self._published[block_id] is not None, f"block {block_id} is not published"
            if self._holders[block_id] == 0:
                del self._idle[block_id]
            self._holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one holder from each block of a table; last block first, so that a chain is evicted from its end."""
        for block_id in reversed(block_ids):
            self._holders[block_id] -= 1
            assert self._holders[block_id] >= 0, f"block {block_id} was released more often than held"
            if self._holders[block_id] == 0:
                if self._published[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._idle[block_id] = None

    def match(self, hashes: Sequence[int], token_ids: Callable[[int, int], tuple[int, ...]]) -> list[int]:
        """The published blocks that keep the longest prefix of a chain.

        Args:
            hashes: The chain's hashes, first block first, as far as it may be matched.
            token_ids: The tokens at positions first <= i < end, to compare with the blocks' own.
        """
        found: list[int] = []
        parent_serial = _ROOT_SERIAL
        for index, chain_hash in enumerate(hashes):
            block = self._by_hash.get(chain_hash)
            if block is None or block.parent_serial != parent_serial:
                break
            if block.token_ids != token_ids(index * self.block_size, (index + 1) * self.block_size):
                break
            found.append(block.block_id)
            parent_serial = block.serial
        return found

    def num_idle_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(1 for block_id in block_ids if self._holders[block_id] == 0)

    def num_released_by(self, tables: Iterable[Sequence[int]], keep: Sequence[int]) -> int:
        """How many blocks, besides those to `keep`, would become available if the holders of these tables let go."""
        held = Counter(block_id for table in tables for block_id in table)
        kept = set(keep)
        return sum(1 for block_id, count in held.items() if count == self._holders[block_id] and block_id not in kept)

    def publish(self, table: Sequence[int], index: int, chain_hash: int, token_ids: tuple[int, ...]) -> None:
        """Let the full block `table[index]` be found.

        Nothing happens when another block is published under that hash (the same tokens computed twice at the same
        time, or a collision), nor when the block before it in the table is not published: the chain ends there.
        """
        block_id = table[index]
        if chain_hash in self._by_hash or self._published[block_id] is not None:
            return
        parent_serial = _ROOT_SERIAL
        if index:
            parent = self._published[table[index - 1]]
            if parent is None:
                return
            parent_serial = parent.serial
        self._serial += 1
        block = _Published(block_id, chain_hash, token_ids, self._serial, parent_serial)
        self._published[block_id] = block
        self._by_hash[chain_hash] = block

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that every block is accounted for exactly, given the tables of all holders."""
        held = Counter(block_id for table in tables for block_id in table)
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        free = set(self._free)
        alive = {_ROOT_SERIAL} | {block.serial for block in self._by_hash.values()}
        for block_id in range(self.num_blocks):
            states = (block_id in free, block_id in self._idle, self._holders[block_id] > 0)
            assert sum(states) == 1, f"block {block_id} is in the states (free, idle, held) = {states}"
            assert self._holders[block_id] == held[block_id], (
                f"block {block_id} counts {self._holders[block_id]} holders, {held[block_id]} tables have it"
            )
            block = self._published[block_id]
            if block is None:
                assert block_id not in self._idle, f"block {block_id} is idle but not published: it is leaked"
                continue
            assert block_id not in free, f"block {block_id} is free and published"
            assert block.block_id == block_id, f"block {block_id} is published as {block.block_id}"
            assert self._by_hash.get(block.chain_hash) is block, f"block {block_id} is published but cannot be found"
            assert len(block.token_ids) == self.block_size, f"block {block_id} is published but not full"
            assert block.parent_serial in alive, f"block {block_id} outlived its parent"
        assert len(self._by_hash) == sum(block is not None for block in self._published), "a hash finds no block"

    def _unpublish(self, block_id: int) -> None:
        block = self._published[block_id]
        assert block is not None
        del self._by_hash[block.chain_hash]
        self._published[block_id] = None
