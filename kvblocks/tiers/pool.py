"""`TierPool`: the slots of a tier, and the exact map of what they hold.

A tier is a pool of ids below the device's, with the same index, free queue and policy (`core`). A hit in a tier
therefore compares tokens and keys as on the device, the least recently used blocks make room first, and a prefix's end
goes before its beginning. A transfer's job owns a slot while it is written or read. Digests are sha256, computed only
when somebody asks for a block's identity; with events or a removal history the index has the device's names instead.
"""

from kvblocks.core.block import KVCacheBlock, Node
from kvblocks.core.hooks import RemovalCause, Watcher
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import ExtraKeys, PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.retention.quotas import QuotaOrder, TenantQuotas, charge, forget_salt
from kvblocks.retention.tenant import Tenant
from kvblocks.tiers.changes import PersistentSlots, SlotChanges
from kvblocks.tiers.identity import identity_hash_scheme
from kvblocks.tiers.rates import Rate
from kvblocks.tiers.tier import Tier, TierStats
from kvblocks.tiers.wishes import Prefix, Wishes, prefix_in


class TierPool:
    """The slots of a tier, and what is to be stored there. Counters are as in `TierStats`.

    rate: how fast the tier loads. wishes: what is to be stored. storing: the device's blocks that stores read now, and
    own, at most max_storing, with their salts. arrived: those that stores have read, and that can't be cached here yet
    because an earlier block is still being read; nobody owns them for that. lost: those of both whose KV turned out to
    be lost since the store began. (Asking when they are cached here would be too late, because they may be written and
    cached on the device again by then.) copies: by block of the device, the slot that was last stored from it, whatever
    either holds by now. quotas: those of tenants;
    None without quotas. changes: what is to be remembered if the tier is persistent; otherwise None. removals: told for
    which salt slots are taken; None: nobody is. num_loading_bytes: those of loads that haven't ended, begun or not.
    """

    def __init__(self, tier: Tier, max_storing: int, pool: BlockPool, changes: SlotChanges | None) -> None:
        """pool: the slots, and the map of what they hold. It reports to `changes`, if the tier has them."""
        self.rate = Rate(tier.bytes_per_second)
        self.wishes = Wishes()
        self.storing: dict[KVCacheBlock, str | None] = {}
        self.arrived: dict[KVCacheBlock, str | None] = {}
        self.lost: set[KVCacheBlock] = set()
        self.copies: dict[KVCacheBlock, KVCacheBlock] = {}
        self.max_storing = max_storing
        self.name: str = tier.name
        self.num_block_bytes: int = tier.num_block_bytes
        self.stores_reused = tier.store == "reused"
        self.stores_computed = tier.store == "computed"
        self.is_shared: bool = tier.is_shared
        self.min_store_tokens: int | None = tier.min_store_tokens
        self.window_store_tokens: int | None = tier.window_store_tokens
        self.max_transfer_blocks: int = tier.max_transfer_blocks
        self.pool = pool
        self.index = pool.index
        self.changes = changes
        self.quotas: TenantQuotas | None = None
        self.removals: Watcher | None = None
        self.num_loading_bytes = 0
        self.num_stored_blocks = self.num_loaded_blocks = self.num_failed_blocks = self.num_dropped_blocks = 0

    def match(self, tokens: "memoryview[int]", extra_keys: ExtraKeys, max_blocks: int) -> list[KVCacheBlock]:
        """Return the slots of the longest prefix that is stored, at most this many blocks. See `PrefixIndex.match`."""
        return self.index.match(tokens, extra_keys, max_blocks)

    def hold(self, blocks: list[KVCacheBlock]) -> None:
        """Own slots, so that they are not reused. O(their number)."""
        self.pool.touch(blocks)

    def take(self, num_blocks: int, salt: str | None) -> list[KVCacheBlock]:
        """Take free slots to store blocks of a salt: num_blocks, or fewer if a quota says so. O(num_blocks) on average.

        Blocks that are being stored count towards the quota. A tenant whose quota is used up gets only slots that hold
        nothing and slots of tenants that are over their quotas, which include itself. With quotas, also O(blocks that
        are being stored).
        """
        if self.removals is not None:
            self.removals.note_taking(num_blocks, salt)
        tenant = None if self.quotas is None else self.quotas.tenant_of(salt)
        if tenant is None:
            return self.pool.take(num_blocks)
        taken: list[KVCacheBlock] = []
        num_charged = sum([other == salt for moving in (self.storing, self.arrived) for other in moving.values()])
        tenant.add(num_charged)
        while len(taken) < num_blocks:
            tenant.add(1)
            num_charged += 1
            if tenant.num_excess_blocks > 0 and not self._has_spare():
                break
            taken.append(self.pool.take_one())
        tenant.add(-num_charged)
        return taken

    def take_whole(self, prefix: Prefix, first: int, num_blocks: int) -> list[KVCacheBlock]:
        """`take` for the blocks of a prefix from index `first` on, without splitting a checkpoint."""
        slots = self.take(prefix.num_whole(first, num_blocks), prefix.salt)
        number = prefix.num_whole(first, len(slots))
        self.pool.release_table(slots[number:])
        return slots[:number]

    def _has_spare(self) -> bool:
        """Whether the next slot to be taken holds nothing, or a tenant over its quota has a free slot."""
        first = self.pool.queue.first
        if first is None or not first.is_cached:
            return first is not None
        return self.quotas is not None and self.quotas.next_victim() is not None

    def let_go(self, blocks: list[KVCacheBlock]) -> None:
        """Release slots after a use, in the order of their prefix. What they store stays stored. O(slots)."""
        if self.changes is not None:
            self.changes.note_used(blocks)
        self.pool.release_table(blocks)

    def drop(self, blocks: list[KVCacheBlock], cause: RemovalCause = "dropped") -> None:
        """Forget what slots hold, and all that is chained to them. O(slots forgotten)."""
        self.pool.uncache(blocks, cause)

    def drop_prefix(self, tokens: "memoryview[int]", extra_keys: ExtraKeys, num_blocks: int) -> None:
        """Forget block `num_blocks` of a prefix and everything after it. One lookup for it and each duplicate."""
        while len(found := self.match(tokens, extra_keys, num_blocks)) == num_blocks:
            self.drop(found[-1:])

    def drop_copies(self, sequence: Sequence, lost: set[KVCacheBlock]) -> list[Prefix]:
        """Forget what was stored from lost blocks of a sequence, and everything after it. Returns its prefix, if there
        is any.

        The tier may have the same prefix from an earlier time, when its KV was there. So only slots that were stored
        from these very blocks are forgotten. A lookup in the tier, and O(blocks).
        """
        slots = self.slots_of(sequence)
        for index, (block, slot) in enumerate(zip(sequence.blocks, slots)):  # noqa: B905  # the shorter one counts
            if block in lost and self.copies.get(block) is slot:
                self.drop([slot], "aborted")
                return [prefix_in(sequence, index + 1, self.index.block_size)]
        return []

    def slots_of(self, sequence: Sequence) -> list[KVCacheBlock]:
        """Return the slots that hold the prefix of an allocated sequence, as far as it has blocks. A lookup."""
        keys = sequence.encoded_keys(self.index.block_size)
        return self.match(memoryview(sequence.tokens), keys, len(sequence.blocks))

    def forget_salt(self, salt: str | None) -> int:
        """Forget what is stored of a salt; returns how many slots that were. O(runs + those slots)."""
        return forget_salt(self.pool, salt)

    def charge(self, quotas: TenantQuotas) -> None:
        """Apply changed quotas. O(slots)."""
        in_force = self.quotas = charge(self.pool, quotas)
        self.pool.chooser = None if in_force is None else QuotaOrder(in_force)

    def max_blocks_of(self, salt: str | None) -> int | None:
        """Return the quota of a salt; None without one. O(1)."""
        tenant = None if self.quotas is None else self.quotas.tenant_of(salt)
        return None if tenant is None else tenant.max_cached_blocks

    def num_ahead(self, blocks: list[KVCacheBlock]) -> int:
        """Return how many slots would now be reused before the first of `blocks`, which hold one prefix. O(slots).

        If their tenant is over its quota, only empty slots and that tenant's slots count.
        """
        account = blocks[0].run.account if blocks[0].run is not None else None
        is_over = isinstance(account, Tenant) and account.num_excess_blocks > 0
        number, meant = 0, set(blocks)
        for block in self.pool.queue:
            if block in meant:
                break
            number += not is_over or block.run is None or not block.is_cached or block.run.account is account
        return number

    def is_in_store(self, block: KVCacheBlock) -> bool:
        """Whether a block of the device is part of a store, and not yet cached here. O(1)."""
        return block in self.storing or block in self.arrived

    def check_stores(self, storing: list[KVCacheBlock], arrived: list[KVCacheBlock]) -> None:
        """Raise AssertionError unless the jobs' blocks that are being stored, and that have arrived, are those here."""
        blocks = {*storing, *arrived}
        assert self.storing.keys() == {*storing}, f"{self.name}: blocks that are being stored"
        assert self.arrived.keys() == {*arrived}, f"{self.name}: blocks that wait for earlier ones"
        assert len(blocks) == len(storing) + len(arrived), f"{self.name}: blocks in two stores"
        assert self.lost <= blocks, f"{self.name}: lost blocks that no store has"
        assert len(storing) <= self.max_storing, f"{self.name}: more blocks are held than may be"

    @property
    def is_busy(self) -> bool:
        """Whether something is to be stored, or changes are to be remembered. O(1)."""
        return len(self.wishes) > 0 or bool(self.changes)

    def empty_slots(self) -> list[int]:
        """Return the slots that hold nothing that lookups can find, and that no transfer uses. O(slots)."""
        return [slot.block_id for slot in self.pool.blocks if not slot.ref_cnt and not slot.is_cached]

    def wish(self, node: Node) -> None:
        """Ask for the prefix that ends at a node of the device's cache to be stored. O(1)."""
        self.num_dropped_blocks += self.wishes.add(node)

    def clear(self) -> None:
        """Forget everything that is stored. Jobs keep the slots that their transfers read and write.

        O(1), plus the time to free memory; O(slots) if the tier is persistent.
        """
        self.copies.clear()
        self.index.clear()
        self.note_unstored(self.pool.blocks)

    def note_stored(self, slots: list[KVCacheBlock], prefix: Prefix, first: int) -> None:
        """Record that slots hold the blocks of a prefix from index `first` on. O(blocks)."""
        self.copies.update(zip(prefix.blocks[first : first + len(slots)], slots))  # noqa: B905  # a found prefix has none
        if self.changes is not None:
            self.changes.note_stored(slots, prefix.identities(first, first + len(slots), self.index.block_size))

    def note_unstored(self, slots: list[KVCacheBlock]) -> None:
        """Record that slots hold nothing that lookups can find. O(slots)."""
        if self.changes is not None:
            self.changes.note_unstored(slots)

    def attach(self, primary: KVCacheBlock, column: int, slot: KVCacheBlock) -> bool:  # noqa: ARG002  # for subclasses
        """Attach a slot to a cached primary slot, in a column of `BlockIdentity`. Returns whether it is cached. O(1).

        With one group there are no columns, so nothing is attached.
        """
        return False

    @property
    def part_columns(self) -> range:
        """The columns of `BlockIdentity` for the parts of a checkpoint; empty unless layers keep a state. O(1)."""
        return range(0)

    def parts_at(self, primary: KVCacheBlock) -> list[KVCacheBlock]:  # noqa: ARG002  # for subclasses
        """Return the slots of the checkpoint at a cached slot, in the order of their columns; perhaps none. O(1)."""
        return []

    def attach_parts(self, primary: KVCacheBlock, slots: dict[int, KVCacheBlock]) -> bool:  # noqa: ARG002
        """Attach a checkpoint to a cached slot, if all of its parts are there. slots: by column. O(slots)."""
        return False

    def is_attached(self, primary: KVCacheBlock, column: int) -> bool:  # noqa: ARG002  # for subclasses
        """Whether anything is attached to a cached slot in a column. O(1)."""
        return False

    def note_attached(self, chain: list[KVCacheBlock], tokens: bytearray, column: int) -> None:
        """Record that a slot was attached to the last primary slot of a chain. tokens: at least the chain's."""

    def is_used_with_prefix(self, column: int) -> bool:  # noqa: ARG002  # for subclasses
        """Whether a hit of a longer prefix also uses what is attached in a column. O(groups)."""
        return False

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


def make_pool(tier: Tier, block_size: int, max_storing: int) -> TierPool:
    """Return the slots of a tier below one group."""
    index = PrefixIndex(block_size, identity_hash_scheme())
    if not tier.is_persistent:
        return TierPool(tier, max_storing, BlockPool(tier.num_blocks, index), None)
    changes = SlotChanges()
    return TierPool(tier, max_storing, PersistentSlots(tier.num_blocks, index, changes), changes)
