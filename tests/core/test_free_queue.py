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
            queue.release([blocks[number] for number in bad])
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


def test_what_holds_nothing_goes_to_the_front_in_the_order_given() -> None:
    queue, blocks = make(5)
    queue.popleft_n(4)
    queue.touch(blocks[1:2])
    queue.release_empty([blocks[2], blocks[1], blocks[0]])
    assert ids(queue) == [2, 0, 4]
    queue.release_empty([blocks[1]])
    assert ids(queue) == [1, 2, 0, 4]
    with pytest.raises(BlockStateError, match="double free"):
        queue.release_empty([blocks[3], blocks[1]])
    assert (ids(queue), blocks[3].ref_cnt) == ([1, 2, 0, 4], 1)


def test_what_left_a_window_stands_between() -> None:
    blocks = [KVCacheBlock(block_id) for block_id in range(8)]
    queue = FreeBlockQueue(blocks, has_windows=True)
    assert queue.popleft_n(7) == blocks[:7]
    queue.release([blocks[0]])
    queue.release_passed([blocks[1], blocks[2]])
    queue.release_empty([blocks[3]])
    queue.release([blocks[4]])
    queue.release_passed([blocks[5]])
    assert ids(queue) == [3, 7, 1, 2, 5, 0, 4]
    with pytest.raises(BlockStateError, match="double free"):
        queue.release_passed([blocks[6], blocks[1]])
    assert (ids(queue), blocks[6].ref_cnt) == ([3, 7, 1, 2, 5, 0, 4], 1)
    queue.move_to_front([blocks[4], blocks[5]])
    assert ids(queue) == [4, 5, 3, 7, 1, 2, 0]
    assert [queue.popleft().block_id for _ in range(7)] == [4, 5, 3, 7, 1, 2, 0]
    assert (ids(queue), queue.first) == ([], None)
    queue.release([blocks[0]])
    assert queue.first is blocks[0]
    queue.release_passed([blocks[1]])
    assert queue.first is blocks[1]
    with pytest.raises(PoolExhaustedError):
        queue.popleft_n(3)


@pytest.mark.parametrize("has_windows", [False, True])
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["take", "release", "empty", "passed", "front", "touch"]), st.integers(0, 7)),
        max_size=40,
    )
)
def test_agrees_with_lists(has_windows: bool, operations: list[tuple[str, int]]) -> None:
    blocks = [KVCacheBlock(block_id) for block_id in range(7)]
    queue = FreeBlockQueue(blocks, has_windows=has_windows)
    empty, passed, recent = list(range(7)), [], []
    owners = [0] * 7
    for operation, number in operations:
        order = empty + passed + recent
        if operation == "take" and number <= len(order):
            assert [block.block_id for block in queue.popleft_n(number)] == order[:number]
            for block_id in order[:number]:
                owners[block_id] = 1
        elif operation == "touch" and number < 7:
            queue.touch([blocks[number]])
            owners[number] += 1
        elif operation == "front" and number in order:
            queue.move_to_front([blocks[number]])
        elif operation in ("release", "empty", "passed") and number < 7 and owners[number]:
            if operation == "passed" and not has_windows:
                continue
            calls = {"release": queue.release, "empty": queue.release_empty, "passed": queue.release_passed}
            calls[operation]([blocks[number]])
            owners[number] -= 1
            if not owners[number]:
                if operation == "empty":
                    empty.insert(0, number)
                else:
                    (recent if operation == "release" else passed).append(number)
        for stretch in (empty, passed, recent):
            stretch[:] = [i for i in stretch if not owners[i] and (operation, number) != ("front", i)]
        if operation == "front" and number in order:
            empty.insert(0, number)
        assert ids(queue) == empty + passed + recent
        assert [block.ref_cnt for block in blocks] == owners
