"""vLLM's scheduler decides with kvblocks as it does with its own manager, step by step, over random requests.

The comparison is checked too: faults that are put into a manager must be noticed.
"""

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from bench.vllm.schedulers import Settings, our_scheduler, own_scheduler
from integrations.vllm.configurations import CONFIGURATIONS, EAGLE, EAGLE_SMALL, LATENT, PRIORITY_CHUNKED
from integrations.vllm.decisions import decide, first_difference
from integrations.vllm.faults import BLOCK_SIZE, FAULTS, with_fault
from integrations.vllm.mended import MendedScheduler
from integrations.vllm.one_copy import with_one_copy
from integrations.vllm.worker import WrongReadError
from integrations.vllm.workload import Mix, make_asks

NUM_REQUESTS = 200
ALL_SEEDS = 10


def test_there_are_eighteen_configurations():
    assert len({configuration.name for configuration in CONFIGURATIONS}) == len(CONFIGURATIONS) == 18


@pytest.mark.parametrize(
    "configuration", [*CONFIGURATIONS, *EAGLE, *LATENT], ids=lambda configuration: configuration.name
)
def test_all_decisions_are_vllms(configuration, seed):
    settings = configuration.settings
    asks = make_asks(configuration.mix, seed, NUM_REQUESTS)
    theirs = decide(settings, asks)
    ours = decide(settings, asks, our_scheduler(settings))
    assert first_difference(theirs, ours) is None
    # Otherwise the comparison would prove nothing.
    assert (theirs.num_cached > 0) == settings.has_caching
    assert (theirs.num_preempted > 0) == (settings.num_blocks < 200)
    assert settings.num_drafts == 0 or any(row["drafts"] for row in theirs.decided)


@pytest.mark.parametrize("configuration", EAGLE_SMALL, ids=lambda configuration: configuration.name)
def test_where_copies_are_evicted_all_decisions_are_those_of_a_vllm_with_one_copy(configuration, seed):
    """vLLM itself keeps copies that nobody needs; see `one_copy`."""
    settings = configuration.settings
    asks = make_asks(configuration.mix, seed, NUM_REQUESTS)
    theirs = decide(settings, asks, with_one_copy(own_scheduler(settings)))
    assert theirs.num_preempted and theirs.num_cached
    assert first_difference(theirs, decide(settings, asks, our_scheduler(settings))) is None


def test_where_copies_are_evicted_no_less_is_cached_than_by_vllm(num_seeds):
    """What is cached changes who waits, so a single seed may be worse by chance."""
    num_theirs = num_ours = num_different = 0
    for configuration in EAGLE_SMALL:
        for seed in range(num_seeds):
            settings, asks = configuration.settings, make_asks(configuration.mix, seed, NUM_REQUESTS)
            theirs, ours = decide(settings, asks), decide(settings, asks, our_scheduler(settings))
            assert ours.tokens == theirs.tokens
            num_theirs += theirs.num_cached
            num_ours += ours.num_cached
            num_different += first_difference(theirs, ours) is not None
    assert num_different
    assert num_ours >= num_theirs * (1 if num_seeds == ALL_SEEDS else 0.95)  # a few seeds say little


def test_with_priorities_and_chunks_all_decisions_are_those_of_a_mended_vllm(seed):
    """vLLM itself leaves blocks cached that nobody computes; see `mended`. The copies are those of `one_copy`."""
    settings = PRIORITY_CHUNKED.settings
    asks = make_asks(PRIORITY_CHUNKED.mix, seed, NUM_REQUESTS)
    theirs = decide(settings, asks, with_one_copy(MendedScheduler))
    assert theirs.num_preempted
    assert first_difference(theirs, decide(settings, asks, our_scheduler(settings))) is None


def test_vllm_reads_what_nobody_wrote_with_priorities_and_chunks():
    """This is why vLLM is mended for the comparison. If this test fails, vLLM has been fixed, and `mended` can go."""
    settings = PRIORITY_CHUNKED.settings
    wrong = [seed for seed in range(6) if reads_wrong(settings, make_asks(PRIORITY_CHUNKED.mix, seed, NUM_REQUESTS))]
    assert wrong


def reads_wrong(settings, asks):
    try:
        decide(settings, asks)
    except WrongReadError:
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("whose", ["vLLM's", "ours"])
def test_a_fault_is_noticed(fault, whose):
    """The fault is put into vLLM's own manager too. There only the comparison can notice it, not a check of ours."""
    settings = Settings(num_blocks=161, block_size=BLOCK_SIZE)
    asks = make_asks(Mix(400, 100, num_salts=2), 0, 80)
    kind = Scheduler if whose == "vLLM's" else our_scheduler(settings)
    expected = decide(settings, asks)
    assert first_difference(expected, decide(settings, asks, kind)) is None
    try:
        faulty = decide(settings, asks, with_fault(kind, fault))
    except Exception:  # noqa: BLE001  a fault may end anywhere
        return
    assert first_difference(expected, faulty) is not None
