"""Which of vLLM's own tests do not pass with kvblocks in place of its manager, and why.

Each needs a feature that the integration refuses, or reads an internal of vLLM's manager. A name without parameters
stands for all of them. A test that is named and passes fails our run, as one that is not named and fails.
"""

from collections.abc import Iterable

CORE = "tests/v1/core/"
CONNECTOR = "tests/v1/kv_connector/unit/"

CROSS_ATTENTION = "refused: cross attention of encoder-decoder models"
RECURRENT = "refused: recurrent states (Mamba layers)"
REPLAY = "refused: windows that are computed again after a hit (prefix_replay_tokens)"
CHUNKED_LOCAL = "refused: chunked local attention"
NULL_BLOCKS = "internal: counts the manager's null blocks in a group's table"
WINDOWS = "refused: several groups beside a connector"
COPIES = "internal: takes blocks of vLLM's pool as copies that are to be freed later"

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
    REPLAY: [
        CORE + "test_prefix_replay.py::test_hit_replays_window_without_reallocating",
        CORE + "test_prefix_replay.py::test_replay_only_chunks_make_progress",
        CORE + "test_prefix_replay.py::test_async_remote_kv_hit_replays_after_load",
        CORE + "test_prefix_replay.py::test_remote_kv_hit_is_taken_in_whole_blocks",
        CORE + "test_prefix_replay.py::test_kv_load_carrying_window_does_not_replay",
        CORE + "test_prefix_replay.py::test_hit_no_longer_than_window_is_ignored",
        CORE + "test_prefix_replay.py::test_kv_load_zeroing_respects_loaded_groups",
    ],
    CHUNKED_LOCAL: [CORE + "test_swa_inflight_window_free.py::test_chunked_local_free_waits_for_in_flight_step"],
    NULL_BLOCKS: [
        CORE + "test_swa_inflight_window_free.py::test_swa_free_waits_for_in_flight_step",
        CORE + "test_swa_inflight_window_free.py::test_swa_free_immediate_when_sync",
        CORE + "test_swa_inflight_window_free.py::test_connector_finish_frees_on_settled_basis",
    ],
    WINDOWS: [
        CONNECTOR + "test_kv_load_failure_recovery.py::test_block_level_load_failure_fails_closed_with_multiple_groups",
        CONNECTOR
        + "test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin[multiple-groups]",
        CONNECTOR + "test_remote_prefill_lifecycle.py::"
        "test_async_load_reserves_blocks_for_promotion_margin[different-block-sizes]",
    ],
    COPIES: [CORE + "test_deferred_block_free.py::test_cow_retentions_deferred_until_copy_step_processed"],
}


def refused(names: Iterable[str]) -> dict[str, str]:
    """Return why which of these tests are refused. Raises ValueError for an entry that none of them has."""
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
