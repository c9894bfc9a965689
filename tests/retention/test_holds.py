"""Holds: blocks under a transfer are neither reused nor evicted, whatever happens to their sequence."""

import pytest

from kvblocks import (
    BlockStateError,
    FullAttention,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    SlidingWindow,
)

PROMPT = list(range(10))


@pytest.fixture
def manager() -> KVCacheManager:
    return KVCacheManager(8, 4, debug=True)


def started(manager: KVCacheManager, name: str = "a", **options) -> Sequence:
    sequence = Sequence(name, PROMPT)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence), **options) is not None
    return sequence


def fill(manager: KVCacheManager) -> list[int]:
    """Take all free blocks."""
    number = manager.num_free_blocks
    sequence = Sequence("filler", range(1000, 1000 + 4 * number))
    assert manager.allocate_slots(sequence) is not None
    return sequence.block_ids


def test_what_is_read_is_not_reused_when_its_sequence_is_freed(manager):
    sequence = started(manager)
    ids = list(sequence.block_ids)
    hold = manager.holds.read(sequence)
    assert (hold.block_ids, hold.num_tokens, hold.num_blocks, hold.sequence_id) == (ids[:2], 10, 2, "a")
    manager.free(sequence)
    assert manager.num_free_blocks == 6
    assert not set(ids[:2]) & set(fill(manager))
    assert manager.get_computed_blocks(Sequence("b", PROMPT)).num_tokens == 8
    manager.holds.release(hold)
    assert (manager.num_free_blocks, hold.is_released, list(manager.holds)) == (2, True, [])


def test_what_is_written_outlives_an_abort(manager):
    sequence = Sequence("a", PROMPT)
    manager.allocate_slots(sequence, 0, num_external_computed_tokens=8)
    hold, ids = manager.holds.write(sequence), list(sequence.block_ids)
    manager.abort(sequence, 0)
    assert not set(ids) & set(fill(manager))
    manager.holds.release(hold)
    assert set(manager.inspect.free_block_ids()) == set(ids)


def test_a_rewound_sequence_gets_other_blocks_than_those_under_the_transfer(manager):
    sequence = Sequence("a", PROMPT)
    manager.allocate_slots(sequence, 0, num_external_computed_tokens=8)
    hold = manager.holds.write(sequence)
    manager.rewind(sequence, 0)
    manager.allocate_slots(sequence)
    assert not set(hold.block_ids) & set(sequence.block_ids)


def test_only_what_is_written_can_be_read(manager):
    sequence = started(manager, delay_cache_blocks=True)
    assert manager.holds.read(sequence).block_ids == []
    with pytest.raises(InvalidArgumentError, match="num_tokens: expected an int from 0 to 0, got 4"):
        manager.holds.read(sequence, 4)
    assert manager.holds.write(sequence, 7).num_blocks == 1
    with pytest.raises(InvalidArgumentError, match="num_tokens: expected an int from 0 to 10, got 11"):
        manager.holds.write(sequence, 11)
    assert len(manager.holds) == 2


def test_an_unfilled_block_is_not_held_and_written_in_place(manager):
    sequence = started(manager)
    before = list(sequence.block_ids)
    manager.holds.write(sequence)
    assert manager.append_slots(sequence, [10]) == []
    assert (sequence.block_ids, manager.take_copies()) == (before, [])


def test_going_back_into_a_held_block_copies_it(manager):
    sequence = Sequence("a", PROMPT[:4])
    manager.allocate_slots(sequence)
    manager.append_slots(sequence, [4, 5, 6, 7])
    hold = manager.holds.read(sequence)
    manager.truncate(sequence, 6, num_computed_tokens=6)
    assert not hold.tables[0][1].is_cached
    manager.append_slots(sequence, [60])
    assert manager.take_copies() == [(0, hold.block_ids[1], sequence.block_ids[1])]


def test_a_detached_sequence_is_free_and_its_blocks_are_not(manager):
    sequence = started(manager)
    ids = list(sequence.block_ids)
    hold = manager.holds.detach(sequence)
    assert (sequence.is_allocated, hold.block_ids, manager.num_free_blocks) == (False, ids, 5)
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, hit=hit) is not None  # resumed, while a step in flight may write there
    assert sequence.block_ids[:2] == ids[:2]
    assert sequence.block_ids[2] != ids[2]
    manager.holds.release(hold)
    assert manager.num_free_blocks == 5
    manager.free(sequence)
    assert manager.num_free_blocks == 8


class FragileId:
    """An id whose hash raises once, after a few calls."""

    def __init__(self) -> None:
        self.num_left = -1

    def __hash__(self) -> int:
        self.num_left -= 1
        if self.num_left == 0:
            raise KeyError
        return 7


@pytest.mark.parametrize("number", [1, 2, 3])
def test_detaching_that_raises_holds_nothing(manager, number):
    name = FragileId()
    sequence = Sequence(name, PROMPT)
    manager.allocate_slots(sequence)
    name.num_left = number
    with pytest.raises(KeyError):
        manager.holds.detach(sequence)
    assert (len(manager.holds), sequence.is_allocated, manager.num_free_blocks) == (0, True, 5)
    manager.free(sequence)
    assert manager.num_free_blocks == 8


def test_a_fork_of_what_was_detached_copies_the_unfilled_block(manager):
    sequence = started(manager)
    child = manager.fork(sequence, "child")
    hold = manager.holds.detach(sequence)
    manager.append_slots(child, [10])
    assert manager.take_copies() == [(0, hold.block_ids[2], child.block_ids[2])]


def test_holds_of_groups_are_of_what_is_live():
    manager = KVCacheManager(32, groups=[FullAttention(4), SlidingWindow(2, 4)], debug=True)
    sequence = Sequence("a", range(20))
    for _ in range(5):
        manager.allocate_slots(sequence, 4)
    first = sequence.first_live_block(1)
    hold = manager.holds.read(sequence, 18)
    assert first > 0
    assert (hold.first_blocks, hold.group_block_ids(0)) == ([0, first], sequence.block_ids[:4])
    assert hold.group_block_ids(1) == sequence.group_block_ids(1)[first:9]
    manager.free(sequence)
    manager.holds.release(hold)
    assert manager.num_free_blocks == 32


def test_holds_do_not_give_way(manager):
    manager.holds.detach(started(manager))
    assert manager.allocate_slots(Sequence("b", range(100, 124))) is None
    refusal = manager.last_refusal
    assert refusal is not None
    assert (refusal.num_blocks, refusal.num_free_blocks, refusal.is_due_to_pins) == (6, 5, False)


def test_a_hold_is_released_once_by_its_own_manager(manager):
    sequence = started(manager)
    hold, other = manager.holds.read(sequence), KVCacheManager(8, 4)
    with pytest.raises(BlockStateError, match="expected a hold of this manager, got BlockHold"):
        other.holds.release(hold)
    manager.holds.release(hold)
    with pytest.raises(BlockStateError, match=r"expected a hold that hasn't ended, got BlockHold\('a', .* released\)"):
        manager.holds.release(hold)
    with pytest.raises(SequenceStateError, match=r"holds.read: expected a sequence allocated here, got"):
        other.holds.read(sequence)


def test_a_reset_leaves_holds_as_they_are(manager):
    sequence = started(manager)
    hold = manager.holds.read(sequence)
    manager.reset_prefix_cache()
    manager.free(sequence)
    assert manager.num_free_blocks == 6
    manager.holds.release(hold)
    assert (manager.num_free_blocks, manager.stats.num_cached_blocks) == (8, 0)
