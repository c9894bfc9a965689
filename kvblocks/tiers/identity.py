"""`BlockIdentity`: which block a stored block is, in terms that mean the same in every process.

A tier that outlives its manager, or that several managers share, keeps a block's identity beside its bytes. A chain of
SHA-256 digests names what comes before the block; its tokens and keys say what it holds. Whoever reads the bytes
compares all of these.
"""

from struct import pack, unpack
from typing import Any, Final, SupportsIndex, final

from kvblocks.arguments import Given, check_count, is_a, wrong
from kvblocks.closed import Closed
from kvblocks.hashing.scheme import HashScheme, make_preimage, sha256_digest

NUM_DIGEST_BYTES: Final = 32
_COLUMN_KEYS: Final = b"\0"  # no block has keys of one byte
_NUM_COLUMN_BYTES: Final = 4
_MOST_COLUMN: Final = 2 ** (8 * _NUM_COLUMN_BYTES) - 1


def identity_hash_scheme() -> HashScheme:
    """Return the hash scheme of a tier's index: SHA-256 digests, as in identities."""
    return HashScheme(sha256_digest, NUM_DIGEST_BYTES)


@final
class BlockIdentity(Closed):
    """The identity of a stored block. Read-only, compared by value.

    - parent: the SHA-256 digest of the block before it, b"" for a first block.
    - extra_keys: encoded as `kvblocks.hashing` says, b"" for none.
    - tokens: its token ids as little-endian u32.
    - column: 0 for a block of the primary group. Side groups' blocks count from 1: the column of the row that they are
      attached in (`core.attached`), plus 1. The parts of a checkpoint have the columns after these. For all of these,
      `parent` is the digest of the primary block that they are attached to, which covers everything, so their keys and
      tokens are b"".

    Raises InvalidArgumentError for parts that aren't bytes, or a bad column.
    """

    __slots__ = ("column", "extra_keys", "parent", "tokens")

    def __init__(
        self, parent: Given[bytes], extra_keys: Given[bytes], tokens: Given[bytes], column: SupportsIndex = 0
    ) -> None:
        # They are nearly always bytes. The check is inline, since a disk may have millions of identities.
        self.parent = parent if type(parent) is bytes else _bytes_of("parent", parent)
        self.extra_keys = extra_keys if type(extra_keys) is bytes else _bytes_of("extra_keys", extra_keys)
        self.tokens = tokens if type(tokens) is bytes else _bytes_of("tokens", tokens)
        self.column = check_count("BlockIdentity: column", column, 0, _MOST_COLUMN)

    def preimage(self) -> bytes:
        """Return all parts, one after another, encoded so that no two identities have the same bytes. O(tokens)."""
        return make_preimage(*self.parts())

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Return the parts of the preimage. For a block of the primary group: its parent, keys and tokens.

        `of_parts` turns them back into the identity. O(1).
        """
        if self.column:
            return self.parent, _COLUMN_KEYS, pack("<I", self.column)
        return self.parent, self.extra_keys, self.tokens

    @staticmethod
    def of_parts(parent: Given[bytes], extra_keys: Given[bytes], tokens: Given[bytes]) -> "BlockIdentity":
        """Return the identity whose `parts` these are. Raises InvalidArgumentError for what isn't bytes. O(1)."""
        found = BlockIdentity(parent, extra_keys, tokens)
        if found.extra_keys != _COLUMN_KEYS or len(found.tokens) != _NUM_COLUMN_BYTES:
            return found
        return BlockIdentity(found.parent, b"", b"", unpack("<I", found.tokens)[0])

    def digest(self) -> bytes:
        """Return the SHA-256 of `preimage`, which is the `parent` of the blocks after this one. O(tokens)."""
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
        return f"BlockIdentity(after {above}, {len(self.tokens) // 4} tokens, keys {self.extra_keys!r})"


def _bytes_of(name: str, value: Given[bytes]) -> bytes:
    given: Any = value
    if not is_a(given, bytes):
        raise wrong(f"BlockIdentity: {name}", "bytes", given)
    own: bytes = given
    return own
