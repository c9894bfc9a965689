"""kvblocks on the items of `bench.driver`."""

from array import array

import kvblocks
from bench.driver import Cases, Driver
from bench.timing import Case
from bench.workload import (
    BLOCK_SIZE,
    DECODED_TOKENS,
    FILLER_BLOCKS,
    NUM_REQUESTS,
    POOL_BLOCKS,
    STEP_SEQUENCES,
    STEPS,
    TAKEN_BLOCKS,
    FreshPrompts,
    calls_for,
    decoded_tokens,
    filler,
    half_prompt,
    prompt,
    random_tokens,
    shared_prefix,
    step_tokens,
)
from kvblocks import BlockPool, KVCacheBlock, KVCacheManager, Sequence
from kvblocks.block import ROOT
from kvblocks.prefix_index import PrefixIndex
from kvblocks.hashing import get_hash_function
from kvblocks.tokens import TokenIds

Blocks = list[KVCacheBlock]


def is_compiled() -> bool:
    """Whether the kvblocks that is measured is the compiled build."""
    return bool(getattr(kvblocks, "__compiled__", False))


def fill_manager(manager: KVCacheManager, num_blocks_each: int = FILLER_BLOCKS) -> None:
    """Cache prefixes of `num_blocks_each` blocks until the pool is full of them."""
    for number in range(manager.num_blocks // num_blocks_each):
        sequence = Sequence(number, filler(number, num_blocks_each))
        manager.allocate_slots(sequence)
        manager.free(sequence)


def start(manager: KVCacheManager, token_ids: TokenIds) -> Sequence:
    """Return a running sequence of its own over `token_ids`."""
    sequence = Sequence(id(token_ids), token_ids)
    manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
    return sequence


def make_pool(num_blocks: int = POOL_BLOCKS) -> BlockPool:
    """Return a pool by itself, as the manager makes its own."""
    return BlockPool(num_blocks, PrefixIndex(BLOCK_SIZE, get_hash_function("xxh3_128")))


def cache_blocks(pool: BlockPool, blocks: Blocks, first_filler: int) -> None:
    """Cache fillers in blocks that were taken from `pool`, and give the blocks back."""
    for start_block in range(0, len(blocks), FILLER_BLOCKS):
        part = blocks[start_block : start_block + FILLER_BLOCKS]
        tokens = memoryview(filler(first_filler + start_block // FILLER_BLOCKS)).cast("B")
        pool.index.insert(ROOT, part, tokens, None, 0)
        pool.release(part)


class Ours(Driver):
    """kvblocks itself."""

    label = "kvblocks"
    note = (
        "A hit includes making the Sequence, from a list packing it too. Blocks get no digest until somebody asks for it."
    )

    def __init__(self) -> None:
        self.version = f"{kvblocks.__version__}, {'compiled' if is_compiled() else 'plain'}"
        self._fresh = FreshPrompts()
        self._num_fillers = 0
        self._pool = make_pool()
        self._full_pool: BlockPool | None = None
        self._full_manager: KVCacheManager | None = None

    def _manager(self) -> KVCacheManager:
        """Return a manager all of whose blocks were cached at first."""
        if self._full_manager is None:
            self._full_manager = KVCacheManager(POOL_BLOCKS, BLOCK_SIZE)
            fill_manager(self._full_manager)
        return self._full_manager

    def _take(self, pool: BlockPool, num_blocks: int) -> list[Blocks]:
        take = pool.take
        return [take(num_blocks) for _ in range(TAKEN_BLOCKS // num_blocks)]

    def _release(self, parts: list[Blocks]) -> None:
        release = self._pool.release
        for part in reversed(parts):
            release(part)

    def allocate(self, num_blocks: int) -> Cases:
        """`BlockPool.take` of blocks that hold nothing."""
        return {"pool": Case(lambda _: self._take(self._pool, num_blocks), TAKEN_BLOCKS, tidy=self._release)}

    def free(self, num_blocks: int) -> Cases:
        """`BlockPool.release`."""
        return {"pool": Case(self._release, TAKEN_BLOCKS, prepare=lambda: self._take(self._pool, num_blocks))}

    def evict(self, num_blocks: int) -> Cases:
        """`BlockPool.take` of blocks that hold fillers."""
        if self._full_pool is None:
            self._full_pool = make_pool()
            self.fill(self._full_pool)
        pool = self._full_pool

        def put_back(parts: list[Blocks]) -> None:
            self._cache_next(pool, [block for part in parts for block in part])

        return {"pool": Case(lambda _: self._take(pool, num_blocks), TAKEN_BLOCKS, tidy=put_back)}

    def touch(self, num_blocks: int) -> Cases:
        """`BlockPool.touch`."""
        pool = self._pool
        blocks = pool.take(num_blocks)
        pool.release(blocks)
        return {"pool": Case(lambda _: pool.touch(blocks), num_blocks, tidy=lambda _: pool.release(blocks))}

    def chain_hash(self, num_tokens: int) -> Cases:
        """`block_hash` of a new prefix's last block, which computes the digests of all."""

        def case(algorithm: str) -> Case:
            manager = KVCacheManager(POOL_BLOCKS, BLOCK_SIZE, hash_algorithm=algorithm)

            def prepare() -> list[Sequence]:
                return [start(manager, self._fresh.make(num_tokens)) for _ in range(-(-8192 // num_tokens))]

            def run(sequences: list[Sequence]) -> list[Sequence]:
                for sequence in sequences:
                    assert sequence.blocks[-1].block_hash
                return sequences

            num_units = -(-8192 // num_tokens) * num_tokens / BLOCK_SIZE
            return Case(run, num_units, prepare, lambda sequences: [manager.free(s) for s in sequences] and None)

        return {"xxh3_128": case("xxh3_128"), "sha256": case("sha256")}

    def _hit(self, num_tokens: int, token_ids: TokenIds, num_hit_tokens: int) -> Case:
        manager = self._manager()
        sequence = start(manager, prompt(num_tokens))
        manager.free(sequence)
        assert manager.get_computed_blocks(Sequence("probe", token_ids)).num_tokens == num_hit_tokens
        num_calls = 8 * calls_for(num_tokens)

        def run(_: None) -> None:
            find = manager.get_computed_blocks
            for _call in range(num_calls):
                find(Sequence("probe", token_ids))

        return Case(run, num_calls)

    def hit_buffer(self, num_tokens: int) -> Cases:
        """`get_computed_blocks` of a new Sequence over an array."""
        return {"array": self._hit(num_tokens, array("I", prompt(num_tokens)), num_tokens)}

    def hit_list(self, num_tokens: int) -> Cases:
        """`get_computed_blocks` of a new Sequence over a list, which is packed each time."""
        return {"list": self._hit(num_tokens, prompt(num_tokens), num_tokens)}

    def half_hit(self, num_tokens: int) -> Cases:
        """As `hit_buffer`, of a prompt that leaves the cached one in the middle of its run."""
        half = half_prompt(num_tokens)
        return {"array": self._hit(num_tokens, array("I", half), num_tokens // 2)}
