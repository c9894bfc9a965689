"""The tables on the device equal freshly built ones, in every step of generated histories."""

import pytest
import torch
from engine.fake_cache import BLOCK_SIZE, FakeCache, add_samples, make, next_token
from engine.small_models import columns
from hypothesis import given, settings
from hypothesis import strategies as st
from model.sight import first_seen

from kvblocks import FullAttention, KVCacheManager, SequenceStateError, SlidingWindow
from kvblocks.engine.attention.batch import SequenceRows, StepBatch, StepShape
from kvblocks.engine.run.resident_table import ResidentTable, TableChanges
from kvblocks.engine.run.runner import ModelRunner
from kvblocks.engine.run.step_upload import DECODE_COLUMNS, StepUploader, UploadedStep
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.errors import InvalidArgumentError

CPU = torch.device("cpu")
ONE_GROUP = (FullAttention(BLOCK_SIZE),)
TENSORS = ("token_ids", "positions", "query_start", "seq_lens", "logits_rows")


def uploader_of(num_blocks=64, *, max_blocks=None, num_rows=2, block_size=BLOCK_SIZE, num_groups=1):
    sizes = (num_blocks, max_blocks or num_blocks, CPU, num_rows)
    return StepUploader([ResidentTable(*sizes) for _ in range(num_groups)], block_size)


