"""`KVBlocksPagedCache`, and its scheduler, for transformers 5.15 to 5.17, which has groups of equally many layers.

A block has rows for `block_size` tokens in each tensor. There are as many tensors as a group has layers, so a block can
belong to any group. kvblocks' groups and block ids are transformers' own. The tensors and `update` stay as they are.
Two blocks after the others are for padding.

The scheduler of these versions counts how many blocks a request has, and tells the cache only how many to add. It is
replaced by one that asks as newer versions do, for a request and a number of tokens.
"""

from typing import Any

from transformers.generation.continuous_batching import continuous_api, scheduler
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_manager import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from kvblocks import Group, KVCacheManager, kind_of_layers
from kvblocks.integrations.transformers.bookkeeping import Bookkeeping, Nothing
from kvblocks.integrations.transformers.probe import refuse
from kvblocks.integrations.transformers.records import Records
from kvblocks.integrations.transformers.rows import FullRows, Geometry, SlidingRows


class _Table:
    """A group's allocator. It has no lists of its own; it says where tokens are."""

    def __init__(self, manager: KVCacheManager, records: Records, group: int, theirs: Any) -> None:
        self.kv_manager, self.kv_records, self.kv_geometry = manager, records, Geometry(group)
        self.tokens_per_page = self.block_physical_stride = theirs.block_size
        self.block_table: dict[str, list[int]] = {}  # transformers would copy these to the CPU


class FullTable(_Table, FullRows):
    """A group of layers with full attention."""


class SlidingTable(_Table, SlidingRows):
    """A group of layers with a sliding window."""

    def __init__(self, manager: KVCacheManager, records: Records, group: int, theirs: Any) -> None:
        super().__init__(manager, records, group, theirs)
        self.sliding_window, self.sentinel_index = theirs.sliding_window, theirs.sentinel_index


TABLES = {FullAttentionCacheAllocator: FullTable, SlidingAttentionCacheAllocator: SlidingTable}
"""The classes that replace transformers' allocators."""


class KVBlocksPagedCache(Bookkeeping, PagedAttentionCache):
    """Replaces transformers' cache. Raises UnsupportedEngineError for models and settings that aren't supported."""

    block_size: int  # transformers' own

    def __init__(
        self,
        config: Any,
        continuous_batching_config: Any,
        device: Any,
        distributed_helper: Any,
        tp_plan: Any,
        dtype: Any,
    ) -> None:
        if distributed_helper.tp_size > 1:
            raise refuse("tensor parallelism", "it was not tested")
        super().__init__(config, continuous_batching_config, device, distributed_helper, tp_plan, dtype)
        theirs: list[Any] = list(self.group_cache_managers)
        windows = [getattr(allocator, "sliding_window", None) for allocator in theirs]
        size = self.block_size
        groups: list[Group] = [kind_of_layers(size, window) for window in windows]
        if any(windows):
            self.max_blocks_per_request = 0  # 5.15's cache doesn't set it: windows have no tables for kernels
        self.keep_books(continuous_batching_config, groups, self.num_blocks, 0)
        self.group_cache_managers: list[Any] = [
            TABLES[type(allocator)](self.manager, self.records, group, allocator)
            for group, allocator in enumerate(theirs)
        ]
        self._block_manager = Nothing("_block_manager")

    def get_num_free_blocks(self) -> int:
        """Return how many blocks are free, cached ones included."""
        return self.manager.num_free_blocks

    def blocks_in_use(self, request_id: str) -> int:
        """Return how many blocks would become free with a request, which are those that nobody else holds."""
        record = self.records.get(request_id)
        if record is None:
            return 0
        tables = [record.sequence.group_blocks(group) for group in range(len(self.manager.groups))]
        return sum(block is not None and block.ref_cnt == 1 for table in tables for block in table)

    def allocate_blocks(
        self,
        n_blocks: int,
        request_id: str,
        allocated_blocks: int,  # noqa: ARG002  # transformers' own signature
    ) -> int | None:
        """Give blocks to a request that warms up kernels. All other requests use `can_store_request_tokens`."""
        is_served = self.allocate_unfound(request_id, None, n_blocks * self.block_size)
        return n_blocks if is_served else None

    def mark_shareable_blocks_as_complete(self, state: Any, num_complete_blocks: dict[str, int]) -> None:
        """Note that a step has written a request's tokens. `_Scheduler` made the numbers."""
        self.mark_complete_blocks(state, num_complete_blocks)

    def compute_max_num_forks(self, source_request_id: str) -> int:
        """Return for how many forks by `fork_request` there is room.

        A fork shares full, computed blocks. The rest, up to the first token after the prompt, is its own.
        """
        record = self.records.get(source_request_id)
        if record is None:
            return 0
        num_shared = record.sequence.num_computed_tokens // self.block_size
        num_held = -(-(record.sequence.num_tokens + 1) // self.block_size)
        return self.manager.num_free_blocks // ((num_held - num_shared) * len(self.manager.groups))

    def fork_request(self, source_request_id: str, destination_request_ids: list[str]) -> tuple[list[int], list[int]]:
        """Fork a request, for which there is room. Returns the blocks to copy: sources, and destinations."""
        forked, copies = self.fork_records(source_request_id, destination_request_ids)
        assert len(forked) == len(destination_request_ids), f"{source_request_id}: room for all forks was promised"
        return [source for _, source, _ in copies], [destination for _, _, destination in copies]


class _Scheduler(scheduler.Scheduler):
    """Asks the cache for slots as newer schedulers do. Comes before one of transformers' in the class order."""

    cache: KVBlocksPagedCache

    def _allocate_blocks_if_needed(self, state: Any, len_next_tokens: int) -> bool:
        """Make room for a request's next tokens, and return whether there is. Notes starved requests."""
        if self.cache.can_store_request_tokens(state, len_next_tokens):
            return True
        if state.request_id in self.active_requests:
            total = state.current_len() + len_next_tokens
            self.starved_requests.append((state, self.cache.count_needed_blocks(state.request_id, total)))
        return False

    def _process_candidates(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule requests, and note for each where its tokens of the step end."""
        result = super()._process_candidates(*args, **kwargs)
        for future in result[0]:
            future.complete_blocks = self.cache.count_new_complete_blocks(future.state, future.query_length)
        return result


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what `install` replaces: each existing scheduler, and the default one."""
    ours = {name: _on_kvblocks(theirs) for name, theirs in scheduler.SCHEDULER_MAPPING.items()}
    return [
        (continuous_api, "SCHEDULER_MAPPING", ours),
        (continuous_api, "FIFOScheduler", _on_kvblocks(scheduler.FIFOScheduler)),
    ]


def _on_kvblocks(theirs: type) -> type:
    """Return a subclass of a scheduler of transformers that asks kvblocks."""
    return type(f"KVBlocks{theirs.__name__}", (_Scheduler, theirs), {})
