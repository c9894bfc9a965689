"""Records of every change to the set of cached prefixes, in order, for routers and other observers of the cache.

The set is of prefixes, not of blocks: a second block that holds the same prefix changes nothing, and a prefix is
removed when the last block that holds it goes. Replaying the records into a dict gives the cached set at any time,
that of each group for itself: the same digest may be cached in several. The kinds follow vLLM's KV events; putting them
on a wire is not the core's work.
"""

from array import array
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one prefix became cached.

    block_hashes: their digests, first to last. parent_block_hash: the digest of the block that the first is attached
    to, None for a first block. tokens: their token ids, packed as little-endian u32. block_size: tokens in a block.
    extra_keys: (position among block_hashes, encoded extra keys) of those that have some, encoded as in `hashing`; a
    group whose blocks are of another size than the primary one's leaves them to that. group_idx: the group that they
    are cached in; None where there is only one. In a windowed group the parent need not be cached. block_ids: the
    blocks that hold them now; a duplicate that takes the place of one later makes no record. salt, lora: of their
    sequence, whichever of its blocks they are.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    tokens: bytes
    block_size: int
    extra_keys: tuple[tuple[int, bytes], ...] = ()
    group_idx: int | None = None
    block_ids: tuple[int, ...] = ()
    salt: str | None = None
    lora: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The blocks' token ids. O(tokens)."""
        return array("I", self.tokens).tolist()

    def of_group(self, group: int) -> "BlockStored":
        """Return the same record, of a group. Only for the manager."""
        return replace(self, group_idx=group)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Prefixes that are cached no more, by their digests; a child always before its parent. group_idx: as stored."""

    block_hashes: tuple[bytes, ...]
    group_idx: int | None = None

    def of_group(self, group: int) -> "BlockRemoved":
        """Return the same record, of a group. Only for the manager."""
        return replace(self, group_idx=group)


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was reset: no prefix stored before this record is cached any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
