"""The pool on its own: in which order blocks are taken, what a release does, and what is refused."""

from array import array
from typing import Any

import pytest

from kvblocks import (
    BlockPool,
    BlockStateError,
    InvalidArgumentError,
    KVCacheBlock,
    KVCacheManager,
    PoolExhaustedError,
)
from kvblocks.core.block import ROOT
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.hashing.by_name import get_hash_scheme


def make(num_blocks: Any) -> BlockPool:
    return BlockPool(num_blocks, PrefixIndex(4, get_hash_scheme("xxh3_128")))


def test_a_fresh_pool_hands_out_its_blocks_in_order() -> None:
    pool = make(5)
    assert [block.block_id for block in pool.take(3)] == [0, 1, 2]
    assert pool.free_block_ids() == [3, 4]
    assert pool.num_free_blocks == 2


def cache(pool: BlockPool, blocks: list[KVCacheBlock], first_token: int) -> None:
    tokens = array("I", range(first_token, first_token + 4 * len(blocks)))
    pool.index.cache(ROOT, blocks, memoryview(tokens).cast("B"), None, 0)


@pytest.mark.parametrize("num_known", [0, 1, 3])
def test_what_holds_nothing_is_taken_first_and_a_tables_end_before_its_beginning(num_known: int) -> None:
    pool = make(8)
    blocks = pool.take(5)
    cache(pool, blocks[:3], 0)
    pool.release_table(blocks, num_known)
    assert pool.free_block_ids() == [4, 3, 5, 6, 7, 2, 1, 0]
    others = pool.take(4)
    assert [block.block_id for block in others] == [4, 3, 5, 6]
    cache(pool, others[1:3], 100)  # an owner may hold anything in any place: what is cached is seen
    pool.release_table(others)
    assert pool.free_block_ids() == [6, 4, 7, 2, 1, 0, 5, 3]
    pool.check([])


def test_what_stops_being_cached_is_taken_next_unless_by_a_reset() -> None:
    pool = make(6)
    first, second = pool.take(3), pool.take(2)
    cache(pool, first, 0)
    cache(pool, second, 100)
    pool.release_table(first, 3)
    pool.index.forget(second[0])  # and what is attached to it; both are owned
    pool.index.forget(first[1])
    pool.requeue_detached()
    assert pool.free_block_ids() == [1, 2, 5, 0]
    assert pool.detached == set(second)
    pool.release_table(second, 2)  # its owner believes that they are cached
    assert pool.free_block_ids() == [4, 3, 1, 2, 5, 0]
    assert pool.detached == set()
    pool.index.clear()
    assert pool.free_block_ids() == [4, 3, 1, 2, 5, 0]
    pool.check([])


def test_more_blocks_than_free() -> None:
    pool = make(2)
    with pytest.raises(PoolExhaustedError, match="expected 0 to 2 blocks to take, got 3"):
        pool.take(3)
    pool.check([])


def test_double_free() -> None:
    pool = make(2)
    blocks = pool.take(1)
    pool.release_table(blocks)
    with pytest.raises(BlockStateError, match=r"double free: expected a block with an owner, got KVCacheBlock\(0"):
        pool.release_table(blocks)
    assert pool.free_block_ids() == [0, 1]
    pool.take(2)
    cache(pool, pool.blocks[:1], 0)
    pool.release_table(pool.blocks[1:])
    for table in (pool.blocks, pool.blocks[::-1]):  # one block could be released, the other could not
        with pytest.raises(BlockStateError, match="double free"):
            pool.release_table(table)
        assert ([block.ref_cnt for block in pool.blocks], pool.free_block_ids()) == ([1, 0], [1])
        pool.check([pool.blocks[:1]])


@pytest.mark.parametrize("num_blocks", [0, -3, 2.5, "8", None])
def test_bad_sizes(num_blocks: Any) -> None:
    for make_it in (lambda: make(num_blocks), lambda: KVCacheManager(num_blocks, 16)):
        with pytest.raises(InvalidArgumentError, match="num_blocks: expected an int of at least 1, got"):
            make_it()
    with pytest.raises(InvalidArgumentError, match="block_size: expected an int of at least 1, got"):
        KVCacheManager(16, "16" if num_blocks is None else num_blocks)  # None: what the groups say


def test_check_finds_an_owner_that_is_missing() -> None:
    pool = make(3)
    blocks = pool.take(2)
    pool.check([blocks])
    with pytest.raises(AssertionError, match="held by 0 block tables"):
        pool.check([blocks[:1]])
    with pytest.raises(AssertionError, match="held by 2 block tables"):
        pool.check([blocks, blocks[:1]])
