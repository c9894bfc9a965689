"""Forks, truncation, reserved slots and renewal one by one; their long histories are test_stateful.py's."""

import array
from typing import Any

import pytest

from kvblocks import (
    FullAttention,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    SlidingWindow,
    StaleHitError,
)


def started(manager: KVCacheManager, name: Any, tokens: Any, **keys: Any) -> Sequence:
    sequence = Sequence(name, tokens, **keys)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    return sequence


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


class TestFork:
    def test_samples_of_a_prompt_hold_it_once_and_copy_its_unfilled_block(self) -> None:
        manager = KVCacheManager(16, 4, debug=True)
        first = started(manager, 0, range(10))
        samples = [first] + [manager.fork(first, n) for n in (1, 2, 3)]
        assert manager.num_free_blocks == 13
        assert [sample.block_ids for sample in samples] == [[0, 1, 2]] * 4
        assert manager.take_copies() == []
        assert [ids(manager.append_slots(sample, [20]) or []) for sample in samples] == [[3], [4], [5], []]
        assert manager.take_copies() == [
            (0, 2, 3),
            (0, 2, 4),
            (0, 2, 5),
        ]  # the last one keeps the block that the others left
        assert manager.take_copies() == []
        assert [sample.block_ids for sample in samples] == [[0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 1, 2]]
        for sample in samples:
            manager.free(sample)
        assert manager.num_free_blocks == 16

    def test_a_step_of_all_samples_says_which_table_entries_change(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(10))
        samples = [first, manager.fork(first, 1)]
        apart = started(manager, 2, range(100, 104))
        assert manager.append_step([*samples, apart], [7, 8, 9]) == [(0, 0, 2, 4), (2, 0, 1, 5)]
        assert manager.take_copies() == [(0, 2, 4)]
        assert manager.append_step([*samples, apart], [7, 8, 9]) == []
        assert [sample.token_ids(10) for sample in samples] == [[7, 7], [8, 8]]
        manager.check()

    def test_a_fork_where_a_block_is_full_copies_nothing(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(8))
        child = manager.fork(first, 1)
        assert ids(manager.append_slots(first, [1]) or []) == [2]
        assert ids(manager.append_slots(child, [1]) or []) == [3]
        assert manager.take_copies() == []

    def test_a_child_has_the_keys_and_hits_what_they_say(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(9), salt="a", lora="l", extra_keys=[(1, 3, "image")])
        child = manager.fork(first, 1)
        assert (child.salt, child.lora, child.extra_keys) == ("a", "l", first.extra_keys)
        manager.append_slots(child, [1, 2, 3])
        manager.free(child)
        assert manager.get_computed_blocks(child).num_tokens == 11  # a full hit of twelve
        assert manager.get_computed_blocks(Sequence(2, child.token_ids(), salt="a")).num_tokens == 0

    def test_reserved_slots_are_not_shared_and_reserving_copies(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(6))
        manager.allocate_slots(first, 0, num_total_tokens=12)
        child = manager.fork(first, 1)
        assert (first.block_ids, child.block_ids) == ([0, 1, 2], [0, 1])
        assert ids(manager.allocate_slots(child, 0, num_total_tokens=7) or []) == [
            3
        ]  # drafts are written before they are appended
        assert child.block_ids == [0, 3]
        assert manager.take_copies() == [(0, 1, 3)]
        assert manager.append_slots(first, [1]) == []
        manager.check()

    def test_a_prefill_forked_in_the_middle(self) -> None:
        manager = KVCacheManager(16, 4)
        first = Sequence(0, range(10))
        manager.allocate_slots(first, 6)
        child = manager.fork(first, 1)
        assert ids(manager.allocate_slots(child) or []) == [2, 3]
        assert child.block_ids == [0, 2, 3]
        assert manager.take_copies() == [(0, 1, 2)]
        assert ids(manager.allocate_slots(first) or []) == [4]
        manager.check()

    def test_without_a_block_to_copy_to_nothing_changes(self) -> None:
        manager = KVCacheManager(3, 4)
        first = started(manager, 0, range(10))
        child = manager.fork(first, 1)
        before = manager.inspect.free_block_ids(), manager.stats, child.block_ids[:], child.token_ids()
        assert manager.append_slots(child, [1]) is None
        assert manager.append_step([first, child], [1, 1]) is None
        assert manager.allocate_slots(child, 0, num_total_tokens=11) is None
        assert (manager.inspect.free_block_ids(), manager.stats, child.block_ids, child.token_ids()) == before
        assert manager.take_copies() == []
        manager.free(first)
        assert manager.append_slots(child, [1]) == []  # it has the block to itself now
        manager.check()

    def test_tokens_given_in_a_buffer_are_the_callers(self) -> None:
        manager = KVCacheManager(16, 4)
        prompt = array.array("I", range(6))
        first = started(manager, 0, prompt)
        child = manager.fork(first, 1)
        manager.append_slots(child, [9])
        assert (list(prompt), first.num_tokens, child.token_ids()) == (list(range(6)), 6, [*range(6), 9])

    def test_the_last_of_a_step_to_leave_a_block_keeps_it(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(5))
        samples = [first, *(manager.fork(first, n) for n in (1, 2, 3))]
        assert manager.append_step(samples, [9, 9, 9, 9]) == [(0, 0, 1, 2), (1, 0, 1, 3), (2, 0, 1, 4)]
        assert manager.take_copies() == [(0, 1, 2), (0, 1, 3), (0, 1, 4)]
        manager.check()

    def test_reserving_nothing_copies_nothing(self) -> None:
        manager = KVCacheManager(16, 4)
        child = manager.fork(started(manager, 0, range(5)), 1)
        assert manager.allocate_slots(child, 0, num_total_tokens=child.num_tokens) == []
        assert manager.take_copies() == []

    def test_what_a_child_must_not_write(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(10))
        assert (first.num_readonly_tokens, manager.fork(first, 1).num_readonly_tokens) == (0, 8)
        manager.free(first)
        again = started(manager, 2, range(8))
        assert (again.num_readonly_tokens, manager.fork(again, 3).num_readonly_tokens) == (8, 8)

    def test_what_it_refuses(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(6))
        with pytest.raises(SequenceStateError, match="expected another sequence_id than 0"):
            manager.fork(first, 0)
        with pytest.raises(InvalidArgumentError, match="expected something hashable"):
            manager.fork(first, [])  # type: ignore[arg-type]
        manager.free(first)
        with pytest.raises(SequenceStateError, match="fork: expected a sequence allocated here"):
            manager.fork(first, 1)
        assert manager.num_free_blocks == 16


