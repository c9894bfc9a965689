"""Checks that this vLLM has what the integration needs, and that a configuration is supported.

Both are checked before anything runs. Whatever is missing or unsupported is named. vLLM's internals may change in any
version, so the parts themselves are checked. The version only decides whether there is a warning.
"""

import inspect
import re
from typing import Any

from kvblocks import UnsupportedEngineError
from kvblocks.integrations import probing

NAME = "kvblocks.integrations.vllm"
TESTED_VERSIONS = ("0.32.0",)
SCHEDULER_TESTED_VERSIONS = ("0.33.0",)  # decisions and features were tested, but no whole engine

# Connectors that use vLLM's block pool by its hashes, which kvblocks doesn't have.
REFUSED_CONNECTORS = {
    "SimpleCPUOffloadConnector": "it finds blocks in vLLM's pool by vLLM's hashes",
    "MooncakeStoreConnector": "it takes references in vLLM's pool",
    "HiSparseConnector": "it has pools and groups of its own behind vLLM's coordinator",
}


def check_vllm() -> None:
    """Raise UnsupportedEngineError if vLLM lacks a needed part. Warn once of a version that wasn't tested."""
    version, missing = "none", []
    try:
        import vllm

        version = str(vllm.__version__)
        missing = _missing_parts()
    except ImportError as error:
        missing = [str(error)]
    expected = f"a vLLM with the parts that it uses (tested: {', '.join(TESTED_VERSIONS)})"
    probing.check_parts(NAME, expected, f"{version}, which lacks", missing)
    if version.startswith(TESTED_VERSIONS):
        return
    found = "all parts that it uses are there"
    if version.startswith(SCHEDULER_TESTED_VERSIONS):
        found = "only the scheduler was tested with that one, without an engine"
    probing.warn_untested(NAME, TESTED_VERSIONS, version, found)


def _missing_parts() -> list[str]:
    """Return the names of parts of vLLM that are used and missing. Raises ImportError for a module or class."""
    from vllm.distributed import kv_events
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched import async_scheduler, scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
    from vllm.v1.metrics.stats import PrefixCacheStats
    from vllm.v1.request import Request, RequestStatus

    request = inspect.getsource(Request)
    names = (
        *("request_id", "num_computed_tokens", "num_in_flight_tokens", "mm_features", "lora_request", "cache_salt"),
        *("prompt_embeds", "skip_reading_prefix_cache", "num_preemptions", "status", "_all_token_ids", "resumable"),
        "session_id",
    )
    missing = [f"Request.{name}" for name in names if not re.search(rf"\bself\.{name}\b", request)]
    parts = {
        kv_events: ("AllBlocksCleared", "BlockRemoved", "BlockStored", "MEDIUM_GPU"),
        kv_cache_interface: ("UniformTypeKVCacheSpecs", "get_kv_cache_spec_kind", "get_kv_cache_spec_sliding_window"),
        kv_cache_utils: ("maybe_convert_block_hash",),
        scheduler: ("Scheduler", "KVCacheManager"),
        scheduler.Scheduler: ("_handle_invalid_blocks", "_update_request_as_session"),
        async_scheduler: ("AsyncScheduler",),
        FullAttentionManager: ("find_longest_cache_hit",),
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


def refuse(feature: str, reason: str) -> UnsupportedEngineError:
    """Return the error that says that a feature isn't supported."""
    return probing.refuse(NAME, feature, reason)


def check_config(scheduler: Any) -> None:
    """Raise UnsupportedEngineError if a scheduler's configuration is unsupported.

    Called before its manager is replaced.
    """
    if scheduler.num_prefill_lookahead > 1:
        raise refuse("multi-module MTP", "the last tokens of a chunk are computed twice")
    if scheduler.kv_cache_config.has_mamba_layers:
        raise refuse("recurrent states (Mamba)", "their blocks are states, not tokens")
    transfer = scheduler.vllm_config.kv_transfer_config
    for connector in () if transfer is None else _connectors(transfer.kv_connector, transfer.kv_connector_extra_config):
        if connector in REFUSED_CONNECTORS:
            raise refuse(f"the connector {connector}", REFUSED_CONNECTORS[connector])
        if connector == "OffloadingConnector" and len(scheduler.kv_cache_config.kv_cache_groups) > 1:
            raise refuse("the OffloadingConnector with several KV cache groups", "it asks vLLM's own coordinator")


def _connectors(name: str | None, extra: Any) -> list[str | None]:
    """Return the name of a connector, and of those that it combines."""
    found = [name]
    for config in (extra or {}).get("connectors", ()):
        found += _connectors(config.get("kv_connector"), config.get("kv_connector_extra_config"))
    return found


def check_options(num_groups: int, use_eagle: bool, num_prefill_lookahead: int, num_hash_lookahead_tokens: int) -> None:
    """Raise UnsupportedEngineError if a manager with so many groups gets unsupported options."""
    if num_prefill_lookahead > 1:
        raise refuse("multi-module MTP", "the last tokens of a chunk are computed twice")
    if use_eagle and num_groups > 1:
        raise refuse("EAGLE with several KV cache groups", "which of them drops its last block isn't known")
    if num_hash_lookahead_tokens:
        reason = "kvblocks drops EAGLE's last block instead, with disable_lookahead_block_hashes"
        raise refuse("hashes of tokens behind their block", reason)
