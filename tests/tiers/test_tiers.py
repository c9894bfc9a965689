"""Tiers, call by call."""

from array import array

import pytest
from model.tiered import PROMPT, make_manager, run, settle, spill, start, stats

from kvblocks import (
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    StaleHitError,
    Tier,
)
from kvblocks.tiers.pool import make_pool


def loading_manager(*tiers, num_blocks=32):
    """A manager whose host has the prompt, and a sequence that is loading it."""
    manager = make_manager(num_blocks, *tiers)
    run(manager)
    settle(manager)
    spill(manager)
    sequence, loads = start(manager)
    return manager, sequence, loads


# Storing.


def test_a_freed_prefix_is_stored_parents_first():
    manager = make_manager()
    run(manager)
    taken = settle(manager)
    assert [slot for transfer in taken for slot in transfer.slots] == list(range(10))
    assert [block for transfer in taken for block in transfer.block_ids] == list(range(10))
    assert all(not transfer.is_load and transfer.tier == "host" for transfer in taken)
    assert sum(transfer.num_bytes for transfer in taken) == 1000
    assert (stats(manager).num_stored_blocks, stats(manager).num_cached_blocks) == (10, 10)


def test_stores_hold_an_eighth_of_the_device_at_most():
    manager = make_manager(32)
    run(manager)
    taken = manager.tiers.take_transfers()
    assert sum(len(transfer.slots) for transfer in taken) == 4
    assert manager.num_free_blocks == 28
    assert manager.tiers.take_transfers() == []
    for transfer in taken:
        manager.tiers.complete(transfer, ok=True)
    assert manager.num_free_blocks == 32
    assert len(settle(manager)) == 2


def test_what_nobody_has_answered_is_known():
    manager = make_manager(32)
    run(manager)
    assert manager.tiers.unanswered == []
    first = manager.tiers.take_transfers()
    assert manager.tiers.unanswered == first
    manager.tiers.complete(first[0], ok=True)
    second = manager.tiers.take_transfers()
    assert second and manager.tiers.unanswered == [*first[1:], *second]
    manager.tiers.unanswered.clear()  # a copy
    for transfer in manager.tiers.unanswered:
        manager.tiers.complete(transfer, ok=True)
    assert manager.tiers.unanswered == []


def test_what_is_stored_is_stored_once():
    manager = make_manager()
    run(manager)
    settle(manager)
    run(manager, "again")
    run(manager, "longer", range(48))
    assert [len(transfer.slots) for transfer in settle(manager)] == [2]


def test_two_requests_for_one_prefix_store_it_once():
    manager = make_manager(128)
    run(manager)
    first = manager.tiers.take_transfers()
    run(manager, "longer", range(48))
    assert manager.tiers.take_transfers() == [], "the beginning is on its way: what follows waits for it"
    for transfer in first:
        manager.tiers.complete(transfer, ok=True)
    assert [len(transfer.slots) for transfer in settle(manager)] == [2]
    assert stats(manager).num_dropped_blocks == 0


def test_what_finds_no_room_waits():
    manager = make_manager(32)
    run(manager)
    run(manager, "other", range(100, 140))
    settle(manager)
    assert (stats(manager).num_cached_blocks, stats(manager).num_dropped_blocks) == (20, 0)


def test_of_an_aborted_sequence_what_was_written_is_stored():
    manager = make_manager(128)
    sequence = Sequence("one", PROMPT)
    manager.allocate_slots(sequence)
    manager.abort(sequence, 22)
    settle(manager)
    assert stats(manager).num_stored_blocks == 5


def test_what_a_reset_forgot_is_not_stored():
    manager = make_manager(128)
    run(manager)
    manager.reset_prefix_cache()
    assert manager.tiers.take_transfers() == []


def test_a_prefix_is_dropped_whoever_holds_it():
    pool = make_pool(Tier("host", 4, 100), 4, None, 1)
    tokens = array("I", range(4))
    for _ in range(2):
        blocks = pool.pool.take(1)  # both stay owned, as by two jobs
        pool.index.cache((None, 0), blocks, memoryview(tokens).cast("B"), None, 0)
    assert pool.stats().num_cached_blocks == 2
    pool.drop_prefix(memoryview(tokens), None, 1)
    assert pool.stats().num_cached_blocks == 0


def test_a_store_that_has_not_begun_is_lost_when_its_blocks_are_taken():
    manager = make_manager(10)
    run(manager)
    spill(manager)
    assert manager.tiers.take_transfers() == []
    assert stats(manager).num_dropped_blocks == 10


