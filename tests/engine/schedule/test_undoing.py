"""Undoing an interrupted call: who waits afterwards, what stays cached, and what the queue is repaired from."""

from math import inf

from engine.fake_cache import BLOCK_SIZE, FakeCache, add, add_samples, answer_alone, make, step

from kvblocks import Sequence
from kvblocks.engine.undoing import undo, written_tokens


def finish(scheduler, cache):
    while scheduler.has_work:
        step(scheduler, cache)
    scheduler.manager.check()
    assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


def num_cached(scheduler, tokens):
    return scheduler.manager.get_computed_blocks(Sequence("probe", [*tokens, 0])).num_tokens


def test_a_request_that_was_preempted_and_started_again_has_written_nothing():
    """All in the interrupted step, and behind a reset, so that it hits nothing."""
    scheduler, cache = make(20, max_num_batched_tokens=8, debug=True), FakeCache(BLOCK_SIZE)
    request = add(scheduler, "a", [1] * 17)
    for _ in range(3):
        step(scheduler, cache)
    written = written_tokens(scheduler)
    scheduler._preempt_youngest()  # noqa: SLF001
    scheduler.manager.reset_prefix_cache()
    assert scheduler.schedule()
    assert num_cached(scheduler, [1] * 8) == 8, "as soon as it has slots"
    undo(scheduler, written)
    assert num_cached(scheduler, [1] * 8) == 0
    finish(scheduler, cache)
    assert request.output_token_ids == answer_alone((None, 0), [1] * 17, 4)


def test_what_the_queue_has_lost_comes_from_the_caller_and_who_has_ended_leaves():
    """The first one was moved from the queue to the running ones, and the second one cancelled."""
    scheduler, cache = make(20, debug=True), FakeCache(BLOCK_SIZE)
    lost, ended, waits = (add(scheduler, str(number), [number] * 5) for number in range(3))
    scheduler.waiting.remove(lost)
    ended.finish_reason = "cancelled"
    undo(scheduler, {}, [lost, ended, waits])
    assert list(scheduler.waiting) == [lost, waits]
    finish(scheduler, cache)
    assert lost.output_token_ids == answer_alone((None, 0), [0] * 5, 4)


def test_who_has_the_last_token_has_ended():
    """`take_token` was interrupted behind the token."""
    scheduler, cache = make(20, debug=True), FakeCache(BLOCK_SIZE)
    stopped, whole, goes_on = (add(scheduler, str(number), [number] * 5) for number in range(3))
    stopped.stop_token_ids = frozenset([7])
    for request, tokens in ((stopped, [7]), (whole, [1, 2, 1, 2]), (goes_on, [1])):
        request.sequence.append_tokens(tokens)
    undo(scheduler, {})
    assert [one.finish_reason for one in (stopped, whole, goes_on)] == ["stop", "length", None]
    assert list(scheduler.waiting) == [goes_on]
    finish(scheduler, cache)


def test_samples_whose_first_one_has_ended_get_its_place():
    scheduler, cache = make(20, debug=True), FakeCache(BLOCK_SIZE)
    first, second, third = add_samples(scheduler, "a", [1] * 5, 3)
    other = add(scheduler, "b", [2] * 5)
    first.finish_reason = "cancelled"
    undo(scheduler, {}, [first, second, third, other])
    assert list(scheduler.waiting) == [second, other]
    assert second.siblings == [third]
    finish(scheduler, cache)
    assert third.finish_reason == "length"


def test_an_interrupted_undo_is_repeated(monkeypatch):
    scheduler, cache = make(20, debug=True), FakeCache(BLOCK_SIZE)
    requests = [add(scheduler, str(number), [number] * 9) for number in range(3)]
    step(scheduler, cache)
    written = written_tokens(scheduler)
    abort, calls = scheduler.manager.abort, []

    def interrupted(*given):
        abort(*given)
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(scheduler.manager, "abort", interrupted)
    for _ in range(2):
        try:
            undo(scheduler, written, requests)
        except KeyboardInterrupt:
            assert scheduler.running
    assert list(scheduler.waiting) == requests
    assert (scheduler.running, scheduler.manager.num_free_blocks, scheduler.next_deadline) == ([], 20, -inf)
    assert num_cached(scheduler, [0] * 8) == 8, "an earlier step wrote it"
    finish(scheduler, cache)
