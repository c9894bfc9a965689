"""The operations in plain torch: `attention` computes, by what `plan` works out once a step."""

from kvblocks.kernels.reference.attention import attend, copy_blocks, paged_attention, store, tiled_paged_attention
from kvblocks.kernels.reference.plan import AttentionPlan, plan_paged, plan_tiled

__all__ = [
    "AttentionPlan",
    "attend",
    "copy_blocks",
    "paged_attention",
    "plan_paged",
    "plan_tiled",
    "store",
    "tiled_paged_attention",
]
