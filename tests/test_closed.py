"""Which public classes can be subclassed, copied and pickled: the same in both builds."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import pytest

import kvblocks
from kvblocks import ChunkedLocal, FullAttention, Group, KVCacheManager, PrefixCache, Sequence, SlidingWindow, Tier
from kvblocks.closed import Closed
from kvblocks.hashing.vllm import VllmHashScheme
from kvblocks.retention.policies import NAMED

KINDS = Group.__subclasses__()
RECORDS = [
    value
    for value in [getattr(kvblocks, name) for name in kvblocks.__all__]
    if isinstance(value, type)
    and (issubclass(value, (tuple, Exception)) or (is_dataclass(value) and not issubclass(value, Group)))
]
OPEN = {*RECORDS, Group, kvblocks.CacheView, kvblocks.EvictionPolicy, kvblocks.PrefixCacheProtocol}
CLOSED = sorted(
    {
        *[value for name in kvblocks.__all__ if isinstance(value := getattr(kvblocks, name), type)],
        *[policy for policy in NAMED.values() if isinstance(policy, type)],
        VllmHashScheme,
    }
    - OPEN,
    key=lambda each: each.__name__,
)


def name_of(value: type) -> str:
    return value.__name__


@pytest.mark.parametrize("closed", CLOSED, ids=name_of)
def test_a_class_that_owns_blocks_says_that_it_has_no_subclasses(closed: type) -> None:
    instead = "derive a kind of your own from Group" if issubclass(closed, Group) else "wrap one in a class of your own"
    with pytest.raises(TypeError, match=f"^Mine: {closed.__name__} can't be subclassed; {instead}"):
        type("Mine", (closed,), {})
    with pytest.raises(TypeError, match=f"^Mine: {closed.__name__} can't be subclassed"):
        type("Mine", (object, closed)[::-1], {"__slots__": ()})


@pytest.mark.parametrize("record", sorted(RECORDS, key=name_of), ids=name_of)
def test_records_can_be_subclassed(record: type) -> None:
    assert issubclass(type("Mine", (record,), {}), record)


def test_kinds_of_one_s_own_can_be_made_and_subclassed() -> None:
    @dataclass(frozen=True)
    class Mine(Group):
        label = event_kind = "mine"

        def first_seen(self, position: int) -> int:
            return position

        def num_blocks(self, num_tokens: Any, num_step_tokens: Any = 1) -> int:
            return 0 * num_tokens * num_step_tokens

    class Narrower(Mine):
        pass

    assert Narrower(4).first_seen(7) == 7
    assert {FullAttention, SlidingWindow, ChunkedLocal} < set(KINDS)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_that_owns_or_refers_to_blocks_is_copied(duplicate: Callable[[Any], Any]) -> None:
    """A copy would give out the same blocks, or free them a second time."""
    manager = KVCacheManager(64, 4, tiers=[Tier("cpu", 16, 100)])
    sequence = Sequence("s", range(12))
    manager.allocate_slots(sequence)
    hit = manager.get_computed_blocks(Sequence("t", range(9)))
    hold = manager.holds.read(sequence)
    pin = manager.pins.pin(range(4))
    cache = PrefixCache(8, 4)
    match = cache.insert_prefix(range(8), [0, 1]).match
    owners = [manager, cache, sequence, hit, hold, pin, match, sequence.blocks[0]]
    rooms = [manager.pins, manager.holds, manager.quotas, manager.sessions, manager.states, manager.tiers]
    for each in [*owners, *rooms, manager.inspect, cache.inspect]:
        assert isinstance(each, Closed)
        with pytest.raises(TypeError, match="can't be copied or pickled; make a new one"):
            duplicate(each)
    manager.holds.release(hold)
    manager.free(sequence)
    manager.check()
    cache.check()


def test_descriptions_can_be_copied() -> None:
    for each in (Tier("cpu", 16, 100), FullAttention(16), SlidingWindow(16, 64)):
        assert repr(copy.deepcopy(each)) == repr(pickle.loads(pickle.dumps(each))) == repr(each)


def test_a_manager_and_a_cache_say_what_they_hold() -> None:
    manager, cache = KVCacheManager(64, 16), PrefixCache(8, 4)
    manager.allocate_slots(Sequence("s", range(40)))
    cache.insert_prefix(range(9), [3, 5, 7])
    assert repr(manager) == "KVCacheManager(64 blocks of 16 tokens, 61 free, 2 cached, 1 sequence)"
    assert repr(cache) == "PrefixCache(at most 8 blocks of 4 tokens, 2 cached)"
