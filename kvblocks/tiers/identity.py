"""`BlockIdentity`: what a stored block holds, in words that mean the same to every process.

A tier that outlives its manager, or that several share, keeps a block's identity beside its bytes: a chain of SHA-256
digests names what comes before it, tokens and keys say what it holds. Whoever reads the bytes compares all of it.
"""

from struct import pack, unpack
from typing import Any, Final, SupportsIndex

from kvblocks.arguments import Given, check_count, is_a, plain_bytes, wrong
from kvblocks.core.hashing import Names, make_preimage, sha256_digest

NUM_DIGEST_BYTES: Final = 32
_COLUMN_KEYS: Final = b"\0"  # no block has keys of one byte
_NUM_COLUMN_BYTES: Final = 4
_MOST_COLUMN: Final = 2 ** (8 * _NUM_COLUMN_BYTES) - 1


def identity_names() -> Names:
    """Return how a tier's index names blocks: as identities do."""
    return Names(sha256_digest, NUM_DIGEST_BYTES)


class BlockIdentity:
    """What a stored block holds.

    parent: the SHA-256 digest of the block before it, b"" for a first one. extra_keys: encoded as
    `kvblocks.hashing` says, b"" for none. tokens: its token ids as little-endian u32. column: 0 for a block of the only
    group, or of the first one with full attention. Those of other groups are numbered from 1 on by their column among
    all blocks that end in one of that group's (`groups.index`): `parent` is then the digest of that very block, which
    says it all, and they have no keys and no tokens of their own. Read-only, compared by value.
    Raises InvalidArgumentError for what isn't bytes, or a count.
    """

    __slots__ = ("column", "extra_keys", "parent", "tokens")

    def __init__(
        self, parent: Given[bytes], extra_keys: Given[bytes], tokens: Given[bytes], column: SupportsIndex = 0
    ) -> None:
        # As they mostly are, without a call each: a disk may have millions.
        self.parent = parent if type(parent) is bytes else _bytes_of("parent", parent)
        self.extra_keys = extra_keys if type(extra_keys) is bytes else _bytes_of("extra_keys", extra_keys)
        self.tokens = tokens if type(tokens) is bytes else _bytes_of("tokens", tokens)
        self.column = check_count("BlockIdentity: column", column, 0, _MOST_COLUMN)

    def preimage(self) -> bytes:
        """Return all of it, one behind the other, so that no two identities have the same bytes. O(tokens)."""
        return make_preimage(*self.parts())

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Return what the preimage is made of, where a block of the primary group has its parent, keys and tokens.

        `of_parts` is the way back. O(1).
        """
        if self.column:
            return self.parent, _COLUMN_KEYS, pack("<I", self.column)
        return self.parent, self.extra_keys, self.tokens

    @staticmethod
    def of_parts(parent: bytes, extra_keys: bytes, tokens: bytes) -> "BlockIdentity":
        """Return the identity whose `parts` these are. Raises InvalidArgumentError for what isn't bytes. O(1)."""
        if extra_keys == _COLUMN_KEYS and len(tokens) == _NUM_COLUMN_BYTES:
            return BlockIdentity(parent, b"", b"", unpack("<I", tokens)[0])
        return BlockIdentity(parent, extra_keys, tokens)

    def digest(self) -> bytes:
        """Return the SHA-256 of `preimage`: the `parent` of the blocks behind it. O(tokens)."""
        return sha256_digest(self.preimage())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockIdentity):
            return NotImplemented
        return self.preimage() == other.preimage()

    def __hash__(self) -> int:
        return hash(self.preimage())

    def __repr__(self) -> str:
        above = self.parent.hex()[:16] or "nothing"
        if self.column:
            return f"BlockIdentity(in {above}, column {self.column})"
        return f"BlockIdentity(behind {above}, {len(self.tokens) // 4} tokens, keys {self.extra_keys!r})"


def _bytes_of(name: str, value: Given[bytes]) -> bytes:
    given: Any = value
    if not is_a(given, bytes):
        raise wrong(f"BlockIdentity: {name}", "bytes", given)
    return plain_bytes(given)
