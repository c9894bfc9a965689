"""Changes of the slots of a tier that outlives its manager, so that others can remember what the slots hold.

A use is reported by the last slot of the prefix that was used, since `restore` counts a block as being as new as the
newest block after it. The use of a long prefix is thus a single number.
"""

from typing import SupportsIndex

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.tiers.identity import BlockIdentity

Changes = dict[int, BlockIdentity | None]
"""By slot id: the identity of what the slot holds, or None if lookups find nothing in it. The latest store is last."""


class SlotChanges:
    """How slots changed since the last `take`. Called by the code that stores in them, and by their pool."""

    def __init__(self) -> None:
        self._changes: Changes = {}
        self._used: dict[int, None] = {}  # in the order of use

    def __bool__(self) -> bool:
        """Whether `take` would return any change. O(1)."""
        return bool(self._changes)

    def note_stored(self, slots: list[KVCacheBlock], identities: list[BlockIdentity]) -> None:
        """Record what slots hold that held nothing before. O(slots)."""
        for slot, identity in zip(slots, identities, strict=True):
            self._changes.pop(slot.block_id, None)
            self._changes[slot.block_id] = identity

    def note_unstored(self, slots: list[KVCacheBlock]) -> None:
        """Record that slots hold nothing that lookups can find. O(slots)."""
        self._changes.update(dict.fromkeys([slot.block_id for slot in slots]))
        for slot in slots:
            self._used.pop(slot.block_id, None)

    def note_used(self, slots: list[KVCacheBlock]) -> None:
        """Record a use of the prefix that is in these slots, or of slots that are attached to one.

        For a prefix, its last slot stands for all. O(1) for a prefix, O(slots) for attached ones.
        """
        last = next((slot for slot in reversed(slots) if slot.is_cached), None)
        if last is None or last.run is None:
            return
        is_prefix = last.index < len(last.run.blocks) and last.run.blocks[last.index] is last
        for slot in (last,) if is_prefix else slots:
            if slot.is_cached and slot.block_id not in self._changes:
                self._used.pop(slot.block_id, None)
                self._used[slot.block_id] = None

    def take_used(self) -> list[int]:
        """Return the slots in which used prefixes end, the latest used one last, and forget them. O(1)."""
        used, self._used = self._used, {}
        return [*used]

    def look(self) -> Changes:
        """Return what `take` would, without forgetting it. O(changes)."""
        return dict(self._changes)

    def take(self) -> Changes:
        """Return what became of slots since the last call, and forget these changes. O(1)."""
        changes, self._changes = self._changes, {}
        return changes


class PersistentSlots(BlockPool):
    """A `BlockPool` that reports slots whose contents were detached although no new block took them."""

    def __init__(self, num_blocks: SupportsIndex, index: PrefixIndex, changes: SlotChanges) -> None:
        super().__init__(num_blocks, index)
        self._changes = changes

    def pop_detached(self) -> list[KVCacheBlock]:
        """`BlockPool.pop_detached`. Lookups no longer find what these slots held; the bytes are still there."""
        self._changes.note_unstored(self.index.detached)
        return super().pop_detached()
