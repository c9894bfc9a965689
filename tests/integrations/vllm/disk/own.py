"""vLLM's own tests of tiers, with `DiskTier` in the place of its example and of its file tier.

They run from a copy, as the scheduler's do (`integrations.vllm.own_tests`). REFUSED says which can't pass, and why.
"""

from pathlib import Path

from integrations.vllm import own_tests

FOLDER = "tests/v1/kv_offload/tiering"
FILES = tuple(
    f"{FOLDER}/test_{name}.py" for name in ("tiering_offloading", "fs_tier", "factory", "metrics", "backpressure")
)
PLUGIN = "integrations.vllm.disk.own_swap"

_ITS_FILE = "damages the file that vLLM's tier has for each key; ours has one for all (test_tier.py damages that)"
_ITS_PARTS = "reads or replaces parts that vLLM's file tier alone has"
REFUSED = {
    "test_fs_tier.py::test_invalid_path_raises_at_construction": "expects an OSError; ours is a DiskError",
    "test_fs_tier.py::test_shutdown_discards_pending_tasks": _ITS_PARTS,
    "test_fs_tier.py::test_mixed_job_results_emit_event_only_for_successful_job": _ITS_PARTS,
    "test_fs_tier.py::test_partially_failed_store_emits_no_event": _ITS_PARTS,
    **{
        f"test_fs_tier.py::test_{name}[{has_extension}]": _ITS_FILE
        for name in (
            "failed_load_corrects_verdict_and_removes_corrupt_file",
            "batched_partial_load_failure_keeps_loaded_blocks",
            "batched_load_first_block_fails_marks_whole_batch",
            "transient_load_failure_leaves_file",
        )
        for has_extension in (True, False)
    },
}


def run(folder: Path) -> dict[str, str]:
    """Run them in a folder that has a copy, and return their outcomes by name."""
    return own_tests.run(folder, list(FILES), swaps=False, plugin=PLUGIN)
