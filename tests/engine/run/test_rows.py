"""How a batch's rows are laid out for a strategy, with dummy rows between them, and cut into chunks.

The deterministic strategies rely on it: a row keeps its bits only at the right place in chunks of the right size.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.run.rows import NATURAL, PACKED16, TILE16, RowLayout, chunks, pad_rows


@st.composite
def batches(draw):
    rows = [
        SequenceRows([draw(st.integers(1, 99)) for _ in range(draw(st.integers(1, 40)))], start, list(range(30)))
        for start in draw(st.lists(st.integers(0, 70), min_size=1, max_size=8))
    ]
    return StepBatch.build(rows, block_size=4)


@pytest.mark.parametrize("strategy", [NATURAL, PACKED16, TILE16], ids=lambda strategy: strategy.name)
@given(batch=batches())
def test_a_layout_holds_the_batch_and_dummies_that_are_not_stored(strategy, batch):
    layout = RowLayout.build(batch, strategy)
    assert torch.equal(layout.take_own(layout.token_ids), batch.token_ids)
    assert torch.equal(layout.take_own(layout.positions), batch.positions)
    assert torch.equal(layout.take_own(layout.slot_mappings[0]), batch.slot_mappings[0])
    assert torch.equal(layout.token_ids[layout.logits_rows], batch.token_ids[batch.logits_rows])
    assert int((layout.slot_mappings[0] >= 0).sum()) == batch.num_tokens
    values = torch.randn(batch.num_tokens, 3)
    spread = layout.put_own(values)
    assert torch.equal(layout.take_own(spread), values)
    assert int(spread.any(-1).sum()) == batch.num_tokens
    assert layout.num_rows % (strategy.row_counts or (1,))[0] == 0


@given(batch=batches())
def test_tile16_puts_a_position_at_its_place_in_no_more_tiles_than_needed(batch):
    layout = RowLayout.build(batch, TILE16)
    own = layout.slot_mappings[0] >= 0
    assert torch.equal(torch.arange(layout.num_rows)[own] % 16, layout.positions[own] % 16)
    assert layout.num_rows == 16 * int((batch.positions % 16).bincount().max())


@pytest.mark.parametrize("counts", [PACKED16.row_counts, PACKED16.head_row_counts, TILE16.row_counts, (1,)])
def test_chunks_cover_all_rows_in_allowed_sizes(counts):
    for num_rows in range(counts[0], 900, counts[0]):
        parts = list(chunks(num_rows, counts))
        assert {part.stop - part.start for part in parts} <= set(counts)
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))


def test_natural_rows_are_one_chunk():
    assert list(chunks(777, NATURAL.row_counts)) == [slice(0, 777)]


def test_padding():
    rows = torch.ones(5, 2)
    assert pad_rows(rows, ()) is rows
    assert torch.equal(pad_rows(rows, (4, 8)), torch.cat([rows, torch.zeros(3, 2)]))
    assert pad_rows(rows, (5,)) is rows
