"""Arrays decide as the production manager does: every field of every outcome is equal, whatever the policy."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay.independent import Ask
from replay.small_traces import make_trace

from kvblocks import KVCacheManager
from kvblocks.replay.arrays.released import ReleaseOrder
from kvblocks.replay.arrays.tree import CachedTree
from kvblocks.replay.pools import ArrayRunPool, ManagerPool, has_own_blocks
from kvblocks.replay.run import POLICIES, Outcome, Setup, TraceRun, can_use_arrays, make_manager, run
from kvblocks.replay.served.run import ArrayCache, ManagerCache, ServedRun, ServerModel
from kvblocks.replay.trace import think_times
from kvblocks.retention.policies import MAX_SESSIONS

BY_ARRAYS = [policy for policy in POLICIES if policy != "lru-drop"]


def random_trace(seed: int):
    """Sessions that grow, go back, and begin again; with stop reasons, tenants, and requests without a session."""
    draw = random.Random(seed)
    num_sessions, most = draw.choice([2, 5, 12]), draw.choice([4, 8, 20])
    tenants = {name: draw.choice(draw.choice([[None], [None, "a"], ["x", "y"]])) for name in range(num_sessions)}
    last: dict[int, tuple[int, ...]] = {}
    asks, now = [], 0.0
    for _ in range(draw.choice([10, 60, 150])):
        now += draw.choice([0, 0, 1, 1, 2, draw.random() * 5])
        session, kind = draw.randrange(num_sessions), draw.random()
        path = last.get(session, ())
        if kind > 0.8:
            path = ()
        elif kind > 0.6:
            path = path[: draw.randrange(len(path) + 1)]
        path = last[session] = (*path, *[draw.randrange(3) for _ in range(draw.randrange(5))])[:most]
        chain = tuple((tenants[session], path[: i + 1]) for i in range(len(path)))
        asks.append(Ask(session, now, draw.random() * 3, draw.choice([0, 1, 2, draw.random() * 6]), chain))
    trace = make_trace(asks, tenants=tenants, stops=draw.choices(["", "tool_use", "end_turn"], k=len(asks)))
    for number in range(len(trace.session_names)):
        if draw.random() < 0.15:
            trace.session_names[number] = None
    return trace, draw


def differing(one: Outcome, other: Outcome) -> list[str]:
    """The fields that aren't equal."""
    return [name for name in Outcome.__slots__ if not np.array_equal(getattr(one, name), getattr(other, name))]


@pytest.mark.parametrize("policy", BY_ARRAYS)
@pytest.mark.parametrize("seed", range(12))
def test_every_field_is_that_of_the_manager(policy, seed):
    trace, draw = random_trace(seed)
    thinks = think_times(trace)
    for _ in range(3):
        setup = Setup(
            policy,
            draw.choice([3, 8, 20, 60]),
            is_closed=draw.random() < 0.4,
            never_waits=draw.random() < 0.3,
            tells_ends=draw.random() < 0.3,
        )
        arrays = TraceRun(trace, trace.times, thinks, setup)
        assert isinstance(arrays.pool, ArrayRunPool)
        manager = run(trace, trace.times, thinks, setup, manager=make_manager(setup))
        assert differing(arrays.run(lambda _: None), manager) == []


def policy_that(fails):
    """A policy that keeps to what it was told, in an odd order, and writes down what it was told."""

    class Odd:
        def __init__(self, cache):
            self.cache, self.known, self.told = cache, {}, []

        def free(self, blocks):
            for block in blocks:
                self.known[block.block_id] = len(self.told)
                self.told.append((block.depth, block.tenant, block.session, block.num_hits, block.others))
            if fails and len(self.told) % 5 == 0:
                raise ValueError

        def use(self, block_ids):
            self.told.append(("use", len(block_ids)))
            for block_id in block_ids:
                del self.known[block_id]

        def remove(self, block_ids):
            self.told.append(("remove", len(block_ids), len({self.cache.digest(each) for each in block_ids})))
            for block_id in block_ids:
                del self.known[block_id]

        def victim(self, num_blocks):
            self.told.append(("victim", num_blocks))
            number = len(self.told)
            if fails and number % 3 == 0:
                return None if number % 2 else 10**9
            return [*self.known][number % len(self.known)]  # of any depth, so what is below it goes too

        def begin(self, session, tenant):
            self.told.append(("begin", session, tenant, self.cache.now))

        def pause(self, session, tenant, reason):
            self.told.append((reason, session, tenant, self.cache.now))

        def end(self, session, tenant):
            self.told.append(("end", session, tenant, self.cache.now))

    made = []

    def make(cache):
        made.append(Odd(cache))
        return made[-1]

    return make, made


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_policy_is_told_and_asked_the_same(monkeypatch, seed, fails):
    make, made = policy_that(fails)
    monkeypatch.setitem(POLICIES, "odd", make)
    trace, draw = random_trace(100 + seed)
    setup = Setup("odd", draw.choice([8, 20, 40]), never_waits=draw.random() < 0.3, tells_ends=draw.random() < 0.5)
    thinks = think_times(trace)
    outcomes = [
        run(trace, trace.times, thinks, setup),
        run(trace, trace.times, thinks, setup, manager=make_manager(setup)),
    ]
    assert made[0].told == made[1].told
    assert differing(*outcomes) == []
    assert fails or not outcomes[0].num_policy_failures


