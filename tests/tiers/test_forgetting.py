"""`forget_salt`: a tenant's data is deleted, on the device and in all tiers."""

import pytest
from model.tiered import PROMPT, make_manager, run, settle, spill, stats

from kvblocks import (
    FullAttention,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    SlidingWindow,
    Tier,
)

DISK = Tier("disk", 64, 100, is_persistent=True)


def num_hit(manager, salt=None, prompt=PROMPT):
    return manager.get_computed_blocks(Sequence("probe", [*prompt, 0], salt=salt)).num_tokens


def num_below(manager, salt=None, prompt=PROMPT):
    hit = manager.get_computed_blocks(Sequence("probe", [*prompt, 0], salt=salt)).cut(0)
    return sum(load.num_tokens for load in manager.tiers.find(hit))


def test_a_salt_is_forgotten_everywhere_and_nothing_else_is():
    manager = make_manager(64, Tier("host", 64, 100), DISK, enable_events=True, num_history_blocks=100)
    for salt in ("ann", "bob", None):
        run(manager, salt, salt=salt)
    run(manager, "branch", [*range(8), *range(50, 58)], salt="ann")
    settle(manager)
    manager.tiers.take_changes()
    manager.take_events()
    assert manager.forget_salt("ann") == 3 * 12
    assert [(num_hit(manager, salt), num_below(manager, salt)) for salt in ("ann", "bob", None)] == [
        (0, 0),
        (40, 40),
        (40, 40),
    ]
    assert [tier.num_cached_blocks for tier in manager.tiers] == [20, 20]
    assert list(manager.tiers.take_changes()["disk"].values()) == [None] * 12
    assert sum(len(event.block_hashes) for event in manager.take_events()) == 12
    assert "on request" in str(manager.inspect.explain(Sequence("again", PROMPT, salt="ann")))
    assert manager.forget_salt("ann") == 0
    assert manager.forget_salt("nobody") == 0


def test_no_salt_is_a_salt():
    manager = make_manager(64)
    run(manager, salt="ann")
    run(manager, lora="french")
    run(manager, extra_keys=[(0, 8, "image")])
    settle(manager)
    assert manager.forget_salt(None) == 40
    assert (num_hit(manager), num_hit(manager, "ann")) == (0, 40)


def test_an_adapter_of_a_tenant_is_the_tenants():
    manager = make_manager(64)
    run(manager, salt="ann", lora="french")
    settle(manager)
    assert manager.forget_salt("ann") == 20


def test_running_sequences_go_on_and_are_not_hit():
    manager = make_manager(64)
    sequence = Sequence("one", range(10), salt="ann")
    manager.allocate_slots(sequence)
    short = Sequence("short", range(3), salt="ann")
    manager.allocate_slots(short)
    blocks = [block.block_id for block in sequence.blocks]
    manager.forget_salt("ann")
    for one in (sequence, short):
        manager.append_slots(one, list(range(500, 520)))
    assert [block.block_id for block in sequence.blocks][:3] == blocks
    assert (num_hit(manager, "ann", sequence.token_ids()), num_hit(manager, "ann", short.token_ids())) == (0, 0)
    child = manager.fork(sequence, "child")
    assert manager.get_computed_blocks(Sequence("probe", range(9), salt="ann")).pending_tokens == 0
    assert manager.cache_blocks(sequence, 30) == 0
    for one in (sequence, child, short):
        manager.free(one)
    assert settle(manager) == []
    assert manager.stats.num_cached_blocks == 0
    assert manager.num_free_blocks == 64


def test_running_sequences_of_others_are_cached_on():
    manager = make_manager(64)
    sequence = Sequence("one", range(10), salt="bob")
    manager.allocate_slots(sequence)
    manager.forget_salt("ann")
    manager.forget_salt(None)
    manager.append_slots(sequence, [7, 7])
    assert num_hit(manager, "bob", sequence.token_ids()) == 12


def test_what_comes_later_is_cached_and_stored_anew():
    manager = make_manager(64)
    run(manager, salt="ann")
    settle(manager)
    manager.forget_salt("ann")
    run(manager, salt="ann")
    settle(manager)
    assert (num_hit(manager, "ann"), num_below(manager, "ann")) == (40, 40)


def test_who_may_keep_its_data_after_all_says_so():
    manager = make_manager(64)
    sequence = Sequence("one", PROMPT, salt="ann")
    manager.allocate_slots(sequence)
    manager.forget_salt("ann")
    manager.renew(sequence)
    assert num_hit(manager, "ann") == 40
    with pytest.raises(SequenceStateError, match="expected a sequence from before a reset"):
        manager.renew(sequence)


