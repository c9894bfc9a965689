"""Tiers of managers with several groups, call by call."""

from array import array

import pytest

from kvblocks import (
    FullAttention,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    SlidingWindow,
    StaleHitError,
    Tier,
)

PROMPT = range(40)  # ten blocks of four tokens
WINDOW = (FullAttention(4), SlidingWindow(4, 8))


def make_manager(*tiers, groups=WINDOW, num_blocks=128):
    return KVCacheManager(num_blocks, groups=groups, tiers=tiers or [Tier("host", 256, 100)], debug=True)


def run(manager, name="one", tokens=PROMPT):
    """Compute a sequence, and free it."""
    sequence = Sequence(name, tokens)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    manager.free(sequence)


def settle(manager, *, fails=()):
    """Carry out all transfers until there are none. Those with numbers in `fails` fail. Returns them, and the loads."""
    taken, ended = [], []
    while found := manager.tiers.take_transfers():
        for transfer in found:
            ended += manager.tiers.complete(transfer, len(taken) not in fails)
            taken.append(transfer)
    return taken, ended


def spill(manager):
    """Have everything be evicted from the device."""
    for number in range(4 * manager.num_free_blocks, 0, -4):
        crowd = Sequence("crowd", range(1000, 1000 + number))
        if manager.get_num_blocks_to_allocate(crowd, number) <= manager.num_free_blocks:
            manager.allocate_slots(crowd)
            manager.abort(crowd, 0)
            break
    assert not any(block.is_cached and not block.ref_cnt for block in manager.blocks)


def pool_of(manager):
    """The device's blocks."""
    return manager._pool  # noqa: SLF001


def pools_of(manager):
    """The tiers' slots."""
    return manager._transfers.pools  # noqa: SLF001


def evict(manager, blocks):
    """Forget what blocks hold on the device only, as if they had been reused."""
    pool_of(manager).uncache(blocks)


def look_up(manager, tokens=PROMPT, name="two"):
    sequence = Sequence(name, tokens)
    hit = manager.get_computed_blocks(sequence)
    return sequence, hit, manager.tiers.find(hit)


def start(manager, tokens=(*PROMPT, 7), name="two", num_new_tokens=0):
    sequence, hit, loads = look_up(manager, tokens, name)
    assert manager.tiers.allocate(sequence, hit, loads, num_new_tokens) is not None
    return sequence, loads


def num_stored(manager, number=0):
    return [*manager.tiers][number].num_cached_blocks


def num_attached(manager, number=0):
    return pools_of(manager)[number].index.attached.num_blocks


# Storing.


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([FullAttention(4), SlidingWindow(4, 8)], 2),  # tokens 32 to 39: what a query at 39 or 40 sees in whole blocks
        ([FullAttention(4), SlidingWindow(4, 9)], 3),
        ([FullAttention(4), SlidingWindow(4, 1)], 1),  # the last token may be computed again
        ([FullAttention(4), FullAttention(4)], 10),
        ([SlidingWindow(4, 8), FullAttention(4), SlidingWindow(4, 16)], 2 + 4),
        ([FullAttention(4), SlidingWindow(2, 4)], 2),
        ([FullAttention(4), FullAttention(8), SlidingWindow(4, 8)], 5 + 2),
    ],
)
def test_of_other_groups_what_a_hit_at_the_end_needs_is_stored(groups, expected):
    manager = make_manager(groups=groups, num_blocks=256)
    run(manager)
    settle(manager)
    assert (num_stored(manager), num_attached(manager)) == (10 + expected, expected)
    sequence, loads = start(manager)
    assert loads == []
    manager.free(sequence)


def test_of_a_window_what_every_nth_token_needs_is_stored():
    manager = make_manager(Tier("host", 256, 100, window_store_tokens=15))
    run(manager)
    settle(manager)
    assert num_attached(manager) == 2 + 2 + 2, "for hits at 12, 28 and 40"
    spill(manager)
    assert [load.num_tokens for load in look_up(manager, range(39))[2]] == [28]
    assert [load.num_tokens for load in look_up(manager, range(41))[2]] == [40]
    assert look_up(manager, range(12))[2] == []


def test_without_nth_tokens_a_hit_ends_where_what_is_stored_ends():
    manager = make_manager()
    run(manager)
    settle(manager)
    spill(manager)
    assert look_up(manager, range(39))[2] == []
    assert look_up(manager, range(40))[2] == [], "its last token is to be computed"
    assert [load.num_tokens for load in look_up(manager, range(41))[2]] == [40]


