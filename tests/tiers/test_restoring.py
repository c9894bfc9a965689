"""What outlives a manager: identities, the changes of persistent tiers, and taking slots back."""

import random
from struct import pack

import pytest
from model.tiered import PROMPT, make_manager, run, settle, spill, start, stats

from kvblocks import BlockIdentity, InvalidArgumentError, KVCacheManager, Sequence, SequenceStateError, Tier
from kvblocks.hashing.extra_keys import decode_extra_keys

DISK = Tier("disk", 32, 100, is_persistent=True)


def tokens(*numbers):
    return pack(f"<{len(numbers)}I", *numbers)


def chain(*blocks, keys=None):
    """Identities of blocks of four tokens, one behind the other; keys: encoded, by block."""
    found, parent = [], b""
    for index, first in enumerate(blocks):
        found.append(BlockIdentity(parent, (keys or {}).get(index, b""), tokens(*range(first, first + 4))))
        parent = found[-1].digest()
    return found


def changes(manager, tier="disk"):
    return manager.tiers.take_changes()[tier]


def remember(manager, remembered):
    """Keep what a tier holds, as docs/tiers-in-engines.md says: what was stored last comes last."""
    for slot, identity in changes(manager).items():
        remembered.pop(slot, None)
        if identity is not None:
            remembered[slot] = identity
    return remembered


def found_in(manager, prompt, **keys):
    """The slots that hold a prompt, and how many tokens of it."""
    hit = manager.get_computed_blocks(Sequence("probe", [*prompt, 0], **keys))
    loads = manager.tiers.find(hit.cut(0))
    return [slot.block_id for load in loads for slot in load.prefix], sum(load.num_tokens for load in loads)


def restored(remembered, num_blocks=32, disk=DISK):
    manager = make_manager(num_blocks, disk)
    manager.tiers.restore("disk", remembered)
    return manager


# Identities.


def test_identities_are_the_same_for_ever():
    """A tier on a disk is found again by any later version."""
    salted = Sequence("one", range(8), salt="ann", lora="french", extra_keys=[(2, 6, "image")]).encoded_keys(4)
    digests = [identity.digest().hex() for identity in (*chain(0, 4), *chain(0, 4, keys=salted))]
    assert digests == [
        "ae56c35ba13d8d3ade2a5009ba6a14a33adb9b50f3236441919df885933cfad2",
        "f6207905c14ae1bcd72a96525e35a126fdfce3214dd190c6f8b1d2fc931807c3",
        "0e3ead5d4a18a1dd47ff2fd4a0387ce823d26c442ca156d5e38bb8a8cee11961",
        "4bd3962fb94fd21111299631e80e80ca4c8ae1f3ecd80922bafec92346513819",
    ]
    assert chain(0)[0].preimage().hex() == "0000000000000000" + "00000000010000000200000003000000"


def test_identities_are_compared_by_all_that_they_are():
    one, two = chain(0, 4)
    assert one == BlockIdentity(b"", b"", tokens(0, 1, 2, 3))
    assert hash(one) == hash(BlockIdentity(b"", b"", tokens(0, 1, 2, 3)))
    others = [two, BlockIdentity(b"", b"k", one.tokens), BlockIdentity(b"p", b"", one.tokens)]
    assert one not in others
    assert len({one, *others}) == 4
    assert one != one.preimage()
    assert repr(one) == "BlockIdentity(after nothing, 4 tokens, keys b'')"
    assert "after ae56c35ba13d8d3a, 4 tokens" in repr(two)


def test_the_digests_are_those_that_blocks_have():
    manager = KVCacheManager(8, 4, hash_algorithm="sha256")
    hashes = manager.inspect.block_hashes(Sequence("one", range(12)))
    assert hashes == [identity.digest() for identity in chain(0, 4, 8)]


