"""Blocks of a request that ended or was preempted while a step that writes to them is in flight."""

import pytest
from vllm.v1.request import RequestStatus

from bench.vllm.schedulers import Settings
from integrations.vllm.connector import make_stand
from integrations.vllm.stand import BLOCK, WHOSE, request

PROMPT = list(range(100, 100 + 8 * BLOCK))


def make(whose, **settings):
    stand = make_stand(whose, Settings(is_async=True, **settings), role="kv_consumer")
    stand.scheduler.defer_block_free = True  # as with a worker that has two batches at a time
    return stand


@pytest.mark.parametrize("whose", WHOSE)
def test_they_are_free_when_the_step_is_done(whose):
    stand = make(whose)
    stand.add(request("first", PROMPT, 9))
    stand.step()
    stand.step()
    num_free = stand.num_free
    stand.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    assert stand.num_free == num_free < stand.settings.num_blocks - 1
    assert not stand.scheduler.reset_prefix_cache()
    assert stand.manager.get_blocks("first").get_block_ids() == ([],)
    while stand.in_flight:
        stand.step()
    assert stand.num_free == stand.settings.num_blocks - 1
    assert stand.cached(request("same", PROMPT)) == 7 * BLOCK
    assert stand.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("whose", WHOSE)
def test_a_request_may_be_resumed_before_they_are(whose):
    stand = make(whose)
    first = stand.add(request("first", PROMPT, 9))
    stand.step()
    stand.step()
    stand.preempt(first)
    stand.run_all()  # it hits its own blocks, which are held still, and the worker reads them
    assert first.num_preemptions == 1
    assert len(stand.result.tokens["first"]) == 9
    assert stand.num_free == stand.settings.num_blocks - 1


def test_what_was_to_be_computed_by_a_step_that_is_called_off_leaves_the_cache():
    """As under the priority policy, which takes a request out of the step that it is part of already."""
    stand = make("ours", max_num_batched_tokens=4 * BLOCK)
    first = stand.add(request("first", PROMPT, 9))
    stand.step()
    assert stand.in_flight and first.num_computed_tokens == 4 * BLOCK
    stand.manager.allocate_slots(first, 4 * BLOCK)
    stand.preempt(first)
    assert len(stand.manager.manager.holds) == 1
    stand.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    assert stand.cached(request("same", PROMPT)) == 4 * BLOCK
