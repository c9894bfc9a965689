"""External tokens, failed loads, and slots for a total number of tokens."""

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

PROMPT = list(range(20))


@pytest.fixture
def manager() -> KVCacheManager:
    return KVCacheManager(16, 4, debug=True)


def num_hit(manager: KVCacheManager, tokens: list[int]) -> int:
    return manager.get_computed_blocks(Sequence("probe", [*tokens, 999])).num_tokens


def cached(manager: KVCacheManager, tokens: list[int]) -> None:
    sequence = Sequence("cached", tokens)
    manager.allocate_slots(sequence)
    manager.free(sequence)


def loading(manager: KVCacheManager, num_external: int, num_new: int | None = 0) -> Sequence:
    sequence = Sequence("loading", PROMPT)
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, num_new, hit=hit, num_external_computed_tokens=num_external) is not None
    return sequence


class TestLoads:
    def test_what_is_loaded_is_cached_when_that_is_said(self, manager):
        cached(manager, PROMPT[:8])
        sequence = loading(manager, 8)
        assert (sequence.num_computed_tokens, sequence.num_written_tokens, len(sequence.block_ids)) == (16, 8, 4)
        assert num_hit(manager, PROMPT) == 8
        assert manager.cache_blocks(sequence, 16) == 16
        assert num_hit(manager, PROMPT) == 16
        assert manager.allocate_slots(sequence) is not None  # the rest is computed, and cached at once
        assert num_hit(manager, PROMPT) == 20

    def test_others_learn_of_it_as_pending(self, manager):
        loading(manager, 12)
        hit = manager.get_computed_blocks(Sequence("other", PROMPT))
        assert (hit.num_tokens, hit.pending_tokens) == (0, 20)

    def test_tokens_behind_a_load_are_delayed_whatever_call_comes(self, manager):
        sequence = loading(manager, 8, None)
        manager.append_slots(sequence, [20, 21, 22, 23])
        assert (sequence.num_computed_tokens, sequence.num_written_tokens) == (24, 0)
        assert manager.stats.num_cached_blocks == 0
        assert manager.cache_blocks(sequence, 8) == 8
        assert manager.stats.num_cached_blocks == 2
        assert manager.cache_blocks(sequence, 24) == 24

    def test_a_failed_load_goes_back_to_what_arrived(self, manager):
        cached(manager, PROMPT[:4])
        sequence = loading(manager, 12, 2)
        first_blocks = list(sequence.block_ids)
        assert manager.rewind(sequence, 11) == 8  # a block is never written twice
        assert (sequence.num_computed_tokens, sequence.num_written_tokens, sequence.num_tokens) == (8, 4, 20)
        assert sequence.block_ids == first_blocks[:2]
        assert manager.cache_blocks(sequence, 8) == 8
        assert manager.allocate_slots(sequence) is not None
        assert num_hit(manager, PROMPT) == 20
        manager.free(sequence)
        assert manager.num_free_blocks == 16

    def test_a_load_that_brought_nothing(self, manager):
        sequence = loading(manager, 20)
        assert manager.rewind(sequence, 0) == 0
        assert (sequence.block_ids, sequence.is_allocated, manager.num_free_blocks) == ([], True, 16)
        assert manager.get_computed_blocks(Sequence("other", PROMPT)).pending_tokens == 20  # it will compute them
        manager.allocate_slots(sequence, 20)
        assert num_hit(manager, PROMPT) == 20

    def test_rewinding_takes_back_what_was_cached_behind(self, manager):
        sequence = Sequence("a", PROMPT)
        manager.allocate_slots(sequence)
        child = manager.fork(sequence, "child")
        assert manager.rewind(sequence, 10) == 8
        assert num_hit(manager, PROMPT) == 8
        assert (child.num_computed_tokens, manager.cache_blocks(child, 20), num_hit(manager, PROMPT)) == (20, 8, 8)

    def test_blocks_of_a_hit_are_given_back_and_stay_cached(self, manager):
        cached(manager, PROMPT[:12])
        sequence = Sequence("a", PROMPT)
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        assert manager.rewind(sequence, 4) == 4
        assert num_hit(manager, PROMPT) == 12
        assert sequence.num_readonly_tokens == 4

    def test_a_start_may_take_a_hit_alone(self, manager):
        cached(manager, PROMPT[:8])
        sequence = Sequence("a", PROMPT)
        assert manager.allocate_slots(sequence, 0, hit=manager.get_computed_blocks(sequence)) == []
        assert (sequence.num_computed_tokens, len(sequence.block_ids)) == (8, 2)

    def test_not_an_empty_one(self, manager):
        sequence = Sequence("a", PROMPT)
        with pytest.raises(InvalidArgumentError, match="num_new_tokens: expected an int from 1 to 20, got 0"):
            manager.allocate_slots(sequence, 0, hit=manager.get_computed_blocks(sequence))

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                {"num_external_computed_tokens": 13},
                "num_external_computed_tokens: expected an int from 0 to 12, got 13",
            ),
            ({"num_external_computed_tokens": 12, "num_new_tokens": 1}, "num_new_tokens: expected an int from 0 to 0"),
            ({"num_external_computed_tokens": -1}, "expected an int of at least 0, got -1"),
            ({"num_total_tokens": 0}, "num_total_tokens: expected an int of at least 1, got 0"),
            ({"num_total_tokens": 9, "num_new_tokens": 13}, "num_new_tokens: expected an int from 0 to 12, got 13"),
        ],
    )
    def test_what_cannot_be_asked_for(self, manager, call, message):
        cached(manager, PROMPT[:8])
        sequence = Sequence("a", PROMPT)
        with pytest.raises(InvalidArgumentError, match=message):
            manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence), **call)
        assert not sequence.is_allocated

    def test_nothing_is_loaded_behind_a_whole_hit(self, manager):
        cached(manager, PROMPT)
        sequence = Sequence("a", PROMPT)
        hit = manager.get_computed_blocks(sequence)
        with pytest.raises(InvalidArgumentError, match="num_external_computed_tokens: expected an int from 0 to 0"):
            manager.allocate_slots(sequence, hit=hit, num_external_computed_tokens=1)
        with pytest.raises(InvalidArgumentError, match="expected room for at least 20 tokens, got 19"):
            manager.allocate_slots(sequence, hit=hit, num_total_tokens=19)
        with pytest.raises(InvalidArgumentError, match="num_new_tokens: expected an int from 1 to 1, got 0"):
            manager.allocate_slots(sequence, 0, hit=hit)

    def test_a_window_keeps_what_steps_in_flight_see(self):
        manager = KVCacheManager(32, groups=[FullAttention(4), SlidingWindow(4, 4)], debug=True)
        sequence = Sequence("a", range(32))
        manager.allocate_slots(sequence, 16)
        manager.allocate_slots(sequence, 8, num_in_flight_tokens=16)
        assert sequence.first_live_block(1) == 0
        manager.allocate_slots(sequence, 4, num_in_flight_tokens=8)
        assert sequence.first_live_block(1) == 3  # what position 16 sees begins at 13
        manager.allocate_slots(sequence, 4)
        assert sequence.first_live_block(1) == 6

    def test_a_window_does_not_slide_over_what_is_loading(self):
        manager = KVCacheManager(32, groups=[FullAttention(4), SlidingWindow(4, 4)], debug=True)
        sequence = Sequence("a", range(32))
        manager.allocate_slots(sequence, 0, num_external_computed_tokens=16)
        manager.allocate_slots(sequence, 8)
        assert sequence.first_live_block(1) == 0
        assert manager.rewind(sequence, 16) == 16
        manager.cache_blocks(sequence, 16)
        manager.allocate_slots(sequence)
        assert sequence.first_live_block(1) == 3
        with pytest.raises(SequenceStateError, match="rewind: expected to keep enough tokens"):
            manager.rewind(sequence, 8)


