"""What is written, awaited or lost is a state of the KV, whatever is cached: where the two once differed."""

import pytest

from kvblocks import FullAttention, KVCacheManager, Sequence, SequenceStateError, SlidingWindow

GROUPS = {
    "one group": None,
    "a window": [FullAttention(2), SlidingWindow(2, 14)],
    "two of full attention": [FullAttention(2), FullAttention(2)],
}


@pytest.fixture(params=GROUPS)
def manager(request):
    groups = GROUPS[request.param]
    return KVCacheManager(60, 2 if groups is None else None, groups=groups, debug=True)


def allocate(manager, name, tokens, **options):
    """Start a sequence with all that is cached."""
    sequence = Sequence(name, tokens)
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, hit=hit, **options) is not None
    return sequence


def num_hit(manager, tokens):
    return manager.get_computed_blocks(Sequence("later", [*tokens, 999])).num_tokens


def hide(manager, how):
    if how == "reset":
        manager.reset_prefix_cache()
    elif how == "salt":
        manager.forget_salt(None)


def test_fewer_tokens_than_before_are_no_news(manager):
    one = Sequence("one", range(5))
    manager.allocate_slots(one, delay_cache_blocks=True)
    manager.cache_blocks(one, 4)
    manager.evict_blocks(one.block_ids[:1])
    assert one.num_written_tokens == 0
    manager.cache_blocks(one, 0)
    assert num_hit(manager, range(4)) == 0
    manager.cache_blocks(one, 3)  # more than is known: three are written, which fill one block
    assert (one.num_written_tokens, num_hit(manager, range(4))) == (3, 2)
    manager.cache_blocks(one, 2)
    assert one.num_written_tokens == 3


@pytest.mark.parametrize("hidden", ["", "reset", "salt"])
def test_who_hit_what_was_never_written_caches_nothing_behind_it(manager, hidden):
    one = allocate(manager, "one", range(6))
    other = allocate(manager, "other", range(9))
    hide(manager, hidden)
    manager.abort(one, 0)
    assert other.num_written_tokens == 0
    if hidden:
        manager.renew(other)
    manager.append_slots(other, [9, 10])
    manager.append_step([other], [11])
    assert manager.cache_blocks(other, 11) == 0, "it says nothing of what it hit"
    assert (other.num_written_tokens, num_hit(manager, range(12))) == (0, 0)
    manager.rewind(other, other.num_written_tokens)
    manager.allocate_slots(other)
    assert (other.num_written_tokens, num_hit(manager, range(12))) == (12, 12)


@pytest.mark.parametrize("hidden", ["", "reset", "salt"])
def test_a_sequence_that_loads_loses_the_hit_that_was_never_written(manager, hidden):
    one = allocate(manager, "one", range(6))
    loading = Sequence("loading", range(12))
    hit = manager.get_computed_blocks(loading)
    manager.allocate_slots(loading, 0, hit=hit, num_external_computed_tokens=6)
    hide(manager, hidden)
    manager.abort(one, 0)
    manager.cache_blocks(loading, 0)
    assert (loading.num_written_tokens, num_hit(manager, range(12))) == (0, 0)
    if hidden:
        manager.renew(loading)
        assert num_hit(manager, range(12)) == 0


@pytest.mark.parametrize("hidden", ["", "reset", "salt"])
def test_what_was_lost_before_its_step_died_is_not_kept_by_others(manager, hidden):
    """The other sequence has a duplicate of the block that turned out to be bad, so it kept all the rest."""
    allocate(manager, "duplicate", range(2))
    one = Sequence("one", range(6))
    manager.allocate_slots(one)
    other = allocate(manager, "other", range(7))
    assert other.block_ids[0] != one.block_ids[0] and other.block_ids[1] == one.block_ids[1]
    manager.evict_blocks([one.block_ids[0]])
    hide(manager, hidden)
    manager.abort(one, 0)
    assert other.num_written_tokens == 2
    if hidden:
        manager.renew(other)
    assert num_hit(manager, range(6)) <= 2, "the duplicate, at most"


