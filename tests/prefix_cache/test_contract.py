"""What any `PrefixCacheProtocol` has to do. To check one of your own, add what makes it to CACHES."""

from collections.abc import Callable
from random import Random

import pytest

from kvblocks import InvalidArgumentError, PrefixCache, PrefixCacheProtocol

Make = Callable[[int, int], PrefixCacheProtocol]

CACHES: dict[str, Make] = {
    "PrefixCache": lambda max_blocks, block_size: PrefixCache(max_blocks, block_size, pin_budget=1.0),
    "PrefixCache, slru": lambda max_blocks, block_size: PrefixCache(
        max_blocks, block_size, pin_budget=1.0, eviction="slru"
    ),
}

ABC = [1, 2, 3, 4, 5, 6]


@pytest.fixture(params=CACHES.values(), ids=CACHES.keys())
def make(request) -> Make:
    return request.param


def test_it_has_the_calls(make):
    cache = make(4, 2)
    assert isinstance(cache, PrefixCacheProtocol)
    assert (cache.max_blocks, cache.block_size) == (4, 2)
    assert not isinstance({}, PrefixCacheProtocol)


def test_what_was_inserted_is_found_up_to_the_first_difference(make):
    cache = make(8, 2)
    done = cache.insert_prefix([*ABC, 7], [10, 11, 12])
    assert (done.num_cached_blocks, done.unused_kv_blocks, done.evicted_kv_blocks) == (3, [], [])
    for tokens, found in (([*ABC, 7], 3), (ABC[:5], 2), ([1, 2, 9, 4], 1), ([9, *ABC[1:]], 0), ([1], 0), ([], 0)):
        assert cache.query_match_len(tokens) == 2 * found
        match = cache.match_prefix(tokens)
        assert (match.match_length, match.matched_kv_blocks) == (2 * found, [10, 11, 12][:found])
        assert match.remaining_tokens == tokens[2 * found :]
    assert (cache.stats.num_queries, cache.stats.num_hits, cache.stats.num_hit_tokens) == (6, 3, 12)


def test_a_prefix_that_is_cached_keeps_its_blocks(make):
    cache = make(8, 2)
    cache.insert_prefix(ABC, [10, 11, 12])
    done = cache.insert_prefix([*ABC[:4], 9, 9], [20, 21, 22])
    assert (done.num_cached_blocks, done.unused_kv_blocks) == (3, [20, 21])
    assert cache.match_prefix([*ABC[:4], 9, 9]).matched_kv_blocks == [10, 11, 22]
    assert cache.cached_block_count() == cache.evictable_count() == 4


def test_beginnings_outlive_ends(make):
    cache = make(8, 2)
    cache.insert_prefix(ABC, [10, 11, 12])
    assert cache.evict(1) == [12]
    assert cache.query_match_len(ABC) == 4
    assert cache.evict(9) == [11, 10]
    assert cache.evict(1) == []


def test_a_full_cache_gives_ids_back(make):
    cache = make(3, 2)
    cache.insert_prefix(ABC, [10, 11, 12])
    done = cache.insert_prefix([7, 7, 8, 8], [20, 21])
    assert (done.num_cached_blocks, done.evicted_kv_blocks) == (2, [12, 11])
    done = cache.insert_prefix([5] * 8, [30, 31, 32, 33])
    assert (done.num_cached_blocks, done.unused_kv_blocks, sorted(done.evicted_kv_blocks)) == (3, [33], [10, 20, 21])


def test_what_is_held_or_pinned_stays(make):
    cache = make(4, 2)
    cache.insert_prefix(ABC, [10, 11, 12])
    assert cache.pin_prefix(ABC[:2]) == 2
    with cache.match_prefix(ABC[:4]):
        assert cache.evictable_count() == 1
        assert cache.evict(4) == [12]
    assert cache.evict(4) == [11]
    assert cache.unpin_prefix(ABC[:2]) == 2
    assert cache.unpin_prefix(ABC[:2]) == 0
    assert cache.evict(4) == [10]


def test_clearing_returns_every_id(make):
    cache = make(4, 2)
    cache.insert_prefix(ABC, [10, 11, 12])
    cache.pin_prefix(ABC)
    assert sorted(cache.clear()) == [10, 11, 12]
    assert cache.query_match_len(ABC) == cache.cached_block_count() == 0


def test_bad_input_changes_nothing(make):
    cache = make(4, 2)
    cache.insert_prefix(ABC, [10, 11, 12])
    for tokens, ids in (([7] * 4, [20]), ([7] * 4, [20, 20]), ([7] * 4, [-1, 20])):
        with pytest.raises(InvalidArgumentError):
            cache.insert_prefix(tokens, ids)
    assert (cache.query_match_len(ABC), cache.query_match_len([7] * 4), cache.cached_block_count()) == (6, 0, 3)


def test_an_engine_that_trusts_it_never_reads_the_wrong_kv(make):
    """Random prompts of few tokens; `memory` has what was written to each block: its whole prefix."""
    random, cache = Random(45), make(6, 2)
    free, memory = list(range(100, 112)), dict[int, tuple[int, ...]]()
    for _ in range(400):
        tokens = [random.randrange(2) for _ in range(random.randrange(13))]
        with cache.match_prefix(tokens) as match:
            found = match.matched_kv_blocks
            assert [memory[block] for block in found] == [tuple(tokens[: 2 * n]) for n in range(1, len(found) + 1)]
            new = [free.pop() for _ in range(len(tokens) // 2 - len(found))]
            ids = found + new
            memory |= {block: tuple(tokens[: 2 * n]) for n, block in enumerate(ids, 1)}
            done = cache.insert_prefix(tokens, ids)
            free += [*done.unused_kv_blocks, *done.evicted_kv_blocks]
        assert len(set(free)) == len(free) == 12 - cache.cached_block_count()
    assert cache.stats.num_hits > 100
