"""`Eviction`: what policies are asked, which blocks are evicted for a victim, and what a policy can't do."""

from typing import Any

import pytest

from kvblocks import (
    CorruptStateError,
    FreeBlock,
    FullAttention,
    InvalidArgumentError,
    KVBlocksError,
    KVCacheManager,
    PrefixCache,
    Sequence,
    SlidingWindow,
)
from kvblocks.retention.policies import NAMED


class Told:
    """Names the blocks in `names`, in turn, and records what it is told. `made` has all instances."""

    made: list["Told"]

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.heard: list[Any] = []
        self.known: dict[int, FreeBlock] = {}
        self.names: list[Any] = []
        self.made.append(self)

    def free(self, blocks: list[FreeBlock]) -> None:
        self.heard.append(("free", [block.block_id for block in blocks]))
        self.known |= {block.block_id: block for block in blocks}

    def use(self, block_ids: list[int]) -> None:
        self.heard.append(("use", block_ids))
        for block_id in block_ids:
            del self.known[block_id]

    def remove(self, block_ids: list[int]) -> None:
        self.heard.append(("remove", block_ids))
        for block_id in block_ids:
            del self.known[block_id]

    def victim(self, num_blocks: int) -> Any:
        self.heard.append(("victim", num_blocks))
        name = self.names.pop(0) if self.names else None
        if isinstance(name, BaseException):
            raise name
        return name


@pytest.fixture
def told() -> type[Told]:
    return type("Fresh", (Told,), {"made": []})


def start(manager: KVCacheManager, name: Any, tokens: Any, **options: Any) -> Sequence:
    sequence = Sequence(name, tokens, **options)
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, hit=hit) is not None
    return sequence


def cached(manager: KVCacheManager, name: Any, tokens: Any, **options: Any) -> list[int]:
    """Cache a prefix that nobody owns; return its blocks."""
    sequence = start(manager, name, tokens, **options)
    block_ids = list(sequence.block_ids)
    manager.free(sequence)
    return block_ids


def num_hit(manager: KVCacheManager, tokens: Any, **options: Any) -> int:
    return manager.get_computed_blocks(Sequence("probe", tokens, **options)).num_tokens


def test_a_policy_hears_of_free_cached_blocks_alone(told: type[Told]) -> None:
    manager = KVCacheManager(8, 2, eviction=told)
    (policy,) = told.made
    assert (policy.cache.num_blocks, policy.cache.now) == (8, 0)
    first = start(manager, "first", [1, 2, 3, 4, 5], salt="tenant")
    assert policy.heard == []
    manager.free(first)
    assert policy.heard == [("free", [1, 0])]  # its third block holds nothing
    assert policy.known[1] == FreeBlock(1, 1, "tenant", None, 0)
    assert policy.known[0] == FreeBlock(0, 0, "tenant", None, 0)
    again = start(manager, "again", [1, 2, 3, 4, 5], salt="tenant")
    assert policy.heard[1:] == [("use", [0, 1])]
    manager.free(again)
    assert [policy.known[block].num_hits for block in (0, 1)] == [1, 1]
    assert policy.cache.digest(0) == manager.blocks[0].block_hash is not None
    assert policy.cache.digest(2) is policy.cache.digest(99) is policy.cache.digest("0") is None
    manager.evict_blocks([1])
    assert policy.heard[-1] == ("remove", [1])
    manager.now = 7.5
    assert policy.cache.now == manager.now == 7.5
    assert manager.pins.expire(2**70) == []
    assert policy.cache.now == manager.now == 2**70
    manager.reset_prefix_cache()
    assert policy.heard[-1] == ("remove", [0])
    assert policy.known == {}
    manager.check()


def test_empty_blocks_go_before_anybody_is_asked(told: type[Told]) -> None:
    manager = KVCacheManager(6, 2, eviction=told)
    kept = cached(manager, "kept", [1, 2, 3, 4])
    told.made[0].names = [kept[0]]
    other = start(manager, "other", range(10, 18))
    assert len(other.block_ids) == 4
    assert ("victim", 1) not in told.made[0].heard
    assert num_hit(manager, [1, 2, 3, 4, 5]) == 4
    assert manager.append_slots(other, [9]) is not None
    assert [entry for entry in told.made[0].heard if entry[0] == "victim"] == [("victim", 1)]