def test_what_has_left_the_window_is_not_missed_at_the_end():
    manager = make_manager()
    sequence = Sequence("one", range(20))
    manager.allocate_slots(sequence)
    for token in range(22):
        manager.append_slots(sequence, [token])
    manager.free(sequence)
    taken, _ = settle(manager)
    assert sum(len(transfer.slots) for transfer in taken) == 10 + 2


def test_only_what_is_missing_of_a_window_is_stored():
    manager = make_manager()
    run(manager)
    settle(manager)
    run(manager, "longer", range(44))
    taken, _ = settle(manager)
    assert sum(len(transfer.slots) for transfer in taken) == 1 + 1
    assert num_attached(manager) == 3


def test_where_the_last_window_is_gone_an_earlier_end_is_stored():
    manager = make_manager()
    run(manager)
    evict(manager, [manager.get_computed_blocks(Sequence("end", range(41))).group_blocks(1)[-1]])
    settle(manager)
    assert num_stored(manager) == 10 + 2
    spill(manager)
    assert [load.num_tokens for load in look_up(manager, range(41))[2]] == [36]


def test_a_store_that_failed_for_the_window_leaves_the_rest():
    manager = make_manager(Tier("host", 256, 100, max_transfer_blocks=1))
    run(manager)
    settle(manager, fails={10})
    assert num_stored(manager) == 10, "what is behind what failed isn't taken"
    run(manager, "again", (*PROMPT, 7))
    settle(manager)
    assert num_attached(manager) == 2


@pytest.mark.parametrize("order", [range(12), range(11, -1, -1), (4, 11, 0, 9, 1, 7, 2, 10, 8, 3, 6, 5)])
@pytest.mark.parametrize("failing", [None, 4, 10])
def test_a_stored_block_of_any_group_is_free_once_its_transfer_is_answered(order, failing):
    manager = make_manager(Tier("host", 256, 100, max_transfer_blocks=1))
    run(manager)
    transfers = manager.tiers.take_transfers()
    held = {transfer.block_ids[0] for transfer in transfers}
    for number in order:
        manager.tiers.complete(transfers[number], ok=number != failing)
        held.remove(transfers[number].block_ids[0])
        assert held == {block.block_id for block in manager.blocks if block.ref_cnt}
    assert num_stored(manager) == (12 if failing is None else failing)
    assert num_attached(manager) == (2 if failing is None else 0)


def test_what_is_taken_back_of_a_window_meanwhile_is_not_stored():
    manager = make_manager()
    run(manager)
    blocks = manager.get_computed_blocks(Sequence("end", range(41))).group_blocks(1)[8:]
    taken = manager.tiers.take_transfers()
    while sum(len(transfer.slots) for transfer in taken) < 12:
        for transfer in taken:
            manager.tiers.complete(transfer, ok=True)
        taken = manager.tiers.take_transfers()
    manager.evict_blocks([blocks[0].block_id])
    for transfer in taken:
        manager.tiers.complete(transfer, ok=True)
    assert num_attached(manager) == 0 and num_stored(manager) == 10


def test_what_a_reset_forgot_is_not_stored():
    manager = make_manager()
    run(manager)
    taken = manager.tiers.take_transfers()
    manager.reset_prefix_cache()
    for transfer in taken:
        manager.tiers.complete(transfer, ok=True)
    assert num_stored(manager) == 0


def test_what_lost_its_parents_in_the_tier_meanwhile_is_not_stored():
    manager = make_manager()
    run(manager)
    settle(manager)
    run(manager, "longer", range(44))
    taken = manager.tiers.take_transfers()
    host = pools_of(manager)[0]
    host.drop(host.match(memoryview(array("I", PROMPT)), None, 10)[4:5])
    for transfer in taken:
        manager.tiers.complete(transfer, ok=True)
    assert num_stored(manager) == 4 and host.pool.num_free_blocks == 256
    assert look_up(manager, range(40, 44))[2] == []


def test_what_was_stored_is_reused_in_order_on_the_device():
    manager = make_manager()
    run(manager)
    hit = manager.get_computed_blocks(Sequence("end", range(41)))
    settle(manager)
    order = manager.inspect.free_block_ids()
    first, side = [block.block_id for block in hit.blocks], [block.block_id for block in hit.group_blocks(1)[8:]]
    assert order[-12:] == first[::-1] + side[::-1], "a prefix's end first, and with it what ends there"


def test_a_used_prefix_is_reused_last_with_its_window():
    manager = make_manager(Tier("host", 24, 100))
    run(manager)
    settle(manager)
    run(manager, "other", range(100, 140))
    settle(manager)
    run(manager, "again", (*PROMPT, 7))
    settle(manager)
    run(manager, "third", range(200, 220))
    settle(manager)
    spill(manager)
    assert [load.num_tokens for load in look_up(manager, range(41))[2]] == [40]
    assert look_up(manager, range(100, 141))[2] == []


