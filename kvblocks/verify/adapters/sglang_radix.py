"""SGLang's `RadixCache`, called in the order of its scheduler, with a stand-in for its request. SGLang 0.5.23.

A chunk is inserted into the tree after the step (`checkpoint`), which may move a request to the tree's copy of a slot.
The whole request is inserted when it ends. Without a GPU, set SGLANG_RUST_BUILD_MODE=never before SGLang is imported.
"""

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_token_slots
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvblocks.verify.adapter import CacheAdapter, Slot, WalkRequest

_NUM_ROWS = 64
_TOKENS_A_BLOCK = 4


class SglangAdapter(CacheAdapter):
    """A tree with pages of one token, SGLang's default, and memory for 4 * `num_blocks` tokens."""

    block_size = 1

    def __init__(self, num_blocks: int) -> None:
        self.num_slots = num_blocks * _TOKENS_A_BLOCK
        self._slots = TokenToKVPoolAllocator(self.num_slots, torch.bfloat16, "cpu", SimpleNamespace(), need_sort=False)
        self._rows = ReqToTokenPool(_NUM_ROWS, max(1024, self.num_slots), "cpu", enable_memory_saver=False)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self._rows,
                token_to_kv_pool_allocator=self._slots,
                page_size=1,
                eviction_policy="lru",
            )
        )
        self._in_step: list[WalkRequest] = []

    def start(self, request: WalkRequest, num_new_tokens: int) -> int | None:
        """Match, lock, and allocate a chunk, as for a waiting request. The last token is never looked up."""
        key = RadixKey(array("q", request.token_ids[:-1]), cache_salt=request.salt)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        num_hit_tokens = int(found.device_prefix_len)
        lock = self.tree.lock(found.last_device_node)
        indices = self.tree.path_device_indices(found.last_device_node)[:num_hit_tokens]
        end = min(num_hit_tokens + num_new_tokens, len(request.token_ids))
        if not self._has_room(end - num_hit_tokens):
            self.tree.unlock(lock)
            return None
        (row,) = self._rows.alloc_rows(1)
        request.state = _stand_in(request, row, lock, found.last_device_node, num_hit_tokens)
        self._rows.write((row, slice(0, num_hit_tokens)), indices.to(torch.int32))
        request.num_tokens = num_hit_tokens
        self._extend(request, end)
        return num_hit_tokens

    def grow(self, request: WalkRequest, num_tokens: int) -> bool:
        """Allocate slots for the next chunk or for new tokens."""
        if not self._has_room(num_tokens - request.num_tokens):
            return False
        self._extend(request, num_tokens)
        return True

    def slots(self, request: WalkRequest) -> Sequence[Slot]:
        """The request's row."""
        found = request.state
        return [int(index) for index in self._rows.req_to_token[found.kv.req_pool_idx][: found.num_slots]]

    def free(self, request: WalkRequest) -> None:
        """Insert the whole request, and give back what the tree didn't take, as SGLang's `release_kv_cache` does."""
        found = request.state
        end = found.num_slots
        self.tree.checkpoint(found, up_to=end)
        self.tree.free_kv_row(found.kv, [(found.kv.cache_protected_len, end)])
        self.tree.unlock(found.lock)
        self._rows.free_slots.append(found.kv.req_pool_idx)

    def end_step(self) -> None:
        """Insert the chunks of the step into the tree."""
        for request in self._in_step:
            self.tree.checkpoint(request.state, up_to=request.state.num_slots)
        self._in_step.clear()

    def reset(self) -> bool:
        """Clear the tree and all memory."""
        self.tree.reset()
        self._slots.clear()
        return True

    def num_free_slots(self) -> int:
        """The free slots and those that may be evicted."""
        return int(self._slots.available_size() + self.tree.evictable_size())

    def _has_room(self, num_tokens: int) -> bool:
        return num_tokens <= self.num_free_slots()

    def _extend(self, request: WalkRequest, end: int) -> None:
        found = request.state
        start = request.num_tokens
        found.full_untruncated_fill_ids = array("q", request.token_ids[:end])
        if end > start:
            indices = alloc_token_slots(self.tree, end - start)
            self._rows.write((found.kv.req_pool_idx, slice(start, end)), indices.to(torch.int32))
        found.num_slots = end
        if request not in self._in_step:
            self._in_step.append(request)


def _stand_in(request: WalkRequest, row: int, lock: Any, node: Any, num_hit_tokens: int) -> SimpleNamespace:
    """What the tree reads of a request."""
    kv = SimpleNamespace(
        req_pool_idx=row,
        cache_inserted_len=0,
        cache_protected_len=num_hit_tokens,
        swa_evict_floor=0,
        holds_kv=True,
        get_evicted_seqlen=lambda *_: 0,
        swa_dead_lo=lambda *_: 0,
    )
    tokens = array("q", request.token_ids)
    return SimpleNamespace(
        rid=request.name,
        extra_key=None,
        cache_salt=request.salt,
        priority=0,
        origin_input_ids=tokens,
        full_untruncated_fill_ids=tokens,
        lock=lock,
        last_node=node,
        kv=kv,
        num_slots=num_hit_tokens,
    )