@pytest.mark.parametrize("is_load", [False, True])
def test_a_transfer_says_who_its_blocks_are(is_load):
    manager = make_manager(64, Tier("disk", 32, 100, max_transfer_blocks=3))
    keys = {"salt": "ann", "extra_keys": [(5, 6, b"image")]}
    run(manager, **keys)
    transfers = manager.tiers.take_transfers()
    if is_load:
        for transfer in transfers:
            manager.tiers.complete(transfer, ok=True)
        settle(manager)
        spill(manager)
        sequence = Sequence("two", [*PROMPT, 0], **keys)
        hit = manager.get_computed_blocks(sequence)
        assert manager.tiers.allocate(sequence, hit, manager.tiers.find(hit)) is not None
        transfers = manager.tiers.take_transfers()
    encoded = Sequence("one", PROMPT, **keys).encoded_keys(4)
    assert {transfer.is_load for transfer in transfers} == {is_load}
    assert len(transfers) > 1
    assert [one for transfer in transfers[::-1] for one in transfer.identities()][::-1] == [
        one for transfer in transfers for one in transfer.identities()[::-1]
    ]
    found = [identity for transfer in transfers for identity in transfer.identities()]
    assert found == chain(*range(0, 4 * len(found), 4), keys=encoded)
    assert decode_extra_keys(found[1].extra_keys) == [("key", (1, 1), b"image")]


def test_behind_what_is_stored_already_a_transfer_goes_on():
    manager = make_manager(64)
    run(manager, tokens=range(8))
    settle(manager)
    run(manager, "longer", tokens=range(16))
    (transfer,) = manager.tiers.take_transfers()
    assert transfer.identities() == chain(0, 4, 8, 12)[2:]


# Changes.


def test_what_is_stored_is_told_once():
    manager = make_manager(32, DISK)
    assert manager.tiers.take_changes() == {"disk": {}}
    run(manager)
    settle(manager)
    told = changes(manager)
    assert told == dict(zip(range(10), chain(*PROMPT[::4]), strict=True))
    assert changes(manager) == {}


def test_only_persistent_tiers_tell():
    manager = make_manager(32, Tier("host", 32, 100), DISK, Tier("far", 32, 100, store="reused", is_persistent=True))
    run(manager)
    settle(manager)
    told = manager.tiers.take_changes()
    assert {name: len(of_tier) for name, of_tier in told.items()} == {"disk": 10, "far": 0}
    assert make_manager().tiers.take_changes() == KVCacheManager(4, 4).tiers.take_changes() == {}


def test_while_it_is_stored_a_slot_holds_nothing_that_is_to_be_found():
    """A process that dies during a write must not find what the slot held before."""
    manager = make_manager(32, Tier("disk", 4, 100, is_persistent=True))
    run(manager, tokens=range(16))
    settle(manager)
    assert list(changes(manager).values()) == chain(0, 4, 8, 12)
    run(manager, "two", tokens=range(100, 108))
    (transfer,) = manager.tiers.take_transfers()
    assert changes(manager) == dict.fromkeys(transfer.slots)
    manager.tiers.complete(transfer, ok=False)
    assert changes(manager) == {}
    run(manager, "three", tokens=range(200, 208))
    settle(manager)
    assert list(changes(manager).values()) == chain(200, 204)


def test_of_a_store_that_failed_in_part_what_came_before_is_told():
    manager = make_manager(64, Tier("disk", 32, 100, max_transfer_blocks=2, is_persistent=True))
    run(manager, tokens=range(24))
    transfers = manager.tiers.take_transfers()
    changes(manager)
    for number, transfer in enumerate(transfers):
        manager.tiers.complete(transfer, ok=number == 0)
    assert len(transfers) > 1
    assert changes(manager) == dict(zip((0, 1), chain(0, 4), strict=True))


