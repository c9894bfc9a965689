"""Caching late: for engines that write a step's keys and values before others may read them.

One promise at a time. Long histories are in test_stateful.py and test_group_stateful.py.
"""

import pytest

from kvblocks import (
    BlockStored,
    FullAttention,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    SlidingWindow,
)


def num_hit(manager: KVCacheManager, tokens: list[int]) -> int:
    return len(manager.get_computed_blocks(Sequence("probe", tokens)).blocks)


def start(manager: KVCacheManager, name: str, num_tokens: int, *, late: bool = True) -> Sequence:
    sequence = Sequence(name, range(num_tokens))
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, hit=hit, delay_cache_blocks=late) is not None
    return sequence


@pytest.fixture
def manager() -> KVCacheManager:
    return KVCacheManager(64, 4, debug=True)


PROMPT = list(range(20))


def test_nothing_is_found_before_it_is_said_to_be_written(manager):
    sequence = start(manager, "a", 14)
    assert (sequence.num_computed_tokens, sequence.num_written_tokens) == (14, 0)
    assert num_hit(manager, PROMPT) == 0
    assert manager.cache_blocks(sequence, 7) == 4
    assert num_hit(manager, PROMPT) == 1
    assert sequence.num_written_tokens == 7
    assert manager.cache_blocks(sequence, 14) == 12
    assert num_hit(manager, PROMPT) == 3
    assert sequence.num_written_tokens == 14


def test_a_chunk_after_another_is_cached_when_it_is_written(manager):
    sequence = Sequence("a", PROMPT)
    manager.allocate_slots(sequence, 10, delay_cache_blocks=True)
    assert manager.cache_blocks(sequence, 10) == 8
    manager.allocate_slots(sequence, 10, delay_cache_blocks=True)
    assert sequence.num_written_tokens == 10
    assert num_hit(manager, PROMPT) == 2
    assert manager.cache_blocks(sequence, 20) == 20


def test_a_hit_is_written_already(manager):
    start(manager, "first", 12, late=False)
    sequence = start(manager, "second", 20)
    assert sequence.num_written_tokens == 12
    assert manager.cache_blocks(sequence, 20) == 20
    whole = start(manager, "third", 20)  # its last token is computed again, and stored nowhere
    assert whole.num_written_tokens == whole.num_computed_tokens == 20


def test_to_say_less_than_before_changes_nothing(manager):
    sequence = start(manager, "a", 14)
    manager.cache_blocks(sequence, 9)
    before = manager.stats
    assert manager.cache_blocks(sequence, 0) == manager.cache_blocks(sequence, 5) == 8
    assert sequence.num_written_tokens == 9
    assert manager.stats == before


def test_behind_a_gap_nothing_is_cached_whatever_call_comes(manager):
    sequence = start(manager, "a", 6)
    manager.append_slots(sequence, [6])
    manager.append_slots(sequence, [7])  # fills a block, on the short way
    manager.append_slots(sequence, [8, 9, 10, 11, 12])
    manager.append_step([sequence], [13])
    sequence.append_tokens([14, 15, 16])
    manager.allocate_slots(sequence)
    assert sequence.num_written_tokens == 0
    assert manager.stats.num_cached_blocks == 0
    assert manager.cache_blocks(sequence, 17) == 16
    manager.append_slots(sequence, [17, 18, 19])  # early again: there is no gap any more
    assert num_hit(manager, PROMPT) == 5


@pytest.mark.parametrize("way", ["append_slots", "append_step"])
def test_the_short_ways_see_the_gap(way):
    manager = KVCacheManager(64, 4)  # in debug mode a token that fills a block goes a longer way
    sequence = start(manager, "a", 4, late=False)
    manager.append_slots(sequence, [4, 5, 6], delay_cache_blocks=True)
    if way == "append_slots":
        manager.append_slots(sequence, [7])
    else:
        manager.append_step([sequence], [7])
    assert num_hit(manager, PROMPT) == 1
    assert manager.cache_blocks(sequence, 8) == 8
    manager.check()


@pytest.mark.parametrize("size", [1, 3])
def test_decoded_tokens_are_cached_late(manager, size):
    sequence = start(manager, "a", 4, late=False)
    for first in range(4, 16, size):
        tokens = list(range(first, first + size))
        assert manager.append_slots(sequence, tokens, delay_cache_blocks=True) is not None
        assert sequence.num_written_tokens == first
        assert num_hit(manager, PROMPT) == first // 4
        manager.cache_blocks(sequence, first + size)
    assert num_hit(manager, PROMPT) == 4


