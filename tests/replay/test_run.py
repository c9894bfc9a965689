"""A run: agrees with the independent simulator to the block, and counts every reference once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay.independent import Ask, simulate
from replay.small_traces import asks, make_trace, run_trace

from kvblocks import InvalidArgumentError
from kvblocks.core.block import KVCacheBlock
from kvblocks.replay import sweep as sweeping
from kvblocks.replay.accounts import MAX_MOMENTS, MissAccounts, State, Timeline
from kvblocks.replay.bound import max_hits, next_uses, references_in
from kvblocks.replay.run import POLICIES, Setup

policies = st.sampled_from([*POLICIES])


def num_missed(misses):
    parts = ("first_time", "own_session", "other_session", "other_tenant", "dropped", "refused", "window")
    return sum(getattr(misses, part) for part in parts)


@given(requests=asks(), num_blocks=st.integers(1, 14), is_closed=st.booleans())
@settings(max_examples=150, deadline=None)
def test_lru_agrees_with_the_independent_simulator_to_the_block(requests, num_blocks, is_closed):
    served = simulate(requests, num_blocks, closed_loop=is_closed)
    outcome = run_trace(make_trace(requests), Setup("lru", num_blocks, is_closed=is_closed))
    assert outcome.hits.tolist() == [each.num_hit for each in served]
    assert sorted(outcome.refused) == [number for number, each in enumerate(served) if each.admitted is None]
    admitted = [number for number in range(len(served)) if served[number].admitted is not None]
    assert sorted(outcome.order) == admitted
    waits = [served[number].admitted - served[number].arrived for number in admitted]
    assert outcome.waits.count == sum(wait > 0 for wait in waits)
    assert outcome.waits.max_s == pytest.approx(max(waits, default=0))
    assert outcome.waits.mean_s == pytest.approx(sum(waits) / max(1, len(waits)))


@given(
    requests=asks(), num_blocks=st.integers(1, 14), policy=policies, is_closed=st.booleans(), never_waits=st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_no_policy_beats_the_bound_of_its_own_order(requests, num_blocks, policy, is_closed, never_waits):
    trace = make_trace(requests, stops=["tool_use", "end_turn", ""] * len(requests))
    outcome = run_trace(trace, Setup(policy, num_blocks, is_closed=is_closed, never_waits=never_waits))
    uses = next_uses(references_in(trace, outcome.order))
    assert outcome.hits.sum() <= max_hits(uses, num_blocks)
    assert outcome.num_policy_failures == 0


@given(requests=asks(), num_blocks=st.integers(1, 14), policy=policies, host=st.sampled_from([None, 1, 3, 40]))
@settings(max_examples=100, deadline=None)
def test_every_reference_is_a_hit_or_a_miss_of_one_kind(requests, num_blocks, policy, host):
    trace = make_trace(requests, tenants={"a": None, "b": None, "c": "one", "d": "two"})
    outcome = run_trace(trace, Setup(policy, num_blocks, host))
    num_hits = int(outcome.hits.sum() + outcome.loaded.sum())
    assert num_hits + num_missed(outcome.misses) == len(trace.blocks)
    assert sum(moment.references for moment in outcome.moments) == len(trace.blocks)
    assert sum(moment.hits for moment in outcome.moments) == num_hits
    last = outcome.moments[-1]
    assert last.running_requests == last.waiting_requests == last.held_blocks == last.live_sessions == 0
    assert last.used_blocks <= last.cached_blocks <= num_blocks


def test_misses_say_for_whom_their_block_was_evicted():
    requests = [
        Ask("a", 0, 0, 0, (1, 2)),
        Ask("a", 1, 0, 0, (3, 4)),  # evicts both of session a for session a
        Ask("a", 3, 0, 0, (1, 2)),
        Ask("b", 4, 0, 0, (5, 6)),  # evicts them for b, of the same tenant
        Ask("a", 9, 0, 0, (1, 2)),
        Ask("c", 20, 0, 0, (7, 8)),  # of another tenant
        Ask("a", 90, 0, 0, (1, 2)),
    ]
    trace = make_trace(requests, tenants={"a": "x", "b": "x", "c": "y"})
    misses = run_trace(trace, Setup("lru", 2)).misses
    assert (misses.own_session, misses.other_session, misses.other_tenant) == (2, 2, 2)
    assert (misses.first_time, misses.dropped, misses.refused) == (8, 0, 0)
    # 2 s, 5 s and 70 s after they were evicted
    assert {bucket.upto: bucket.count for bucket in misses.ages if bucket.count} == {3.0: 2, 10.0: 2, 120.0: 2}


def test_a_block_that_lies_elsewhere_too_was_not_evicted():
    trace = make_trace([Ask("a", 0, 0, 0, (1,)), Ask("b", 1, 0, 0, (2,))])
    accounts = MissAccounts(trace, 3, first_block_id=1)
    for block, place, session in ((0, 1, 0), (0, 2, 0), (1, 1, 1), (0, 3, 0)):  # 0 again, for want of a window
        accounts.note_taken([KVCacheBlock(place)])
        accounts.note_admitted(np.array([block]), (0, 0), [place], session, 0.0)
    assert accounts.misses().first_time == 2
    assert accounts.misses().window == 2  # its first place was given to another, and it lay in the second


def test_what_the_next_request_lacks_is_dropped_unless_another_session_has_it():
    requests = [
        Ask("b", 0, 0, 0, (1,)),
        Ask("a", 0, 0, 0, (1, 2, 3)),
        Ask("a", 1, 0, 0, (4,)),  # drops 2 and 3, and not 1, which b has
        Ask("c", 2, 0, 0, (1, 2)),
    ]
    outcome = run_trace(make_trace(requests), Setup("lru-drop", 10))
    assert outcome.hits.tolist() == [0, 1, 0, 1]
    assert outcome.misses.dropped == 1
    assert run_trace(make_trace(requests), Setup("lru", 10)).hits.tolist() == [0, 1, 0, 2]


def test_what_a_running_request_holds_is_not_dropped():
    requests = [Ask("a", 0, 0, 9, (1, 2, 3)), Ask("a", 1, 0, 0, (1, 9)), Ask("b", 2, 0, 0, (1, 2, 3))]
    assert run_trace(make_trace(requests), Setup("lru-drop", 10)).hits.tolist() == [0, 1, 3]


def test_what_never_waits_leaves_what_fits():
    requests = [Ask("a", 0, 0, 9, (1, 2)), Ask("b", 1, 0, 9, (3, 4, 5)), Ask("b", 2, 0, 0, (3, 4, 5))]
    setup = Setup("lru", 4, never_waits=True)
    outcome = run_trace(make_trace(requests), setup)
    assert outcome.order == [0, 1, 2]
    assert outcome.hits.tolist() == [0, 0, 2]  # two of its blocks fit
    others = [Ask("c", 3, 0, 0, (6, 7)), Ask("c", 4, 0, 0, (6, 7))]
    outcome = run_trace(make_trace([*requests[:2], *others]), setup)
    assert outcome.hits.tolist() == [0, 0, 0, 2]  # which nobody holds, so the next one finds room


def test_a_host_tier_gives_back_what_the_device_lost():
    one, other = tuple(range(12)), tuple(range(20, 32))
    requests = [Ask("a", 0, 0, 0, one), Ask("b", 1, 0, 0, other), Ask("a", 2, 0, 0, one)]
    assert run_trace(make_trace(requests), Setup("lru", 16)).hits.sum() == 4
    outcome = run_trace(make_trace(requests), Setup("lru", 16, 30))
    assert (outcome.hits.sum(), outcome.loaded.sum()) == (4, 7)  # the last block is computed, as its last token is
    assert num_missed(outcome.misses) == 25


def test_windows_take_blocks_of_the_pool():
    chain = tuple(range(1, 21))
    requests = [Ask("a", number, 0, 0, chain) for number in range(3)]
    groups = sweeping.model_groups("gemma3-4b", 512)
    assert len(groups) > 1
    outcome = run_trace(make_trace(requests), Setup("lru", 200, None, groups))
    assert outcome.hits.tolist() == [0, 20, 20]
    small = run_trace(make_trace(requests), Setup("lru", 21, None, groups))
    assert small.hits.sum() + num_missed(small.misses) == 60


@pytest.mark.parametrize(("block_size", "window"), [(16, 65), (512, 3), (1023, 2), (1024, 2), (2048, 2)])
def test_a_window_is_rounded_up_to_whole_blocks(block_size, window):
    found = {getattr(group, "window", None) for group in sweeping.model_groups("gemma3-4b", block_size)}
    assert found == {None, window}


def test_an_unknown_policy_or_model_is_refused():
    trace = make_trace([Ask("a", 0, 0, 0, (1,))])
    with pytest.raises(InvalidArgumentError, match=r"policy: expected one of lru, .*, got fifo"):
        run_trace(trace, Setup("fifo", 10))
    with pytest.raises(InvalidArgumentError, match="groups: expected one of gemma3-4b, got 'gpt'"):
        sweeping.model_groups("gpt", 16)


def test_sessions_pause_and_end_as_the_trace_says(monkeypatch):
    told = []

    class Listening:
        def __init__(self, cache):
            self.cache = cache

        def free(self, blocks):
            pass

        def use(self, block_ids):
            pass

        def remove(self, block_ids):
            pass

        def victim(self, num_blocks):
            return None

        def pause(self, session, tenant, reason):
            told.append((self.cache.now, session, tenant, reason))

        def end(self, session, tenant):
            told.append((self.cache.now, session, tenant, None))

    monkeypatch.setitem(POLICIES, "listening", Listening)
    requests = [Ask("a", 0, 0, 1, (1,)), Ask("b", 1, 0, 1, (2,)), Ask("a", 5, 0, 1, (1, 3))]
    trace = make_trace(requests, tenants={"a": "x", "b": None}, stops=["tool_use", "", "end_turn"])
    assert run_trace(trace, Setup("listening", 10)).num_policy_failures == 0
    assert told == [(1, 0, "x", "tool_use"), (6, 0, "x", "end_turn")]
    told.clear()
    run_trace(trace, Setup("listening", 10, tells_ends=True))
    assert told == [(1, 0, "x", "tool_use"), (2, 1, None, None), (6, 0, "x", None)]


def test_a_long_run_has_as_many_moments_as_fit():
    timeline = Timeline(0.0, 10.0)
    state = State(1, 2, 3, 4, 5, 6)
    for second in range(1, 1000):
        timeline.add(3, 1)
        timeline.note(state, float(second))
    moments = timeline.end(state, 1000.0)
    assert 10 < len(moments) <= MAX_MOMENTS
    assert sum(moment.references for moment in moments) == 3 * 999
    times = [moment.time_s for moment in moments]
    assert times == sorted(times)
    widths = [round(after - before, 6) for before, after in pairwise(times[:-1])]
    assert len(set(widths)) == 1
