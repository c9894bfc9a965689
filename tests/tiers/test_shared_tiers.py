"""Tiers that others fill, too: what `note_found` says of them is what lookups count on."""

import random

import pytest

from kvblocks import EventOptions, FullAttention, KVCacheManager, Sequence, SlidingWindow, Tier
from kvblocks.errors import InvalidArgumentError

SHARED = {"is_shared": True}


def manager_of(num_blocks=16, num_slots=32, **options):
    return KVCacheManager(num_blocks, 4, tiers=[Tier("store", num_slots, 10, **SHARED)], **options)


def found(manager, sequence):
    return sum(part.num_tokens for part in manager.tiers.find(manager.get_computed_blocks(sequence)))


def load(manager, sequence, ok=True):
    hit = manager.get_computed_blocks(sequence)
    assert manager.tiers.allocate(sequence, hit, manager.tiers.find(hit)) is not None
    transfers = manager.tiers.take_transfers()
    ended = [one for transfer in transfers for one in manager.tiers.complete(transfer, ok=ok)]
    return transfers, ended


def test_what_was_found_is_loaded_as_what_was_stored_here():
    manager = manager_of()
    sequence = Sequence("a", range(30), salt="ann")
    assert found(manager, sequence) == 0
    assert manager.tiers.note_found("store", sequence, 5) == 5
    assert found(manager, sequence) == 20
    assert found(manager, Sequence("other", range(30))) == 0, "another salt's"
    (transfer,), (loaded,) = load(manager, sequence)
    assert (transfer.salt, transfer.max_blocks, transfer.digests_before()) == ("ann", None, [])
    assert [one.tokens for one in transfer.identities()] == [
        b"".join(number.to_bytes(4, "little") for number in range(start, start + 4)) for start in range(0, 20, 4)
    ]
    assert (loaded.num_tokens, loaded.is_whole) == (20, True)
    manager.allocate_slots(sequence)
    manager.free(sequence)
    (store,) = manager.tiers.take_transfers()
    assert len(store.slots) == 2 and len(store.digests_before()) == 5, "only what the store lacks"
    manager.tiers.complete(store, ok=True)
    manager.check()


def test_what_is_gone_is_not_found_and_a_load_of_it_fails_harmlessly():
    manager = manager_of()
    sequence = Sequence("a", range(30))
    manager.tiers.note_found("store", sequence, 7)
    assert manager.tiers.note_found("store", sequence, 3) == 3 and found(manager, sequence) == 12
    _, (loaded,) = load(manager, sequence, ok=False)
    assert (loaded.num_tokens, loaded.is_whole) == (0, False)
    assert found(manager, Sequence("b", range(30))) == 0
    manager.free(sequence)
    manager.check()
    assert manager.num_free_blocks == 16


def test_what_is_being_loaded_may_be_said_to_be_gone_meanwhile():
    manager = manager_of()
    first, second = Sequence("a", range(30)), Sequence("b", range(30))
    manager.tiers.note_found("store", first, 7)
    hit = manager.get_computed_blocks(first)
    manager.tiers.allocate(first, hit, manager.tiers.find(hit))
    (transfer,) = manager.tiers.take_transfers()
    assert manager.tiers.note_found("store", second, 0) == 0
    (loaded,) = manager.tiers.complete(transfer, ok=True)  # its bytes were checked
    assert loaded.num_tokens == 28 and found(manager, Sequence("c", [*range(28), 9, 9])) == 0
    manager.check()


def test_the_last_known_token_is_never_found():
    manager = manager_of()
    sequence = Sequence("a", range(8))
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        manager.tiers.note_found("store", sequence, 2)
    assert manager.tiers.note_found("store", sequence, 1) == 1


def test_slots_and_quotas_bound_what_is_known():
    manager = manager_of(num_slots=6)
    long, other = Sequence("a", range(100), salt="ann"), Sequence("b", range(200, 240), salt="bob")
    assert manager.tiers.note_found("store", long, 20) == 6
    manager.tiers.set_quota("store", "bob", 2)
    assert manager.tiers.note_found("store", other, 5) == 2
    assert found(manager, long) == 4 * 4, "the end of what was used before"
    hit = manager.get_computed_blocks(other)
    manager.tiers.allocate(other, hit, manager.tiers.find(hit))
    (transfer,) = manager.tiers.take_transfers()
    assert transfer.max_blocks == 2
    manager.check()


