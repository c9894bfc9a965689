"""Wishes: which prefixes of the device's cache are to be stored, by their last node.

A wish owns nothing. Its blocks may be taken for something else before its store begins. In that case only what is left
of the prefix is stored, if anything, so that taking a block never waits for a copy.
"""

from kvblocks.core.block import KVCacheBlock, Node, Run
from kvblocks.core.sequence import Sequence
from kvblocks.retention.quotas import salt_in
from kvblocks.tiers.identity import BlockIdentity

MOST_WISHES = 4096
"""The most wishes of a tier. Beyond that, the oldest is dropped.

An engine that never asks for transfers therefore loses hits, but uses no more memory.
"""


class Prefix:
    """A cached prefix: its packed tokens, its encoded keys by block, and the blocks that hold it."""

    def __init__(self, tokens: bytearray, extra_keys: dict[int, bytes] | None, blocks: list[KVCacheBlock]) -> None:
        self.tokens = tokens
        self.extra_keys = extra_keys
        self.blocks = blocks
        self._digests: list[bytes] = [b""]  # before the first block, after the first, and so on, as far as asked for

    @property
    def salt(self) -> str | None:
        """The salt of its blocks. O(length of the salt)."""
        return salt_in((self.extra_keys or {}).get(0))

    def identities(self, first: int, end: int, block_size: int) -> list[BlockIdentity]:
        """Return the identities of blocks first to end - 1. O(blocks), plus O(blocks before them) at the first call."""
        keys, size, found = self.extra_keys or {}, 4 * block_size, list[BlockIdentity]()
        for index in range(min(first, len(self._digests) - 1), end):
            tokens = bytes(self.tokens[index * size : (index + 1) * size])
            identity = BlockIdentity(self._digests[index], keys.get(index, b""), tokens)
            if index + 1 == len(self._digests):
                self._digests.append(identity.digest())
            if index >= first:
                found.append(identity)
        return found

    def num_whole(self, first: int, number: int) -> int:  # noqa: ARG002  # for subclasses
        """Return how many blocks from index `first` on may move together: `number` or fewer. O(1)."""
        return number

    def begins_with(self, other: "Prefix", block_size: int) -> bool:
        """Whether this prefix begins with `other`, by its tokens and keys. O(its tokens)."""
        num_blocks = len(other.tokens) // (4 * block_size)
        if not self.tokens.startswith(other.tokens):
            return False
        keys = {index: key for index, key in (self.extra_keys or {}).items() if index < num_blocks}
        return keys == (other.extra_keys or {})

    def token_view(self) -> "memoryview[int]":
        """Return the tokens as u32."""
        return memoryview(self.tokens).cast("I")


def prefix_of(run: Run, num_blocks: int) -> Prefix:
    """Return the cached prefix that ends after the first `num_blocks` blocks of `run`. O(its blocks)."""
    parts = [(run, num_blocks)]
    above, position, _, _ = run.key
    while above is not None:
        parts.append((above, position + 1))
        above, position, _, _ = above.key
    tokens, keys, blocks = bytearray(), dict[int, bytes](), list[KVCacheBlock]()
    for part, count in reversed(parts):
        for index, key in (part.extra_keys or {}).items():
            if index < count:
                keys[len(blocks) + index] = key
        tokens += part.tokens[: count * part.epoch.block_bytes]
        blocks += part.blocks[:count]
    return Prefix(tokens, keys or None, blocks)


def shortest_prefixes(blocks: list[KVCacheBlock]) -> list[Prefix]:
    """Return the prefixes that end in those of `blocks` that are cached.

    For consecutive blocks of a run, return only the first one's.
    """
    nodes = {block.node for block in blocks if block.is_cached}
    ends = [(run, index + 1) for run, index in nodes if run is not None and (run, index - 1) not in nodes]
    return [prefix_of(run, num_blocks) for run, num_blocks in ends]


def prefix_in(sequence: Sequence, num_blocks: int, block_size: int) -> Prefix:
    """Return the prefix of a sequence's first `num_blocks` blocks, cached or not. O(tokens)."""
    keys = {index: key for index, key in (sequence.encoded_keys(block_size) or {}).items() if index < num_blocks}
    tokens = bytearray(sequence.packed_tokens()[: 4 * block_size * num_blocks])
    return Prefix(tokens, keys or None, sequence.blocks[:num_blocks])


class Wishes:
    """The prefixes that are to be stored in one tier, the oldest wish first.

    A wish is put aside while the beginning of its prefix is being stored, so that nobody looks at it before that store
    has ended.
    """

    def __init__(self) -> None:
        self._ends: dict[Run, int] = {}
        self._aside: dict[Run, int] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, node: Node) -> int:
        """Wish for the prefix that ends at a cached node. Returns how many older wishes were dropped. O(1)."""
        run, position = node
        if run is None:
            return 0
        self._ends[run] = max(self._ends.get(run, 0), position + 1)
        if len(self._ends) + len(self._aside) <= MOST_WISHES:
            return 0
        oldest = self._aside or self._ends
        del oldest[next(iter(oldest))]
        return 1

    def put_aside(self, run: Run, num_blocks: int) -> None:
        """Wish for the first num_blocks blocks of a run, but not before `resume`. O(1)."""
        self._aside[run] = num_blocks

    def resume(self) -> None:
        """Wish again for what was put aside, ahead of newer wishes. O(wishes)."""
        if self._aside:
            newer, self._ends, self._aside = self._ends, self._aside, {}
            for run, num_blocks in newer.items():
                self._ends[run] = max(self._ends.get(run, 0), num_blocks)

    def drop(self, run: Run) -> None:
        """Drop the wish for a run. O(1)."""
        self._ends.pop(run, None)
        self._aside.pop(run, None)

    def take_all(self) -> list[tuple[Run, int]]:
        """Return the wishes as runs and numbers of first blocks, and forget them. O(wishes)."""
        ends, self._ends = self._ends, {}
        return [*ends.items()]
