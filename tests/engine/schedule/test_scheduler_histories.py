"""Any history, in every order: arrivals, cancels, deadlines, pins, resets, steps that die and requests that fail.

After every step: the budget and the number of sequences are kept, there was progress, no request is lost, and the
manager's invariants hold. No running long prompt waits longer than for its turn, and no other running request longer
than slices may take. The queue keeps each salt's order of arrival. Whatever ended early has a beginning of its answer,
and everything else all of it.
"""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, add_samples, answer_alone, make, run_any_step, step
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import KVCacheManager, Sequence
from kvblocks.engine.schedule.capacity import StalledError
from kvblocks.engine.schedule.remembered import RememberedPrompts, prompt_key
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.schedules import SCHEDULES, make_order
from kvblocks.errors import PoolExhaustedError

# --- deadlines and failures, one by one ------------------------------------------------------------------------------


def test_requests_expire_wherever_they_are():
    scheduler, cache = make(40, max_num_seqs=2), FakeCache(BLOCK_SIZE)
    runs = add(scheduler, "runs", [0] * 6, deadline=5.0)
    stays = add(scheduler, "stays", [1] * 6)
    waits = add(scheduler, "waits", [2] * 6, deadline=4.0)
    later = add(scheduler, "later", [3] * 6, deadline=6.0)
    step(scheduler, cache)
    assert scheduler.expire(3.9) == []
    assert scheduler.expire(5.0) == [runs, waits]
    assert (runs.finish_reason, waits.finish_reason, later.finish_reason) == ("timeout", "timeout", None)
    assert (scheduler.running, list(scheduler.waiting)) == ([stays], [later])
    assert scheduler.manager.num_free_blocks == 38
    assert scheduler.expire(5.0) == []
    step(scheduler, cache)
    assert scheduler.running == [stays, later]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_all_samples_of_a_prompt_expire_together(num_steps):
    scheduler, cache = make(40, max_num_batched_tokens=8), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", [0] * 10, 3, deadline=1.0)
    for _ in range(num_steps):
        step(scheduler, cache)
    assert scheduler.expire(1.0) == samples
    assert not scheduler.has_work
    assert scheduler.manager.num_free_blocks == 40


def test_a_request_that_has_ended_stays_as_it_is():
    scheduler, cache = make(40), FakeCache(BLOCK_SIZE)
    request = add(scheduler, "a", [0] * 6, max_tokens=1, deadline=1.0)
    step(scheduler, cache)
    assert scheduler.expire(2.0) == []
    scheduler.cancel(request)
    assert request.finish_reason == "length"


def test_a_request_without_a_token_ends_and_the_others_go_on():
    scheduler, cache = make(40, max_num_batched_tokens=64), FakeCache(BLOCK_SIZE)
    bad, good = add(scheduler, "bad", [0] * 9), add(scheduler, "good", [*[0] * 8, 1])
    run_any_step(scheduler, cache, fails={bad})
    assert (bad.finish_reason, bad.output_token_ids) == ("error", [])
    assert scheduler.running == [good]
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert good.output_token_ids == answer_alone((None, 0), [*[0] * 8, 1], 4)
    assert scheduler.manager.num_free_blocks == 40


@pytest.mark.parametrize("failing", [[0], [1], [0, 2], [0, 1, 2]])
def test_samples_fail_each_by_itself(failing):
    scheduler, cache = make(40), FakeCache(BLOCK_SIZE)
    samples = add_samples(scheduler, "a", [0] * 10, 3)
    run_any_step(scheduler, cache, fails={samples[number] for number in failing})
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    for number, request in enumerate(samples):
        assert request.output_token_ids == ([] if number in failing else answer_alone((None, number), [0] * 10, 4))
    assert scheduler.manager.num_free_blocks == 40