def test_a_block_remembers_its_last_sessions():
    asks = [Ask(session, session, 0, 0, (1,)) for session in range(MAX_SESSIONS + 4)]
    trace, setup = make_trace(asks), Setup("slru", 4)
    run_of = TraceRun(trace, trace.times, think_times(trace), setup)
    run_of.run(lambda _: None)
    assert run_of.pool._pool._givers[0] == tuple(range(4, MAX_SESSIONS + 4))  # noqa: SLF001


def test_where_arrays_cannot_stand_in_the_manager_runs():
    trace = make_trace([Ask("a", 0, 0, 0, (1, 2)), Ask("b", 1, 0, 0, (1, 3))])
    assert can_use_arrays(trace, Setup("lru", 10))
    for setup in (Setup("lru-drop", 10), Setup("lru", 10, host_blocks=5)):
        assert not can_use_arrays(trace, setup)
        assert isinstance(TraceRun(trace, trace.times, think_times(trace), setup).pool, ManagerPool)
    shared = make_trace([Ask("a", 0, 0, 0, (1, 2)), Ask("b", 1, 0, 0, (1, 3))], tenants={"a": "x", "b": "y"})
    assert not has_own_blocks(shared), "one number stands for a block of each tenant"
    assert not can_use_arrays(shared, Setup("lru", 10))


@given(seed=st.integers(0, 10**6), num_blocks=st.integers(23, 60), entrance=st.sampled_from(["none", "gate", "cap 2"]))
@settings(max_examples=30, deadline=None)
def test_a_served_run_is_the_same(seed, num_blocks, entrance):
    trace, _ = random_trace(seed)
    trace.tokens[:] = np.maximum(trace.tokens, 1)
    times = trace.times, think_times(trace)
    server = ServerModel(prefill_rate=16.0, decode_step_s=1.0)
    arrays = ServedRun(trace, times, num_blocks, entrance, server)
    manager = ServedRun(trace, times, num_blocks, entrance, server)
    assert isinstance(arrays.cache, ArrayCache)
    manager.cache = ManagerCache(trace, num_blocks)
    assert isinstance(manager.cache.manager, KVCacheManager)
    assert arrays.run() == manager.run()


def test_stale_entries_are_left_out_in_time():
    order = ReleaseOrder(num_unique=40, num_blocks=2)
    for _ in range(2000):
        order.add(np.arange(2))
        order.forget(np.arange(2))
    assert order._num_entries < 2000  # noqa: SLF001
    order.add(np.array([7, 3, 9]))
    order.number_of[3] = 0
    assert order.take(2).tolist() == [7, 9]


def test_what_is_below_a_block_goes_first_and_the_oldest_branch_before_the_others():
    tree, cached = CachedTree(8), np.ones(8, np.uint8)
    for path in ([0, 1, 2], [0, 1, 3, 4], [0, 1, 5]):
        tree.add(np.array(path), 0 if path[-1] == 2 else 2)
    released = memoryview(np.array([9, 8, 3, 2, 1, 4, 0, 0]))
    assert tree.below(1, 10, released) == [4, 3, 2, 5, 1]
    assert tree.below(1, 3, released) == [4, 3, 2]
    cached[[4, 3, 2]] = 0
    tree.remove(np.array([4, 3, 2]), cached)
    assert tree.below(0, 10, released) == [5, 1, 0]
    tree.remove_one(5)
    assert tree.below(0, 10, released) == [1, 0]