def test_taking_a_block_waits_for_no_store():
    manager = make_manager(16)
    run(manager)
    manager.tiers.take_transfers()
    assert manager.num_free_blocks == 14
    sequence = Sequence("next", range(100, 156))
    assert manager.allocate_slots(sequence) is not None


def test_a_store_of_what_an_abort_takes_back_is_for_nothing():
    manager = make_manager(128)
    writer, reader = Sequence("writer", PROMPT), Sequence("reader", [*PROMPT, 1, 2])
    manager.allocate_slots(writer)
    manager.allocate_slots(reader, hit=manager.get_computed_blocks(reader))
    manager.free(reader)
    transfers = manager.tiers.take_transfers()
    assert transfers
    manager.abort(writer, 8)
    for transfer in transfers:
        manager.tiers.complete(transfer, ok=True)
    assert stats(manager).num_cached_blocks == 2


def test_a_block_that_was_bad_and_is_cached_again_in_its_place_is_not_stored_as_it_was():
    """The store may have read the block before it was computed again."""
    manager = make_manager(128)
    one, two = Sequence("one", PROMPT), Sequence("two", PROMPT)
    manager.allocate_slots(one, delay_cache_blocks=True)
    manager.allocate_slots(two, delay_cache_blocks=True)
    manager.cache_blocks(one, 40)
    manager.cache_blocks(two, 40)  # duplicates
    run(manager, "three", [*PROMPT, 5])
    (transfer,) = manager.tiers.take_transfers()
    assert transfer.block_ids == one.block_ids
    manager.evict_blocks(one.block_ids)
    manager.cache_blocks(one, 40)  # it was computed anew, where it is
    assert all(block.is_cached for block in one.blocks)
    manager.tiers.complete(transfer, ok=True)
    assert stats(manager).num_cached_blocks == 0


def test_a_store_that_fails_stores_what_came_before_it():
    manager = make_manager(128, Tier("host", 64, 100, max_transfer_blocks=3))
    run(manager)
    transfers = manager.tiers.take_transfers()
    assert [len(transfer.slots) for transfer in transfers] == [3, 3, 3, 1]
    for number in (3, 0, 2, 1):
        manager.tiers.complete(transfers[number], ok=number != 1)
    assert (stats(manager).num_cached_blocks, stats(manager).num_failed_blocks) == (3, 3)


@pytest.mark.parametrize("order", [range(10), range(9, -1, -1), (4, 0, 9, 1, 7, 2, 8, 3, 6, 5)])
@pytest.mark.parametrize("failing", [None, 0, 4])
def test_a_stored_block_is_free_once_its_transfer_is_answered(order, failing):
    manager = make_manager(128, Tier("host", 64, 100, max_transfer_blocks=1))
    run(manager)
    transfers = manager.tiers.take_transfers()
    held = {transfer.block_ids[0] for transfer in transfers}
    for number in order:
        manager.tiers.complete(transfers[number], ok=number != failing)
        held.remove(transfers[number].block_ids[0])
        assert held == {block.block_id for block in manager.blocks if block.ref_cnt}
    assert stats(manager).num_cached_blocks == (10 if failing is None else failing)
    assert not stats(manager).num_moving_blocks


def test_what_has_arrived_is_found_before_its_store_ends():
    """Even if the device's blocks are taken for something else meanwhile."""
    manager = make_manager(32, Tier("host", 64, 100, max_transfer_blocks=1))
    run(manager)
    first, second, third, _ = manager.tiers.take_transfers()
    manager.tiers.complete(third, ok=True)
    assert stats(manager).num_cached_blocks == 0, "the blocks before it may still fail"
    manager.tiers.complete(first, ok=True)
    assert (stats(manager).num_cached_blocks, stats(manager).num_stored_blocks) == (1, 1)
    manager.tiers.complete(second, ok=True)
    assert (stats(manager).num_cached_blocks, stats(manager).num_stored_blocks) == (3, 3)
    crowd = Sequence("crowd", range(100, 100 + 4 * 31))
    assert manager.allocate_slots(crowd) is not None, "one block is held, that of the last transfer"
    manager.abort(crowd, 0)
    (load,) = manager.tiers.find(manager.get_computed_blocks(Sequence("two", PROMPT)))
    assert load.num_tokens == 12


