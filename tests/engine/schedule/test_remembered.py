"""Remembered next tokens: the same prompt again, other prompts, little room, and when they are dropped."""

import pytest
from engine.fake_cache import BLOCK_SIZE, FakeCache, answer_alone, make
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks import KVCacheManager, Sequence
from kvblocks.engine.schedule.remembered import RememberedPrompts, prompt_key
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.undoing import undo
from kvblocks.errors import InvalidArgumentError
from kvblocks.retention.policies.lru import LRU

PROMPT = [0, 1, 2, 0, 1, 1, 2, 0, 2, 1]  # two blocks and a half


def remembering(num_blocks=40, max_blocks=40, max_prompts=8, **options):
    scheduler = make(num_blocks, max_num_batched_tokens=64, debug=True, **options)
    scheduler.remembered = RememberedPrompts(scheduler.manager, max_blocks, max_prompts)
    return scheduler


def add(scheduler, name, prompt, max_tokens=4, *, plain=True, stops=(), **keys):
    request = Request(Sequence(name, prompt, **keys), max_tokens, frozenset(stops))
    if plain:
        request.prompt_key = prompt_key(request.sequence)
    scheduler.add(request)
    return request


def step(scheduler, cache, fails=()):
    """A step: how many tokens each chunk computes, and from where."""
    chunks = scheduler.schedule()
    sampled = [request for chunk in chunks for request in chunk.sampled_requests]
    tokens = [None if r in fails else token for r, token in zip(sampled, cache.run(chunks), strict=True)]
    scheduler.complete(chunks, tokens)
    if scheduler.remembered is not None:
        scheduler.remembered.check()
    return [(chunk.start, chunk.num_tokens) for chunk in chunks]


def answers(scheduler):
    return dict(scheduler.answer())


def finish(scheduler, cache):
    while scheduler.has_work:
        answers(scheduler)
        step(scheduler, cache)


def serve(scheduler, cache, prompt, max_tokens=4, **keys):
    """Answer a prompt alone: its request."""
    request = add(scheduler, object(), prompt, max_tokens, **keys)
    finish(scheduler, cache)
    assert request.output_token_ids == answer_alone((request.sequence.salt, 0), prompt, max_tokens)
    return request


# --- the same prompt again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 8, 10])
def test_a_repeat_has_its_first_token_at_once_and_goes_on_from_there(num_tokens):
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    prompt = PROMPT[:num_tokens]
    serve(scheduler, cache, prompt, 1)  # with more tokens of its own, the cache would have the last block, too
    again = add(scheduler, "again", prompt)
    expected = answer_alone((None, 0), prompt, 4)
    assert answers(scheduler) == {again: expected[0]}
    assert (again.num_cached_tokens, again.num_computed_tokens) == (num_tokens, 0)
    assert answers(scheduler) == {}  # once
    cache.num_copied_blocks = 0
    assert [step(scheduler, cache) for _ in range(3)] == [[(num_tokens + i, 1)] for i in range(3)]
    assert cache.num_copied_blocks == bool(num_tokens % BLOCK_SIZE)
    assert again.output_token_ids == expected
    assert (again.num_cached_tokens, again.num_computed_tokens) == (num_tokens, 3)
    assert scheduler.remembered.num_answers == 1
    assert not scheduler.has_work


@pytest.mark.parametrize("how", ["length", "stop"])
def test_an_answer_of_one_token_needs_no_step(how):
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    (token,) = serve(scheduler, cache, PROMPT, 1).output_token_ids
    num_free = scheduler.manager.num_free_blocks
    again = add(scheduler, "again", PROMPT, 1 if how == "length" else 9, stops=[token])
    assert answers(scheduler) == {again: token}
    assert again.finish_reason == "stop"
    assert again.was_admitted
    assert not scheduler.has_work
    assert scheduler.manager.num_free_blocks == num_free


class Told:
    """LRU that notes which sessions paused."""

    def __init__(self, cache):
        lru = LRU(cache)
        self.free, self.use, self.remove, self.victim = lru.free, lru.use, lru.remove, lru.victim
        self.paused = []

    def begin(self, session, tenant):
        pass

    def end(self, session, tenant):
        pass

    def pause(self, session, tenant, reason):
        self.paused.append((session, reason))


