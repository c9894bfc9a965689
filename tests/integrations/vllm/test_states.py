"""Recurrent layers without caching: a request's state is one block, from its first allocation to its end."""

import pytest

from bench.vllm.schedulers import our_scheduler
from integrations.vllm.configurations import STATES
from integrations.vllm.decisions import decide, first_difference
from integrations.vllm.workload import make_asks

NUM_REQUESTS = 200


@pytest.mark.parametrize("configuration", STATES, ids=lambda configuration: configuration.name)
def test_with_recurrent_states_and_without_caching_all_decisions_are_vllms(configuration, seed):
    settings = configuration.settings
    asks = make_asks(configuration.mix, seed, NUM_REQUESTS)
    theirs, ours = decide(settings, asks), decide(settings, asks, our_scheduler(settings))
    assert first_difference(theirs, ours) is None
    assert (theirs.num_preempted > 0) == (settings.num_blocks < 200) and not theirs.num_cached
