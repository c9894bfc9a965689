"""The digests' format: pinned, the same in every process, and unambiguous: equal bytes mean equal inputs."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvblocks import InvalidArgumentError, KVCacheManager, Sequence
from kvblocks.hashing.by_name import get_hash_scheme
from kvblocks.hashing.extra_keys import decode_extra_keys, encode_extra_keys

GOLDEN = Path(__file__).with_name("golden_digests.json")


def digests(case: dict[str, Any]) -> list[str]:
    """The digests of a case's blocks, as hex, as a manager of its own computes them."""
    keys = [
        (start, end, bytes.fromhex(key["bytes"]) if isinstance(key, dict) else key) for start, end, key in case["keys"]
    ]
    sequence = Sequence("s", case["tokens"], salt=case["salt"], lora=case["lora"], extra_keys=keys)
    manager = KVCacheManager(16, case["block_size"], hash_algorithm=case["hash_algorithm"])
    manager.allocate_slots(sequence)
    return [block.block_hash.hex() for block in sequence.blocks if block.block_hash is not None]


def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
    return cases


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_golden_vectors(case: dict[str, Any]) -> None:
    assert digests(case) == case["digests"]


def test_golden_vectors_follow_the_documented_format() -> None:
    """One of them computed by hand, with nothing but the standard library."""
    case = next(case for case in golden_cases() if case["name"] == "sha256, everything")
    little = lambda number, size: number.to_bytes(size, "little", signed=number < 0)  # noqa: E731
    entry = lambda kind, span, payload: bytes([kind]) + span + little(len(payload), 4) + payload  # noqa: E731
    extra = entry(1, b"", b"tenant-a") + entry(2, b"", b"adapter") + entry(3, little(2, 8) + little(4, 8), b"image-1")
    tokens = b"".join(little(token, 4) for token in case["tokens"])
    first = sha256(little(0, 4) + little(len(extra), 4) + extra + tokens[:16]).digest()
    extra = entry(3, little(-2, 8) + little(4, 8), b"image-1") + entry(4, little(3, 8) + little(1, 8), b"\x00\xff")
    second = sha256(little(32, 4) + first + little(len(extra), 4) + extra + tokens[16:32]).digest()
    assert [first.hex(), second.hex()] == case["digests"][:2]


def test_digests_are_the_same_in_another_process() -> None:
    program = "import sys, json, test_hashing as t; print(json.dumps([t.digests(case) for case in t.golden_cases()]))"
    for seed in ("1", "4242"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(GOLDEN.parent), *sys.path]),
        }
        output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert json.loads(output.stdout) == [case["digests"] for case in golden_cases()]


NAMES = st.one_of(st.none(), st.text(min_size=1, max_size=3))
POSITION_KEYS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(1, 4),
        st.one_of(st.text(min_size=1, max_size=2), st.binary(min_size=1, max_size=2)),
    ).map(lambda key: (key[0], key[0] + key[1], key[2])),
    max_size=2,
    unique=True,
)
KEYS = st.tuples(NAMES, NAMES, POSITION_KEYS)


@given(KEYS, KEYS)
def test_two_sets_of_keys_never_look_alike(one: Any, other: Any) -> None:
    same = one[:2] == other[:2] and set(one[2]) == set(other[2])
    assert (encode_extra_keys(*one, 16) == encode_extra_keys(*other, 16)) == same


@given(KEYS.filter(lambda keys: len(keys[2]) == 2), st.integers(1, 4))
def test_the_order_of_position_keys_makes_no_difference(keys: Any, block_size: int) -> None:
    salt, lora, position_keys = keys
    assert encode_extra_keys(salt, lora, position_keys, block_size) == encode_extra_keys(
        salt, lora, position_keys[::-1], block_size
    )


def test_kinds_of_keys_are_told_apart() -> None:
    encodings = [
        encode_extra_keys("a", None, [], 4),
        encode_extra_keys(None, "a", [], 4),
        encode_extra_keys(None, None, [(0, 1, "a")], 4),
        encode_extra_keys(None, None, [(0, 1, b"a")], 4),
        encode_extra_keys(None, None, [(0, 2, "a")], 4),
        encode_extra_keys(None, None, [(1, 2, "a")], 4),
        encode_extra_keys("ab", None, [], 4),
        encode_extra_keys("a", "b", [], 4),
    ]
    assert len({encoding[0] for encoding in encodings}) == len(encodings)