def test_what_was_lost_while_it_waited_for_earlier_blocks_is_not_stored():
    """The second transfer was answered, and its blocks are lost and cached again before the first one is answered."""
    manager = make_manager(128, Tier("host", 64, 100, max_transfer_blocks=5))
    one, two = Sequence("one", PROMPT), Sequence("two", PROMPT)
    manager.allocate_slots(one, delay_cache_blocks=True)
    manager.allocate_slots(two, delay_cache_blocks=True)
    manager.cache_blocks(one, 40)
    manager.cache_blocks(two, 40)  # duplicates
    run(manager, "three", [*PROMPT, 5])
    first, second = manager.tiers.take_transfers()
    assert second.block_ids == one.block_ids[5:]
    manager.tiers.complete(second, ok=True)
    manager.evict_blocks(second.block_ids)
    manager.cache_blocks(one, 40)  # they were computed anew, where they are
    assert all(block.is_cached for block in one.blocks)
    manager.tiers.complete(first, ok=True)
    assert stats(manager).num_cached_blocks == 5


def test_loads_that_were_given_up_hold_what_is_not_answered():
    manager, sequence, _ = loading_manager(Tier("host", 64, 100, max_transfer_blocks=1))
    transfers = manager.tiers.take_transfers()
    assert len(transfers) == 9 and all(transfer.is_load for transfer in transfers)
    manager.tiers.complete(transfers[3], ok=True)
    manager.tiers.give_up(sequence)
    manager.free(sequence)
    assert manager.num_free_blocks == 32 - 8
    for number, transfer in enumerate([*transfers[:3], *transfers[4:]], 1):
        manager.tiers.complete(transfer, ok=True)
        assert manager.num_free_blocks == 32 - 8 + number


def test_a_reset_forgets_all_tiers_and_what_is_on_its_way():
    manager = make_manager(64)
    run(manager)
    settle(manager)
    run(manager, "other", range(100, 140))
    transfers = manager.tiers.take_transfers()
    manager.reset_prefix_cache()
    for transfer in transfers:
        manager.tiers.complete(transfer, ok=True)
    assert stats(manager).num_cached_blocks == 0
    assert stats(manager).num_moving_blocks == 0


def test_blocks_that_are_bad_are_forgotten_below():
    manager = make_manager()
    run(manager)
    settle(manager)
    sequence = Sequence("two", PROMPT)
    hit = manager.get_computed_blocks(sequence)
    manager.evict_blocks([hit.blocks[3].block_id])
    spill(manager)
    hit = manager.get_computed_blocks(sequence)
    assert [load.num_tokens for load in manager.tiers.find(hit)] == [12]


def test_a_tier_makes_room_for_what_is_used_last():
    manager = make_manager(128, Tier("host", 12, 100))
    run(manager, "a", range(100, 116))
    settle(manager)
    run(manager, "b", range(200, 216))
    settle(manager)
    run(manager, "a again", range(100, 116))
    settle(manager)
    run(manager, "c", range(300, 332))
    settle(manager)
    spill(manager)
    found = []
    for first in (100, 200, 300):
        hit = manager.get_computed_blocks(Sequence("look", range(first, first + 33)))
        found.append(sum(load.num_tokens for load in manager.tiers.find(hit)))
    assert found == [16, 0, 32]


@pytest.mark.parametrize(("store", "expected"), [("freed", 10), ("reused", 0), ("computed", 10)])
def test_when_a_prefix_is_stored(store, expected):
    manager = make_manager(128, Tier("disk", 64, 100, store=store))
    sequence = Sequence("one", PROMPT)
    manager.allocate_slots(sequence)
    assert len(settle(manager)) == (store == "computed")
    manager.free(sequence)
    settle(manager)
    assert stats(manager).num_stored_blocks == expected


def test_a_prefix_that_is_used_again_is_stored_where_that_counts():
    manager = make_manager(128, Tier("disk", 64, 100, store="reused"))
    run(manager)
    run(manager, "two", [*range(20), 7])
    settle(manager)
    assert stats(manager).num_stored_blocks == 5


def test_a_long_prefix_is_stored_where_only_what_is_used_again_is():
    manager = make_manager(128, Tier("disk", 64, 100, store="reused", min_store_tokens=40))
    run(manager, "short", range(500, 536))
    run(manager)
    settle(manager)
    assert stats(manager).num_stored_blocks == 10


