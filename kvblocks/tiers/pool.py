"""`TierPool`: the slots of a tier, and the exact map of what they hold.

A tier is another pool of ids below the device's: the same index, free queue and policy (`core`), so a hit in it
compares tokens and keys as one on the device does, its least recently used blocks make room first, and a prefix's end
goes before its beginning. A slot that is being written or read is owned by the transfer's job. Digests are sha256, and
computed only when somebody asks for a block's identity.
"""

from kvblocks.core.block import KVCacheBlock, Node
from kvblocks.core.hashing import sha256_digest
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import ExtraKeys, PrefixIndex
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.rates import Rate
from kvblocks.tiers.tier import Tier, TierStats
from kvblocks.tiers.wishes import Prefix, Wishes


class TierPool:
    """What a tier holds, and is to hold. Counters as `TierStats`.

    rate: how fast it loads. wishes: what is to be stored. storing: the device's blocks that stores read now, at most
    max_storing. changes: what became of slots since somebody asked, by id: whose bytes they hold, or None; of a tier
    that is persistent.
    """

    def __init__(self, tier: Tier, block_size: int, max_storing: int, pool: BlockPool | None = None) -> None:
        """pool: its slots, and the map of what they hold; None: those of one group."""
        self.rate = Rate(tier.bytes_per_second)
        self.wishes = Wishes()
        self.storing: dict[KVCacheBlock, None] = {}
        self.max_storing = max_storing
        self.name: str = tier.name
        self.num_block_bytes: int = tier.num_block_bytes
        self.stores_reused = tier.store == "reused"
        self.stores_computed = tier.store == "computed"
        self.min_store_tokens: int | None = tier.min_store_tokens
        self.window_store_tokens: int | None = tier.window_store_tokens
        self.max_transfer_blocks: int = tier.max_transfer_blocks
        self.is_persistent: bool = tier.is_persistent
        self.changes: dict[int, BlockIdentity | None] = {}
        made = PrefixIndex(block_size, sha256_digest) if pool is None else pool.index
        self.index: PrefixIndex = made
        self.pool: BlockPool = BlockPool(tier.num_blocks, made) if pool is None else pool
        self.num_stored_blocks = self.num_loaded_blocks = self.num_failed_blocks = self.num_dropped_blocks = 0

    def match(self, tokens: "memoryview[int]", extra_keys: ExtraKeys, max_blocks: int) -> list[KVCacheBlock]:
        """Return the slots of the longest prefix that is stored, at most so many blocks. As `PrefixIndex.match`."""
        return self.index.match(tokens, extra_keys, max_blocks)

    def hold(self, blocks: list[KVCacheBlock]) -> None:
        """Own slots, so that they are not reused. O(their number)."""
        self.pool.touch(blocks)

    def let_go(self, blocks: list[KVCacheBlock]) -> None:
        """Give slots back, in the order of their prefix; what is stored in them stays. O(their number)."""
        self.pool.release_table(blocks)

    def drop(self, blocks: list[KVCacheBlock]) -> None:
        """Forget what slots hold, and all that is chained to it. O(all those)."""
        for block in blocks:
            self.index.forget(block, "dropped")
        self.note_unstored(self.index.detached)
        self.pool.requeue_detached()

    def drop_prefix(self, tokens: "memoryview[int]", extra_keys: ExtraKeys, num_blocks: int) -> None:
        """Forget a prefix of so many blocks, whoever holds it. A lookup for each slot that does."""
        while len(found := self.match(tokens, extra_keys, num_blocks)) == num_blocks:
            self.drop(found[-1:])

    def wish(self, node: Node) -> None:
        """Have the prefix that ends at a node of the device's cache stored. O(1)."""
        self.num_dropped_blocks += self.wishes.add(node)

    def clear(self) -> None:
        """Forget everything that is stored. What transfers read and write they go on to own. O(1), as there."""
        self.index.clear()
        self.note_unstored(self.pool.blocks)

    def note_stored(self, slots: list[KVCacheBlock], prefix: Prefix, first: int) -> None:
        """Take note that slots hold the blocks of a prefix from index `first` on. O(blocks)."""
        if self.is_persistent:
            identities = prefix.identities(first, first + len(slots), self.index.block_size)
            self.changes.update(zip([slot.block_id for slot in slots], identities, strict=True))

    def note_unstored(self, slots: list[KVCacheBlock]) -> None:
        """Take note that slots hold nothing that is to be found. O(slots)."""
        if self.is_persistent:
            self.changes.update(dict.fromkeys([slot.block_id for slot in slots]))

    def take_changes(self) -> dict[int, BlockIdentity | None]:
        """Return what became of slots since the last call, and forget it. O(1)."""
        changes, self.changes = self.changes, {}
        return changes

    def stats(self) -> TierStats:
        """Return what it holds, and what was moved. O(1)."""
        return TierStats(
            name=self.name,
            num_blocks=len(self.pool.blocks),
            num_cached_blocks=self.pool.num_cached_blocks,
            num_stored_blocks=self.num_stored_blocks,
            num_loaded_blocks=self.num_loaded_blocks,
            num_failed_blocks=self.num_failed_blocks,
            num_dropped_blocks=self.num_dropped_blocks,
            num_evicted_blocks=self.pool.num_evicted_blocks,
            num_moving_blocks=len(self.pool.blocks) - self.pool.num_free_blocks,
        )
