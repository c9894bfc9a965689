"""Callbacks that are told which blocks are taken and touched, for a caller's own metrics."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hooks import Watcher
from kvblocks.core.prefix_index import PrefixIndex

BlockCallback = Callable[[Items[KVCacheBlock]], Any]


class BlockCallbacks(Watcher):
    """Calls `taken` with blocks that were taken from the pool, and `touched` with blocks that got one more owner.

    Made by a manager, for replay and the integrations. The functions are called in the middle of a change, so they must
    not change the manager. If one raises, the manager is left half done and can't be used any more.
    """

    def __init__(self, index: PrefixIndex, taken: BlockCallback, touched: BlockCallback) -> None:
        self._index = index
        self._taken = taken
        self._touched = touched
        index.watch(self)

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """Call `taken`."""
        if blocks:
            self._taken(blocks)

    def note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        """Call `touched`."""
        if blocks:
            self._touched(blocks)

    def stop(self) -> None:
        """End the calls. Does nothing the second time. O(watchers)."""
        self._index.unwatch(self)