def test_what_is_below_a_victim_goes_first_from_its_end(told: type[Told]) -> None:
    """A system prompt of two blocks, a conversation used long ago, and one used just now."""
    manager = KVCacheManager(8, 1, eviction=told)
    old = cached(manager, "old", [1, 2, 3, 4])
    new = cached(manager, "new", [1, 2, 5, 6])
    other = cached(manager, "other", [7, 8])
    policy = told.made[0]
    assert old[:2] == new[:2]
    policy.names = [old[0]]
    first = start(manager, "first", [20, 21, 22])
    assert first.block_ids == [old[3], old[2], new[3]]
    assert policy.heard[-2:] == [("victim", 3), ("remove", [old[3], old[2], new[3]])]
    policy.names = [old[1], other[0]]
    second = start(manager, "second", [30, 31, 32])
    assert second.block_ids == [new[2], old[1], other[1]]
    assert [entry for entry in policy.heard if entry[0] == "victim"][1:] == [("victim", 3), ("victim", 1)]
    assert num_hit(manager, [1, 2, 5, 6]) == 1
    assert num_hit(manager, [7, 8]) == 1
    assert manager.stats.num_eviction_failures == 0
    manager.check()


def test_what_an_equal_block_holds_too_has_nothing_below(told: type[Told]) -> None:
    """Two sequences computed the same blocks at once. One copy is evicted, and all below the duplicate stays."""
    manager = KVCacheManager(6, 1, eviction=told)
    one, other = Sequence("one", [1, 2]), Sequence("other", [1, 2, 3])
    assert manager.allocate_slots(one) is not None and manager.allocate_slots(other) is not None
    ones = list(one.block_ids)
    manager.free(one)
    told.made[0].names = [ones[0]]
    start(manager, "third", [8])
    assert start(manager, "fourth", [9]).block_ids == [ones[0]]
    assert num_hit(manager, [1, 2, 3, 4]) == 3
    manager.check()


def test_what_was_computed_twice_is_evicted_as_one(told: type[Told]) -> None:
    manager = KVCacheManager(6, 1, eviction=told)
    one, other = Sequence("one", [1, 2]), Sequence("other", [1, 2, 3])
    assert manager.allocate_slots(one) is not None and manager.allocate_slots(other) is not None
    (first, second), (*copies, last) = list(one.block_ids), list(other.block_ids)
    manager.free(one)
    manager.free(other)
    told.made[0].names = [first]
    assert set(start(manager, "third", [7, 8, 9]).block_ids) == {5, *copies}
    assert start(manager, "fourth", [20, 21]).block_ids == [last, second]
    manager.check()


def test_a_victim_of_which_a_part_is_in_use_gives_what_is_free(told: type[Told]) -> None:
    manager = KVCacheManager(5, 1, eviction=told)
    blocks = cached(manager, "old", [1, 2, 3, 4, 5])
    running = start(manager, "running", [1, 2, 3])
    assert running.block_ids[:2] == blocks[:2]
    manager.check()
    for name in (blocks[0], blocks[1]):
        told.made[0].names = [name]
        taken = manager.append_slots(running, [30 + name])
        assert taken is not None
    assert manager.stats.num_eviction_failures == 2  # both have an owner
    manager.check()


@pytest.mark.parametrize("name", ["x", -1, 99, 10**40, 0.5, [], ValueError(), RecursionError(), MemoryError(), 1])
def test_advice_of_no_use_is_counted_and_the_oldest_block_goes(told: type[Told], name: Any) -> None:
    manager = KVCacheManager(5, 1, eviction=told)
    oldest = cached(manager, "oldest", [8])
    start(manager, "running", [1, 2, 3])
    cached(manager, "newest", [7])
    told.made[0].names = [name]  # 1 has an owner
    assert start(manager, "next", [9]).block_ids == oldest
    assert manager.stats.num_eviction_failures == 1
    manager.check()


def test_no_advice_is_no_failure(told: type[Told]) -> None:
    manager = KVCacheManager(2, 1, eviction=told)
    oldest = cached(manager, "oldest", [8])
    cached(manager, "newest", [7])
    assert start(manager, "next", [9]).block_ids == oldest
    assert manager.stats.num_eviction_failures == 0


def test_a_numpy_integer_is_an_id(told: type[Told]) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy comes with the engine's dependencies")
    manager = KVCacheManager(2, 1, eviction=told)
    cached(manager, "oldest", [8])
    newest = cached(manager, "newest", [7])
    told.made[0].names = [numpy.int64(newest[0])]
    assert start(manager, "next", [9]).block_ids == newest


