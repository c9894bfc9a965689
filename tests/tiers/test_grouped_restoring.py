"""Persistent tiers of managers with several groups: changes of attached slots, and taking them back."""

from struct import pack

import pytest

from kvblocks import BlockIdentity, FullAttention, InvalidArgumentError, KVCacheManager, Sequence, SlidingWindow, Tier

PROMPT = range(40)  # ten blocks of four tokens
WINDOW = (FullAttention(4), SlidingWindow(4, 8))
GROUPS = {
    "a window": WINDOW,
    "small blocks": (FullAttention(4), SlidingWindow(2, 8)),
    "large blocks": (FullAttention(4), SlidingWindow(8, 8)),
    "all sees all": (FullAttention(4), FullAttention(2)),
    "three": (SlidingWindow(4, 3), FullAttention(4), SlidingWindow(1, 5)),
}


def make_manager(num_slots=64, *, groups=WINDOW, num_blocks=256, debug=True, **options):
    tier = Tier("disk", num_slots, 100, is_persistent=True, **options)
    return KVCacheManager(num_blocks, groups=groups, tiers=[tier], debug=debug)


def run(manager, tokens=PROMPT, name="one", **more):
    """Compute a sequence, and free it."""
    sequence = Sequence(name, tokens, **more)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    manager.free(sequence)


def settle(manager, *, ok=True):
    """Carry all transfers out, until there are none; returns the slots, in their order."""
    slots = []
    while taken := manager.tiers.take_transfers():
        for transfer in taken:
            slots += transfer.slots
            manager.tiers.complete(transfer, ok)
    return slots


def changes(manager):
    return manager.tiers.take_changes()["disk"]


def stored(manager, tokens=PROMPT, **more):
    """Store a prompt, and return what is told of it."""
    run(manager, tokens, **more)
    settle(manager)
    return changes(manager)


def spill(manager):
    """Have everything leave the device."""
    pool = manager._pool  # noqa: SLF001
    pool.uncache([block for block in pool.blocks if block.is_cached])


def found_in(manager, tokens=PROMPT, **more):
    """The slots of a prompt that a load would read, and how many tokens of it."""
    sequence = Sequence("probe", [*tokens, 7], **more)
    loads = manager.tiers.find(manager.get_computed_blocks(sequence).cut(0))
    pieces = [(table, index, slot.block_id) for load in loads for table, index, _, slot in load.pieces]
    return pieces, sum(load.num_tokens for load in loads)


def slots_of(manager):
    return manager._transfers.pools[0]  # noqa: SLF001


def restored(remembered, num_slots=64, **options):
    """A new manager with what was remembered, and how many of its slots can be found."""
    manager = make_manager(num_slots, **options)
    number = manager.tiers.restore("disk", remembered)
    manager.check()
    return manager, number


def columns(told):
    return [None if identity is None else identity.column for identity in told.values()]


def chain(*blocks):
    """Identities of primary blocks of four tokens, one behind the other."""
    found, parent = [], b""
    for first in blocks:
        found.append(BlockIdentity(parent, b"", pack("<4I", *range(first, first + 4))))
        parent = found[-1].digest()
    return found


def beside(identity, column=1):
    return BlockIdentity(identity.digest(), b"", b"", column)


# What is told.


def test_what_is_stored_of_windows_is_told_behind_the_prefix():
    manager = make_manager()
    told = stored(manager)
    assert list(told.values()) == [*chain(*PROMPT[::4]), *(beside(one) for one in chain(*PROMPT[::4])[8:])]
    assert changes(manager) == {}


def test_while_it_is_stored_a_slot_holds_nothing_to_be_found():
    manager = make_manager()
    run(manager)
    (transfer,) = manager.tiers.take_transfers()
    assert changes(manager) == dict.fromkeys(transfer.slots)
    manager.tiers.complete(transfer, ok=False)
    assert changes(manager) == {}


def test_of_a_store_that_failed_in_part_what_is_stored_is_told():
    manager = make_manager(max_transfer_blocks=11)
    run(manager)
    first, second = manager.tiers.take_transfers()
    changes(manager)
    manager.tiers.complete(first, ok=True)
    manager.tiers.complete(second, ok=False)
    assert columns(changes(manager)) == [0] * 10 + [1]


