"""The pool of block ids: exact accounting, LRU, and content found only when it is the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.scheduler.block_pool import ROOT_HASH, BlockPool, hash_block

SIZE = 8


class Chain:
    """One prefix: its tokens and hashes, as a sequence has them."""

    def __init__(self, pool, tokens):
        self.tokens = tuple(tokens)
        self.hashes = []
        for first in range(0, len(self.tokens) - SIZE + 1, SIZE):
            parent = self.hashes[-1] if self.hashes else ROOT_HASH
            self.hashes.append(pool.hash_of(parent, self.tokens[first : first + SIZE]))

    def find(self, pool):
        return pool.match(self.hashes, lambda first, end: self.tokens[first:end])

    def publish(self, pool, table):
        for index, chain_hash in enumerate(self.hashes):
            pool.publish(table, index, chain_hash, self.tokens[index * SIZE : (index + 1) * SIZE])


def tokens_of(*values):
    return [value for value in values for _ in range(SIZE)]


def test_a_block_is_free_then_held_then_idle_then_free_again():
    pool = BlockPool(3, SIZE)
    chain = Chain(pool, tokens_of(1))
    table = pool.take(2)
    assert (pool.num_held, pool.num_idle, pool.num_available) == (2, 0, 1)
    chain.publish(pool, table)
    pool.release(table)
    assert (pool.num_held, pool.num_idle, pool.num_available) == (0, 1, 3)
    assert chain.find(pool) == table[:1]
    everything = pool.take(3)
    assert sorted(everything) == [0, 1, 2]
    assert chain.find(pool) == []
    pool.release(everything)
    assert (pool.num_held, pool.num_idle, pool.num_available) == (0, 0, 3)
    pool.check([])


def test_free_blocks_go_before_those_that_may_be_found_again():
    pool = BlockPool(4, SIZE)
    chain = Chain(pool, tokens_of(1, 2))
    table = pool.take(2)
    chain.publish(pool, table)
    pool.release(table)
    assert not set(pool.take(2)) & set(table)
    assert chain.find(pool) == table


def test_the_least_recently_used_goes_first_and_a_chain_from_its_end():
    pool = BlockPool(6, SIZE)
    chains = [Chain(pool, tokens_of(value, value + 1)) for value in (1, 3, 5)]
    tables = [pool.take(2) for _ in chains]
    for chain, table in zip(chains, tables, strict=True):
        chain.publish(pool, table)
    for table in tables:
        pool.release(table)
    pool.hold(tables[0])  # used again, so that the second chain is the one not used for longest
    pool.release(tables[0])
    pool.take(1)
    assert [len(chain.find(pool)) for chain in chains] == [2, 1, 2]
    pool.take(1)
    assert [len(chain.find(pool)) for chain in chains] == [2, 0, 2]
    pool.take(3)
    assert [len(chain.find(pool)) for chain in chains] == [1, 0, 0]


def test_a_shared_block_is_released_by_its_last_holder():
    pool = BlockPool(2, SIZE)
    chain = Chain(pool, tokens_of(1))
    table = pool.take(1)
    chain.publish(pool, table)
    pool.hold(table)
    pool.release(table)
    assert (pool.num_held, pool.num_idle) == (1, 0)
    pool.check([table])
    pool.release(table)
    assert (pool.num_held, pool.num_idle) == (0, 1)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(table)


@pytest.mark.parametrize("hash_of", [hash_block, lambda parent, token_ids: 7], ids=["hashed", "all collide"])
def test_only_the_same_tokens_after_the_same_tokens_are_found(hash_of):
    pool = BlockPool(8, SIZE, hash_of)
    table = pool.take(2)
    Chain(pool, tokens_of(1, 2)).publish(pool, table)
    found = Chain(pool, tokens_of(1, 2, 3)).find(pool)
    assert found == table[: len(found)]
    assert found or hash_of is not hash_block
    assert Chain(pool, tokens_of(2)).find(pool) == []
    assert Chain(pool, tokens_of(3, 2)).find(pool) == []
    assert len(Chain(pool, tokens_of(1, 3)).find(pool)) <= 1


def test_equal_tokens_after_a_different_beginning_are_not_found_though_the_hash_is_equal():
    """The second block of two chains has the same tokens and, here, the same hash; its content differs."""
    pool = BlockPool(8, SIZE, lambda parent, token_ids: token_ids[0])
    one, other = Chain(pool, tokens_of(1, 5)), Chain(pool, tokens_of(2, 5))
    one_table, other_table = pool.take(2), pool.take(2)
    one.publish(pool, one_table)
    other.publish(pool, other_table)
    assert one.find(pool) == one_table
    assert other.find(pool) == other_table[:1]


def test_the_id_of_an_evicted_parent_does_not_vouch_for_the_child():
    """Block 0 is handed out again for other tokens with the same hash: what followed the old ones must not be found."""
    pool = BlockPool(3, SIZE, lambda parent, token_ids: token_ids[0] % 10)
    old, new = Chain(pool, tokens_of(1, 2)), Chain(pool, tokens_of(11, 2))
    table = pool.take(2)
    old.publish(pool, table)
    child = pool._published[table[1]]
    pool.release(table)
    reused = pool.take(3)
    pool.publish([table[0]], 0, new.hashes[0], new.tokens[:SIZE])
    pool.release(reused)
    assert new.hashes == old.hashes
    assert new.find(pool) == [table[0]]
    # Even if the child's entry had survived its parent:
    pool._by_hash[child.chain_hash] = child
    assert new.find(pool) == [table[0]]


def test_the_same_content_twice_is_published_once_and_ends_the_second_chain():
    pool = BlockPool(6, SIZE)
    chain = Chain(pool, tokens_of(1, 2))
    first, second = pool.take(1), pool.take(2)
    Chain(pool, tokens_of(1)).publish(pool, first)
    chain.publish(pool, second)
    assert chain.find(pool) == first, "a child of a block that its holder does not hold would outlive it"
    pool.check([first, second])
    pool.release(second)
    assert pool.num_idle == 0


def test_what_holders_would_release_counts_only_what_nobody_else_holds():
    pool = BlockPool(8, SIZE)
    chain = Chain(pool, tokens_of(1, 2))
    shared = pool.take(2)
    chain.publish(pool, shared)
    pool.hold(shared)
    one, other = [*shared, *pool.take(1)], [*shared, *pool.take(2)]
    assert pool.num_released_by([one], keep=[]) == 1
    assert pool.num_released_by([other], keep=[]) == 2
    assert pool.num_released_by([one, other], keep=[]) == 5
    assert pool.num_released_by([one, other], keep=shared[:1]) == 4
    before = pool.num_available
    pool.release(one)
    pool.release(other)
    assert pool.num_available - before == 5


def test_reset_forgets_everything():
    pool = BlockPool(4, SIZE)
    chain = Chain(pool, tokens_of(1, 2))
    chain.publish(pool, pool.take(2))
    pool.reset()
    assert chain.find(pool) == []
    assert pool.num_available == 4
    pool.check([])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.pop(), "states"),
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._free.append(0), "states"),
        (lambda pool: pool._holders.__setitem__(0, 2), "holders"),
        (lambda pool: pool._holders.__setitem__(3, 1), "states"),
        (lambda pool: pool._idle.pop(1), "states"),
        (lambda pool: pool._unpublish(1), "leaked"),
        (lambda pool: pool._by_hash.clear(), "cannot be found"),
        (lambda pool: pool._published.__setitem__(0, None), "outlived its parent|finds no block"),
    ],
)
def test_check_finds_damage(damage, message):
    pool = BlockPool(4, SIZE)
    table = pool.take(2)
    Chain(pool, tokens_of(1, 2)).publish(pool, table)
    pool.release(table[1:])
    pool.check([table[:1]])
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check([table[:1]])


@settings(max_examples=100, deadline=None)
@given(
    num_blocks=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.sampled_from("ttthrr"), st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 9)),
        max_size=60,
    ),
)
def test_accounting_is_exact_and_content_true_in_any_order(num_blocks, steps):
    """Holders come and go; a model that keeps every block's last content says what may be found."""
    pool = BlockPool(num_blocks, SIZE)
    tables, content = [], {}
    for kind, values, which in steps:
        chain = Chain(pool, tokens_of(*values))
        found = chain.find(pool)
        for index, block_id in enumerate(found):
            assert content[block_id] == tuple(values[: index + 1]), "a block was found that has other content"
        if kind in "th":
            fresh = len(values) - len(found)
            if pool.num_available - pool.num_idle_among(found) < fresh:
                continue
            pool.hold(found)
            table = found + pool.take(fresh)
            assert len(set(table)) == len(table)
            for index in range(len(found), len(values)):
                assert not any(table[index] in other for other in tables), "a held block was handed out"
                content[table[index]] = tuple(values[: index + 1])
            tables.append(table)
            if kind == "t":
                chain.publish(pool, table)
                assert len(chain.find(pool)) == len(values) or any(
                    content.get(block) for block in chain.find(pool) or [0]
                )
        elif tables:
            pool.release(tables.pop(which % len(tables)))
        pool.check(tables)
        assert pool.num_held == len({block_id for table in tables for block_id in table})
        assert pool.num_held + pool.num_available == num_blocks
