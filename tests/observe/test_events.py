"""Event records: their further fields, hits, and pickles of older versions."""

import pickle

import pytest

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
)

# Pickled when BlockStored ended with `lora` and BlockRemoved with `group_idx`.
OLD_STORED = (
    b"\x80\x04\x95S\x00\x00\x00\x00\x00\x00\x00\x8c\x0fkvblocks.events\x94\x8c\x0bBlockStored\x94\x93\x94)\x81\x94]\x94"
    b"(C\x01a\x94\x85\x94NC\x04\x01\x00\x00\x00\x94K\x01K\x00C\x01k\x94\x86\x94\x85\x94K\x02K\x07\x85\x94\x8c\x01s\x94"
    b"\x8c\x01l\x94eb."
)
OLD_REMOVED = (
    b"\x80\x04\x954\x00\x00\x00\x00\x00\x00\x00\x8c\x0fkvblocks.events\x94\x8c\x0cBlockRemoved\x94\x93\x94)\x81\x94]\x94"
    b"(C\x01a\x94\x85\x94K\x02eb."
)
OLD_CLEARED = (
    b"\x80\x04\x95.\x00\x00\x00\x00\x00\x00\x00\x8c\x0fkvblocks.events\x94\x8c\x10AllBlocksCleared\x94\x93\x94)\x81\x94"
    b"]\x94b."
)


def start(manager, name, tokens, **keys):
    sequence = Sequence(name, tokens, **keys)
    manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
    return sequence


def test_old_pickles_can_be_read():
    stored = BlockStored((b"a",), None, b"\1\0\0\0", 1, ((0, b"k"),), 2, (7,), "s", "l")
    assert pickle.loads(OLD_STORED) == stored
    assert (stored.kind, stored.window, stored.medium, stored.sequence_id) == (None, None, "GPU", None)
    assert pickle.loads(OLD_REMOVED) == BlockRemoved((b"a",), 2)
    assert pickle.loads(OLD_CLEARED) == AllBlocksCleared()


@pytest.mark.parametrize(
    "record",
    [
        BlockStored((b"a",), b"b", b"\1\0\0\0", 1, kind="sliding_window", window=3, medium="CPU", sequence_id=(1, "x")),
        BlockRemoved((b"a", b"b"), medium="STORAGE"),
        BlocksHit((b"a",), 1, sequence_id="y"),
        AllBlocksCleared(),
    ],
)
def test_records_can_be_pickled(record):
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_record_says_whose_call_it_was():
    manager = KVCacheManager(32, 2, enable_events=True)
    one, two = start(manager, "one", range(5)), start(manager, ("two", 2), range(7))
    manager.append_step([one, two], [9, 7])
    late = Sequence("late", range(20, 26))
    manager.allocate_slots(late, delay_cache_blocks=True)
    manager.cache_blocks(late, 5)
    events = manager.take_events()
    assert [(e.sequence_id, len(e.block_hashes)) for e in events] == [
        ("one", 2),
        (("two", 2), 1),
        ("one", 1),
        (("two", 2), 1),
        ("late", 2),
    ]
    assert {(e.kind, e.window, e.medium, e.group_idx) for e in events} == {("full_attention", None, "GPU", None)}


@pytest.mark.parametrize("groups", [[FullAttention(2), SlidingWindow(2, 3), FullAttention(4)], [SlidingWindow(2, 3)]])
def test_a_record_says_how_its_group_attends(groups):
    manager = KVCacheManager(64, groups=groups, enable_events=EventOptions(hits=True))
    for name in ("one", "two"):
        start(manager, name, range(13))
    events = manager.take_events()
    kinds = {
        event.group_idx: (event.kind, event.window, event.sequence_id)
        for event in reversed(events)
        if isinstance(event, BlockStored)
    }
    assert kinds == {
        number: (*(("full_attention", None) if isinstance(group, FullAttention) else ("sliding_window", 3)), "one")
        for number, group in enumerate(groups)
    }
    stored = {(e.group_idx, name) for e in events if isinstance(e, BlockStored) for name in e.block_hashes}
    hits = [event for event in events if isinstance(event, BlocksHit)]
    assert {event.group_idx for event in hits} == set(kinds) and {event.sequence_id for event in hits} == {"two"}
    assert all((event.group_idx, name) in stored for event in hits for name in event.block_hashes)


def test_hits_are_told_to_who_asks():
    manager = KVCacheManager(32, 2, enable_events=EventOptions(hits=True))
    one = start(manager, "one", range(7))
    start(manager, "other", range(30, 34))
    two = Sequence("two", range(5))
    manager.allocate_slots(two, hit=manager.get_computed_blocks(two, 3))
    stored, _, hit = manager.take_events()
    assert hit == BlocksHit(stored.block_hashes[:1], sequence_id="two")
    manager.free(one)
    assert manager.take_events() == []
    for options in (True, EventOptions(tiers=True)):
        silent = KVCacheManager(32, 2, enable_events=options)
        for name in ("one", "two"):
            start(silent, name, range(7))
        assert [type(event) for event in silent.take_events()] == [BlockStored]


def test_options_are_checked():
    for given in (1, None, "hits", {"hits": True}):
        with pytest.raises(InvalidArgumentError, match="enable_events: expected True, False or EventOptions"):
            KVCacheManager(8, 2, enable_events=given)
        with pytest.raises(InvalidArgumentError, match="hits: expected True or False"):
            EventOptions(hits=given)
        with pytest.raises(InvalidArgumentError, match="tiers: expected True or False"):
            EventOptions(tiers=given)
