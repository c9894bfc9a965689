"""mlx-lm's `LRUPromptCache`, as its server calls it, with real caches of KV. mlx-lm 0.32.2.

It keeps whole caches rather than blocks, and copies them. So K and V hold numbers here: each computed token gets a new
number, and copies keep it. These numbers are the walk's slots.
"""

import copy
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache

from kvblocks.verify.adapter import CacheAdapter, Slot, WalkRequest

_TOKENS_AN_ENTRY = 3  # the walk counts at least so many for each request


class MlxLmAdapter(CacheAdapter):
    """A cache of at most `num_blocks` prompts. There is always room, since mlx allocates. A salt is a model's key.

    A subclass may make another cache with the same calls in `make`, and clear it in `forget`.
    """

    block_size = 1

    def __init__(self, num_blocks: int) -> None:
        self.num_slots = num_blocks * _TOKENS_AN_ENTRY
        self.cache = self.make(num_blocks)
        self._numbers = count(1)
        self._in_prompt: list[WalkRequest] = []

    def make(self, max_size: int) -> Any:
        """Return a new cache of at most `max_size` prompts."""
        return LRUPromptCache(max_size)

    def forget(self) -> None:
        """Forget everything that is cached."""
        self.cache.trim_to(n_sequences=0)

    def start(self, request: WalkRequest, num_new_tokens: int) -> int:
        """Fetch the nearest cache, and compute a chunk after it."""
        found, rest = self.cache.fetch_nearest_cache(request.salt, list(request.token_ids))
        request.state = [KVCache()] if found is None else found
        num_hit_tokens = len(request.token_ids) - len(rest)
        self._compute(request, min(num_new_tokens, len(rest)))
        self._in_prompt.append(request)
        return num_hit_tokens

    def grow(self, request: WalkRequest, num_tokens: int) -> bool:
        """Compute more tokens."""
        self._compute(request, num_tokens - request.num_tokens)
        return True

    def slots(self, request: WalkRequest) -> Sequence[Slot]:
        """Return the numbers that K and V hold at each token."""
        (kv,) = request.state
        if kv.keys is None:
            return []
        keys, values = kv.keys_and_values()
        return list(zip(keys[0, 0, :, 0].tolist(), values[0, 0, :, 0].tolist(), strict=True))

    def free(self, request: WalkRequest) -> None:
        """Insert the cache of all tokens, which then belongs to the prompt cache."""
        self._drop(request)
        self.cache.insert_cache(request.salt, request.token_ids[: request.num_tokens], request.state)

    def end_step(self) -> None:
        """Insert a copy when a prompt is computed, as the server does with a cache that it takes from its batch."""
        for request in [request for request in self._in_prompt if request.num_written == len(request.token_ids)]:
            self._drop(request)
            kept = copy.deepcopy(request.state)
            self.cache.insert_cache(request.salt, list(request.token_ids), kept, cache_type="user")

    def fail_step(self, requests: Iterable[WalkRequest]) -> bool:
        """Drop what was computed."""
        for request in requests:
            self._drop(request)
        return True

    def reset(self) -> bool:
        """Forget everything that is cached."""
        self.forget()
        return True

    def _compute(self, request: WalkRequest, num_tokens: int) -> None:
        if num_tokens:
            numbers = mx.array([next(self._numbers) for _ in range(num_tokens)], dtype=mx.int32).reshape(1, 1, -1, 1)
            request.state[0].update_and_fetch(numbers, numbers)

    def _drop(self, request: WalkRequest) -> None:
        if request in self._in_prompt:
            self._in_prompt.remove(request)
