"""The pool on its own."""

from typing import Any

import pytest

from kvblocks import BlockPool, BlockStateError, InvalidArgumentError, KVCacheManager, PoolExhaustedError
from kvblocks.hashing import HASH_FUNCTIONS
from kvblocks.prefix_index import PrefixIndex


def make(num_blocks: Any) -> BlockPool:
    return BlockPool(num_blocks, PrefixIndex(4, HASH_FUNCTIONS["xxh3_128"]))


def test_a_fresh_pool_hands_out_its_blocks_in_order() -> None:
    pool = make(5)
    assert [block.block_id for block in pool.take(3)] == [0, 1, 2]
    assert pool.free_block_ids() == [3, 4]
    assert pool.num_free_blocks == 2


def test_release_queues_the_last_block_first() -> None:
    pool = make(4)
    blocks = pool.take(3)
    pool.release(blocks)
    assert pool.free_block_ids() == [3, 2, 1, 0]
    pool.check([])


def test_can_take_counts_what_touching_takes_away() -> None:
    pool = make(4)
    blocks = pool.take(2)
    assert pool.can_take(2, blocks)  # owned already, so touching them takes nothing from the queue
    pool.release(blocks)
    assert pool.can_take(2, blocks)
    assert not pool.can_take(3, blocks)


def test_more_blocks_than_free() -> None:
    pool = make(2)
    with pytest.raises(PoolExhaustedError, match="expected 0 to 2 blocks to take, got 3"):
        pool.take(3)
    pool.check([])


def test_double_free() -> None:
    pool = make(2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(BlockStateError, match=r"double free: expected a block with an owner, got KVCacheBlock\(0"):
        pool.release(blocks)
    assert pool.free_block_ids() == [1, 0]


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