def test_stores_under_way_come_to_nothing():
    manager = make_manager(64, DISK)
    run(manager, salt="ann")
    run(manager, "two", salt="bob")
    transfers = manager.tiers.take_transfers()
    assert {transfer.tier for transfer in transfers} == {"disk"}
    manager.tiers.take_changes()
    manager.forget_salt("ann")
    for transfer in transfers:
        manager.tiers.complete(transfer, ok=True)
    settle(manager)
    assert (num_below(manager, "ann"), num_below(manager, "bob")) == (0, 40)
    assert sum(identity is not None for identity in manager.tiers.take_changes()["disk"].values()) == 10
    assert stats(manager).num_dropped_blocks >= 8


def test_stores_behind_what_is_forgotten_come_to_nothing():
    manager = make_manager(64, DISK)
    run(manager, salt="ann")
    settle(manager)
    run(manager, "longer", range(48), salt="ann")
    (transfer,) = manager.tiers.take_transfers()
    manager.tiers.take_changes()
    manager.forget_salt("ann")
    run(manager, "longer", range(48), salt="ann")
    manager.tiers.complete(transfer, ok=True)
    assert stats(manager).num_cached_blocks == 0
    assert set(manager.tiers.take_changes()["disk"].values()) == {None}
    settle(manager)
    assert stats(manager).num_cached_blocks == 12


@pytest.mark.parametrize("is_begun", [False, True])
def test_loads_under_way_are_for_those_that_wait(is_begun):
    manager = make_manager(64)
    run(manager, salt="ann")
    settle(manager)
    spill(manager)
    sequence = Sequence("two", [*PROMPT, 0], salt="ann")
    loads = manager.tiers.find(manager.get_computed_blocks(sequence))
    assert manager.tiers.allocate(sequence, None, loads) is not None
    transfers = manager.tiers.take_transfers() if is_begun else []
    assert manager.forget_salt("ann") == 10
    (transfer,) = transfers or manager.tiers.take_transfers()
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert (loaded.num_tokens, loaded.is_whole) == (40, True)
    assert (num_hit(manager, "ann"), num_below(manager, "ann")) == (0, 0)
    manager.allocate_slots(sequence)
    manager.free(sequence)
    assert settle(manager) == []
    assert (manager.stats.num_cached_blocks, stats(manager).num_moving_blocks) == (0, 0)


def test_a_pin_stands_and_holds_nothing():
    manager = make_manager(64)
    run(manager, salt="ann")
    pin = manager.pins.pin(PROMPT, salt="ann")
    assert pin.num_held_blocks == 10
    manager.forget_salt("ann")
    assert (pin.num_held_blocks, num_hit(manager, "ann"), manager.num_free_blocks) == (0, 0, 64)
    run(manager, salt="ann")
    assert pin.num_held_blocks == 10


def test_two_blocks_of_one_prefix_are_both_forgotten():
    manager = make_manager(64)
    children = [Sequence(name, PROMPT, salt="ann") for name in "ab"]
    for one in children:
        manager.allocate_slots(one)
    assert manager.stats.num_cached_blocks == 20
    assert manager.forget_salt("ann") == 20
    for one in children:
        manager.free(one)


@pytest.mark.parametrize("groups", [[FullAttention(4), SlidingWindow(4, 8)], [SlidingWindow(4, 8)]])
def test_groups_forget_too(groups):
    manager = KVCacheManager(64, groups=groups, debug=True)
    running = Sequence("running", range(20, 60), salt="ann")
    manager.allocate_slots(running)
    run(manager, salt="ann")
    run(manager, salt="bob")
    before = manager.stats.num_cached_blocks
    assert manager.forget_salt("ann") == before - manager.stats.num_cached_blocks > 0
    assert (num_hit(manager, "ann"), num_hit(manager, "ann", range(20, 60)), num_hit(manager, "bob")) == (0, 0, 40)
    manager.append_slots(running, list(range(10)))
    manager.free(running)
    run(manager, salt="ann")
    assert num_hit(manager, "ann") == 40
    manager.forget_salt("ann")
    manager.forget_salt("bob")
    assert manager.stats.num_cached_blocks == 0


def test_without_caching_there_is_nothing_to_forget():
    manager = KVCacheManager(8, 4, enable_caching=False, debug=True)
    sequence = Sequence("one", range(8))
    manager.allocate_slots(sequence)
    assert manager.forget_salt(None) == 0
    manager.free(sequence)


@pytest.mark.parametrize("salt", ["", 5, b"ann"])
def test_what_is_no_salt_is_refused(salt):
    manager = make_manager()
    run(manager)
    with pytest.raises(InvalidArgumentError, match="salt: expected a non-empty str or None, got"):
        manager.forget_salt(salt)
    assert num_hit(manager) == 40