def test_a_step_is_cached_late(manager):
    sequences = [start(manager, f"s{i}", 3 + i, late=False) for i in range(3)]
    changes = manager.append_step(sequences, [3, 4, 5], delay_cache_blocks=True)
    assert changes is not None
    assert [sequence.num_written_tokens for sequence in sequences] == [3, 4, 5]
    assert manager.stats.num_cached_blocks == 1  # the block that two prompts begin with
    assert manager.cache_blocks(sequences[0], 4) == 4
    assert manager.stats.num_cached_blocks == 2


def test_a_refused_call_delays_nothing():
    manager = KVCacheManager(3, 4, debug=True)
    sequence = start(manager, "a", 12, late=False)
    assert manager.append_slots(sequence, [12], delay_cache_blocks=True) is None
    assert manager.append_step([sequence], [12], delay_cache_blocks=True) is None
    assert sequence.delayed_from is None
    other = Sequence("b", range(100, 104))
    assert manager.allocate_slots(other, delay_cache_blocks=True) is None
    assert other.delayed_from is None


def test_a_fork_before_the_commit_caches_each_block_once(manager):
    sequence = start(manager, "a", 10)
    child = manager.fork(sequence, "child")
    assert child.num_written_tokens == 0
    assert manager.cache_blocks(child, 10) == 8
    assert manager.stats.num_cached_blocks == 2
    assert manager.cache_blocks(sequence, 10) == 8
    assert manager.stats.num_cached_blocks == 2


def test_what_two_committed_in_parts_is_found_when_both_are_gone(manager):
    sequence = start(manager, "a", 10)
    child = manager.fork(sequence, "child")
    manager.cache_blocks(sequence, 4)
    manager.cache_blocks(child, 8)
    manager.free(sequence)
    manager.free(child)
    assert num_hit(manager, PROMPT) == 2


def test_the_first_committed_of_equal_blocks_is_found(manager):
    first, second = start(manager, "a", 8), start(manager, "b", 8)
    manager.cache_blocks(second, 8)
    manager.cache_blocks(first, 8)
    hit = manager.get_computed_blocks(Sequence("probe", PROMPT))
    assert hit.blocks == second.blocks
    manager.abort(second, 0)  # nothing of it was written after all
    assert manager.get_computed_blocks(Sequence("probe", PROMPT)).blocks == first.blocks


def test_after_an_abort_what_was_taken_back_is_computed_and_cached_anew(manager):
    early = start(manager, "early", 8, late=False)
    sharer = start(manager, "sharer", 16, late=False)
    manager.abort(early, 0)
    assert num_hit(manager, PROMPT) == 0
    assert manager.cache_blocks(sharer, 16) == 0  # it hit a part of that
    assert manager.rewind(sharer, sharer.num_written_tokens) == 0
    manager.allocate_slots(sharer, 16, delay_cache_blocks=True)
    assert manager.cache_blocks(sharer, 16) == 16
    assert num_hit(manager, PROMPT) == 4


def test_after_a_reset_nothing_is_cached_until_renewed(manager):
    sequence = start(manager, "a", 14)
    manager.cache_blocks(sequence, 8)
    manager.reset_prefix_cache()
    assert manager.cache_blocks(sequence, 13) == 0
    assert manager.stats.num_cached_blocks == 0
    manager.renew(sequence)
    assert num_hit(manager, PROMPT) == 3  # what was written until then, and no more
    assert manager.cache_blocks(sequence, 14) == 12


def test_renewing_caches_what_is_written_only(manager):
    sequence = start(manager, "a", 14)
    manager.cache_blocks(sequence, 4)
    manager.reset_prefix_cache()
    manager.renew(sequence)
    assert num_hit(manager, PROMPT) == 1


def test_renewing_gives_back_what_was_known_before_the_reset(manager):
    sequence = Sequence("a", range(10))
    manager.allocate_slots(sequence)
    before = sequence.blocks[0].run
    manager.reset_prefix_cache()
    manager.renew(sequence)
    assert (before.blocks, len(before.tokens)) == ([], 0)


def test_going_back_before_the_gap_closes_it(manager):
    sequence = start(manager, "a", 4, late=False)
    manager.append_slots(sequence, [4, 5, 6, 7, 8], delay_cache_blocks=True)
    manager.truncate(sequence, 6)
    assert sequence.num_written_tokens == 4
    manager.truncate(sequence, 4)
    assert sequence.delayed_from is None
    manager.append_slots(sequence, [4, 5, 6, 7])
    assert num_hit(manager, PROMPT) == 2