def test_salts_and_images_keep_prefixes_apart_below_too():
    manager = make_manager(128)
    run(manager, "plain")
    run(manager, "salted", salt="mine")
    run(manager, "seen", extra_keys=[(6, 9, "image")])
    settle(manager)
    spill(manager)
    assert stats(manager).num_stored_blocks == 29  # the first block of what has an image is the plain one's
    for more in ({}, {"salt": "mine"}, {"extra_keys": [(6, 9, "image")]}):
        hit = manager.get_computed_blocks(Sequence("two", PROMPT, **more))
        assert sum(load.num_tokens for load in manager.tiers.find(hit)) == 36
    hit = manager.get_computed_blocks(Sequence("two", PROMPT, salt="yours"))
    assert manager.tiers.find(hit) == []


# Loading.


def test_a_prefix_that_left_the_device_is_loaded():
    manager, sequence, (load,) = loading_manager()
    assert (load.tier, load.first_token, load.num_tokens, load.num_bytes) == ("host", 0, 36, 900)
    assert manager.tiers.is_loading(sequence)
    assert (sequence.num_written_tokens, sequence.num_computed_tokens) == (0, 36)
    (transfer,) = manager.tiers.take_transfers()
    assert transfer.is_load and transfer.block_ids == sequence.block_ids
    (loaded,) = manager.tiers.complete(transfer, ok=True, seconds=0.5)
    assert (loaded.sequence, loaded.num_tokens, loaded.is_whole) == (sequence, 36, True)
    assert not manager.tiers.is_loading(sequence)
    assert sequence.num_cached_blocks == 9
    assert manager.allocate_slots(sequence) is not None
    assert stats(manager).num_loaded_blocks == 9


def test_each_tier_gives_what_those_above_lack():
    tiers = Tier("host", 5, 100), Tier("disk", 64, 300)
    manager = make_manager(128, *tiers)
    run(manager)
    settle(manager)
    spill(manager)
    sequence, loads = start(manager)
    assert [(load.tier, load.first_token, load.num_tokens) for load in loads] == [("host", 0, 20), ("disk", 20, 16)]
    assert [load.num_bytes for load in loads] == [500, 1200]
    host, disk = manager.tiers.take_transfers()
    assert manager.tiers.complete(disk, ok=True) == []
    (loaded,) = manager.tiers.complete(host, ok=True)
    assert loaded.num_tokens == 36 and sequence.num_cached_blocks == 9


def test_a_device_hit_comes_first():
    manager = make_manager()
    run(manager)
    settle(manager)
    sequence = Sequence("two", [*PROMPT, 1])
    hit = manager.get_computed_blocks(sequence)
    assert hit.num_tokens == 40 and manager.tiers.find(hit) == []
    assert [load.first_token for load in manager.tiers.find(hit.cut(8))] == [8]


def test_others_find_out_what_is_loading():
    manager, sequence, _ = loading_manager()
    hit = manager.get_computed_blocks(Sequence("three", PROMPT))
    assert (hit.num_tokens, hit.pending_tokens, hit.pending_sequence) == (0, 40, sequence)


def test_a_load_that_fails_goes_back_to_what_arrived():
    manager, sequence, _ = loading_manager(Tier("host", 64, 100, max_transfer_blocks=4))
    first, second, third = manager.tiers.take_transfers()
    assert manager.tiers.complete(third, ok=True) == []
    assert manager.tiers.complete(first, ok=True) == []
    (loaded,) = manager.tiers.complete(second, ok=False)
    assert (loaded.num_tokens, loaded.is_whole) == (16, False)
    assert (sequence.num_computed_tokens, sequence.num_cached_blocks) == (16, 4)
    assert manager.allocate_slots(sequence) is not None
    assert stats(manager).num_failed_blocks == 4
    manager.free(sequence)
    spill(manager)
    hit = manager.get_computed_blocks(Sequence("three", PROMPT))
    assert [load.num_tokens for load in manager.tiers.find(hit)] == [16], "the tier forgot what it could not give"


def test_a_sequence_that_is_freed_leaves_its_blocks_to_the_transfer():
    manager, sequence, _ = loading_manager(num_blocks=12)
    (transfer,) = manager.tiers.take_transfers()
    manager.free(sequence)
    assert manager.num_free_blocks == 3
    assert manager.tiers.complete(transfer, ok=True) == []
    assert manager.num_free_blocks == 12


def test_a_load_that_nobody_has_begun_ends_with_its_sequence():
    manager, sequence, _ = loading_manager()
    manager.free(sequence)
    assert manager.tiers.take_transfers() == []
    assert manager.num_free_blocks == manager.num_blocks
    assert stats(manager).num_moving_blocks == 0


