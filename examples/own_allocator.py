"""A prefix cache for an engine that keeps its own block allocator. Run it: it needs no torch.

`PrefixCache` owns no memory. The engine tells it which blocks hold which tokens. The cache returns the ids of blocks
that the engine may reuse. A block belongs to the engine until `insert_prefix` takes it. From then on it belongs to the
cache, until a call returns its id.
"""

import random

from kvblocks import PrefixCache

BLOCK_SIZE, NUM_BLOCKS = 16, 200


class Allocator:
    """The engine's own allocator: a stack of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))

    def take(self, number: int, cache: PrefixCache) -> list[int]:
        """Return `number` blocks. Evicts from the cache if too few are free."""
        if number > len(self.free):
            self.free += cache.evict(number - len(self.free))
        if number > len(self.free):
            raise MemoryError(f"expected {number} free blocks, got {len(self.free)}")
        return [self.free.pop() for _ in range(number)]


def serve(prompt: list[int], cache: PrefixCache, allocator: Allocator, kv_cache: dict[int, list[int]]) -> int:
    """Compute a prompt, and return how many of its tokens were cached."""
    with cache.match_prefix(prompt) as match:  # inside this block, nothing evicts the match
        cached = match.matched_kv_blocks
        for index, block_id in enumerate(cached):
            assert kv_cache[block_id] == prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        table = [*cached, *allocator.take(num_blocks - len(cached), cache)]
        for index, block_id in enumerate(table[len(cached) :], len(cached)):  # the model computes these
            kv_cache[block_id] = prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        num_full = len(prompt) // BLOCK_SIZE
        result = cache.insert_prefix(prompt, table[:num_full])
    allocator.free += [*result.unused_kv_blocks, *result.evicted_kv_blocks, *table[num_full:]]
    return match.match_length


cache = PrefixCache(max_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
allocator, kv_cache = Allocator(NUM_BLOCKS), {}
chance = random.Random(3)
system_prompts = [[1000 * kind + i for i in range(320)] for kind in range(3)]
num_cached = num_tokens = 0
for _ in range(300):
    prompt = [*chance.choice(system_prompts), *(chance.randrange(50_000) for _ in range(chance.randrange(1, 100)))]
    num_cached += serve(prompt, cache, allocator, kv_cache)
    num_tokens += len(prompt)
    assert len(allocator.free) + cache.cached_block_count() == NUM_BLOCKS
print(f"{num_cached} of {num_tokens} tokens were cached; the cache has {cache.cached_block_count()} blocks")
assert num_cached > num_tokens // 2