@pytest.mark.parametrize("how", ["length", "a stop string"])
def test_a_session_pauses_however_an_answer_ends_it(how):
    """A stop string ends a request from outside, as `cancel`. The request counts as one that ran all the same."""
    made = []
    manager = KVCacheManager(40, BLOCK_SIZE, eviction=lambda cache: made.append(Told(cache)) or made[-1])
    scheduler = Scheduler(manager, 1000, remembered=RememberedPrompts(manager, 40))
    serve(scheduler, FakeCache(BLOCK_SIZE), PROMPT, 1)
    again = add(scheduler, "again", PROMPT, 1 if how == "length" else 9, session="chat")
    for request in answers(scheduler):
        scheduler.cancel(request, "stop")
    assert not scheduler.has_work
    assert again.was_admitted
    assert made[0].paused == [("chat", "length" if how == "length" else "stop")]


def test_many_repeats_at_once_each_write_to_a_copy():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT)
    repeats = [add(scheduler, number, PROMPT, 2 + number) for number in range(5)]
    assert list(answers(scheduler)) == repeats
    assert step(scheduler, cache) == [(10, 1)] * 5
    finish(scheduler, cache)
    for number, request in enumerate(repeats):
        assert request.output_token_ids == answer_alone((None, 0), PROMPT, 2 + number)
    assert scheduler.remembered.num_answers == 5


def test_the_request_that_is_remembered_leaves_the_kept_tail_alone():
    """The request writes more tokens behind its prompt. The kept fork has only the prompt."""
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    first = add(scheduler, "first", PROMPT, 8)
    step(scheduler, cache)
    again = add(scheduler, "again", PROMPT, 8)
    assert list(answers(scheduler)) == [again]
    finish(scheduler, cache)
    assert first.output_token_ids == again.output_token_ids == answer_alone((None, 0), PROMPT, 8)


def test_an_answer_comes_early_and_the_turn_does_not():
    scheduler, cache = remembering(max_num_seqs=1), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT)
    runs, waits = add(scheduler, "runs", [2] * 9), add(scheduler, "waits", [1] * 6)
    step(scheduler, cache)
    again = add(scheduler, "again", PROMPT)
    assert list(answers(scheduler)) == [again]
    assert (scheduler.running, list(scheduler.waiting)) == ([runs], [waits, again])
    finish(scheduler, cache)
    assert again.output_token_ids == answer_alone((None, 0), PROMPT, 4)


def test_an_answered_request_whose_prompt_is_given_up_computes_it():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT)
    again = add(scheduler, "again", PROMPT)
    assert list(answers(scheduler)) == [again]
    assert scheduler.remembered.give_up()
    assert step(scheduler, cache) == [(8, 3)]
    assert (again.num_cached_tokens, again.num_computed_tokens) == (8, 3)
    finish(scheduler, cache)
    assert again.output_token_ids == answer_alone((None, 0), PROMPT, 4)


def test_what_was_looked_up_before_the_answer_counts_no_more():
    """A server looks a request up when it comes; then its last token had to be computed for its logits."""
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT[:8])
    again = add(scheduler, "again", PROMPT[:8])
    assert scheduler.lookups.find(again).num_tokens == 7
    answers(scheduler)
    scheduler.remembered.clear()
    assert step(scheduler, cache) == [(8, 1)]


def test_a_session_of_its_own_stays_its_own():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT, session="first")
    again = add(scheduler, "again", PROMPT, session="second")
    answers(scheduler)
    step(scheduler, cache)
    assert again.sequence.session == "second"


# --- other prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "keys"),
    [
        (PROMPT[:-1], {}),
        ([*PROMPT, 0], {}),
        ([*PROMPT[:-1], 0], {}),
        (PROMPT, {"salt": "other"}),
        (PROMPT, {"lora": "other"}),
        (PROMPT, {"extra_keys": [(9, 10, "image")]}),
        (PROMPT, {"plain": False}),
    ],
)
def test_nothing_is_remembered_for_others(prompt, keys):
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT)
    other = add(scheduler, "other", prompt, **keys)
    assert answers(scheduler) == {}
    assert step(scheduler, cache)[0][1] >= 1
    assert other.output_token_ids == answer_alone((other.sequence.salt, 0), prompt, 1)
    assert scheduler.remembered.num_answers == 0


def test_what_is_not_plain_is_not_kept():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT, plain=False)
    assert len(scheduler.remembered) == scheduler.remembered.num_blocks == 0


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_prompts_go_first():
    scheduler, cache = remembering(max_prompts=2), FakeCache(BLOCK_SIZE)
    prompts = [[number] * 5 for number in range(3)]
    for which in (0, 1, 0, 2):
        serve(scheduler, cache, prompts[which], 1)
    assert len(scheduler.remembered) == 2
    requests = [add(scheduler, number, prompt) for number, prompt in enumerate(prompts)]
    assert list(answers(scheduler)) == [requests[0], requests[2]]


