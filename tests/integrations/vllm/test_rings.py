"""Layers with a ring buffer: a request has one block for them, from its first allocation to its end."""

from dataclasses import replace

import pytest

from bench.vllm.schedulers import RING, our_scheduler
from integrations.vllm.configurations import RINGS, WINDOWS
from integrations.vllm.decisions import decide, first_difference
from integrations.vllm.stand import BLOCK, Stand, request
from integrations.vllm.workload import make_asks

NUM_REQUESTS = 200


@pytest.mark.parametrize("configuration", RINGS, ids=lambda configuration: configuration.name)
def test_all_decisions_are_vllms(configuration, seed):
    settings = configuration.settings
    asks = make_asks(configuration.mix, seed, NUM_REQUESTS)
    theirs, ours = decide(settings, asks), decide(settings, asks, our_scheduler(settings))
    assert first_difference(theirs, ours) is None
    assert (theirs.num_preempted > 0) == (settings.num_blocks < 200) and theirs.num_cached


def test_beside_windows_more_is_found_than_in_vllm(seed):
    settings = replace(WINDOWS[0].settings, has_ring=True)
    asks = make_asks(WINDOWS[0].mix, seed, NUM_REQUESTS)
    theirs, ours = decide(settings, asks), decide(settings, asks, our_scheduler(settings))
    assert ours.tokens == theirs.tokens and ours.num_cached > theirs.num_cached > 0


def test_a_request_has_one_block_that_is_never_cached():
    stand = Stand(replace(RINGS[0].settings, num_blocks=21))
    stand.cached(request("first", range(5 * BLOCK)))
    runs = stand.add(request("runs", [*range(5 * BLOCK), 1], 40))
    stand.step()
    table, ring = stand.manager.get_block_ids("runs")
    assert len(ring) == 1 and ring[0] not in table and runs.num_computed_tokens
    assert stand.manager.get_block_ids_for_computed_tokens("runs", BLOCK) == ([table[0]], ring)
    assert [record.block_size for record in stand.manager.coordinator.single_type_managers] == [BLOCK, RING]
    stand.run_all()
    assert stand.num_free == 20