# Lookups.


def test_a_hit_of_both_groups_counts_what_moves():
    manager = make_manager()
    run(manager)
    settle(manager)
    spill(manager)
    _, hit, loads = look_up(manager, range(41))
    assert hit.num_tokens == 0
    assert [(load.first_token, load.num_tokens, load.num_bytes) for load in loads] == [(0, 40, 1200)]


def test_where_the_device_lacks_the_window_only_that_is_loaded():
    manager = make_manager()
    run(manager)
    settle(manager)
    window = manager.get_computed_blocks(Sequence("end", range(41))).group_blocks(1)[8:]
    evict(manager, window)
    before = [block for block in manager.blocks if block.is_cached]
    sequence, hit, loads = look_up(manager, range(41))
    assert (hit.num_tokens, hit.num_matched_tokens) == (32, 40), "other window blocks are on the device still"
    assert [(load.first_token, load.num_tokens, load.num_bytes) for load in loads] == [(32, 8, 200)]
    assert len(manager.tiers.allocate(sequence, hit, loads)) == 2
    assert sequence.num_readonly_tokens == 40, "nobody writes to the other group's cached blocks"
    taken, ended = settle(manager)
    assert [len(transfer.slots) for transfer in taken] == [2]
    assert [(loaded.num_tokens, loaded.is_whole) for loaded in ended] == [(40, True)]
    assert set(sequence.blocks) <= set(before)
    manager.free(sequence)
    assert manager.get_computed_blocks(Sequence("three", range(41))).num_tokens == 40


def test_a_half_that_the_device_has_of_the_window_stays():
    manager = make_manager()
    run(manager)
    settle(manager)
    window = manager.get_computed_blocks(Sequence("end", range(41))).group_blocks(1)[8:]
    evict(manager, window[:1])
    sequence, loads = start(manager)
    assert [load.num_bytes for load in loads] == [100]
    assert sequence.group_blocks(1)[9] is window[1]
    settle(manager)
    manager.free(sequence)


def test_where_the_device_lacks_the_other_group_only_its_end_is_loaded():
    manager = make_manager()
    run(manager)
    settle(manager)
    end = manager.get_computed_blocks(Sequence("end", range(41))).blocks[9]
    evict(manager, [end])
    sequence, loads = start(manager)
    assert [(load.first_token, load.num_tokens, load.num_bytes) for load in loads] == [(36, 4, 200)]
    settle(manager)
    assert not manager.tiers.is_loading(sequence) and sequence.num_written_tokens == 40
    manager.free(sequence)


def test_tiers_serve_a_prefix_together():
    tiers = [Tier("host", 12, 100), Tier("disk", 256, 1000)]
    manager = make_manager(*tiers)
    run(manager)
    settle(manager)
    run(manager, "longer", range(60))
    settle(manager)
    host, disk = pools_of(manager)
    assert host.pool.num_cached_blocks <= 12 < disk.pool.num_cached_blocks
    spill(manager)
    sequence, _, loads = look_up(manager, range(61))
    assert sum(load.num_tokens for load in loads) == 60
    assert manager.tiers.allocate(sequence, None, loads) is not None
    taken, ended = settle(manager)
    assert sum(transfer.num_bytes for transfer in taken) == sum(load.num_bytes for load in loads)
    assert {transfer.tier for transfer in taken} >= {"disk"} and ended[0].is_whole
    manager.free(sequence)
    assert disk.pool.num_free_blocks == 256


def test_a_part_that_moves_more_than_a_longer_one_is_left_out():
    manager = make_manager(Tier("host", 256, 100, window_store_tokens=36), Tier("disk", 256, 100))
    run(manager)
    settle(manager)
    host = pools_of(manager)[0]
    host.drop(attached(host.index, 9))
    evict(manager, attached(pool_of(manager).index, 7) + attached(pool_of(manager).index, 9))
    _, hit, loads = look_up(manager, range(41))
    assert hit.num_tokens == 28
    assert [(load.tier, load.num_tokens, load.num_bytes) for load in loads] == [("disk", 12, 100)], "and not 8 for 100"


def attached(index, position):
    """What is attached to a block of the prompt."""
    return [
        block
        for block in index.attached.row(index.match(memoryview(array("I", PROMPT)), None, position + 1)[position])
        if block is not None
    ]


