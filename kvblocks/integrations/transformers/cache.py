"""`KVBlocksPagedCache`: transformers' PagedAttentionCache with a KVCacheManager for its bookkeeping, from 5.18 on."""

import sys
from typing import Any

from transformers.generation.continuous_batching import continuous_api, scheduler
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvblocks import Group, RecurrentState
from kvblocks.integrations.transformers.allocators import OURS, plan_groups
from kvblocks.integrations.transformers.bookkeeping import Bookkeeping, Nothing
from kvblocks.integrations.transformers.probe import refuse
from kvblocks.integrations.transformers.state_kinds import kind_of, state_types
from kvblocks.integrations.transformers.state_slots import ModelStates, state_bytes
from kvblocks.integrations.transformers.state_steps import StateModelRunner, with_cuts, without_state_layers

_PACKAGE, _GROUPING = "transformers.generation.continuous_batching", "group_layers_by_attn_type"

_MOST_SLOTS = 64
"""The number of state slots, unless `install` was told another or they would take more memory than keys and values."""


class SlotsOnly(Nothing):
    """Replaces transformers' pool. Here cached blocks are free blocks, so there is nothing to give back."""

    def try_to_free_sectors(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


class KVBlocksPagedCache(Bookkeeping, PagedAttentionCache):
    """Replaces transformers' cache. Raises UnsupportedEngineError for models and settings that aren't supported."""

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
        if state_types(config):
            groups.append(self._make_slots(config, continuous_batching_config.max_requests_per_batch, num_blocks))
        self.keep_books(continuous_batching_config, groups, num_blocks, first_block_id)
        self.pool = SlotsOnly("pool")
        self._layer_types: list[str] = list(self.cache_allocators)  # 5.18's allocators don't know their layer type
        for layer_type, allocator, geometry in zip(self._layer_types, self._allocators, geometries, strict=True):
            allocator.__class__ = OURS[layer_type]  # only in this cache; the tensors are registered already
            allocator.kv_manager, allocator.kv_records, allocator.kv_geometry = self.manager, self.records, geometry
            allocator.kv_is_first = not geometry.group
            allocator.pool = self.pool

    def _make_slots(self, config: Any, max_requests: int | None, num_blocks: int) -> Group:
        """Make the slots for states, and return the group of the layers that keep them."""
        kind, layers = kind_of(config), [n for n, of in enumerate(config.layer_types) if of != "full_attention"]
        shape, allocator = kind.shape(config), self._allocators[0]
        num_bytes = state_bytes(shape, self.dtype) * len(layers)
        num_slots = self.num_state_slots
        if num_slots is None:
            fitting = num_blocks * allocator.bytes_per_block // num_bytes
            num_slots = max(1, min(_MOST_SLOTS, max_requests or _MOST_SLOTS, fitting))
        rows = self.cache_tensor.view(-1, allocator.bytes_per_block)
        self.state_slots = ModelStates(kind, shape, layers, num_slots, rows, self.dtype)
        num_state_blocks = -(-num_bytes // allocator.bytes_per_block)
        return RecurrentState(allocator.tokens_per_page, num_slots, num_state_blocks)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Return for how many of these requests, in order, there is room."""
        num_free = self.manager.num_free_blocks
        for number, needed in enumerate(list_blocks_needed):
            num_free -= sum(needed.values())
            if num_free < 0:
                return number
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Return the share of free blocks, including cached ones, or their bytes if not `relative`."""
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


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what `install` replaces for models whose layers keep states: modules, names in them, and new values."""
    theirs = [module for name, module in sys.modules.items() if name.startswith(f"{_PACKAGE}.")]
    grouping = [module for module in theirs if hasattr(module, _GROUPING)]
    return [
        (continuous_api, "SCHEDULER_MAPPING", {n: with_cuts(cls) for n, cls in scheduler.SCHEDULER_MAPPING.items()}),
        (continuous_api, "FIFOScheduler", with_cuts(scheduler.FIFOScheduler)),
        (continuous_api, "ModelRunner", StateModelRunner),
        *((module, _GROUPING, without_state_layers(getattr(module, _GROUPING))) for module in grouping),
    ]
