"""`HashScheme`: the digests of blocks, from the hash function and the format of preimages."""

import hashlib
from collections.abc import Callable
from struct import pack
from typing import Any

from kvblocks.arguments import shown
from kvblocks.closed import Closed
from kvblocks.errors import InvalidArgumentError

HashFunction = Callable[[bytes], bytes]
"""Maps a preimage to a digest. It must be pure and always return the same number of bytes, at least one."""


def sha256_digest(preimage: bytes) -> bytes:
    """Return the 32-byte SHA-256 of `preimage`."""
    return hashlib.sha256(preimage).digest()


def check_digest(digest: Any, num_bytes: int | None) -> bytes:
    """Return `digest` if it has `num_bytes` bytes (None: any number but 0), else raise InvalidArgumentError."""
    if type(digest) is not bytes or not digest:
        raise InvalidArgumentError(f"hash function: expected it to return bytes, at least one; got {shown(digest)}")
    if num_bytes is not None and len(digest) != num_bytes:
        raise InvalidArgumentError(f"hash function: expected {num_bytes} bytes as before, got {len(digest)}")
    return digest


def make_preimage(parent_digest: bytes, extra_keys: bytes, tokens: bytes) -> bytes:
    """Return the preimage of a block, which its digest is the hash of.

    parent_digest: the parent block's digest, b"" for a first block. extra_keys: the block's encoded extra keys, b"" for
    none. tokens: the block's token ids, packed as little-endian u32.
    """
    return b"".join((pack("<I", len(parent_digest)), parent_digest, pack("<I", len(extra_keys)), extra_keys, tokens))


class HashScheme(Closed):
    """How the digests of blocks are computed. This class hashes preimages in format 1.

    num_digest_bytes: length of a digest. are_unique: whether two prefixes never have the same digest, unless the hash
    function is broken. `kvblocks.hashing.vllm` derives another scheme from this class.
    """

    def __init__(self, hash_function: HashFunction, num_digest_bytes: int, *, are_unique: bool = True) -> None:
        self.hash_function: Callable[[bytes], Any] = hash_function
        self.num_digest_bytes = num_digest_bytes
        self.are_unique = are_unique

    def chain(
        self,
        parent_digest: bytes,
        tokens: bytearray | memoryview,
        extra_keys: dict[int, bytes] | None,
        first_keys: bytes | None,  # noqa: ARG002  # the first block's digest covers them
        block_bytes: int,
        blocks: range,
    ) -> bytearray:
        """Return the digests of `blocks`, one after the other in one buffer. Changes nothing. O(blocks).

        tokens: a sequence's packed tokens, `block_bytes` bytes for each block. blocks: indices of the blocks to hash.
        parent_digest: the digest of the block before them, b"" for none. extra_keys: encoded, by block. first_keys: the
        keys of the prefix's first block, which may come long before `blocks`.
        """
        keys, size, packed = extra_keys or {}, block_bytes, bytearray()
        previous = parent_digest
        for block in blocks:
            preimage = make_preimage(previous, keys.get(block, b""), bytes(tokens[block * size : (block + 1) * size]))
            previous = check_digest(self.hash_function(preimage), self.num_digest_bytes)
            packed += previous
        return packed
