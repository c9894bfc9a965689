"""Checks that this vLLM has what the integration needs, and makes the errors that refuse a feature.

Both are checked before anything runs, and errors name whatever is missing or unsupported. vLLM's internals may change
in any version, so the parts themselves are checked. The version only decides whether there is a warning.
"""

import inspect
import re
from typing import Any

from kvblocks import UnsupportedEngineError
from kvblocks.integrations import probing

NAME = "kvblocks.integrations.vllm"
TESTED_VERSIONS = ("0.32.0", "0.33.0")  # of 0.33.0 only what runs without an engine: docs/integrations/vllm.md

FALLBACK = "kvblocks_fallback"  # the name in --additional-config
OTHERWISE = f"for vLLM's own manager leave out --scheduler-cls, or add --additional-config '{{\"{FALLBACK}\": true}}'"
ONE_GROUP = "--disable-hybrid-kv-cache-manager makes all layers one group"


def check_vllm() -> None:
    """Raise UnsupportedEngineError if vLLM lacks a needed part. Warn once about a version that wasn't tested."""
    version, missing = "none", []
    try:
        import vllm

        version = str(vllm.__version__)
        missing = _missing_parts()
    except ImportError as error:
        missing = [str(error)]
    expected = f"a vLLM with the parts that it uses (tested: {' and '.join(TESTED_VERSIONS)})"
    probing.check_parts(NAME, expected, f"{version}, which lacks", missing)
    if version.startswith(TESTED_VERSIONS):
        return
    probing.warn_untested(NAME, TESTED_VERSIONS, version, "all parts that it uses are there")


def _missing_parts() -> list[str]:
    """Return the names of parts of vLLM that are used and missing. Raises ImportError for a module or class."""
    from vllm.distributed import kv_events
    from vllm.distributed.aux_output_connector import connector
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched import async_scheduler, scheduler
    from vllm.v1.core.single_type_kv_cache_manager import (
        ChunkedLocalAttentionManager,
        CircularBufferManager,
        FullAttentionManager,
        MambaManager,
        SlidingWindowManager,
    )
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
    from vllm.v1.metrics.stats import PrefixCacheStats
    from vllm.v1.request import Request, RequestStatus

    request = inspect.getsource(Request)
    names = (
        *("request_id", "num_computed_tokens", "num_in_flight_tokens", "mm_features", "lora_request", "cache_salt"),
        *("prompt_embeds", "skip_reading_prefix_cache", "num_preemptions", "status", "_all_token_ids", "resumable"),
        *("session_id", "num_prompt_tokens"),
    )
    missing = [f"Request.{name}" for name in names if not re.search(rf"\bself\.{name}\b", request)]
    parts = {
        connector: ("AuxOutputSchedulerConnector",),
        kv_events: ("AllBlocksCleared", "BlockRemoved", "BlockStored", "MEDIUM_GPU"),
        kv_cache_interface: ("UniformTypeKVCacheSpecs", "get_kv_cache_spec_kind", "get_kv_cache_spec_sliding_window"),
        kv_cache_utils: ("maybe_convert_block_hash",),
        scheduler: ("Scheduler", "KVCacheManager"),
        scheduler.Scheduler: (
            *("_handle_invalid_blocks", "_update_request_as_session", "_enqueue_waiting_request", "_free_request"),
            *("schedule", "update_from_output", "get_request_counts", "pause_state"),
        ),
        async_scheduler: ("AsyncScheduler",),
        ChunkedLocalAttentionManager: ("find_longest_cache_hit",),
        CircularBufferManager: ("find_longest_cache_hit",),
        FullAttentionManager: ("find_longest_cache_hit",),
        MambaManager: ("find_longest_cache_hit",),
        SlidingWindowManager: ("find_longest_cache_hit",),
        KVCacheSpecRegistry: ("get_manager_class",),
        PrefixCacheStats: ("record",),
        RequestStatus: ("WAITING", "PREEMPTED", "RUNNING"),
    }
    return missing + [
        f"{part.__name__}.{name}" for part, needed in parts.items() for name in needed if not hasattr(part, name)
    ]


def check_calls(ours: type) -> None:
    """Raise UnsupportedEngineError if vLLM's manager has a public call, or a parameter, that `ours` lacks."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager as Theirs

    missing = []
    for name, item in vars(Theirs).items():
        if name != "__init__" and name.startswith("_"):
            continue
        own = getattr(ours, name, None)
        if own is None:
            missing.append(f"KVCacheManager.{name}")
        elif callable(item):
            parameters = set(inspect.signature(item).parameters) - set(inspect.signature(own).parameters)
            missing += [f"KVCacheManager.{name}({parameter})" for parameter in sorted(parameters)]
    probing.check_parts(NAME, "a vLLM whose KVCacheManager is known", "one with", missing)


def refuse(feature: str, reason: str, advice: str = "") -> UnsupportedEngineError:
    """Return the error for a feature that isn't supported. advice: an option of vLLM that avoids the feature."""
    return probing.refuse(NAME, feature, "; ".join(filter(None, (reason, advice, OTHERWISE))))


def refuse_drafts() -> UnsupportedEngineError:
    """Return the error for recurrent states together with draft tokens."""
    return refuse("recurrent states (Mamba) with speculative decoding", "each draft has a state of its own")


def refuse_ranks(layers: str, seen: str) -> UnsupportedEngineError:
    """Return the error for context parallelism with `layers`. seen: what would span several ranks' blocks, "window"."""
    return refuse(f"context parallelism with {layers}", f"a {seen} would span the ranks' blocks", ONE_GROUP)


def falls_back(config: Any) -> bool:
    """Whether vLLM's own manager may be used if something is unsupported. config: a VllmConfig."""
    options = config.additional_config
    return isinstance(options, dict) and bool(options.get(FALLBACK))


def check_options(
    num_groups: int, use_eagle: bool, num_prefill_lookahead: int, num_hash_lookahead_tokens: int, has_events: bool
) -> None:
    """Raise UnsupportedEngineError for options that a manager with `num_groups` groups doesn't support."""
    if num_prefill_lookahead > 1:
        raise refuse("multi-module MTP", "the last tokens of a chunk are computed twice")
    if use_eagle and num_groups > 1:
        raise refuse("EAGLE with several KV cache groups", "which of them drops its last block isn't known", ONE_GROUP)
    if num_hash_lookahead_tokens and has_events:
        raise refuse(
            "KV events with lookahead hashes",
            "kvblocks doesn't compute such hashes",
            '"disable_lookahead_block_hashes": true in --speculative-config is served',
        )
