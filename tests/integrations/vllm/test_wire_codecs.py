"""Payloads against the installed vLLM's own classes: what they write we read, and what we write is what they write."""

import time
from random import Random
from typing import Any

import msgspec
import pytest
from vllm.distributed import kv_events
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import kvblocks
from integrations.vllm.test_events import make_requests, make_stand, random_run
from kvblocks.wire import (
    CODECS,
    BlockRemoved,
    BlockStored,
    Converter,
    EventBatch,
    MirrorClient,
    Source,
    decode,
)
from kvblocks.wire.convert import to_u64

THEIRS = msgspec.msgpack.Decoder(KVEventBatch)
NEW = {"lookahead_token_ids"}  # of vLLM 0.33
# A map of more entries has a header of three bytes, which msgspec then writes whatever it leaves out.
MOST_IN_SHORT_MAP = 15


def random_batch(random: Random) -> KVEventBatch:
    """Return a batch of vLLM's own, with all that its fields can hold."""

    def maybe(value: Any) -> Any:
        return random.choice([None, value])

    def name() -> Any:
        return random.choice([random.randbytes(32), random.getrandbits(64), random.randrange(9)])

    def stored() -> Any:
        num_blocks = random.randrange(4)
        fields = {
            "block_hashes": [name() for _ in range(num_blocks)],
            "parent_block_hash": maybe(name()),
            "token_ids": [random.randrange(2**20) for _ in range(2 * num_blocks)],
            "block_size": 2,
            "lora_id": maybe(3),
            "medium": maybe("GPU"),
            "lora_name": maybe("a"),
            "extra_keys": maybe([maybe(("a", ("image", -4), "salt", b"e" * 32)) for _ in range(num_blocks)]),
            "group_idx": maybe(1),
            "kv_cache_spec_kind": maybe("full_attention"),
            "kv_cache_spec_sliding_window": maybe(64),
            "locality": maybe("LOCAL"),
            "ownership": maybe("tier"),
            "session_id": maybe("one"),
        }
        return kv_events.BlockStored(**fields)

    def removed() -> Any:
        names = [name() for _ in range(random.randrange(4))]
        return kv_events.BlockRemoved(names, maybe("CPU"), maybe(2), maybe("REMOTE"), maybe("tier"))

    kinds = [stored, stored, removed, kv_events.AllBlocksCleared]
    return KVEventBatch(random.random(), [random.choice(kinds)() for _ in range(random.randrange(5))], maybe(3))


def encoded(theirs: KVEventBatch) -> bytes:
    """Return a payload of vLLM's, whose maps have the shortest headers."""
    payload = msgspec.msgpack.encode(theirs)
    is_long = len(kv_events.BlockStored.__struct_fields__) + 1 > MOST_IN_SHORT_MAP  # as of 0.33
    return msgspec.msgpack.encode(msgspec.msgpack.decode(payload)) if is_long else payload


def test_bytes_are_those_of_vllms_own_classes():
    random = Random(1)
    for _ in range(1000):
        theirs = random_batch(random)
        payload = encoded(theirs)
        batch = decode(payload)
        assert not batch.num_unknown and not any(event.unknown for event in batch.events)
        assert CODECS["vllm"].encode(batch) == payload
        assert [type(event).__name__ for event in batch.events] == [type(event).__name__ for event in theirs.events]


def test_we_know_their_fields_in_their_order():
    for ours, kind in ((BlockStored, kv_events.BlockStored), (BlockRemoved, kv_events.BlockRemoved)):
        known = [name for name in ours.__struct_fields__ if name in kind.__struct_fields__]
        assert known == list(kind.__struct_fields__)
        assert {*ours.__struct_fields__} - {*known} <= NEW | {"cache_salt", "unknown"}


def test_they_read_what_newer_ones_write():
    stored = BlockStored(
        block_hashes=[1], token_ids=[5, 6], block_size=2, lookahead_token_ids=[[7]], cache_salt="s", unknown={"x": [1]}
    )
    batch = EventBatch(1.0, [stored], 4, ("more",))
    (theirs,) = THEIRS.decode(CODECS["vllm"].encode(batch)).events
    assert (theirs.block_hashes, theirs.token_ids) == ([1], [5, 6])


def test_what_the_adapter_sends_is_read_and_written_alike():
    stand, events = make_stand()
    for made in make_requests():
        made.kv_cache_report_mode = "full"
        stand.cached(made)
    random_run(stand, Random(3))
    assert len(events) > 20
    payload = encoded(KVEventBatch(1.0, events, 0))
    batch = decode(payload)
    assert CODECS["vllm"].encode(batch) == payload
    assert any(event.extra_keys for event in batch.events if isinstance(event, BlockStored))


def test_low_bits_are_those_that_vllm_takes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    digest: Any = Random(1).randbytes(32)
    assert to_u64(digest) == maybe_convert_block_hash(digest)


def test_a_mirror_follows_vllms_own_publisher(monkeypatch):
    """It has no snapshots. Asked for one it answers nothing, and is followed by its replays."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    publisher = ZmqEventPublisher(2, "tcp://*:0", "tcp://*:0")  # ports of the system's choice
    stored = [kv_events.BlockStored([n], None, [n], 1, None, "GPU", None) for n in range(5)]
    for event in stored[:3]:
        publisher.publish(KVEventBatch(1.0, [event]))
    config = publisher.get_publisher_config()
    ends = [str(config.endpoint), str(config.replay_endpoint)]
    with MirrorClient({"w": Source(*ends)}, patience=0.2) as client:
        mirror, until = client.mirror, time.monotonic() + 60
        try:
            while mirror.number("w") != 2:
                assert client.receive(0.1) >= 0 and time.monotonic() < until
            publisher.publish(KVEventBatch(2.0, [*stored[3:], kv_events.BlockRemoved([0], "GPU")]))
            while mirror.number("w") != 3:
                assert client.receive(0.1) >= 0 and time.monotonic() < until
        finally:
            publisher.shutdown()
        assert mirror.is_complete("w") and mirror.places("w") == {(2, 0, "GPU"): {1, 2, 3, 4}}
        assert mirror.epoch("w") is None and mirror.find("w", [3, 4, 5], rank=2) == 2


def test_vllm_reads_what_our_publisher_says():
    events = [kvblocks.BlockStored((b"a" * 32,), None, bytes(16), 4), kvblocks.BlockRemoved((b"a" * 32,))]
    for codec in ("vllm", "sglang"):
        batch = EventBatch(1.0, Converter(codec).convert([*events, kvblocks.AllBlocksCleared()]), 4)
        if codec == "vllm":
            theirs = THEIRS.decode(CODECS[codec].encode(batch))
            assert theirs.data_parallel_rank == 4
            assert encoded(theirs) == CODECS[codec].encode(batch)
        else:  # SGLang leaves out what vLLM's class has no default for
            with pytest.raises(msgspec.ValidationError, match="missing required field"):
                THEIRS.decode(CODECS[codec].encode(batch))