@given(KEYS, st.integers(1, 4))
def test_decoding_gives_back_what_was_encoded(keys: Any, block_size: int) -> None:
    salt, lora, position_keys = keys
    found: set[Any] = set()
    for block, encoded in encode_extra_keys(salt, lora, position_keys, block_size).items():
        decoded = decode_extra_keys(encoded)
        root = [("salt", None, salt)] * (salt is not None) + [("lora", None, lora)] * (lora is not None)
        assert [key for key in decoded if key[0] != "key"] == (root if block == 0 else [])
        spans = [(block * block_size + span[0], span[1], key) for _, span, key in decoded if span is not None]
        touching = [key for key in position_keys if key[0] < (block + 1) * block_size and key[1] > block * block_size]
        assert sorted(spans, key=repr) == sorted([(start, end - start, key) for start, end, key in touching], key=repr)
        found |= set(spans)
    assert found == {(start, end - start, key) for start, end, key in position_keys}
    assert decode_extra_keys(b"") == []


@given(KEYS, st.data())
def test_decoding_accepts_nothing_else(keys: Any, data: st.DataObject) -> None:
    """Decoded keys that are encoded again give the same bytes, even if the bytes were tampered with."""
    encoded = data.draw(st.sampled_from([b"", *encode_extra_keys(*keys, 4).values()]))
    for _ in range(data.draw(st.integers(0, 2))):
        offset = data.draw(st.integers(0, len(encoded)))
        encoded = encoded[:offset] + data.draw(st.binary(max_size=2)) + encoded[offset + data.draw(st.integers(0, 2)) :]
    try:
        decoded = decode_extra_keys(encoded)
    except InvalidArgumentError:
        return
    again = b""
    for kind, span, key in decoded:
        payload = key if isinstance(key, bytes) else key.encode()
        number = {"salt": 1, "lora": 2, "key": 4 if isinstance(key, bytes) else 3}[kind]
        again += bytes([number]) + (b"" if span is None else pack("<qQ", *span)) + pack("<I", len(payload)) + payload
    assert again == encoded


def test_a_position_key_goes_to_the_blocks_that_its_span_touches() -> None:
    assert sorted(encode_extra_keys(None, None, [(3, 9, "image")], 4)) == [0, 1, 2]
    assert sorted(encode_extra_keys(None, None, [(4, 8, "image")], 4)) == [1]
    assert sorted(encode_extra_keys("salt", "lora", [], 4)) == [0]


SALT = encode_extra_keys("a", None, [], 4)[0]
LORA = encode_extra_keys(None, "a", [], 4)[0]
SPAN = encode_extra_keys(None, None, [(1, 3, "a")], 4)[0]
EARLIER = encode_extra_keys(None, None, [(0, 3, b"a")], 4)[0]


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (SALT[:-1], "expected 1 bytes from 5 on, got b''"),
        (SPAN[:10], "expected 16 bytes from 1 on"),
        (SALT + b"\x01", "expected 4 bytes from 7 on"),
        (b"\x05" + SALT[1:], "expected a kind from 1 to 4, got 5"),
        (b"\x00" + SALT[1:], "expected a kind from 1 to 4, got 0"),
        (SALT[:-1] + b"\xff", "expected UTF-8"),
        (SALT + SALT, "expected salt, LoRA, then"),
        (LORA + SALT, "expected salt, LoRA, then"),
        (SPAN + LORA, "expected salt, LoRA, then"),
        (SPAN + EARLIER, "spans by position"),
        (SPAN.replace(b"\2", b"\0", 1), "non-empty spans"),
        (SPAN.replace(b"\1" + bytes(7), b"\xfe" + b"\xff" * 7, 1), "non-empty spans"),
    ],
)
def test_bytes_that_encode_no_keys_are_refused(encoded: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        decode_extra_keys(encoded)


def test_keys_that_are_given_twice_are_decoded_twice() -> None:
    encoded = encode_extra_keys("s", "l", [(1, 3, "a"), (0, 3, b"a"), (1, 3, "a")], 4)[0]
    assert decode_extra_keys(encoded)[2:] == [("key", (0, 3), b"a"), ("key", (1, 2), "a"), ("key", (1, 2), "a")]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("md5", "expected 'xxh3_128', 'sha256', 'vllm:…' or a callable, got 'md5'"),
        (7, "expected a name or a callable, got int"),
        (lambda preimage: "text", "expected it to return bytes"),
        (lambda preimage: b"", "at least one"),
    ],
)
def test_bad_algorithms(algorithm: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        get_hash_scheme(algorithm)


def test_a_digest_of_another_length_is_refused() -> None:
    manager = KVCacheManager(4, 2, hash_algorithm=lambda preimage: b"x" * (1 + len(preimage) % 2))
    sequence = Sequence("s", [1, 2, 3, 4], salt="odd")
    manager.allocate_slots(sequence)
    with pytest.raises(InvalidArgumentError, match="expected 1 bytes as before, got 2"):
        _ = sequence.blocks[0].block_hash