def test_the_seconds_of_parts_add_up():
    tiers = [Tier("host", 256, 100, bytes_per_second=100), Tier("disk", 256, 100, bytes_per_second=10)]
    manager = make_manager(*tiers)
    run(manager, tokens=range(20))
    settle(manager)
    run(manager)
    settle(manager)
    host = pools_of(manager)[0]
    host.drop(host.match(memoryview(array("I", PROMPT)), None, 10)[5:6])
    spill(manager)
    _, _, loads = look_up(manager, range(41))
    assert [(load.tier, load.num_tokens, load.num_bytes) for load in loads] == [("host", 20, 700), ("disk", 20, 500)]
    assert [round(load.seconds(), 3) for load in loads] == [7.0, 68.0], "twelve blocks, two of them not from the host"
    manager.tiers.note_computed(20, 10)
    assert manager.tiers.worth_loading(loads) == loads[:1]


def test_a_hit_that_was_cut_is_loaded_behind_as_far_as_tiers_help():
    manager = make_manager()
    run(manager)
    settle(manager)
    sequence = Sequence("two", range(41))
    hit = manager.get_computed_blocks(sequence).cut(0)
    assert manager.tiers.find(hit) == [], "the device has all of it"
    evict(manager, manager.get_computed_blocks(sequence).group_blocks(1)[9:])
    loads = manager.tiers.find(hit)
    assert [(load.first_token, load.num_tokens, load.num_bytes) for load in loads] == [(0, 40, 100)]
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    settle(manager)
    assert sequence.num_written_tokens == 40
    manager.free(sequence)


# What changes between a lookup and its use.


def loading_manager(**more):
    manager = make_manager(Tier("host", 256, 100, **more))
    run(manager)
    settle(manager)
    return manager


def test_loads_that_left_the_tier_are_stale():
    manager = loading_manager()
    spill(manager)
    sequence, hit, loads = look_up(manager, range(41))
    pool = pools_of(manager)[0]
    pool.drop([loads[0].pieces[-1][3]])
    with pytest.raises(StaleHitError, match="to be stored still"):
        manager.tiers.allocate(sequence, hit, loads)


def test_loads_that_rely_on_what_left_the_device_are_stale():
    manager = loading_manager()
    window = manager.get_computed_blocks(Sequence("end", range(41))).group_blocks(1)[8:]
    evict(manager, window)
    sequence, hit, loads = look_up(manager, range(41))
    evict(manager, [find_last(manager)])
    with pytest.raises(StaleHitError, match="to be stored still"):
        manager.tiers.allocate(sequence, hit, loads)


def find_last(manager):
    """The last cached block of the prompt in the full group."""
    return pool_of(manager).index.match(memoryview(array("I", PROMPT)), None, 10)[9]


def test_loads_and_a_hit_belong_together():
    manager, other = loading_manager(), loading_manager()
    sequence, hit, _ = look_up(manager, range(41))
    evict(manager, attached(pool_of(manager).index, 9))
    sequence, hit, loads = look_up(manager, range(41))
    assert loads[0].first_token == 36
    with pytest.raises(SequenceStateError, match="expected a hit of"):
        manager.tiers.allocate(sequence, look_up(manager, range(41), "three")[1], loads)
    theirs = other.get_computed_blocks(sequence).cut(36)
    with pytest.raises(SequenceStateError, match="expected a hit of this manager's cache"):
        manager.tiers.allocate(sequence, theirs, loads)
    plain = KVCacheManager(64, 4)
    run(plain)
    theirs = plain.get_computed_blocks(sequence).cut(36)
    with pytest.raises(SequenceStateError, match="expected a hit of this manager's cache"):
        manager.tiers.allocate(sequence, theirs, loads)
    with pytest.raises(InvalidArgumentError, match="loads: expected one from token 0 on"):
        manager.tiers.allocate(sequence, None, loads)
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    settle(manager)
    manager.free(sequence)


def test_nothing_is_loaded_behind_a_token_that_is_computed_again():
    manager = make_manager()
    run(manager, "long", range(80))
    settle(manager)
    spill(manager)
    run(manager)
    sequence = Sequence("two", PROMPT)
    hit = manager.get_computed_blocks(sequence)  # of the whole prompt
    sequence.append_tokens(range(40, 81))
    assert hit.num_tokens == 39 and manager.tiers.find(hit) == []
    assert manager.tiers.find(manager.get_computed_blocks(sequence))[0].first_token == 40


def test_a_hit_that_was_evicted_is_stale_with_its_loads():
    manager = loading_manager()
    hit = manager.get_computed_blocks(Sequence("two", range(41))).cut(32)
    sequence = hit.sequence
    spill(manager)
    loads = manager.tiers.find(hit)
    assert loads[0].first_token == 32
    with pytest.raises(StaleHitError, match="to be cached still"):
        manager.tiers.allocate(sequence, hit, loads)