def test_a_stalled_request_is_told_and_the_others_go_on_without_it():
    scheduler, cache = make(8, pin_budget=1.0), FakeCache(BLOCK_SIZE)
    add(scheduler, "setup", [0] * 20, max_tokens=1)
    while scheduler.has_work:
        step(scheduler, cache)
    stuck, small = add(scheduler, "stuck", [1] * 14), add(scheduler, "small", [2] * 3)
    scheduler.manager.pins.pin([0] * 20, priority=100)
    with pytest.raises(StalledError, match=r"expected 4 more blocks for Sequence\('stuck'") as caught:
        scheduler.schedule()
    assert caught.value.request is stuck
    scheduler.cancel(stuck, "error")
    while scheduler.has_work:
        run_any_step(scheduler, cache)
    assert small.output_token_ids == answer_alone((None, 0), [2] * 3, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_is_stalled_is_who_was_refused(schedule):
    """In a cache-aware order that need not be the oldest one."""
    scheduler, cache = make(8, order=make_order(schedule), pin_budget=1.0), FakeCache(BLOCK_SIZE)
    for prompt in ([0] * 12, [1] * 20):
        add(scheduler, "setup", prompt, max_tokens=1)
        while scheduler.has_work:
            step(scheduler, cache)
    add(scheduler, "cold", [2] * 14, max_tokens=9)
    add(scheduler, "hot", [*[1] * 16, *[2] * 10], max_tokens=6)
    scheduler.manager.pins.pin([0] * 12, priority=100)
    scheduler.manager.pins.pin([1] * 8, priority=100)
    with pytest.raises(StalledError) as caught:
        scheduler.schedule()
    assert caught.value.request.sequence.sequence_id == ("cold" if schedule == "fcfs" else "hot")


# --- any history -----------------------------------------------------------------------------------------------------

# Prompts of three families that share beginnings with one another, and few distinct ends.
PROMPTS = st.builds(
    lambda family, length, end: [family] * length + end,
    st.integers(0, 2),
    st.integers(1, 20),
    st.lists(st.integers(0, 1), max_size=4),
)
ARRIVALS = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 15),
            "prompt": PROMPTS,
            "max_tokens": st.integers(0, 10),
            "num_samples": st.sampled_from([1, 1, 1, 2, 4]),
            "lives": st.sampled_from([None, None, 0, 1, 3, 8]),
            "salt": st.sampled_from([None, None, "other", "third"]),
        }
    ),
    min_size=1,
    max_size=12,
)
EVENTS = st.dictionaries(
    st.integers(0, 30),
    st.tuples(
        st.sampled_from(["cancel", "cancel", "dies", "fails", "fails", "pin", "pin", "soft pin", "unpin", "reset"]),
        st.integers(0, 30),
    ),
    max_size=10,
)


class History:
    """A scheduler, and what happened to it."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.cache = FakeCache(BLOCK_SIZE)
        self.requests = []
        self.now = 0
        self.num_idle_steps = {}  # of each running request, since its last chunk or slice
        self.num_sliced_tokens = {}  # of each running request: what the slices since its last chunk were worth
        self.had_slice = False  # in the last step

    def arrive(self, prompt, max_tokens, num_samples, lives, salt, **_):
        name = len(self.requests)
        deadline = None if lives is None else self.now + lives
        request = Request(Sequence((name, 0), prompt, salt=salt), max_tokens, deadline=deadline)
        samples = [
            request,
            *(request.add_sample((name, number)) for number in range(1, num_samples if max_tokens else 1)),
        ]
        if self.scheduler.remembered is not None and len(samples) == 1:
            request.prompt_key = prompt_key(request.sequence)
        try:
            self.scheduler.add(request)
        except PoolExhaustedError:
            assert self.scheduler.manager.pins
            return
        self.requests += [(sample, prompt, number) for number, sample in enumerate(samples)]

    def happen(self, event, which):
        """Something between two steps."""
        manager = self.scheduler.manager
        unfinished = [request for request, _, _ in self.requests if request.finish_reason is None]
        if event == "cancel" and unfinished:
            self.scheduler.cancel(unfinished[which % len(unfinished)])
        elif event.endswith("pin") and event != "unpin":
            num_left = manager.num_blocks - 6 - sum(pin.num_blocks for pin in manager.pins)
            if num_left > 0:
                priority = 50 if event == "soft pin" else 100
                manager.pins.pin([which % 3] * (BLOCK_SIZE * min(1 + which % 5, num_left)), priority=priority)
        elif event == "unpin" and manager.pins:
            manager.pins.unpin(list(manager.pins)[which % len(manager.pins)])
        elif event == "reset":
            manager.reset_prefix_cache()
        manager.check()

    def step(self, event, which):
        """One step, or the end of the request that can't go on."""
        scheduler = self.scheduler
        deadlines = {r for r, _, _ in self.requests if r.finish_reason is None and r.deadline is not None}
        expired = scheduler.expire(self.now)
        assert set(expired) == {request for request in deadlines if request.deadline <= self.now}
        assert len(expired) == len(set(expired))
        scheduler.manager.check()
        self.now += 1
        self.answer()
        if not scheduler.has_work:
            return
        running, part = list(scheduler.running), scheduler.long_prompts.open
        self.check_queue()
        fails = {
            r for r, _, _ in self.requests if r.finish_reason is None and sum(r.sequence.sequence_id) % 3 == which % 3
        }
        try:
            chunks = run_any_step(scheduler, self.cache, dies=event == "dies", fails=fails if event == "fails" else ())
            assert part is None or chunks[0].part is part or self.had_slice  # others get every other step at most
            self.had_slice = chunks[0].part is not None
            self.check_turns({chunk.request: chunk for chunk in chunks}, running)
        except StalledError as error:
            assert any(100 in pin.priorities and pin.num_held_blocks for pin in scheduler.manager.pins)
            assert scheduler.running == running
            scheduler.cancel(error.request, "error")
            scheduler.manager.check()

    def check_queue(self):
        """Requests of one salt that were never admitted are in order of arrival, and in rounds."""
        fresh = [request for request in self.scheduler.waiting if not request.was_admitted]
        assert [request.round for request in fresh] == sorted(request.round for request in fresh)
        for salt in {request.sequence.salt for request in fresh}:
            of_salt = [request for request in fresh if request.sequence.salt == salt]
            assert [request.sequence.sequence_id[0] for request in of_salt] == sorted(
                request.sequence.sequence_id[0] for request in of_salt
            )
            assert len({request.round for request in of_salt}) == len(of_salt)

    def check_turns(self, chunks, before):
        """No long prompt that runs is left out for more than two turns of all that run; the others never are."""
        scheduler = self.scheduler
        most = scheduler.limits.max_num_batched_tokens
        is_full = sum(chunk.num_tokens for chunk in chunks.values()) == most
        stayed = [request for request in before if request in scheduler.running]
        parts = [request for request in stayed if request.is_long and request.num_left_tokens > 1]
        for request in stayed:
            is_left_out = request not in chunks and not is_full
            self.num_idle_steps[request] = self.num_idle_steps.get(request, 0) + 1 if is_left_out else 0
            num_layers = scheduler.long_prompts.num_layers
            most_idle = (
                2 * num_layers * (1 + len(parts)) if request in parts else 2 * (num_layers + 1) * (num_layers > 1)
            )
            assert self.num_idle_steps[request] <= most_idle
            worth = sum(chunk.part.num_worth_tokens for chunk in chunks.values() if chunk.part is not None)
            so_far = self.num_sliced_tokens.get(request, 0) if is_left_out else 0
            self.num_sliced_tokens[request] = so_far + worth
            assert request in parts or so_far <= 2 * scheduler.limits.num_step_tokens
        for counts in (self.num_idle_steps, self.num_sliced_tokens):
            for request in [request for request in counts if request not in stayed]:
                del counts[request]

    def answer(self):
        """Give out remembered tokens. No other request begins to run, and no request gets or loses a block."""
        scheduler = self.scheduler
        if scheduler.remembered is None:
            return
        scheduler.remembered.drop_stale()
        before = list(scheduler.running), scheduler.manager.num_free_blocks
        for request, token in scheduler.answer():
            assert request.output_token_ids == [token]
        assert (scheduler.running, scheduler.manager.num_free_blocks) == before
        scheduler.remembered.check()

    def check_end(self):
        scheduler = self.scheduler
        if scheduler.remembered is not None:
            scheduler.remembered.check()
            scheduler.remembered.clear()
        for pin in scheduler.manager.pins:
            scheduler.manager.pins.unpin(pin)
        assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks
        for request, prompt, number in self.requests:
            expected = answer_alone((request.sequence.salt, number), prompt, request.max_tokens)
            assert request.finish_reason is not None
            if request.finish_reason == "length":
                assert request.output_token_ids == expected
            else:
                assert request.output_token_ids == expected[: request.num_output_tokens]
                assert request.num_output_tokens < max(1, request.max_tokens)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=4 * settings.default.max_examples)
