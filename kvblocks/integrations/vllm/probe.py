"""Whether this vLLM has what the integration needs, and whether a configuration is one that it serves.

Both are asked before anything runs, and what is missing or not served is named. vLLM's internals have no promise of
stability, so the parts themselves are looked at; the version only decides whether there is a warning.
"""

import importlib
import inspect
import warnings
from typing import Any

TESTED_VERSIONS = ("0.32.0",)

_NEEDED = {
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager", "KVCacheBlocks"),
    "vllm.v1.core.kv_cache_utils": ("maybe_convert_block_hash",),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.core.sched.scheduler": ("Scheduler",),
    "vllm.v1.core.single_type_kv_cache_manager": ("FullAttentionManager", "SlidingWindowManager"),
    "vllm.v1.kv_cache_interface": ("KVCacheConfig", "UniformTypeKVCacheSpecs"),
    "vllm.v1.kv_cache_spec_registry": ("KVCacheSpecRegistry",),
    "vllm.distributed.kv_events": ("AllBlocksCleared", "BlockRemoved", "BlockStored", "MEDIUM_GPU"),
    "vllm.v1.metrics.stats": ("PrefixCacheStats",),
    "vllm.v1.request": ("Request", "RequestStatus"),
}
_ATTRIBUTES = {
    "Request": (
        *("request_id", "num_computed_tokens", "num_in_flight_tokens", "mm_features", "lora_request", "cache_salt"),
        *("prompt_embeds", "skip_reading_prefix_cache", "num_preemptions", "status", "_all_token_ids", "session_id"),
    ),
    "PrefixCacheStats": ("record", "reset"),
}
# Connectors that reach into vLLM's block pool by its hashes, which kvblocks doesn't have.
REFUSED_CONNECTORS = {
    "SimpleCPUOffloadConnector": "it finds blocks in vLLM's pool by vLLM's hashes",
    "MooncakeStoreConnector": "it takes references in vLLM's pool",
}


class UnsupportedVllmError(NotImplementedError):
    """This vLLM, or what it is asked to run, isn't served by the integration; the message says which part."""


def check_vllm() -> None:
    """Raise UnsupportedVllmError when vLLM lacks a part that is needed; warn once of a version that wasn't tested."""
    missing = []
    modules: dict[str, Any] = {}
    for name, parts in _NEEDED.items():
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
            continue
        missing += [f"{name}.{part}" for part in parts if not hasattr(modules[name], part)]
    if not missing:
        missing = _missing_attributes(modules)
    version = getattr(importlib.import_module("vllm"), "__version__", "unknown") if modules else "none"
    if missing:
        raise UnsupportedVllmError(
            "expected a vLLM with the parts that kvblocks.integrations.vllm uses"
            f" (tested: {', '.join(TESTED_VERSIONS)}), got {version}, which lacks {', '.join(missing)}"
        )
    if not str(version).startswith(TESTED_VERSIONS):
        warnings.warn(
            f"kvblocks.integrations.vllm was tested with vLLM {', '.join(TESTED_VERSIONS)}, not with {version};"
            " all parts that it uses are there",
            stacklevel=2,
        )


def _missing_attributes(modules: dict[str, Any]) -> list[str]:
    """Return the attributes that vLLM's requests and records lack, by name."""
    request = inspect.getsource(modules["vllm.v1.request"].Request)
    missing = [f"Request.{name}" for name in _ATTRIBUTES["Request"] if f"self.{name}" not in request]
    stats = modules["vllm.v1.metrics.stats"].PrefixCacheStats()
    return missing + [f"PrefixCacheStats.{n}" for n in _ATTRIBUTES["PrefixCacheStats"] if not hasattr(stats, n)]


def check_calls(ours: type) -> None:
    """Raise UnsupportedVllmError when vLLM's manager has a public call, or a call a parameter, that `ours` lacks."""
    theirs = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    missing = []
    for name, item in vars(theirs).items():
        if name != "__init__" and name.startswith("_"):
            continue
        own = getattr(ours, name, None)
        if own is None:
            missing.append(f"KVCacheManager.{name}")
        elif callable(item):
            parameters = set(inspect.signature(item).parameters) - set(inspect.signature(own).parameters)
            missing += [f"KVCacheManager.{name}({parameter})" for parameter in sorted(parameters)]
    if missing:
        raise UnsupportedVllmError(f"expected a vLLM whose KVCacheManager is known, got one with {', '.join(missing)}")


def refuse(feature: str, reason: str) -> UnsupportedVllmError:
    """Return the error that says that a feature isn't served."""
    return UnsupportedVllmError(f"kvblocks.integrations.vllm: expected what it serves, got {feature}: {reason}")


def check_config(scheduler: Any) -> None:
    """Raise UnsupportedVllmError when a scheduler is to run what isn't served. Before its manager is replaced."""
    if scheduler.prefix_replay_tokens:
        raise refuse("prefix_replay_tokens", "a hit would begin inside a window that isn't held")
    if scheduler.num_prefill_lookahead > 1:
        raise refuse("multi-module MTP", "the last tokens of a chunk are computed twice")
    if scheduler.kv_cache_config.has_mamba_layers:
        raise refuse("recurrent states (Mamba)", "their blocks are states, not tokens")
    transfer = scheduler.vllm_config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    if connector in REFUSED_CONNECTORS:
        raise refuse(f"the connector {connector}", REFUSED_CONNECTORS[connector])
    if scheduler.connector is not None and len(scheduler.kv_cache_config.kv_cache_groups) > 1:
        raise refuse("a KV connector with several KV cache groups", "windows and loaded tokens are not reconciled")