def test_a_load_that_takes_too_long_is_given_up():
    manager, sequence, _ = loading_manager()
    (transfer,) = manager.tiers.take_transfers()
    assert manager.tiers.give_up(sequence) == 0
    assert sequence.num_computed_tokens == 0
    assert manager.allocate_slots(sequence) is not None
    assert not {*sequence.block_ids} & {*transfer.block_ids}
    assert manager.tiers.complete(transfer, ok=True) == []
    assert stats(manager).num_cached_blocks == 10, "it is only late: the tier keeps it"


def test_a_fork_waits_too():
    manager, sequence, _ = loading_manager()
    (transfer,) = manager.tiers.take_transfers()
    child = manager.fork(sequence, "child")
    assert manager.tiers.is_loading(child)
    manager.free(sequence)
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert (loaded.sequence, loaded.num_tokens) == (child, 36)
    assert child.num_cached_blocks == 9


def test_a_loading_sequence_that_goes_back_keeps_whole_blocks():
    manager = make_manager(64)
    run(manager)
    settle(manager)
    spill(manager)
    sequence = Sequence("two", range(10))
    sequence.append_tokens(range(10, 40))
    hit = manager.get_computed_blocks(sequence)
    manager.tiers.allocate(sequence, hit, manager.tiers.find(hit))
    (transfer,) = manager.tiers.take_transfers()
    manager.truncate(sequence, 22)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (22, 20)
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert (loaded.num_tokens, loaded.is_whole) == (20, True)


def test_an_answer_for_a_transfer_that_is_over_changes_nothing():
    manager, sequence, _ = loading_manager()
    (transfer,) = manager.tiers.take_transfers()
    manager.tiers.complete(transfer, ok=True)
    before = stats(manager)
    assert manager.tiers.complete(transfer, ok=False) == []
    assert stats(manager) == before and sequence.num_cached_blocks == 9
    assert manager.tiers.num_stale_answers == 1


def test_a_hash_that_fails_leaves_a_load_to_be_answered_again():
    is_failing = []

    def hash_function(preimage):
        if is_failing:
            raise OSError("no hash today")
        return bytes([sum(preimage) % 251] * 16)

    manager = make_manager(32, hash_algorithm=hash_function, enable_events=True)
    run(manager)
    settle(manager)
    spill(manager)
    sequence, _ = start(manager)
    (transfer,) = manager.tiers.take_transfers()
    is_failing.append(1)
    with pytest.raises(OSError, match="no hash today"):
        manager.tiers.complete(transfer, ok=True)
    manager.check()
    is_failing.clear()
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert loaded.num_tokens == 36 and sequence.num_cached_blocks == 9


def test_only_what_is_worth_it_is_loaded():
    manager = make_manager(128, Tier("host", 5, 100), Tier("disk", 64, 100, bytes_per_second=10.0))
    run(manager)
    settle(manager)
    spill(manager)
    loads = manager.tiers.find(manager.get_computed_blocks(Sequence("two", PROMPT)))
    assert manager.tiers.worth_loading(loads) == loads, "how fast the model is isn't known"
    manager.tiers.note_computed(100, 1.0)
    assert [load.tier for load in manager.tiers.worth_loading(loads)] == ["host"]
    manager.tiers.note_computed(1, 100.0)
    assert manager.tiers.worth_loading(loads) == loads


def test_speed_is_learned_from_loads():
    manager, sequence, _ = loading_manager()
    (transfer,) = manager.tiers.take_transfers()
    manager.tiers.note_computed(100, 1.0)
    manager.tiers.complete(transfer, ok=True, seconds=100.0)
    manager.free(sequence)
    spill(manager)
    loads = manager.tiers.find(manager.get_computed_blocks(Sequence("three", PROMPT)))
    assert loads and manager.tiers.worth_loading(loads) == []


def test_slots_that_are_read_are_not_reused():
    manager, _, (load,) = loading_manager(Tier("host", 12, 100), num_blocks=128)
    (transfer,) = manager.tiers.take_transfers()
    run(manager, "other", range(500, 540))
    taken = settle(manager)
    assert taken and not {*transfer.slots} & {slot for other in taken for slot in other.slots}
    assert load.num_tokens == 36


def test_what_turns_out_to_be_bad_has_not_arrived():
    manager, _, _ = loading_manager(num_blocks=64)
    (transfer,) = manager.tiers.take_transfers()
    other = Sequence("other", PROMPT)
    manager.allocate_slots(other)  # computes what the first one loads
    manager.evict_blocks([other.block_ids[2]])
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert (loaded.num_tokens, loaded.is_whole) == (8, False)