class TestTotals:
    def test_known_tokens_are_computed_and_the_rest_is_room(self, manager):
        sequence = Sequence("a", PROMPT[:6])
        assert len(manager.allocate_slots(sequence, num_total_tokens=9)) == 3
        assert (sequence.num_computed_tokens, num_hit(manager, PROMPT)) == (6, 4)
        assert manager.allocate_slots(sequence, num_total_tokens=12) == []
        assert len(manager.allocate_slots(sequence, num_total_tokens=13)) == 1
        sequence.append_tokens([6, 7, 8])
        assert manager.allocate_slots(sequence, num_total_tokens=8) == []
        assert (sequence.num_computed_tokens, num_hit(manager, PROMPT)) == (8, 8)

    def test_a_chunk_with_room_behind_it(self, manager):
        sequence = Sequence("a", PROMPT)
        assert len(manager.allocate_slots(sequence, 6, num_total_tokens=9)) == 3
        assert sequence.num_computed_tokens == 6
        assert len(manager.allocate_slots(sequence, 0, num_total_tokens=13)) == 1
        assert len(manager.allocate_slots(sequence, 8, num_total_tokens=9)) == 0
        assert (sequence.num_computed_tokens, num_hit(manager, PROMPT)) == (14, 12)

    def test_a_total_of_less_than_is_asked_for_leaves_nothing_out(self, manager):
        sequence = Sequence("a", PROMPT)
        assert len(manager.allocate_slots(sequence, 10, num_total_tokens=5)) == 3
        assert sequence.num_computed_tokens == 10
        assert len(manager.allocate_slots(sequence, 6, num_total_tokens=5)) == 1
        assert sequence.num_computed_tokens == 16
        loaded = Sequence("b", PROMPT)
        assert len(manager.allocate_slots(loaded, num_external_computed_tokens=12, num_total_tokens=5)) == 3
        assert (loaded.num_computed_tokens, loaded.num_written_tokens) == (12, 0)

    def test_a_start_needs_a_token_or_a_hit(self, manager):
        with pytest.raises(InvalidArgumentError, match="expected room for at least 1 tokens, got 0"):
            manager.allocate_slots(Sequence("a", PROMPT), 0, num_total_tokens=9)

    def test_where_there_is_room_nothing_happens(self, manager):
        sequence = Sequence("a", PROMPT)
        manager.allocate_slots(sequence, 8)
        for total in (1, 8):
            assert manager.allocate_slots(sequence, num_total_tokens=total, delay_cache_blocks=True) == []
        assert (sequence.num_computed_tokens, sequence.num_written_tokens) == (8, 8)

    def test_room_in_a_shared_block_is_copied(self, manager):
        sequence = Sequence("a", PROMPT[:6])
        manager.allocate_slots(sequence)
        child = manager.fork(sequence, "child")
        assert manager.allocate_slots(sequence, num_total_tokens=6) == []
        assert len(manager.allocate_slots(sequence, num_total_tokens=7)) == 1
        assert manager.take_copies() == [(0, child.block_ids[1], sequence.block_ids[1])]

    def test_a_total_that_does_not_fit_changes_nothing(self, manager):
        sequence = Sequence("a", PROMPT)
        assert manager.allocate_slots(sequence, num_total_tokens=65) is None
        assert not sequence.is_allocated

    def test_how_much_it_would_take(self, manager):
        cached(manager, PROMPT[:8])
        sequence = Sequence("a", PROMPT)
        hit = manager.get_computed_blocks(sequence)
        assert manager.get_num_blocks_to_allocate(sequence, 20, hit=hit) == 5  # the hit's are free
        assert manager.get_num_blocks_to_allocate(sequence, 20) == 5
        manager.allocate_slots(sequence, 1, hit=hit)
        other = Sequence("b", PROMPT)
        found = manager.get_computed_blocks(other)
        assert manager.get_num_blocks_to_allocate(other, 20, hit=found) == 3
        assert manager.get_num_blocks_to_allocate(sequence, 20) == 2
        manager.fork(sequence, "child")
        assert manager.get_num_blocks_to_allocate(sequence, 20) == 3
        assert manager.get_num_blocks_to_allocate(sequence, 9) == 0
        with pytest.raises(SequenceStateError, match="expected no hit"):
            manager.get_num_blocks_to_allocate(sequence, 20, hit=hit)
        with pytest.raises(SequenceStateError, match="expected a hit of"):
            manager.get_num_blocks_to_allocate(Sequence("c", PROMPT), 20, hit=found)
        manager.evict_blocks([found.blocks[0].block_id])
        with pytest.raises(StaleHitError):
            manager.get_num_blocks_to_allocate(other, 20, hit=found)