class TestTruncate:
    def test_rejected_tokens_go_and_their_blocks_with_them(self) -> None:
        manager = KVCacheManager(16, 4)
        sequence = started(manager, 0, range(6))
        manager.append_slots(sequence, range(6, 13))
        assert sequence.block_ids == [0, 1, 2, 3]
        manager.truncate(sequence, 7)
        assert (sequence.num_tokens, sequence.num_computed_tokens, sequence.block_ids) == (7, 7, [0, 1])
        assert manager.inspect.free_block_ids() == [
            3,
            *range(4, 16),
            2,
        ]  # what holds nothing first, what is cached last
        assert manager.get_computed_blocks(Sequence(1, range(13))).num_tokens == 12  # computed, so still good
        manager.check()

    def test_a_token_added_later_does_not_overwrite_what_is_cached(self) -> None:
        manager = KVCacheManager(16, 4, debug=True)
        sequence = started(manager, 0, range(6))
        manager.append_slots(sequence, [6, 7])
        manager.truncate(sequence, 7)
        assert ids(manager.append_slots(sequence, [70]) or []) == [2]
        assert manager.take_copies() == [(0, 1, 2)]
        manager.append_slots(sequence, [8])
        assert manager.get_computed_blocks(Sequence(1, range(9))).num_tokens == 8
        assert manager.get_computed_blocks(Sequence(1, [*range(7), 70, 8])).num_tokens == 8

    def test_a_block_that_nobody_else_reads_is_written_in_place(self) -> None:
        manager = KVCacheManager(16, 4)
        sequence = started(manager, 0, range(5))
        manager.append_slots(sequence, [5, 6])
        manager.truncate(sequence, 6)
        assert manager.append_slots(sequence, [60]) == []
        assert (manager.take_copies(), sequence.token_ids()) == ([], [*range(6), 60])

    def test_it_gives_back_reserved_room(self) -> None:
        manager = KVCacheManager(16, 4)
        sequence = Sequence(0, range(6))
        manager.allocate_slots(sequence, num_total_tokens=13)
        assert len(sequence.block_ids) == 4
        manager.truncate(sequence, 6)
        assert (sequence.block_ids, manager.num_free_blocks) == ([0, 1], 14)

    def test_an_old_hit_of_other_tokens_is_stale(self) -> None:
        manager = KVCacheManager(16, 2)
        sequence = started(manager, 0, [0, 1])
        manager.append_slots(sequence, [2, 3, 4])
        manager.free(sequence)
        hit = manager.get_computed_blocks(sequence)
        assert hit.num_tokens == 4
        manager.allocate_slots(sequence, hit=hit)
        manager.truncate(sequence, 2)
        sequence.append_tokens([9, 9, 9])
        manager.free(sequence)
        with pytest.raises(StaleHitError):
            manager.allocate_slots(sequence, hit=hit)

    def test_what_it_refuses(self) -> None:
        manager = KVCacheManager(16, 4)
        sequence = started(manager, 0, range(6))
        manager.append_slots(sequence, [6])
        for num_tokens in (5, 8, -1, "6"):
            with pytest.raises(InvalidArgumentError, match="num_tokens: expected an int from 6 to 7, got"):
                manager.truncate(sequence, num_tokens)  # type: ignore[arg-type]
        manager.free(sequence)
        with pytest.raises(SequenceStateError, match="truncate: expected"):
            manager.truncate(sequence, 6)

    def test_truncated_by_another_manager(self) -> None:
        one, other = KVCacheManager(16, 2), KVCacheManager(16, 2)
        sequence = started(one, 0, [0, 1])
        one.append_slots(sequence, [2, 3, 4])
        one.free(sequence)
        hit = one.get_computed_blocks(sequence)
        other.allocate_slots(sequence)
        other.truncate(sequence, 2)
        other.free(sequence)
        sequence.append_tokens([9, 9, 9])
        with pytest.raises(StaleHitError):
            one.allocate_slots(sequence, hit=hit)

    def test_a_hit_that_has_become_the_whole_sequence_is_stale(self) -> None:
        manager = KVCacheManager(16, 2)
        sequence = started(manager, 0, [0, 1])
        manager.append_slots(sequence, [2, 3, 4])
        manager.free(sequence)
        hit = manager.get_computed_blocks(sequence)
        manager.allocate_slots(sequence)
        manager.truncate(sequence, 4)
        manager.free(sequence)
        with pytest.raises(StaleHitError):
            manager.allocate_slots(sequence, hit=hit)

    def test_a_token_that_no_step_computed_does_not_stay_cached(self) -> None:
        manager = KVCacheManager(16, 4)
        sequence = started(manager, 0, range(7))
        manager.append_slots(sequence, [7])
        manager.truncate(sequence, 7, num_computed_tokens=7)
        assert manager.get_computed_blocks(Sequence(1, range(9))).num_tokens == 4
        assert manager.append_slots(sequence, [70]) == []  # nobody reads the block, so it is written in place
        assert manager.get_computed_blocks(Sequence(1, [*range(7), 70, 1])).num_tokens == 8
        with pytest.raises(InvalidArgumentError, match="num_computed_tokens: expected an int from 7 to 8, got 6"):
            manager.truncate(sequence, 7, num_computed_tokens=6)
        manager.check()

    def test_an_abort_after_it_leaves_what_others_wrote(self) -> None:
        manager = KVCacheManager(16, 4, debug=True)
        writer = started(manager, 0, range(8))
        sequence = Sequence(1, range(4))
        sequence.append_tokens([4, 5, 6, 7, 8])
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        manager.truncate(sequence, 6)
        manager.abort(sequence, 6)
        assert manager.get_computed_blocks(Sequence(2, range(9))).num_tokens == 8
        manager.free(writer)