def test_others_learn_what_is_about_to_be_written(manager):
    sequence = start(manager, "a", 13)
    waiting = Sequence("b", PROMPT)
    hit = manager.get_computed_blocks(waiting)
    assert hit.num_tokens == 0
    assert hit.pending_tokens == 12
    assert hit.pending_sequence is sequence
    manager.cache_blocks(sequence, 8)
    assert manager.get_computed_blocks(waiting).pending_tokens == 4
    manager.cache_blocks(sequence, 13)
    assert manager.get_computed_blocks(waiting).pending_tokens == 0
    assert manager.get_computed_blocks(waiting).num_tokens == 12


def test_events_come_when_it_is_cached():
    manager = KVCacheManager(64, 4, enable_events=True, debug=True)
    sequence = start(manager, "a", 9)
    manager.append_slots(sequence, [9, 10, 11], delay_cache_blocks=True)
    assert manager.take_events() == []
    manager.cache_blocks(sequence, 9)
    manager.cache_blocks(sequence, 12)
    events = manager.take_events()
    assert [event.token_ids for event in events if isinstance(event, BlockStored)] == [PROMPT[:8], PROMPT[8:12]]


@pytest.mark.parametrize("way", ["allocate_slots", "append_slots", "append_step"])
def test_a_delayed_call_caches_nothing_that_an_earlier_one_could_not(way):
    """The parent wasn't cached when a block got full, and is again: events and digests must not miss the block."""
    manager = KVCacheManager(16, 4, enable_events=True, debug=True)
    sequence = Sequence("a", range(8))
    manager.allocate_slots(sequence, 4)
    manager.evict_blocks(sequence.block_ids)
    manager.allocate_slots(sequence)
    manager.cache_blocks(sequence, 4)
    if way == "allocate_slots":
        sequence.append_tokens([8])
        manager.allocate_slots(sequence, delay_cache_blocks=True)
    elif way == "append_slots":
        manager.append_slots(sequence, [8], delay_cache_blocks=True)
    else:
        manager.append_step([sequence], [8], delay_cache_blocks=True)
    assert manager.stats.num_cached_blocks == 1
    assert manager.cache_blocks(sequence, 9) == 8
    stored = [name for event in manager.take_events()[-1:] for name in event.block_hashes]
    assert stored == [sequence.blocks[1].block_hash] == manager.inspect.block_hashes(sequence)[1:2]


def test_windows_slide_by_what_is_written():
    manager = KVCacheManager(64, groups=[FullAttention(4), SlidingWindow(4, 4)], debug=True)
    sequence = start(manager, "a", 8, late=False)
    manager.append_slots(sequence, [8, 9, 10, 11], delay_cache_blocks=True)
    first = sequence.first_live_block(1)
    for number in range(12, 24):
        manager.append_slots(sequence, [number], delay_cache_blocks=True)
    assert sequence.first_live_block(1) == first == 1  # a query at 8 sees 5, and nobody said that it ran
    manager.cache_blocks(sequence, 24)
    manager.append_slots(sequence, [24], delay_cache_blocks=True)
    assert sequence.first_live_block(1) == 5
    assert manager.get_computed_blocks(Sequence("probe", range(24))).num_readonly_tokens == 24


def test_it_is_an_error_to_say_it_of_what_has_no_slots(manager):
    sequence = start(manager, "a", 10)
    with pytest.raises(InvalidArgumentError, match=r"num_computed_tokens: expected .*10.*, got 11"):
        manager.cache_blocks(sequence, 11)
    manager.free(sequence)
    with pytest.raises(SequenceStateError, match="holds no blocks"):
        manager.cache_blocks(sequence, 0)
    assert manager.stats.num_cached_blocks == 0


def test_without_caching_it_counts_and_caches_nothing():
    manager = KVCacheManager(64, 4, enable_caching=False, debug=True)
    sequence = start(manager, "a", 10)
    assert manager.cache_blocks(sequence, 10) == 0
    assert sequence.num_written_tokens == 10


def test_a_freed_sequence_begins_anew(manager):
    sequence = start(manager, "a", 10)
    manager.free(sequence)
    assert sequence.num_written_tokens == 0
    assert manager.allocate_slots(sequence) is not None
    assert num_hit(manager, PROMPT) == 2
