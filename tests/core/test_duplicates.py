"""Of equal cached blocks at most one is free: what becomes of a duplicate when nobody owns it any more."""

import random

import pytest
from model.bytecodes import count_bytecodes, uncompiled

from kvblocks import FullAttention, KVCacheManager, Sequence, SlidingWindow
from kvblocks.errors import StaleHitError


def start(manager: KVCacheManager, name: object, tokens: object, **options: object) -> Sequence:
    """Start a sequence without a hit, as one that was looked up before another one cached the same."""
    sequence = Sequence(name, tokens, **options)  # type: ignore[arg-type]
    assert manager.allocate_slots(sequence) is not None
    return sequence


def num_hit(manager: KVCacheManager, tokens: object) -> int:
    return manager.get_computed_blocks(Sequence("probe", tokens)).num_readonly_tokens  # type: ignore[arg-type]


def test_equal_requests_leave_one_copy_and_cost_no_other_prompt_its_prefix() -> None:
    manager = KVCacheManager(36, 4, debug=True)
    manager.free(start(manager, "other", range(100, 116)))
    equal = [start(manager, number, range(16)) for number in range(8)]
    for sequence in equal:
        manager.free(sequence)
    assert manager.stats.num_cached_blocks == 8
    manager.free(start(manager, "third", range(200, 312)))  # takes the 28 copies that nobody needs
    assert (num_hit(manager, range(100, 116)), num_hit(manager, range(16))) == (16, 16)
    assert manager.stats.num_evicted_blocks == 0


@pytest.mark.parametrize("is_first_freed_first", [True, False])
def test_a_prefix_is_as_new_as_its_last_release(is_first_freed_first: bool) -> None:
    manager = KVCacheManager(12, 4, debug=True)
    pair = start(manager, "first", range(8)), start(manager, "copy", range(8))
    other = start(manager, "other", range(100, 108))
    one, two = pair if is_first_freed_first else pair[::-1]
    manager.free(one)
    manager.free(other)
    manager.free(two)
    copy = [2, 3]
    assert manager.inspect.free_block_ids() == [*copy, *range(6, 12), 5, 4, 1, 0]


def test_a_renewed_block_stands_where_its_copy_would() -> None:
    """The copy's sequence went on: what is behind the copies goes before them."""
    manager = KVCacheManager(8, 4, debug=True)
    first, longer = start(manager, "first", range(8)), start(manager, "longer", range(18))
    manager.free(first)
    manager.free(longer)
    assert manager.inspect.free_block_ids() == [2, 3, 6, 7, 5, 4, 1, 0]


def test_no_release_makes_a_hit_stale() -> None:
    manager = KVCacheManager(12, 4, enable_events=True, debug=True)
    first, copy = start(manager, "first", range(8)), start(manager, "copy", range(8))
    late = Sequence("late", range(9))
    hit = manager.get_computed_blocks(late)
    manager.take_events()
    manager.free(copy)
    manager.free(first)
    assert manager.take_events() == []  # the prefix is cached as before
    assert manager.allocate_slots(late, hit=hit) is not None
    assert late.block_ids[:2] == [0, 1]


def test_a_first_block_that_is_free_while_a_copy_is_owned_stays_until_it_is_evicted() -> None:
    manager = KVCacheManager(4, 4, debug=True)
    first, copy, probe = (
        start(manager, "first", range(8)),
        start(manager, "copy", range(8)),
        Sequence("probe", range(9)),
    )
    manager.free(first)
    assert [block.block_id for block in manager.get_computed_blocks(probe).blocks] == [0, 1]
    other = start(manager, "other", range(100, 108))  # evicts the first blocks
    assert [block.block_id for block in manager.get_computed_blocks(probe).blocks] == [2, 3]
    manager.free(copy)
    manager.free(other)
    assert num_hit(manager, range(8)) == num_hit(manager, range(100, 108)) == 8