def test_loads_of_tokens_that_are_gone_are_stale():
    manager = loading_manager()
    spill(manager)
    sequence = Sequence("two", range(20))
    sequence.append_tokens(range(20, 41))
    loads = manager.tiers.find(manager.get_computed_blocks(sequence))
    manager.allocate_slots(sequence, delay_cache_blocks=True)
    manager.truncate(sequence, 20)
    manager.free(sequence)
    sequence.append_tokens(range(70, 91))
    with pytest.raises(StaleHitError, match="to be stored still"):
        manager.tiers.allocate(sequence, None, loads)


def test_what_left_and_is_not_needed_changes_nothing():
    manager = loading_manager()
    run(manager, "other", range(100, 140))
    settle(manager)
    evict(manager, manager.get_computed_blocks(Sequence("end", range(41))).group_blocks(1)[9:])
    sequence, hit, loads = look_up(manager, range(41))
    evict(manager, manager.get_computed_blocks(Sequence("other", range(100, 141))).blocks[9:])
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    settle(manager)
    manager.free(sequence)


# While it loads.


def behind_hit(**more):
    """A sequence that loads what is behind a hit of 32 tokens. Returns it and the manager."""
    manager = loading_manager(**more)
    evict(manager, manager.get_computed_blocks(Sequence("end", range(41))).group_blocks(1)[8:])
    sequence, loads = start(manager)
    assert loads[0].first_token == 32
    return manager, sequence


def test_a_window_that_fails_sends_the_sequence_back_to_its_hit():
    manager, sequence = behind_hit(max_transfer_blocks=1)
    free = manager.num_free_blocks
    taken, ended = settle(manager, fails={1})
    assert len(taken) == 2
    assert [(loaded.num_tokens, loaded.is_whole) for loaded in ended] == [(32, False)]
    assert sequence.num_computed_tokens == 32 and sequence.first_live_block(1) == 6
    assert manager.num_free_blocks == free + 4, "the window's blocks, and the other group's behind the hit"
    assert find_last(manager).is_cached, "nothing is wrong with what the device had"
    assert manager.allocate_slots(sequence) is not None
    manager.free(sequence)


def test_a_window_that_fails_without_a_hit_sends_the_sequence_to_its_beginning():
    manager = loading_manager(max_transfer_blocks=1)
    spill(manager)
    sequence, loads = start(manager)
    assert loads[0].first_token == 0
    _, ended = settle(manager, fails={11})
    assert [(loaded.num_tokens, loaded.is_whole) for loaded in ended] == [(0, False)]
    assert sequence.block_ids == [] and sequence.group_block_ids(1) == []
    manager.allocate_slots(sequence)
    manager.free(sequence)


@pytest.mark.parametrize(("fails", "expected"), [(0, 0), (3, 8), (9, 32), (10, 0), (13, 24), (14, 32)])
def test_of_full_groups_what_arrived_of_all_is_kept(fails, expected):
    tier = Tier("host", 256, 100, max_transfer_blocks=1)
    manager = make_manager(tier, groups=[FullAttention(4), FullAttention(8)])
    run(manager)
    settle(manager)
    spill(manager)
    sequence, loads = start(manager)
    assert loads[0].num_bytes == 1500
    taken, ended = settle(manager, fails={fails})
    assert len(taken) == 15, "ten blocks of four tokens, and five of eight"
    assert ended[0].num_tokens == expected == sequence.num_computed_tokens
    assert manager.get_computed_blocks(Sequence("three", PROMPT)).num_tokens == expected
    manager.allocate_slots(sequence)
    manager.free(sequence)


def test_giving_up_keeps_the_hit():
    manager, sequence = behind_hit()
    assert manager.tiers.give_up(sequence) == 32 == sequence.num_computed_tokens
    assert not manager.tiers.is_loading(sequence) and manager.tiers.take_transfers() == []
    manager.allocate_slots(sequence)
    manager.free(sequence)


@pytest.mark.parametrize("end", [39, 36, 33, 32])
def test_going_back_into_loads_keeps_the_hit(end):
    manager, sequence = behind_hit()
    assert manager.rewind(sequence, end) == 32
    assert not manager.tiers.is_loading(sequence) and sequence.num_tokens == 41
    manager.allocate_slots(sequence)
    manager.free(sequence)


def test_going_back_before_the_hit_needs_its_window():
    manager, sequence = behind_hit()
    with pytest.raises(SequenceStateError, match="begins now"):
        manager.rewind(sequence, 24)
    assert manager.tiers.is_loading(sequence)
    settle(manager)
    manager.free(sequence)


def test_going_back_behind_loads_keeps_them():
    manager, sequence = behind_hit()
    assert manager.allocate_slots(sequence) is not None
    assert manager.rewind(sequence, 40) == 40
    assert manager.tiers.is_loading(sequence)
    _, ended = settle(manager)
    assert ended[0].is_whole
    manager.free(sequence)


