"""A step's rows as tensors: token ids, positions, slots and block tables, padded, with their dtypes.

Every attention backend reads these tensors. A wrong slot would overwrite another sequence's KV.
"""

import pytest
import torch

from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.errors import InvalidArgumentError


def test_a_ragged_batch_as_tensors():
    batch = StepBatch.build(
        [
            SequenceRows([10, 11, 12, 13, 14], start=0, block_ids=[7, 3]),
            SequenceRows([20], start=9, block_ids=[1, 0, 5, 6]),
            SequenceRows([30, 31], start=3, block_ids=[2, 9], wants_logits=False),
        ],
        block_size=4,
    )
    assert batch.num_tokens == 8
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 30, 31]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 9, 3, 4]
    assert batch.slot_mappings[0].tolist() == [28, 29, 30, 31, 12, 21, 11, 36]
    # Cut to the blocks that the context fills, then filled up with zeros.
    assert batch.block_tables[0].tolist() == [[7, 3, 0], [1, 0, 5], [2, 9, 0]]
    assert batch.query_start.tolist() == [0, 5, 6, 8]
    assert batch.seq_lens.tolist() == [5, 10, 5]
    assert batch.logits_rows.tolist() == [4, 5]


def test_dtypes():
    batch = StepBatch.build([SequenceRows([1], start=0, block_ids=[0])], block_size=16)
    for tensor in (batch.token_ids, batch.positions, *batch.slot_mappings, batch.logits_rows):
        assert tensor.dtype == torch.int64
    for tensor in (*batch.block_tables, batch.query_start, batch.seq_lens):
        assert tensor.dtype == torch.int32


def test_each_group_has_tables_and_slots():
    rows = [
        SequenceRows([10, 11, 12], start=6, block_ids=[7, 3, 2], num_readonly_tokens=7, other_block_ids=[[0, 5, 9]]),
        SequenceRows([20], start=0, block_ids=[1], other_block_ids=[[4]]),
    ]
    batch = StepBatch.build(rows, block_size=4)
    assert [table.tolist() for table in batch.block_tables] == [[[7, 3, 2], [1, 0, 0]], [[0, 5, 9], [4, 0, 0]]]
    assert [slots.tolist() for slots in batch.slot_mappings] == [[-1, 15, 8, 4], [-1, 23, 36, 16]]


def test_positions_in_shared_blocks_have_no_slot():
    rows = SequenceRows([1, 2, 3], start=6, block_ids=[4, 5, 6], num_readonly_tokens=8)
    assert StepBatch.build([rows], block_size=4).slot_mappings[0].tolist() == [-1, -1, 24]


def test_a_full_hit_computes_one_token_and_stores_nothing():
    rows = SequenceRows([1], start=7, block_ids=[4, 5], num_readonly_tokens=8)
    batch = StepBatch.build([rows], block_size=4)
    assert batch.slot_mappings[0].tolist() == [-1]
    assert batch.seq_lens.tolist() == [8]


def test_no_logits_wanted():
    rows = SequenceRows([1, 2], start=0, block_ids=[0], wants_logits=False)
    assert StepBatch.build([rows], block_size=4).logits_rows.shape == (0,)


def test_a_sequence_may_have_no_rows():
    idle = SequenceRows([], start=5, block_ids=[1, 2], wants_logits=False)
    batch = StepBatch.build([idle, SequenceRows([9], start=0, block_ids=[0])], block_size=4)
    assert batch.query_start.tolist() == [0, 0, 1]
    assert batch.seq_lens.tolist() == [5, 1]
    assert batch.logits_rows.tolist() == [0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "step of at least one token, got 0 sequences"),
        ([SequenceRows([], 3, [0], wants_logits=False)], "step of at least one token, got 1 sequences"),
        ([SequenceRows([], 3, [0])], "at least one token where logits are wanted"),
        ([SequenceRows([1], -1, [0])], "start of at least 0, got -1"),
        ([SequenceRows([1], 0, [0], num_readonly_tokens=-2)], "num_readonly_tokens of at least 0, got -2"),
        ([SequenceRows([1, 2], 7, [0, 1])], "blocks for 9 tokens .* got 2 blocks of 4, room for 8"),
        ([SequenceRows([1], 0, [-1])], "block ids of at least 0, got -1"),
        ([SequenceRows([1, 2], 3, [0, 1], other_block_ids=[[0]])], "got 1 blocks of 4, room for 4"),
        ([SequenceRows([1], 0, [0], other_block_ids=[[-3]])], "block ids of at least 0, got -3"),
        (
            [SequenceRows([1], 0, [0]), SequenceRows([1], 0, [0], other_block_ids=[[1]])],
            r"block tables, got .0, 1. beside the first",
        ),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(rows, message):
    with pytest.raises(InvalidArgumentError, match=message):
        StepBatch.build(rows, block_size=4)


def test_a_block_size_of_zero_is_refused():
    with pytest.raises(InvalidArgumentError, match="block_size of at least 1, got 0"):
        StepBatch.build([SequenceRows([1], 0, [0])], block_size=0)
