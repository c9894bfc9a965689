"""Which of vLLM's own tests do not pass with kvblocks in place of its manager, and why.

Each needs a feature that the integration refuses, or reads an internal of vLLM's manager. A name without parameters
stands for all of them. Our run fails if a test that is named here passes, or if another one does not.
"""

from collections.abc import Iterable

CORE = "tests/v1/core/"
CONNECTOR = "tests/v1/kv_connector/unit/"

CROSS_ATTENTION = "internal: looks for vLLM's own manager of cross attention by its class"
RECURRENT = "refused: recurrent states with a connector, or with drafts"
COPIES = "internal: takes blocks of vLLM's pool as copies that are to be freed later"
HASH_MAP = "internal: counts the entries of vLLM's map of hashes"
SLIDES_LATER = "internal: a finished request's windows slide before it is freed, which kvblocks has no need of"

REFUSED = {
    CROSS_ATTENTION: [
        CORE + "test_scheduler.py::test_variable_length_cross_attn_block_allocation",
        CORE + "test_scheduler.py::test_cross_attn_blocks_not_over_allocated",
        CORE + "test_scheduler.py::test_cross_attn_blocks_not_under_allocated",
        CORE + "test_scheduler.py::test_cross_attn_zero_blocks_without_encoder_inputs",
    ],
    RECURRENT: [
        CORE + "test_scheduler.py::test_hybrid_per_group_hit_divergence_with_connector",
        CORE + "test_scheduler.py::test_hybrid_fa_deeper_hit_respects_connector_lookup_policy",
        CONNECTOR + "test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba",
        CONNECTOR + "test_remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_mamba_spec_blocks",
    ],
    COPIES: [CORE + "test_deferred_block_free.py::test_cow_retentions_deferred_until_copy_step_processed"],
    HASH_MAP: [
        CONNECTOR + "test_cache_pollution_prevention.py::test_invalid_blocks_evicted_prevents_cache_pollution",
        CONNECTOR + "test_remote_prefill_lifecycle.py::test_basic_lifecycle",
    ],
    SLIDES_LATER: [CORE + "test_swa_inflight_window_free.py::test_connector_finish_frees_on_settled_basis"],
}


def refused(names: Iterable[str]) -> dict[str, str]:
    """Return by test why it is refused. Raises ValueError for an entry that fits no test."""
    reasons = {name: reason for reason, entries in REFUSED.items() for name in entries}
    found = {}
    unused = set(reasons)
    for name in names:
        entry = name if name in reasons else name.partition("[")[0]
        if entry in reasons:
            found[name] = reasons[entry]
            unused.discard(entry)
    if unused:
        raise ValueError(f"vLLM has no such tests: {sorted(unused)}")
    return found
