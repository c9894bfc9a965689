"""Attention of prompts by the package `flashinfer`, where it is installed: optional, and on CUDA devices only.

On sm90 its prefill is FlashAttention 3, over pages of any size. It takes the engine's caches unchanged. Decodes, and
steps that are CUDA graphs, stay with the Triton kernels: FlashInfer plans on the host for the lengths of one step, and
a graph serves many. So this is the Triton backend, except that FlashInfer computes the rows of prompts in steps that
are no CUDA graphs.

One plan serves all layers of a step that have the same group, window, softcap and scale. The package compiles its
kernels with CUDA's compiler when they are first needed, which takes minutes; `engine.warm_up()` does that before the
first request.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvblocks.arguments import pip_install
from kvblocks.engine.attention.attention import KVCache, StepAttention
from kvblocks.engine.attention.batch import StepBatch
from kvblocks.engine.attention.triton_attention import TritonAttention, TritonStep
from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.layer_attention import LayerAttention
from kvblocks.errors import InvalidArgumentError

DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 128 << 20


class PrefillPlanner:
    """FlashInfer's wrappers, one for each kind of layer, and the memory that they share.

    Attribute: num_plans, counted up. flashinfer: the package's module. A wrapper reads its plan from pinned memory
    after `plan` has returned. So the next plan of that wrapper waits until the device has read it.
    """

    def __init__(self, flashinfer: Any) -> None:
        self.num_plans = 0
        self._flashinfer = flashinfer
        self._workspace: Tensor | None = None
        self._wrappers: dict[Hashable, Any] = {}
        self._were_read: dict[Hashable, torch.cuda.Event] = {}

    def plan(self, batch: StepBatch, kv_cache: KVCache, first: int, query: Tensor, how: LayerAttention) -> Any:
        """Plan for the sequences from `first` on, whose lengths the host must know, and return the wrapper.

        query: the rows of these sequences; only its shape and dtype are read. The plan is valid until the next one for
        layers of the same kind.
        """
        kind = how.group, how.kind.window_tokens, how.softcap, how.scale
        if self._workspace is None:
            self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
        if kind not in self._wrappers:
            make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[kind] = make(self._workspace, "NHD", backend="auto")
        wrapper = self._wrappers[kind]
        if kind in self._were_read:
            self._were_read[kind].synchronize()
        keys = kv_cache.keys[0]
        starts, page_starts, pages, last_pages = _pages(batch, first, how.group, kv_cache.block_size)
        wrapper.plan(
            *(starts, page_starts, pages, last_pages),
            *(query.shape[1], keys.shape[2], query.shape[2], kv_cache.block_size),
            causal=True,
            sm_scale=how.scale,
            window_left=(how.kind.window_tokens or 0) - 1,  # keys that a row sees before its own; -1: all
            logits_soft_cap=how.softcap,
            q_data_type=query.dtype,
            kv_data_type=keys.dtype,
        )
        if query.is_cuda:
            self._were_read[kind] = torch.cuda.Event()
            self._were_read[kind].record()
        self.num_plans += 1
        return wrapper


def _pages(batch: StepBatch, first: int, group: int, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FlashInfer's form of the sequences from `first` on.

    Their first rows, then the end, and their first pages, then the end: int32 [num_seqs + 1]; the pages of all of them
    in one row, on the device; and the tokens in each one's last page, int32 [num_seqs]. All but the pages are on the
    host.
    """
    lengths = batch.shape.lengths
    assert lengths is not None
    rows, contexts = torch.tensor(lengths[first:], dtype=torch.int32).T
    counts = (contexts + block_size - 1) // block_size
    table = batch.block_tables[group][first:]
    num_pages = int(counts.sum())
    # Page j of sequence i is entry i * width + j of the table.
    offsets = torch.arange(len(counts)) * table.shape[1] - (counts.cumsum(0) - counts)
    indexes = torch.repeat_interleave(offsets, counts) + torch.arange(num_pages)
    if table.is_cuda:
        indexes = indexes.pin_memory().to(table.device, non_blocking=True)
    pages = table.reshape(-1).index_select(0, indexes)
    return _starts(rows), _starts(counts), pages, contexts - (counts - 1) * block_size


def _starts(counts: Tensor) -> Tensor:
    """Where each begins, and where the last one ends."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


@dataclass(frozen=True)
class FlashInferAttention(TritonAttention):
    """Paged attention by the Triton kernels, and by FlashInfer for prompts."""

    planner: PrefillPlanner = field(kw_only=True)

    def begin(self, batch: StepBatch, kv_cache: KVCache) -> StepAttention:
        """Prepare one step. O(1), without waiting for the device."""
        step = super().begin(batch, kv_cache)
        if batch.shape.lengths is None or batch.shape.num_decodes == len(batch.shape.lengths):
            return step
        assert isinstance(step, TritonStep)
        parts = (batch, kv_cache, step.num_decodes, step.rest_start, step.batch_invariant)
        return _FlashInferStep(*parts, planner=self.planner)


@dataclass(frozen=True)
class _FlashInferStep(TritonStep):
    """A step with prompts. plans: by what layers see, each made by the first layer that needs it."""

    planner: PrefillPlanner = field(kw_only=True)
    plans: dict[Hashable, Any] = field(default_factory=dict, kw_only=True)

    def extend_rest(self, layer: int, query: Tensor, how: LayerAttention, output: Tensor | None = None) -> Tensor:
        """Attention of the sequences behind the decodes, by FlashInfer. Changes `output`, if given."""
        kind = how.group, how.kind.window_tokens, how.softcap, how.scale
        if kind not in self.plans:
            self.plans[kind] = self.planner.plan(self.batch, self.kv_cache, self.num_decodes, query, how)
        caches = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        attended: Tensor = self.plans[kind].run(query, caches, out=output)
        return attended


def check_flashinfer() -> ModuleType:
    """The package `flashinfer`. Raises ModelError if it isn't installed."""
    try:
        import flashinfer
    except ImportError as error:
        raise ModelError(
            f"attention='flashinfer': expected the package flashinfer-python, got: {error}. It takes CUDA's compiler,"
            f" nvcc, with which it builds its kernels: {pip_install('engine,gpu,flashinfer')}"
        ) from error
    package: ModuleType = flashinfer
    return package


def load_flashinfer(dtype: torch.dtype) -> FlashInferAttention:
    """The backend, for a model that the Triton kernels support (the caller checks that).

    Raises what `check_flashinfer` does, and InvalidArgumentError for float32.
    """
    package = check_flashinfer()
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"attention='flashinfer': expected dtype float16 or bfloat16, got {dtype}")
    return FlashInferAttention(planner=PrefillPlanner(package))
