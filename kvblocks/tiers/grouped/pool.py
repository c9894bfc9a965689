"""`GroupTierPool`: the slots of a tier below several groups."""

from typing import SupportsIndex

from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.core.group_pool import GroupPool
from kvblocks.core.layout import GroupLayout
from kvblocks.core.sequence import Sequence
from kvblocks.core.tables import tables_of
from kvblocks.tiers.changes import SlotChanges
from kvblocks.tiers.grouped.telling import note_attached, note_checkpoint
from kvblocks.tiers.identity import identity_hash_scheme
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.tier import Tier
from kvblocks.tiers.wishes import Prefix, prefix_in


class PersistentGroupSlots(GroupPool):
    """A `GroupPool` that reports slots whose contents were detached, as `PersistentSlots` does."""

    def __init__(self, num_blocks: SupportsIndex, index: GroupIndex, changes: SlotChanges) -> None:
        super().__init__(num_blocks, index)
        self._changes = changes

    def pop_detached(self) -> list[KVCacheBlock]:
        """`GroupPool.pop_detached`. Lookups no longer find what these slots held; the bytes are still there."""
        self._changes.note_unstored(self.index.detached)
        return super().pop_detached()


class GroupTierPool(TierPool):
    """A `TierPool` whose slots hold any group's blocks. group_index: what they hold."""

    def __init__(self, tier: Tier, layout: GroupLayout, max_storing: int) -> None:
        """layout: of the manager's groups."""
        self.group_index = index = GroupIndex(layout, identity_hash_scheme())
        changes = SlotChanges() if tier.is_persistent else None
        number = tier.num_blocks
        slots = GroupPool(number, index) if changes is None else PersistentGroupSlots(number, index, changes)
        super().__init__(tier, max_storing, slots, changes)

    def drop_copies(self, sequence: Sequence, lost: set[KVCacheBlock]) -> list[Prefix]:
        """As `TierPool`, for the blocks of all tables."""
        prefixes, slots = super().drop_copies(sequence, lost), self.slots_of(sequence)
        for side_group, number, block in tables_of(sequence).owned():
            position, column = side_group.home(number)
            if block in lost and block in self.copies and position < len(slots):
                slot = self.group_index.attached(slots[position], column)
                if slot is not None and self.copies[block] is slot:
                    self.drop([slot], "aborted")
                    prefixes.append(prefix_in(sequence, position + 1, self.index.block_size))
        return prefixes

    def drop_states(self, sequence: Sequence, lost: set[KVCacheBlock]) -> None:
        """Forget what was stored of a sequence's checkpoints that are lost, or whose last tokens are. One lookup.

        As in `drop_copies`, another copy of the same state stays.
        """
        state, checkpoints = tables_of(sequence).live_state, self.group_index.checkpoints
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

    @property
    def part_columns(self) -> range:
        """As `TierPool`. They come after those of side groups."""
        layout = self.group_index.layout
        first, kind = layout.row_size + 1, layout.state_kind
        return range(first, first + (0 if kind is None else kind.checkpoint_blocks))

    def parts_at(self, primary: KVCacheBlock) -> list[KVCacheBlock]:
        """As `TierPool`."""
        found = None if self.group_index.checkpoints is None else self.group_index.checkpoints.at(primary)
        return [] if found is None else found.blocks

    def attach_parts(self, primary: KVCacheBlock, slots: dict[int, KVCacheBlock]) -> bool:
        """As `TierPool`. Returns False if parts are missing, or the primary block has a checkpoint."""
        if not slots or len(slots) < len(self.part_columns) or self.parts_at(primary):
            return False
        self.group_index.attach_checkpoint(
            primary, Checkpoint([slots[column] for column in sorted(slots)], is_landmark=True)
        )
        return True

    def attach(self, primary: KVCacheBlock, column: int, slot: KVCacheBlock) -> bool:
        """As `TierPool`. Returns False if the layout has no such column, or the column is taken."""
        return column <= self.group_index.layout.row_size and self.group_index.attach(primary, column - 1, slot)

    def is_attached(self, primary: KVCacheBlock, column: int) -> bool:
        """As `TierPool`."""
        if column in self.part_columns:
            return bool(self.parts_at(primary))
        is_column = 0 < column <= self.group_index.layout.row_size
        return is_column and self.group_index.attached(primary, column - 1) is not None

    def note_attached(self, chain: list[KVCacheBlock], tokens: bytearray, column: int) -> None:
        """As `TierPool`."""
        if self.group_index.events is not None:
            if column in self.part_columns:
                checkpoint = (
                    None if self.group_index.checkpoints is None else self.group_index.checkpoints.at(chain[-1])
                )
                if checkpoint is not None:
                    note_checkpoint(self.group_index, chain, checkpoint, tokens)
                return
            note_attached(self.group_index, chain, tokens, column - 1)

    def is_used_with_prefix(self, column: int) -> bool:
        """As `TierPool`: True for full attention, and for windows with `window_store_tokens`."""
        if self.window_store_tokens is not None:
            return True
        for side_group in self.group_index.layout.side_groups:
            if side_group.first_column < column <= side_group.first_column + side_group.num_columns:
                return side_group.kind.sees_all
        return False
