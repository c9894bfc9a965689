"""A block of the pool, the run of cached blocks that it is in, and the epoch of the run.

`KVCacheBlock` is the unit that is owned, shared and evicted. `Run` is a stretch of the prefix index: consecutive blocks
of one prefix, with their tokens in one buffer, so that one memcmp compares a prompt with all of them. `Epoch` is what
all runs between two resets of the cache share. A reset ends the epoch, which stops caching all its blocks in O(1).

The classes refer to each other, so they share a module. All are plain records. `FreeBlockQueue` writes the links and
`ref_cnt` of a block; `PrefixIndex` writes runs.

The intrusive links, with an unlinked block pointing at itself, follow the Linux kernel's list_head. The block's fields
follow vLLM v1's KVCacheBlock.
"""

from collections.abc import Collection
from typing import final

from kvblocks.closed import Closed
from kvblocks.hashing.scheme import HashScheme

RunKey = tuple["Run | None", int, bytes, bytes | None]
"""The preimage of a run's first block: the parent run (None: no parent), the position in it, the tokens, the extra
keys.

A key refers to its parent's `Run` object, so that object can't come to mean another prefix while the key exists.
"""


Node = tuple["Run | None", int]
"""A cached position: (run, position in the run). A node stands for exactly one prefix, from its first token on."""

ROOT: Node = (None, 0)
"""The empty prefix. Every other prefix begins with it."""


class Epoch:
    """What all runs between two resets of the cache share, such as how their prefixes are named."""

    __slots__ = ("block_bytes", "hash_scheme", "is_current", "num_digest_bytes")

    def __init__(self, hash_scheme: HashScheme, block_bytes: int) -> None:
        self.hash_scheme = hash_scheme
        self.block_bytes = block_bytes
        self.num_digest_bytes = hash_scheme.num_digest_bytes
        self.is_current = True


class Account:
    """Who is charged for cached blocks. `retention` derives tenants from this class, which itself counts nothing."""

    def add(self, num_blocks: int) -> None:
        """Count blocks that became cached, or (a negative number) blocks that stopped being cached."""


@final
class KVCacheBlock(Closed):
    """One block of KV-cache memory: `block_size` slots.

    block_id: its id, from the pool's `first_block_id` on. ref_cnt: how many owners it has; 0 exactly when it is in the
    free queue. prev_free_block, next_free_block: its neighbors in the queue. If the block isn't queued, prev_free_block
    is the block itself and next_free_block is undefined. run, index: the run that it is in, and its position there; run
    is None when it isn't cached. Made by a pool; callers only read it.
    """

    __slots__ = ("block_id", "index", "next_free_block", "prev_free_block", "ref_cnt", "run")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.prev_free_block: KVCacheBlock = self
        self.next_free_block: KVCacheBlock = self
        self.run: Run | None = None
        self.index = 0

    @property
    def is_cached(self) -> bool:
        """Whether a lookup can find this block's prefix. O(1)."""
        return self.run is not None and self.run.epoch.is_current

    @property
    def is_shared(self) -> bool:
        """Whether others than its one owner may read this block, which therefore must not be written. O(1)."""
        return self.ref_cnt > 1 or self.is_cached

    @property
    def node(self) -> Node:
        """The node where the block is cached; ROOT when it isn't cached. O(1)."""
        return (self.run, self.index) if self.run is not None else ROOT

    @property
    def block_hash(self) -> bytes | None:
        """The digest that names the block's prefix; None when the block isn't cached.

        Computed on first use and then kept: O(blocks of the prefix whose digest isn't computed yet).
        """
        return self.run.digest(self.index) if self.run is not None and self.run.epoch.is_current else None

    def __repr__(self) -> str:
        cached = f"cached at {self.index}" if self.is_cached else "not cached"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, {cached})"


