"""The bound and what is attainable, compared with all possible choices in tiny cases."""

from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay.independent import Ask
from replay.small_traces import asks, make_trace, run_trace

from kvblocks.replay import attainable
from kvblocks.replay.attainable import KnownFuture, attainable_hits, closed_times
from kvblocks.replay.bound import max_hits, next_uses, next_uses_in, references_in
from kvblocks.replay.run import Setup, followers
from kvblocks.replay.trace import think_times


def best_of_all(references, num_blocks):
    """The most hits of any cache: every set of blocks that it may keep is tried at every reference."""
    states = {frozenset(): 0}
    for block in references:
        after = {}
        for kept, num_hits in states.items():
            hits = num_hits + (block in kept)
            reachable = kept | {block}
            for size in range(min(num_blocks, len(reachable)) + 1):
                for chosen in combinations(sorted(reachable), size):
                    key = frozenset(chosen)
                    after[key] = max(after.get(key, -1), hits)
        states = after
    return max(states.values())


@given(references=st.lists(st.integers(0, 4), max_size=9), num_blocks=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_bound_is_what_the_best_cache_hits(references, num_blocks):
    uses = next_uses(np.array(references, np.int64))
    assert max_hits(uses, num_blocks) == best_of_all(references, num_blocks)


@given(references=st.lists(st.integers(0, 5), max_size=40))
def test_next_uses_are_those_of_a_search(references):
    expected = [
        next((later for later in range(place + 1, len(references)) if references[later] == block), -1)
        for place, block in enumerate(references)
    ]
    assert next_uses(np.array(references, np.int64)).tolist() == expected


def best_leaf_first(prompts, num_blocks):
    """The most hits of any pool in which each request has all its blocks at once, and no block lacks one above it."""
    above = {block: set(prompt[:place]) for prompt in prompts for place, block in enumerate(prompt)}
    states = {frozenset(): 0}
    for prompt in prompts:
        after = {}
        for kept, num_hits in states.items():
            hits = num_hits + len(kept & set(prompt))
            others = sorted(kept - set(prompt))
            for size in range(min(num_blocks - len(prompt), len(others)) + 1):
                for chosen in combinations(others, size):
                    key = frozenset(chosen) | frozenset(prompt)
                    if all(above[block] <= key for block in key):
                        after[key] = max(after.get(key, -1), hits)
        states = after
    return max(states.values())


@given(requests=asks(max_requests=7, max_blocks=3, max_seconds=0), num_blocks=st.integers(3, 5))
@settings(max_examples=100, deadline=None)
def test_without_holds_no_leaf_first_schedule_is_better_than_the_attainable(requests, num_blocks):
    trace = make_trace(requests)
    found = attainable_hits(trace, trace.times, num_blocks, never_waits=False)
    assert found == best_leaf_first([request.chain for request in requests], num_blocks)


@given(requests=asks(), num_blocks=st.integers(1, 14), never_waits=st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_attainable_is_at_most_the_bound_of_the_order_of_arrival(requests, num_blocks, never_waits):
    trace = make_trace(requests)
    found = attainable_hits(trace, trace.times, num_blocks, never_waits=never_waits)
    uses = next_uses(references_in(trace, [*range(trace.num_requests)]))
    assert found <= max_hits(uses, num_blocks)


@given(requests=asks(), is_closed=st.booleans())
@settings(max_examples=100, deadline=None)
def test_with_room_for_all_everything_is_hit_that_came_before(requests, is_closed):
    trace = make_trace(requests)
    outcome = run_trace(trace, Setup("lru", 500, is_closed=is_closed))
    thinks = think_times(trace) if is_closed else None
    found = attainable_hits(trace, trace.times, 500, never_waits=False, thinks=thinks)
    assert found == outcome.hits.sum() == len(trace.blocks) - trace.num_unique_blocks


def test_the_known_future_evicts_what_comes_back_last():
    requests = [Ask(name, number, 0, 0, (name,)) for number, name in enumerate([1, 2, 3, 1, 2, 3, 1, 2])]
    trace = make_trace(requests)
    assert attainable_hits(trace, trace.times, 2, never_waits=False) == 3
    assert run_trace(trace, Setup("lru", 2)).hits.sum() == 0


def test_what_is_held_is_not_evicted():
    requests = [Ask("a", 0, 0, 10, (1,)), Ask("b", 1, 0, 1, (2,)), Ask("c", 3, 0, 1, (3,)), Ask("b", 5, 0, 1, (2,))]
    trace = make_trace(requests)
    assert attainable_hits(trace, trace.times, 2, never_waits=False) == 0
    assert attainable_hits(trace, trace.times, 3, never_waits=False) == 1


def test_times_of_a_closed_loop_follow_from_ends_and_pauses():
    requests = [Ask("a", 0, 0, 5, (1,)), Ask("b", 1, 0, 1, (2,)), Ask("a", 2, 3, 1, (3,)), Ask("a", 3, 2, 1, (4,))]
    trace = make_trace(requests)
    times = closed_times(trace.times, think_times(trace), trace.durations, followers(trace))
    assert times.tolist() == [0, 1, 8, 11]


def belady(references, num_blocks):
    """MIN with bypass in its plainest form: look ahead at each reference."""
    kept, num_hits = set(), 0
    for place, block in enumerate(references):
        num_hits += block in kept
        kept.discard(block)
        following = {name: references.index(name, place + 1) for name in {*kept, block} & {*references[place + 1 :]}}
        kept = {*sorted(following, key=following.get)[:num_blocks]}
    return num_hits


def test_the_bound_is_min_with_bypass():
    """Longer cases than hypothesis prefers: small ones don't show which of two blocks was given up."""
    for seed in range(300):
        random = Random(seed)
        last = random.randint(2, 13)
        references = [random.randint(0, last) for _ in range(random.randint(5, 80))]
        num_blocks = random.randint(1, 8)
        uses = next_uses(np.array(references, np.int64))
        assert max_hits(uses, num_blocks) == belady(references, num_blocks)


def test_the_bound_of_whole_prompts_is_the_same():
    """Here the next uses of many references are consecutive, and a prompt may be asked for again at once."""
    for seed in range(300):
        random = Random(seed)
        prompts = [[(tree, block) for block in range(random.randint(0, 12))] for tree in random.choices(range(4), k=25)]
        trace = make_trace([Ask(str(n), n, 0, 0, tuple(prompt)) for n, prompt in enumerate(prompts)])
        order = random.sample(range(len(prompts)), len(prompts))
        references = references_in(trace, order)
        uses = next_uses_in(trace, order)
        assert uses.tolist() == next_uses(references).tolist()
        num_blocks = random.randint(1, 30)
        assert max_hits(uses, num_blocks) == belady(references.tolist(), num_blocks)
    assert next_uses_in(trace, []).tolist() == []


class Watched(KnownFuture):
    """Checks after each admission that what is cached fits, and that all above it is cached."""

    def admit(self, request, path, start=0):
        super().admit(request, path, start)
        self.check()

    def end(self, path):
        super().end(path)
        self.check()

    def check(self):
        cached = self._is_cached
        assert cached.sum() == self._num_cached <= self._num_blocks
        assert (self._owners > 0).sum() == self._num_owned
        assert cached[self._owners > 0].all()
        for request in range(self._trace.num_requests):
            of_path = cached[self._trace.blocks_of(request)]
            assert of_path[: of_path.sum()].all()


@given(requests=asks(), num_blocks=st.integers(1, 14), never_waits=st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_known_future_leaves_no_hole_and_evicts_nothing_that_is_held(requests, num_blocks, never_waits):
    trace = make_trace(requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attainable, "KnownFuture", Watched)
        attainable_hits(trace, trace.times, num_blocks, never_waits=never_waits)
