"""Cached and evicted blocks by salt, counted beside a cache with branches, several groups of layers, and a reset."""

import random
from collections import Counter

import pytest

from kvblocks import FullAttention, InvalidArgumentError, KVCacheManager, Sequence, SlidingWindow


def run(manager, name, tokens, salt):
    sequence = Sequence(name, tokens, salt=salt)
    assert manager.allocate_slots(sequence) is not None
    manager.free(sequence)


def test_blocks_are_counted_by_the_salt_of_their_prefix():
    manager = KVCacheManager(32, 4)
    assert manager.inspect.count_by_salt() == {}
    run(manager, "a", range(12), None)
    run(manager, "b", range(12), "one")
    run(manager, "c", [*range(8), *range(50, 58)], "one")  # a branch of the same salt
    assert manager.inspect.count_by_salt() == {None: 3, "one": 5}
    manager.reset_prefix_cache()
    assert manager.inspect.count_by_salt() == {}


def test_evictions_are_counted_by_group_and_add_up():
    generator = random.Random(5)
    manager = KVCacheManager(24, 4)
    watched = manager.inspect.watch_evictions(lambda salt: "none" if salt is None else salt[0])
    held = Counter()
    for number in range(400):
        salt = generator.choice([None, "a1", "a2", "b"])
        start = generator.choice([0, 0, 100, 200])
        run(manager, number, range(start, start + generator.randrange(4, 40)), salt)
        held = manager.inspect.count_by_salt()
        assert sum(held.values()) == manager.stats.num_cached_blocks
    assert sum(watched.num_evicted.values()) == manager.stats.num_evicted_blocks > 100
    assert set(watched.num_evicted) == {"none", "a", "b"}
    assert set(held) <= {None, "a1", "a2", "b"}


def test_several_groups_are_counted_by_the_primary_one():
    manager = KVCacheManager(64, groups=[FullAttention(4), SlidingWindow(4, 8)])
    watched = manager.inspect.watch_evictions(str)
    for number in range(30):
        run(manager, number, range(number * 100, number * 100 + 40), "x" if number % 2 else None)
    counted = manager.inspect.count_by_salt()
    assert set(counted) <= {None, "x"}
    assert counted["x"] > 0
    assert watched.num_evicted["x"] > 0


@pytest.mark.parametrize("group_of", [None, 5, "name"])
def test_what_is_no_function_is_refused(group_of):
    with pytest.raises(InvalidArgumentError, match="group_of: expected a function"):
        KVCacheManager(4, 4).inspect.watch_evictions(group_of)
