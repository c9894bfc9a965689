"""kvblocks' records as records of the wire: nothing is lost, and names are as each engine writes them."""

import pytest

import kvblocks
from kvblocks import (
    BlocksHit,
    EventOptions,
    FullAttention,
    InvalidArgumentError,
    KVCacheManager,
    Sequence,
    SlidingWindow,
    Tier,
)
from kvblocks.wire import CODECS, AllBlocksCleared, BlockRemoved, BlockStored, Converter, EventBatch, decode

IMAGE = [(3, 9, "cat"), (4, 6, b"e" * 40)]


def some_events(groups=None) -> list[kvblocks.CacheEvent]:
    """Events of a little manager: stored in two steps, removed, cleared."""
    options = {"groups": groups} if groups else {"block_size": 4}
    manager = KVCacheManager(12, **options, enable_events=True, hash_algorithm="sha256")
    for number in range(3):
        keys = {"salt": "s", "lora": "l", "extra_keys": IMAGE} if number == 1 else {}
        sequence = Sequence(f"r{number}", range(100 * number, 100 * number + 17), **keys)
        manager.allocate_slots(sequence, 8)
        manager.allocate_slots(sequence, 9)
        manager.free(sequence)
    manager.reset_prefix_cache()
    return manager.take_events()


def low(digest: bytes) -> int:
    return int.from_bytes(digest, "big") & (2**64 - 1)


def test_each_record_says_what_kvblocks_said():
    events = some_events()
    kinds = [type(event) for event in events]
    assert {kvblocks.BlockStored, kvblocks.BlockRemoved, kvblocks.AllBlocksCleared} == set(kinds)
    for event, said in zip(events, Converter().convert(events), strict=True):
        if isinstance(event, kvblocks.AllBlocksCleared):
            assert said == AllBlocksCleared()
            continue
        assert said.block_hashes == [low(digest) for digest in event.block_hashes]
        assert (said.medium, said.group_idx) == ("GPU", 0)
        if isinstance(event, kvblocks.BlockStored):
            parent = event.parent_block_hash
            assert said.parent_block_hash == (None if parent is None else low(parent))
            assert said.token_ids == event.token_ids and said.block_size == 4 and said.lora_name == event.lora
            assert (said.kv_cache_spec_kind, said.kv_cache_spec_sliding_window) == ("full_attention", None)


def test_extra_keys_stand_by_their_blocks_in_vllms_order():
    said = [event for event in Converter().convert(some_events()) if isinstance(event, BlockStored)]
    keys = [key for event in said if event.lora_name for key in event.extra_keys or ()]
    digest = b"e" * 32
    assert keys == [("l", ("cat", 3), "s"), ("l", ("cat", -1), digest), ("l", ("cat", -5)), ("l",)]
    assert all(event.extra_keys == [None] * len(event.block_hashes) for event in said if not event.lora_name)


@pytest.mark.parametrize("form", ["u64", "i64", "bytes"])
def test_hashes_are_written_as_asked(form):
    events = some_events()
    digests = [digest for event in events if isinstance(event, kvblocks.BlockStored) for digest in event.block_hashes]
    said = Converter(hash_form=form).convert(events)
    names = [name for event in said if isinstance(event, BlockStored) for name in event.block_hashes]
    expected = {
        "bytes": digests,
        "u64": [low(digest) for digest in digests],
        "i64": [int.from_bytes(digest[-8:], signed=True) for digest in digests],
    }
    assert names == expected[form] and (form == "bytes" or min(names) < 0 or form == "u64")
    payload = CODECS["vllm"].encode(EventBatch(1.0, said, 0))
    assert CODECS["vllm"].encode(decode(payload)) == payload


def test_sglangs_records_have_sglangs_fields():
    said = Converter("sglang").convert(some_events())
    stored = [event for event in said if isinstance(event, BlockStored)]
    assert min(name for event in stored for name in event.block_hashes) < 0
    assert {event.cache_salt for event in stored} == {None, "s"}
    assert all(event.group_idx is None for event in said if isinstance(event, BlockStored | BlockRemoved))
    assert all(event.extra_keys is None for event in stored)


def test_groups_are_said_with_their_kinds():
    events = some_events([FullAttention(4), SlidingWindow(4, 6)])
    said = [event for event in Converter().convert(events) if isinstance(event, BlockStored)]
    found = {(event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in said}
    assert found == {(0, "full_attention", None), (1, "sliding_window", 6)}
    with pytest.raises(InvalidArgumentError, match="group_idx: expected None, since SGLang's events have no groups"):
        Converter("sglang").convert(events)


@pytest.mark.parametrize(("codec", "host", "disk"), [("vllm", "CPU", "STORAGE"), ("sglang", "CPU_PINNED", "DISK")])
def test_tiers_are_said_by_the_formats_words(codec, host, disk):
    below = [Tier("host", 8, 100), Tier("disk", 8, 100, is_persistent=True), Tier("far", 8, 100, medium="FAR")]
    manager = KVCacheManager(8, 4, tiers=below, enable_events=EventOptions(tiers=True, hits=True))
    for name in ("a", "b"):
        sequence = Sequence(name, range(9))
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        manager.free(sequence)
        while transfers := manager.tiers.take_transfers():
            for transfer in transfers:
                manager.tiers.complete(transfer, ok=True)
    events = manager.take_events()
    assert any(isinstance(event, BlocksHit) for event in events)
    said = Converter(codec).convert(events)
    assert {event.medium for event in said} == {"GPU", host, disk, "FAR"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"codec": "other"}, "codec: expected 'vllm'"),
        ({"hash_form": "u32"}, "hash_form: expected 'u64'"),
        ({"codec": "sglang", "hash_form": "bytes"}, "hash_form: expected"),
    ],
)
def test_options_are_checked(options, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        Converter(**options)


def test_only_kvblocks_records_are_taken():
    with pytest.raises(InvalidArgumentError, match="event: expected BlockStored"):
        Converter().convert([AllBlocksCleared()])
