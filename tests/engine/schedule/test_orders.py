"""The orders of admission: what each puts first, what a step costs, and that no request starves."""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, add_samples, answer_alone, make, run_any_step, step
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import Sequence
from kvblocks.engine import schedules
from kvblocks.engine.schedule.order import FirstCome
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedules import (
    SCHEDULES,
    GroupedOrder,
    LongestPrefixOrder,
    make_order,
    num_common_blocks,
)
from kvblocks.errors import InvalidArgumentError

AGING = [LongestPrefixOrder, GroupedOrder]


def compute(scheduler, cache, prompt):
    """Have a prompt cached."""
    add(scheduler, "setup", prompt, max_tokens=1)
    while scheduler.has_work:
        step(scheduler, cache)


def admissions(scheduler, cache):
    """Names in the order in which they are first admitted, until there is no work."""
    names = []
    while scheduler.has_work:
        for chunk in run_any_step(scheduler, cache):
            name = chunk.request.sequence.sequence_id
            if name not in names:
                names.append(name)
    return names


def add_all(scheduler, prompts, **options):
    return {name: add(scheduler, name, prompt, **options) for name, prompt in prompts.items()}


# --- what comes first ------------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_comes_first():
    scheduler, cache = make(40, max_num_seqs=1, order=LongestPrefixOrder()), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [7] * 12)
    add_all(scheduler, {"cold": [8] * 9, "4": [7] * 4 + [8] * 9, "12": [7] * 12 + [8], "8": [7] * 8 + [9] * 4})
    assert admissions(scheduler, cache) == ["12", "8", "4", "cold"]


def test_equally_long_prefixes_come_in_order_of_arrival():
    scheduler, cache = make(40, max_num_seqs=1, order=LongestPrefixOrder()), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [7] * 4)
    add_all(scheduler, {"a": [8] * 9, "b": [7] * 4 + [0], "c": [9] * 9, "d": [7] * 4 + [1], "e": [5]})
    assert admissions(scheduler, cache) == ["b", "d", "a", "c", "e"]


def test_groups_are_walked_in_depth():
    """The request that shares most with the last one is next. If none shares a block, the oldest begins a group."""
    scheduler, cache = make(80, max_num_seqs=1, order=GroupedOrder()), FakeCache(BLOCK_SIZE)
    system, other = [7] * 4, [8] * 4
    prompts = {
        "7-1-a": [*system, *[1] * 4, 1],
        "8-a": [*other, 1],
        "7-2-a": [*system, *[2] * 4, 1],
        "alone": [9] * 5,
        "7-1-b": [*system, *[1] * 4, 2],
        "8-b": [*other, 2],
        "7-2-b": [*system, *[2] * 4, 2],
    }
    add_all(scheduler, prompts)
    assert admissions(scheduler, cache) == ["7-1-a", "7-1-b", "7-2-a", "7-2-b", "8-a", "8-b", "alone"]


def test_groups_go_on_with_who_comes_later():
    scheduler, cache = make(80, max_num_seqs=1, order=GroupedOrder()), FakeCache(BLOCK_SIZE)
    add_all(scheduler, {"a1": [7] * 5, "b1": [8] * 5})
    assert step(scheduler, cache) == [("a1", 0, 5)]
    add_all(scheduler, {"b2": [8] * 6, "a2": [7] * 6})
    assert admissions(scheduler, cache) == ["a1", "a2", "b1", "b2"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_step_admits_many(schedule):
    """As many requests as there is room for are admitted, in the order, each with its hit at that time."""
    scheduler = make(80, max_num_batched_tokens=100, order=make_order(schedule))
    cache = FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [7] * 8)
    add_all(scheduler, {"a": [8] * 9, "b": [7] * 9, "c": [8] * 9})
    expected = {
        "fcfs": [("a", 0, 9), ("b", 8, 1), ("c", 8, 1)],
        "longest-prefix": [("b", 8, 1), ("a", 0, 9), ("c", 8, 1)],
        "grouped": [("b", 8, 1), ("a", 0, 9), ("c", 8, 1)],  # b is of the cohort that was computed last
    }
    assert step(scheduler, cache) == expected[schedule]


@pytest.mark.parametrize("order", AGING)
def test_who_ran_before_comes_first(order):
    """Even if another request waits that has more cached tokens, and shares a prefix with the last admitted one."""
    scheduler, cache = make(40, max_num_seqs=1, order=order()), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [7] * 8)
    add(scheduler, "cold", [0] * 9)
    scheduler.abort(scheduler.schedule())
    hot = add(scheduler, "hot", [*[7] * 8, 1])
    scheduler.order.note_admitted(hot)
    assert admissions(scheduler, cache) == ["cold", "hot"]


def test_the_next_sample_takes_over_the_place_too():
    scheduler, cache = make(40, max_num_batched_tokens=8, order=LongestPrefixOrder()), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [7] * 16)
    samples = add_samples(scheduler, "a", [0] * 12, 2)
    step(scheduler, cache)
    scheduler.cancel(samples[0])
    scheduler.abort(scheduler.schedule())
    add(scheduler, ("hot", 0), [7] * 17)
    assert admissions(scheduler, cache) == [("a", 1), ("hot", 0)]


