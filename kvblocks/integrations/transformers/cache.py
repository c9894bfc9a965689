"""`KVBlocksPagedCache`: transformers' PagedAttentionCache with a KVCacheManager for its bookkeeping, from 5.18 on."""

from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvblocks.integrations.transformers.allocators import OURS, plan_groups
from kvblocks.integrations.transformers.bookkeeping import Bookkeeping, Nothing
from kvblocks.integrations.transformers.probe import refuse


class SlotsOnly(Nothing):
    """Replaces transformers' pool. Cached blocks are free blocks here, so there is nothing to give back."""

    def try_to_free_sectors(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


class KVBlocksPagedCache(Bookkeeping, PagedAttentionCache):
    """Replaces transformers' cache. Raises UnsupportedEngineError."""

    def __init__(
        self,
        config: Any,
        continuous_batching_config: Any,
        device: Any,
        distributed_helper: Any,
        dtype: Any,
        model_supports_logits_to_keep: bool = False,
    ) -> None:
        if distributed_helper.tp_size > 1:
            raise refuse("tensor parallelism", "it was not tested")
        super().__init__(
            config, continuous_batching_config, device, distributed_helper, dtype, model_supports_logits_to_keep
        )
        groups, geometries, first_block_id = plan_groups(self)
        self._allocators: list[Any] = list(self.cache_allocators.values())
        num_blocks = self._allocators[0].num_blocks // geometries[0].num_pages
        self.keep_books(continuous_batching_config, groups, num_blocks, first_block_id)
        self.pool = SlotsOnly("pool")
        self._layer_types: list[str] = list(self.cache_allocators)  # 5.18's allocators don't know their layer type
        for layer_type, allocator, geometry in zip(self._layer_types, self._allocators, geometries, strict=True):
            allocator.__class__ = OURS[layer_type]  # only in this cache; the tensors are registered already
            allocator.kv_manager, allocator.kv_records, allocator.kv_geometry = self.manager, self.records, geometry
            allocator.kv_is_first = not geometry.group
            allocator.pool = self.pool

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Return how many of these requests, in order, there is room for."""
        num_free = self.manager.num_free_blocks
        for number, needed in enumerate(list_blocks_needed):
            num_free -= sum(needed.values())
            if num_free < 0:
                return number
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Return the share of free blocks, cached ones included; or, if not relative, their bytes."""
        num_free = self.manager.num_free_blocks
        if relative:
            return num_free / self.manager.num_blocks
        return int(num_free * (self.num_sectors * self.bytes_per_sector // self.manager.num_blocks))

    def evict_cached_blocks(self) -> bool:
        """Do nothing: cached blocks are free blocks. They are evicted one by one, least recently used first."""
        return False

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: dict[str, tuple[list[int], list[int]]]
    ) -> list[str]:
        """Fork a request for as many of `dst_req_ids` as there is room for, note the copies, and return those ids."""
        forked, copies = self.fork_records(src_state.request_id, dst_req_ids)
        for group, old, new in copies:
            pairs = self._allocators[group].pairs_to_copy(old, new)
            for noted, ids in zip(copy_src_and_dst[self._layer_types[group]], pairs, strict=True):
                noted.extend(ids)
        return forked


def schedulers() -> dict[str, Any]:
    """Return the replacements of schedulers in `continuous_api`: none is needed from 5.18 on."""
    return {}