def test_what_a_load_did_not_bring_is_told():
    manager = make_manager(32, DISK)
    run(manager)
    settle(manager)
    spill(manager)
    changes(manager)
    start(manager)
    (transfer,) = manager.tiers.take_transfers()
    manager.tiers.complete(transfer, ok=False)
    assert changes(manager) == dict.fromkeys(range(10)), "nine blocks were loaded, and one is chained to them"


def test_what_is_chained_to_a_bad_block_is_told():
    manager = make_manager(32, DISK)
    run(manager)
    settle(manager)
    changes(manager)
    block = manager.get_computed_blocks(Sequence("probe", PROMPT)).blocks[3]
    manager.evict_blocks([block.block_id])
    assert changes(manager) == dict.fromkeys(range(3, 10))


def test_a_reset_is_told():
    manager = make_manager(32, DISK)
    run(manager)
    transfers = manager.tiers.take_transfers()
    manager.reset_prefix_cache()
    assert changes(manager) == dict.fromkeys(range(32))
    for transfer in transfers:
        manager.tiers.complete(transfer, ok=True)
    assert changes(manager) == {}


def test_what_was_stored_last_comes_last():
    manager = make_manager(32, Tier("disk", 4, 100, is_persistent=True))
    run(manager, tokens=range(8))
    settle(manager)
    run(manager, "two", tokens=range(100, 108))
    settle(manager)
    run(manager, "three", tokens=range(200, 208))  # where the first one was
    settle(manager)
    assert list(changes(manager).values()) == chain(100, 104) + chain(200, 204)


# Restoring.


def test_a_tier_is_taken_back():
    manager = make_manager(32, DISK)
    keys = {"salt": "ann", "extra_keys": [(9, 18, "image")]}
    run(manager)
    run(manager, "longer", tokens=range(8, 48))
    run(manager, "branch", tokens=[*range(20), *range(100, 120)])
    run(manager, "salted", **keys)
    settle(manager)
    fresh = make_manager(32, DISK)
    remembered = remember(manager, {})
    assert fresh.tiers.restore("disk", remembered.items()) == len(remembered) == 32
    fresh.check()
    for prompt, of_prompt in ((PROMPT, {}), ([*range(20), *range(100, 120)], {}), (PROMPT, keys)):
        assert found_in(fresh, prompt, **of_prompt) == found_in(manager, prompt, **of_prompt)
        assert found_in(fresh, prompt, **of_prompt)[1] > 20
    assert found_in(fresh, PROMPT, salt="bob") == ([], 0)
    assert found_in(fresh, PROMPT, salt="ann") == found_in(manager, PROMPT, salt="ann")
    assert changes(fresh) == {}, "nothing is new to whoever remembered it"


def test_a_restored_tier_is_loaded_from_and_stored_to():
    remembered = [(slot + 7, identity) for slot, identity in enumerate(chain(*PROMPT[::4]))]
    manager = restored(remembered)
    sequence, _ = start(manager, tokens=[*PROMPT, *range(60, 68)])
    (transfer,) = manager.tiers.take_transfers()
    assert (transfer.slots, transfer.identities()) == (list(range(7, 17)), chain(*PROMPT[::4]))
    (loaded,) = manager.tiers.complete(transfer, ok=True)
    assert loaded.num_tokens == 40
    manager.allocate_slots(sequence)
    manager.free(sequence)
    settle(manager)
    told = changes(manager)
    assert list(told.values()) == chain(*PROMPT[::4], 60, 64)[10:]
    assert not told.keys() & set(range(7, 17))


def test_what_lacks_its_beginning_counts_as_forgotten():
    one, two, three = chain(0, 4, 8)
    manager = restored([(0, one), (1, three)])
    assert found_in(manager, range(12)) == ([0], 4)
    assert changes(manager) == {1: None}
    assert restored([(3, two), (4, three)]).tiers.take_changes() == {"disk": {3: None, 4: None}}


