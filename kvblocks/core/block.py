"""A block of the pool, the run of cached blocks that it is in, and the epoch that the run is of.

`KVCacheBlock` is the unit that is owned, shared and evicted. `Run` is a stretch of the prefix index: consecutive blocks
of one prefix, with their tokens in one buffer, so that a prompt is compared with all of them by one memcmp. `Epoch` is
what all runs between two resets of the cache share: a reset ends it, and with it, in O(1), whatever was cached in it.

They refer to each other, hence one module. All are plain records: `FreeBlockQueue` owns the links and whether a block
has an owner, `PrefixIndex` owns everything of a run.

The intrusive links, with an unlinked block pointing at itself, are those of the Linux kernel's list_head; the block's
fields are those of vLLM v1's KVCacheBlock.
"""

from collections.abc import Collection

from kvblocks.core.hashing import Names, decode_names
from kvblocks.events import BlockStored

RunKey = tuple["Run | None", int, bytes, bytes | None]
"""A run's first block by its preimage: the parent's run (None: no parent) and position there, tokens, extra keys.

A key holds its parent's run itself, so a parent's identity cannot be given to another prefix while the key exists.
"""


Node = tuple["Run | None", int]
"""A cached position: the run and the index in it; what is there is one prefix, whole and exact."""

ROOT: Node = (None, 0)
"""The empty prefix, which everything is attached to."""


class Epoch:
    """What all runs between two resets of the cache share, how they are named included."""

    __slots__ = ("block_bytes", "is_current", "names", "num_digest_bytes")

    def __init__(self, names: Names, block_bytes: int) -> None:
        self.names = names
        self.block_bytes = block_bytes
        self.num_digest_bytes = names.num_digest_bytes
        self.is_current = True


class Account:
    """Who is charged for cached blocks: `retention` charges tenants. Here it counts nothing."""

    def add(self, num_blocks: int) -> None:
        """Count blocks that became cached, or with a negative number are cached no more."""


class KVCacheBlock:
    """One block of KV-cache memory: `block_size` slots, named by `block_id`, 0 to num_blocks - 1.

    ref_cnt: how many live block tables hold it; 0 exactly when it is in the free queue. prev_free_block and
    next_free_block: its neighbours there; when it isn't queued, the first is the block itself, the second means
    nothing. run and index: where it is cached; run is None when it isn't. Made by a pool; callers only read it.
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
        """Whether anybody else reads this block than the one owner that asks: then it must not be written to. O(1)."""
        return self.ref_cnt > 1 or self.is_cached

    @property
    def node(self) -> Node:
        """Where the block is cached; ROOT when it isn't. O(1)."""
        return (self.run, self.index) if self.run is not None else ROOT

    @property
    def block_hash(self) -> bytes | None:
        """The digest that names the block's prefix, None when it isn't cached.

        Computed when first asked for and then kept: O(blocks of the prefix whose digest nobody has asked for yet).
        """
        return self.run.digest(self.index) if self.run is not None and self.run.epoch.is_current else None

    def __repr__(self) -> str:
        cached = f"cached at {self.index}" if self.is_cached else "not cached"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, {cached})"