class TestCutHits:
    def test_a_hit_of_at_most_so_many_tokens(self, manager):
        cached(manager, PROMPT)
        sequence = Sequence("a", PROMPT)
        assert manager.get_computed_blocks(sequence).num_tokens == 19
        for most, expected in [(0, 0), (3, 0), (4, 4), (19, 16), (20, 19), (99, 19)]:
            limited, cut = manager.get_computed_blocks(sequence, most), manager.get_computed_blocks(sequence).cut(most)
            assert limited.num_tokens == cut.num_tokens == expected
            assert [block.block_id for block in limited.blocks] == [block.block_id for block in cut.blocks]
        assert manager.allocate_slots(sequence, hit=limited.cut(8)) is not None
        assert sequence.num_readonly_tokens == 8

    def test_a_cut_hit_is_as_old_as_its_lookup(self, manager):
        cached(manager, PROMPT)
        sequence = Sequence("a", PROMPT)
        hit = manager.get_computed_blocks(sequence)
        manager.evict_blocks([hit.blocks[3].block_id])
        assert manager.allocate_slots(sequence, hit=hit.cut(12)) is not None

    def test_a_cut_hit_whose_blocks_are_gone_is_stale(self, manager):
        cached(manager, PROMPT)
        sequence = Sequence("a", PROMPT)
        hit = manager.get_computed_blocks(sequence)
        manager.evict_blocks([hit.blocks[2].block_id])
        with pytest.raises(StaleHitError):
            manager.allocate_slots(sequence, hit=hit.cut(12))

    def test_a_cut_hit_of_groups_leaves_out_blocks_that_have_others_tokens(self):
        manager = KVCacheManager(10, groups=[FullAttention(4), SlidingWindow(4, 4)], debug=True)
        cached(manager, PROMPT)
        sequence = Sequence("a", PROMPT)
        hit = manager.get_computed_blocks(sequence)
        assert hit.num_tokens > 16
        cached(manager, range(100, 120))
        with pytest.raises(StaleHitError):
            manager.allocate_slots(sequence, hit=hit)
        cut = hit.cut(16)
        assert cut.num_tokens == manager.get_computed_blocks(sequence).num_tokens == 0
        assert manager.allocate_slots(sequence, hit=cut) is not None
        assert sequence.num_readonly_tokens == 0

    def test_a_window_may_need_more_to_be_cut(self):
        manager = KVCacheManager(32, groups=[FullAttention(4), SlidingWindow(4, 4)], debug=True)
        first = Sequence("first", range(24))
        for _ in range(6):
            manager.allocate_slots(first, 4)
        manager.free(first)
        filler = Sequence("filler", range(100, 100 + 64))
        manager.allocate_slots(filler)
        manager.free(filler)
        sequence = Sequence("a", range(25))
        hit = manager.get_computed_blocks(sequence)
        ends = {hit.cut(most).num_tokens for most in range(25)}
        assert ends == {manager.get_computed_blocks(sequence, most).num_tokens for most in range(25)}


