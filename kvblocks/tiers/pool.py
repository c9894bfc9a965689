"""`TierPool`: the slots of a tier, and the exact map of what they hold.

A tier is a pool of ids below the device's, with the same index, free queue and policy (`core`). A hit in a tier
therefore compares tokens and keys as on the device, the least recently used blocks make room first, and a prefix's end
goes before its beginning. A transfer's job owns a slot while it is written or read. Digests are sha256, computed only
when somebody asks for a block's identity; with events or a removal history the index has the device's names instead.
"""

from kvblocks.core.block import KVCacheBlock, Node
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.core.hooks import RemovalCause, Watcher
from kvblocks.core.layout import GroupLayout
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import ExtraKeys, PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.retention.quotas import QuotaOrder, TenantQuotas, charge, forget_salt
from kvblocks.retention.tenant import Tenant
from kvblocks.tiers.changes import PersistentSlots, SlotChanges
from kvblocks.tiers.identity import identity_hash_scheme
from kvblocks.tiers.prefix import Prefix, prefix_in
from kvblocks.tiers.rates import Rate
from kvblocks.tiers.store_queue import StoreQueue
from kvblocks.tiers.tier import Tier, TierStats


class TierPool:
    """The slots of a tier, and what is to be stored there. Counters are as in `TierStats`."""

    def __init__(self, tier: Tier, max_storing: int, pool: BlockPool, changes: SlotChanges | None) -> None:
        """pool: the slots, and the map of what they hold. It reports to `changes`, if the tier has them."""
        self.rate = Rate(tier.bytes_per_second)
        """How fast the tier loads."""
        self.store_queue = StoreQueue()
        """What is to be stored."""
        self.storing: dict[KVCacheBlock, str | None] = {}
        """The device's blocks that stores read now, and own, with their salts."""
        self.arrived: dict[KVCacheBlock, str | None] = {}
        """Those that stores have read, but that can't be cached here yet because an earlier block is still being read.
        The stores don't own them any more.
        """
        self.lost: set[KVCacheBlock] = set()
        """Blocks of `storing` and `arrived` whose KV turned out to be lost after the store began. They are noted at
        once, because they may be written and cached on the device again before they are cached here.
        """
        self.copies: dict[KVCacheBlock, KVCacheBlock] = {}
        """By block of the device, the slot that was last stored from it. Either may have been reused since."""
        self.max_storing = max_storing
        """The most blocks in `storing`."""
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
        """What is to be remembered if the tier is persistent; otherwise None."""
        self.quotas: TenantQuotas | None = None
        """Those of tenants; None without quotas."""
        self.removals: Watcher | None = None
        """A watcher that is told for which salt slots are taken; None: there is none."""
        self.num_loading_bytes = 0
        """Bytes of loads that haven't ended, begun or not."""
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

    def drop_bad(self, prefix: Prefix, column: int | None) -> None:
        """Forget the last block of a prefix, or, with a column, what is attached to it in that column. A lookup."""
        if column is None:
            self.drop_prefix(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
            return
        found = self.match(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
        attached = self.index.attached
        if len(found) < len(prefix.blocks) or attached is None:
            return
        if column < attached.layout.row_size:
            slot = attached.at(found[-1], column)
        else:
            parts = self.parts_at(found[-1])
            slot = parts[0] if parts else None
        if slot is not None:
            self.drop([slot])

    def drop_copies(self, sequence: Sequence, lost: set[KVCacheBlock]) -> list[Prefix]:
        """Forget what was stored from lost blocks of a sequence, and everything after it. Returns its prefixes.

        The tier may have the same prefix from an earlier time, when its KV was there. So only slots that were stored
        from these very blocks are forgotten. A lookup in the tier, and O(blocks).
        """
        prefixes, slots, size = list[Prefix](), self.slots_of(sequence), self.index.block_size
        for index, (block, slot) in enumerate(zip(sequence.blocks, slots)):  # noqa: B905  # the shorter one counts
            if block in lost and self.copies.get(block) is slot:
                self.drop([slot], "aborted")
                prefixes.append(prefix_in(sequence, index + 1, size))
                break
        attached, side = self.index.attached, sequence.side_tables
        if attached is None or side is None:
            return prefixes
        slots = self.slots_of(sequence)
        for side_group, number, block in side.owned():
            position, column = side_group.home(number)
            if block in lost and block in self.copies and position < len(slots):
                found = attached.at(slots[position], column)
                if found is not None and self.copies[block] is found:
                    self.drop([found], "aborted")
                    prefixes.append(prefix_in(sequence, position + 1, size))
        return prefixes

    def drop_states(self, sequence: Sequence, lost: set[KVCacheBlock]) -> None:
        """Forget what was stored of a sequence's checkpoints that are lost, or whose last tokens are. One lookup.

        As in `drop_copies`, another copy of the same state stays.
        """
        state = None if sequence.side_tables is None else sequence.side_tables.live_state
        checkpoints = None if self.index.attached is None else self.index.attached.checkpoints
        if state is None or checkpoints is None or not state.made:
            return
        slots = self.slots_of(sequence)
        for made in state.made:
            number = made.position // self.index.block_size
            if 0 < number <= min(len(slots), len(sequence.blocks)):
                is_lost = sequence.blocks[number - 1] in lost or not lost.isdisjoint(made.blocks)
                stored = checkpoints.at(slots[number - 1]) if is_lost else None
                if stored is not None and [self.copies.get(block) for block in made.blocks] == stored.blocks:
                    self.drop(stored.blocks[:1], "aborted")

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
        return len(self.store_queue) > 0 or bool(self.changes)

    def empty_slots(self) -> list[int]:
        """Return the slots that hold nothing that lookups can find, and that no transfer uses. O(slots)."""
        return [slot.block_id for slot in self.pool.blocks if not slot.ref_cnt and not slot.is_cached]

    def request(self, node: Node) -> None:
        """Ask for the prefix that ends at a node of the device's cache to be stored. O(1)."""
        self.num_dropped_blocks += self.store_queue.add(node)

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

    def attach(self, primary: KVCacheBlock, column: int, slot: KVCacheBlock) -> bool:
        """Attach a slot to a cached primary slot, in a column of `BlockIdentity`. Returns whether it is cached. O(1).

        It isn't if there is no such column, or the column is taken.
        """
        attached = self.index.attached
        return (
            attached is not None and column <= attached.layout.row_size and attached.attach(primary, column - 1, slot)
        )

    @property
    def part_columns(self) -> range:
        """The columns of `BlockIdentity` for the parts of a checkpoint, which come after those of side groups. O(1).

        Empty unless layers keep a state.
        """
        if self.index.attached is None:
            return range(0)
        layout = self.index.attached.layout
        first, kind = layout.row_size + 1, layout.state_kind
        return range(first, first + (0 if kind is None else kind.checkpoint_blocks))

    def parts_at(self, primary: KVCacheBlock) -> list[KVCacheBlock]:
        """Return the slots of the checkpoint at a cached slot, in the order of their columns; perhaps none. O(1)."""
        checkpoints = None if self.index.attached is None else self.index.attached.checkpoints
        found = None if checkpoints is None else checkpoints.at(primary)
        return [] if found is None else found.blocks

    def attach_parts(self, primary: KVCacheBlock, slots: dict[int, KVCacheBlock]) -> bool:
        """Attach a checkpoint to a cached slot that has none, if all of its parts are there. slots: by column.

        Returns whether it is cached. O(slots).
        """
        attached = self.index.attached
        if attached is None or not slots or len(slots) < len(self.part_columns) or self.parts_at(primary):
            return False
        parts = [slots[column] for column in sorted(slots)]
        attached.attach_checkpoint(primary, Checkpoint(parts, is_likely_end=True))
        return True

    def is_attached(self, primary: KVCacheBlock, column: int) -> bool:
        """Whether anything is attached to a cached slot in a column. O(1)."""
        if column in self.part_columns:
            return bool(self.parts_at(primary))
        attached = self.index.attached
        is_column = attached is not None and 0 < column <= attached.layout.row_size
        return attached is not None and is_column and attached.at(primary, column - 1) is not None

    def note_attached(self, chain: list[KVCacheBlock], tokens: bytearray, column: int) -> None:
        """Record that a slot was attached to the last primary slot of a chain. tokens: at least the chain's."""
        attached = self.index.attached
        if attached is None or self.index.events is None:
            return
        if column not in self.part_columns:
            attached.note_column(chain, tokens, column - 1)
            return
        checkpoint = None if attached.checkpoints is None else attached.checkpoints.at(chain[-1])
        if checkpoint is not None:
            attached.note_checkpoint_at_end(chain, checkpoint, tokens)

    def is_used_with_prefix(self, column: int) -> bool:
        """Whether a hit of a longer prefix also uses what is attached in a column. O(groups).

        True for full attention, and for windows with `window_store_tokens`.
        """
        attached = self.index.attached
        if self.window_store_tokens is not None or attached is None:
            return attached is not None
        for side_group in attached.layout.side_groups:
            if side_group.first_column < column <= side_group.first_column + side_group.num_columns:
                return side_group.kind.sees_all
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


def make_pool(tier: Tier, block_size: int, layout: GroupLayout | None, max_storing: int) -> TierPool:
    """Return the slots of a tier. layout: of the manager's groups; None: there is one."""
    index = PrefixIndex(block_size, identity_hash_scheme(), layout)
    kind = None if layout is None else layout.state_kind
    if kind is not None:
        max_storing = max(max_storing, kind.checkpoint_blocks)
    if not tier.is_persistent:
        return TierPool(tier, max_storing, BlockPool(tier.num_blocks, index), None)
    changes = SlotChanges()
    return TierPool(tier, max_storing, PersistentSlots(tier.num_blocks, index, changes), changes)