@given(
    arrivals=ARRIVALS,
    events=EVENTS,
    num_blocks=st.integers(9, 24) | st.integers(25, 60),  # 34 tokens need 9 blocks; with many, long prompts take turns
    limits=st.builds(
        StepLimits,
        st.integers(6, 24),
        st.integers(1, 6),
        st.sampled_from([None, None, 1, 3, 5]),
        st.booleans(),
        st.sampled_from([0.0, 0.1, 0.3, 0.9]),
        st.integers(1, 4),
    ),
    bounds=st.none() | st.tuples(st.integers(1, 6), st.integers(0, 3)),
    enable_caching=st.sampled_from([True, True, True, False]),
    remembered=st.none() | st.tuples(st.integers(1, 24), st.integers(1, 6)),
    num_layers=st.sampled_from([1, 2, 5, 9]),
)
def test_any_history(schedule, arrivals, events, num_blocks, limits, bounds, enable_caching, remembered, num_layers):
    manager = KVCacheManager(num_blocks, BLOCK_SIZE, enable_caching=enable_caching, pin_budget=1.0)
    order = make_order(schedule)
    if bounds is not None and schedule != "fcfs":
        order.num_candidates, order.max_overtakes = bounds
    kept = None if remembered is None else RememberedPrompts(manager, *remembered)
    history = History(Scheduler(manager, 1000, limits, order=order, remembered=kept, num_layers=num_layers))
    pending = sorted(arrivals, key=lambda arrival: arrival["at"])
    while pending or history.scheduler.has_work:
        while pending and (pending[0]["at"] <= history.now or not history.scheduler.has_work):
            history.arrive(**pending.pop(0))
        event, which = events.get(history.now, ("", 0))
        if enable_caching or "pin" not in event:
            history.happen(event, which)
        history.step(event, which)
        assert history.now < 3000
    history.check_end()
