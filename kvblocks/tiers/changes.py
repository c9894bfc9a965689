"""`PersistentSlots`: the slots of a tier that outlives its manager, and what is to be remembered of them."""

from typing import SupportsIndex

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.tiers.identity import BlockIdentity

Changes = dict[int, BlockIdentity | None]
"""By a slot's id: whose bytes it holds, or None, nothing that is to be found; what was stored last comes last."""


class PersistentSlots(BlockPool):
    """`BlockPool` that keeps what became of its slots until somebody asks."""

    def __init__(self, num_blocks: SupportsIndex, index: PrefixIndex) -> None:
        super().__init__(num_blocks, index)
        self._changes: Changes = {}

    def requeue_detached(self) -> None:
        """`BlockPool.requeue_detached`; what these slots held is not to be found any more, though it is there still."""
        self.note_unstored(self.index.detached)
        super().requeue_detached()

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` has anything to say. O(1)."""
        return bool(self._changes)

    def note_stored(self, slots: list[KVCacheBlock], identities: list[BlockIdentity]) -> None:
        """Take note of what slots hold. O(slots)."""
        for slot, identity in zip(slots, identities, strict=True):
            self._changes.pop(slot.block_id, None)
            self._changes[slot.block_id] = identity

    def note_unstored(self, slots: list[KVCacheBlock]) -> None:
        """Take note that slots hold nothing that is to be found. O(slots)."""
        self._changes.update(dict.fromkeys([slot.block_id for slot in slots]))

    def take_changes(self) -> Changes:
        """Return what became of slots since the last call, and forget it. O(1)."""
        changes, self._changes = self._changes, {}
        return changes