class TestEvictingById:
    def test_it_is_not_found_and_its_owner_keeps_it(self, manager):
        sequence = Sequence("a", PROMPT)
        manager.allocate_slots(sequence)
        before = list(sequence.block_ids)
        assert manager.evict_blocks([sequence.block_ids[2]]) == [sequence]
        assert manager.stats.num_cached_blocks == 2, "what is chained to it isn't cached either"
        assert (num_hit(manager, PROMPT), sequence.block_ids) == (8, before)
        assert manager.evict_blocks([sequence.block_ids[2]]) == []
        assert manager.cache_blocks(sequence, 20) == 20  # it is written again
        assert num_hit(manager, PROMPT) == 20

    def test_a_free_block_is_reused_next(self, manager):
        cached(manager, PROMPT)
        hit = manager.get_computed_blocks(Sequence("a", PROMPT))
        manager.evict_blocks([hit.blocks[4].block_id])
        assert manager.inspect.free_block_ids()[0] == hit.blocks[4].block_id

    def test_an_explanation_says_so(self):
        manager = KVCacheManager(16, 4, num_history_blocks=9)
        sequence = Sequence("a", PROMPT)
        manager.allocate_slots(sequence)
        manager.evict_blocks(sequence.block_ids[:1])
        explanation = manager.inspect.explain(Sequence("b", PROMPT))
        assert (explanation.cause, str(explanation).count("removed from the cache on request")) == ("dropped", 1)

    def test_an_explanation_says_so_of_a_window(self):
        manager = KVCacheManager(16, groups=[FullAttention(4), SlidingWindow(4, 4)], num_history_blocks=9)
        sequence = Sequence("a", PROMPT[:9])
        manager.allocate_slots(sequence)
        window = sequence.group_block_ids(1)[1:2]
        manager.free(sequence)
        manager.evict_blocks(window)
        explanation = manager.inspect.explain(Sequence("b", PROMPT[:9]))
        assert explanation.cause == "group"
        assert explanation.removal is not None and explanation.removal.cause == "dropped"
        manager.evict_blocks(
            [block.block_id for block in manager.get_computed_blocks(Sequence("b", PROMPT[:5])).blocks]
        )
        assert manager.inspect.explain(Sequence("b", PROMPT[:9])).cause == "dropped"

    def test_foreign_ids_change_nothing(self, manager):
        cached(manager, PROMPT)
        with pytest.raises(InvalidArgumentError, match="block_ids: position 1: expected an int from 0 to 15, got 16"):
            manager.evict_blocks([0, 16])
        assert num_hit(manager, PROMPT) == 20

    def test_what_a_sharer_cached_again_is_not_its_own_duplicate(self, manager):
        """A sequence that lost its KV is written after all, behind blocks that its fork has cached in the meantime."""
        sequence = Sequence("a", PROMPT[:4])
        manager.allocate_slots(sequence)
        manager.evict_blocks(sequence.block_ids[:1])
        manager.append_slots(sequence, [4, 5, 6, 7])
        child = manager.fork(sequence, "child")
        assert manager.cache_blocks(child, 8) == 0, "its parent was to write them"
        assert manager.cache_blocks(sequence, 8) == 8
        manager.append_slots(sequence, [8, 9, 10, 11])
        assert (manager.stats.num_cached_blocks, num_hit(manager, PROMPT)) == (3, 12)
        manager.append_slots(child, [8, 9, 10, 11])
        assert manager.cache_blocks(child, 12) == 0
        assert (manager.stats.num_cached_blocks, num_hit(manager, PROMPT)) == (3, 12)
        manager.free(sequence)
        manager.free(child)
        assert manager.evict_blocks(range(16)) == []
        assert manager.stats.num_cached_blocks == 0