@pytest.mark.parametrize("eviction", ["nonsense", "", 1, object(), ["lru"], b"lru"])
def test_what_is_no_policy_is_refused(eviction: Any) -> None:
    names = "', '".join(NAMED)
    for make in (lambda: KVCacheManager(4, eviction=eviction), lambda: PrefixCache(4, eviction=eviction)):
        with pytest.raises(InvalidArgumentError, match=f"eviction: expected None, '{names}', or what"):
            make()


def test_a_factory_of_something_else_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match="eviction: expected it to make policies that have free, use, remove"
    ):
        KVCacheManager(4, eviction=lambda cache: cache)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        KVCacheManager(4, eviction=lambda cache: 1 // 0)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("now", ["1", None, float("nan"), 1j, True])
def test_a_clock_is_a_number(now: Any) -> None:
    for holder in (
        KVCacheManager(4),
        KVCacheManager(4, eviction="lru"),
        PrefixCache(4),
        PrefixCache(4, eviction="lru"),
    ):
        holder.now = 3
        with pytest.raises(InvalidArgumentError, match="now: expected a number"):
            holder.now = now
        assert holder.now == 3


# Tenants.


def test_a_tenant_over_its_quota_has_a_policy_of_its_own(told: type[Told]) -> None:
    manager = KVCacheManager(10, 1, eviction=told)
    mine = cached(manager, "mine", [1, 2, 3], salt="mine")
    theirs = cached(manager, "theirs", [1, 2, 3], salt="theirs")
    manager.quotas.set("theirs", 1)
    start(manager, "filler", range(10, 14))
    (pools,) = told.made
    pools.names = [mine[0]]
    assert start(manager, "one", [20]).block_ids == [theirs[2]]  # there was no advice: its least recently used
    pool, own = told.made
    assert own.cache.num_blocks == 1
    assert own.heard[0] == ("free", [theirs[2], theirs[1], theirs[0]])
    assert own.heard[1:] == [("victim", 1), ("remove", [theirs[2]])]
    assert [entry for entry in pool.heard if entry[0] == "victim"] == []
    own.names = [mine[0], theirs[1]]
    assert start(manager, "two", [21]).block_ids == [theirs[1]]  # another tenant's block isn't one it was told of
    assert manager.stats.num_eviction_failures == 1
    assert start(manager, "three", [22]).block_ids == [mine[2]]  # within its quota now
    assert pool.heard[-2:] == [("victim", 1), ("remove", [mine[2]])]
    manager.check()
    manager.quotas.set("theirs", 0)
    own.heard.clear()
    assert start(manager, "four", [23]).block_ids == [theirs[0]]
    assert own.heard == []  # other quotas, other policies
    assert len(told.made) == 3
    manager.check()


def test_no_more_goes_of_a_tenant_than_it_has_too_much(told: type[Told]) -> None:
    manager = KVCacheManager(6, 1, eviction=told)
    mine = cached(manager, "mine", [1, 2, 3], salt="mine")
    theirs = cached(manager, "theirs", [1, 2, 3], salt="theirs")
    manager.quotas.set("theirs", 1)
    assert start(manager, "three", [20, 21, 22]).block_ids == [theirs[2], theirs[1], mine[2]]
    assert told.made[1].heard[1] == ("victim", 2)


def test_a_tenants_policy_that_cannot_be_made_is_counted(told: type[Told]) -> None:
    def make(cache: Any) -> Told:
        if told.made:
            raise OSError
        return told(cache)

    manager = KVCacheManager(4, 1, eviction=make)
    cached(manager, "other", [9])
    theirs = cached(manager, "theirs", [1, 2, 3], salt="theirs")
    manager.quotas.set("theirs", 0)
    assert start(manager, "next", [20, 21]).block_ids == [theirs[2], theirs[1]]
    assert manager.stats.num_eviction_failures == 1
    manager.check()


# What a policy can't do.


class Caller(Told):
    """Calls the manager that asks it."""

    manager: Any = None
    answers: list[Any]

    def call(self) -> None:
        if self.manager is not None:
            probe = Sequence("probe", [1, 2, 3])
            for call in (
                self.manager.inspect.free_block_ids,
                self.manager.reset_prefix_cache,
                lambda: self.manager.allocate_slots(probe),
                lambda: self.manager.get_computed_blocks(probe),
                lambda: setattr(self.manager, "now", 4),
            ):
                try:
                    self.answers.append(call())
                except KVBlocksError as error:
                    self.answers.append(type(error))

    def free(self, blocks: list[FreeBlock]) -> None:
        super().free(blocks)
        self.call()

    def use(self, block_ids: list[int]) -> None:
        super().use(block_ids)
        self.call()

    def victim(self, num_blocks: int) -> Any:
        self.call()
        return None


def test_a_policy_that_calls_its_manager_is_refused() -> None:
    policy = type("Fresh", (Caller,), {"made": [], "answers": []})
    manager = KVCacheManager(4, 1, eviction=policy)
    cached(manager, "old", [1, 2, 3, 4])
    (made,) = policy.made
    made.manager = manager
    running = start(manager, "new", [1, 2, 8, 9])
    manager.free(running)
    assert made.answers and set(made.answers) == {CorruptStateError}
    assert manager.stats.num_eviction_failures == 0
    manager.check()


@pytest.mark.parametrize("call", ["free", "use", "remove", "victim"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_policy_is_known(call: str, error: type[BaseException]) -> None:
    """The interrupt ends the call, as anywhere else. After that the manager refuses all calls."""
    interrupted = False

    def fail() -> Any:
        raise error

    failing: Any = type("Failing", (Told,), {"made": [], call: lambda self, _: fail() if interrupted else None})
    manager = KVCacheManager(4, 1, eviction=failing)
    cached(manager, "old", [1, 2, 3, 4])
    running = start(manager, "running", [1, 2])
    interrupted = True

    def go_on() -> None:
        manager.free(running)
        start(manager, "again", [1, 2])
        start(manager, "new", [9])

    with pytest.raises(error):
        go_on()
    with pytest.raises(CorruptStateError):
        manager.check()
    with pytest.raises(CorruptStateError):
        start(manager, "another", [1])
    assert manager.stats.num_blocks == 4
    other = KVCacheManager(4, 1)
    start(other, "running", running.token_ids())
    other.check()


# With windows, and in a cache of the engine's blocks.


def test_what_left_a_window_goes_before_anybody_is_asked(told: type[Told]) -> None:
    manager = KVCacheManager(12, groups=[FullAttention(1), SlidingWindow(1, 2)], eviction=told)
    (policy,) = told.made
    running = Sequence("running", [1, 2, 3, 4])
    for _ in range(4):
        assert manager.allocate_slots(running, 1) is not None
    assert policy.heard == []
    passed = [block for block in manager.inspect.free_block_ids() if manager.blocks[block].is_cached]
    assert passed
    manager.free(running)
    assert not set(passed) & set(policy.known)
    assert set(policy.known) | set(passed) == {b.block_id for b in manager.blocks if b.is_cached}
    full = [block.block_id for block in manager.blocks if block.block_id in policy.known]
    policy.names = [full[0]] * 20
    num_empty = manager.num_free_blocks - len(passed) - len(policy.known)
    start(manager, "new", range(10, 10 + (num_empty + len(passed)) // 2))
    assert ("victim", 1) not in policy.heard
    manager.check()


def test_a_prefix_cache_asks_and_counts(told: type[Told]) -> None:
    cache = PrefixCache(6, 2, eviction=told)
    (policy,) = told.made
    cache.insert_prefix([1, 2, 3, 4], [100, 101])
    cache.insert_prefix([1, 2, 5, 6], [100, 102])
    cache.insert_prefix([7, 8], [2**63 - 1])
    assert cache.match_prefix([7, 8]).match_length == 2
    assert policy.known[2**63 - 1] == FreeBlock(2**63 - 1, 0, None, None, 1)
    assert policy.known[102] == FreeBlock(102, 1, None, None, 0)
    assert policy.cache.digest(102) is not None
    policy.names = [100]
    assert cache.evict(2) == [101, 102]
    policy.names = [5, 100]
    assert cache.evict(1) == [100]
    assert cache.inspect.eviction_failure_count() == 1
    cache.now = 3
    assert policy.cache.now == 3
    cache.check()


def test_what_is_inserted_behind_a_prefix_never_evicts_that(told: type[Told]) -> None:
    cache = PrefixCache(4, 1, eviction=told)
    cache.insert_prefix([1, 2], [1, 2])
    cache.insert_prefix([9], [9])
    cache.insert_prefix([8], [8])
    told.made[0].names = [1, 1]
    assert cache.insert_prefix([1, 2, 3], [1, 2, 3]).evicted_kv_blocks == [9]
    assert cache.inspect.eviction_failure_count() == 1
    assert cache.query_match_len([1, 2, 3]) == 3
    assert cache.clear() == [8, 3, 2, 1]
    assert told.made[0].known == {}
    assert told.made[0].names == [1]
    cache.check()
