"""vLLM's scheduler with kvblocks' rule for duplicates: of equal cached blocks at most one is free.

vLLM keeps every copy of a prefix until it is evicted. So copies that nobody needs outlive other prompts' prefixes. The
two decide the same except where that matters, which is with drafts of a model or with priorities, in a full pool.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler


class OneCopyPool(BlockPool):
    """Takes a released block that isn't the one that hits get out of the cache, and reuses it first."""

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        released = list(ordered_blocks)
        super().free_blocks(released)
        queue = self.free_block_queue
        for block in released:
            if block.ref_cnt or block.is_null or block.block_hash is None:
                continue
            first = self.cached_block_hash_to_block.get_one_block(block.block_hash)
            if first is not None and first is not block:
                self._maybe_evict_cached_block(block)
                if not first.ref_cnt:  # it was used now, so it goes where the copy would have gone
                    queue.remove(first)
                    behind = block.next_free_block
                    block.next_free_block = behind.prev_free_block = first
                    first.prev_free_block, first.next_free_block = block, behind
                    queue.num_free_blocks += 1
                queue.remove(block)
                queue.prepend_n([block])


def with_one_copy(kind: type[Scheduler]) -> type[Scheduler]:
    """Return a class of schedulers whose pool is a `OneCopyPool`."""

    class OneCopyScheduler(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kv_cache_manager.block_pool.__class__ = OneCopyPool

    return OneCopyScheduler