def load(manager, *, ok):
    """Load a prompt with transfers that go well or not. Returns the changes then."""
    spill(manager)
    sequence = Sequence("two", [*PROMPT, 7])
    hit = manager.get_computed_blocks(sequence)
    assert manager.tiers.allocate(sequence, hit, manager.tiers.find(hit)) is not None
    for transfer in manager.tiers.take_transfers():
        manager.tiers.complete(transfer, ok(transfer))
    manager.free(sequence)
    return changes(manager)


def test_a_window_that_a_load_did_not_bring_is_told_alone():
    manager = make_manager(max_transfer_blocks=10)
    told = stored(manager)
    lost = [slot for slot, identity in told.items() if identity.column]
    assert load(manager, ok=lambda transfer: transfer.slots != lost) == dict.fromkeys(lost)


def test_with_a_prefix_that_a_load_did_not_bring_its_windows_go():
    manager = make_manager(max_transfer_blocks=1)
    told = stored(manager)
    slots = list(told)
    assert load(manager, ok=lambda transfer: transfer.slots != [slots[9]]) == dict.fromkeys([slots[9], slots[11]])


def test_with_a_slot_that_is_reused_what_is_attached_to_it_goes():
    manager = make_manager(12)
    told = stored(manager)
    assert len(told) == 12
    (last, _) = [slot for slot, identity in told.items() if not identity.column][::-1][:2]
    (window,) = [slot for slot, identity in told.items() if identity == beside(told[last])]
    run(manager, range(100, 104), "other")
    assert len(settle(manager)) == 2
    assert changes(manager).keys() == {last, window}, "the same as before: what went holds the other prompt"
    told = stored(manager, range(200, 204), name="third")
    gone = [slot for slot, identity in told.items() if identity is None]
    assert not gone
    assert slots_of(manager).stats().num_cached_blocks == 12


def test_what_is_attached_to_a_reused_slot_is_told_though_nobody_takes_it():
    manager = make_manager(12, groups=(FullAttention(4), SlidingWindow(1, 4)))
    told = stored(manager, range(12))
    assert columns(told) == [0, 0, 0, 1, 2, 3, 4]
    run(manager, range(100, 116), "other")
    taken = [slot for transfer in manager.tiers.take_transfers() for slot in transfer.slots]
    assert len(taken) == 8, "five that are empty, the prefix's end, and two of what is attached there"
    assert changes(manager) == dict.fromkeys([*taken, *list(told)[2:]])
    assert slots_of(manager).stats().num_cached_blocks == 2


def test_a_bad_block_of_a_window_is_told_alone():
    manager = make_manager()
    told = stored(manager)
    bad = manager.get_computed_blocks(Sequence("probe", [*PROMPT, 7])).group_blocks(1)[8]
    manager.evict_blocks([bad.block_id])
    assert changes(manager) == {slot: None for slot, one in told.items() if one == beside(chain(*PROMPT[::4])[8])}


def test_with_a_bad_block_all_behind_it_is_told():
    manager = make_manager()
    told = stored(manager)
    bad = manager.get_computed_blocks(Sequence("probe", PROMPT)).blocks[8]
    manager.evict_blocks([bad.block_id])
    kept = chain(*PROMPT[::4])[:8]
    assert changes(manager) == {slot: None for slot, one in told.items() if one not in kept}


def test_a_reset_and_a_forgotten_salt_are_told():
    manager = make_manager()
    mine = stored(manager, salt="ann")
    others = stored(manager, salt="bob", name="two")
    assert manager.forget_salt("ann") > 12
    assert changes(manager) == dict.fromkeys(mine)
    manager.reset_prefix_cache()
    assert changes(manager).keys() >= others.keys()


def test_of_two_in_one_column_the_older_is_told():
    """Two sequences compute the same prompt, and both are stored at once."""
    manager = make_manager()
    pool = slots_of(manager)
    told = stored(manager)
    (older,) = [slot for slot, one in told.items() if one == beside(chain(*PROMPT[::4])[9])]
    primary = pool.pool.blocks[list(told)[9]]
    (newer,) = pool.take(1, None)
    assert not pool.attach(primary, 1, newer), "another one was there"
    pool.pool.requeue_detached()
    pool.let_go([newer])
    assert changes(manager) == {older: None}
    assert next(iter(slots_of(manager).pool.queue)).block_id == older, "it is reused next"


