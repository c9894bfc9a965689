"""Of equal blocks kvblocks keeps at most one that is free, vLLM all. What that changes, in the same order of calls.

Under schedulers of their own the two part at the first hit that differs: another request waits or is preempted, and all
that follows is different, for better or worse. So vLLM's calls are recorded here, and made on both managers.
"""

from bench.vllm.schedulers import our_scheduler
from integrations.vllm.configurations import PRIORITY_CHUNKED
from integrations.vllm.mended import MendedScheduler
from integrations.vllm.same_calls import Replay, record
from integrations.vllm.workload import make_asks

NUM_REQUESTS = 200
ALL_SEEDS = 10


def hits_a_copy(manager, request_id):
    """Whether a request holds a block alone though another request holds an equal one."""
    (block_ids,) = manager.get_block_ids(request_id)
    blocks = manager.manager.blocks
    owned = [block.block_hash for block in blocks if block.ref_cnt and block.block_hash is not None]
    alone = [blocks[block_id - 1] for block_id in block_ids if blocks[block_id - 1].ref_cnt == 1]
    return any(owned.count(block.block_hash) > 1 for block in alone if block.block_hash is not None)


def compare(seed):
    """Return the tokens found by vLLM's manager and by ours, and whether ours had fewer free blocks at any time."""
    settings, asks = PRIORITY_CHUNKED.settings, make_asks(PRIORITY_CHUNKED.mix, seed, NUM_REQUESTS)
    calls, answers = record(MendedScheduler, settings, asks)
    theirs = Replay(MendedScheduler, settings, asks, mends=True)
    ours = Replay(our_scheduler(settings), settings, asks, mends=False)
    num_theirs = num_ours = num_lookups = 0
    is_behind = False
    for call in calls:
        expected, got = (replay.make(call, answers[call.request_id]) for replay in (theirs, ours))
        if expected is not None and got is not None:
            assert is_behind or got >= expected, f"{call}: expected at least {expected} cached tokens, got {got}"
            num_theirs, num_ours, num_lookups = num_theirs + expected, num_ours + got, num_lookups + 1
        if not is_behind and ours.num_free < theirs.num_free:
            # vLLM hit the block that is owned: it had evicted the free one, which it would have hit.
            assert got is not None and got >= expected and hits_a_copy(ours.manager, call.request_id)
            is_behind = True
    assert num_lookups > NUM_REQUESTS and theirs.num_short == 0
    return num_theirs, num_ours, is_behind


def test_no_lookup_finds_less_as_long_as_as_many_blocks_are_free(num_seeds):
    """Fewer are free only after a hit of a block that is free, while another request has an equal one.

    vLLM hits the free one, too, unless it has evicted that one for the sake of copies. In sum no less is found.
    """
    found = [compare(seed) for seed in range(num_seeds)]
    num_theirs, num_ours = (sum(numbers) for numbers in list(zip(*found, strict=True))[:2])
    assert num_ours >= num_theirs * (1 if num_seeds == ALL_SEEDS else 0.99)
    assert not all(is_behind for *_, is_behind in found)