def test_whose_each_block_is_stays():
    keys = {salt: Sequence("one", range(8), salt=salt, extra_keys=[(5, 6, salt)]).encoded_keys(4) for salt in "ab"}
    chains = [*chain(0, 4, keys=keys["a"]), *chain(0, 4, keys=keys["b"])]
    manager = restored(enumerate(chains))
    assert found_in(manager, range(8), salt="a", extra_keys=[(5, 6, "a")]) == ([0, 1], 8)
    assert found_in(manager, range(8), salt="b", extra_keys=[(5, 6, "b")]) == ([2, 3], 8)
    assert found_in(manager, range(8), salt="b", extra_keys=[(5, 6, "a")]) == ([2], 4)


def test_blocks_of_another_size_count_as_forgotten():
    other = BlockIdentity(b"", b"", tokens(*range(8)))
    manager = restored([(0, other), (1, BlockIdentity(other.digest(), b"", tokens(1, 2, 3, 4)))])
    assert changes(manager) == {0: None, 1: None}
    assert stats(manager).num_cached_blocks == 0


def test_their_order_is_any():
    one, two, three = chain(0, 4, 8)
    assert found_in(restored([(0, three), (1, one), (2, two)]), range(12)) == ([1, 2, 0], 12)


def test_of_two_slots_that_hold_the_same_one_stays():
    one, two, three = chain(0, 4, 8)
    disk = Tier("disk", 6, 100, is_persistent=True)
    manager = restored([(0, one), (1, two), (2, two), (3, three), (4, one)], disk=disk)
    assert stats(manager).num_cached_blocks == 3
    slots, number = found_in(manager, range(12))
    assert number == 12
    assert (slots[0] in (0, 4), slots[1] in (1, 2), slots[2]) == (True, True, 3)
    lost = {0, 1, 2, 4} - {*slots}
    assert set(changes(manager)) == lost and not any(changes(manager).values())
    manager.check()


def reused(remembered, num_slots):
    """The slots of a restored tier, in the order in which new blocks take them."""
    disk = Tier("disk", num_slots, 100, is_persistent=True)
    manager = restored(remembered, num_blocks=64, disk=disk)
    run(manager, tokens=range(1000, 1000 + 4 * num_slots))
    return [slot for transfer in settle(manager) for slot in transfer.slots]


def test_of_a_prefix_the_end_is_reused_first():
    one, two, three = chain(0, 4, 8)
    assert reused([(0, one), (1, two), (2, three)], 4) == [3, 2, 1, 0]
    assert reused([(2, three), (1, two), (0, one)], 4) == [3, 2, 1, 0]


def test_what_was_stored_first_is_reused_first():
    first, second, third = chain(0, 4), chain(100, 104), chain(200)
    slots = [(5, first[0]), (0, first[1]), (1, second[0]), (2, second[1]), (4, third[0])]
    assert reused(slots, 6) == [3, 0, 5, 2, 1, 4]
    assert reused(slots[2:] + slots[:2], 6) == [3, 2, 1, 4, 0, 5]


def test_a_beginning_is_as_new_as_what_is_behind_it():
    one, two, three = chain(0, 4, 8)
    branch = BlockIdentity(one.digest(), b"", tokens(50, 51, 52, 53))
    other = chain(100)[0]
    slots = [(0, one), (1, two), (2, three), (4, other), (3, branch)]
    assert reused(slots, 5) == [2, 1, 4, 3, 0]


def test_quotas_count_what_is_restored():
    keys = Sequence("one", range(8), salt="ann").encoded_keys(4)
    manager = make_manager(32, DISK)
    manager.tiers.set_quota("disk", "ann", 1)
    manager.tiers.restore("disk", enumerate(chain(0, 4, keys=keys)))
    assert [(usage.salt, usage.num_cached_blocks) for usage in manager.tiers.quotas("disk")] == [("ann", 2)]
    manager.check()