def test_going_back_behind_what_was_loaded_is_up_to_the_window():
    manager, sequence = behind_hit()
    settle(manager)
    with pytest.raises(SequenceStateError, match="begins now"):
        manager.rewind(sequence, 36)
    manager.free(sequence)


def test_nobody_else_says_what_is_loading():
    manager, sequence = behind_hit()
    assert manager.cache_blocks(sequence, 40) == 32
    assert manager.get_computed_blocks(Sequence("three", range(41))).num_tokens == 32
    settle(manager)
    manager.free(sequence)


def test_forks_wait_and_go_back_each():
    manager, sequence = behind_hit(max_transfer_blocks=1)
    child = manager.fork(sequence, "child")
    assert manager.tiers.is_loading(child)
    assert manager.rewind(child, 36) == 32
    assert manager.tiers.is_loading(sequence)
    third = manager.fork(sequence, "third")
    _, ended = settle(manager, fails={0})
    assert [(loaded.sequence, loaded.num_tokens) for loaded in ended] == [(sequence, 32), (third, 32)]
    for one in (sequence, child, third):
        manager.allocate_slots(one)
        manager.free(one)


def test_nothing_slides_while_it_loads():
    manager = loading_manager()
    spill(manager)
    sequence, loads = start(manager, range(60), num_new_tokens=4)
    assert manager.allocate_slots(sequence, delay_cache_blocks=True) is not None
    assert sequence.first_live_block(1) == 8
    settle(manager)
    assert sequence.num_written_tokens == 40 and loads[0].num_tokens == 40
    manager.cache_blocks(sequence, 60)
    manager.free(sequence)


def test_what_a_load_relied_on_and_was_taken_back_fails_it():
    manager, sequence = behind_hit()
    manager.evict_blocks([find_last(manager).block_id])
    _, ended = settle(manager)
    assert [loaded.num_tokens for loaded in ended] == [32]
    assert num_stored(manager) == 10, "the tier has forgotten the bad block, and what ended there"
    manager.abort(sequence, 32)


def test_a_load_that_relied_on_a_step_that_died_fails():
    manager = loading_manager()
    spill(manager)
    other = Sequence("other", range(36))
    manager.allocate_slots(other)
    evict(manager, attached(pool_of(manager).index, 8))
    sequence, loads = start(manager)
    assert (loads[0].first_token, loads[0].num_bytes) == (32, 300)
    manager.abort(other, 32)
    _, ended = settle(manager)
    assert [loaded.num_tokens for loaded in ended] == [32]
    assert manager.get_computed_blocks(Sequence("three", PROMPT)).num_tokens == 32
    manager.abort(sequence, 32)


def test_a_load_that_relied_on_a_window_of_a_step_that_died_fails():
    manager = loading_manager()
    other = Sequence("other", range(40))
    manager.allocate_slots(other)  # its own blocks of all groups, of which the windows' take the older ones' place
    evict(manager, attached(pool_of(manager).index, 7) + attached(pool_of(manager).index, 9))
    sequence, loads = start(manager)
    assert (loads[0].first_token, loads[0].num_tokens, loads[0].num_bytes) == (28, 12, 100)
    assert sequence.group_blocks(1)[8] is other.group_blocks(1)[8]
    manager.abort(other, 32)
    assert find_last(manager).is_cached, "the first one's"
    _, ended = settle(manager)
    assert [loaded.num_tokens for loaded in ended] == [28]
    manager.free(sequence)


def test_a_bad_block_that_is_loaded_fails_and_is_dropped():
    manager, sequence = behind_hit()
    taken = manager.tiers.take_transfers()
    manager.evict_blocks(taken[0].block_ids[:1])
    ended = manager.tiers.complete(taken[0], ok=True)
    assert [loaded.num_tokens for loaded in ended] == [32]
    assert num_attached(manager) == 1
    manager.abort(sequence, 32)


def lose_window(manager):
    """Start a load behind a hit whose window was to be written by a step that died. Returns the sequence."""
    other = Sequence("other", range(40))
    manager.allocate_slots(other)  # its own blocks of all groups, of which the windows' take the older ones' place
    evict(manager, attached(pool_of(manager).index, 9))
    sequence, loads = start(manager)
    assert (loads[0].first_token, loads[0].num_bytes) == (36, 100)
    window = other.group_blocks(1)[7:9]
    assert sequence.group_blocks(1)[8] is window[1]
    manager.abort(other, 28)
    return sequence


