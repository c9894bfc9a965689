"""Somebody else's functions that are told which blocks are taken and touched: for metrics with records of their own."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hooks import Watcher
from kvblocks.core.prefix_index import PrefixIndex

BlockCallback = Callable[[Items[KVCacheBlock]], Any]


class BlockCallbacks(Watcher):
    """Tells `taken` of blocks that were taken from the pool, and `touched` of those that got one more owner.

    Made by `KVCacheManager.watch_blocks`. The functions are called in the middle of a change: they must change nothing
    of the manager, and when one raises, the manager is corrupt.
    """

    def __init__(self, index: PrefixIndex, taken: BlockCallback, touched: BlockCallback) -> None:
        self._index = index
        self._taken = taken
        self._touched = touched
        index.watch(self)

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell it."""
        if blocks:
            self._taken(blocks)

    def note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell it."""
        if blocks:
            self._touched(blocks)

    def stop(self) -> None:
        """Tell nothing more. Does nothing the second time. O(watchers)."""
        self._index.unwatch(self)
