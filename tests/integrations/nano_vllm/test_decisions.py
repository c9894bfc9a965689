"""What nano-vllm's scheduler decides with kvblocks is what it decides with a manager of its own."""

import pytest

from integrations.nano_vllm.driver import Settings, decide, first_difference, make_asks
from integrations.nano_vllm.faults import FAULTS
from integrations.nano_vllm.mended import mend
from kvblocks import KVBlocksError
from kvblocks.integrations.nano_vllm import KVBlocksBlockManager, KVBlocksEarlyBlockManager
from kvblocks.verify import VerificationError

SEEDS = range(5)
AMPLE, SCARCE, TIGHT = 400, 40, 26  # blocks: nothing is evicted; a third preempted; about as many again computed anew


def own_manager(nano):
    """nano-vllm's, which finds the first of equal blocks and takes empty blocks first."""
    return mend(nano.BlockManager) if nano.is_real else nano.BlockManager


@pytest.mark.parametrize("num_blocks", [AMPLE, SCARCE, TIGHT])
def test_all_decisions_and_tables_are_its_own(nano, num_blocks):
    settings = Settings(num_blocks)
    num_preempted = 0
    for seed in SEEDS:
        asks = make_asks(seed)
        theirs = decide(nano, settings, asks, own_manager(nano))
        ours = decide(nano, settings, asks, KVBlocksBlockManager)
        assert first_difference(theirs, ours) is None
        assert theirs.tables == ours.tables
        assert theirs.answers == ours.answers
        assert len(ours.answers) == len(asks)
        assert ours.num_found
        num_preempted += ours.num_preempted
    assert (num_preempted > 0) == (num_blocks != AMPLE)


def test_where_nothing_is_evicted_it_needs_no_mending(nano):
    for seed in SEEDS:
        asks = make_asks(seed)
        theirs = decide(nano, Settings(AMPLE), asks, nano.BlockManager)
        assert first_difference(theirs, decide(nano, Settings(AMPLE), asks, KVBlocksBlockManager)) is None


def test_where_blocks_are_evicted_fewer_tokens_are_computed_than_with_nano_vllms_own(nano):
    theirs = ours = 0
    for seed in SEEDS:
        asks = make_asks(seed)
        theirs += decide(nano, Settings(SCARCE), asks, nano.BlockManager).num_computed
        ours += decide(nano, Settings(SCARCE), asks, KVBlocksBlockManager).num_computed
    assert ours < theirs or not nano.is_real  # the stand-in's manager decides as kvblocks does


@pytest.mark.parametrize("num_blocks", [AMPLE, SCARCE, TIGHT])
def test_early_caching_reads_nothing_that_its_step_does_not_write(nano, num_blocks):
    """The simulated model writes all of a step, then reads: as each of nano-vllm's layers does."""
    late_tokens = early_tokens = 0
    for seed in SEEDS:
        asks = make_asks(seed)
        late = decide(nano, Settings(num_blocks), asks, KVBlocksBlockManager)
        early = decide(nano, Settings(num_blocks, reads_first=False), asks, KVBlocksEarlyBlockManager)
        assert early.answers == late.answers
        late_tokens += late.num_computed
        early_tokens += early.num_computed
    assert early_tokens < late_tokens


def test_early_caching_is_wrong_for_a_model_that_reads_before_it_writes(nano):
    """Shows that the test above can fail."""
    asks = make_asks(0)
    with pytest.raises(VerificationError):
        decide(nano, Settings(AMPLE), asks, KVBlocksEarlyBlockManager)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(nano, fault):
    settings = Settings(SCARCE)
    for seed in SEEDS:
        asks = make_asks(seed)
        theirs = decide(nano, settings, asks, own_manager(nano))
        try:
            ours = decide(nano, settings, asks, fault)
        except (AssertionError, KVBlocksError):  # VerificationError is one of the latter
            return
        if first_difference(theirs, ours) is not None:
            return
    pytest.fail("nobody noticed")
