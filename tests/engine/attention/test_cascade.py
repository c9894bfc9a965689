"""Which shared runs a decode step gets: those cohorts of the manager's that save enough. They are uploaded once."""

from itertools import pairwise

import torch

from kvblocks import KVCacheManager, Sequence
from kvblocks.engine.attention.cascade import CascadePlanner, RunBucket
from kvblocks.kernels.table import CASCADE, CascadeThreshold, read_bytes_per_microsecond

BLOCK_SIZE = 4
ANY_COHORT = CascadeThreshold(min_run_tokens=1, min_saved_share=0.0)


class Batch:
    """Sequences that begin with the same 16 tokens, two of them with 8 more, and then their own."""

    def __init__(self, num_seqs=4):
        self.manager = KVCacheManager(100, BLOCK_SIZE)
        self.sequences = []
        for number in range(num_seqs):
            middle = [9] * 8 if number < 2 else []
            self.add([7] * 16 + middle + [100 + number] * 3)

    def add(self, tokens):
        sequence = Sequence(len(self.sequences), tokens)
        self.manager.allocate_slots(sequence, hit=self.manager.get_computed_blocks(sequence))
        self.sequences.append(sequence)
        return sequence

    def planner(self, threshold=ANY_COHORT):
        return CascadePlanner(self.manager.inspect.shared_prefixes, BLOCK_SIZE, torch.device("cpu"), threshold)


def stretches(runs):
    """(members, first block, block after the last, level) of each cohort."""
    bounds = runs.cohort_start.tolist()
    members = [runs.members.tolist()[start:stop] for start, stop in pairwise(bounds)]
    return list(zip(members, runs.run_start.tolist(), runs.run_stop.tolist(), runs.level.tolist(), strict=True))


def test_cohorts_become_runs():
    batch = Batch()
    runs = batch.planner().plan(batch.sequences)
    assert stretches(runs) == [([0, 1, 2, 3], 0, 4, 0), ([0, 1], 4, 6, 1)]
    assert runs.num_shared.tolist() == [6, 6, 4, 4]
    assert runs.num_levels == 2
    assert all(tensor.dtype == torch.int32 for tensor in (runs.members, runs.level, runs.num_shared))
    in_another_order = batch.planner().plan([batch.sequences[number] for number in (2, 0, 1)])
    assert stretches(in_another_order) == [([0, 1, 2], 0, 4, 0), ([1, 2], 4, 6, 1)]


def test_what_is_not_worth_it_is_left_alone():
    batch = Batch()
    num_tokens = 2 * 27 + 2 * 19
    num_saved = 3 * 16 + 8
    enough, too_much = num_saved / num_tokens - 0.001, num_saved / num_tokens + 0.001
    assert batch.planner(CascadeThreshold(1, enough)).plan(batch.sequences) is not None
    assert batch.planner(CascadeThreshold(1, too_much)).plan(batch.sequences) is None
    # Runs of at least 9 tokens, which is 3 blocks: only the outer one.
    assert stretches(batch.planner(CascadeThreshold(9, 0.0)).plan(batch.sequences)) == [([0, 1, 2, 3], 0, 4, 0)]
    # Runs of at least 17 tokens: only the two that share 24, from block 0 on, since the outer cohort is dropped.
    assert stretches(batch.planner(CascadeThreshold(17, 0.0)).plan(batch.sequences)) == [([0, 1], 0, 6, 0)]
    assert batch.planner(CascadeThreshold(25, 0.0)).plan(batch.sequences) is None
    assert batch.planner(CASCADE).plan(batch.sequences) is None
    assert batch.planner().plan(batch.sequences[:1]) is None


def test_what_is_saved_must_be_worth_what_launches_cost():
    batch, room = Batch(), RunBucket.of(4)
    num_saved = 3 * 16 + 8
    token_bytes = 10 * read_bytes_per_microsecond(torch.device("cpu"))  # a token is read in 10 microseconds

    def plan(captured_tokens, eager_tokens, bucket):
        threshold = CascadeThreshold(1, 0.0, 10.0 * captured_tokens, 10.0 * eager_tokens)
        planner = CascadePlanner(batch.manager.inspect.shared_prefixes, BLOCK_SIZE, torch.device("cpu"), threshold)
        assert planner.plan(batch.sequences, bucket) is not None, "without a token's bytes costs don't count"
        planner = CascadePlanner(
            batch.manager.inspect.shared_prefixes, BLOCK_SIZE, torch.device("cpu"), threshold, token_bytes=token_bytes
        )
        return planner.plan(batch.sequences, bucket), planner.packed

    for bucket in (None, room):  # all eager, all captured
        assert plan(num_saved - 1, 1000, bucket)[0] is not None
        assert plan(num_saved + 1, 0, bucket) == (None, None)
    too_small = RunBucket(4, 1, 16)  # eager, where the step without it would be captured
    runs, packed = plan(1000, num_saved - 1, too_small)
    assert stretches(runs) == [([0, 1, 2, 3], 0, 4, 0), ([0, 1], 4, 6, 1)] and packed is None
    assert plan(0, num_saved + 1, too_small) == (None, None)
    runs, packed = plan(0, 0, room)
    assert packed is not None and runs.num_cohorts == 4 and runs.num_shared.tolist() == [6, 6, 4, 4]


def test_runs_stay_while_the_batch_does():
    batch = Batch()
    planner = batch.planner()
    runs = planner.plan(batch.sequences)
    for _ in range(10):
        for sequence in batch.sequences:
            batch.manager.append_slots(sequence, [5])
        assert planner.plan(batch.sequences) is runs
    assert planner.num_transfers == 1
    fewer = planner.plan(batch.sequences[1:])
    assert stretches(fewer) == [([0, 1, 2], 0, 4, 0)]
    assert planner.num_transfers == 2
    back = planner.plan(batch.sequences)
    assert stretches(back) == stretches(runs)
    assert planner.num_transfers == 3


def test_a_sequence_that_was_given_other_blocks_is_looked_at_again():
    batch = Batch(2)
    planner = batch.planner()
    assert stretches(planner.plan(batch.sequences)) == [([0, 1], 0, 6, 0)]
    batch.manager.reset_prefix_cache()
    batch.manager.free(batch.sequences[1])
    batch.manager.allocate_slots(batch.sequences[1])  # computed anew, in blocks of its own
    assert planner.plan(batch.sequences) is None


def test_a_sequence_that_lost_shared_tokens_is_looked_at_again():
    batch = Batch(1)
    first = batch.sequences[0]
    batch.manager.append_slots(first, [5] * 14)  # 41 tokens
    both = [first, batch.manager.fork(first, "fork")]
    planner = batch.planner()
    assert stretches(planner.plan(both)) == [([0, 1], 0, 10, 0)]
    batch.manager.truncate(first, 33)
    assert stretches(planner.plan(both)) == [([0, 1], 0, 8, 0)]