def test_what_turns_out_to_be_bad_under_one_salt_is_loaded_under_another():
    manager = make_manager(64)
    for salt in ("ann", "bob"):
        run(manager, salt, salt=salt)
        settle(manager)
    spill(manager)
    waiting = Sequence("waiting", PROMPT, salt="ann")
    hit = manager.get_computed_blocks(waiting)
    manager.tiers.allocate(waiting, hit, manager.tiers.find(hit))
    (transfer,) = manager.tiers.take_transfers()
    other = Sequence("other", PROMPT, salt="bob")
    manager.allocate_slots(other)
    manager.evict_blocks([other.block_ids[2]])
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert (loaded.num_tokens, loaded.is_whole) == (36, True)


def test_nothing_is_stored_behind_what_a_load_found_to_be_wrong():
    manager, _, _ = loading_manager(num_blocks=128)
    (load,) = manager.tiers.take_transfers()
    run(manager, "longer", range(48))  # computes what is being loaded, and more
    (store,) = manager.tiers.take_transfers()
    assert len(store.slots) == 2
    manager.tiers.complete(load, ok=False)
    manager.tiers.complete(store, ok=True)
    manager.check()
    assert (stats(manager).num_cached_blocks, stats(manager).num_dropped_blocks) == (0, 2)


def test_nothing_behind_a_failed_transfer_is_cached_for_a_fork_either():
    manager, sequence, _ = loading_manager(Tier("host", 64, 100, max_transfer_blocks=4))
    transfers = manager.tiers.take_transfers()
    child = manager.fork(sequence, "child")
    manager.free(sequence)
    for number, transfer in enumerate(transfers):
        ended = manager.tiers.complete(transfer, ok=number != 1)
    assert [(loaded.sequence, loaded.num_tokens) for loaded in ended] == [(child, 16)]
    assert manager.get_computed_blocks(Sequence("three", PROMPT)).num_tokens == 16


def test_what_was_given_up_in_part_is_not_taken_for_loaded():
    manager, sequence, _ = loading_manager()
    (transfer,) = manager.tiers.take_transfers()
    manager.rewind(sequence, 20)
    manager.allocate_slots(sequence)  # other blocks, which the next step computes
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert (loaded.num_tokens, loaded.is_whole) == (20, True)
    assert (sequence.num_written_tokens, sequence.num_cached_blocks) == (20, 5)


def test_a_hit_that_was_evicted_as_bad_is_not_cached_again_by_what_is_loaded_behind_it():
    manager = make_manager(64)
    run(manager)
    settle(manager)
    spill(manager)
    run(manager, "beginning", range(12))
    sequence, _ = start(manager)
    (transfer,) = manager.tiers.take_transfers()
    manager.evict_blocks([sequence.block_ids[1]])
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert (loaded.num_tokens, loaded.is_whole) == (4, False)
    assert (sequence.num_computed_tokens, len(sequence.block_ids)) == (4, 1)
    assert manager.get_computed_blocks(Sequence("three", PROMPT)).num_tokens == 4


def loading_behind_a_writer():
    """A manager, a sequence whose step is to write three blocks, and one that hit these and loads the next ones."""
    manager = make_manager(64)
    run(manager)
    settle(manager)
    spill(manager)
    writer = Sequence("writer", [*range(12), 99])
    manager.allocate_slots(writer)
    sequence, _ = start(manager)
    return manager, writer, sequence


def test_what_an_abort_takes_back_is_not_cached_again_by_what_is_loaded_behind_it():
    manager, writer, sequence = loading_behind_a_writer()
    (transfer,) = manager.tiers.take_transfers()
    manager.abort(writer, 4)
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert (loaded.num_tokens, loaded.is_whole) == (4, False)
    assert (sequence.num_computed_tokens, len(sequence.block_ids)) == (4, 1)
    assert manager.get_computed_blocks(Sequence("three", PROMPT)).num_tokens == 4


@pytest.mark.parametrize("forget", ["reset", "salt"])
def test_a_reset_does_not_hide_what_an_abort_took_back(forget):
    """Nobody wrote the block, whatever is cached since."""
    manager, writer, sequence = loading_behind_a_writer()
    (transfer,) = manager.tiers.take_transfers()
    manager.abort(writer, 4)
    child = manager.fork(sequence, "child")
    if forget == "reset":
        manager.reset_prefix_cache()
    else:
        manager.forget_salt(None)
    ended = {loaded.sequence: loaded for loaded in manager.tiers.complete(transfer, ok=True)}
    for waited in (sequence, child):
        assert (ended[waited].num_tokens, ended[waited].is_whole) == (4, False)
        assert (waited.num_computed_tokens, len(waited.block_ids)) == (4, 1)


