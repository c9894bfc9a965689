"""Events by digest, for hash schemes in which several prefixes may share a digest.

A manager records events for each prefix. If two prefixes share a digest (`kvblocks.hashing.vllm`) and one is removed, a
reader who keeps a set of digests would lose it, though the other prefix is still cached. A manager with such a scheme
therefore counts, by medium and group, how many prefixes have each digest. It gives out `BlockStored` for the first of
them, and `BlockRemoved` for the last. Digests of our own format are unique, so nothing is counted for them.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvblocks.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, part_of

Key = tuple[str, int | None, bytes]
"""A digest on one medium, in one group: (medium, group, digest)."""


class SharedHashes:
    """Turns records about prefixes into records about digests."""

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}

    def told(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Return the parts of `events` that change the set of digests. Give it all events, in order. O(blocks)."""
        shown: list[CacheEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                shown += self._stored(event)
            elif isinstance(event, BlockRemoved):
                gone = tuple(
                    [digest for digest in event.block_hashes if self._is_last((event.medium, event.group_idx, digest))]
                )
                if gone:
                    shown.append(event if len(gone) == len(event.block_hashes) else replace(event, block_hashes=gone))
            else:
                if isinstance(event, AllBlocksCleared):
                    self._counts = {}
                shown.append(event)
        return shown

    def _stored(self, event: BlockStored) -> list[BlockStored]:
        """Return the stretches of a record whose digests are new."""
        is_new = [self._is_first((event.medium, event.group_idx, digest)) for digest in event.block_hashes]
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

    def _is_first(self, key: Key) -> bool:
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        return count == 0

    def _is_last(self, key: Key) -> bool:
        count = self._counts.pop(key)
        if count > 1:
            self._counts[key] = count - 1
        return count == 1
