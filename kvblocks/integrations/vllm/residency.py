"""vLLM's residency metrics: its collector, told by kvblocks of blocks that are taken and hit."""

from collections.abc import Sequence as Items
from typing import Any

from kvblocks import KVCacheBlock, KVCacheManager
from kvblocks.integrations.vllm.views import BlockView


class BlockLives:
    """Tells a `KVCacheMetricsCollector` what happens to blocks, until `stop`."""

    def __init__(self, manager: KVCacheManager, collector: Any) -> None:
        self._collector = collector
        self._callbacks = manager.watch_blocks(self._note_taken, self._note_touched)

    def stop(self) -> None:
        """Tell it nothing more."""
        self._callbacks.stop()

    def _note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        for block in blocks:
            view = BlockView(block)
            self._collector.on_block_evicted(view)
            self._collector.on_block_allocated(view)

    def _note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        for block in blocks:
            self._collector.on_block_accessed(BlockView(block))
