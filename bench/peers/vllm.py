"""vLLM's BlockPool and KVCacheManager, with one group of full-attention layers."""

import os
from collections.abc import Callable
from functools import cached_property
from itertools import chain
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("PYTHONHASHSEED", "0")  # else it warns that its xxhash digests differ between processes

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from bench.core.driver import Cases, Driver
from bench.core.workload import (
    BLOCK_SIZE,
    FILLER_BLOCKS,
    NUM_REQUESTS,
    OWN_TOKENS,
    POOL_BLOCKS,
    SHARED_TOKENS,
    STEPS,
    TAKEN_BLOCKS,
    FreshPrompts,
    calls_for,
    decoded_tokens,
    half_prompt,
    prompt,
    shared_prefix,
    step_tokens,
)
from bench.timing import Case

MAX_MODEL_TOKENS = 200_000
DEFAULT_HASH = "sha256"
Hasher = Callable[[Request], list[Any]]
Requests = list[Request]


def make_pool() -> BlockPool:
    """Return a pool of POOL_BLOCKS usable blocks; vLLM keeps block 0 for itself."""
    return BlockPool(POOL_BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)


def cache_blocks(pool: BlockPool, blocks: list[Any]) -> None:
    """Cache blocks that were taken from `pool` as fillers with random hashes, and give them back."""
    for first in range(0, len(blocks), FILLER_BLOCKS):
        part = blocks[first : first + FILLER_BLOCKS]
        request = SimpleNamespace(block_hashes=[os.urandom(32) for _ in part])
        pool.cache_full_blocks(request, part, 0, len(part), BLOCK_SIZE, 0)
        pool.free_blocks(reversed(part))


def make_manager(algorithm: str) -> tuple[KVCacheManager, Hasher]:
    """Return a manager, and what computes its requests' hashes."""
    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    layers = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(POOL_BLOCKS + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)])
    manager = KVCacheManager(
        config,
        max_model_len=MAX_MODEL_TOKENS,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=True,
    )
    return manager, get_request_block_hasher(BLOCK_SIZE, hash_function)