def test_where_the_window_of_a_hit_was_taken_back_nothing_is_left_to_go_back_to():
    manager = loading_manager()
    sequence = lose_window(manager)
    _, ended = settle(manager)
    assert [(loaded.num_tokens, loaded.is_whole) for loaded in ended] == [(0, False)]
    assert sequence.group_block_ids(1) == [] == sequence.block_ids
    manager.allocate_slots(sequence)
    manager.free(sequence)


def test_who_gives_up_or_goes_back_then_has_nothing():
    manager = loading_manager()
    sequence = lose_window(manager)
    assert manager.tiers.give_up(sequence) == 0 == sequence.num_computed_tokens
    manager.allocate_slots(sequence)
    manager.free(sequence)
    manager = loading_manager()
    sequence = lose_window(manager)
    assert manager.rewind(sequence, 39) == 0
    manager.allocate_slots(sequence)
    manager.free(sequence)


def test_a_window_of_the_hit_that_is_not_needed_any_more_may_go():
    manager, sequence = behind_hit()
    first = manager.get_computed_blocks(Sequence("x", range(33))).group_blocks(1)[6]
    evict(manager, [first])
    _, ended = settle(manager)
    assert ended[0].is_whole
    manager.free(sequence)


def test_a_load_of_what_turned_out_to_be_bad_fails():
    manager = loading_manager()
    spill(manager)
    sequence, _ = start(manager)
    taken = manager.tiers.take_transfers()
    other = Sequence("other", PROMPT)
    manager.allocate_slots(other)
    manager.evict_blocks([other.block_ids[3]])
    ended = [loaded for transfer in taken for loaded in manager.tiers.complete(transfer, ok=True)]
    assert [loaded.num_tokens for loaded in ended] == [0]
    assert num_stored(manager) == 3
    manager.abort(other, 0)
    manager.abort(sequence, 0)


def test_a_load_beside_a_window_that_turns_out_to_be_bad_fails_after_a_reset_too():
    manager = loading_manager()
    evict(manager, attached(pool_of(manager).index, 9))
    sequence, loads = start(manager)
    assert loads[0].first_token == 36
    manager.reset_prefix_cache()
    manager.evict_blocks([sequence.group_block_ids(1)[8]])  # its hit needs this block, too
    _, ended = settle(manager)
    assert [loaded.num_tokens for loaded in ended] == [0]
    manager.allocate_slots(sequence)
    manager.free(sequence)


def test_where_loads_ended_the_window_is_kept_as_where_hits_end():
    manager = loading_manager()
    spill(manager)
    run(manager, "other", range(100, 140))
    sequence, _ = start(manager, range(61))
    settle(manager)
    window = sequence.group_block_ids(1)[8:10]
    manager.allocate_slots(sequence)
    for token in range(3):
        manager.append_slots(sequence, [token])
    assert sequence.first_live_block(1) > 10
    order = manager.inspect.free_block_ids()
    other = manager.get_computed_blocks(Sequence("more", range(100, 141))).blocks[0].block_id
    assert all(order.index(block_id) > order.index(other) for block_id in window)
    manager.free(sequence)


def test_a_load_whose_sequence_has_a_bad_block_fails_after_a_reset_too():
    manager, sequence = behind_hit()
    last = find_last(manager)
    manager.reset_prefix_cache()
    manager.evict_blocks([last.block_id])
    _, ended = settle(manager)
    assert [loaded.num_tokens for loaded in ended] == [32]
    manager.free(sequence)


def test_a_bad_window_block_leaves_the_rest_of_the_tier():
    manager = loading_manager()
    bad = manager.get_computed_blocks(Sequence("end", range(41))).group_blocks(1)[8]
    assert manager.evict_blocks([bad.block_id]) == []
    assert (num_stored(manager), num_attached(manager)) == (11, 1)
    bad = find_last(manager)
    manager.evict_blocks([bad.block_id])
    assert (num_stored(manager), num_attached(manager)) == (9, 0)


def test_a_reset_lets_loads_go_on():
    manager, sequence = behind_hit()
    manager.reset_prefix_cache()
    _, ended = settle(manager)
    assert ended[0].is_whole and ended[0].num_tokens == 40
    assert pool_of(manager).num_cached_blocks == 0 and num_stored(manager) == 0
    manager.free(sequence)


def test_who_is_renewed_while_it_loads_goes_on_behind_the_load():
    manager, sequence = behind_hit()
    manager.reset_prefix_cache()
    manager.renew(sequence)
    _, ended = settle(manager)
    assert [loaded.num_tokens for loaded in ended] == [40]
    assert manager.get_computed_blocks(Sequence("other", [*range(40), 1])).num_tokens == 40
    manager.allocate_slots(sequence)
    manager.free(sequence)


