"""Whether this transformers has what the integration needs, and whether a configuration is one that it serves.

transformers promises nothing of what is used here, so the parts themselves are looked at before anything runs: the
calls of its cache and their parameters, what its scheduler and its other parts ask the cache for, and the order in
which a layer writes and reads. What is missing, or new and unknown, is named. The version only decides whether there
is a warning.
"""

import inspect
import re
from typing import Any

from kvblocks import UnsupportedEngineError
from kvblocks.integrations import probing

NAME = "kvblocks.integrations.transformers"
TESTED_VERSIONS = ("5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0")

# The calls that kvblocks replaces or leaves, and their parameters.
CACHE_CALLS = {
    "can_store_request_tokens": "state request_len dry_run",
    "count_storable_requests": "list_blocks_needed",
    "free_blocks": "request_id no_cache",
    "free_all_requests": "clear_ledgers",
    "search_prefix_match": "request_id prompt_ids",
    "count_new_complete_blocks": "state request_len",
    "mark_complete_blocks": "state complete_blocks",
    "evict_cached_blocks": "",
    "extend_read_and_write_indices": "request_id past_length query_length read_index write_index",
    "update": ("key_states value_states layer_idx kwargs", "key_states value_states layer_idx read_index write_index"),
    "reset": "",
    "prepare_fork_request": "src_state dst_req_ids copy_src_and_dst",
    "perform_cache_copy": "copy_src_and_dst",
    "compute_free_capacity": "relative",
    "fill_block_table": "request_id past_length query_length block_table",
    "__init__": "config continuous_batching_config device distributed_helper dtype model_supports_logits_to_keep",
}
IGNORED_CALLS = {"get_cache_for_block_table", "get_block_table_key"}  # of older versions; they give only tensors

# What is read of the allocators, and what becomes kvblocks' own.
ALLOCATOR_CALLS = {
    "needs_new_blocks": "request_id past_length query_length",
    "get_seqlen_k": "past_length query_length",
    "get_read_indices": "request_id past_length query_length",
    "get_write_indices": "request_id past_length query_length",
    "fill_block_table": "request_id past_length query_length block_table",
    "copy_blocks": "source_block_ids dest_block_ids",
}

# By module, what its code may ask the cache and its allocators for. Anything else is something kvblocks doesn't know.
_OFFLOADING = "bytes_per_sector cache_allocators count_storable_requests device evict_cached_blocks free_blocks"
CACHE_USES = {
    "scheduler": "can_store_request_tokens compute_free_capacity count_new_complete_blocks evict_cached_blocks"
    " free_blocks max_blocks_per_request max_decode_fast_path_length pool read_cache_limit search_prefix_match"
    " use_prefix_sharing",
    "offloading_manager": f"{_OFFLOADING} pool use_prefix_sharing",
    "continuous_api": "cache_allocators free_all_requests mark_complete_blocks max_batch_tokens max_tokens_read"
    " num_blocks perform_cache_copy pool prepare_fork_request use_prefix_sharing",
    "input_outputs": "cache_allocators extend_read_and_write_indices fill_block_table max_batch_tokens"
    " max_blocks_per_request max_tokens_read update",
    "model_runner": "cache_allocators can_store_request_tokens free_blocks max_batch_tokens"
    " max_decode_fast_path_length max_tokens_read reset",
}
ALLOCATOR_USES = {
    "offloading_manager": "_copy_view block_table blocks_per_sector bytes_per_block index needs_new_blocks"
    " tokens_per_page",
    "input_outputs": "get_seqlen_k read_trash_index write_trash_index",
    "model_runner": "get_seqlen_k layer_type",
}
POOL_USES = {"try_to_free_sectors", "py"}
STATE_FIELDS = "initial_tokens generated_tokens remaining_prefill_tokens num_children position_offset"


def refuse(feature: str, reason: str) -> UnsupportedEngineError:
    """Return the error that says that a feature isn't served."""
    return probing.refuse(NAME, feature, reason)


def check_transformers() -> None:
    """Raise UnsupportedEngineError if a needed part is missing; warn once of a version that wasn't tested."""
    version = "none"
    try:
        import transformers

        version = str(transformers.__version__)
        missing = missing_parts()
    except (AttributeError, ImportError) as error:  # what is asked for first is gone already
        missing = [str(error)]
    expected = f"a transformers with the parts that it uses (tested: {', '.join(TESTED_VERSIONS)})"
    probing.check_parts(NAME, expected, f"{version}, in which differ:", missing)
    if version not in TESTED_VERSIONS:
        probing.warn_untested(NAME, TESTED_VERSIONS, version, "all parts that it uses are there")


