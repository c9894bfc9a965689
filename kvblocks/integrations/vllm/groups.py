"""kvblocks' groups for vLLM's KV cache groups, and other properties of their specs."""

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvblocks import FullAttention, Group, SlidingWindow
from kvblocks.integrations.vllm.probe import refuse


def find_groups(config: Any, num_context_ranks: int) -> list[Group]:
    """Return the groups of a KV cache configuration.

    num_context_ranks: over how many ranks a block's tokens are spread (context parallelism). Blocks are so many times
    as large. Raises UnsupportedEngineError.
    """
    groups: list[Group] = []
    for number, given in enumerate(config.kv_cache_groups):
        spec = _one_spec(given.kv_cache_spec)
        role = getattr(given, "role", None)
        kind = KVCacheSpecRegistry.get_manager_class(given.kv_cache_spec, role)
        if kind is not KVCacheSpecRegistry.get_manager_class(given.kv_cache_spec):
            raise refuse(
                f"the role {getattr(role, 'value', role)} of KV cache group {number}", "its blocks are elsewhere, too"
            )
        ranks = num_context_ranks if getattr(spec, "dcp_sharded", True) else 1
        if kind is FullAttentionManager:
            groups.append(FullAttention(spec.block_size * ranks))
        elif kind is SlidingWindowManager:
            if ranks > 1:
                raise refuse("context parallelism with sliding windows", "a window would span the ranks' blocks")
            if getattr(spec, "extra_retained_tokens", 0):
                raise refuse("windows that retain more than they see", "multi-module MTP computes tokens twice")
            window, is_cached = spec.sliding_window, spec.prefix_cacheable
            groups.append(SlidingWindow(spec.block_size, window, is_cached=is_cached, keeps_passed=True))
        else:
            raise refuse(
                f"{type(spec).__name__} in KV cache group {number}", "full attention and sliding windows are served"
            )
    if len(groups) > 1 and config.prefix_cache_retention_interval is not None:
        raise refuse("prefix_cache_retention_interval", "windows keep what hits need by kvblocks' own rule")
    return groups


def _one_spec(spec: Any) -> Any:
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def admission_caps(config: Any, max_in_flight_tokens: int, max_model_len: int) -> list[int]:
    """Return, by group, the most blocks that a request has at a time; vLLM admits requests by it."""
    caps = []
    for given in config.kv_cache_groups:
        spec = _one_spec(given.kv_cache_spec)
        cap = 2**63 - 1
        if hasattr(spec, "max_admission_blocks_per_request"):
            cap = spec.max_admission_blocks_per_request(
                max_in_flight_tokens=max_in_flight_tokens, max_model_len=max_model_len
            )
        caps.append(cap)
    return caps


def event_kinds(config: Any) -> list[tuple[str, int | None]]:
    """Return, by group, what its events say: the kind of its spec, and its window."""
    specs = [given.kv_cache_spec for given in config.kv_cache_groups]
    return [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]
