"""The operations in plain torch: `attention` computes, by what `plan` works out once a step."""

from kvblocks.kernels.reference.attention import (
    attend,
    copy_blocks,
    paged_attention,
    store,
    store_planned,
    tiled_paged_attention,
)
from kvblocks.kernels.reference.plan import AttentionPlan, StorePlan, plan_paged, plan_store, plan_tiled

__all__ = [
    "AttentionPlan",
    "StorePlan",
    "attend",
    "copy_blocks",
    "paged_attention",
    "plan_paged",
    "plan_store",
    "plan_tiled",
    "store",
    "store_planned",
    "tiled_paged_attention",
]
