"""kvblocks on the items of `bench.core.driver`."""

from array import array
from collections.abc import Callable
from functools import cached_property
from itertools import chain, count

import kvblocks
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
    filler,
    half_prompt,
    prompt,
    shared_prefix,
    step_tokens,
)
from bench.timing import Case
from kvblocks import BlockPool, KVCacheBlock, KVCacheManager, Sequence
from kvblocks.core.block import ROOT
from kvblocks.core.tokens import TokenIds

Blocks = list[KVCacheBlock]
Decode = Callable[[KVCacheManager, list[Sequence], list[int]], None]

_sequence_ids = count()


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
    sequence = Sequence(next(_sequence_ids), token_ids)
    manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
    return sequence


def make_pool(num_blocks: int = POOL_BLOCKS) -> BlockPool:
    """Return a manager's pool. Other versions build a pool differently, so the manager makes it."""
    pool: BlockPool = KVCacheManager(num_blocks, BLOCK_SIZE)._pool  # noqa: SLF001
    return pool


def cache_blocks(pool: BlockPool, blocks: Blocks, first_filler: int, num_blocks_each: int = FILLER_BLOCKS) -> None:
    """Cache fillers from `first_filler` on in blocks that were taken from `pool`, and give the blocks back."""
    for number, first in enumerate(range(0, len(blocks), num_blocks_each), first_filler):
        part = blocks[first : first + num_blocks_each]
        pool.index.cache(ROOT, part, memoryview(filler(number, num_blocks_each)).cast("B"), None, 0)
        pool.release_table(part, len(part))