def windows_on_their_way():
    """A manager whose tier has a prefix and then another one.

    The blocks that windows need of the first are being stored.
    """
    manager = make_manager(max_transfer_blocks=10, debug=False)  # tests own slots that no job has
    run(manager)
    for transfer in manager.tiers.take_transfers():
        manager.tiers.complete(transfer, ok=transfer.identities()[0].column == 0)
    stored_first = {slot: one for slot, one in changes(manager).items() if one is not None}
    assert columns(stored_first) == [0] * 10
    others = stored(manager, range(100, 116), name="other")
    run(manager, name="again")
    (transfer,) = manager.tiers.take_transfers()
    assert [one.column for one in transfer.identities()] == [1, 1]
    return manager, transfer, stored_first | others


def test_a_prefix_is_as_new_as_the_windows_that_were_stored_later():
    manager, transfer, told = windows_on_their_way()
    manager.tiers.complete(transfer, ok=True)
    fresh, _ = restored([*told.items(), *changes(manager).items()])
    orders = [[slot.block_id for slot in slots_of(one).pool.queue if slot.is_cached] for one in (manager, fresh)]
    assert orders[0] == orders[1]
    assert orders[0][-2:] == transfer.slots[::-1]


@pytest.mark.parametrize("is_owned", [False, True])
def test_a_window_that_is_there_by_then_goes_unless_somebody_holds_it(is_owned):
    manager, transfer, told = windows_on_their_way()
    pool = slots_of(manager)
    primary = pool.pool.blocks[list(told)[9]]
    (there,) = pool.take(1, None)
    assert pool.attach(primary, 1, there)
    if not is_owned:
        pool.let_go([there])
    manager.tiers.complete(transfer, ok=True)
    (_, ours), theirs = transfer.slots, there.block_id
    identities = transfer.identities()
    assert identities[1] == beside(told[list(told)[9]])
    noted = changes(manager)
    assert noted.pop(transfer.slots[0]) == identities[0]
    assert noted == ({ours: None} if is_owned else {ours: identities[1], theirs: None})
    if is_owned:
        pool.let_go([there])
    manager.check()


# Taking back.


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("every", [None, 8])
def test_all_is_found_again_and_reused_in_the_same_order(groups, every):
    options = {"groups": GROUPS[groups], "window_store_tokens": every}
    manager = make_manager(300, **options)
    branch = [*range(24), *range(100, 116)]
    prompts = [PROMPT, range(200, 232), range(56), branch, range(300, 308), range(200, 248)]
    for number, prompt in enumerate(prompts):
        run(manager, prompt, number)
        settle(manager)
    told = changes(manager)
    spill(manager)
    assert {one.column for one in told.values()} >= {0, 1}
    fresh, number = restored(told.items(), 300, **options)
    assert number == len(told) == slots_of(manager).stats().num_cached_blocks
    for prompt in prompts:
        assert found_in(fresh, prompt) == found_in(manager, prompt)
        assert found_in(fresh, prompt)[1] >= len(prompt) - 8
    assert changes(fresh) == {}, "nothing is new to whoever remembered it"
    orders = [[slot.block_id for slot in slots_of(one).pool.queue if slot.is_cached] for one in (manager, fresh)]
    if groups in {"a window", "small blocks", "large blocks", "three"} and every is None:
        assert orders[0] == orders[1]
    assert without_attached(orders[0], told) == without_attached(orders[1], told)
    assert before_their_prefix(orders[0], told) == before_their_prefix(orders[1], told)


def without_attached(order, told):
    return [slot for slot in order if not told[slot].column]


def before_their_prefix(order, told):
    """Which slots are reused before what they are attached to."""
    places = {told[slot].digest(): place for place, slot in enumerate(order)}
    return {slot for place, slot in enumerate(order) if told[slot].column and place < places[told[slot].parent]}


def test_of_a_restored_prefix_the_end_is_reused_first():
    told = stored(make_manager())
    fresh, _ = restored(told.items(), 12)
    run(fresh, range(100, 104), "other")
    slots = settle(fresh)
    ends = [slot for slot, one in told.items() if one in {chain(*PROMPT[::4])[9], beside(chain(*PROMPT[::4])[9])}]
    assert sorted(slots) == sorted(ends)


