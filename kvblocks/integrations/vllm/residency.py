"""vLLM's residency metrics: reports to vLLM's collector which blocks are taken and hit."""

from collections.abc import Sequence as Items
from typing import Any

from kvblocks import KVCacheBlock, KVCacheManager
from kvblocks.integrations.vllm.views import BlockView


class BlockLives:
    """Reports to a `KVCacheMetricsCollector` what happens to blocks, until `stop`.

    caches: whether prefixes are cached. If not, vLLM doesn't count the end of a block as an eviction.
    """

    def __init__(self, manager: KVCacheManager, collector: Any, caches: bool) -> None:
        self._collector = collector
        self._caches = caches
        self._callbacks = manager._watch_blocks(self._note_taken, self._note_touched)  # noqa: SLF001  # a hook for us

    def stop(self) -> None:
        """Stop reporting."""
        self._callbacks.stop()

    def note_evicted(self, blocks: Items[KVCacheBlock]) -> None:
        """Report that the contents of blocks were evicted."""
        for block in blocks:
            self._collector.on_block_evicted(BlockView(block))

    def _note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        for block in blocks:
            view = BlockView(block)
            if self._caches:
                self._collector.on_block_evicted(view)
            self._collector.on_block_allocated(view)

    def _note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        for block in blocks:
            self._collector.on_block_accessed(BlockView(block))
