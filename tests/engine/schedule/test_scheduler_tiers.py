"""Requests whose prefix comes from a tier: when they run, what they count, and any history with transfers under way."""

import random

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, add, add_samples, answer_alone, kind_of, step, unfinished_requests
from engine.fake_tiers import FakeTiers
from model.where import where

from kvblocks import KVCacheManager, Sequence, Tier
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.schedules import SCHEDULES, make_order

PROMPT = [0, 1, 2, 0] * 3 + [1]


def make(num_blocks, tiers=None, order=None, **limits):
    """A scheduler over tiers (by default a host of 100 slots), its fake cache, and its fake tiers."""
    given = [Tier("host", 100, 10)] if tiers is None else tiers
    manager = KVCacheManager(num_blocks, BLOCK_SIZE, tiers=given, debug=True)
    scheduler = Scheduler(
        manager, 1000, StepLimits(**{"max_num_batched_tokens": 16, "max_num_seqs": 8, **limits}), order=order
    )
    cache = FakeCache(BLOCK_SIZE)
    return scheduler, cache, FakeTiers(scheduler, cache)


def store_only_below(scheduler, cache, mover, prompt):
    """Compute a prompt, store it, and have it leave the device."""
    add(scheduler, "before", prompt, max_tokens=1)
    while scheduler.has_work:
        step(scheduler, cache)
    mover.settle()
    manager = scheduler.manager
    crowd = Sequence("crowd", [9] * (manager.num_blocks * BLOCK_SIZE))
    assert manager.allocate_slots(crowd) is not None
    manager.abort(crowd, 0)
    assert manager.get_computed_blocks(Sequence("probe", prompt)).num_tokens == 0


def finish(scheduler, cache, mover):
    while scheduler.has_work:
        step(scheduler, cache)
        mover.settle()


def test_a_loaded_prefix_is_not_computed_and_is_counted_by_tier():
    scheduler, cache, mover = make(20)
    store_only_below(scheduler, cache, mover, PROMPT)
    request = add(scheduler, "a", PROMPT, max_tokens=2)
    assert step(scheduler, cache) == []
    assert (scheduler.running, scheduler.is_waiting_for_loads) == ([request], True)
    mover.begin()
    assert step(scheduler, cache) == []
    (transfer,) = mover.under_way
    mover.end(transfer)
    assert not scheduler.is_waiting_for_loads
    assert step(scheduler, cache) == [("a", 12, 1)]
    finish(scheduler, cache, mover)
    assert (request.num_cached_tokens, request.num_loaded_tokens) == (12, {"host": 12})
    assert request.num_computed_tokens == 2
    assert request.output_token_ids == answer_alone((None, 0), PROMPT, 2)


def test_others_run_while_one_loads():
    scheduler, cache, mover = make(20)
    store_only_below(scheduler, cache, mover, PROMPT)
    add(scheduler, "a", PROMPT)
    add(scheduler, "b", [2] * 6)
    assert step(scheduler, cache) == [("b", 0, 6)]
    assert not scheduler.is_waiting_for_loads
    assert step(scheduler, cache) == [("b", 6, 1)]
    mover.settle()
    assert step(scheduler, cache) == [("a", 12, 1), ("b", 7, 1)]
    finish(scheduler, cache, mover)


def test_a_prompt_behind_one_that_loads_waits_for_the_same_blocks():
    scheduler, cache, mover = make(20)
    store_only_below(scheduler, cache, mover, PROMPT)
    add(scheduler, "a", PROMPT)
    second = add(scheduler, "b", [*PROMPT, 0])
    assert step(scheduler, cache) == []
    assert list(scheduler.waiting) == [second]
    mover.settle()
    assert step(scheduler, cache) == [("a", 12, 1), ("b", 12, 2)]
    finish(scheduler, cache, mover)
    assert (second.num_cached_tokens, second.num_loaded_tokens) == (12, {})


@pytest.mark.parametrize(("num_good", "left"), [(0, {"host": 0}), (1, {"host": 4}), (2, {"host": 8})])
def test_what_a_load_does_not_bring_is_computed(num_good, left):
    scheduler, cache, mover = make(20, [Tier("host", 100, 10, max_transfer_blocks=1)])
    store_only_below(scheduler, cache, mover, PROMPT)
    request = add(scheduler, "a", PROMPT)
    assert step(scheduler, cache) == []
    mover.begin()
    for number, transfer in enumerate(list(mover.under_way)):
        mover.end(transfer, ok=number != num_good)
    assert step(scheduler, cache) == [("a", 4 * num_good, 13 - 4 * num_good)]
    finish(scheduler, cache, mover)
    assert (request.num_cached_tokens, request.num_loaded_tokens) == (4 * num_good, left)
    assert request.output_token_ids == answer_alone((None, 0), PROMPT, 4)


