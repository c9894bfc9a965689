"""Events by name, for schemes in which several prefixes may share a name.

A manager records events for each prefix. If two prefixes share a name (`kvblocks.wire.names`) and one is removed, a
reader who keeps a set of names would lose the name, though the other prefix is still cached. A manager with such a
scheme therefore counts, by medium and group, how many prefixes have each name. It gives out `BlockStored` for the first
of them, and `BlockRemoved` for the last. Our own names are unique, so nothing is counted for them.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvblocks.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, part_of

Name = tuple[str, int | None, bytes]
"""The name of a prefix on one medium, in one group: (medium, group, digest)."""


class SharedNames:
    """Turns records about prefixes into records about names."""

    def __init__(self) -> None:
        self._counts: dict[Name, int] = {}

    def told(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Return the parts of `events` that change the set of names. Give it all events, in order. O(blocks)."""
        shown: list[CacheEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                shown += self._stored(event)
            elif isinstance(event, BlockRemoved):
                gone = tuple(
                    [name for name in event.block_hashes if self._is_last((event.medium, event.group_idx, name))]
                )
                if gone:
                    shown.append(event if len(gone) == len(event.block_hashes) else replace(event, block_hashes=gone))
            else:
                if isinstance(event, AllBlocksCleared):
                    self._counts = {}
                shown.append(event)
        return shown

    def _stored(self, event: BlockStored) -> list[BlockStored]:
        """Return the stretches of a record whose names are new."""
        is_new = [self._is_first((event.medium, event.group_idx, name)) for name in event.block_hashes]
        if all(is_new):
            return [event]
        stretches: list[BlockStored] = []
        start = 0
        while start < len(is_new):
            end = start
            while end < len(is_new) and is_new[end]:
                end += 1
            if end > start:
                stretches.append(part_of(event, start, end))
            start = end + 1
        return stretches

    def _is_first(self, name: Name) -> bool:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        return count == 0

    def _is_last(self, name: Name) -> bool:
        count = self._counts.pop(name)
        if count > 1:
            self._counts[name] = count - 1
        return count == 1