def test_an_aborted_sequence_leaves_what_it_shared():
    manager, sequence = behind_hit()
    last = find_last(manager)
    manager.abort(sequence, 32)
    assert last.is_cached
    settle(manager)
    assert manager.num_free_blocks == manager.num_blocks


def test_a_load_that_finds_no_room_changes_nothing():
    manager = loading_manager()
    spill(manager)
    sequence, hit, loads = look_up(manager, range(41))
    crowd = Sequence("crowd", range(500, 500 + 4 * 114))
    assert manager.allocate_slots(crowd, 12) is not None
    while manager.num_free_blocks > 11:
        assert manager.allocate_slots(crowd, 4) is not None
    assert loads[0].num_bytes == 1200
    assert manager.tiers.allocate(sequence, hit, loads) is None
    assert manager.num_free_blocks == 11 and not sequence.is_allocated
    assert manager.last_refusal.num_blocks == 12
    manager.rewind(crowd, crowd.num_computed_tokens - 4)
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    assert manager.num_free_blocks == 1
    settle(manager)
    manager.free(sequence)


def test_the_hit_that_a_load_may_go_back_to_takes_room():
    manager = loading_manager()
    evict(manager, attached(pool_of(manager).index, 8) + attached(pool_of(manager).index, 9))
    sequence, hit, loads = look_up(manager, range(41))
    needed = [*hit.group_blocks(1)[6:], *hit.blocks]
    assert hit.num_tokens == 32 and all(not block.ref_cnt for block in needed)
    manager.tiers.allocate(sequence, hit, loads)
    assert all(block.ref_cnt for block in needed)
    settle(manager)
    assert [block.ref_cnt for block in needed[:2]] == [0, 0], "the window has passed them"
    manager.free(sequence)


def test_what_tables_and_the_way_back_share_takes_room_once():
    manager = KVCacheManager(28, groups=WINDOW, tiers=[Tier("host", 64, 100)])
    run(manager)
    settle(manager)
    pool = pool_of(manager)
    evict(manager, [block for index in (*range(7), 9) for block in attached(pool.index, index)])
    sequence, hit, loads = look_up(manager, range(41))
    assert (hit.num_tokens, loads[0].num_bytes) == (36, 100)
    others = pool.take(16)
    assert manager.tiers.allocate(sequence, hit, loads) is None, "twelve that are cached, and one more"
    pool.release_table(others[:1])
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    assert manager.num_free_blocks == 0
    settle(manager)
    manager.free(sequence)
    pool.release_table(others[1:])
    manager.check()


def test_new_blocks_are_told_by_group():
    manager = loading_manager()
    spill(manager)
    sequence, hit, loads = look_up(manager, range(41))
    blocks = manager.tiers.allocate(sequence, hit, loads, None)
    assert [len(part) for part in sequence.new_group_blocks] == [11, 3]
    assert sorted(block.block_id for block in blocks) == sorted(
        block.block_id for part in sequence.new_group_blocks for block in part
    )
    settle(manager)
    manager.free(sequence)


# Identities, and what is refused.


def test_identities_tell_groups_apart():
    manager = make_manager()
    run(manager)
    taken, _ = settle(manager)
    identities = [identity for transfer in taken for identity in transfer.identities()]
    assert len(set(identities)) == len(identities) == 12
    assert [identity.column for identity in identities] == [0] * 10 + [1, 1]
    assert [identity.parent for identity in identities[10:]] == [identity.digest() for identity in identities[8:10]]
    one = KVCacheManager(64, 4, tiers=[Tier("host", 64, 100)])
    run(one)
    plain = [identity for transfer in settle(one)[0] for identity in transfer.identities()]
    assert plain == identities[:10], "what the first full group's blocks are doesn't depend on other groups"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([SlidingWindow(4, 8)], r"expected a group of full attention, got .*window=8"),
        ([FullAttention(4), SlidingWindow(4, 8, is_cached=False)], "expected groups that are all cached"),
    ],
)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_what_is_refused(groups, message, is_persistent):
    with pytest.raises(InvalidArgumentError, match=f"tiers: {message}"):
        make_manager(Tier("host", 8, 100, is_persistent=is_persistent), groups=groups)


def test_one_group_that_is_named_is_one_group():
    manager = make_manager(groups=[FullAttention(4)])
    run(manager)
    settle(manager)
    spill(manager)
    assert [load.num_tokens for load in look_up(manager, range(41))[2]] == [40]


@pytest.mark.parametrize("value", [0, -1, 1.5, "x"])
def test_bad_window_store_tokens(value):
    with pytest.raises(InvalidArgumentError, match="Tier: window_store_tokens: expected an int"):
        Tier("host", 8, 100, window_store_tokens=value)