class TestNamesAndIds:
    def test_ids_begin_where_the_engine_wants(self):
        manager = KVCacheManager(4, 4, first_block_id=3, debug=True)
        sequence = Sequence("a", PROMPT[:16])
        manager.allocate_slots(sequence)
        assert (sequence.block_ids, manager.first_block_id, manager.num_blocks) == ([3, 4, 5, 6], 3, 4)
        with pytest.raises(InvalidArgumentError, match="expected an int from 3 to 6, got 2"):
            manager.evict_blocks([2])
        manager.free(sequence)
        assert manager.inspect.free_block_ids() == [6, 5, 4, 3]

    @pytest.mark.parametrize(
        "groups", [[FullAttention(4)], [FullAttention(4), SlidingWindow(4, 4)], [SlidingWindow(4, 4)]]
    )
    def test_ids_of_groups_do_too(self, groups):
        manager = KVCacheManager(8, groups=groups, first_block_id=1, debug=True, enable_events=True)
        sequence = Sequence("a", PROMPT[:9])
        manager.allocate_slots(sequence)
        ids = [sequence.group_block_ids(group) for group in range(len(groups))]
        assert sorted(block_id for table in ids for block_id in table) == list(range(1, 3 * len(groups) + 1))
        stored = manager.take_events()
        assert {block_id for event in stored for block_id in event.block_ids} == {
            block.block_id
            for group in range(len(groups))
            for block in sequence.group_blocks(group)
            if block is not None and block.is_cached
        }
        assert all(len(event.block_ids) == len(event.block_hashes) for event in stored)

    def test_digests_are_known_before_a_sequence_is_allocated(self):
        manager = KVCacheManager(16, 4, hash_algorithm="sha256")
        sequence = Sequence("a", PROMPT[:18], salt="tenant", extra_keys=[(5, 7, "image")])
        names = manager.inspect.block_hashes(sequence)
        assert manager.inspect.block_hashes(sequence) == names
        assert len(names) == 4
        manager.allocate_slots(sequence)
        assert [block.block_hash for block in sequence.blocks] == [*names, None]
        assert manager.inspect.block_hashes(sequence) == names
        assert manager.inspect.block_hashes(Sequence("short", [1])) == []

    def test_salt_and_lora_are_said_of_every_block(self):
        manager = KVCacheManager(16, 4, enable_events=True)
        sequence = Sequence("a", PROMPT[:5], salt="tenant", lora="adapter", extra_keys=[(0, 2, "image")])
        manager.allocate_slots(sequence)
        manager.append_slots(sequence, [5, 6, 7, 8])
        other = Sequence(
            "b", [*PROMPT[:4], 70, 71, 72, 73], salt="tenant", lora="adapter", extra_keys=[(0, 2, "image")]
        )
        manager.allocate_slots(other, hit=manager.get_computed_blocks(other))
        plain = Sequence("c", PROMPT[:4])
        manager.allocate_slots(plain)
        events = manager.take_events()
        assert [(event.salt, event.lora) for event in events] == [("tenant", "adapter")] * 3 + [(None, None)]
        ids = [sequence.block_ids[:1], sequence.block_ids[1:2], other.block_ids[1:2], plain.block_ids]
        assert [list(event.block_ids) for event in events] == ids
