"""The operations in plain torch: `plan` makes a plan once per step, and `attention` uses it in each layer."""

from kvblocks.kernels.reference.attention import (
    as_indexed,
    attend,
    attend_decodes,
    attend_tiles,
    copy_blocks,
    paged_attention,
    store,
    store_planned,
    store_unread,
    tiled_paged_attention,
)
from kvblocks.kernels.reference.plan import (
    AttentionPlan,
    SequenceTiles,
    Sight,
    StorePlan,
    UnreadStorePlan,
    plan_paged,
    plan_store,
    plan_store_unread,
    plan_tiled,
)

__all__ = [
    "AttentionPlan",
    "SequenceTiles",
    "Sight",
    "StorePlan",
    "UnreadStorePlan",
    "as_indexed",
    "attend",
    "attend_decodes",
    "attend_tiles",
    "copy_blocks",
    "paged_attention",
    "plan_paged",
    "plan_store",
    "plan_store_unread",
    "plan_tiled",
    "store",
    "store_planned",
    "store_unread",
    "tiled_paged_attention",
]