def test_a_tail_that_was_never_written_is_lost_to_a_fork(manager):
    one = allocate(manager, "one", range(5))
    child = manager.fork(one, "child")
    manager.append_slots(child, [5])
    assert num_hit(manager, range(6)) == 6
    other = manager.fork(one, "other")
    manager.abort(one, 4)
    assert other.num_written_tokens == 4
    manager.append_slots(other, [7, 8, 9])
    assert num_hit(manager, [0, 1, 2, 3, 4, 7]) == 4


@pytest.mark.parametrize("hidden", ["", "reset"])
def test_what_is_bad_is_lost_while_it_is_not_cached(manager, hidden):
    one = allocate(manager, "one", range(6))
    hide(manager, hidden)
    manager.evict_blocks([one.block_ids[1]])
    assert one.num_written_tokens == 2
    if hidden:
        manager.renew(one)
    manager.append_slots(one, [6, 7])
    assert num_hit(manager, range(8)) == 2


def test_a_reset_loses_nothing(manager):
    one = allocate(manager, "one", range(6))
    manager.reset_prefix_cache()
    assert one.num_written_tokens == 6
    manager.renew(one)
    assert num_hit(manager, range(6)) == 6


@pytest.mark.parametrize("cut", ["rewind", "truncate"])
def test_slots_behind_a_cut_count_again(manager, cut):
    one = Sequence("one", range(2))
    manager.allocate_slots(one)
    manager.append_slots(one, [2, 3, 4, 5])
    other = allocate(manager, "other", range(9))
    manager.evict_blocks([one.block_ids[1]])
    if cut == "rewind":
        manager.rewind(one, 3)
        assert one.num_written_tokens == 2
        manager.allocate_slots(one)
    else:
        manager.truncate(one, 2)
        manager.append_slots(one, [2, 3, 4, 5])
    assert (one.num_written_tokens, num_hit(manager, range(6))) == (6, 6)
    assert other.num_written_tokens == 2
    manager.truncate(one, 5)
    assert one.num_written_tokens == 5


def test_a_truncation_inside_a_block_keeps_what_is_written_before():
    manager = KVCacheManager(20, 4, debug=True)
    one = Sequence("one", range(3))
    manager.allocate_slots(one)
    manager.append_slots(one, range(3, 12))
    child = manager.fork(one, "child")
    manager.truncate(one, 6, num_computed_tokens=6)
    assert (one.num_written_tokens, child.num_written_tokens) == (6, 6)
    manager.append_slots(one, [60, 70])
    assert num_hit(manager, [0, 1, 2, 3, 4, 5, 60, 70]) == 8


def test_what_hung_from_a_lost_block_is_cached_again_by_its_own_sequence_alone():
    manager = KVCacheManager(24, 2, debug=True, enable_events=True)
    one = allocate(manager, "one", [0, 0])
    long = allocate(manager, "long", [0, 0, 1, 1, 0])
    manager.evict_blocks(one.block_ids)
    manager.cache_blocks(one, 2)  # the lost block is written again, and cached: the first of `long`, too
    assert num_hit(manager, [0, 0, 1, 1, 0]) == 2
    manager.append_slots(long, [1, 1])
    assert num_hit(manager, long.token_ids()) == 2
    assert manager.cache_blocks(long, 6) == 0
    manager.rewind(long, 2)
    assert long.lost_from == 0, "it keeps a block that it can't vouch for"
    manager.rewind(long, 0)
    manager.allocate_slots(long)
    assert num_hit(manager, long.token_ids()) == 6


