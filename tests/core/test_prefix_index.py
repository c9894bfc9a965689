"""The index on its own: runs against plain block-by-block lookup, and what eviction does to runs."""

from array import array
from random import Random

import pytest
from model.bytecodes import count_bytecodes, uncompiled

from kvblocks import KVCacheBlock, KVCacheManager, Sequence
from kvblocks.core.block import ROOT
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.hashing.by_name import get_hash_scheme


def view(tokens: list[int]) -> memoryview:
    return memoryview(array("I", tokens)).cast("B")


def ids(tokens: list[int]) -> "memoryview[int]":
    return memoryview(array("I", tokens))


def make(block_size: int = 2) -> PrefixIndex:
    return PrefixIndex(block_size, get_hash_scheme("xxh3_128"))


def blocks_from(first: int, num_blocks: int) -> list[KVCacheBlock]:
    return [KVCacheBlock(first + i) for i in range(num_blocks)]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 64, 1000])
def test_a_prompt_that_parts_anywhere_from_a_run_hits_just_the_blocks_before(num_blocks: int) -> None:
    index = make()
    tokens = list(range(2 * num_blocks))
    blocks = blocks_from(0, num_blocks)
    index.cache(ROOT, blocks, view(tokens), None, 0)
    assert len(index.runs()) == 1
    for position in {0, 1, 2, 3, num_blocks, 2 * num_blocks - 2, 2 * num_blocks - 1} & set(range(2 * num_blocks)):
        other = [*tokens[:position], 2**32 - 1, *tokens[position + 1 :]]
        assert index.match(ids(other), None, num_blocks) == blocks[: position // 2]
    assert index.match(ids(tokens), None, num_blocks) == blocks
    assert index.match(ids(tokens), None, num_blocks - 1) == blocks[:-1]
    assert index.match(ids([*tokens, 1, 1]), None, num_blocks + 1) == blocks
    index.check()


def test_a_run_that_lost_its_end_is_never_extended() -> None:
    index = make()
    tokens = [0, 0, 1, 1, 2, 2]
    old = blocks_from(0, 3)
    index.cache(ROOT, old, view(tokens), None, 0)
    node = old[1].node
    index.evict(old[2:])
    other = [0, 0, 1, 1, 3, 3]
    new = blocks_from(3, 1)
    index.cache(node, new, view(other), None, 2)
    assert len(index.runs()) == 2
    assert index.match(ids(other), None, 3) == [*old[:2], *new]
    assert index.match(ids(tokens), None, 3) == old[:2]
    index.check()


def test_eviction_gives_the_memory_of_a_long_run_back() -> None:
    index = make()
    blocks = blocks_from(0, 1000)
    index.cache(ROOT, blocks, view(list(range(2000))), {0: b"salt", 900: b"image"}, 0)
    assert blocks[999].block_hash is not None
    run = blocks[0].run
    assert run is not None
    assert index.evict(blocks[:1:-1]) == 998
    assert (len(run.tokens), len(run.digests), run.extra_keys) == (2 * 8, 2 * 16, {0: b"salt"})
    assert blocks[1].block_hash is not None
    assert index.evict(blocks[1::-1]) == 2
    assert len(index.runs()) == index.num_cached_blocks == 0
    index.check()


def test_evicting_a_block_takes_along_what_hangs_from_it() -> None:
    """The manager frees blocks in another order, but the index must be exact in any order."""
    index = make()
    trunk, branch, twig = blocks_from(0, 3), blocks_from(10, 2), blocks_from(20, 1)
    index.cache(ROOT, trunk, view([0, 0, 1, 1, 2, 2]), None, 0)
    index.cache(trunk[0].node, branch, view([0, 0, 5, 5, 6, 6]), None, 1)
    index.cache(branch[0].node, twig, view([0, 0, 5, 5, 7, 7]), None, 2)
    assert len(index.runs()) == 3
    index.check()
    assert index.evict([branch[0]]) == 3
    assert [block.is_cached for block in (*trunk, *branch, *twig)] == [True] * 3 + [False] * 3
    index.check()
    assert index.evict([trunk[0]]) == 3
    assert len(index.runs()) == 0
    index.check()


@pytest.mark.parametrize("way", ["evict", "evict one", "forget"])
def test_the_end_of_a_run_goes_with_what_is_attached_to_it(way: str) -> None:
    index = make()
    trunk, branch = blocks_from(0, 3), blocks_from(10, 2)
    index.cache(ROOT, trunk, view([0, 0, 1, 1, 2, 2]), None, 0)
    index.evict([trunk[2]])  # closes the run, so that what comes next is attached to its end
    index.cache(trunk[1].node, branch, view([0, 0, 1, 1, 5, 5, 6, 6]), None, 2)
    assert len(index.runs()) == 2
    if way == "evict":
        assert index.evict([trunk[1], trunk[0]]) == 4
    elif way == "evict one":
        assert index.evict([trunk[1]]) == 3
    else:
        index.forget(trunk[1])
    assert not any(block.is_cached for block in branch)
    assert trunk[0].is_cached == (way != "evict")
    index.check()


def test_runs_find_what_a_dict_of_prefixes_finds() -> None:
    """On generated histories with evictions from runs that are then extended, duplicates, aborts and resets."""
    random = Random(5)
    manager = KVCacheManager(60, 2)
    holders: dict[int, tuple[int, ...]] = {}  # block id -> the tokens of the prefix that it holds
    running: list[Sequence] = []
    num_hits = num_partial = 0
    for number in range(3000):
        prompt = [random.randrange(2) for _ in range(random.randrange(1, 30))]
        sequence = Sequence(number, prompt)
        prefixes = set(holders.values())
        expected = 0
        while tuple(prompt[: 2 * expected + 2]) in prefixes and 2 * expected + 2 <= len(prompt):
            expected += 1
        hit = manager.get_computed_blocks(sequence)
        assert len(hit.blocks) == expected
        assert all(holders[b.block_id] == tuple(prompt[: 2 * i + 2]) for i, b in enumerate(hit.blocks))
        num_hits += bool(expected)
        num_partial += 0 < expected < len(prompt) // 2
        while manager.allocate_slots(sequence, hit=hit) is None:
            manager.free(running.pop(random.randrange(len(running))))
            hit = manager.get_computed_blocks(sequence)
        running.append(sequence)
        for i, block in enumerate(sequence.blocks):
            holders.pop(block.block_id, None)
            if 2 * i + 2 <= len(prompt):
                holders[block.block_id] = tuple(prompt[: 2 * i + 2])
        action = random.random()
        if action < 0.3:
            manager.free(running.pop(random.randrange(len(running))))
        elif action < 0.31:
            manager.reset_prefix_cache()
            holders.clear()
            while running:
                manager.free(running.pop())
    assert num_hits > 1000
    assert num_partial > 500


@pytest.mark.parametrize("num_prompt_tokens", [17, 16])
def test_a_run_that_lost_its_end_to_another_sequence_is_not_extended(num_prompt_tokens: int) -> None:
    """In both cases: a prompt's token takes the block, or a decoded one."""
    manager = KVCacheManager(5, 4)
    first = Sequence("first", range(20))
    manager.allocate_slots(first)
    manager.free(first)
    second = Sequence("second", range(num_prompt_tokens))
    manager.allocate_slots(second, hit=manager.get_computed_blocks(second))
    decoded = [90, 91, 92, 93][: 20 - num_prompt_tokens]
    for token in decoded:
        assert manager.append_slots(second, [token]) is not None
    for tokens, num_hit in ((range(21), 16), ([*range(num_prompt_tokens), *decoded, 0], 20)):
        assert manager.get_computed_blocks(Sequence("probe", tokens)).num_tokens == num_hit
    manager.check()


@uncompiled
@pytest.mark.parametrize("shape", ["children", "duplicates", "one position's duplicates"])
def test_eviction_costs_the_same_whatever_else_hangs_from_the_run(shape: str) -> None:
    manager = KVCacheManager(4000, 4)
    first = Sequence("first", range(1024))
    manager.allocate_slots(first)
    for other in range(1 if shape == "duplicates" else 1000):
        if shape == "children":  # other requests that share the first 16 blocks, a system prompt for example
            sequence = Sequence(other, [*range(64), 5000 + other, 0, 0, 0])
            manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        elif shape == "duplicates":  # a request that computed the same blocks once more
            manager.allocate_slots(Sequence(other, range(1024)))
        else:
            manager.allocate_slots(Sequence(other, range(4)))
    manager.free(first)
    fresh = manager.num_free_blocks - 240
    manager.allocate_slots(Sequence("takes the fresh blocks", [9] * (4 * fresh)))
    last = Sequence("takes the first one's", [8] * (4 * 200))
    taken_before = manager.stats.num_evicted_blocks
    cost = count_bytecodes(lambda: manager.allocate_slots(last))
    assert manager.stats.num_evicted_blocks - taken_before >= 184
    assert cost / 200 < 200  # bytecodes a block, all of allocating included
    manager.check()