def test_who_gives_up_goes_back_before_what_an_abort_took_back():
    """A step that died was to write the block, so it isn't there."""
    manager, writer, sequence = loading_behind_a_writer()
    manager.take_copies()
    manager.abort(writer, 4)
    assert manager.tiers.give_up(sequence) == 4
    assert (sequence.num_computed_tokens, len(sequence.block_ids)) == (4, 1)


def test_what_has_arrived_may_turn_out_to_be_bad_before_the_rest_has():
    manager, sequence, _ = loading_manager(Tier("host", 64, 100, max_transfer_blocks=3))
    transfers = manager.tiers.take_transfers()
    manager.tiers.complete(transfers[0], ok=True)
    assert manager.evict_blocks([sequence.block_ids[1]]) == [], "it isn't written yet"
    manager.tiers.complete(transfers[1], ok=True)
    (loaded,) = manager.tiers.complete(transfers[2], ok=True)
    assert (loaded.num_tokens, sequence.num_cached_blocks) == (4, 1)
    assert stats(manager).num_cached_blocks == 1


def test_nobody_else_says_that_a_load_has_arrived():
    manager, sequence, _ = loading_manager()
    assert manager.cache_blocks(sequence, sequence.num_computed_tokens) == 0
    assert manager.get_computed_blocks(Sequence("three", PROMPT)).num_tokens == 0
    (transfer,) = manager.tiers.take_transfers()
    manager.tiers.complete(transfer, ok=True)
    assert manager.get_computed_blocks(Sequence("three", PROMPT)).num_tokens == 36


def test_a_cut_inside_the_hit_of_a_loading_sequence_is_an_ordinary_one():
    manager = make_manager(64)
    run(manager)
    settle(manager)
    spill(manager)
    run(manager, "beginning", range(12))
    sequence = Sequence("two", range(5))
    sequence.append_tokens(range(5, 40))
    hit = manager.get_computed_blocks(sequence)
    manager.tiers.allocate(sequence, hit, manager.tiers.find(hit))
    manager.truncate(sequence, 6)
    assert sequence.num_computed_tokens == 6
    assert not manager.tiers.is_loading(sequence)


def test_storing_leaves_the_order_in_which_blocks_are_reused():
    """A prefix's end goes before its beginning: without the beginning, all behind it would be lost."""
    manager = make_manager(64, Tier("host", 200, 100))
    run(manager, "long", range(160))
    settle(manager)
    sequence = Sequence("taker", range(5000, 5800))
    manager.allocate_slots(sequence, 4 * 30)
    assert manager.get_computed_blocks(Sequence("look", range(160))).num_tokens == 4 * 34 - (4 * 34 == 160)


def test_a_tier_that_fails_is_not_tried_for_ever():
    manager = make_manager(64)
    run(manager, "long", range(160))
    for number in range(5):
        for transfer in manager.tiers.take_transfers():
            assert number == 0
            manager.tiers.complete(transfer, ok=False)
    assert stats(manager).num_failed_blocks == 8
    run(manager, "long again", range(160))
    assert manager.tiers.take_transfers()


def test_a_tier_that_hangs_leaves_the_others_their_part():
    manager = make_manager(64, Tier("host", 64, 100), Tier("disk", 64, 100))
    run(manager)
    for _ in range(20):
        for transfer in manager.tiers.take_transfers():
            if transfer.tier == "disk":
                manager.tiers.complete(transfer, ok=True)
    assert (stats(manager, 0).num_stored_blocks, stats(manager, 1).num_stored_blocks) == (0, 10)


def test_what_is_used_by_way_of_the_host_is_stored_on_the_disk():
    manager = make_manager(64, Tier("host", 64, 100), Tier("disk", 64, 100, store="reused"))
    run(manager)
    settle(manager)
    spill(manager)
    assert stats(manager, 1).num_stored_blocks == 0
    start(manager)
    settle(manager)
    assert stats(manager, 1).num_stored_blocks == 9


# What is refused.


def test_loads_of_other_tokens_than_the_sequence_has_by_now_are_stale():
    manager = make_manager(64)
    run(manager)
    settle(manager)
    spill(manager)
    sequence = Sequence("two", [0])
    sequence.append_tokens(range(1, 40))
    loads = manager.tiers.find(manager.get_computed_blocks(sequence))
    manager.allocate_slots(sequence, delay_cache_blocks=True)
    manager.truncate(sequence, 1)
    manager.abort(sequence, 0)
    sequence.append_tokens(range(500, 540))
    with pytest.raises(StaleHitError, match="to be stored still"):
        manager.tiers.allocate(sequence, None, loads)