@pytest.mark.parametrize("order", AGING)
def test_samples_that_found_no_place_come_before_those_who_came_later(order):
    scheduler, cache = make(40, max_num_seqs=2, order=order()), FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [7] * 16)
    add_samples(scheduler, "a", [0] * 9, 4, max_tokens=3)
    step(scheduler, cache)
    hot = add(scheduler, ("hot", 0), [7] * 16, max_tokens=1)
    scheduler.order.note_admitted(hot)
    assert admissions(scheduler, cache) == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("hot", 0)]


@pytest.mark.parametrize("salt", [None, "a"])
@pytest.mark.parametrize("num_common", [0, 3, 4, 5, 8, 11, 64, 101])
def test_common_blocks_are_counted(num_common, salt):
    tokens = list(range(num_common))
    one = Sequence("one", [*tokens, 500, *range(40)], salt=salt)
    other = Sequence("other", [*tokens, 501, *range(40)], salt=salt)
    assert num_common_blocks(one, other, BLOCK_SIZE) == num_common // BLOCK_SIZE
    assert num_common_blocks(one, Sequence("cut", tokens or [9], salt=salt), BLOCK_SIZE) == num_common // BLOCK_SIZE
    assert num_common_blocks(one, Sequence("salted", tokens or [9], salt="b"), BLOCK_SIZE) == 0
    assert num_common_blocks(one, Sequence("adapted", tokens or [9], salt=salt, lora="x"), BLOCK_SIZE) == 0


# --- what they are good for ------------------------------------------------------------------------------------------


def num_computed(schedule, prompts, num_blocks):
    """The number of computed prompt tokens if all wait at once, one runs at a time, and little stays cached."""
    scheduler = make(num_blocks, max_num_seqs=1, max_num_batched_tokens=64, order=make_order(schedule))
    requests = [add(scheduler, name, prompt, max_tokens=1) for name, prompt in enumerate(prompts)]
    cache = FakeCache(BLOCK_SIZE)
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    return sum(request.num_computed_tokens for request in requests)


def test_cache_aware_orders_compute_shared_prefixes_once_where_first_come_thrashes():
    """Four groups of six prompts with 24 tokens in common, arriving in turn; the pool holds one prompt and a half."""
    prompts = [[group] * 24 + [number, number] for number in range(10, 16) for group in range(4)]
    once = 4 * 26 + 4 * 5 * 2
    assert num_computed("grouped", prompts, 10) == once
    assert num_computed("longest-prefix", prompts, 10) == once
    assert num_computed("fcfs", prompts, 10) == 24 * 26


# --- what a step costs -----------------------------------------------------------------------------------------------


def count_calls(monkeypatch, owner, name):
    calls = []
    function = getattr(owner, name)

    def counted(*arguments, **options):
        calls.append(arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("num_waiting", [100, 400])
@pytest.mark.parametrize(("schedule", "most"), [("fcfs", 1), ("longest-prefix", 32), ("grouped", 1)])
def test_a_step_looks_up_a_fixed_number_however_many_wait(schedule, most, num_waiting, monkeypatch):
    """There are 32 candidates. The request that is admitted or refused is one of them, so it isn't looked up again."""
    scheduler, cache = make(100, max_num_seqs=1, order=make_order(schedule)), FakeCache(BLOCK_SIZE)
    for name in range(num_waiting):
        add(scheduler, name, [name % 7] * 9, max_tokens=2)
    calls = count_calls(monkeypatch, scheduler.manager, "get_computed_blocks")
    compared = count_calls(monkeypatch, schedules, "num_common_blocks")
    for _ in range(40):
        del calls[:], compared[:]
        run_any_step(scheduler, cache)
        assert len(calls) <= most
        assert len(compared) <= (32 if schedule == "grouped" else 0)


def test_a_full_step_looks_nothing_up(monkeypatch):
    scheduler, cache = make(100, max_num_seqs=1, order=LongestPrefixOrder()), FakeCache(BLOCK_SIZE)
    for name in range(5):
        add(scheduler, name, [name] * 9, max_tokens=9)
    run_any_step(scheduler, cache)
    calls = count_calls(monkeypatch, scheduler.manager, "get_computed_blocks")
    run_any_step(scheduler, cache)
    assert not calls


def test_only_the_front_of_the_queue_is_ranked():
    scheduler = make(40, max_num_seqs=1, order=LongestPrefixOrder(num_candidates=3))
    cache = FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [7] * 8)
    add_all(scheduler, {"a": [1] * 5, "b": [2] * 5, "c": [7] * 5, "d": [7] * 9})
    assert admissions(scheduler, cache) == ["c", "d", "a", "b"]


