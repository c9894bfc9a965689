"""The free queue: order, counts, and what a failing call leaves behind."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvblocks import BlockStateError, FreeBlockQueue, KVCacheBlock, PoolExhaustedError


def make(num_blocks: int) -> tuple[FreeBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    return FreeBlockQueue(blocks), blocks


def ids(queue: FreeBlockQueue) -> list[int]:
    queue.check()
    return [block.block_id for block in queue]


def test_blocks_come_out_oldest_first_and_owned() -> None:
    queue, blocks = make(5)
    taken = queue.popleft_n(3)
    assert taken == blocks[:3]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1, 0, 0]
    assert ids(queue) == [3, 4]
    assert len(queue) == queue.num_free_blocks == 2


def test_released_blocks_queue_up_in_the_order_given() -> None:
    queue, _ = make(4)
    taken = queue.popleft_n(3)
    queue.release(taken[::-1])
    assert ids(queue) == [3, 2, 1, 0]


def test_a_shared_block_stays_owned_until_the_last_release() -> None:
    queue, blocks = make(2)
    queue.popleft_n(1)
    queue.touch(blocks[:1])
    assert blocks[0].ref_cnt == 2
    queue.release(blocks[:1])
    assert ids(queue) == [1]
    queue.release(blocks[:1])
    assert ids(queue) == [1, 0]


def test_touch_takes_blocks_out_of_the_middle() -> None:
    queue, blocks = make(5)
    queue.touch([blocks[2], blocks[4], blocks[0]])
    assert ids(queue) == [1, 3]
    assert [block.ref_cnt for block in blocks] == [1, 0, 1, 0, 1]


def test_an_empty_queue_fills_again() -> None:
    queue, blocks = make(2)
    queue.popleft_n(2)
    assert ids(queue) == []
    queue.release(blocks)
    assert ids(queue) == [0, 1]


@pytest.mark.parametrize("num_blocks", [4, -1])
def test_taking_more_than_there_are(num_blocks: int) -> None:
    queue, _ = make(3)
    with pytest.raises(PoolExhaustedError, match=f"expected 0 to 3 blocks to take, got {num_blocks}"):
        queue.popleft_n(num_blocks)
    assert ids(queue) == [0, 1, 2]


def test_a_double_free_changes_nothing() -> None:
    queue, blocks = make(4)
    queue.popleft_n(3)
    queue.touch(blocks[:1])
    for bad in ([0, 1, 3], [2, 1, 2], [1, 3, 2, 0], [3, 2], [0, 2, 0, 0, 1]):
        with pytest.raises(BlockStateError, match="double free"):
            queue.release([blocks[place] for place in bad])
        queue.check()
        assert ids(queue) == [3]
        assert [block.ref_cnt for block in blocks] == [2, 1, 1, 0]


def test_a_block_linked_twice_changes_nothing() -> None:
    queue, blocks = make(2)
    stranger, owned = KVCacheBlock(7), KVCacheBlock(8)
    owned.ref_cnt = 1
    for bad in ([stranger, stranger], [stranger, blocks[0]], [stranger, owned]):
        with pytest.raises(BlockStateError, match="neither queued nor owned"):
            queue.extend(bad)
        assert ids(queue) == [0, 1]
    queue.extend([stranger])
    assert ids(queue) == [0, 1, 7]


@given(st.lists(st.tuples(st.sampled_from(["take", "release", "touch"]), st.integers(0, 7)), max_size=40))
def test_agrees_with_a_list(operations: list[tuple[str, int]]) -> None:
    queue, blocks = make(7)
    expected, owners = list(range(7)), [0] * 7
    for operation, number in operations:
        if operation == "take" and number <= len(expected):
            assert [block.block_id for block in queue.popleft_n(number)] == expected[:number]
            for block_id in expected[:number]:
                owners[block_id] = 1
            del expected[:number]
        elif operation == "release" and number < 7 and owners[number]:
            queue.release([blocks[number]])
            owners[number] -= 1
            expected += [number] if not owners[number] else []
        elif operation == "touch" and number < 7:
            queue.touch([blocks[number]])
            expected = [block_id for block_id in expected if block_id != number]
            owners[number] += 1
        assert ids(queue) == expected
        assert [block.ref_cnt for block in blocks] == owners