def test_a_shared_copy_stays_while_somebody_has_it() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    first, copy = start(manager, "first", range(8)), start(manager, "copy", range(8))
    child = manager.fork(copy, "child")
    manager.free(copy)
    assert manager.stats.num_cached_blocks == 4
    manager.free(child)
    assert (manager.stats.num_cached_blocks, manager.inspect.free_block_ids()[:2]) == (2, [2, 3])
    manager.free(first)


def test_blocks_that_a_sequence_gives_back_early_are_copies_too() -> None:
    manager = KVCacheManager(8, 4, debug=True)
    start(manager, "first", range(8))
    copy = start(manager, "copy", range(4))
    manager.append_slots(copy, [4, 5, 6, 7])
    assert manager.stats.num_cached_blocks == 4
    manager.truncate(copy, 4)
    assert (manager.stats.num_cached_blocks, manager.inspect.free_block_ids()[0]) == (3, 3)
    manager.append_slots(copy, [4, 5, 6, 7])
    assert manager.stats.num_cached_blocks == 4


def test_a_copy_that_was_taken_out_and_cached_again_is_let_go() -> None:
    """The pool remembers owned blocks that were detached; one of them is released as a duplicate."""
    manager = KVCacheManager(8, 4, debug=True)
    first = start(manager, "first", range(8))
    copy = Sequence("copy", range(8))
    manager.allocate_slots(copy, delay_cache_blocks=True)
    manager.cache_blocks(copy, 8)
    manager.evict_blocks(copy.block_ids)
    manager.cache_blocks(copy, 8)
    assert manager.stats.num_cached_blocks == 4
    manager.free(copy)
    assert manager.stats.num_cached_blocks == 2
    manager.free(first)


def test_a_quota_is_not_charged_for_copies() -> None:
    manager = KVCacheManager(16, 4, debug=True)
    manager.quotas.set("ann", 3)
    copies = [start(manager, number, range(8), salt="ann") for number in range(3)]
    assert [usage.num_cached_blocks for usage in manager.quotas] == [6]
    for sequence in copies:
        manager.free(sequence)
    assert [usage.num_cached_blocks for usage in manager.quotas] == [2]
    manager.free(start(manager, "bob", range(100, 156)))
    assert manager.stats.num_evicted_blocks == 0  # ann is within her quota


def test_policies_are_told_that_the_first_block_was_used() -> None:
    told = []

    class Told:
        def __init__(self, cache: object) -> None:
            """cache: not used."""

        def free(self, blocks: list) -> None:
            told.append(("free", [(block.block_id, block.session) for block in blocks]))

        def use(self, block_ids: list[int]) -> None:
            told.append(("use", block_ids))

        def remove(self, block_ids: list[int]) -> None:
            told.append(("remove", block_ids))

        def victim(self, num_blocks: int) -> None:
            """Name no block. num_blocks: not used."""

    manager = KVCacheManager(8, 4, eviction=Told, debug=True)
    manager.quotas.set("ann", 8)
    first = start(manager, "first", range(8), salt="ann", session="one")
    copy = start(manager, "copy", range(12), salt="ann", session="two")
    manager.free(first)
    manager.free(copy)
    assert told == [
        ("free", [(1, "one"), (0, "one")]),
        ("use", [0, 1]),
        ("free", [(4, "two"), (1, "two"), (0, "two")]),
    ]


@pytest.mark.parametrize("has_primary", [True, False])
def test_what_is_attached_stays_when_a_copy_goes(has_primary: bool) -> None:
    """Attached blocks belong to the node. Without a primary group the copies are virtual blocks."""
    groups = [FullAttention(4), SlidingWindow(4, 8)] if has_primary else [SlidingWindow(4, 8)]
    manager = KVCacheManager(24, groups=groups, debug=True)
    first, copy = start(manager, "first", range(12)), start(manager, "copy", range(12))
    manager.free(copy)
    assert num_hit(manager, range(13)) == 12
    manager.free(first)
    assert num_hit(manager, range(13)) == 12
    other = start(manager, "other", range(100, 112))
    manager.free(other)
    assert num_hit(manager, range(13)) == num_hit(manager, range(100, 113)) == 12


