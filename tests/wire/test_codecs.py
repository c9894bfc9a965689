"""Payloads: byte for byte those of the engines' own structs. Unknown fields are kept, malformed payloads refused."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks import InvalidArgumentError
from kvblocks.wire import (
    CODECS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    MalformedFrameError,
    UnknownEvent,
    decode,
)
from kvblocks.wire.codecs import MAX_PAYLOAD_BYTES, get_codec

# Made by msgspec from the engines' own classes: vLLM 0.33.0, 0.23.0 and 0.11.0, SGLang 0.5.23.
GOLDEN = {
    "vllm": (
        "93cb3ff800000000000093de000ea474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfffffffffffffffff07"
        "b1706172656e745f626c6f636b5f68617368c4200101010101010101010101010101010101010101010101010101010101010101a9746f"
        "6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e"
        "616d65a16caa65787472615f6b6579739293a16c92a3696d67fda473616c74c0a967726f75705f69647801b26b765f63616368655f7370"
        "65635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f7740aa7365"
        "7373696f6e5f6964a173b36c6f6f6b61686561645f746f6b656e5f696473929105910684a474797065ac426c6f636b52656d6f766564ac"
        "626c6f636b5f6861736865739107a66d656469756da3475055a967726f75705f6964780181a474797065b0416c6c426c6f636b73436c65"
        "6172656402"
    ),
    "vllm, little": (
        "93cb3ff800000000000093de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e745f62"
        "6c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f696403a66d656469756dc0a96c6f"
        "72615f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d656469756dc081a4747970"
        "65b0416c6c426c6f636b73436c6561726564c0"
    ),
    "sglang": (
        "93cb3ff8000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392ff07b1706172656e745f626c"
        "6f636b5f68617368fba9746f6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d65646975"
        "6daa4350555f50494e4e4544aa63616368655f73616c74a473616c74aa73657373696f6e5f6964a173a96c6f72615f6e616d65a16c83a4"
        "74797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391f9a66d656469756da347505581a474797065b0416c6c426c"
        "6f636b73436c656172656402"
    ),
    "sglang, little": (
        "93cb3ff80000000000009386a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e745f626c6f"
        "636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f6964c082a474797065ac426c6f636b52"
        "656d6f766564ac626c6f636b5f686173686573910781a474797065b0416c6c426c6f636b73436c6561726564c0"
    ),
    "vllm:array": (
        "93cb3ff8000000000000939cab426c6f636b53746f72656492cfffffffffffffffff07c420010101010101010101010101010101010101"
        "010101010101010101010101010194010203ce0001117002c0a3475055a16c9293a16c92a3696d67fda473616c74c001ae736c6964696e"
        "675f77696e646f774094ac426c6f636b52656d6f7665649107a34750550191b0416c6c426c6f636b73436c656172656402"
    ),
}
ARRAYS_OF_VLLM_0_11 = (
    "93cb3ff80000000000009397ab426c6f636b53746f7265649107c09201020203c093ac426c6f636b52656d6f7665649107c091b0416c6c42"
    "6c6f636b73436c6561726564c0"
)


def golden(name: str) -> bytes:
    """The bytes of a golden payload, its maps with the shortest header.

    vLLM 0.33's class has fields enough for a map of 16 entries, so msgspec writes its header in three bytes. vLLM
    0.32 writes one, as we do.
    """
    return bytes.fromhex(GOLDEN[name]).replace(b"\xde\x00\x0e", b"\x8e").replace(b"\xde\x00\x08", b"\x88")


STORED = BlockStored(
    block_hashes=[2**64 - 1, 7],
    parent_block_hash=b"\x01" * 32,
    token_ids=[1, 2, 3, 70000],
    block_size=2,
    medium="GPU",
    lora_name="l",
    extra_keys=[("l", ["img", -3], "salt"), None],
    group_idx=1,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=64,
)
LITTLE = {"block_hashes": [7], "token_ids": [1, 2], "block_size": 2}
REMOVED = BlockRemoved(block_hashes=[7], medium="GPU", group_idx=1)
SAID = {
    "vllm": [
        msgspec.structs.replace(STORED, session_id="s", lookahead_token_ids=[[5], [6]]),
        REMOVED,
        AllBlocksCleared(),
    ],
    "vllm, little": [BlockStored(**LITTLE, lora_id=3), BlockRemoved(block_hashes=[7]), AllBlocksCleared()],
    "vllm:array": [STORED, REMOVED, AllBlocksCleared()],
    "sglang": [
        BlockStored(
            block_hashes=[-1, 7],
            parent_block_hash=-5,
            token_ids=[1, 2, 3, 70000],
            block_size=2,
            medium="CPU_PINNED",
            cache_salt="salt",
            session_id="s",
            lora_name="l",
        ),
        BlockRemoved(block_hashes=[-7], medium="GPU"),
        AllBlocksCleared(),
    ],
    "sglang, little": [BlockStored(**LITTLE), BlockRemoved(block_hashes=[7]), AllBlocksCleared()],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_payloads_are_those_of_the_engines_own_classes(name):
    batch = EventBatch(1.5, SAID[name], None if "little" in name else 2)
    codec = CODECS[name.partition(",")[0]]
    assert codec.encode(batch) == golden(name)
    assert decode(golden(name)) == decode(bytes.fromhex(GOLDEN[name])) == batch


def test_the_first_arrays_are_read_too():
    batch = decode(bytes.fromhex(ARRAYS_OF_VLLM_0_11))
    assert batch == EventBatch(1.5, SAID["vllm, little"])


hashes = st.integers(0, 2**64 - 1) | st.integers(-(2**63), -1) | st.binary(max_size=40)
texts = st.none() | st.text(max_size=5)
counts = st.none() | st.integers(0, 2**31)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
more_fields = st.none() | st.dictionaries(
    st.text(max_size=4).map(lambda text: f"x_{text}"), anything, min_size=1, max_size=3
)
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=4),
    parent_block_hash=st.none() | hashes,
    token_ids=st.lists(st.integers(0, 2**32 - 1) | st.tuples(counts.filter(bool), st.integers(0, 9)), max_size=9),
    block_size=st.integers(1, 64),
    lora_id=counts,
    medium=texts,
    lora_name=texts,
    extra_keys=st.none() | st.lists(st.none() | st.lists(anything, max_size=3).map(tuple), max_size=3),
    group_idx=counts,
    kv_cache_spec_kind=texts,
    kv_cache_spec_sliding_window=counts,
    locality=texts,
    ownership=texts,
    session_id=texts,
    lookahead_token_ids=st.none() | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2),
    cache_salt=texts,
    unknown=more_fields,
)
removed = st.builds(
    BlockRemoved, block_hashes=st.lists(hashes, max_size=4), medium=texts, group_idx=counts, unknown=more_fields
)
others = st.builds(
    lambda tag, rest: UnknownEvent(tag, rest | {"type": tag}),
    st.text(max_size=6).map(lambda text: f"New{text}"),
    st.dictionaries(st.text(max_size=3), anything, max_size=3),
)
batches = st.builds(
    EventBatch,
    st.floats(allow_nan=False),
    st.lists(stored | removed | others | st.builds(AllBlocksCleared, unknown=more_fields), max_size=4),
    counts,
    st.lists(anything, max_size=2).map(tuple),
)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@given(batch=batches)
def test_whatever_is_said_survives_in_maps(name, batch):
    payload = CODECS[name].encode(batch)
    assert decode(payload) == batch
    assert CODECS[name].encode(decode(payload)) == payload


@given(batch=batches, tail=st.lists(anything, max_size=2))
def test_whatever_is_said_survives_in_arrays(batch, tail):
    def fit(event):
        if isinstance(event, UnknownEvent):
            return UnknownEvent(event.type, [event.type, event.content])
        unplaced = {"cache_salt": None} if isinstance(event, BlockStored) else {}
        return msgspec.structs.replace(event, unknown={"": tail} if tail else None, **unplaced)

    batch = msgspec.structs.replace(batch, events=[fit(event) for event in batch.events])
    payload = CODECS["vllm:array"].encode(batch)
    assert decode(payload) == batch
    assert CODECS["vllm:array"].encode(decode(payload)) == payload


def test_arrays_refuse_what_they_have_no_place_for():
    for event in (BlockStored(**LITTLE, cache_salt="s"), msgspec.structs.replace(REMOVED, unknown={"new": 1})):
        with pytest.raises(InvalidArgumentError, match="has a place for"):
            CODECS["vllm:array"].encode(EventBatch(0.0, [event]))


def test_unknown_events_are_counted():
    batch = decode(msgspec.msgpack.encode([1, [["Moved", 1], {"type": "Pinned", "x": 2}, ["AllBlocksCleared"]], 0]))
    assert batch.num_unknown == 2
    assert [event.type for event in batch.events if isinstance(event, UnknownEvent)] == ["Moved", "Pinned"]


MALFORMED = [
    b"",
    b"\x93",
    b"\xc1",
    b"\x91" * 100_000,  # nested too deep
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 elements, none of which came
    b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff\xc0",
    b"\xdf\xff\xff\xff\xff\x00",
    b"\x92\xcb" + bytes(8) + b"\x91\x81\xa4type\xa1\xff",  # no UTF-8
    bytes(MAX_PAYLOAD_BYTES + 1),
    *(
        msgspec.msgpack.encode(content)
        for content in (
            None,
            {"ts": 1.0},
            [],
            [1.0],
            [1.0, None],
            [1.0, {}],
            ["1", []],
            [True, []],
            [1.0, [], "0"],
            [1.0, [], True],
            [1.0, [None]],
            [1.0, [[]]],
            [1.0, [[7]]],
            [1.0, [{}]],
            [1.0, [{"type": None}]],
            [1.0, [{"type": "BlockStored"}]],
            [1.0, [{"type": "BlockRemoved", "block_hashes": None}]],
            [1.0, [{"type": "BlockRemoved", "block_hashes": ["AAAA"]}]],  # base64, to msgspec
            [1.0, [{"type": "BlockRemoved", "block_hashes": [1.0]}]],
            [1.0, [{"type": "BlockRemoved", "block_hashes": [True]}]],
            [1.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": 1}]],
            [1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": ["1"], "block_size": 1}]],
            [1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": None}]],
            [1.0, [["BlockStored", [1], None, [1]]]],
        )
    ),
]


@pytest.mark.parametrize("payload", MALFORMED, ids=lambda payload: repr(payload[:24]))
def test_what_is_malformed_is_one_clear_error(payload):
    with pytest.raises(MalformedFrameError, match="expected"):
        decode(payload)


def test_no_byte_that_is_changed_or_cut_raises_another_error():
    random = Random(1)
    for name in GOLDEN:
        payload = golden(name)
        for number in range(len(payload)):
            changed = bytearray(payload)
            changed[number] = random.randrange(256)
            for given_bytes in (bytes(changed), payload[:number]):
                try:
                    batch = decode(given_bytes)
                except MalformedFrameError:
                    continue
                assert isinstance(batch.ts, float)


@pytest.mark.parametrize("name", ["", "vLLM", None, 1])
def test_codecs_go_by_their_names(name):
    with pytest.raises(InvalidArgumentError, match="'vllm' or 'vllm:array' or 'sglang'"):
        get_codec(name)


def test_an_array_has_no_place_for_a_field_without_a_name():
    said = decode(msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared", "": 5}], 0]))
    with pytest.raises(InvalidArgumentError, match="fields that an array"):
        CODECS["vllm:array"].encode(said)
