"""SGLang's radix cache with its allocator and request pool, on CPU tensors, and what its scheduler does with them.

Importing this imports SGLang without the packages it would load models with.
"""
# ruff: noqa: E402  # what must be set before SGLang is imported stands between the imports

import logging
import os
import sys
from array import array
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
logging.disable(logging.WARNING)

import torch
from transformers.utils import is_torchvision_available, is_torchvision_v2_available


class _NoTorchvision:
    """Replaces torchvision, which SGLang imports for model configurations that the bench doesn't use."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[])

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


if find_spec("torchvision") is None:
    is_torchvision_available(), is_torchvision_v2_available()  # both remember the answer: there is none
    from transformers import AutoProcessor  # noqa: F401  # likewise

    sys.meta_path.insert(0, _NoTorchvision())  # type: ignore[arg-type]  # a finder and a loader in one

import sglang
from sglang.srt.mem_cache.allocation import (
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
    alloc_token_slots,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_hash_str

from bench.core.workload import BLOCK_SIZE, FILLER_BLOCKS, POOL_BLOCKS, STEP_SEQUENCES, filler

__all__ = [
    "VERSION",
    "Batch",
    "Cache",
    "MatchPrefixParams",
    "alloc_token_slots",
    "get_hash_str",
    "make_allocator",
    "make_key",
]

VERSION = sglang.__version__
MAX_TOKENS = 4096
Tensor = torch.Tensor
torch.set_num_threads(1)


def make_key(token_ids: "Sequence[int] | array[int]") -> RadixKey:
    """Return what the tree is asked with: the tokens packed as 64-bit integers."""
    return RadixKey(array("q", token_ids))


def make_allocator(page_size: int) -> Any:
    """Return an allocator of as many token slots as the other contestants' pools have."""
    slots = POOL_BLOCKS * BLOCK_SIZE
    if page_size == 1:
        return TokenToKVPoolAllocator(slots, torch.bfloat16, "cpu", SimpleNamespace(), need_sort=False)
    allocator = PagedTokenToKVPoolAllocator(slots, page_size, torch.bfloat16, "cpu", SimpleNamespace(), need_sort=False)
    allocator.use_triton_kernels = False
    return allocator


class Cache:
    """One tree with the Rust core, its slots, and the table of running requests."""

    def __init__(self, page_size: int = BLOCK_SIZE, num_rows: int = STEP_SEQUENCES) -> None:
        self.allocator = make_allocator(page_size)
        self.rows = ReqToTokenPool(num_rows, MAX_TOKENS, "cpu", enable_memory_saver=False)
        settings = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            eviction_policy="lru",
        )
        settings.tree_components = (ComponentType.FULL,)
        settings.tree_core_backend = "rust"
        self.tree = UnifiedRadixCache(settings)
        if "Rust" not in type(self.tree.tree_core).__name__:
            raise ImportError("SGLang's Rust core isn't in this installation")

    def insert(self, token_ids: "Sequence[int] | array[int]") -> None:
        """Cache a prefix, unless it is cached already. Evicts the oldest prefixes if there is no room."""
        if self.match(MatchPrefixParams(key=make_key(token_ids))).device_prefix_len == len(token_ids):
            return
        slots = alloc_token_slots(self.tree, len(token_ids)).clone()
        self.tree.insert(InsertParams(key=make_key(token_ids), value=slots, priority=0))

    def fill(self, first: int = 0, num_fillers: int = POOL_BLOCKS // FILLER_BLOCKS) -> None:
        """Cache fillers."""
        for number in range(first, first + num_fillers):
            self.insert(filler(number))

    def match(self, params: MatchPrefixParams) -> Any:
        """Return the longest cached prefix."""
        return self.tree.match_prefix(params)


class Batch:
    """Requests that run in lock step, with the scheduler's calls for them in its order."""

    def __init__(self, cache: Cache, prompts: list[list[int]], max_decoded: list[int]) -> None:
        """Match, lock, allocate and write what the prompts need, and cache them as after their prefill."""
        self._cache, self._num_prompt = cache, [len(token_ids) for token_ids in prompts]
        self.requests = [self._match(cache, token_ids, max_decoded) for token_ids in prompts]
        self._rows = cache.rows.alloc_rows(len(prompts))
        self._row_index = torch.tensor(self._rows)
        self._lengths = torch.tensor(self._num_prompt)
        self._prefill()

    @staticmethod
    def _match(cache: Cache, token_ids: list[int], max_decoded: list[int]) -> SimpleNamespace:
        found = cache.match(MatchPrefixParams(key=make_key(token_ids[:-1])))
        return _request(token_ids, max_decoded, found.last_device_node, found.device_prefix_len, cache)

    def _prefill(self) -> None:
        cache, tree = self._cache, self._cache.tree
        found = [tree.path_device_indices(request.last_node)[: request.prefix_len] for request in self.requests]
        prefix_lengths = torch.tensor([request.prefix_len for request in self.requests])
        last = torch.cat([slots[-1:] if len(slots) else torch.tensor([-1]) for slots in found])
        num_new = int((self._lengths - prefix_lengths).sum())
        slots = alloc_paged_token_slots_extend(
            tree, prefix_lengths, prefix_lengths, self._lengths, self._lengths, last, num_new
        )
        first = 0
        for request, row, prefix, length in zip(self.requests, self._rows, found, self._num_prompt, strict=True):
            request.kv.req_pool_idx = row
            num_own = length - request.prefix_len
            cache.rows.write((row, slice(0, request.prefix_len)), prefix.to(torch.int32))
            own = slots[first : first + num_own].to(torch.int32)
            cache.rows.write((row, slice(request.prefix_len, length)), own)
            tree.checkpoint(request, up_to=length)
            first += num_own

    def decode(self) -> None:
        """Make room for one more token of each request."""
        rows = self._cache.rows
        last = rows.req_to_token[self._row_index, self._lengths - 1]
        longer = self._lengths + 1
        slots = alloc_paged_token_slots_decode(self._cache.tree, longer, longer, last)
        rows.write((self._row_index, self._lengths), slots.to(torch.int32))
        self._lengths = longer

    def finish(self) -> None:
        """Cache what was decoded, and give the requests' slots and rows back."""
        tree = self._cache.tree
        for request, end in zip(self.requests, self._lengths.tolist(), strict=True):
            request.finished = lambda: True
            tree.checkpoint(request, up_to=end)
            tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, end)])
            tree.unlock(request.lock)
            self._cache.rows.free_slots.append(request.kv.req_pool_idx)


def _request(token_ids: list[int], max_decoded: list[int], node: Any, prefix_len: int, cache: Cache) -> SimpleNamespace:
    """Return what the tree reads and writes of SGLang's own request."""
    kv = SimpleNamespace(
        req_pool_idx=None,
        cache_inserted_len=0,
        cache_protected_len=prefix_len,
        swa_evict_floor=0,
        get_evicted_seqlen=lambda *_: 0,
        swa_dead_lo=lambda *_: 0,
        holds_kv=True,
    )
    return SimpleNamespace(
        rid="request",
        kv=kv,
        lock=cache.tree.lock(node),
        last_node=node,
        prefix_len=prefix_len,
        origin_input_ids=array("q", token_ids),
        full_untruncated_fill_ids=array("q", token_ids + max_decoded),
        finished=lambda: False,
        finished_reason=None,
        priority=0,
        extra_key=None,
        cache_salt=None,
        session=None,
        session_id=None,
        streaming_session=None,
        kv_rotation_base=None,
        return_routed_experts=False,
        skip_radix_cache_insert=False,
    )
