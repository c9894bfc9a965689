"""The parts of transformers that the integration uses: `SECTORS` of 5.18 and newer, `GROUPS` of 5.15 to 5.17.

They divide the tensors differently, so the scheduler and other parts ask the cache for different things. With sectors,
each kind of attention has an allocator, and all share one tensor. With groups of equally many layers, all blocks have
one size, and the scheduler itself counts how many blocks a request has.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Calls = Mapping[str, str | tuple[str, ...]]
"""For each call's name, its parameters' names separated by spaces, or a tuple of such lists that are all right."""


@dataclass(frozen=True)
class Parts:
    """What a version of transformers must have, and what it may use.

    - calls: the calls, by module and class, that kvblocks replaces, or keeps and relies on.
    - ignored_calls: calls of the cache that nothing uses, or that only return tensors.
    - cache_uses, allocator_uses: for each module, the names of the cache and its allocators that its code may use.
      kvblocks doesn't know any other name.
    - pool: the attribute of the cache that blocks came from. pool_uses: which of its names may be used.
    - replaced: the names of `continuous_api` that `install` replaces, in addition to its cache and configuration.
    - steps: the calls that schedule a request, in their order.
    - num_ways_out: how many branches between the first two steps give up a request that got no slots. There must be no
      other way out, since a request with slots must be scheduled.
    - mark: the call that says that a step has ended.
    """

    calls: Mapping[str, Calls]
    ignored_calls: str
    cache_uses: Mapping[str, str]
    allocator_uses: Mapping[str, str]
    pool: str
    pool_uses: str
    replaced: str
    steps: tuple[str, ...]
    num_ways_out: int
    mark: str


CACHE, SCHEDULER = "cache.PagedAttentionCache", "scheduler.Scheduler"
ALLOCATE, PROCESS = "_allocate_blocks_if_needed", "_process_candidates"  # the first: only with groups

_COMMON_CALLS = {
    "search_prefix_match": "request_id prompt_ids",
    "extend_read_and_write_indices": "request_id past_length query_length read_index write_index",
    "fill_block_table": "request_id past_length query_length block_table",
}
_ALLOCATOR = {
    "get_read_indices": "request_id past_length query_length",
    "get_write_indices": "request_id past_length query_length",
    "fill_block_table": "request_id past_length query_length block_table",
}
_SECTOR_ALLOCATOR = {
    **_ALLOCATOR,
    "needs_new_blocks": "request_id past_length query_length",
    "get_seqlen_k": "past_length query_length",
    "copy_blocks": "source_block_ids dest_block_ids",
}
_SCHEDULE, _SCHEDULED = "_schedule_request(", "scheduled_requests.append"

SECTORS = Parts(
    calls={
        CACHE: {
            **_COMMON_CALLS,
            "can_store_request_tokens": "state request_len dry_run",
            "count_storable_requests": "list_blocks_needed",
            "free_blocks": "request_id no_cache",
            "free_all_requests": "clear_ledgers",
            "count_new_complete_blocks": "state request_len",
            "mark_complete_blocks": "state complete_blocks",
            "evict_cached_blocks": "",
            "update": (
                "key_states value_states layer_idx kwargs",
                "key_states value_states layer_idx read_index write_index",
            ),
            "reset": "",
            "prepare_fork_request": "src_state dst_req_ids copy_src_and_dst",
            "perform_cache_copy": "copy_src_and_dst",
            "compute_free_capacity": "relative",
            "__init__": "config continuous_batching_config device distributed_helper dtype"
            " model_supports_logits_to_keep",
        },
        "cache_allocators.FullAttentionCacheAllocator": _SECTOR_ALLOCATOR,
        "cache_allocators.SlidingAttentionCacheAllocator": _SECTOR_ALLOCATOR,
        SCHEDULER: {
            PROCESS: "candidates token_budget cache_budget request_ids_to_remove_from_waiting",
            "_schedule_request": "state request_tokens token_budget request_ids_to_remove_from_waiting",
        },
        "model_runner.ModelRunner": {
            "_forward_process_and_sample": "model batch_data carry_over_ids prev_output_ids output_ids"
        },
    },
    ignored_calls="get_cache_for_block_table get_block_table_key",
    cache_uses={
        "scheduler": "can_store_request_tokens compute_free_capacity count_new_complete_blocks evict_cached_blocks"
        " free_blocks max_blocks_per_request max_decode_fast_path_length pool read_cache_limit search_prefix_match"
        " use_prefix_sharing",
        "offloading_manager": "bytes_per_sector cache_allocators count_storable_requests device evict_cached_blocks"
        " free_blocks pool use_prefix_sharing",
        "continuous_api": "cache_allocators free_all_requests mark_complete_blocks max_batch_tokens max_tokens_read"
        " num_blocks perform_cache_copy pool prepare_fork_request use_prefix_sharing",
        "input_outputs": "cache_allocators extend_read_and_write_indices fill_block_table max_batch_tokens"
        " max_blocks_per_request max_tokens_read update",
        "model_runner": "cache_allocators can_store_request_tokens free_blocks max_batch_tokens"
        " max_decode_fast_path_length max_tokens_read reset",
        "utils": "can_store_request_tokens",
        "requests": "can_store_request_tokens",
    },
    allocator_uses={
        "offloading_manager": "_copy_view block_table blocks_per_sector bytes_per_block index needs_new_blocks"
        " tokens_per_page",
        "input_outputs": "get_seqlen_k read_trash_index write_trash_index",
        "model_runner": "get_seqlen_k layer_type",
    },
    pool="pool",
    pool_uses="try_to_free_sectors",
    replaced="SCHEDULER_MAPPING FIFOScheduler ModelRunner",
    steps=("can_store_request_tokens", _SCHEDULE, "count_new_complete_blocks", _SCHEDULED),
    num_ways_out=1,
    mark="mark_complete_blocks",
)

GROUPS = Parts(
    calls={
        CACHE: {
            **_COMMON_CALLS,
            "blocks_in_use": "request_id",
            "allocate_blocks": "n_blocks request_id allocated_blocks",
            "free_blocks": "request_id",
            "free_all_requests": "",
            "get_num_free_blocks": "",
            "get_seqlens_k": "past_length query_length",
            "update": "key_states value_states layer_idx read_index write_index",
            "mark_shareable_blocks_as_complete": "state num_complete_blocks",
            "copy_cache": "list_source_blocks list_forked_blocks",
            "compute_max_num_forks": "source_request_id",
            "fork_request": "source_request_id destination_request_ids",
            "__init__": "config continuous_batching_config device distributed_helper tp_plan dtype",
        },
        "cache_manager.FullAttentionCacheAllocator": _ALLOCATOR,
        "cache_manager.SlidingAttentionCacheAllocator": _ALLOCATOR,
        SCHEDULER: {
            ALLOCATE: "state len_next_tokens",
            PROCESS: "candidates token_budget cache_budget request_ids_to_remove_from_waiting",
        },
        "requests.FutureRequestState": {"__init__": "state has_new_token complete_blocks query_length"},
    },
    ignored_calls="get_block_table_key blocks_needed will_allocation_be_successful",
    cache_uses={
        "scheduler": "allow_block_sharing block_size config free_blocks get_num_free_blocks max_blocks_per_request"
        " num_blocks num_full_attention_groups search_prefix_match use_prefix_sharing",
        "offloading_manager": "allow_block_sharing block_size blocks_in_use device dtype get_num_free_blocks"
        " group_cache_managers head_dim key_cache num_key_value_heads value_cache",
        "continuous_api": "compute_max_num_forks copy_cache fork_request free_all_requests get_num_free_blocks"
        " mark_shareable_blocks_as_complete max_batch_tokens num_blocks num_pages num_sliding_attention_groups"
        " use_prefix_sharing",
        "input_outputs": "block_size extend_read_and_write_indices fill_block_table get_seqlens_k max_batch_tokens"
        " max_blocks_per_request num_blocks num_full_attention_groups num_groups num_pages"
        " num_sliding_attention_groups read_trash_index update write_trash_index",
        "model_runner": "block_size free_blocks max_batch_tokens max_blocks_per_request num_blocks num_pages",
        "utils": "allocate_blocks block_size",
        "requests": "",
    },
    allocator_uses={"offloading_manager": "block_table"},
    pool="_block_manager",
    pool_uses="",
    replaced="SCHEDULER_MAPPING FIFOScheduler",
    steps=(ALLOCATE, _SCHEDULE, _SCHEDULED),
    num_ways_out=2,
    mark="mark_shareable_blocks_as_complete",
)

STATE_FIELDS = "initial_tokens generated_tokens remaining_prefill_tokens num_children position_offset"