def missing_parts() -> list[str]:
    """Return the parts that are missing, or not as they were, by name. Raises ImportError for a module or a class."""
    from transformers.generation.continuous_batching import cache, requests
    from transformers.generation.continuous_batching import cache_allocators as allocators

    modules = _modules()
    full, sliding = allocators.FullAttentionCacheAllocator, allocators.SlidingAttentionCacheAllocator
    problems = probing.differing_calls(cache.PagedAttentionCache, CACHE_CALLS)
    known = {*CACHE_CALLS, *IGNORED_CALLS}
    problems += [
        f"PagedAttentionCache.{name} (unknown)"
        for name, item in vars(cache.PagedAttentionCache).items()
        if callable(item) and not name.startswith("_") and name not in known
    ]
    for allocator in (full, sliding):
        problems += probing.differing_calls(allocator, ALLOCATOR_CALLS)
    for name, module in modules.items():
        problems += _unknown_uses(name, inspect.getsource(module))
    replaced = ("PagedAttentionCache", "resolve_continuous_batching_config")
    problems += [f"continuous_api.{name}" for name in replaced if not hasattr(modules["continuous_api"], name)]
    fields = getattr(requests.RequestState, "__dataclass_fields__", {})
    problems += [f"RequestState.{name}" for name in STATE_FIELDS.split() if name not in fields]
    if getattr(cache, "ATTN_TYPE_TO_ALLOCATOR", None) != {"full_attention": full, "sliding_attention": sliding}:
        problems.append("ATTN_TYPE_TO_ALLOCATOR")
    return problems + _order_of_writes(full.update, sliding.update) + _order_of_steps(modules)


def _modules() -> dict[str, Any]:
    """Return the modules that ask the cache for anything, by name."""
    from transformers.generation.continuous_batching import (
        continuous_api,
        input_outputs,
        model_runner,
        offloading_manager,
        scheduler,
    )

    found = (continuous_api, input_outputs, model_runner, offloading_manager, scheduler)
    return {module.__name__.rpartition(".")[2]: module for module in found}


def _unknown_uses(name: str, source: str) -> list[str]:
    """Return what a module asks the cache, its pool or its allocators for, and kvblocks doesn't know."""
    known = {*CACHE_USES[name].split(), "py"}
    used = set(re.findall(r"\b(?:cache|paged_attention_cache)\.([a-z]\w*)", source))
    pool = {f"pool.{use}" for use in set(re.findall(r"\bcache\.pool\.(\w+)", source)) - POOL_USES}
    allocators = set(re.findall(r"\b(?:allocator|cache_allocator|ca)\.([a-z_]\w*)", source))
    unknown = (used - known) | pool | (allocators - {*ALLOCATOR_USES.get(name, "").split()})
    return [f"{name}: cache.{use} (unknown)" for use in sorted(unknown)]


def _order_of_writes(full: Any, sliding: Any) -> list[str]:
    """Return what is wrong if full attention doesn't write before it reads, which early commit relies on."""
    source = inspect.getsource(full)
    last_write, first_read = source.rfind("index_copy_("), source.find("index_select(")
    problems = [] if 0 <= last_write < first_read else ["FullAttentionCacheAllocator.update"]
    if "sentinel_index" not in inspect.getsource(sliding):
        problems.append("SlidingAttentionCacheAllocator.update")
    return problems


def _order_of_steps(modules: dict[str, Any]) -> list[str]:
    """Return what is wrong if a request that has slots may leave a batch, or isn't told of the step's end."""
    problems = []
    source = inspect.getsource(modules["scheduler"].Scheduler._process_candidates)  # noqa: SLF001  # only looked at
    steps = ("can_store_request_tokens", "_schedule_request(", "count_new_complete_blocks", "scheduled_requests.append")
    places = [source.find(step) for step in steps]
    ways_out = [place.start() for place in re.finditer(r"^ +(?:continue|break)\b", source, re.MULTILINE)]
    refused = [place for place in ways_out if places[0] < place < places[1]]  # the one of requests that got no slots
    if (
        min(places) < 0
        or places != sorted(places)
        or len(refused) != 1
        or any(places[1] < place < places[3] for place in ways_out)
    ):
        problems.append("Scheduler._process_candidates")
    source = inspect.getsource(modules["continuous_api"].ContinuousBatchProcessor.update_batch)
    if source.count("self.cache.mark_complete_blocks(state, future_state.complete_blocks)") != 2:
        problems.append("ContinuousBatchProcessor.update_batch")
    return problems


def check_config(config: Any) -> None:
    """Raise UnsupportedEngineError when a ContinuousBatchingConfig asks for what isn't served."""
    space = config.cpu_offload_space
    if space is None or space > 0:
        raise refuse(f"cpu_offload_space={space}", "blocks are not copied to the CPU; take 0, the default")