def seen_entries(table, batch, group):
    """The table entries that each sequence's rows see. Entries before or behind them don't matter."""
    lengths = batch.seq_lens.tolist()
    starts = (batch.seq_lens - batch.query_start.diff()).tolist()
    firsts = [first_seen(group, start) // BLOCK_SIZE for start in starts]
    ends = [-(-length // BLOCK_SIZE) for length in lengths]
    return [row[first:end] for row, first, end in zip(table.tolist(), firsts, ends, strict=True)]


def check_equal(batch, fresh, groups=ONE_GROUP):
    for name in TENSORS:
        got, expected = getattr(batch, name), getattr(fresh, name)
        assert got.dtype == expected.dtype, name
        assert got.tolist() == expected.tolist(), name
    for got, expected in zip(batch.slot_mappings, fresh.slot_mappings, strict=True):
        assert got.dtype == expected.dtype
        assert got.tolist() == expected.tolist()
    for got, expected, group in zip(batch.block_tables, fresh.block_tables, groups, strict=True):
        assert got.dtype == expected.dtype
        assert seen_entries(got, fresh, group) == seen_entries(expected, fresh, group)
    assert batch.shape == fresh.shape


def check_step(uploader, rows, groups=ONE_GROUP):
    batch = uploader.batch(uploader.upload(columns(rows)))
    check_equal(batch, StepBatch.build(rows, BLOCK_SIZE), groups)
    assert batch.block_tables[0].shape[1] == max(-(-sequence.seq_len // BLOCK_SIZE) for sequence in rows)


def truncate_and_go_on(scheduler, number, num_kept):
    """Replace some of a sequence's generated tokens, as after a rejected draft."""
    able = [request for request in scheduler.running if request.num_output_tokens > 1]
    if able:
        request = able[number % len(able)]
        sequence = request.sequence
        kept = sequence.num_prompt_tokens + num_kept % (request.num_output_tokens - 1)
        try:
            scheduler.manager.truncate(sequence, kept)
        except SequenceStateError:  # what it would see again has left a window
            return
        sequence.append_tokens([next_token("again", sequence.token_ids())])


EVENTS = st.one_of(
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("die")),
    st.tuples(st.just("truncate"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(
        st.just("add"), st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(1, 3), st.integers(1, 12)
    ),
)


HISTORIES = {
    "events": st.lists(EVENTS, min_size=5, max_size=60),
    "num_blocks": st.integers(11, 24),
    "num_rows": st.integers(1, 4),
    "max_num_chunk_tokens": st.sampled_from([None, 5]),
}


@settings(max_examples=100)
@given(**HISTORIES)
def test_resident_tables_equal_fresh_ones(events, num_blocks, num_rows, max_num_chunk_tokens):
    run_history(events, make(num_blocks, max_num_chunk_tokens=max_num_chunk_tokens), num_rows)


@settings(max_examples=100)
@given(**HISTORIES)
def test_so_they_do_with_windows(events, num_blocks, num_rows, max_num_chunk_tokens):
    groups = [SlidingWindow(BLOCK_SIZE, 6), FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 9)]
    limits = StepLimits(16, 8, max_num_chunk_tokens)
    run_history(events, Scheduler(KVCacheManager(2 * num_blocks + 10, groups=groups), 1000, limits), num_rows)


def run_history(events, scheduler, num_rows):
    groups = scheduler.manager.groups
    cache = FakeCache(BLOCK_SIZE)
    uploader = uploader_of(scheduler.manager.num_blocks, num_rows=num_rows, num_groups=len(groups))
    prompts = [[0, 1] * 8, [0, 1] * 8 + [1]]  # so that there is something to step, and to share, at once
    for number, prompt in enumerate(prompts):
        add_samples(scheduler, f"first {number}", prompt, 2, max_tokens=10)
    for number, (kind, *details) in enumerate(events):
        if kind == "add":
            prompt, num_samples, max_tokens = details
            add_samples(scheduler, f"request {number}", prompt, num_samples, max_tokens=max_tokens)
        elif kind == "cancel" and scheduler.running:
            scheduler.cancel(scheduler.running[details[0] % len(scheduler.running)])
        elif kind == "truncate":
            truncate_and_go_on(scheduler, *details)
        elif kind in {"step", "die"} and scheduler.has_work:
            chunks = scheduler.schedule()
            rows = [ModelRunner.rows_of(chunk, len(groups)) for chunk in chunks]
            check_step(uploader, rows, groups)
            if kind == "die":
                scheduler.abort(chunks)
            else:
                cache.store(chunks)
                tokens = [next_token(0, request.sequence.token_ids()) for c in chunks for request in c.sampled_requests]
                scheduler.complete(chunks, tokens)


def decodes(scheduler):
    """Schedule a step, yield its rows, and complete it as if it had been computed."""
    chunks = scheduler.schedule()
    rows = [ModelRunner.rows_of(chunk) for chunk in chunks]
    yield rows
    scheduler.complete(chunks, [0] * sum(len(chunk.sampled_requests) for chunk in chunks))


def test_a_decode_step_uploads_a_few_bytes_and_only_new_blocks():
    scheduler, uploader = make(64), uploader_of()
    for number in range(3):
        add_samples(scheduler, f"request {number}", [number] * 5, 1, max_tokens=30)
    uploaded = []
    for _ in range(14):
        for rows in decodes(scheduler):
            before = uploader.counts.num_bytes, uploader.counts.num_block_ids
            check_step(uploader, rows)
            uploaded.append((uploader.counts.num_bytes - before[0], uploader.counts.num_block_ids - before[1]))
    # The first step has prompts of 5 tokens, in two blocks. Then a token of each: a new block at positions 8, 12, 16.
    assert uploaded[0][1] == 6
    assert uploaded[1:] == [(48 + 24, 3) if position % 4 == 0 else (48, 0) for position in range(5, 18)]
    assert uploader.counts.num_transfers == 14


def test_a_sequence_that_comes_back_is_uploaded_whole_and_others_are_not():
    scheduler, uploader = make(64), uploader_of()
    requests = [add_samples(scheduler, str(number), [number] * 9, 1, max_tokens=30)[0] for number in range(2)]
    for _ in range(4):
        for rows in decodes(scheduler):
            check_step(uploader, rows)
    scheduler.manager.free(requests[1].sequence)
    scheduler.running.remove(requests[1])
    scheduler.waiting.append(requests[1])
    before = uploader.counts.num_block_ids
    for rows in decodes(scheduler):
        check_step(uploader, rows)
    assert uploader.counts.num_block_ids - before == 4, "13 tokens"


def test_a_table_grows_and_gives_rows_to_whoever_comes():
    table = ResidentTable(num_blocks=100, max_blocks=4, device=CPU, num_rows=2)
    lists = [[number] for number in range(5)]
    first = TableChanges()
    assert set(table.assign_rows(lists[:2], [0, 0], [1, 1], first)) == {0, 1}
    again = TableChanges()
    (row,) = table.assign_rows(lists[2:3], [0], [1], again)
    assert row in {0, 1}, "the one that wasn't used for the longest time has to go"
    table.assign_rows(lists[:1], [0], [1], again)
    assert again.block_ids == [2, 0]
    blocks = table.blocks
    table.reserve(2)
    assert table.blocks is blocks
    table.reserve(5)
    assert table.blocks.shape == (5, 4)
    assert set(table.assign_rows(lists, [0] * 5, [1] * 5, TableChanges())) == {0, 1, 2, 3, 4}


def test_other_lists_with_the_same_blocks_have_rows_of_their_own():
    """As after a preemption: a sequence that gets the blocks of another one has another list, and a row of its own."""
    table, one, other = ResidentTable(num_blocks=9, max_blocks=4, device=CPU), [3], [3]
    changes = [TableChanges() for _ in range(4)]
    rows = [
        table.assign_rows([block_ids], [0], [1], change)
        for block_ids, change in zip([one, one, other, one], changes, strict=True)
    ]
    assert rows[0] == rows[1] == rows[3] != rows[2]
    assert [change.block_ids for change in changes] == [[3], [], [3], []]


def test_what_an_upload_that_failed_took_for_granted_is_forgotten(monkeypatch):
    uploader, rows = uploader_of(), [SequenceRows([1, 2, 3], 0, [5]), SequenceRows([1], 4, [6, 7])]
    monkeypatch.setattr(uploader, "_transfer", lambda sections: (_ for _ in ()).throw(RuntimeError("gone")))
    with pytest.raises(RuntimeError, match="gone"):
        uploader.upload(columns(rows))
    monkeypatch.undo()
    check_step(uploader, rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([SequenceRows([1], 0, [64])], "expected block ids from 0 to 63, got 64"),
        ([SequenceRows([1], 0, [3]), SequenceRows([1], 0, [-1])], "expected block ids from 0 to 63, got -1"),
        ([SequenceRows([1], 12, [1, 2, 3, 4])], "expected a context of at most 3 blocks, got 4"),
        ([SequenceRows([1], 8, [1, 2])], "expected a context of at most 2 blocks, got 3"),
    ],
)
def test_wrong_blocks_are_refused_and_nothing_is_uploaded(rows, message):
    uploader = uploader_of(64, max_blocks=3)
    with pytest.raises(InvalidArgumentError, match=message):
        uploader.upload(columns(rows))
    assert uploader.counts.num_transfers == 0
    assert not uploader.tables[0].blocks.any()
    check_step(uploader, [SequenceRows([1], 4, [1, 2])])


def test_too_many_rows_for_int32_are_refused():
    table = ResidentTable(num_blocks=1 << 30, max_blocks=1 << 20, device=CPU, num_rows=1)
    with pytest.raises(InvalidArgumentError, match=r"fewer than 2\*\*31 entries, got 3000 rows of 1048576"):
        table.reserve(3000)


def test_a_padded_decode_step():
    uploader = uploader_of()
    rows = [SequenceRows([7], 5, [3, 1]), SequenceRows([8], 0, [2]), SequenceRows([9], 7, [4, 6], 8)]
    uploaded = uploader.upload_decodes(columns(rows), 4)
    assert uploaded.shape == (DECODE_COLUMNS + 1, 4)
    index = torch.arange(5, dtype=torch.int32)
    batch = uploader.batch(UploadedStep.of_decodes(uploaded, index, StepShape(4, 1, 8)))
    assert batch.token_ids.tolist() == [7, 8, 9, 0]
    assert batch.positions.tolist() == [5, 0, 7, 0]
    assert batch.slot_mappings[0].tolist() == [5, 8, -1, -1]
    assert batch.seq_lens.tolist() == [6, 1, 8, 0]
    assert batch.query_start.tolist() == [0, 1, 2, 3, 4]
    assert batch.logits_rows.tolist() == [0, 1, 2, 3]
    assert batch.shape.num_decodes == 4


def test_more_than_the_buffers_hold():
    uploader = uploader_of(1000)
    for num_tokens in (10, 1500, 3900, 2):
        check_step(uploader, [SequenceRows(list(range(num_tokens)), 0, list(range(-(-num_tokens // BLOCK_SIZE))))])
