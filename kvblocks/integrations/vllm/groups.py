"""kvblocks' groups and manager for vLLM's KV cache groups, and other properties of their specs."""

import warnings
from itertools import pairwise
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CircularBufferManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvblocks import ChunkedLocal, FullAttention, Group, KVCacheManager, Scratch, SlidingWindow, StateInPlace
from kvblocks.integrations.vllm.probe import NAME, refuse, refuse_drafts, refuse_ranks


def find_groups(config: Any, num_context_ranks: int, match_unit: int | None) -> list[Group]:
    """Return the groups of a KV cache configuration.

    num_context_ranks: the number of ranks that a block's tokens are spread over (context parallelism); blocks are that
    many times as large. match_unit: vLLM's hits end at multiples of this many tokens; None: nothing is cached. Raises
    UnsupportedEngineError.
    """
    if not config.kv_cache_groups:
        raise refuse("a model without KV cache groups", "there is nothing to cache")
    groups: list[Group | None] = []
    for number, given in enumerate(config.kv_cache_groups):
        spec = _one_spec(given.kv_cache_spec)
        role = getattr(given, "role", None)
        kind = KVCacheSpecRegistry.get_manager_class(given.kv_cache_spec, role)
        if kind is not KVCacheSpecRegistry.get_manager_class(given.kv_cache_spec):
            raise refuse(
                f"the role {getattr(role, 'value', role)} of KV cache group {number}", "its blocks are elsewhere, too"
            )
        ranks = num_context_ranks if getattr(spec, "dcp_sharded", True) else 1
        if kind is MambaManager:
            groups.append(_state_group(spec, num_context_ranks, match_unit))
        elif kind is FullAttentionManager:
            groups.append(FullAttention(spec.block_size * ranks))
        elif kind is CircularBufferManager:
            groups.append(Scratch())
        elif kind in (SlidingWindowManager, ChunkedLocalAttentionManager):
            groups.append(_narrow_group(spec, ranks))
        else:
            raise refuse(
                f"{type(spec).__name__} in KV cache group {number}",
                "full attention, sliding windows, chunked local attention and ring buffers are served",
            )
    found = [group for group in groups if group is not None]
    sizes = sorted({group.block_size for group in found if group.has_tokens})
    for small, large in pairwise(sizes):
        if large % small:
            raise refuse(f"KV cache groups with blocks of {small} and of {large} tokens", "one has to divide the other")
    _warn_of_interval(config)
    # A request's state takes one block, however many tokens it has.
    most_tokens = max([spec.block_size for spec in _specs(config) if isinstance(spec, MambaSpec)], default=1)
    largest = max(sizes, default=1)
    whole = FullAttention(-(-most_tokens // largest) * largest)
    return [group or whole for group in groups]


def _narrow_group(spec: Any, ranks: int) -> Group:
    """Return the group of layers that see a window or a chunk.

    All that leaves it is reused by last use (`keeps_passed`). vLLM does the same if its prefix_cache_retention_interval
    is None. With its default, 0, it caches few of these blocks, so that fewer prompts hit.
    """
    if isinstance(spec, ChunkedLocalAttentionSpec):
        if ranks > 1:
            raise refuse_ranks("chunked local attention", "chunk")
        return ChunkedLocal(spec.block_size, spec.attention_chunk_size, keeps_passed=True)
    if ranks > 1:
        raise refuse_ranks("sliding windows", "window")
    if getattr(spec, "extra_retained_tokens", 0):
        raise refuse("windows that retain more than they see", "multi-module MTP computes tokens twice")
    is_cached = spec.prefix_cacheable
    return SlidingWindow(spec.block_size, spec.sliding_window, is_cached=is_cached, keeps_passed=True)


def _state_group(spec: Any, ranks: int, match_unit: int | None) -> Group | None:
    """Return the group of recurrent layers; None if a request's state stays in one block that is never cached."""
    if spec.num_speculative_blocks:
        raise refuse_drafts()
    mode = spec.mamba_cache_mode
    if match_unit is None and mode == "none":
        return None
    if match_unit is None or mode != "align":
        caching = "without" if match_unit is None else "with"
        raise refuse(f"recurrent states in mode {mode!r} {caching} caching", "'align' is for caching, 'none' for none")
    if ranks > 1:
        raise refuse_ranks("recurrent states", "state")
    if match_unit < spec.block_size:
        raise refuse(
            f"recurrent states that are found at multiples of {match_unit} tokens",
            "they are found where blocks end",
            "without --prefix-match-unit, and with blocks of the same size in all groups, they are served",
        )
    return StateInPlace(spec.block_size)


def _warn_of_interval(config: Any) -> None:
    interval = config.prefix_cache_retention_interval
    if interval and any(isinstance(spec, SlidingWindowSpec) for spec in _specs(config)):
        warnings.warn(
            f"{NAME}: prefix_cache_retention_interval={interval} has no effect: kvblocks caches all blocks of windows,"
            " and reuses the least recently used ones first",
            stacklevel=2,
        )


def make_manager(
    config: Any, groups: list[Group], enable_caching: bool, named: str | None, debug: bool
) -> KVCacheManager:
    """Make a manager of all blocks except vLLM's null block. named: the hash algorithm of events; None: no events."""
    is_single = len(groups) == 1 and groups[0].sees_all
    return KVCacheManager(
        config.num_blocks - 1,
        groups[0].block_size if is_single else None,
        first_block_id=1,
        groups=None if is_single else groups,
        hash_algorithm="xxh3_128" if named is None else f"vllm:{named}",
        enable_caching=enable_caching,
        enable_events=named is not None,
        debug=debug,
    )


def _specs(config: Any) -> list[Any]:
    return [_one_spec(given.kv_cache_spec) for given in config.kv_cache_groups]


def _one_spec(spec: Any) -> Any:
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def admission_caps(config: Any, max_in_flight_tokens: int, max_model_len: int) -> list[int]:
    """Return, for each group, the most blocks that a request has at a time, by which vLLM admits requests."""
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


def zeroed_groups(config: Any) -> set[int]:
    """Return the groups whose new blocks the worker zeroes before it uses them, perhaps none."""
    zeroed = {
        number
        for number, spec in enumerate(_specs(config))
        if isinstance(spec, AttentionSpec) and not isinstance(spec, CircularBufferSpec)
    }
    return zeroed if config.needs_kv_cache_zeroing else set()


def event_kinds(config: Any) -> list[tuple[str, int | None]]:
    """Return, for each group, what its events say: the kind of its spec, and its window."""
    specs = [given.kv_cache_spec for given in config.kv_cache_groups]
    return [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]