def test_nobody_goes_back_to_where_a_group_that_is_not_cached_computed_nothing():
    manager = KVCacheManager(40, groups=[FullAttention(4), SlidingWindow(4, 3, is_cached=False)], debug=True)
    manager.free(allocate(manager, "one", range(13)))
    two = Sequence("two", range(9))
    two.append_tokens(range(9, 14))
    hit = manager.get_computed_blocks(two)
    assert hit.num_tokens == 12
    manager.allocate_slots(two, hit=hit)
    for call in (lambda: manager.truncate(two, 10), lambda: manager.truncate(two, 11), lambda: manager.rewind(two, 9)):
        with pytest.raises(SequenceStateError, match="expected to keep"):
            call()
        assert (two.num_tokens, two.num_computed_tokens, len(two.block_ids)) == (14, 14, 4)
    manager.truncate(two, 12)  # the token at 12 sees those from 10 on, which were computed again
    assert two.num_computed_tokens == 12


@pytest.mark.parametrize("cut", ["abort", "rewind"])
def test_who_was_given_a_tail_by_a_fork_can_not_lose_it_for_others(cut):
    manager = KVCacheManager(60, 4, debug=True)
    one = allocate(manager, "one", range(6))
    child = manager.fork(one, "child")
    if cut == "abort":
        manager.abort(child, 5)
    else:
        manager.rewind(child, 4)
    assert (one.num_written_tokens, one.lost_from) == (6, None)
    manager.append_slots(one, [6, 7, 8])
    assert num_hit(manager, range(9)) == 8


def test_who_was_given_a_block_and_went_back_into_it_can_not_lose_it_for_others():
    manager = KVCacheManager(60, 4, debug=True)
    one = allocate(manager, "one", range(13))
    child = manager.fork(one, "child")
    manager.append_slots(child, [50])
    manager.abort(child, 13)
    hitting = Sequence("hitting", range(5))
    hitting.append_tokens(range(5, 10))
    manager.allocate_slots(hitting, hit=manager.get_computed_blocks(hitting))
    manager.truncate(hitting, 6)
    manager.rewind(hitting, 4)
    assert (one.num_written_tokens, num_hit(manager, range(13))) == (13, 12)


def test_what_a_fork_wrote_behind_a_given_tail_is_its_own_to_lose():
    manager = KVCacheManager(60, 4, debug=True)
    one = allocate(manager, "one", range(6))
    child = manager.fork(one, "child")
    manager.free(one)
    manager.append_slots(child, [6, 7])  # the last owner keeps the block, and fills it
    third = manager.fork(child, "third")
    manager.abort(child, 0)
    assert (third.num_written_tokens, num_hit(manager, range(8))) == (6, 4)