def test_resets_are_counted_and_forget_what_was_found():
    manager = manager_of()
    sequence = Sequence("a", range(30))
    manager.tiers.note_found("store", sequence, 7)
    assert manager.tiers.num_resets == 0
    manager.reset_prefix_cache()
    assert manager.tiers.num_resets == 1 and found(manager, sequence) == 0
    manager.tiers.note_found("store", sequence, 7)
    manager.forget_salt(None)
    assert manager.tiers.num_resets == 1 and found(manager, sequence) == 0


@pytest.mark.parametrize("groups", [None, (FullAttention(4), SlidingWindow(4, 8))])
def test_events_name_what_was_found_as_the_device_does(groups):
    tiers = [Tier("store", 32, 10, **SHARED)]
    options = {"enable_events": EventOptions(tiers=True), "tiers": tiers}
    manager = KVCacheManager(32, 4, **options) if groups is None else KVCacheManager(32, groups=groups, **options)
    sequence = Sequence("a", range(30), salt="ann")
    attached = [] if groups is None else [(3, 1), (4, 1)]
    manager.tiers.note_found("store", sequence, 2)
    manager.tiers.note_found("store", sequence, 5, attached)
    below = [event for event in manager.take_events() if event.group_idx in (None, 0)]
    assert [event.medium for event in below] == ["EXTERNAL"] * len(below)
    names = [name for event in below for name in event.block_hashes]
    assert names == manager.inspect.block_hashes(sequence)[:5]
    if groups is not None:
        assert found(manager, sequence) == 20
        manager.tiers.note_found("store", sequence, 4)
        assert found(manager, sequence) == 0, "what a hit needs of the window was not there"
    manager.check()


@pytest.mark.parametrize("name", ["host", "disk", "other"])
def test_only_of_a_shared_tier_anything_can_be_found(name):
    tiers = [Tier("host", 8, 10), Tier("disk", 8, 10, is_persistent=True), Tier("store", 8, 10, is_shared=True)]
    manager = KVCacheManager(16, 4, tiers=tiers)
    with pytest.raises(InvalidArgumentError, match="note_found"):
        manager.tiers.note_found(name, Sequence("a", range(9)), 1)
    with pytest.raises(InvalidArgumentError, match="got both"):
        Tier("both", 8, 10, is_persistent=True, is_shared=True)


@pytest.mark.parametrize("seed", range(10))
def test_random_hearsay_never_breaks_the_books(seed):
    """Prompts come and go, loads fail, anything may be reported as found. No block stays held."""
    chooser = random.Random(seed)
    groups = {} if seed % 2 else {"groups": (FullAttention(4), SlidingWindow(4, 8))}
    tiers = [Tier("store", 12, 10, store=chooser.choice(["freed", "reused", "computed"]), **SHARED)]
    manager = KVCacheManager(24, tiers=tiers, **groups) if groups else KVCacheManager(24, 4, tiers=tiers)
    begun, running = [], []
    for turn in range(150):
        start = chooser.randrange(3)
        tokens = [*range(start * 100, start * 100 + chooser.randrange(2, 40)), *chooser.choices(range(1000, 1003), k=2)]
        sequence = Sequence(turn, tokens, salt=chooser.choice([None, "ann"]))
        most = (len(tokens) - 1) // 4
        number = chooser.randrange(most + 1)
        attached = [(index, 1) for index in range(number) if chooser.random() < 0.7] if groups else []
        assert manager.tiers.note_found("store", sequence, number, attached) <= number
        hit = manager.get_computed_blocks(sequence)
        loads = manager.tiers.find(hit)
        if manager.tiers.allocate(sequence, hit, loads, 0 if loads else None) is not None:
            running.append(sequence)
        begun += manager.tiers.take_transfers()
        chooser.shuffle(begun)
        for _ in range(chooser.randrange(3)):
            if begun:
                manager.tiers.complete(begun.pop(), ok=chooser.random() < 0.7)
        while running and (len(running) > 3 or chooser.random() < 0.3):
            manager.free(running.pop(chooser.randrange(len(running))))
        if chooser.random() < 0.03:
            manager.reset_prefix_cache()
        manager.check()
    for sequence in running:
        manager.free(sequence)
    while manager.tiers.is_busy:
        begun += manager.tiers.take_transfers()
        while begun:
            manager.tiers.complete(begun.pop(), ok=True)
    manager.check()
    assert manager.num_free_blocks == 24
