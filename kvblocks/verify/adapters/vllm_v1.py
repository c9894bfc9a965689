"""vLLM's `KVCacheManager` with one group of full attention, as its scheduler calls it. For vLLM 0.32 and 0.33."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request as VllmRequest

from kvblocks.verify.adapter import CacheAdapter, Slot, WalkRequest

_MAX_MODEL_LEN = 100_000


class VllmAdapter(CacheAdapter):
    """A manager of `num_blocks` blocks plus the null block. hash_name: the name of a hash function of vLLM.

    manager_class: a subclass may set another class with the same constructor and calls.
    """

    block_size = 4
    manager_class: Any = KVCacheManager

    def __init__(self, num_blocks: int, hash_name: str = "sha256") -> None:
        size = self.block_size
        self.num_slots = num_blocks * size
        hash_function = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(size, hash_function)
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float16)
        config = KVCacheConfig(
            num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = self.manager_class(
            config, max_model_len=_MAX_MODEL_LEN, scheduler_block_size=size, hash_block_size=size, enable_caching=True
        )
        self._num_made = 0

    def start(self, request: WalkRequest, num_new_tokens: int) -> int | None:
        """Look up and allocate, as for a waiting request."""
        self._num_made += 1
        found = VllmRequest(
            request_id=f"{request.name}/{self._num_made}",
            prompt_token_ids=list(request.token_ids),
            sampling_params=SamplingParams(max_tokens=_MAX_MODEL_LEN),
            pooling_params=None,
            cache_salt=request.salt,
            block_hasher=self._hasher,
        )
        blocks, num_hit_tokens, *_ = self.manager.get_computed_blocks(found)
        num_new = min(num_new_tokens, len(request.token_ids) - num_hit_tokens)
        if self.manager.allocate_slots(found, num_new, num_hit_tokens, blocks) is None:
            return None
        found.num_computed_tokens = num_hit_tokens + num_new  # as the scheduler does at the end of its step
        request.state = found
        return int(num_hit_tokens)

    def grow(self, request: WalkRequest, num_tokens: int) -> bool:
        """Append the tokens that vLLM's request doesn't have, and allocate, as for a running request."""
        found: VllmRequest = request.state
        new = request.token_ids[found.num_tokens :]
        if new:
            found.append_output_token_ids(new)
        if self.manager.allocate_slots(found, num_tokens - found.num_computed_tokens) is None:
            return False
        found.num_computed_tokens = num_tokens
        return True

    def slots(self, request: WalkRequest) -> Sequence[Slot]:
        """Slots by block ids."""
        (ids,) = self.manager.get_block_ids(request.state.request_id)
        return [block_id * self.block_size + offset for block_id in ids for offset in range(self.block_size)]

    def free(self, request: WalkRequest) -> None:
        """Free the request."""
        self.manager.free(request.state)

    def reset(self) -> bool:
        """Reset the prefix cache."""
        return bool(self.manager.reset_prefix_cache())

    def num_free_slots(self) -> int:
        """All free blocks, cached or not."""
        return int(self.manager.block_pool.get_num_free_blocks()) * self.block_size
