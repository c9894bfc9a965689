"""Events by name, where several prefixes may have one name: `BlockStored` with the first, `BlockRemoved` with the last.

A manager's records are by prefix, and exact. Under a scheme whose names are coarser than that (`kvblocks.wire.names`),
a reader who keeps a set of names would lose one that another prefix still has. So a manager with such a scheme counts,
for each name, how many prefixes of each group have it. With names of our own there is nothing to count.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvblocks.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent


class SharedNames:
    """What turns records by prefix into records by name. A name says where: group, digest."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int | None, bytes], int] = {}

    def told(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Return what of `events`, which follow those of the last call, changes the set of names. O(blocks)."""
        shown: list[CacheEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                shown += self._stored(event)
            elif isinstance(event, BlockRemoved):
                gone = tuple([name for name in event.block_hashes if self._is_last(event.group_idx, name)])
                if gone:
                    shown.append(event if len(gone) == len(event.block_hashes) else replace(event, block_hashes=gone))
            else:
                assert isinstance(event, AllBlocksCleared), f"an unknown record: {event}"
                self._counts = {}
                shown.append(event)
        return shown

    def _stored(self, event: BlockStored) -> list[BlockStored]:
        """Return the stretches of a record whose names are new."""
        is_new = [self._is_first(event.group_idx, name) for name in event.block_hashes]
        if all(is_new):
            return [event]
        stretches: list[BlockStored] = []
        start = 0
        while start < len(is_new):
            end = start
            while end < len(is_new) and is_new[end]:
                end += 1
            if end > start:
                stretches.append(_part(event, start, end))
            start = end + 1
        return stretches

    def _is_first(self, group: int | None, name: bytes) -> bool:
        count = self._counts.get((group, name), 0)
        self._counts[group, name] = count + 1
        return count == 0

    def _is_last(self, group: int | None, name: bytes) -> bool:
        count = self._counts.pop((group, name))
        if count > 1:
            self._counts[group, name] = count - 1
        return count == 1


def _part(event: BlockStored, start: int, end: int) -> BlockStored:
    """Return a record of blocks start to end - 1 of a record's."""
    size = 4 * event.block_size
    return replace(
        event,
        block_hashes=event.block_hashes[start:end],
        parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
        tokens=event.tokens[start * size : end * size],
        extra_keys=tuple([(index - start, keys) for index, keys in event.extra_keys if start <= index < end]),
        block_ids=event.block_ids[start:end],
    )
