"""Recurrent layers with caching: a state stays in a block where a chunk ended, and vLLM's scheduler ends chunks there.

By default vLLM caches few states, kvblocks all; so kvblocks finds more. If vLLM is told to cache all, all decisions are
equal while nothing is evicted. vLLM 0.32 makes requests wait for a step without need; the comparison mends that.
"""

from dataclasses import replace

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from bench.vllm.schedulers import (
    VLLM_VERSION,
    Settings,
    as_engine,
    make_scheduler,
    make_vllm_config,
    our_scheduler,
)
from integrations.vllm.configurations import CACHED_STATES, CACHED_STATES_SMALL, KEPT_STATES
from integrations.vllm.decisions import decide, first_difference
from integrations.vllm.stand import BLOCK, Stand, request
from integrations.vllm.workload import make_asks

NUM_REQUESTS = 200
MOST_SHARED = 13  # blocks of the longest window
STATES = Settings(num_states=1)
PROMPT = list(range(100, 100 + 5 * BLOCK))


@pytest.fixture(autouse=True)
def _mended(monkeypatch):
    """vLLM 0.33's rule: a state that is cached already isn't one of this step."""
    original = MambaManager._cache_partial_tail_block  # noqa: SLF001  vLLM has no other place for its rule

    def cache(self, request, num_tokens, retention_interval):
        blocks, index = self.req_to_blocks[request.request_id], -(-num_tokens // self.block_size) - 1
        if 0 <= index < len(blocks) and blocks[index].block_hash_num_tokens == num_tokens > 0:
            return None
        return original(self, request, num_tokens, retention_interval=retention_interval)

    if VLLM_VERSION < (0, 33):
        monkeypatch.setattr(MambaManager, "_cache_partial_tail_block", cache)


@pytest.mark.parametrize("configuration", KEPT_STATES, ids=lambda configuration: configuration.name)
def test_all_decisions_are_vllms_while_nothing_is_evicted(configuration, seed):
    """Kernels that save states within chunks save none with kvblocks: it decides as vLLM does for other kernels."""
    settings = configuration.settings
    asks = make_asks(configuration.mix, seed, NUM_REQUESTS)
    theirs = decide(replace(settings, saves_within=False), asks)
    ours = decide(settings, asks, our_scheduler(settings))
    free = [(expected.pop("free"), got.pop("free")) for expected, got in zip(theirs.decided, ours.decided, strict=True)]
    assert first_difference(theirs, ours) is None
    most_more = MOST_SHARED if settings.windows else 0  # see test_windows
    assert all(expected <= got <= expected + most_more for expected, got in free)
    assert theirs.num_cached and not theirs.num_preempted


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CACHED_STATES, ids=lambda configuration: configuration.name)
def test_by_default_no_less_is_found_than_in_vllm(configuration, seed):
    settings = configuration.settings
    asks = make_asks(configuration.mix, seed, NUM_REQUESTS)
    theirs, ours = decide(replace(settings, saves_within=False), asks), decide(settings, asks, our_scheduler(settings))
    assert ours.tokens == theirs.tokens
    assert ours.num_cached >= theirs.num_cached > 0


def test_answers_are_vllms_under_pressure_and_hardly_more_steps_are_needed(num_seeds):
    """What requests find that go on after a preemption isn't in the number of cached tokens, but in that of steps."""
    num_theirs = num_ours = 0
    for configuration in CACHED_STATES_SMALL:
        for seed in range(num_seeds):
            settings, asks = configuration.settings, make_asks(configuration.mix, seed, NUM_REQUESTS)
            theirs, ours = decide(settings, asks), decide(settings, asks, our_scheduler(settings))
            assert ours.tokens == theirs.tokens
            assert theirs.num_preempted and ours.num_cached
            num_theirs += len(theirs.decided)
            num_ours += len(ours.decided)
    assert num_ours <= num_theirs * 1.05


@pytest.mark.parametrize("num_states", [1, 3])
def test_a_chunk_of_many_blocks_takes_one_for_a_state(num_states):
    stand = Stand(replace(STATES, num_states=num_states, num_blocks=101))
    stand.add(request("runs", [*PROMPT, 1], 9))
    stand.step()
    table, *states = stand.manager.get_block_ids("runs")
    assert len(table) == 5 and [ids[:4] for ids in states] == [[0] * 4] * num_states
    assert stand.num_free == 100 - 5 - num_states
    stand.step()
    assert [[block_id > 0 for block_id in ids] for ids in stand.manager.get_block_ids("runs")[1:]] == [
        [False] * 4 + [True] * 2
    ] * num_states
    stand.run_all()
    assert stand.num_free == 100
    assert stand.cached(request("same", [*PROMPT, 1])) == 5 * BLOCK


def test_nobody_starts_from_a_state_of_the_same_step():
    stand = Stand(STATES)
    stand.add(request("first", [*PROMPT, 1], 9))
    stand.add(request("second", [*PROMPT, 2], 9))
    assert set(stand.step().num_scheduled_tokens) == {"first"}
    assert set(stand.step().num_scheduled_tokens) == {"first", "second"}
    stand.run_all()
    assert stand.result.cached == {"first": 0, "second": 5 * BLOCK}


def test_a_state_is_saved_where_prompts_part():
    stand = Stand(STATES)
    stand.cached(request("first", [*PROMPT, 1]))
    parted = [*PROMPT[: 2 * BLOCK + 3], *[1] * 2 * BLOCK]
    assert stand.cached(request("parts", parted)) == 0
    assert stand.cached(request("parts, too", [*PROMPT[: 2 * BLOCK + 5], *[2] * 2 * BLOCK])) == 2 * BLOCK


def test_answers_are_found_by_the_next_turn():
    stand = Stand(STATES)
    stand.cached(request("first", [*PROMPT, 1], 2 * BLOCK + 3))
    turn = [*PROMPT, 1, *stand.result.tokens["first"], 5, 6]
    assert stand.cached(request("next", turn)) == 7 * BLOCK


def test_only_blocks_of_attention_are_zeroed():
    stand = Stand(STATES)
    stand.add(request("runs", [*PROMPT, 1], 9))
    output = stand.step()
    assert sorted(output.new_block_ids_to_zero) == sorted(stand.manager.get_block_ids("runs")[0])


def test_a_model_of_states_alone_is_served():
    """As Mamba. A hit has its states, and no virtual blocks, which stand in for full attention."""
    config = make_vllm_config(STATES)
    spec = MambaSpec(block_size=BLOCK, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align")
    scheduler = make_scheduler(STATES, our_scheduler(STATES), config=config, groups=as_engine(config, [spec]))
    scheduler.add_request(request("first", [*PROMPT, 1]))
    assert scheduler.schedule().num_scheduled_tokens == {"first": 5 * BLOCK}
    manager = scheduler.kv_cache_manager
    (ids,) = manager.get_block_ids("first")
    assert ids[:4] == [0] * 4 and ids[4]
    scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    blocks, number, _ = manager.get_computed_blocks(request("same", [*PROMPT, 1]))
    assert number == 5 * BLOCK and blocks.get_block_ids() == (ids,)