@uncompiled
def test_releasing_costs_the_same_however_many_copies_there_are() -> None:
    def cost(num_copies: int) -> int:
        manager = KVCacheManager(64 * (num_copies + 1), 4)
        copies = [start(manager, number, range(256)) for number in range(num_copies + 1)]
        return count_bytecodes(lambda: manager.free(copies[-1]))

    assert cost(64) < 1.1 * cost(1)


@uncompiled
def test_releasing_costs_nothing_more_without_duplicates() -> None:
    """One test of a number for a table, however long it is."""

    def cost(num_blocks: int) -> int:
        manager = KVCacheManager(num_blocks, 4)
        sequence = start(manager, "only", range(4 * num_blocks))
        pool = manager._pool  # noqa: SLF001
        blocks = list(sequence.blocks)
        whole = count_bytecodes(lambda: pool.release_table(blocks, num_blocks))
        pool.touch(blocks)
        return whole - count_bytecodes(lambda: pool.queue.release(blocks[::-1]))

    assert cost(64) == cost(1)


def hits_without_and_with_all_copies(seed: int) -> tuple[list[int], list[int]]:
    """Serve the same random prompts, in the same order, with and without all copies kept. Returns what each prompt hit.

    Prompts come up to three at a time, are looked up before any of them is allocated, and grow. None is ever refused.
    """
    draw = random.Random(seed)
    num_blocks = draw.choice([16, 24, 40, 64])
    managers = KVCacheManager(num_blocks, 2), KVCacheManager(num_blocks, 2)
    managers[1]._pool.index.drop_duplicate = lambda _: None  # type: ignore[method-assign]  # noqa: SLF001
    hits: tuple[list[int], list[int]] = [], []
    running: list[tuple[list[Sequence], int]] = []
    num_reserved = 0
    for number in range(400):
        if not running or draw.random() < 0.5:
            start_tokens, pairs = draw.choices([0, 1], k=draw.randint(1, 12)), []
            for copy in range(draw.randint(1, 3)):
                tokens = start_tokens + draw.choices([0, 1], k=draw.randint(1, 3))
                most = (len(tokens) + 8) // 2 + 1
                if num_reserved + most <= num_blocks:
                    num_reserved += most
                    pair = [Sequence((number, copy), tokens) for _ in managers]
                    found = [manager.get_computed_blocks(one) for manager, one in zip(managers, pair, strict=True)]
                    pairs.append((pair, found, most))
            for pair, found, most in pairs:
                for manager, one, hit, seen in zip(managers, pair, found, hits, strict=True):
                    seen.append(hit.num_readonly_tokens)
                    try:
                        assert manager.allocate_slots(one, hit=hit) is not None
                    except StaleHitError:
                        assert manager.allocate_slots(one, hit=manager.get_computed_blocks(one)) is not None
                running.append((pair, most))
        else:
            pair, most = draw.choice(running)
            if draw.random() < 0.5 and pair[0].num_tokens < 2 * most - 2:
                token = draw.randint(0, 1)
                for manager, one in zip(managers, pair, strict=True):
                    assert manager.append_slots(one, [token]) is not None
            else:
                running.remove((pair, most))
                num_reserved -= most
                for manager, one in zip(managers, pair, strict=True):
                    manager.free(one)
    return hits


@uncompiled
def test_no_prompt_hits_less_than_if_all_copies_were_kept() -> None:
    """The order is that of LRU over prefixes, with more room for them: LRU's inclusion property."""
    num_more = 0
    for seed in range(30):
        ours, theirs = hits_without_and_with_all_copies(seed)
        assert all(one >= other for one, other in zip(ours, theirs, strict=True)), f"seed {seed}"
        num_more += sum(one > other for one, other in zip(ours, theirs, strict=True))
    assert num_more > 30