class Run:
    """Consecutive cached blocks of one prefix, `blocks[0]` first.

    key: the preimage of `blocks[0]`. blocks: the block that a hit gets for each position; it shrinks from the end as
    blocks are evicted. tokens: packed u32 of those positions and perhaps of evicted ones after them. extra_keys:
    encoded keys by position. duplicates: by position, further blocks that hold its very prefix. children: by position,
    the runs that are attached to a position of this one. is_closed: it lost its end once, so it is never extended
    again; otherwise the position, which is an identity, would come to mean another prefix. tenant: whose quota it
    counts towards. first_keys: the encoded keys of its prefix's very first block, salt and LoRA name among them.
    """

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
        self.first_keys = key[3]
        self.epoch = epoch
        self.blocks: list[KVCacheBlock] = []
        self.tokens = bytearray()
        self.digests = bytearray()
        self.extra_keys: dict[int, bytes] | None = None
        self.duplicates: dict[int, dict[KVCacheBlock, None]] | None = None
        self.children: dict[int, dict[Run, None]] | None = None
        self.is_closed = False
        self.account: Account | None = None

    def num_cached_blocks(self) -> int:
        """Return how many blocks it holds, duplicates included. O(positions with duplicates)."""
        return len(self.blocks) + sum([len(duplicates) for duplicates in (self.duplicates or {}).values()])

    def num_common(
        self, position: int, tokens: memoryview, extra_keys: dict[int, bytes] | None, first: int, max_blocks: int
    ) -> int:
        """Return how many blocks from `position` on equal a sequence's from `first` on, at most `max_blocks`.

        tokens, extra_keys: the sequence's, packed as bytes and encoded by block. One memcmp of all the blocks when they
        are equal, a bisection by memcmp when they aren't.
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
        """Return how many of `num_blocks` blocks, not all of them, have equal tokens. As `num_common`."""
        size = self.epoch.block_bytes
        in_run, in_tokens = position * size, first * size
        low, high = 0, num_blocks  # the first `low` blocks are equal, the first `high` aren't
        middle = 0
        if self.children:  # where another prompt parted from this one, the next one probably does too
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
        """Return how many of `num_blocks` blocks have equal extra keys, up to the first that hasn't."""
        ours, theirs = self.extra_keys or {}, extra_keys or {}
        if num_blocks < len(ours) + len(theirs):
            keyed = set(range(num_blocks))
        else:
            keyed = {index - position for index in ours} | {block - first for block in theirs}
        differing = [i for i in keyed if 0 <= i < num_blocks and ours.get(position + i) != theirs.get(first + i)]
        return min(differing, default=num_blocks)

    def extend(self, blocks: list[KVCacheBlock], tokens: memoryview, extra_keys: dict[int, bytes]) -> None:
        """Add blocks at the end, with their tokens, and encoded extra keys by position among them."""
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
        """Return how many of `blocks` from `first` on are the last ones here, last first, no duplicates. O(those)."""
        end, duplicates, count = len(self.blocks), self.duplicates or {}, 0
        most = min(end, len(blocks) - first)
        while (
            count < most and blocks[first + count] is self.blocks[end - 1 - count] and end - 1 - count not in duplicates
        ):
            count += 1
        return count

    def children_from(self, position: int) -> "list[Run]":
        """Return the runs that are attached to `position` or later. O(positions from there, and those runs)."""
        children = self.children
        if not children:
            return []
        return [child for index in self.keys_from(position, children) for child in children.get(index, ())]

    def trim(self, position: int) -> None:
        """Give back what is kept for evicted positions from `position` on, once that is most of it.

        So trimming costs O(1) a block on average.
        """
        if len(self.tokens) > 2 * position * self.epoch.block_bytes:
            del self.tokens[position * self.epoch.block_bytes :]
            del self.digests[position * self.epoch.num_digest_bytes :]
            if self.extra_keys is not None:
                self.extra_keys = {i: key for i, key in self.extra_keys.items() if i < position} or None

    def stored_since(self, base: int) -> BlockStored:
        """Return the record of the run having grown from `base` blocks to what it has now. O(blocks added)."""
        parent, position, _, _ = self.key
        above = (self, base - 1) if base else (parent, position)
        keys = self.extra_keys or {}
        added = range(base, len(self.blocks))
        salt, lora = decode_names(self.first_keys)
        return BlockStored(
            block_hashes=tuple([self.digest(index) for index in added]),
            parent_block_hash=None if above[0] is None else above[0].digest(above[1]),
            tokens=bytes(self.tokens[base * self.epoch.block_bytes :]),
            block_size=self.epoch.block_bytes // 4,
            extra_keys=tuple([(index - base, keys[index]) for index in added if index in keys]),
            block_ids=tuple([self.blocks[index].block_id for index in added]),
            salt=salt,
            lora=lora,
        )

    def check(self) -> int:
        """Raise AssertionError unless all here agrees; return how many blocks it holds, with duplicates. O(blocks)."""
        parent, position, tokens, extra_keys = self.key
        size = self.epoch.block_bytes
        assert parent is None or position < len(parent.blocks), f"{self}: is attached to a position that isn't cached"
        assert tokens == self.tokens[:size] and len(self.tokens) >= size * len(self.blocks), f"{self}: its tokens"
        assert extra_keys == (self.extra_keys or {}).get(0), f"{self}: its extra keys"
        held = list(enumerate(self.blocks))
        held += [(index, block) for index, duplicates in (self.duplicates or {}).items() for block in duplicates]
        for index, block in held:
            assert block.run is self and block.index == index, f"{block}: doesn't lead to where it is cached"
        return len(held)

    def retire(self) -> None:
        """Give back what a run of an ended epoch holds, and leave no cycle of references."""
        self.duplicates = self.children = self.extra_keys = None
        self.blocks.clear()
        self.tokens.clear()
        self.digests.clear()

    def keys_from(self, position: int, keys: Collection[int]) -> list[int]:
        """Return candidates for the `keys` of a table by position that are `position` or more, the shorter way."""
        num_last = len(self.blocks) - position
        if num_last < len(keys):
            return list(range(position, len(self.blocks)))
        return [key for key in keys if key >= position]

    def digest(self, index: int) -> bytes:
        """Return the digest of position `index`. Fills in those not asked for yet; O(their number)."""
        size = self.epoch.num_digest_bytes
        if len(self.digests) < (index + 1) * size:
            for run in self._runs_without_digests():
                run.fill_digests()
        return bytes(self.digests[index * size : (index + 1) * size])

    def _runs_without_digests(self) -> "list[Run]":
        """This run and those above it whose digests are needed first, topmost first."""
        chain = [self]
        parent, position, _, _ = self.key
        while parent is not None and len(parent.digests) < (position + 1) * self.epoch.num_digest_bytes:
            chain.append(parent)
            parent, position, _, _ = parent.key
        return chain[::-1]

    def fill_digests(self) -> None:
        """Compute the digests that are missing; those of the runs above must be there. O(their number)."""
        epoch, size = self.epoch, self.epoch.num_digest_bytes
        parent, position, _, _ = self.key
        first = len(self.digests) // size
        if first:
            previous = bytes(self.digests[-size:])
        else:
            previous = b"" if parent is None else parent.digest(position)
        blocks = range(first, len(self.blocks))
        self.digests += epoch.names.chain(
            previous, self.tokens, self.extra_keys, self.first_keys, epoch.block_bytes, blocks
        )