def test_blocks_are_bounded_and_shared_ones_count_once():
    scheduler, cache = remembering(max_blocks=5), FakeCache(BLOCK_SIZE)
    for end in range(3):  # two blocks for all, and a tail each
        serve(scheduler, cache, [*[0] * 8, end])
    assert (len(scheduler.remembered), scheduler.remembered.num_blocks) == (3, 5)
    serve(scheduler, cache, [1] * 9)
    assert (len(scheduler.remembered), scheduler.remembered.num_blocks) == (1, 3)
    serve(scheduler, cache, [2] * 21)  # six blocks: not kept, and nothing goes for it
    assert (len(scheduler.remembered), scheduler.remembered.num_blocks) == (1, 3)


def test_a_salt_keeps_no_more_than_its_quota():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    scheduler.manager.quotas.set("small", 4)
    serve(scheduler, cache, PROMPT, salt="large")
    for first in range(3):
        serve(scheduler, cache, [first] * 5, salt="small")
    serve(scheduler, cache, [0] * 17, salt="small")  # more than it may ever have
    asked = [add(scheduler, ("small", first), [first] * 5, salt="small") for first in range(3)]
    asked.append(add(scheduler, "large", PROMPT, salt="large"))
    assert set(answers(scheduler)) == set(asked[1:])


def test_the_default_quota_bounds_short_prompts_too():
    """Prompts below a block cache nothing, so no report of quotas names their salt."""
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    scheduler.manager.quotas.set_default(2)
    for first in range(3):
        serve(scheduler, cache, [first, first], salt="a")
    assert (len(scheduler.remembered), scheduler.remembered.num_blocks) == (2, 2)


def test_a_quota_that_becomes_smaller_counts_at_once():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    for first in range(3):
        serve(scheduler, cache, [first] * 5, salt="a")
    assert scheduler.remembered.num_blocks == 6
    scheduler.manager.quotas.set("a", 2)
    answers(scheduler)
    assert (len(scheduler.remembered), scheduler.remembered.num_blocks) == (1, 2)
    assert list(scheduler.manager.sequence(("remembered", 3)).token_ids()) == [2] * 5


def test_an_interruption_leaves_no_fork(monkeypatch):
    """Also not one that was made, but isn't kept yet."""
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, [1] * 5)
    fork = scheduler.manager.fork

    def interrupted(*arguments):
        fork(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler.manager, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve(scheduler, cache, [2] * 5)
    monkeypatch.undo()
    undo(scheduler, {})
    scheduler.remembered.check()
    assert (len(scheduler.remembered), scheduler.manager.num_free_blocks) == (0, 40)
    finish(scheduler, cache)
    serve(scheduler, cache, [1] * 5)
    assert len(scheduler.remembered) == 2


@pytest.mark.parametrize("bounds", [(-1, 1), (1, -1), (1.5, 1), (1, None)])
def test_bounds_are_checked(bounds):
    with pytest.raises(InvalidArgumentError, match="max_"):
        RememberedPrompts(KVCacheManager(4), *bounds)


# --- little room -----------------------------------------------------------------------------------------------------


def test_forks_are_given_up_before_anybody_waits_or_is_preempted():
    scheduler, cache = remembering(10), FakeCache(BLOCK_SIZE)
    for first in range(3):
        serve(scheduler, cache, [first] * 9)
    assert scheduler.manager.num_free_blocks == 1
    large = add(scheduler, "large", [1, 2] * 15, max_tokens=10)  # all ten blocks
    finish(scheduler, cache)
    assert large.num_preemptions == 0
    assert large.output_token_ids == answer_alone((None, 0), [1, 2] * 15, 10)


def test_forks_are_given_up_before_a_pin_that_may_give_way():
    scheduler, cache = remembering(14, pin_budget=1.0), FakeCache(BLOCK_SIZE)
    pin = scheduler.manager.pins.pin([9] * 8, priority=10)
    serve(scheduler, cache, [9] * 9, plain=False)
    for first in range(3):
        serve(scheduler, cache, [first] * 9)
    assert (pin.num_held_blocks, scheduler.manager.num_free_blocks) == (2, 3)
    large = add(scheduler, "large", [7, 8] * 15, max_tokens=15)  # eleven blocks
    step(scheduler, cache)
    assert large.sequence.is_allocated
    finish(scheduler, cache)
    assert (pin.num_held_blocks, large.num_preemptions) == (2, 0)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 18), st.integers(1, 10)), min_size=1, max_size=10),
    num_blocks=st.integers(8, 20),
    limits=st.builds(StepLimits, st.integers(6, 24), st.integers(1, 6), st.none(), st.booleans(), st.just(0.1)),
    bounds=st.tuples(st.integers(1, 20), st.integers(1, 6)),
)
def test_prompts_that_share_nothing_are_scheduled_as_without_it(arrivals, num_blocks, limits, bounds):
    """Each step has the same chunks, admissions and preemptions as without: kept prompts take nothing from requests."""
    histories = []
    for remembers in (False, True):
        manager = KVCacheManager(num_blocks, BLOCK_SIZE)
        kept = RememberedPrompts(manager, *bounds) if remembers else None
        scheduler, cache = Scheduler(manager, 1000, limits, remembered=kept), FakeCache(BLOCK_SIZE)
        waiting, steps = sorted(enumerate(arrivals), key=lambda item: item[1]), []
        while waiting or scheduler.has_work:
            while waiting and (waiting[0][1][0] <= len(steps) or not scheduler.has_work):
                name, (_, num_tokens, max_tokens) = waiting.pop(0)
                add(scheduler, name, [*[100 + name] * num_tokens], max_tokens)
            assert answers(scheduler) == {}
            chunks = scheduler.schedule()
            steps.append([(chunk.request.sequence.sequence_id, chunk.start, chunk.num_tokens) for chunk in chunks])
            scheduler.complete(chunks, cache.run(chunks))
            manager.check()
        if kept is not None:
            kept.check()
            kept.clear()
        assert manager.num_free_blocks == num_blocks
        histories.append(steps)
    assert histories[0] == histories[1]


