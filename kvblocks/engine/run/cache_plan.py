"""A model's layers as KV-cache groups over one pool: one group of full attention, and one for each window.

`kvblocks.plan` computes the sizes. All groups have one block size here, so a layer's K and V have the same shape in
every group, and layers of different groups can share tensors.
"""

import torch

from kvblocks.engine.model.config import ModelConfig
from kvblocks.groups.kinds import FullAttention, Group, SlidingWindow
from kvblocks.groups.plan import KVLayer, Plan, plan

_NO_LIMIT = 2**62


def plan_cache(config: ModelConfig, block_size: int, dtype: torch.dtype) -> Plan:
    """The layout of the model's KV cache. Its num_blocks and num_bytes have no meaning: they exceed any memory.

    Raises InvalidArgumentError for a block_size below 1. O(layers ** 2).
    """
    kinds = [_kind(how.window, block_size) for how in config.attention]
    different = list(dict.fromkeys(kinds))
    layers = [KVLayer(different.index(kind), config.num_kv_heads, config.head_dim) for kind in kinds]
    return plan(different, layers, dtype.itemsize, _NO_LIMIT)


def _kind(window: int | None, block_size: int) -> Group:
    return FullAttention(block_size) if window is None else SlidingWindow(block_size, window)