ONE, TWO = chain(0, 4)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (5, "tiers.restore: expected pairs of a slot's id and a BlockIdentity, got 5"),
        ([5], "expected pairs of a slot's id and a BlockIdentity, got 5"),
        ([(0, ONE), (1,)], "expected pairs of a slot's id and a BlockIdentity, got \\(1,\\)"),
        ([(0, ONE), (1, TWO.digest())], "expected pairs of a slot's id and a BlockIdentity, got"),
        ([(0, ONE), (1, None)], "expected pairs of a slot's id and a BlockIdentity, got"),
        ([(0, ONE), (32, TWO)], "tiers.restore: slot: expected .*31, got 32"),
        ([(0, ONE), (-1, TWO)], "tiers.restore: slot: expected .*, got -1"),
        ([(0, ONE), ("1", TWO)], "tiers.restore: slot: expected .*, got '1'"),
        ([(0, ONE), (0, TWO)], "tiers.restore: expected each slot once, got 0 twice"),
    ],
)
def test_what_is_no_slot_of_a_tier_is_refused(slots, message):
    manager = make_manager(32, DISK)
    manager.tiers.set_default_quota("disk", 4)
    before = list(manager.tiers)
    with pytest.raises(InvalidArgumentError, match=message):
        manager.tiers.restore("disk", slots)
    assert list(manager.tiers) == before
    assert changes(manager) == {}
    assert manager.tiers.restore("disk", [(0, ONE), (1, TWO)]) == 2


@pytest.mark.parametrize("name", ["host", "nowhere", None, 0])
def test_only_persistent_tiers_are_taken_back(name):
    manager = make_manager(32, Tier("host", 32, 100), DISK)
    message = r"tiers.restore: expected the name of a persistent tier, one of \['disk'\], got"
    with pytest.raises(InvalidArgumentError, match=message):
        manager.tiers.restore(name, [(0, ONE)])


def test_only_an_empty_tier_is_taken_back():
    manager = make_manager(32, DISK)
    run(manager)
    transfers = manager.tiers.take_transfers()  # nothing is cached there yet, but is on its way
    with pytest.raises(SequenceStateError, match=r"tiers\.restore: expected tier 'disk' to be empty, got TierStats"):
        manager.tiers.restore("disk", [(20, ONE)])
    for transfer in transfers:
        manager.tiers.complete(transfer, ok=True)
    with pytest.raises(SequenceStateError, match="expected tier 'disk' to be empty"):
        manager.tiers.restore("disk", [])
    settle(manager)
    manager.reset_prefix_cache()
    assert manager.tiers.restore("disk", [(20, ONE)]) == 1


@pytest.mark.parametrize("field", ["parent", "extra_keys", "tokens"])
def test_an_identity_is_made_of_bytes(field):
    fields = {"parent": b"", "extra_keys": b"", "tokens": b"", field: "text"}
    with pytest.raises(InvalidArgumentError, match=f"BlockIdentity: {field}: expected bytes, got 'text'"):
        BlockIdentity(**fields)


@pytest.mark.parametrize("keys", [b"\1\x09\0\0\0", b"\1\1\0\0\0\xff", b"\xff\1\2"])
def test_a_block_whose_keys_cannot_be_read_is_forgotten_with_what_is_behind_it(keys):
    """A damaged index is no reason not to start."""
    broken = chain(0, 4, keys={0: keys})
    good = chain(100, 104)
    manager = restored(list(enumerate([*broken, *good])))
    assert changes(manager) == {0: None, 1: None}
    assert found_in(manager, range(100, 108))
    manager.tiers.set_default_quota("disk", 5)
    manager.check()


# The order of use.


def keep(manager, remembered):
    """As `remember`, with the order of use."""
    remember(manager, remembered)
    for slot in manager.tiers.take_uses()["disk"]:
        remembered[slot] = remembered.pop(slot)