def test_parts_of_two_tiers_are_counted_each():
    small = [Tier("host", 2, 10), Tier("disk", 100, 10)]
    scheduler, cache, mover = make(20, small)
    store_only_below(scheduler, cache, mover, PROMPT)
    request = add(scheduler, "a", PROMPT)
    step(scheduler, cache)
    mover.settle()
    finish(scheduler, cache, mover)
    assert request.num_loaded_tokens == {"host": 8, "disk": 4}


def test_one_that_loads_is_preempted_like_any_other_and_its_blocks_come_back_when_the_transfer_ends():
    scheduler, cache, mover = make(6)
    store_only_below(scheduler, cache, mover, PROMPT)
    old = add(scheduler, "old", [2] * 7, max_tokens=16)
    step(scheduler, cache)
    young = add(scheduler, "young", PROMPT)
    step(scheduler, cache)
    mover.begin()
    loads = [transfer for transfer in mover.under_way if transfer.is_load]
    assert young in scheduler.running and loads
    while young in scheduler.running:
        step(scheduler, cache)
    assert young.num_preemptions == 1
    assert list(scheduler.waiting) == [old, young]  # what the transfer holds is what the old one needs
    assert scheduler.manager.num_free_blocks == 3
    assert scheduler.is_waiting_for_loads
    mover.end(loads[0])
    finish(scheduler, cache, mover)
    assert old.output_token_ids == answer_alone((None, 0), [2] * 7, 16)
    assert young.output_token_ids == answer_alone((None, 0), PROMPT, 4)
    assert scheduler.manager.num_free_blocks == 6


def test_a_pool_that_transfers_hold_is_not_a_stalled_one():
    scheduler, cache, mover = make(4)
    store_only_below(scheduler, cache, mover, PROMPT)
    cancelled = add(scheduler, "a", PROMPT)
    assert step(scheduler, cache) == []
    mover.begin()
    scheduler.cancel(cancelled)
    waits = add(scheduler, "b", [2] * 13)
    assert step(scheduler, cache) == []
    assert list(scheduler.waiting) == [waits]
    assert scheduler.is_waiting_for_loads
    mover.settle()
    assert step(scheduler, cache) == [("b", 0, 13)]
    finish(scheduler, cache, mover)


def test_samples_of_a_prompt_that_loads_are_forked_when_it_is_computed():
    scheduler, cache, mover = make(30)
    store_only_below(scheduler, cache, mover, PROMPT)
    samples = add_samples(scheduler, "a", PROMPT, 3)
    step(scheduler, cache)
    scheduler.cancel(samples[0])
    mover.settle()
    finish(scheduler, cache, mover)
    for number, sample in enumerate(samples[1:], 1):
        assert sample.output_token_ids == answer_alone((None, number), PROMPT, 4)
    assert samples[1].num_loaded_tokens == {"host": 12}


def test_steps_teach_how_fast_computing_is():
    scheduler, cache, mover = make(20, [Tier("host", 100, 1000, bytes_per_second=1e6)])
    store_only_below(scheduler, cache, mover, PROMPT)
    chunks = []
    add(scheduler, "a", [2] * 8)
    chunks = scheduler.schedule()
    scheduler.note_step(chunks, 8e-6)  # a token takes 1 us, a block's load 1 ms
    scheduler.complete(chunks, cache.run(chunks))
    request = add(scheduler, "b", PROMPT)
    assert ("b", 0, 13) in step(scheduler, cache)
    assert request.num_loaded_tokens == {}


# --- any history -----------------------------------------------------------------------------------------------------

TIERS = {
    "host": lambda: [Tier("host", 30, 10)],
    "small": lambda: [Tier("host", 5, 10, max_transfer_blocks=1), Tier("disk", 9, 10, store="computed")],
    "reused": lambda: [Tier("host", 12, 10, store="reused", max_transfer_blocks=2), Tier("disk", 40, 10)],
}