LOSSES = {
    "abort": lambda manager, writer: manager.abort(writer, 0),
    "evict": lambda manager, writer: manager.evict_blocks(writer.group_block_ids(0)[:1]),
    "rewind": lambda manager, writer: manager.rewind(writer, 0),
    "abort after a reset": lambda manager, writer: (manager.reset_prefix_cache(), manager.abort(writer, 0)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_end_of_a_transfer_says_nothing_of_the_hit_before_it(manager, loss):
    writer = allocate(manager, "writer", range(4))
    waits = Sequence("waits", range(13))
    manager.allocate_slots(waits, 0, hit=manager.get_computed_blocks(waits), num_external_computed_tokens=8)
    child = manager.fork(waits, "child")
    LOSSES[loss](manager, writer)
    for sequence in (waits, child):
        if loss == "abort after a reset":
            manager.renew(sequence)
        assert manager.cache_blocks(sequence, 12) == 0
        assert (sequence.lost_from, sequence.delayed_from, sequence.num_written_tokens) == (0, None, 0)
    assert num_hit(manager, range(12)) == 0
    assert manager.rewind(waits, waits.num_written_tokens) == 0
    manager.allocate_slots(waits)
    assert (waits.num_written_tokens, num_hit(manager, range(12))) == (13, 12)
    assert manager.cache_blocks(child, 12) == 0


def test_a_copy_of_what_was_lost_is_lost(manager):
    """The fork copies the tail that it was given, which nobody wrote. Of two sizes of blocks one may not be copied."""
    one = allocate(manager, "one", range(5))
    children = [manager.fork(one, name) for name in "ab"]
    manager.abort(one, 4)
    for child in children:
        assert manager.append_slots(child, [5, 6, 7], delay_cache_blocks=True)
        assert manager.cache_blocks(child, 8) == 4
        assert (child.lost_from, num_hit(manager, range(8))) == (4, 4)


def test_a_side_block_that_was_given_stays_lost_though_the_primary_one_was_copied():
    manager = KVCacheManager(40, groups=[FullAttention(8), SlidingWindow(4, 12)], debug=True)
    one = allocate(manager, "one", range(4))
    child = manager.fork(one, "child")
    other = manager.fork(one, "other")
    manager.append_slots(child, range(4, 9), delay_cache_blocks=True)  # it copies the block of 8
    manager.abort(one, 0)
    assert manager.cache_blocks(child, 9) == 0
    assert (child.lost_from, other.lost_from, num_hit(manager, range(9))) == (0, 0, 0)


def test_a_block_that_turns_out_to_be_bad_before_it_is_there_is_not_vouched_for_by_a_fork(manager):
    waits = Sequence("waits", range(9))
    manager.allocate_slots(waits, 0, num_external_computed_tokens=8)
    child = manager.fork(waits, "child")
    assert manager.evict_blocks(waits.block_ids[1:2]) == []
    assert manager.cache_blocks(child, 8) == 2
    assert manager.cache_blocks(waits, 8) == 8, "its own block, which it says is written now"
    assert child.lost_from == 2


def test_bad_kv_takes_along_all_that_was_computed_from_it(manager):
    """Duplicates: what hangs below another's good block may have been computed from a bad one."""
    one, two = Sequence("one", [1, 2, 9]), Sequence("two", [1, 2, 3, 4, 5])
    good = Sequence("good", [1, 2, 3, 4, 6])
    for sequence in (one, two, good):
        manager.allocate_slots(sequence, delay_cache_blocks=True)
    manager.cache_blocks(one, 2)
    manager.cache_blocks(two, 4)
    manager.cache_blocks(good, 4)
    three = allocate(manager, "three", [1, 2, 3, 4, 7, 8])
    four = allocate(manager, "four", [1, 2, 3, 4, 7, 8, 9])
    assert one.block_ids[0] == three.block_ids[0] != two.block_ids[0] and two.block_ids[1] == three.block_ids[1]
    assert manager.evict_blocks(two.block_ids[:1]) == [two, three, four]
    assert [sequence.num_written_tokens for sequence in (one, two, good, three, four)] == [2, 0, 4, 2, 2]
    has_one_group = len(manager.groups) == 1  # what is attached to a duplicate isn't told apart: with several all goes
    assert num_hit(manager, four.token_ids()) == (4 if has_one_group else 0)
    for sequence in (two, three, four):
        manager.rewind(sequence, sequence.num_written_tokens)
        manager.allocate_slots(sequence)
    assert num_hit(manager, four.token_ids()) == 6
    assert manager.evict_blocks([]) == []


def test_who_shares_blocks_is_looked_up_once_for_the_aborts_of_a_step():
    """So they cost the same in any order. Once somebody starts, the tables are looked through again."""
    manager = KVCacheManager(400, 2)
    writers = [allocate(manager, i, [i, 0, i, 1, 2]) for i in range(20)]
    children = [manager.fork(writer, f"child {writer.sequence_id}") for writer in writers]
    manager.abort(writers[0], 2)
    owners = manager._owners  # noqa: SLF001
    assert owners is not None
    for writer in writers[1:]:
        manager.abort(writer, 2)
        assert manager._owners is owners  # noqa: SLF001
    assert [child.lost_from for child in children] == [2] * 20
    later = manager.fork(children[0], "later")
    assert manager._owners is None  # noqa: SLF001
    manager.append_slots(children[0], [7, 8])
    again = manager.fork(children[0], "again")
    manager.abort(children[0], 5)
    assert (later.lost_from, again.lost_from) == (2, 2)