def evicted_first(remembered, firsts):
    """In which order a restored tier loses prompts: by their first tokens."""
    manager = restored(remembered.items())
    left, lost = list(firsts), []
    for number in range(8):
        run(manager, f"new {number}", range(5000 + 100 * number, 5000 + 100 * number + 16))
        settle(manager)
        for first in [one for one in left if found_in(manager, range(one, one + 16))[1] < 16]:
            left.remove(first)
            lost.append(first)
    return lost + left


@pytest.mark.parametrize("how", ["on the device", "loaded"])
def test_what_was_used_last_goes_last_after_a_restart_too(how):
    firsts = (100, 200, 300, 400)
    manager, remembered = make_manager(32, DISK), {}
    for first in firsts:
        run(manager, first, range(first, first + 16))
        settle(manager)
        keep(manager, remembered)
    assert evicted_first(remembered, firsts) == [100, 200, 300, 400]
    for first in (100, 300):
        if how == "loaded":
            spill(manager)
            sequence, loads = start(manager, "reader", [*range(first, first + 16), 1])
            assert loads
            settle(manager)
            manager.free(sequence)
        else:
            run(manager, "reader", [*range(first, first + 16), 1])
        settle(manager)
        uses = manager.tiers.take_uses()["disk"]
        assert len(uses) == 1, "one note a use, whatever its length"
        for slot in uses:
            remembered[slot] = remembered.pop(slot)
    keep(manager, remembered)
    assert evicted_first(remembered, firsts) == [200, 400, 100, 300]


def test_a_used_beginning_does_not_make_the_end_newer():
    manager, remembered = make_manager(32, DISK), {}
    for first, number in ((100, 32), (200, 16)):
        run(manager, first, range(first, first + number))
        settle(manager)
        keep(manager, remembered)
    run(manager, "reader", [*range(100, 108), 1])
    settle(manager)
    keep(manager, remembered)
    manager = restored(remembered.items())
    for number in range(7):  # 28 of the slots that others have, or that are free
        run(manager, f"new {number}", range(5000 + 100 * number, 5000 + 100 * number + 16))
        settle(manager)
    assert found_in(manager, range(100, 132))[1] == 8 and found_in(manager, range(200, 216))[1] < 16


def test_what_changed_is_not_told_as_used_as_well():
    manager = make_manager(32, DISK)
    run(manager)
    settle(manager)
    assert manager.tiers.take_uses() == {"disk": []}, "a store is no use"
    run(manager, "again")
    settle(manager)
    manager.reset_prefix_cache()
    assert manager.tiers.take_uses() == {"disk": []}, "nobody finds it any more"
    assert restored([]).tiers.take_uses() == {"disk": []}
    assert make_manager().tiers.take_uses() == {}


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_a_restored_tier_is_that_of_the_one_before(seed):
    """Prompts that branch, stored and used at random, on the device or by loads: slots go in the same order."""
    dice = random.Random(seed)
    manager, remembered = make_manager(32, DISK), {}
    prompts = [
        [*range(100 * (n % 3), 100 * (n % 3) + 4 * dice.randint(1, 4)), *range(900 + 40 * n, 908 + 40 * n)]
        for n in range(8)
    ]
    for turn in range(30):
        tokens = dice.choice(prompts)
        sequence = Sequence(turn, [*tokens[: 4 * dice.randint(1, len(tokens) // 4)], 1])
        hit = manager.get_computed_blocks(sequence)
        loads = manager.tiers.find(hit)
        manager.tiers.allocate(sequence, hit, loads, 0 if loads else None)
        settle(manager)
        if loads:
            manager.allocate_slots(sequence)
        manager.free(sequence)
        settle(manager)
        keep(manager, remembered)
        if dice.random() < 0.3:
            spill(manager)
    assert slots_in_order(restored(remembered.items()), remembered) == slots_in_order(manager, remembered)


def slots_in_order(manager, remembered):
    """The slots that hold something, in the order in which they are reused."""
    (pool,) = manager._transfers.pools  # noqa: SLF001
    return [slot.block_id for slot in pool.pool.queue if slot.block_id in remembered]
