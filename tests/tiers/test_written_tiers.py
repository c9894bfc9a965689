"""What is lost is lost in tiers, too: hits behind which a sequence loads, and what was stored before anybody knew."""

import pytest
from model.tiered import settle

from kvblocks import FullAttention, KVCacheManager, Sequence, SlidingWindow, Tier

GROUPS = {"one group": None, "a window": [FullAttention(2), SlidingWindow(2, 30)]}
PROMPT = range(12)


@pytest.fixture(params=GROUPS)
def groups(request):
    return GROUPS[request.param]


def make_manager(groups, **options):
    tiers = [Tier("host", 64, 100, **options)]
    return KVCacheManager(60, 2 if groups is None else None, groups=groups, tiers=tiers, debug=True)


def start_loading(groups):
    """S computes 6 tokens, L hits them and loads 6 more; returns (manager, S, L)."""
    manager = make_manager(groups)
    first = Sequence("first", [*PROMPT])
    manager.allocate_slots(first)
    manager.free(first)
    settle(manager)
    crowd = Sequence("crowd", range(1000, 1000 + 120 // len(manager.groups)))
    manager.allocate_slots(crowd)
    manager.abort(crowd, 0)
    one = Sequence("S", PROMPT[:6])
    manager.allocate_slots(one)
    loading = Sequence("L", PROMPT[:5])  # truncations don't go into prompts
    loading.append_tokens([*PROMPT[5:], 12])
    hit = manager.get_computed_blocks(loading)
    loads = manager.tiers.find(hit)
    assert hit.num_tokens == 6 and sum(load.num_tokens for load in loads) == 6
    manager.tiers.allocate(loading, hit, loads)
    return manager, one, loading


def hide(manager, how):
    if how == "reset":
        manager.reset_prefix_cache()
    elif how == "salt":
        manager.forget_salt(None)


def lose(manager, one, how):
    """Some of the 6 tokens of S are not there. Returns how many are, and how many of them L may keep."""
    if how == "abort":
        manager.abort(one, 0)
        return 0, 0
    if how == "in part":
        manager.abort(one, 2)
    else:
        manager.evict_blocks([one.block_ids[1]])
    return 2, 2 if len(manager.groups) == 1 else 0


def finish(manager):
    ended = []
    for transfer in manager.tiers.take_transfers():
        ended += manager.tiers.complete(transfer, ok=True)
    return ended


def num_found(manager, tokens=PROMPT):
    """How many tokens somebody would find on the device, and there and below together."""
    hit = manager.get_computed_blocks(Sequence("later", [*tokens, 999]))
    return hit.num_tokens, hit.num_tokens + sum(load.num_tokens for load in manager.tiers.find(hit))


@pytest.mark.parametrize("how", ["abort", "in part", "evict"])
@pytest.mark.parametrize("hidden", ["", "reset", "salt"])
def test_a_load_behind_a_lost_hit_ends_with_what_was_before(groups, hidden, how):
    manager, one, loading = start_loading(groups)
    hide(manager, hidden)
    num_there, kept = lose(manager, one, how)
    (loaded,) = finish(manager)
    assert (loaded.num_tokens, loaded.is_whole) == (kept, False)
    assert loading.num_computed_tokens == loading.num_written_tokens == kept
    if hidden:
        manager.renew(loading)
    assert num_found(manager)[0] <= num_there


@pytest.mark.parametrize("how", ["abort", "in part", "evict"])
@pytest.mark.parametrize("hidden", ["", "reset", "salt"])
@pytest.mark.parametrize("cut", ["give up", "rewind", "truncate"])
def test_who_is_cut_while_it_loads_behind_a_lost_hit_keeps_no_more(groups, hidden, how, cut):
    manager, one, loading = start_loading(groups)
    hide(manager, hidden)
    num_there, kept = lose(manager, one, how)
    if cut == "give up":
        assert manager.tiers.give_up(loading) == kept
    elif cut == "rewind":
        manager.rewind(loading, 7)
    else:
        manager.truncate(loading, 7)
    assert not manager.tiers.is_loading(loading) and loading.num_computed_tokens == kept
    assert finish(manager) == []
    manager.allocate_slots(loading, delay_cache_blocks=True)
    if hidden:
        manager.renew(loading)
    assert num_found(manager)[0] <= num_there


@pytest.mark.parametrize("number", [0, 6])
@pytest.mark.parametrize("hidden", ["", "reset", "salt"])
def test_a_commit_or_renewal_of_who_loads_caches_nothing_lost(groups, hidden, number):
    manager, one, loading = start_loading(groups)
    hide(manager, hidden)
    manager.abort(one, 0)
    if hidden:
        manager.renew(loading)
        assert num_found(manager)[0] == 0
    assert manager.cache_blocks(loading, number) == 0, "it hit them, and can't say that they are written"
    assert (loading.num_written_tokens, num_found(manager)[0]) == (0, 0)
    assert finish(manager)[0].num_tokens == 0


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("how", ["abort", "rewind", "evict", "evict, hidden"])
def test_a_store_of_what_was_never_written_is_dropped(groups, how, is_answered):
    manager = make_manager(groups, store="computed")
    one = Sequence("one", [*PROMPT])
    manager.allocate_slots(one)
    transfers = manager.tiers.take_transfers()
    assert transfers
    for transfer in transfers if is_answered else ():
        manager.tiers.complete(transfer, ok=True)
    settle_after = [] if is_answered else transfers
    if how == "abort":
        manager.abort(one, 0)
    elif how == "rewind":
        manager.rewind(one, 0)
    elif how == "evict":
        manager.evict_blocks([one.block_ids[0]])
    else:
        manager.evict_blocks([one.block_ids[0]])
        for block_id in reversed(one.block_ids):
            manager.evict_blocks([block_id])
    for transfer in settle_after:
        manager.tiers.complete(transfer, ok=True)
    settle(manager)
    crowd = Sequence("crowd", range(1000, 1000 + 2 * (manager.num_free_blocks // len(manager.groups))))
    manager.allocate_slots(crowd)
    manager.abort(crowd, 0)
    assert num_found(manager) == (0, 0)


def test_a_store_that_read_a_lost_block_is_not_kept_because_the_block_is_written_again(groups):
    manager = make_manager(groups, store="computed")
    one, duplicate = Sequence("one", [*PROMPT]), Sequence("duplicate", [*PROMPT])
    manager.allocate_slots(one)
    manager.allocate_slots(duplicate)  # keeps the prefix cached, so that the block comes back to the same place
    transfers = manager.tiers.take_transfers()
    manager.evict_blocks([one.block_ids[1]])
    manager.cache_blocks(one, 12)
    assert manager.blocks[one.block_ids[1]].is_cached
    for transfer in transfers:
        manager.tiers.complete(transfer, ok=True)
    assert [tier.num_cached_blocks for tier in manager.tiers] == [1]


def test_copies_of_bad_blocks_are_dropped_one_after_another(groups):
    manager = make_manager(groups, store="computed")
    one = Sequence("one", [*PROMPT])
    manager.allocate_slots(one)
    settle(manager)
    assert num_found(manager) == (12, 12)
    manager.evict_blocks([one.block_ids[5]])  # the last one: what is before stays cached and stored
    assert num_found(manager) == (10, 10)
    manager.evict_blocks([one.block_ids[2]])
    assert num_found(manager) == (4, 4)
    manager.evict_blocks([one.block_ids[0]])
    assert num_found(manager) == (0, 0)


@pytest.mark.parametrize("first_bad", [3, 4])
def test_copies_of_bad_blocks_are_dropped_after_the_abort_that_uncached_the_blocks(groups, first_bad):
    """The tier has the first 6 tokens from earlier. So the abort leaves them, and what was stored behind them."""
    manager = make_manager(groups, store="computed")
    earlier, crowd = Sequence("earlier", PROMPT[:6]), Sequence("crowd", range(1000, 1000 + 120 // len(manager.groups)))
    manager.allocate_slots(earlier)
    settle(manager)
    manager.free(earlier)
    manager.allocate_slots(crowd)
    manager.abort(crowd, 0)
    manager.allocate_slots(Sequence("pad", range(2000, 2014)))  # so that S has other blocks than the earlier one
    one, other = Sequence("S", PROMPT[:6]), Sequence("L", [*PROMPT])
    manager.allocate_slots(one)
    manager.allocate_slots(other, hit=manager.get_computed_blocks(other))
    settle(manager)
    manager.abort(one, 0)
    assert num_found(manager) == (0, 12)
    manager.evict_blocks(other.block_ids[first_bad:])
    assert num_found(manager) == (0, 2 * first_bad)


@pytest.mark.parametrize("how", ["abort", "evict"])
def test_who_loads_what_was_stored_before_its_step_died_gets_nothing_of_it(how):
    """With several groups nobody loads what the device has."""
    manager = make_manager(None, store="computed")
    one, loading = Sequence("S", [*PROMPT]), Sequence("L", [*PROMPT, 12])
    manager.allocate_slots(one)
    settle(manager)
    hit = manager.get_computed_blocks(loading).cut(0)  # so none of L's blocks is one of S's
    manager.tiers.allocate(loading, hit, manager.tiers.find(hit))
    if how == "abort":
        manager.abort(one, 0)
    else:
        manager.evict_blocks([one.block_ids[0]])
    (loaded,) = finish(manager)
    assert (loaded.num_tokens, loaded.is_whole) == (0, False)
    assert num_found(manager) == (0, 0)
