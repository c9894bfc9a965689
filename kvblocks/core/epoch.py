"""What all cached runs between two resets of the cache share, the chain of digests included.

A run belongs to its epoch, and a sequence to that of its start. A reset ends the epoch and with it, in O(1), whatever
was cached in it.
"""

from collections.abc import Callable
from typing import Any

from kvblocks.core.hashing import HashFunction, check_digest, make_preimage


class Epoch:
    """What all runs between two resets of the cache share. A reset ends it for all of them at once, in O(1)."""

    __slots__ = ("block_bytes", "hash_function", "is_current", "num_digest_bytes")

    def __init__(self, hash_function: HashFunction, block_bytes: int, num_digest_bytes: int) -> None:
        self.hash_function: Callable[[bytes], Any] = hash_function
        self.block_bytes = block_bytes
        self.num_digest_bytes = num_digest_bytes
        self.is_current = True

    def chain(
        self,
        parent_digest: bytes,
        tokens: bytearray | memoryview,
        extra_keys: dict[int, bytes] | None,
        first: int,
        end: int,
    ) -> bytearray:
        """Return the digests of blocks first to end - 1 of `tokens`, one after the other; changes nothing.

        parent_digest: of the block before them, b"" for none. extra_keys: encoded, by block. O(end - first).
        """
        keys, size, packed = extra_keys or {}, self.block_bytes, bytearray()
        previous = parent_digest
        for block in range(first, end):
            preimage = make_preimage(previous, keys.get(block, b""), bytes(tokens[block * size : (block + 1) * size]))
            previous = check_digest(self.hash_function(preimage), self.num_digest_bytes)
            packed += previous
        return packed
