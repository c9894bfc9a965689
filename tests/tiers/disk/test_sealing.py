"""Records: what they say, byte for byte, and what doesn't open."""

import hashlib
import hmac

import pytest
import xxhash

from kvblocks import InvalidArgumentError
from kvblocks.tiers import sealing
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import NUM_RECORD_BYTES, Sealer

FINGERPRINT = bytes(range(32))
SECRET = b"0123456789abcdef"
IDENTITY = BlockIdentity(b"p" * 32, b"keys", b"tokens__")
PAYLOAD = b"payload" * 1000
HEAD = b"kvblock\n" + bytes.fromhex("01000000 34000000 581b000000000000") + FINGERPRINT
PREIMAGE = b"\x20\0\0\0" + b"p" * 32 + b"\x04\0\0\0keystokens__"


def test_a_record_is_what_the_format_says():
    record = Sealer(FINGERPRINT).seal(IDENTITY, PAYLOAD)
    checksum = xxhash.xxh3_128_digest(HEAD + PREIMAGE + PAYLOAD) + bytes(16)
    assert record == HEAD + checksum + PREIMAGE
    assert len(HEAD) + 32 == NUM_RECORD_BYTES


def test_a_record_with_a_secret_has_a_mac():
    record = Sealer(FINGERPRINT, SECRET).seal(IDENTITY, PAYLOAD)
    assert record == HEAD + hmac.digest(SECRET, HEAD + PREIMAGE + PAYLOAD, hashlib.sha256) + PREIMAGE


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_was_sealed_opens(secret, kind):
    sealer = Sealer(FINGERPRINT, secret)
    record = sealer.seal(IDENTITY, kind(PAYLOAD))
    assert sealer.opens(kind(record), IDENTITY, kind(PAYLOAD))
    assert sealer.opens(record + bytes(100), IDENTITY, PAYLOAD)


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize(
    ("parent", "keys", "tokens"),
    [
        *((b"q" * 32, b"keys", b"tokens__"), (b"p" * 32, b"kez", b"tokens__"), (b"p" * 32, b"keys", b"tokens_-")),
        *((b"", b"keys", b"tokens__"), (b"p" * 32, b"key", b"stokens__"), (b"p" * 32, b"keyst", b"okens__")),
    ],
)
def test_another_block_does_not_open(secret, parent, keys, tokens):
    sealer = Sealer(FINGERPRINT, secret)
    other = BlockIdentity(parent, keys, tokens)
    assert not sealer.opens(sealer.seal(IDENTITY, PAYLOAD), other, PAYLOAD)
    # Nor with the other's preimage in the right place: the checksum covers it.
    mixed = sealer.seal(other, PAYLOAD)[:56] + sealer.seal(IDENTITY, PAYLOAD)[56:88] + other.preimage()
    assert not sealer.opens(mixed, other, PAYLOAD)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_no_byte_may_change(secret):
    sealer = Sealer(FINGERPRINT, secret)
    record = sealer.seal(IDENTITY, PAYLOAD)
    for place in range(len(record)):
        damaged = bytearray(record)
        damaged[place] ^= 1
        assert not sealer.opens(damaged, IDENTITY, PAYLOAD), place
    for place in range(0, len(PAYLOAD), 97):
        damaged = bytearray(PAYLOAD)
        damaged[place] ^= 128
        assert not sealer.opens(record, IDENTITY, damaged), place
    assert not any(sealer.opens(record[:length], IDENTITY, PAYLOAD) for length in range(len(record)))
    assert not sealer.opens(record, IDENTITY, PAYLOAD[:-1])
    assert not sealer.opens(record, IDENTITY, PAYLOAD + b"\0")


def test_sealers_of_another_kind_do_not_open():
    sealers = [Sealer(FINGERPRINT), Sealer(bytes(32)), Sealer(FINGERPRINT, SECRET), Sealer(FINGERPRINT, SECRET + b"x")]
    for one in sealers:
        opening = [other for other in sealers if other.opens(one.seal(IDENTITY, PAYLOAD), IDENTITY, PAYLOAD)]
        assert opening == [one]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_checksum_is_of_the_fingerprint_too(secret):
    """Who changes the fingerprint of a record must make its checksum anew."""
    other = Sealer(bytes(32), secret)
    record = bytearray(Sealer(FINGERPRINT, secret).seal(IDENTITY, PAYLOAD))
    record[24:56] = bytes(32)
    assert not other.opens(record, IDENTITY, PAYLOAD)


def test_another_format_does_not_open(monkeypatch):
    record = Sealer(FINGERPRINT).seal(IDENTITY, PAYLOAD)
    monkeypatch.setattr(sealing, "FORMAT", 2)
    assert not Sealer(FINGERPRINT).opens(record, IDENTITY, PAYLOAD)


@pytest.mark.parametrize(
    ("arguments", "expected", "got"),
    [
        ((b"short",), "fingerprint: expected 32 bytes", "got 5"),
        (("f" * 32,), "fingerprint: expected 32 bytes", "got 'ffff"),
        ((None,), "fingerprint: expected 32 bytes", "got None"),
        ((FINGERPRINT, b"hush"), "secret: expected at least 16 bytes", "got 4"),
        ((FINGERPRINT, "hush" * 8), "secret: expected at least 16 bytes, or None", "got <class 'str'>"),
    ],
)
def test_bad_arguments_are_refused_and_a_secret_is_not_shown(arguments, expected, got):
    with pytest.raises(InvalidArgumentError) as caught:
        Sealer(*arguments)
    assert expected in str(caught.value) and got in str(caught.value) and "hush" not in str(caught.value)