class History:
    """Arrivals, cancels, steps that die, and transfers that end in any order, fail, or take long."""

    def __init__(self, seed, kind, schedule):
        self.seed, self.chooser = seed, random.Random(seed)
        num_blocks = self.chooser.choice([8, 12, 30])
        self.scheduler, self.cache, self.mover = make(
            num_blocks, TIERS[kind](), make_order(schedule), max_num_batched_tokens=8, max_num_seqs=4
        )
        self.requests = []
        self.num_blocks = num_blocks

    def run(self, num_steps):
        for number in range(num_steps):
            with where(self.seed, number, "step"):
                if self.chooser.random() < 0.3:
                    self.arrive(number)
                if self.chooser.random() < 0.03 and self.scheduler.has_work:
                    self.scheduler.cancel(self.chooser.choice(unfinished_requests(self.scheduler)))
                if self.chooser.random() < 0.02:
                    self.scheduler.manager.reset_prefix_cache()
                self.step(dies=self.chooser.random() < 0.05)
                self.move(0.4)
        for _ in range(1000):
            if not self.scheduler.has_work and not self.scheduler.is_moving:
                break
            self.step()
            self.move(0.7)
        else:
            raise AssertionError("it never ends")

    def arrive(self, number):
        family, length = self.chooser.randrange(3), self.chooser.randint(1, 18)
        prompt = [family] * length + [self.chooser.randrange(2) for _ in range(self.chooser.randrange(3))]
        num_tokens = self.chooser.randint(1, 8)
        name, salt = f"r{number}", self.chooser.choice([None, None, "other"])
        num_samples = self.chooser.choice([1, 1, 1, 3])
        request = Sequence((name, 0), prompt, salt=salt)
        samples = add_samples_of(self.scheduler, request, num_samples, num_tokens)
        self.requests += [(sample, prompt, num_tokens) for sample in samples]

    def step(self, *, dies=False):
        chunks = self.scheduler.schedule()
        if dies and chunks:
            self.cache.store(chunks, poison=True)
            self.scheduler.abort(chunks)
        else:
            self.scheduler.complete(chunks, self.cache.run(chunks))
        self.scheduler.manager.check()

    def move(self, share):
        self.mover.begin()
        self.chooser.shuffle(self.mover.under_way)
        for transfer in list(self.mover.under_way):
            if self.chooser.random() < share:
                self.mover.end(transfer, ok=self.chooser.random() < 0.9)


def add_samples_of(scheduler, sequence, num_samples, max_tokens):
    request = Request(sequence, max_tokens)
    name = sequence.sequence_id[0]
    samples = [request, *(request.add_sample((name, number)) for number in range(1, num_samples))]
    scheduler.add(request)
    return samples


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(12))
def test_any_history_ends_with_right_answers_and_nothing_held(seed, kind, schedule):
    history = History(seed, kind, schedule)
    history.run(120)
    for request, prompt, num_tokens in history.requests:
        whole = answer_alone(kind_of(request.sequence), prompt, num_tokens)
        if request.finish_reason == "cancelled":
            assert request.output_token_ids == whole[: request.num_output_tokens]
        else:
            assert (request.finish_reason, request.output_token_ids) == ("length", whole)
        assert sum(request.num_loaded_tokens.values()) <= request.num_cached_tokens <= len(prompt)
        assert all(number >= 0 for number in request.num_loaded_tokens.values())
    assert history.scheduler.manager.num_free_blocks == history.num_blocks


def test_the_histories_load():
    """The histories above do load, and some of their transfers fail."""
    loaded = failed = 0
    for kind in TIERS:
        history = History(3, kind, "fcfs")
        history.run(120)
        loaded += sum(stats.num_loaded_blocks for stats in history.scheduler.manager.tiers)
        failed += sum(stats.num_failed_blocks for stats in history.scheduler.manager.tiers)
    assert loaded > 20
    assert failed > 5


def test_a_request_that_is_sought_lets_others_pass_and_is_admitted_then():
    scheduler, cache, mover = make(40)
    first = add(scheduler, "first", PROMPT, max_tokens=1)
    add(scheduler, "second", PROMPT[:6], max_tokens=1)
    first.is_sought = True
    assert step(scheduler, cache) == [("second", 0, 6)]
    assert step(scheduler, cache) == [] and scheduler.has_work, "and nothing is wrong"
    first.is_sought = False
    assert step(scheduler, cache)[0][0] == "first"
    finish(scheduler, cache, mover)


def test_a_request_that_is_sought_may_be_cancelled_and_may_expire():
    scheduler, cache, mover = make(40)
    first, second = (add(scheduler, name, PROMPT, max_tokens=1) for name in ("first", "second"))
    first.is_sought = second.is_sought = True
    second.deadline = 5.0
    scheduler.cancel(first)
    scheduler.cancel(second, "timeout")
    assert (first.finish_reason, second.finish_reason, scheduler.has_work) == ("cancelled", "timeout", False)
    finish(scheduler, cache, mover)
