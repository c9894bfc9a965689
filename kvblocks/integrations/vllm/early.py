"""Checks for unsupported features that need only the configuration, before vLLM loads a model.

The other checks follow when vLLM has made its groups of layers: `groups.find_groups`, `probe.check_options`.
"""

from inspect import signature
from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from kvblocks import UnsupportedEngineError
from kvblocks.integrations.vllm.entrance import gate_option
from kvblocks.integrations.vllm.probe import ONE_GROUP, check_options, refuse, refuse_drafts, refuse_ranks

# Connectors that use vLLM's block pool by its hashes, which kvblocks doesn't have.
REFUSED_CONNECTORS = {
    "SimpleCPUOffloadConnector": "it finds blocks in vLLM's pool by vLLM's hashes",
    "MooncakeStoreConnector": "it takes references in vLLM's pool",
    "HiSparseConnector": "it has pools and groups of its own behind vLLM's coordinator",
}
EXPERTS = "--enable-return-routed-experts"
NARROW = {"sliding_attention", "chunked_attention"}  # what transformers calls layers that don't see all tokens


def check_engine_config(config: Any) -> None:
    """Raise UnsupportedEngineError if a VllmConfig asks for something unsupported.

    Raises InvalidArgumentError for a wrong option of the session gate.
    """
    gate_option(config)
    speculative, num_groups = config.speculative_config, 2 if _has_several_groups(config) else 1
    num_ahead = getattr(config, "num_hash_lookahead_tokens", 0)  # new in 0.33, in place of a block that EAGLE drops
    events = config.kv_events_config
    drops_block = speculative is not None and speculative.use_eagle_block_drop() and not num_ahead
    has_events = events is not None and events.enable_kv_cache_events
    check_options(num_groups, drops_block, config.num_prefill_lookahead_tokens, num_ahead, has_events)
    if config.attention_config.hisparse_config is not None:
        raise refuse("HiSparse", REFUSED_CONNECTORS["HiSparseConnector"])
    if asks_for_hashes(config):
        _check_hashes(config, num_ahead)
    if config.model_config.has_inner_state:
        _check_states(config)
    for connector in _connectors(config.kv_transfer_config):
        if connector in REFUSED_CONNECTORS:
            raise refuse(f"the connector {connector}", REFUSED_CONNECTORS[connector])
    if num_groups > 1:
        parallel = config.parallel_config
        if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
            raise refuse_ranks("sliding windows", "window")
        if "OffloadingConnector" in _connectors(config.kv_transfer_config):
            raise refuse_offloading()


def asks_for_hashes(config: Any) -> bool:
    """Whether vLLM asks its block pool which hashes are cached: since 0.33, for --enable-return-routed-experts."""
    is_new = "kv_cache_manager" in signature(AuxOutputSchedulerConnector).parameters
    return bool(config.aux_output_config.enabled) and is_new


def _check_hashes(config: Any, num_ahead: int) -> None:
    """Raise UnsupportedEngineError if kvblocks' names of blocks aren't the hashes that vLLM asks for."""
    if num_ahead:
        raise refuse(
            f"{EXPERTS} with lookahead hashes",
            "vLLM asks which of them are cached, and kvblocks doesn't have them",
            '"disable_lookahead_block_hashes": true in --speculative-config is served',
        )
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    if resolve_none_hash_seed(function) != resolve_none_hash_seed(function):
        raise refuse(
            f"{EXPERTS} with xxhash and a random seed",
            "vLLM asks which hashes are cached, and kvblocks doesn't know the seed",
            "set PYTHONHASHSEED",
        )


def _check_states(config: Any) -> None:
    """Raise UnsupportedEngineError if a model with recurrent layers asks for something unsupported."""
    if config.speculative_config is not None:
        raise refuse_drafts()
    if config.cache_config.enable_prefix_caching and _connectors(config.kv_transfer_config):
        raise refuse(
            "KV connectors with recurrent states (Mamba)",
            "the state after what they load would be missing",
            "--no-enable-prefix-caching is served",
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise UnsupportedEngineError if a scheduler, which knows its groups, uses something unsupported."""
    check_engine_config(scheduler.vllm_config)
    if scheduler.kv_cache_config.has_mamba_layers:
        _check_states(scheduler.vllm_config)
    if asks_for_hashes(scheduler.vllm_config) and scheduler.hash_block_size != scheduler.block_size:
        raise refuse(
            f"{EXPERTS} with KV cache groups of several block sizes",
            f"vLLM asks for hashes of {scheduler.hash_block_size} tokens each",
            ONE_GROUP,
        )
    connectors = _connectors(scheduler.vllm_config.kv_transfer_config)
    if "OffloadingConnector" in connectors and len(scheduler.kv_cache_config.kv_cache_groups) > 1:
        raise refuse_offloading()


def refuse_offloading() -> UnsupportedEngineError:
    """Return the error for vLLM's own offloading of several groups."""
    return refuse("the OffloadingConnector with several KV cache groups", "it asks vLLM's own coordinator", ONE_GROUP)


def _has_several_groups(config: Any) -> bool:
    """Whether a model surely has several groups: layers that see all tokens, and others that don't."""
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return False
    kinds = set(getattr(config.model_config.hf_text_config, "layer_types", None) or ())
    return bool(kinds & NARROW) and not kinds <= NARROW


def _connectors(transfer: Any) -> list[str | None]:
    """Return the names of all connectors of a KVTransferConfig, or of None."""
    return [] if transfer is None else _combined(transfer.kv_connector, transfer.kv_connector_extra_config)


def _combined(name: str | None, extra: Any) -> list[str | None]:
    """Return the name of a connector, and of those that it combines."""
    found = [name]
    for config in (extra or {}).get("connectors", ()):
        found += _combined(config.get("kv_connector"), config.get("kv_connector_extra_config"))
    return found
