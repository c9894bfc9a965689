"""`Sealer`: makes the record that is kept beside a block's bytes, and checks bytes that are read against it.

The record of a block, format 1; integers are little-endian and unsigned:

    record   = head | checksum | preimage
    head     = magic (8 bytes) | u32 format | u32 len(preimage) | u64 len(payload) | fingerprint (32 bytes)
    checksum = 32 bytes over head | preimage | payload: xxh3_128 and zeros, or HMAC-SHA-256 where there is a secret
    preimage = of the block's identity: its parent's digest, its keys and its tokens, literally

A record and a payload thus show by themselves which block they are. Nothing else needs to be trusted: neither the index
that leads to them, nor the place where they are kept.
"""

import hmac
from struct import Struct
from typing import Any, Final

from xxhash import xxh3_128

from kvblocks.arguments import Given, is_a, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.identity import BlockIdentity

FORMAT: Final = 1  # raise it with every change of what is written
NUM_FINGERPRINT_BYTES: Final = 32
NUM_CHECKSUM_BYTES: Final = 32
LEAST_SECRET_BYTES: Final = 16

_MAGIC: Final = b"kvblock\n"
_HEAD: Final = Struct("<8sIIQ32s")
NUM_RECORD_BYTES: Final = _HEAD.size + NUM_CHECKSUM_BYTES  # without the preimage

Payload = bytes | bytearray | memoryview


class Sealer:
    """Makes the records of blocks, and checks them.

    fingerprint: 32 bytes that name what made the blocks' bytes: the model, its weights, the dtype and layout of KV.
    secret: at least 16 bytes; then nobody without it can make a record that `opens` accepts. None: records show damage
    only. Raises InvalidArgumentError.
    """

    def __init__(self, fingerprint: bytes, secret: bytes | None = None) -> None:
        self.fingerprint = _check_bytes("fingerprint", f"{NUM_FINGERPRINT_BYTES} bytes", fingerprint)
        if len(self.fingerprint) != NUM_FINGERPRINT_BYTES:
            raise _wrong_number("fingerprint", str(NUM_FINGERPRINT_BYTES), self.fingerprint)
        self._secret: bytes | None = None
        if secret is not None:
            self._secret = _check_bytes("secret", f"at least {LEAST_SECRET_BYTES} bytes, or None", secret)
            if len(self._secret) < LEAST_SECRET_BYTES:
                raise _wrong_number("secret", f"at least {LEAST_SECRET_BYTES}", self._secret)

    def seal(self, identity: BlockIdentity, payload: Payload) -> bytes:
        """Return the record of a block: `NUM_RECORD_BYTES` bytes, and those of its preimage. O(bytes)."""
        preimage = identity.preimage()
        head = self._head(preimage, payload)
        return head + self._checksum(head, preimage, payload) + preimage

    def opens(self, record: Payload, identity: BlockIdentity, payload: Payload) -> bool:
        """Whether a record is that of this block with these bytes. Bytes after the record are ignored. O(bytes).

        False for another format, fingerprint, secret or identity, and for any byte that differs from what was sealed.
        """
        given = bytes(record)
        preimage = identity.preimage()
        head = self._head(preimage, payload)
        found = given[: len(head)], given[NUM_RECORD_BYTES : NUM_RECORD_BYTES + len(preimage)]
        if found != (head, preimage):
            return False
        return hmac.compare_digest(given[len(head) : NUM_RECORD_BYTES], self._checksum(head, preimage, payload))

    def _head(self, preimage: bytes, payload: Payload) -> bytes:
        return _HEAD.pack(_MAGIC, FORMAT, len(preimage), memoryview(payload).nbytes, self.fingerprint)

    def _checksum(self, head: bytes, preimage: bytes, payload: Payload) -> bytes:
        if self._secret is None:
            plain = xxh3_128(head + preimage)
            plain.update(payload)
            return plain.digest().ljust(NUM_CHECKSUM_BYTES, b"\0")
        keyed = hmac.new(self._secret, head + preimage, "sha256")
        keyed.update(payload)
        return keyed.digest()


def _check_bytes(name: str, expected: str, value: Given[bytes]) -> bytes:
    given: Any = value
    if not is_a(given, bytes):
        raise wrong(name, expected, given if name != "secret" else type(given))
    own: bytes = given
    return own


def _wrong_number(name: str, expected: str, value: bytes) -> InvalidArgumentError:
    """Return the error that says how many bytes were given, without showing them."""
    return InvalidArgumentError(f"{name}: expected {expected} bytes, got {len(value)}")
