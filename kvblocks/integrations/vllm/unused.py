"""Calls of vLLM's KVCacheManager for which kvblocks has nothing to do, and properties that are always the same."""

from typing import Any


class UnusedCalls:
    """What vLLM's schedulers ask and kvblocks' manager has no use for."""

    mamba_shared_prefix_checkpoint = False  # states are at the ends of blocks alone
    retained_hit_group_ids: tuple[int, ...] = ()

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Do nothing: windows slide when their sequence gets slots."""

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return no copies: hits end at the ends of blocks."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """Return no states for connectors."""
        return {}

    def finalize_partial_tail_offloads(self, request: Any) -> list[Any]:  # noqa: ARG002
        """Return no states for connectors."""
        return []