def test_nothing_is_loaded_behind_a_token_that_is_computed_again():
    manager = make_manager(64)
    run(manager, "long", range(80))
    settle(manager)
    spill(manager)
    run(manager)
    sequence = Sequence("two", PROMPT)
    hit = manager.get_computed_blocks(sequence)  # of the whole prompt
    sequence.append_tokens(range(40, 80))
    assert hit.num_tokens == 39 and manager.tiers.find(hit) == []
    loads = manager.tiers.find(manager.get_computed_blocks(sequence))
    assert loads[0].first_token == 40
    with pytest.raises(StaleHitError, match="whose last token is computed again"):
        manager.tiers.allocate(sequence, hit, loads)


def test_tiers_of_one_name_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"tiers: expected different names, got \['host', 'host'\]"):
        make_manager(8, Tier("host", 8, 100), Tier("host", 9, 100))


def test_a_manager_without_caching_has_no_tiers():
    with pytest.raises(InvalidArgumentError, match="expected enable_caching=True"):
        KVCacheManager(8, 4, enable_caching=False, tiers=[Tier("host", 8, 100)])
    assert len(KVCacheManager(8, 4, enable_caching=False).tiers) == 0


def test_without_tiers_the_calls_find_nothing():
    manager = KVCacheManager(8, 4, debug=True)
    run(manager, tokens=range(8))
    assert manager.tiers.find(manager.get_computed_blocks(Sequence("two", range(30)))) == []
    assert manager.tiers.take_transfers() == [] and list(manager.tiers) == []


def test_loads_that_were_evicted_since_are_stale():
    manager = make_manager(64, Tier("host", 10, 100))
    run(manager)
    settle(manager)
    spill(manager)
    sequence = Sequence("two", PROMPT)
    hit = manager.get_computed_blocks(sequence)
    loads = manager.tiers.find(hit)
    run(manager, "other", range(100, 140))
    settle(manager)
    with pytest.raises(StaleHitError, match=r"expected TierHit.* to be stored still; it isn't: look it up again"):
        manager.tiers.allocate(sequence, manager.get_computed_blocks(sequence), loads, None)
    assert not sequence.is_allocated


def test_loads_are_refused_where_they_do_not_belong():
    manager = make_manager(64)
    run(manager)
    settle(manager)
    spill(manager)
    sequence, other = Sequence("two", PROMPT), Sequence("three", PROMPT)
    hit = manager.get_computed_blocks(sequence)
    loads = manager.tiers.find(hit)
    with pytest.raises(SequenceStateError, match="expected loads of"):
        manager.tiers.allocate(other, manager.get_computed_blocks(other), loads, None)
    with pytest.raises(InvalidArgumentError, match="loads: expected one from token 36 on"):
        manager.tiers.allocate(sequence, hit, [*loads, *loads], None)
    foreign = make_manager(64)
    with pytest.raises(SequenceStateError, match="expected one of this manager's tiers"):
        foreign.tiers.allocate(Sequence("four", PROMPT), None, loads, None)
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    with pytest.raises(SequenceStateError, match="expected no loads, since"):
        manager.tiers.allocate(sequence, None, loads, None)


def test_a_transfer_is_answered_by_its_manager_after_it_was_taken():
    manager, sequence, _ = loading_manager()
    (transfer,) = manager.tiers.take_transfers()
    with pytest.raises(InvalidArgumentError, match="expected a transfer of this manager's tiers"):
        make_manager().tiers.complete(transfer, ok=True)
    manager.tiers.complete(transfer, ok=True)
    with pytest.raises(SequenceStateError, match="expected a sequence that is loading"):
        manager.tiers.give_up(sequence)


def test_there_is_no_room_for_what_is_loaded():
    manager = make_manager(12)
    run(manager)
    settle(manager)
    spill(manager)
    filler = Sequence("filler", range(200, 220))
    manager.allocate_slots(filler)
    sequence = Sequence("two", PROMPT)
    hit = manager.get_computed_blocks(sequence)
    loads = manager.tiers.find(hit)
    assert manager.tiers.allocate(sequence, hit, loads) is None
    assert not sequence.is_allocated and not manager.tiers.is_loading(sequence)
    assert stats(manager).num_moving_blocks == 0