# --- nobody starves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_overtakes", [0, 1, 5])
@pytest.mark.parametrize("order", AGING)
def test_a_cold_request_is_overtaken_as_often_as_allowed_and_no_more(order, max_overtakes):
    """In every step a request arrives that both cache-aware orders prefer."""
    scheduler = make(40, max_num_seqs=1, order=order(max_overtakes=max_overtakes))
    cache = FakeCache(BLOCK_SIZE)
    compute(scheduler, cache, [7] * 8)
    cold = add(scheduler, "cold", [0] * 9, max_tokens=1)
    names = []
    for number in range(20):
        add(scheduler, number, [7] * 8 + [number], max_tokens=1)
        names += [name for name, _, _ in step(scheduler, cache)]
    assert names[: max_overtakes + 2] == [*range(max_overtakes), "cold", max_overtakes]
    assert cold.num_overtakes == max_overtakes
    assert cold.finish_reason == "length"


def test_an_overdue_request_does_not_wait_for_a_prefix_or_a_place():
    limits = {"max_num_chunk_tokens": 4, "max_num_batched_tokens": 20, "max_num_partial_prefills": 1}
    scheduler, cache = make(80, order=LongestPrefixOrder(max_overtakes=1), **limits), FakeCache(BLOCK_SIZE)
    add(scheduler, "a", [0] * 40)
    assert step(scheduler, cache) == [("a", 0, 4)]
    add_all(scheduler, {"b": [0] * 40, "c": [1] * 4, "d": [2] * 5, "e": [3] * 4})
    # b waits for what a computes, and c passes; then b has been overtaken once, and computes what a computes too. d has
    # no place beside them, and e passes; then d has been overtaken once.
    assert step(scheduler, cache) == [("c", 0, 4), ("b", 4, 4), ("e", 0, 4), ("d", 0, 4)]


@pytest.mark.parametrize("order", [*AGING, FirstCome])
@settings(max_examples=3 * settings.default.max_examples)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(1, 16), st.integers(1, 5)), min_size=3, max_size=24
    ),
    num_blocks=st.integers(6, 16),
    max_num_seqs=st.integers(1, 4),
    chunk=st.none() | st.integers(1, 6),
    num_candidates=st.integers(1, 12),
    max_overtakes=st.integers(0, 4),
    waits=st.booleans(),
    dying_steps=st.sets(st.integers(0, 30), max_size=3),
)
def test_nobody_is_overtaken_more_often_than_allowed(
    order, arrivals, num_blocks, max_num_seqs, chunk, num_candidates, max_overtakes, waits, dying_steps
):
    bounds = {} if order is FirstCome else {"num_candidates": num_candidates, "max_overtakes": max_overtakes}
    scheduler = make(
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_chunk_tokens=chunk,
        wait_for_prefixes=waits,
        watermark=0.1,
        order=order(**bounds),
    )
    cache, pending, num_steps = FakeCache(BLOCK_SIZE), sorted(arrivals), 0
    requests, admitted, overtaken = [], [], {}
    while pending or scheduler.has_work:
        while pending and (pending[0][0] <= num_steps or not scheduler.has_work):
            _, token, length, max_tokens = pending.pop(0)
            prompt = [9] * (length // 2) + [token] * (length - length // 2)
            request = Request(Sequence(len(requests), prompt), max_tokens)
            requests.append(request)
            scheduler.add(request)
        waiting = [request for request in requests if request not in admitted]
        for chunk_ in run_any_step(scheduler, cache, dies=num_steps in dying_steps):
            if chunk_.request not in admitted:
                admitted.append(chunk_.request)
                index = waiting.index(chunk_.request)
                for older in waiting[:index]:
                    overtaken[older] = overtaken.get(older, 0) + 1
                del waiting[index]
        num_steps += 1
        assert num_steps < 2000
    assert len(admitted) == len(requests)
    if order is not FirstCome:
        assert max(overtaken.values(), default=0) <= max_overtakes
    elif not waits and chunk is None:  # else long prompts wait for a place
        assert not overtaken
    for request in requests:
        prompt = request.sequence.token_ids(0, request.sequence.num_prompt_tokens)
        assert request.output_token_ids == answer_alone((None, 0), prompt, request.max_tokens)
        # A preempted request waits again, and may be overtaken again, but not more often than allowed.
        counts_once = not dying_steps and not request.num_preemptions
        assert request.num_overtakes >= overtaken.get(request, 0)
        assert request.num_overtakes == overtaken.get(request, 0) or not counts_once
        assert request.num_overtakes <= max_overtakes or order is FirstCome


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", AGING)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_candidates": 0}, "num_candidates: expected an int of at least 1, got 0"),
        ({"max_overtakes": -1}, "max_overtakes: expected an int of at least 0, got -1"),
        ({"max_overtakes": None}, "max_overtakes: expected an int of at least 0, got None"),
    ],
)
def test_bounds_must_make_sense(order, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        order(**options)


@pytest.mark.parametrize("schedule", ["lifo", "", None, 3, ["fcfs"]])
def test_an_unknown_schedule_is_refused(schedule):
    with pytest.raises(InvalidArgumentError, match="schedule: expected one of fcfs, longest-prefix, grouped, got"):
        make_order(schedule)