# --- what ends trust in it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [3, 10])
def test_a_reset_ends_it_all(num_tokens):
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT[:num_tokens])
    scheduler.manager.reset_prefix_cache()
    again = add(scheduler, "again", PROMPT[:num_tokens])
    assert answers(scheduler) == {}
    assert scheduler.manager.num_free_blocks == 40
    assert step(scheduler, cache) == [(0, num_tokens)]
    assert again.num_cached_tokens == 0


def test_a_request_that_runs_over_a_reset_is_not_remembered():
    scheduler, cache = remembering(max_num_chunk_tokens=4), FakeCache(BLOCK_SIZE)
    add(scheduler, "first", PROMPT)
    step(scheduler, cache)
    scheduler.manager.reset_prefix_cache()
    finish(scheduler, cache)
    assert len(scheduler.remembered) == 0


@pytest.mark.parametrize("num_tokens", [3, 10])
def test_forgetting_a_salt_ends_its_own(num_tokens):
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    for salt in ("forgotten", "other"):
        serve(scheduler, cache, PROMPT[:num_tokens], salt=salt)
    scheduler.manager.forget_salt("forgotten")
    asked = [add(scheduler, salt, PROMPT[:num_tokens], salt=salt) for salt in ("forgotten", "other")]
    assert list(answers(scheduler)) == asked[1:]
    assert len(scheduler.remembered) == 1


def test_bad_blocks_end_what_holds_them():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT)
    serve(scheduler, cache, [1] * 9)
    probe = scheduler.manager.get_computed_blocks(Sequence("probe", PROMPT))
    scheduler.manager.evict_blocks([probe.blocks[0].block_id])
    asked = [add(scheduler, str(prompt), prompt) for prompt in (PROMPT, [1] * 9)]
    assert list(answers(scheduler)) == asked[1:]


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_a_step_without_a_token_leaves_nothing(how):
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    first = add(scheduler, "first", PROMPT)
    if how == "dies":
        chunks = scheduler.schedule()
        cache.store(chunks, poison=True)
        scheduler.abort(chunks)
        scheduler.cancel(first)
    else:
        step(scheduler, cache, fails=[first])
    assert len(scheduler.remembered) == 0
    assert scheduler.manager.num_free_blocks == 40
    serve(scheduler, cache, PROMPT)


def test_a_repeat_whose_step_dies_begins_again_from_what_is_kept():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT)
    again = add(scheduler, "again", PROMPT)
    answers(scheduler)
    chunks = scheduler.schedule()
    cache.store(chunks, poison=True)
    scheduler.abort(chunks)
    assert answers(scheduler) == {}
    assert step(scheduler, cache) == [(10, 1)]
    finish(scheduler, cache)
    assert again.output_token_ids == answer_alone((None, 0), PROMPT, 4)


def test_clearing_gives_all_blocks_back():
    scheduler, cache = remembering(), FakeCache(BLOCK_SIZE)
    serve(scheduler, cache, PROMPT)
    assert scheduler.manager.num_free_blocks == 37
    scheduler.remembered.clear()
    assert (scheduler.manager.num_free_blocks, len(scheduler.remembered)) == (40, 0)
