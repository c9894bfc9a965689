"""Attention by the package `flash-attn` (FlashAttention 2), where it is installed: optional, and on CUDA devices only.

Its functions take the engine's caches and block tables unchanged, if the block size is a multiple of 256 tokens. Decode
steps call `flash_attn_with_kvcache`, which splits long contexts. Other steps call `flash_attn_varlen_func`, which takes
cumulative lengths. K and V are stored before both calls.
"""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvblocks.arguments import pip_install
from kvblocks.engine.attention.attention import KVCache, StepAttention
from kvblocks.engine.attention.batch import StepBatch
from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.layer_attention import LayerAttention
from kvblocks.engine.model.layers import RowOps, TorchRows
from kvblocks.errors import InvalidArgumentError
from kvblocks.kernels import reference

PAGE_TOKENS = 256
MAX_HEAD_DIM = 256
DEVICE_TYPES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashAttention:
    """Paged attention by `flash_attn`, the package's module."""

    flash_attn: Any
    is_tiled: bool = False

    def begin(self, batch: StepBatch, kv_cache: KVCache) -> StepAttention:
        """Prepare one step. O(1), without waiting for the device."""
        key_start = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return _FlashStep(self.flash_attn, batch, kv_cache, key_start)

    def row_ops(self, config: ModelConfig) -> RowOps:
        """Operations in plain torch, since triton may not be installed beside this package."""
        return TorchRows(config)


@dataclass(frozen=True)
class _FlashStep:
    """A step. key_start: int32 [num_seqs + 1], the cumulative lengths of the sequences, from 0 to their sum.

    stores: the plan of a slot mapping, by its id; the mapping is kept too, so that its id isn't reused.
    """

    flash_attn: Any
    batch: StepBatch
    kv_cache: KVCache
    key_start: Tensor
    stores: dict[int, tuple[Tensor, reference.UnreadStorePlan]] = field(default_factory=dict)

    def store(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        if not self.batch.shape.stores_any:  # known, since these steps are no CUDA graphs; the plan needs a stored row
            return
        known = self.stores.get(id(slot_mapping))
        if known is None:
            plan = reference.plan_store_unread(self.kv_cache.row_slots(slot_mapping))
            known = self.stores[id(slot_mapping)] = slot_mapping, plan
        reference.store_unread(key, value, *self.kv_cache.slots[layer], known[1])

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        keys, values, batch = self.kv_cache.keys[layer], self.kv_cache.values[layer], self.batch
        before = (how.kind.window_tokens or 0) - 1  # keys that a row sees before its own; -1: all
        options = {
            "softmax_scale": how.scale,
            "causal": True,
            "window_size": (before, min(before, 0)),
            "softcap": how.softcap or 0.0,
            "block_table": batch.block_tables[how.group],
        }
        attended: Tensor
        if batch.shape.num_decodes == batch.seq_lens.shape[0]:
            rows = query.unsqueeze(1)
            attended = self.flash_attn.flash_attn_with_kvcache(
                rows, keys, values, cache_seqlens=batch.seq_lens, **options
            )
            return attended.squeeze(1)
        attended = self.flash_attn.flash_attn_varlen_func(
            *(query, keys, values, batch.query_start, self.key_start, batch.shape.max_rows, batch.shape.max_seq_len),
            **options,
        )
        return attended


def check_flash_attention(block_size: int, device: torch.device) -> ModuleType:
    """The package `flash_attn`, checked for this device and block size, whatever the model.

    Raises InvalidArgumentError for a device or block size that it doesn't support, and ModelError if it isn't
    installed.
    """
    if device.type not in DEVICE_TYPES:
        raise InvalidArgumentError(f"attention='flash-attn': expected a CUDA device, got {str(device)!r}")
    if block_size % PAGE_TOKENS:
        raise InvalidArgumentError(
            f"attention='flash-attn': expected a block_size in multiples of {PAGE_TOKENS}, its pages, got {block_size}"
        )
    try:
        import flash_attn
    except ImportError as error:
        raise ModelError(
            f"attention='flash-attn': expected the package flash-attn, got: {error}. Building it takes CUDA's compiler"
            f" and the torch that it will run with: {pip_install('engine')}, pip install packaging psutil ninja wheel,"
            " then pip install --no-build-isolation flash-attn; or a wheel for your torch, CUDA and Python from its"
            " releases"
        ) from error
    package: ModuleType = flash_attn
    return package


def load_flash_attention(
    config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device
) -> FlashAttention:
    """The backend.

    Raises what `check_flash_attention` does, and InvalidArgumentError for unsupported dtypes and head sizes.
    """
    package = check_flash_attention(block_size, device)
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"attention='flash-attn': expected dtype float16 or bfloat16, got {dtype}")
    if config.head_dim > MAX_HEAD_DIM or config.head_dim % 8:
        raise InvalidArgumentError(
            f"attention='flash-attn': expected a head_dim in multiples of 8, at most {MAX_HEAD_DIM}, got"
            f" {config.head_dim}"
        )
    return FlashAttention(package)
