"""Events of tiers: by the device's names, with their medium. Random walks over them are test_tier_machine.py's."""

import pytest
from model.tier_machine import TierMachine
from model.told import Told, cached, cached_in

from kvblocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksHit,
    BlockStored,
    EventOptions,
    FullAttention,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SlidingWindow,
    Tier,
)
from kvblocks.hashing.vllm import VllmHashScheme

ALL = EventOptions(hits=True, tiers=True)


def make_manager(*tiers, **options) -> KVCacheManager:
    options = {"enable_events": ALL} | options
    return KVCacheManager(32, 4, tiers=tiers, **options)


def run(manager, name, tokens, **keys) -> Sequence:
    sequence = Sequence(name, tokens, **keys)
    manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
    return sequence


def store_all(manager) -> None:
    while transfers := manager.tiers.take_transfers():
        for transfer in transfers:
            manager.tiers.complete(transfer, ok=True)


def test_what_a_tier_stores_is_said_when_its_bytes_are_there():
    manager = make_manager(Tier("host", 8, 100))
    sequence = run(manager, "a", range(13), salt="s", lora="l", extra_keys=[(5, 6, "image")])
    names = tuple(manager.inspect.block_hashes(sequence))
    (device,) = manager.take_events()
    manager.free(sequence)
    (transfer,) = manager.tiers.take_transfers()
    assert manager.take_events() == []
    manager.tiers.complete(transfer, ok=True)
    (below,) = manager.take_events()
    assert isinstance(device, BlockStored) and isinstance(below, BlockStored)
    assert (device.medium, device.sequence_id, device.kind) == ("GPU", "a", "full_attention")
    assert (below.medium, below.sequence_id, below.kind) == ("CPU", None, "full_attention")
    assert below.block_hashes == device.block_hashes == names and below.tokens == device.tokens
    assert (below.salt, below.lora, below.extra_keys) == (device.salt, device.lora, device.extra_keys)
    assert below.block_ids == tuple(transfer.slots)


def test_a_failed_store_is_none_and_a_failed_load_is_a_removal():
    manager = make_manager(Tier("host", 8, 100, medium="somewhere"))
    manager.free(run(manager, "a", range(13)))
    (transfer,) = manager.tiers.take_transfers()
    manager.tiers.complete(transfer, ok=False)
    assert [event.medium for event in manager.take_events()] == ["GPU"]
    manager.free(run(manager, "b", range(13)))
    store_all(manager)
    manager.evict_blocks(range(0))
    manager.take_events()
    manager.free(run(manager, "c", range(100, 228)))  # all blocks: nothing is left of the first on the device
    manager.take_events()
    again = Sequence("d", range(13))
    loads = manager.tiers.find(manager.get_computed_blocks(again))
    manager.tiers.allocate(again, None, loads, None)
    for transfer in manager.tiers.take_transfers():
        manager.tiers.complete(transfer, ok=not transfer.is_load)
    removed = [e for e in manager.take_events() if isinstance(e, BlockRemoved) and e.medium == "somewhere"]
    assert [name for event in removed for name in event.block_hashes] == manager.inspect.block_hashes(again)[2::-1]


def test_a_reset_is_said_once_for_all():
    manager = make_manager(Tier("host", 8, 100), Tier("disk", 8, 100, is_persistent=True))
    manager.free(run(manager, "a", range(13)))
    store_all(manager)
    assert {event.medium for event in manager.take_events()} == {"GPU", "CPU", "STORAGE"}
    manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_a_forgotten_salt_is_removed_everywhere():
    manager = make_manager(Tier("host", 8, 100))
    manager.free(run(manager, "a", range(13), salt="s"))
    store_all(manager)
    manager.take_events()
    manager.forget_salt("s")
    assert sorted(event.medium for event in manager.take_events()) == ["CPU", "GPU"]


@pytest.mark.parametrize("names", ["xxh3_128", VllmHashScheme("sha256_cbor", seed="s")])
def test_what_is_restored_is_said(names):
    tier = Tier("disk", 8, 100, is_persistent=True)
    old = make_manager(tier, hash_algorithm=names)
    for number in range(2):
        old.free(run(old, number, [*range(8), number, 1, 2, 3, 4], lora="ad\0p", salt="s", extra_keys=[(6, 9, "i")]))
    store_all(old)
    remembered = [(slot, identity) for slot, identity in old.tiers.take_changes()["disk"].items() if identity]
    told = Told()
    told.replay(old.take_events())
    below = {key: content for key, content in told.blocks.items() if key[0] == "STORAGE"}
    new = make_manager(tier, hash_algorithm=names)
    assert new.tiers.restore("disk", remembered) == len(below) == 4
    told = Told()
    told.replay(new.take_events())
    assert told.blocks == below == cached(new)