class TestLookahead:
    def test_drafts_are_not_cached_before_they_are_accepted(self) -> None:
        manager = KVCacheManager(16, 4)
        sequence = Sequence(0, range(6))
        blocks = manager.allocate_slots(sequence, num_total_tokens=12)
        assert (ids(blocks or []), sequence.num_computed_tokens) == ([0, 1, 2], 6)
        assert manager.stats.num_cached_blocks == 1
        assert manager.append_slots(sequence, [6, 7, 8]) == []
        assert manager.stats.num_cached_blocks == 2

    def test_it_is_all_or_nothing(self) -> None:
        manager = KVCacheManager(2, 4)
        sequence = Sequence(0, range(6))
        assert manager.allocate_slots(sequence, num_total_tokens=9) is None
        assert (sequence.is_allocated, manager.num_free_blocks) == (False, 2)
        assert manager.allocate_slots(sequence, num_total_tokens=8) is not None
        with pytest.raises(InvalidArgumentError, match="num_total_tokens: expected an int of at least 1"):
            manager.allocate_slots(Sequence(1, [1]), num_total_tokens=-1)


class TestRenew:
    def test_what_the_caller_says_is_valid_is_cached_again(self) -> None:
        manager = KVCacheManager(16, 4, debug=True)
        first = started(manager, 0, range(9))
        second = started(manager, 1, [*range(8), 50, 51])
        manager.reset_prefix_cache()
        assert manager.get_computed_blocks(Sequence(2, range(9))).num_tokens == 0
        manager.renew(first)
        manager.renew(second)  # shares the blocks that are cached again already
        assert manager.get_computed_blocks(Sequence(2, range(9))).num_tokens == 8
        manager.append_slots(second, [52, 53])
        assert manager.get_computed_blocks(Sequence(2, [*second.token_ids(), 1])).num_tokens == 12
        for sequence in (first, second):
            manager.free(sequence)
        assert manager.stats.num_cached_blocks == 3

    def test_blocks_that_are_cached_again_already_stay_as_they_are(self) -> None:
        manager = KVCacheManager(32, 4, pin_budget=1.0, debug=True)
        first = started(manager, "first", range(4))
        manager.append_slots(first, [4, 5, 6, 7])
        child = manager.fork(first, "child")
        manager.reset_prefix_cache()
        started(manager, "other", range(4))
        manager.renew(first)
        manager.truncate(first, 4)
        manager.abort(first, 0)
        started(manager, "longer", range(13))
        pin = manager.pins.pin(range(12))
        manager.renew(child)
        assert pin.num_held_blocks == 3
        assert manager.get_computed_blocks(Sequence("probe", range(13))).num_tokens == 12

    def test_forks_of_whole_blocks(self) -> None:
        manager = KVCacheManager(16, 4, debug=True)
        first = started(manager, 0, range(8))
        child = manager.fork(first, 1)
        manager.reset_prefix_cache()
        manager.renew(child)
        manager.renew(first)
        assert manager.stats.num_cached_blocks == 2

    def test_without_it_nothing_of_before_the_reset_is_cached(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(6))
        manager.reset_prefix_cache()
        manager.append_slots(first, range(6, 20))
        assert manager.stats.num_cached_blocks == 0
        manager.free(first)
        assert manager.stats.num_cached_blocks == 0

    def test_what_it_refuses(self) -> None:
        manager = KVCacheManager(16, 4)
        first = started(manager, 0, range(6))
        with pytest.raises(SequenceStateError, match="renew: expected a sequence from before a reset"):
            manager.renew(first)
        uncached = KVCacheManager(16, 4, enable_caching=False)
        other = started(uncached, 0, range(6))
        uncached.reset_prefix_cache()
        with pytest.raises(SequenceStateError, match="renew: expected a sequence from before a reset"):
            uncached.renew(other)