class Run:
    """Consecutive cached blocks of one prefix, `blocks[0]` first."""

    __slots__ = (
        "account",
        "blocks",
        "children",
        "digests",
        "duplicates",
        "epoch",
        "extra_keys",
        "first_keys",
        "is_closed",
        "key",
        "tokens",
    )

    def __init__(self, key: RunKey, epoch: Epoch) -> None:
        self.key = key
        """The preimage of `blocks[0]`."""
        self.first_keys = key[3]
        """The encoded keys of the first block of its prefix, with salt and LoRA name."""
        self.epoch = epoch
        self.blocks: list[KVCacheBlock] = []
        """The block that a hit gets for each position. The list shrinks from its end as blocks are evicted."""
        self.tokens = bytearray()
        """Packed u32 of these positions, and perhaps of evicted positions after them."""
        self.digests = bytearray()
        """Those of these positions, as far as they were computed."""
        self.extra_keys: dict[int, bytes] | None = None
        """Encoded keys by position."""
        self.duplicates: dict[int, dict[KVCacheBlock, None]] | None = None
        """By position, further blocks that hold the same prefix."""
        self.children: dict[int, dict[Run, None]] | None = None
        """By position, the runs that begin after it."""
        self.is_closed = False
        """Whether the run has lost blocks at its end. A closed run is never extended again, because a position could
        then come to mean another prefix.
        """
        self.account: Account | None = None
        """Who is charged for its blocks; None: nobody."""

    def num_cached_blocks(self) -> int:
        """Return how many blocks the run holds, including duplicates. O(positions with duplicates)."""
        return len(self.blocks) + sum([len(duplicates) for duplicates in (self.duplicates or {}).values()])

    def num_common(
        self, position: int, tokens: memoryview, extra_keys: dict[int, bytes] | None, first: int, max_blocks: int
    ) -> int:
        """Return how many blocks, from `position` on, equal a sequence's blocks from `first` on: at most `max_blocks`.

        tokens, extra_keys: the sequence's, packed as bytes and encoded by block. One memcmp when all these blocks are
        equal, otherwise a bisection by memcmp.
        """
        size = self.epoch.block_bytes
        num_blocks = len(self.blocks) - position
        if num_blocks > max_blocks:  # noqa: PLR1730  # min() costs three times as much
            num_blocks = max_blocks
        start = first * size
        if not self.tokens.startswith(tokens[start : start + num_blocks * size], position * size):
            num_blocks = self.num_equal_tokens(position, tokens, first, num_blocks)
        if self.extra_keys is None and extra_keys is None:
            return num_blocks
        return self.num_equal_keys(position, extra_keys, first, num_blocks)

    def num_equal_tokens(self, position: int, tokens: memoryview, first: int, num_blocks: int) -> int:
        """Return how many of `num_blocks` blocks, from the first, have equal tokens. At least one differs.

        Arguments as in `num_common`.
        """
        size = self.epoch.block_bytes
        in_run, in_tokens = position * size, first * size
        low, high = 0, num_blocks  # the first `low` blocks are equal; of the first `high`, one differs
        middle = 0
        if self.children:  # where an earlier prompt began to differ from this run, the next one probably does, too
            middle = next(reversed(self.children)) + 1 - position
        while high - low > 1:
            if not low < middle < high:
                middle = (low + high) // 2
            part = tokens[in_tokens + low * size : in_tokens + middle * size]
            if self.tokens.startswith(part, in_run + low * size):
                low = middle
                middle += 1
            else:
                high = middle
        return low

    def num_equal_keys(self, position: int, extra_keys: dict[int, bytes] | None, first: int, num_blocks: int) -> int:
        """Return how many of `num_blocks` blocks come before the first one with different extra keys."""
        ours, theirs = self.extra_keys or {}, extra_keys or {}
        if num_blocks < len(ours) + len(theirs):
            keyed = set(range(num_blocks))
        else:
            keyed = {index - position for index in ours} | {block - first for block in theirs}
        differing = [i for i in keyed if 0 <= i < num_blocks and ours.get(position + i) != theirs.get(first + i)]
        return min(differing, default=num_blocks)

    def extend(self, blocks: list[KVCacheBlock], tokens: memoryview, extra_keys: dict[int, bytes]) -> None:
        """Add blocks at the end, with their tokens. extra_keys: encoded, by index in `blocks`."""
        base = index = len(self.blocks)
        for block in blocks:
            block.run = self
            block.index = index
            index += 1
        self.blocks += blocks
        self.tokens += tokens
        if extra_keys:
            if self.extra_keys is None:
                self.extra_keys = {}
            for i, key in extra_keys.items():
                self.extra_keys[base + i] = key

    def num_backwards(self, blocks: list[KVCacheBlock], first: int) -> int:
        """Return how many of `blocks`, from `first` on, are the run's last ones in reverse order. O(that many).

        Stops at a position that has duplicates.
        """
        own, end, duplicates, count = self.blocks, len(self.blocks), self.duplicates or {}, 0
        most = min(end, len(blocks) - first)
        while count < most and blocks[first + count] is own[end - 1 - count] and end - 1 - count not in duplicates:
            count += 1
        return count

    def children_from(self, position: int) -> "list[Run]":
        """Return the runs that are attached to `position` or a later one. O(positions from there + those runs)."""
        children = self.children
        if not children:
            return []
        return [child for index in self.keys_from(position, children) for child in children.get(index, ())]

    def trim(self, position: int) -> None:
        """Free the memory of evicted positions from `position` on, if they are more than half of it.

        This way trimming costs O(1) per block on average.
        """
        if len(self.tokens) > 2 * position * self.epoch.block_bytes:
            del self.tokens[position * self.epoch.block_bytes :]
            del self.digests[position * self.epoch.num_digest_bytes :]
            if self.extra_keys is not None:
                self.extra_keys = {i: key for i, key in self.extra_keys.items() if i < position} or None

    def check(self) -> int:
        """Return how many blocks the run holds, with duplicates. Raises AssertionError if inconsistent. O(blocks)."""
        parent, position, tokens, extra_keys = self.key
        size = self.epoch.block_bytes
        assert parent is None or position < len(parent.blocks), f"{self}: is attached to a position that isn't cached"
        assert tokens == self.tokens[:size] and len(self.tokens) >= size * len(self.blocks), f"{self}: its tokens"
        assert extra_keys == (self.extra_keys or {}).get(0), f"{self}: its extra keys"
        held = list(enumerate(self.blocks))
        held += [(index, block) for index, duplicates in (self.duplicates or {}).items() for block in duplicates]
        for index, block in held:
            assert block.run is self and block.index == index, f"{block}: doesn't lead to where it is cached"
            assert block.ref_cnt or self.blocks[index] is block, f"{block}: a duplicate that is free"
        return len(held)

    def retire(self) -> None:
        """Drop what a run of an ended epoch refers to, so that no cycle of references is left."""
        self.duplicates = self.children = self.extra_keys = None
        self.blocks.clear()
        self.tokens.clear()
        self.digests.clear()

    def keys_from(self, position: int, keys: Collection[int]) -> list[int]:
        """Return all positions from `position` on that are in `keys`, perhaps with other positions among them.

        Costs the smaller of O(keys) and O(blocks from `position` on).
        """
        num_last = len(self.blocks) - position
        if num_last < len(keys):
            return list(range(position, len(self.blocks)))
        return [key for key in keys if key >= position]

    def digest(self, index: int) -> bytes:
        """Return the digest of position `index`. Missing digests are computed and kept. O(missing digests)."""
        size = self.epoch.num_digest_bytes
        if len(self.digests) < (index + 1) * size:
            for run in self._runs_without_digests():
                run.fill_digests()
        return bytes(self.digests[index * size : (index + 1) * size])

    def _runs_without_digests(self) -> "list[Run]":
        """Return this run and the runs above it whose digests are missing, topmost first."""
        chain = [self]
        parent, position, _, _ = self.key
        while parent is not None and len(parent.digests) < (position + 1) * self.epoch.num_digest_bytes:
            chain.append(parent)
            parent, position, _, _ = parent.key
        return chain[::-1]

    def fill_digests(self) -> None:
        """Compute the missing digests of this run, once those of the runs above it are there. O(missing digests)."""
        epoch, size = self.epoch, self.epoch.num_digest_bytes
        parent, position, _, _ = self.key
        first = len(self.digests) // size
        if first:
            previous = bytes(self.digests[-size:])
        else:
            previous = b"" if parent is None else parent.digest(position)
        blocks = range(first, len(self.blocks))
        self.digests += epoch.hash_scheme.chain(
            previous, self.tokens, self.extra_keys, self.first_keys, epoch.block_bytes, blocks
        )
