"""Finding the keys and values of a prompt's beginning that were, or are about to be, computed for another sequence."""

from __future__ import annotations

from collections.abc import Collection

from shardline.scheduler.block_pool import ROOT_HASH, BlockPool
from shardline.scheduler.sequence import Sequence


class PrefixCache:
    """The chains of full blocks of all sequences, over one `BlockPool`.

    A block can be found as soon as the plan that fills it was *issued*, not only when its result came: stages run plans
    in order, so a later plan reads what an earlier one wrote. When a stage is lost, plans in flight never run; then the
    pool is reset, and with it all that was published.

    A block that a running sequence is still going to fill is *coming*: who needs it waits, so that sequences with one
    prompt (n > 1, or many users behind one system prompt) compute it once.
    """

    def __init__(self, pool: BlockPool, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled
        self._coming: dict[int, Sequence] = {}  # by chain hash: who fills it

    def find(self, sequence: Sequence) -> list[int] | None:
        """Blocks with a waiting sequence's first tokens; None when it had better wait for more of them.

        At least one of its tokens is left to compute: the next token is sampled from its logits.
        """
        if sequence.awaits in self._coming:
            return None
        hashes = self._hashes(sequence, (sequence.num_tokens - 1) // self._pool.block_size)
        found = self._pool.match(hashes, sequence.token_ids)
        # Who fills a chain fills it in order, so what is coming of this one follows on what was found.
        end = len(found)
        while end < len(hashes) and hashes[end] in self._coming:
            end += 1
        sequence.awaits = hashes[end - 1] if end > len(found) else None
        return found if sequence.awaits is None else None

    def expect(self, sequence: Sequence) -> None:
        """A sequence begins to run: the blocks of the tokens that it has are coming."""
        done = sequence.num_computed // self._pool.block_size
        for chain_hash in self._hashes(sequence, sequence.num_tokens // self._pool.block_size)[done:]:
            self._coming.setdefault(chain_hash, sequence)

    def publish(self, sequence: Sequence, first: int) -> None:
        """A plan was issued with tokens from `first` to `num_computed`: let the blocks that it fills be found."""
        size = self._pool.block_size
        start, end = first // size, sequence.num_computed // size
        if start == end:
            return
        hashes = self._hashes(sequence, end)
        for index in range(start, len(hashes)):
            self._pool.publish(
                sequence.table, index, hashes[index], sequence.token_ids(index * size, (index + 1) * size)
            )
            self._came(hashes[index], sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """A sequence stops running: what it has not filled is not coming any more."""
        for chain_hash in sequence.hashes[sequence.num_computed // self._pool.block_size :]:
            self._came(chain_hash, sequence)

    def check(self, running: Collection[Sequence]) -> None:
        """Prove that somebody is filling each block that is coming."""
        for chain_hash, sequence in self._coming.items():
            assert sequence in running, "nobody fills a block that others wait for"
            ahead = sequence.hashes[sequence.num_computed // self._pool.block_size :]
            assert chain_hash in ahead, "a block is said to be coming that was filled"

    def _came(self, chain_hash: int, sequence: Sequence) -> None:
        if self._coming.get(chain_hash) is sequence:
            del self._coming[chain_hash]

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Chain hashes of the first `num_blocks` full blocks of a sequence; computed once; none when disabled."""
        if not self._enabled:
            return []
        hashes, size = sequence.hashes, self._pool.block_size
        if not hashes:
            hashes.extend(sequence.request.prompt_hashes)
        while len(hashes) < num_blocks:
            index = len(hashes)
            token_ids = sequence.token_ids(index * size, (index + 1) * size)
            hashes.append(self._pool.hash_of(hashes[-1] if hashes else ROOT_HASH, token_ids))
        if not sequence.request.prompt_hashes:
            sequence.request.prompt_hashes = hashes[: len(sequence.request.request.prompt_ids) // size]
        return hashes[:num_blocks]