def take(pool: BlockPool, num_blocks: int) -> list[list[Any]]:
    """Take a sample's blocks, `num_blocks` a call."""
    return [pool.get_new_blocks(num_blocks) for _ in range(TAKEN_BLOCKS // num_blocks)]


def decode(manager: KVCacheManager, requests: Requests, token_ids: list[int]) -> None:
    """Decode one token for each request, as the scheduler does."""
    for request, token_id in zip(requests, token_ids, strict=True):
        request.append_output_token_ids(token_id)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1


class Engine:
    """A full manager with a scheduler's few lines around it."""

    def __init__(self, algorithm: str) -> None:
        self.manager, self.hasher = make_manager(algorithm)
        cache_blocks(self.manager.block_pool, self.manager.block_pool.get_new_blocks(POOL_BLOCKS))
        self._sampling = SamplingParams(max_tokens=MAX_MODEL_TOKENS)
        self._num_requests = 0

    def request(self, token_ids: list[int], *, hashed: bool = True) -> Request:
        """Return a new request; making it computes its hashes."""
        self._num_requests += 1
        return Request(
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=token_ids,
            sampling_params=self._sampling,
            pooling_params=None,
            block_hasher=self.hasher if hashed else None,
        )

    def start(self, token_ids: list[int]) -> Request:
        """Return a running request."""
        request = self.request(token_ids)
        computed, num_computed, _ = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_computed
        self.manager.allocate_slots(request, num_new, num_computed, computed)
        request.num_computed_tokens = num_computed + num_new
        return request

    def free_all(self, requests: Requests) -> None:
        """Free running requests."""
        for request in requests:
            self.manager.free(request)


class VLLM(Driver):
    """vLLM v1."""

    label = "vllm"
    version = vllm.__version__
    note = (
        "A hit hashes a request that is made already and looks it up, so it leaves out what kvblocks' hit contains, "
        "making the request; `hashes given` only looks it up. The life cycle and decoding hash each block as it "
        "fills, with sha256, the default, unless it says xxhash."
    )

    def __init__(self) -> None:
        self._fresh = FreshPrompts()
        self._pool = make_pool()
        self._engines: dict[str, Engine] = {}

    @cached_property
    def _full_pool(self) -> BlockPool:
        pool = make_pool()
        self.fill(pool)
        return pool

    def _engine(self, algorithm: str = DEFAULT_HASH) -> Engine:
        if algorithm not in self._engines:
            self._engines[algorithm] = Engine(algorithm)
        return self._engines[algorithm]

    def _release(self, parts: list[list[Any]]) -> None:
        free_blocks = self._pool.free_blocks
        for part in reversed(parts):
            free_blocks(reversed(part))

    def allocate(self, num_blocks: int) -> Cases:
        """`BlockPool.get_new_blocks` of blocks that hold nothing."""
        return {"pool": Case(lambda _: take(self._pool, num_blocks), TAKEN_BLOCKS, tidy=self._release)}

    def free(self, num_blocks: int) -> Cases:
        """`BlockPool.free_blocks`."""
        return {"pool": Case(self._release, TAKEN_BLOCKS, prepare=lambda: take(self._pool, num_blocks))}

    def evict(self, num_blocks: int) -> Cases:
        """`BlockPool.get_new_blocks` of cached blocks."""
        pool = self._full_pool

        def put_back(parts: list[list[Any]]) -> None:
            cache_blocks(pool, list(chain.from_iterable(parts)))

        return {"pool": Case(lambda _: take(pool, num_blocks), TAKEN_BLOCKS, tidy=put_back)}

    def touch(self, num_blocks: int) -> Cases:
        """`BlockPool.touch`."""
        pool = self._pool
        blocks = pool.get_new_blocks(num_blocks)
        pool.free_blocks(reversed(blocks))

        def tidy(_: None) -> None:
            pool.free_blocks(reversed(blocks))

        return {"pool": Case(lambda _: pool.touch(blocks), num_blocks, tidy=tidy)}

    def chain_hash(self, num_tokens: int) -> Cases:
        """The request's block hasher."""

        def case(algorithm: str) -> Case:
            engine = self._engine(algorithm)
            request = engine.request(self._fresh.make(num_tokens), hashed=False)
            return Case(lambda _: engine.hasher(request), num_tokens / BLOCK_SIZE)

        return {"sha256": case("sha256"), "xxhash": case("xxhash")}

    def _hit(self, num_tokens: int, token_ids: list[int], num_hit_tokens: int) -> Cases:
        def case(algorithm: str, *, hash_anew: bool = True, make_request: bool = False) -> Case:
            engine = self._engine(algorithm)
            engine.free_all([engine.start(prompt(num_tokens))])
            request = engine.request(token_ids)
            find = engine.manager.get_computed_blocks
            assert find(request)[1] == num_hit_tokens
            num_calls = max(1, calls_for(num_tokens) // 16)

            def run(_: None) -> None:
                for _call in range(num_calls):
                    if hash_anew:
                        request.block_hashes = []
                        request.update_block_hashes()
                    find(request)

            def run_with_request(_: None) -> None:
                for _call in range(num_calls):
                    find(engine.request(token_ids))

            return Case(run_with_request if make_request else run, num_calls)

        return {
            "hash and lookup": case(DEFAULT_HASH),
            "the same, xxhash": case("xxhash"),
            "making the request too": case(DEFAULT_HASH, make_request=True),
            "hashes given": case(DEFAULT_HASH, hash_anew=False),
        }

    def hit_buffer(self, num_tokens: int) -> Cases:
        """`get_computed_blocks`, after the request's hashes."""
        return self._hit(num_tokens, prompt(num_tokens), num_tokens)

    def hit_list(self, num_tokens: int) -> Cases:
        """The same: vLLM's requests take lists."""
        return self._hit(num_tokens, prompt(num_tokens), num_tokens)

    def half_hit(self, num_tokens: int) -> Cases:
        """The same, of a prompt whose second half is new; its hashes are computed to the end."""
        return self._hit(num_tokens, half_prompt(num_tokens), num_tokens // 2)

    def append(self, num_sequences: int) -> Cases:
        """`append_output_token_ids` and `allocate_slots`, a call for each token."""
        engine, tokens = self._engine(), decoded_tokens()

        def prepare() -> Requests:
            return [engine.start(self._fresh.make(SHARED_TOKENS + OWN_TOKENS)) for _ in range(num_sequences)]

        def run(requests: Requests) -> Requests:
            for token_id in tokens:
                decode(engine.manager, requests, [token_id] * len(requests))
            return requests

        return {DEFAULT_HASH: Case(run, num_sequences * len(tokens), prepare, engine.free_all)}

    def step(self, num_sequences: int) -> Cases:
        """As `append`; vLLM has no call for a whole step."""
        engine, steps = self._engine(), step_tokens()

        def prepare() -> Requests:
            return [engine.start(token_ids) for token_ids in self._fresh.running()]

        def run(requests: Requests) -> Requests:
            for token_ids in steps:
                decode(engine.manager, requests, token_ids)
            return requests

        return {DEFAULT_HASH: Case(run, num_sequences * STEPS, prepare, engine.free_all)}

    def lifecycle(self, num_sequences: int) -> Cases:
        """Request, `get_computed_blocks`, `allocate_slots`, decoding, `free`."""

        def case(algorithm: str) -> Case:
            engine, tokens = self._engine(algorithm), decoded_tokens()
            engine.free_all([engine.start([*shared_prefix(), 0])])

            def run(prompts: list[list[int]]) -> None:
                for first in range(0, len(prompts), num_sequences):
                    requests = [engine.start(token_ids) for token_ids in prompts[first : first + num_sequences]]
                    for token_id in tokens:
                        decode(engine.manager, requests, [token_id] * len(requests))
                    engine.free_all(requests)

            return Case(run, NUM_REQUESTS, prepare=self._fresh.requests)

        return {"sha256": case("sha256"), "xxhash": case("xxhash")}

    def hold_empty_pool(self) -> BlockPool:
        """Return a new pool."""
        return make_pool()

    def fill(self, pool: object) -> None:
        """Cache every block under a hash of its own."""
        cache_blocks(pool, pool.get_new_blocks(POOL_BLOCKS))  # type: ignore[attr-defined]  # a BlockPool