class TestWhatNobodyComputedIsNotHit:
    """Each case was once a wrong hit. Walks over a simulated KV memory found it, and it was shortened by hand."""

    PROBE = (0, 1, 2, 3, 4, 50, 60, 70, 9)

    def test_a_truncated_block_that_is_written_in_place_is_the_sequences_own(self) -> None:
        manager = KVCacheManager(8, 4, debug=True)
        sequence = started(manager, "s", range(4))
        manager.append_slots(sequence, [4, 5, 6, 7])
        manager.free(sequence)
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        manager.truncate(sequence, 5)
        assert sequence.num_readonly_tokens == 4
        manager.reset_prefix_cache()
        manager.append_slots(sequence, [50, 60])
        manager.renew(sequence)
        manager.append_slots(sequence, [70])
        manager.abort(sequence, 7)  # 70 was never computed
        assert manager.get_computed_blocks(Sequence("t", self.PROBE)).num_tokens == 4

    def test_so_is_a_childs_that_its_parent_left(self) -> None:
        manager = KVCacheManager(8, 4, debug=True)
        parent = started(manager, "a", range(5))
        manager.append_slots(parent, [5, 6, 7])
        child = manager.fork(parent, "b")
        manager.abort(parent, 7)
        manager.truncate(child, 5)
        assert child.num_readonly_tokens == 4
        manager.append_slots(child, [50, 60])
        manager.append_slots(child, [70])
        manager.abort(child, 7)
        assert manager.get_computed_blocks(Sequence("t", self.PROBE)).num_tokens == 4

    def test_with_a_window_too(self) -> None:
        manager = KVCacheManager(16, groups=[FullAttention(4), SlidingWindow(4, 8)], debug=True)
        parent = started(manager, "a", range(5))
        manager.append_slots(parent, [5, 6, 7])
        child = manager.fork(parent, "b")
        manager.abort(parent, 7)
        manager.truncate(child, 5)
        manager.append_slots(child, [50, 60])
        manager.append_slots(child, [70])
        manager.abort(child, 7)
        assert manager.get_computed_blocks(Sequence("t", self.PROBE)).num_tokens == 4

    def test_an_abort_takes_back_what_a_renewed_child_cached_of_it(self) -> None:
        manager = KVCacheManager(8, 4, debug=True)
        parent = started(manager, "a", range(7))
        manager.reset_prefix_cache()
        manager.append_slots(parent, [7])  # of before the reset, so not cached
        child = manager.fork(parent, "b")
        manager.renew(child)  # now it is
        for sequence in (child, parent):  # the step that was to compute 7 dies
            manager.abort(sequence, 7)
        assert manager.get_computed_blocks(Sequence("t", range(9))).num_tokens == 4