def test_a_hash_function_that_raises_harms_nothing():
    """Stores hash nothing. A restore tries all names before it changes anything."""
    fails = False

    def digest(preimage: bytes) -> bytes:
        if fails:
            raise ZeroDivisionError
        return VllmHashScheme("xxhash").hash_function(preimage)

    tier = Tier("disk", 8, 100, is_persistent=True)
    manager = make_manager(tier, hash_algorithm=digest)
    manager.free(run(manager, "a", range(13)))
    fails = True
    store_all(manager)
    assert [event.medium for event in manager.take_events()] == ["GPU", "STORAGE"]
    remembered = [*manager.tiers.take_changes()["disk"].items()]
    fails = False
    other = make_manager(tier, hash_algorithm=digest)
    fails = True
    with pytest.raises(ZeroDivisionError):
        other.tiers.restore("disk", remembered)
    assert other.take_events() == [] and other.tiers.take_changes() == {"disk": {}}
    fails = False
    assert other.tiers.restore("disk", remembered) == 3
    assert len(other.take_events()) == 1


def test_keys_that_cannot_be_read_are_no_names():
    tier = Tier("disk", 8, 100, is_persistent=True)
    old = make_manager(tier)
    old.free(run(old, "a", range(9), salt="s"))
    store_all(old)
    remembered = [*old.tiers.take_changes()["disk"].items()]
    _, first = remembered[0]
    first.extra_keys = b"\xff" + first.extra_keys
    new = make_manager(tier, hash_algorithm="vllm:sha256")
    assert new.tiers.restore("disk", remembered) == 0 and new.take_events() == []


@pytest.mark.parametrize(
    "groups",
    [
        [FullAttention(2), SlidingWindow(2, 4)],
        [FullAttention(2), FullAttention(4), SlidingWindow(2, 6)],
        [FullAttention(4), SlidingWindow(2, 4), SlidingWindow(1, 1)],
    ],
)
def test_what_a_tier_of_several_groups_holds_can_be_said_at_once(groups):
    tiers = [Tier("host", 60, 100, store="computed", window_store_tokens=2)]
    machine = TierMachine(1, 60, None, tiers, groups=groups, enable_events=ALL)
    groups_told = set()
    traffic = machine.manager._transfers  # noqa: SLF001
    for _ in range(20):
        machine.walk(20)
        (pool,) = traffic.pools
        traffic.note_restored(pool)
        told = Told()
        told.replay(machine.manager.take_events())
        assert told.blocks == cached_in(pool.index, "CPU")
        groups_told |= {group for _, group, _ in told.blocks}
    assert groups_told == set(range(len(groups)))


def test_nothing_is_said_that_nobody_asked_for():
    manager = make_manager(Tier("host", 8, 100), enable_events=True)
    for name in "ab":
        manager.free(run(manager, name, range(13)))
        store_all(manager)
    assert {event.medium for event in manager.take_events()} == {"GPU"}
    assert not manager._transfers.pools[0].index.needs_digests  # noqa: SLF001
    manager = make_manager(Tier("host", 8, 100), enable_events=EventOptions(tiers=True))
    for name in "ab":
        manager.free(run(manager, name, range(13)))
    assert not any(isinstance(event, BlocksHit) for event in manager.take_events())


def test_media_differ():
    tiers = [Tier("one", 8, 100), Tier("two", 8, 100)]
    with pytest.raises(
        InvalidArgumentError, match=r"tiers: expected media of their own .* \['GPU', 'CPU'\], got 'CPU'"
    ):
        make_manager(*tiers)
    with pytest.raises(InvalidArgumentError, match="got 'GPU'"):
        make_manager(Tier("one", 8, 100, medium="GPU"))
    make_manager(*tiers, enable_events=True)
    for medium in ("", 3, "\ud800"):
        with pytest.raises(InvalidArgumentError, match="Tier: medium"):
            Tier("one", 8, 100, medium=medium)