def test_a_restored_tier_is_loaded_from_and_stored_to():
    told = stored(make_manager())
    manager, _ = restored(told.items())
    sequence = Sequence("two", [*PROMPT, *range(60, 68)])
    hit = manager.get_computed_blocks(sequence)
    loads = manager.tiers.find(hit)
    assert [one.num_tokens for one in loads] == [40]
    assert manager.tiers.allocate(sequence, hit, loads) is not None
    (transfer,) = manager.tiers.take_transfers()
    assert dict(zip(transfer.slots, transfer.identities(), strict=True)) == told
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert loaded.num_tokens == 40
    manager.allocate_slots(sequence)
    manager.free(sequence)
    settle(manager)
    assert columns(changes(manager)) == [0, 0, 1, 1]


ONE, TWO = chain(0, 4)


@pytest.mark.parametrize(
    ("remembered", "lost"),
    [
        ([(0, ONE), (1, beside(TWO))], {1}),
        ([(0, beside(ONE))], {0}),
        ([(0, TWO), (1, beside(TWO))], {0, 1}),
        ([(0, ONE), (1, beside(ONE, 2))], {1}),
        ([(0, ONE), (1, beside(ONE, 2**32 - 1))], {1}),
        ([(0, ONE), (1, beside(ONE)), (2, beside(ONE))], {1}),
        ([(2, beside(ONE)), (1, beside(ONE)), (0, ONE)], {2}),
        ([(0, ONE), (1, ONE), (2, beside(ONE)), (3, TWO)], {0}),
        (
            [
                (0, ONE),
                (1, beside(ONE)),
                (2, beside(beside(ONE))),
                (3, BlockIdentity(beside(ONE).digest(), b"", ONE.tokens)),
            ],
            {2, 3},
        ),
        ([(0, ONE), (1, BlockIdentity(b"", b"", b"", 1))], {1}),
    ],
    ids=[
        *("no primary", "no prefix", "no beginning", "no such column", "none at all", "two", "two, in any order"),
        *("two primaries", "beside what is beside", "beside nothing"),
    ],
)
def test_what_is_nowhere_counts_as_forgotten(remembered, lost):
    manager, number = restored(remembered)
    assert changes(manager) == dict.fromkeys(lost)
    assert number == len(remembered) - len(lost) == slots_of(manager).stats().num_cached_blocks
    assert set(slots_of(manager).empty_slots()) == set(range(64)) - {slot for slot, _ in remembered if slot not in lost}


def test_one_group_has_no_columns():
    manager = KVCacheManager(8, 4, tiers=[Tier("disk", 8, 100, is_persistent=True)])
    assert manager.tiers.restore("disk", [(0, ONE), (1, beside(ONE))]) == 1
    assert changes(manager) == {1: None}


def test_what_was_stored_by_one_group_is_no_hit_for_two():
    one = KVCacheManager(64, 4, tiers=[Tier("disk", 64, 100, is_persistent=True)])
    run(one)
    settle(one)
    manager, number = restored(changes(one).items())
    assert number == 10
    assert found_in(manager) == ([], 0)


def test_quotas_count_what_is_attached():
    told = stored(make_manager(), salt="ann")
    manager = make_manager()
    manager.tiers.set_quota("disk", "ann", 1)
    assert manager.tiers.restore("disk", told.items()) == 12
    assert [(usage.salt, usage.num_cached_blocks) for usage in manager.tiers.quotas("disk")] == [("ann", 12)]
    assert found_in(manager, salt="ann")[1] == 40
    assert found_in(manager, salt="bob")[1] == found_in(manager)[1] == 0


@pytest.mark.parametrize("column", [-1, 2**32, 1.5, "1", None])
def test_a_column_has_four_bytes(column):
    with pytest.raises(InvalidArgumentError, match="BlockIdentity: column: expected an int from 0 to 4294967295, got"):
        BlockIdentity(b"", b"", b"", column)


def test_an_identity_is_its_parts():
    for identity in (ONE, TWO, beside(ONE), beside(ONE, 2**32 - 1), BlockIdentity(b"p", b"k", b"")):
        assert BlockIdentity.of_parts(*identity.parts()) == identity
    assert beside(ONE).parts() == (ONE.digest(), b"\0", b"\1\0\0\0")
    with pytest.raises(InvalidArgumentError, match="BlockIdentity: parent: expected bytes"):
        BlockIdentity.of_parts("p", b"", b"")
