"""KV that comes from elsewhere: what a connector brings, in a step or in its own time, and what it fails to bring."""

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from bench.vllm.schedulers import Settings
from integrations.vllm.connector import LoadingWorker, load, make_stand
from integrations.vllm.stand import BLOCK, WHOSE, Stand, request
from integrations.vllm.worker import WrongReadError

PROMPT = list(range(100, 100 + 8 * BLOCK))


@pytest.mark.parametrize("whose", WHOSE)
def test_what_is_loaded_within_a_step_is_computed_and_cached(whose):
    stand = make_stand(whose, names=("first",))
    LoadingWorker(stand, ("first",), 4 * BLOCK)
    stand.add(request("first", PROMPT))
    assert stand.step().num_scheduled_tokens == {"first": 4 * BLOCK}
    assert stand.cached(request("same", PROMPT)) == 7 * BLOCK
    assert stand.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("whose", WHOSE)
def test_what_is_loaded_in_its_own_time_is_cached_when_it_is_there(whose):
    stand = make_stand(whose, names=("first",), is_async=True)
    first = stand.add(request("first", PROMPT, 2))
    assert not stand.step().num_scheduled_tokens
    assert first.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert stand.manager.get_blocks("first").get_block_ids() != ([],)
    stand.add(request("early", PROMPT))
    assert stand.step().num_scheduled_tokens == {"early": 8 * BLOCK}
    assert stand.result.cached["early"] == 0  # nothing of it can be read yet
    assert not stand.scheduler.reset_prefix_cache()
    load(stand, "first", 4 * BLOCK)
    stand.loads.append(KVConnectorOutput(finished_recving={"first"}))
    stand.step()
    stand.step()
    assert first.num_computed_tokens >= 4 * BLOCK
    stand.run_all()
    assert stand.cached(request("late", PROMPT)) == 7 * BLOCK
    assert stand.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("whose", WHOSE)
def test_a_cancelled_load_keeps_nothing(whose):
    stand = make_stand(whose, names=("first",), is_async=True)
    stand.add(request("first", PROMPT))
    stand.step()
    stand.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    stand.loads.append(KVConnectorOutput(finished_recving={"first"}))
    stand.step()
    stand.run_all()
    assert stand.num_free == stand.settings.num_blocks - 1
    assert stand.cached(request("same", PROMPT)) == 0


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("num_valid", [0, 2])
def test_a_load_that_fails_in_its_own_time_is_computed_and_cached_instead(whose, num_valid):
    stand = make_stand(whose, names=("first",), is_async=True)
    first = stand.add(request("first", PROMPT, 2 * BLOCK))
    stand.step()
    (table,) = stand.manager.get_block_ids("first")
    load(stand, "first", num_valid * BLOCK)
    stand.scheduler.connector.names = ()
    stand.loads.append(KVConnectorOutput(finished_recving={"first"}, invalid_block_ids=set(table[num_valid:4])))
    stand.step()
    assert first.num_computed_tokens == num_valid * BLOCK
    assert stand.step().num_scheduled_tokens == {"first": (8 - num_valid) * BLOCK}
    stand.add(request("same", PROMPT))
    stand.step()
    assert stand.result.cached["same"] == 7 * BLOCK
    stand.run_all()
    assert stand.cached(request("later", [*PROMPT, *stand.result.tokens["first"]])) == 9 * BLOCK


@pytest.mark.parametrize("whose", WHOSE)
def test_a_load_that_fails_in_its_own_time_fails_its_request_if_that_is_the_policy(whose):
    stand = make_stand(whose, policy="fail", names=("first",), is_async=True)
    first = stand.add(request("first", PROMPT))
    stand.step()
    (table,) = stand.manager.get_block_ids("first")
    stand.loads.append(KVConnectorOutput(finished_recving={"first"}, invalid_block_ids={table[1]}))
    stand.step()
    assert first.status == RequestStatus.FINISHED_ERROR
    stand.step()
    stand.scheduler.connector.names = ()
    assert stand.num_free == stand.settings.num_blocks - 1
    assert stand.cached(request("same", PROMPT)) == 0


@pytest.mark.parametrize("whose", WHOSE)
def test_a_load_that_fails_within_a_step_fails_its_request_if_that_is_the_policy(whose):
    stand = make_stand(whose, policy="fail", names=("first",))
    LoadingWorker(stand, ("first",), 4 * BLOCK, failing=(2,))
    first = stand.add(request("first", PROMPT))
    stand.step()
    assert first.status == RequestStatus.FINISHED_ERROR
    stand.step()
    assert stand.num_free == stand.settings.num_blocks - 1
    assert stand.cached(request("same", PROMPT)) == 2 * BLOCK


@pytest.mark.parametrize("whose", WHOSE)
def test_a_load_that_fails_within_a_step_is_computed_instead(whose):
    stand = make_stand(whose, names=("first",))
    LoadingWorker(stand, ("first",), 4 * BLOCK, failing=(2,))
    first = stand.add(request("first", PROMPT, 2 * BLOCK))
    stand.step()
    assert first.num_computed_tokens == 2 * BLOCK
    stand.add(request("same", PROMPT))  # joins the step that computes what is missing, and hits what it computes
    stand.step()
    stand.run_all()
    assert stand.result.cached["same"] == 7 * BLOCK
    assert stand.cached(request("later", [*PROMPT, *stand.result.tokens["first"]])) == 9 * BLOCK


def make_chunked_failure(whose: str) -> Stand:
    """Return a stand in which what failed to load is computed in several steps."""
    stand = make_stand(whose, Settings(long_prefill_token_threshold=2 * BLOCK), names=("first",), num_tokens=6 * BLOCK)
    LoadingWorker(stand, ("first",), 6 * BLOCK, failing=(0,))
    stand.add(request("first", PROMPT, 2 * BLOCK))
    stand.step()
    assert stand.requests["first"].num_computed_tokens == 0
    return stand


def test_vllm_hits_what_failed_to_load_and_is_not_computed_yet():
    stand = make_chunked_failure("vLLM's")
    stand.worker.spoil(stand.manager.get_block_ids("first")[0][3:])
    stand.add(request("same", PROMPT))
    with pytest.raises(WrongReadError):
        stand.run_all()


def test_nobody_hits_what_failed_to_load_before_it_is_computed():
    stand = make_chunked_failure("ours")
    stand.worker.spoil(stand.manager.get_block_ids("first")[0][3:])
    stand.add(request("same", PROMPT))
    stand.run_all()
    assert stand.result.cached["same"] == 0
    assert stand.cached(request("later", [*PROMPT, *stand.result.tokens["first"]])) >= 7 * BLOCK


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("is_async", [False, True])
def test_new_blocks_are_zeroed_but_those_that_a_load_fills(whose, is_async):
    stand = make_stand(whose, needs_zeroing=True, names=("first",), is_async=is_async)
    stand.scheduler.connector.get_loaded_kv_cache_group_ids = lambda _request: (0,)
    LoadingWorker(stand, ("first",), 4 * BLOCK)
    stand.add(request("first", PROMPT, 3))
    first = stand.step()
    (table,) = stand.manager.get_block_ids("first")
    if not is_async:
        assert sorted(first.new_block_ids_to_zero) == sorted(table)
        return
    assert len(table) == 4 and not first.new_block_ids_to_zero
    stand.loads.append(KVConnectorOutput(finished_recving={"first"}, invalid_block_ids=set(table[1:3])))
    stand.step()
    load(stand, "first", BLOCK)
    second = stand.step()
    (table,) = stand.manager.get_block_ids("first")
    assert sorted(second.new_block_ids_to_zero) == sorted(table[1:])