def take(pool: BlockPool, num_blocks: int) -> list[Blocks]:
    """Take a sample's blocks, `num_blocks` a call."""
    return [pool.take(num_blocks) for _ in range(TAKEN_BLOCKS // num_blocks)]


def decode_one_by_one(manager: KVCacheManager, sequences: list[Sequence], token_ids: list[int]) -> None:
    """Decode the same tokens for all sequences, in lock step, one call a token."""
    append = manager.append_slots
    for token_id in token_ids:
        for sequence in sequences:
            append(sequence, [token_id])


def decode_together(manager: KVCacheManager, sequences: list[Sequence], token_ids: list[int]) -> None:
    """Decode the same tokens for all sequences, one call a step."""
    for token_id in token_ids:
        manager.append_step(sequences, [token_id] * len(sequences))


def free_all(manager: KVCacheManager) -> Callable[[list[Sequence]], None]:
    """Return a function that frees the sequences that a case ran on."""

    def tidy(sequences: list[Sequence]) -> None:
        for sequence in sequences:
            manager.free(sequence)

    return tidy


class Ours(Driver):
    """kvblocks itself."""

    label = "kvblocks"
    note = (
        "A hit includes making the Sequence and, from a list, packing it. No digest is computed until one is asked "
        "for, so only the item `chain hash` contains any."
    )

    def __init__(self) -> None:
        self.version = f"{kvblocks.__version__}, {'compiled' if is_compiled() else 'plain'}"
        self._fresh = FreshPrompts()
        self._pool = make_pool()
        self._num_fillers = POOL_BLOCKS // FILLER_BLOCKS

    @cached_property
    def _full_pool(self) -> BlockPool:
        pool = make_pool()
        cache_blocks(pool, pool.take(POOL_BLOCKS), 0)
        return pool

    @cached_property
    def _full(self) -> KVCacheManager:
        manager = KVCacheManager(POOL_BLOCKS, BLOCK_SIZE)
        self.fill(manager)
        return manager

    def _release(self, parts: list[Blocks]) -> None:
        release_table = self._pool.release_table
        for part in reversed(parts):
            release_table(part, len(part))

    def _cache_again(self, parts: list[Blocks]) -> None:
        """Cache fillers that are new in the blocks that were just evicted."""
        cache_blocks(self._full_pool, list(chain.from_iterable(parts)), self._num_fillers)
        self._num_fillers += TAKEN_BLOCKS // FILLER_BLOCKS

    def allocate(self, num_blocks: int) -> Cases:
        """`BlockPool.take` of empty blocks."""
        return {"pool": Case(lambda _: take(self._pool, num_blocks), TAKEN_BLOCKS, tidy=self._release)}

    def free(self, num_blocks: int) -> Cases:
        """`BlockPool.release_table` of blocks that count as cached, as most do when a request ends."""
        return {"pool": Case(self._release, TAKEN_BLOCKS, prepare=lambda: take(self._pool, num_blocks))}

    def evict(self, num_blocks: int) -> Cases:
        """`BlockPool.take` of blocks that hold fillers."""
        pool = self._full_pool
        return {"pool": Case(lambda _: take(pool, num_blocks), TAKEN_BLOCKS, tidy=self._cache_again)}

    def touch(self, num_blocks: int) -> Cases:
        """`BlockPool.touch`."""
        pool = self._pool
        blocks = pool.take(num_blocks)
        pool.release_table(blocks, num_blocks)
        tidy = lambda _: pool.release_table(blocks, num_blocks)  # noqa: E731
        return {"pool": Case(lambda _: pool.touch(blocks), num_blocks, tidy=tidy)}

    def chain_hash(self, num_tokens: int) -> Cases:
        """`block_hash` of a new prefix's last block, which computes the digests of all."""

        def case(algorithm: str) -> Case:
            manager = KVCacheManager(POOL_BLOCKS, BLOCK_SIZE, hash_algorithm=algorithm)

            def ask(sequence: Sequence) -> Sequence:
                assert sequence.blocks[-1].block_hash
                return sequence

            def prepare() -> Sequence:
                return start(manager, self._fresh.make(num_tokens))

            return Case(ask, num_tokens / BLOCK_SIZE, prepare, manager.free)

        return {"xxh3_128": case("xxh3_128"), "sha256": case("sha256")}

    def _hit(self, num_tokens: int, token_ids: TokenIds, num_hit_tokens: int) -> Case:
        manager = self._full
        manager.free(start(manager, prompt(num_tokens)))
        assert manager.get_computed_blocks(Sequence("probe", token_ids)).num_tokens == num_hit_tokens
        num_calls = 4 * calls_for(num_tokens)

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
        """As `hit_buffer`, for a prompt that differs from the cached one from the middle of its run on."""
        return {"array": self._hit(num_tokens, array("I", half_prompt(num_tokens)), num_tokens // 2)}

    def append(self, num_sequences: int) -> Cases:
        """`append_slots`, a call for each token."""
        manager, tokens = self._full, decoded_tokens()

        def prepare() -> list[Sequence]:
            size = SHARED_TOKENS + OWN_TOKENS
            return [start(manager, self._fresh.make(size)) for _ in range(num_sequences)]

        def run(sequences: list[Sequence]) -> list[Sequence]:
            decode_one_by_one(manager, sequences, tokens)
            return sequences

        return {"append_slots": Case(run, num_sequences * len(tokens), prepare, free_all(manager))}

    def step(self, num_sequences: int) -> Cases:
        """`append_step`, or `append_slots` for each sequence."""
        manager, steps = self._full, step_tokens()

        def prepare() -> list[Sequence]:
            return [start(manager, token_ids) for token_ids in self._fresh.running()]

        def together(sequences: list[Sequence]) -> list[Sequence]:
            for token_ids in steps:
                manager.append_step(sequences, token_ids)
            return sequences

        def singly(sequences: list[Sequence]) -> list[Sequence]:
            append = manager.append_slots
            for token_ids in steps:
                for sequence, token_id in zip(sequences, token_ids, strict=True):
                    append(sequence, [token_id])
            return sequences

        cases = {"append_step": together, "append_slots": singly}
        return {way: Case(run, num_sequences * STEPS, prepare, free_all(manager)) for way, run in cases.items()}

    def lifecycle(self, num_sequences: int) -> Cases:
        """Prompts given as lists; decoding by `append_step`, or by `append_slots` for each token."""
        manager, tokens = self._full, decoded_tokens()
        manager.free(start(manager, shared_prefix()))

        def case(decode: Decode) -> Case:
            def run(prompts: list[list[int]]) -> None:
                for first in range(0, len(prompts), num_sequences):
                    sequences = [start(manager, token_ids) for token_ids in prompts[first : first + num_sequences]]
                    decode(manager, sequences, tokens)
                    for sequence in sequences:
                        manager.free(sequence)

            return Case(run, NUM_REQUESTS, prepare=self._fresh.requests)

        singly = {"append_slots": case(decode_one_by_one)}
        return singly if num_sequences == 1 else {"append_step": case(decode_together), **singly}

    def hold_empty_pool(self) -> KVCacheManager:
        """Return a new manager."""
        return KVCacheManager(POOL_BLOCKS, BLOCK_SIZE)

    def fill(self, pool: object) -> None:
        """Cache fillers, a sequence each."""
        assert isinstance(pool, KVCacheManager)
        fill_manager(pool)
