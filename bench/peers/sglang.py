"""SGLang's radix cache with the Rust core, and its paged allocator."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from bench.core.driver import Cases, Driver
from bench.core.workload import (
    BLOCK_SIZE,
    FILLER_BLOCKS,
    NUM_REQUESTS,
    POOL_BLOCKS,
    STEPS,
    TAKEN_BLOCKS,
    FreshPrompts,
    calls_for,
    decoded_tokens,
    half_prompt,
    prompt,
    shared_prefix,
)
from bench.peers.sglang_tree import (
    VERSION,
    Batch,
    Cache,
    MatchPrefixParams,
    alloc_token_slots,
    get_hash_str,
    make_allocator,
    make_key,
)
from bench.timing import Case

PAGED = f"Rust core, page {BLOCK_SIZE}"
UNPAGED = "Rust core, page 1"


class SGLang(Driver):
    """SGLang on CPU tensors."""

    label = "sglang"
    version = VERSION
    note = (
        "From a buffer the key is made already (kvblocks makes its Sequence); from a list the key is made in each "
        "call. A match returns a tree node; `and slots` reads its slot indices too, which is what kvblocks' hit "
        "contains. It hashes nothing, and caches decoded tokens when a request ends. It evicts whole leaves of the "
        "tree, here 64 blocks at a time. Its step fills a table of slots too, which the others leave to the engine."
    )

    def __init__(self) -> None:
        self._fresh = FreshPrompts()
        self._allocator = make_allocator(BLOCK_SIZE)
        self._num_fillers = POOL_BLOCKS // FILLER_BLOCKS

    @cached_property
    def _full(self) -> Cache:
        return _filled(BLOCK_SIZE)

    @cached_property
    def _full_unpaged(self) -> Cache:
        return _filled(1)

    def _take(self, num_blocks: int) -> list[Any]:
        return [self._allocator.alloc(num_blocks * BLOCK_SIZE) for _ in range(_calls(num_blocks))]

    def _release(self, parts: list[Any]) -> None:
        for slots in reversed(parts):
            self._allocator.free_segment(slots, start_pos=0)

    def allocate(self, num_blocks: int) -> Cases:
        """The paged allocator's `alloc`."""
        num_units = num_blocks * _calls(num_blocks)
        return {PAGED: Case(lambda _: self._take(num_blocks), num_units, tidy=self._release)}

    def free(self, num_blocks: int) -> Cases:
        """The paged allocator's `free_segment`."""
        num_units = num_blocks * _calls(num_blocks)
        return {PAGED: Case(self._release, num_units, prepare=lambda: self._take(num_blocks))}

    def evict(self, num_blocks: int) -> Cases:
        """`alloc_token_slots`, which evicts leaves of the tree until there is room."""
        cache = self._full
        num_free = cache.allocator.available_size()
        if num_free:
            cache.allocator.alloc(num_free)  # held for good, so that every allocation evicts
        num_calls = _calls(num_blocks)

        def run(_: None) -> list[Any]:
            return [alloc_token_slots(cache.tree, num_blocks * BLOCK_SIZE) for _ in range(num_calls)]

        def put_back(parts: list[Any]) -> None:
            for slots in parts:
                cache.allocator.free_segment(slots, start_pos=0)
            num_fillers = cache.allocator.available_size() // BLOCK_SIZE // FILLER_BLOCKS
            cache.fill(self._num_fillers, num_fillers)
            self._num_fillers += num_fillers

        return {PAGED: Case(run, num_blocks * num_calls, tidy=put_back)}

    def touch(self, num_blocks: int) -> Cases:
        """`lock` of the node that a match found."""
        cache, num_tokens = self._full, num_blocks * BLOCK_SIZE
        cache.insert(prompt(num_tokens)[:-1])
        node = cache.match(MatchPrefixParams(key=make_key(prompt(num_tokens)))).last_device_node
        return {PAGED: Case(lambda _: cache.tree.lock(node), num_blocks, tidy=cache.tree.unlock)}

    def chain_hash(self, num_tokens: int) -> Cases:
        """`get_hash_str`, in C++."""
        key = make_key(self._fresh.make(num_tokens))
        return {"sha256 in C++": Case(lambda _: get_hash_str(key, None, BLOCK_SIZE), num_tokens / BLOCK_SIZE)}

    def _hit(self, cache: Cache, num_tokens: int, ask: Callable[[], Any], num_hit_tokens: int) -> Case:
        cache.insert(prompt(num_tokens)[:-1])
        assert ask().device_prefix_len == num_hit_tokens
        num_calls = 4 * calls_for(num_tokens)

        def run(_: None) -> None:
            for _call in range(num_calls):
                ask()

        return Case(run, num_calls)

    def _hits(self, num_tokens: int, token_ids: list[int], num_hit_tokens: int) -> Cases:
        params = MatchPrefixParams(key=make_key(token_ids))
        cases = {}
        for way, cache in ((PAGED, self._full), (UNPAGED, self._full_unpaged)):
            match = cache.tree.match_prefix
            cases[way] = self._hit(cache, num_tokens, lambda match=match: match(params), num_hit_tokens)

        def match_and_read() -> Any:
            found = self._full.match(params)
            self._full.tree.path_device_indices(found.last_device_node)
            return found

        return cases | {f"{PAGED}, and slots": self._hit(self._full, num_tokens, match_and_read, num_hit_tokens)}

    def hit_buffer(self, num_tokens: int) -> Cases:
        """`match_prefix` of a key made before."""
        return self._hits(num_tokens, prompt(num_tokens), num_tokens)

    def hit_list(self, num_tokens: int) -> Cases:
        """Make a key from a list, then `match_prefix`."""
        cache, token_ids = self._full, prompt(num_tokens)

        def ask() -> Any:
            return cache.match(MatchPrefixParams(key=make_key(token_ids)))

        return {PAGED: self._hit(cache, num_tokens, ask, num_tokens)}

    def half_hit(self, num_tokens: int) -> Cases:
        """As `hit_buffer`; the first match splits the node, which isn't timed."""
        return self._hits(num_tokens, half_prompt(num_tokens), num_tokens // 2)

    def step(self, num_sequences: int) -> Cases:
        """Slots for a token of each request, in one call on tensors. Nothing is cached meanwhile."""
        cache = self._full

        def prepare() -> Batch:
            return Batch(cache, self._fresh.running(), [0] * STEPS)

        def run(batch: Batch) -> Batch:
            for _ in range(STEPS):
                batch.decode()
            return batch

        return {PAGED: Case(run, num_sequences * STEPS, prepare, Batch.finish)}

    def lifecycle(self, num_sequences: int) -> Cases:
        """Match, lock, allocate, checkpoint, decode, checkpoint, free."""
        cache, decoded = self._full, decoded_tokens()
        cache.insert(shared_prefix())

        def run(prompts: list[list[int]]) -> None:
            for first in range(0, len(prompts), num_sequences):
                batch = Batch(cache, prompts[first : first + num_sequences], decoded)
                for _ in decoded:
                    batch.decode()
                batch.finish()

        return {PAGED: Case(run, NUM_REQUESTS, prepare=self._fresh.requests)}

    def hold_empty_pool(self) -> Cache:
        """Return a new tree with its allocator, and a table of one request, whose size isn't the pool's."""
        return Cache(num_rows=1)

    def fill(self, pool: object) -> None:
        """Cache fillers."""
        assert isinstance(pool, Cache)
        pool.fill()


def _calls(num_blocks: int) -> int:
    """A sample's calls: fewer than the others make, since a small allocation takes SGLang long."""
    return max(1, min(TAKEN_BLOCKS // num_blocks, 256))


def _filled(page_size: int) -> Cache:
    cache = Cache(page_size)
    cache.fill()
    return cache
