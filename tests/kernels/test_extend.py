"""The kernel for prefill and chunks compared with ragged attention: all shapes, dtypes and options, and fixed bits.

The keys lie in scattered blocks, and all else is NaN. The engine's deterministic mode relies on the fixed bits.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.paged_batch import SUM_ERROR, PagedBatch, head_scales, slots_owned, slots_read, store_fp8

from kvblocks.kernels import extend as extend_module
from kvblocks.kernels.extend import HEAD_COST, extend, share_rows
from kvblocks.kernels.layout import KernelArgumentError
from kvblocks.kernels.table import Launch

RAGGED = [(20, 20), (1, 33), (0, 5), (7, 150), (0, 0), (70, 70), (1, 1)]
"""A prefill, a decode, sequences without rows, a chunk, a prefill of several tiles, and a first token."""


def check(batch, *, sum_error=SUM_ERROR, launch=None, **options):
    output, lse = extend(*batch.tensors, scale=batch.scale, launch=launch, **options)
    assert output.dtype == batch.query.dtype and lse.dtype == torch.float32
    batch.check(output, lse, sum_error=sum_error, **options)


@pytest.mark.every(7)
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(1, 1)], id="first token"),
        pytest.param([(37, 37)], id="prefill"),
        pytest.param([(64, 64), (32, 64), (16, 16)], id="ends at tiles' ends"),
        pytest.param([(5, 21)], id="chunk"),
        pytest.param([(150, 333)], id="chunk of many tiles"),
        pytest.param([(1, 9), (1, 200), (1, 10), (1, 64)], id="decodes"),
        pytest.param([(5, 100), (4, 33), (5, 17), (1, 16)], id="verification"),
        pytest.param(RAGGED, id="ragged"),
        pytest.param([(0, 4), (0, 0)], id="no rows at all"),
        pytest.param([(3, 0), (0, 0), (20, 7), (4, 3)], id="rows before position 0"),
    ],
)
@pytest.mark.parametrize("window", [None, 11])
def test_every_shape_of_batch(device, lengths, window):
    check(PagedBatch(lengths, device=device), window=window)


def test_rows_that_no_sequence_has_see_nothing(device):
    batch = PagedBatch(RAGGED, device=device, num_padding_rows=45)
    output, lse = extend(*batch.tensors, scale=batch.scale)
    batch.check(output, lse)
    assert (output[-45:] == 0).all() and (lse[-45:] == -torch.inf).all()
    check(batch, sinks=batch.sinks)
    check(PagedBatch([], device=device, num_padding_rows=3))


@pytest.mark.every(11)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dtypes_block_sizes_and_head_dims(device, dtype, block_size, head_dim):
    lengths = [(9, 140), (33, 33), (0, 0)]
    check(PagedBatch(lengths, device=device, dtype=dtype, block_size=block_size, head_dim=head_dim))


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 128])
def test_caches_in_e4m3(device, dtype, block_size):
    batch = PagedBatch(RAGGED, device=device, dtype=dtype, block_size=block_size, head_dim=128)
    scales = head_scales(batch)
    check(store_fp8(batch, **scales), **scales)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "heads",
    [
        *((1, 1), (2, 2), (9, 3), (14, 2), (32, 2), (71, 1)),
        pytest.param((130, 1), id="more heads in a group than rows in a tile"),
    ],
)
def test_groups_of_any_size(device, heads):
    check(PagedBatch([(5, 37), (40, 40), (1, 20)], device=device, heads=heads))


@pytest.mark.every(6)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 32, 47, 64, 100, 333, 1 << 30])
def test_windows(device, window):
    check(PagedBatch([(150, 333), (70, 70), (1, 90)], device=device), window=window)


@pytest.mark.every(3)
@pytest.mark.parametrize("softcap", [0.05, 5.0, 50.0])
def test_softcap(device, softcap):
    batch = PagedBatch(RAGGED, device=device)
    check(batch, softcap=softcap)
    batch.query *= 1000  # far beyond where tanh saturates; scores of order 1000 have larger errors
    check(batch, sum_error=1000 * SUM_ERROR, softcap=softcap)


@pytest.mark.every(2)
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(device, window):
    check(PagedBatch(RAGGED, device=device), sinks=torch.tensor([-9.0, 0.0, 1.5, 30.0], device=device), window=window)


def test_all_options_together(device):
    batch = PagedBatch(RAGGED, device=device, dtype=torch.bfloat16, heads=(12, 2), block_size=32, num_padding_rows=2)
    scales = head_scales(batch)
    sinks = batch.sinks.bfloat16()
    check(store_fp8(batch, **scales), window=37, softcap=3.0, sinks=sinks, **scales)


def test_caches_and_queries_of_other_strides(device):
    batch = PagedBatch(RAGGED, device=device, heads_first=True)
    expected = extend(*batch.tensors, scale=batch.scale)
    batch.check(*expected)
    fused = torch.full((*batch.query.shape[:2], 3, batch.query.shape[2]), torch.nan, device=device)
    fused[:, :, 1] = batch.query
    batch.query = fused[:, :, 1]
    # K and V of a block next to each other.
    both = torch.stack([batch.key_cache, batch.value_cache], 1)
    batch.key_cache, batch.value_cache = both[:, 0], both[:, 1]
    assert torch.equal(extend(*batch.tensors, scale=batch.scale)[0], expected[0])


def test_pages_that_are_more_than_2_to_the_31_elements_away(device):
    batch = PagedBatch([(3, 60)], device=device, heads=(1, 1), dtype=torch.float16)
    store_fp8(batch, **head_scales(batch, 1.0, 1.0))
    stride = (1 << 30) + 64
    for name in ("key_cache", "value_cache"):
        cache = getattr(batch, name)
        # Of all this memory only the few blocks are ever touched.
        room = torch.empty(stride * (len(cache) - 1) + cache[0].numel(), dtype=torch.uint8, device=device)
        far = room.view(cache.dtype).as_strided(cache.shape, (stride, *cache.stride()[1:]))
        far.view(torch.uint8).copy_(cache.view(torch.uint8))
        setattr(batch, name, far)
    assert int(batch.block_tables[0, :4].max()) * stride >= 1 << 31
    check(batch)


@pytest.mark.exhaustive
def test_a_context_of_128k(device):
    batch = PagedBatch([(3, 131_072)], device=device, heads=(2, 1), dtype=torch.float16, block_size=128)
    check(batch)
    check(batch, window=1000)


@pytest.mark.every(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter records what is read; a GPU can't")
@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_no_slot_is_read_that_no_sequence_owns(device, monkeypatch, cache):
    batch = PagedBatch(RAGGED, num_padding_rows=9, device=device)
    without_rows = range(2, 3)
    read = slots_read(monkeypatch, getattr(batch, cache), lambda: extend(*batch.tensors, scale=batch.scale))
    batch.seq_lens[without_rows] = 0
    assert read == slots_owned(batch)
    windowed = slots_read(monkeypatch, getattr(batch, cache), lambda: extend(*batch.tensors, scale=1.0, window=5))
    assert windowed < read, "what all rows' windows have left is not read"


@pytest.mark.parametrize("tile", ["EXTEND", "EXTEND_NARROW"])
def test_both_tiles_give_the_same(device, monkeypatch, tile):
    launches = getattr(extend_module, tile)
    monkeypatch.setattr(extend_module, "EXTEND", launches)
    monkeypatch.setattr(extend_module, "EXTEND_NARROW", launches)
    for dtype in (torch.float32, torch.bfloat16):
        check(PagedBatch(RAGGED, device=device, dtype=dtype, head_dim=128), window=50)


def small(num_programs, tile_rows=16):
    """Small tiles, shared among so many programs."""
    return Launch(16, 4, 2, tile_rows=tile_rows, programs_per_sm=num_programs)


@pytest.mark.every(3)
@pytest.mark.parametrize("num_programs", [1, 3, 8, 13])
@pytest.mark.parametrize("window", [None, 37])
def test_work_shared_among_any_number_of_programs(device, num_programs, window):
    batch = PagedBatch([*RAGGED, (3, 0)], device=device, num_padding_rows=9)
    check(batch, launch=small(num_programs), window=window, sinks=batch.sinks)


def test_a_few_rows_on_a_long_context_are_split_evenly(device):
    batch = PagedBatch([(5, 2000), (1, 17)], device=device, heads=(2, 1))
    launch = small(25)
    ends = share_rows(batch.query, batch.key_cache, *batch.tensors[4:], launch=launch).ends
    tiles = [2000 // 16 + HEAD_COST, 2 + HEAD_COST]  # of keys, and what the heads cost
    assert ends.tolist()[:1] == tiles[:1] and ends.tolist()[-1] == sum(tiles)
    check(batch, launch=launch)  # 50 programs of 2 or 3 tiles: more parts than a merge reads at once


def test_shares_of_one_call_serve_others_of_the_same_lengths(device):
    batch = PagedBatch(RAGGED, device=device)
    lengths = (batch.query_start, batch.seq_lens)
    for window, batch_invariant in ((None, False), (20, False), (20, True)):
        options = {"window": window, "batch_invariant": batch_invariant}
        expected, _ = extend(*batch.tensors, scale=batch.scale, **options)
        shares = share_rows(batch.query, batch.key_cache, *lengths, **options)
        for _ in range(2):
            again, _ = extend(*batch.tensors, scale=batch.scale, shares=shares, **options)
            assert torch.equal(again, expected)
    fewer = PagedBatch(RAGGED[:3], device=device)
    with pytest.raises(KernelArgumentError, match=r"shares.ends: expected the shape \(\d+,\), got"):
        extend(*fewer.tensors, scale=batch.scale, shares=shares)


sequences = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 90)).map(lambda pair: (pair[0], max(pair))), min_size=1, max_size=4
)


@settings(max_examples=settings().max_examples // 4)
@given(
    lengths=sequences,
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    block_size=st.sampled_from([16, 64]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.just(4.0),
    has_sinks=st.booleans(),
    num_padding_rows=st.integers(0, 5),
    num_programs=st.integers(0, 6),
    seed=st.integers(0, 1 << 16),
)
def test_small_random_batches(
    device, lengths, heads, block_size, window, softcap, has_sinks, num_padding_rows, num_programs, seed
):
    """num_programs: of small tiles; 0: as the table has it."""
    launch = small(num_programs) if num_programs else None
    shape = {"heads": heads, "block_size": block_size, "num_padding_rows": num_padding_rows}
    batch = PagedBatch(lengths, device=device, seed=seed, **shape)
    check(batch, launch=launch, window=window, softcap=softcap, sinks=batch.sinks if has_sinks else None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start": torch.zeros(3, dtype=torch.int32)}, r"query_start: expected the shape \(2,\), got \(3,\)"),
        ({"query_start": torch.zeros(2, dtype=torch.int64)}, "query_start: expected torch.int32, got torch.int64"),
        ({"query": torch.zeros(5, 4, 64, dtype=torch.float16)}, "query: expected torch.float32, got torch.float16"),
        ({"query": torch.zeros(5, 3, 64)}, "query: expected heads in multiples of 2, got 3"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, r"seq_lens: expected the shape \(1,\), got \(2,\)"),
        ({"window": 0}, "window: expected None or at least 1, got 0"),
        ({"softcap": -1.0}, "softcap: expected None or a number above 0, got -1.0"),
        ({"scale": float("nan")}, "scale: expected a number above 0, got nan"),
    ],
)
def test_wrong_arguments_are_named(device, changes, message):
    batch = PagedBatch([(5, 20)], device=device)
    names = ("query", "key_cache", "value_cache", "block_tables", "query_start", "seq_lens")
    changes = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in changes.items()}
    arguments = {**dict(zip(names, batch.tensors, strict=True)), "scale": batch.scale, **changes}
    with pytest.raises(KernelArgumentError, match=message):
        extend(**arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_call_serves_other_lengths(device):
    batch = PagedBatch([(40, 333), (20, 90)], device=device, dtype=torch.bfloat16, num_padding_rows=4)
    extend(*batch.tensors, scale=batch.scale)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")  # and it never waits
    try:
        with torch.cuda.graph(graph):
            results = extend(*batch.tensors, scale=batch.scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch.query_start.copy_(torch.tensor([0, 1, 60]))
    batch.seq_lens.copy_(torch.tensor([333, 80]))
    graph.replay()
    batch.check(*results)


def rows_of(batch, spans, **options):
    """`extend` on some rows of a batch of one sequence, cut as `spans`, (first row, stop), say: one call for each."""
    query, key_cache, value_cache, tables, _, seq_lens = batch.tensors
    before = int(seq_lens[0]) - len(query)
    parts = []
    for first, stop in spans:
        start = torch.tensor([0, stop - first], dtype=torch.int32, device=query.device)
        length = torch.tensor([before + stop], dtype=torch.int32, device=query.device)
        parts.append(extend(query[first:stop], key_cache, value_cache, tables, start, length, **options)[0])
    return torch.cat(parts)


@pytest.fixture
def dot_by_rows(monkeypatch):
    """A matrix product that gives a row the same bits at every index, as a GPU's does.

    The interpreter's product is numpy's, which doesn't. Without this the test would test the processor's library.
    """
    if not torch.cuda.is_available():

        def matmul(first, second, dtype):
            return (first[:, :, None] * second[None]).sum(1, dtype=dtype)

        monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.every(3)
@pytest.mark.usefixtures("dot_by_rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (21, None), (None, 5.0)])
def test_rows_keep_their_bits_however_a_prompt_is_cut(device, dtype, window, softcap):
    batch = PagedBatch([(75, 110)], device=device, dtype=dtype)
    options = {"scale": batch.scale, "window": window, "softcap": softcap, "batch_invariant": True}
    whole = rows_of(batch, [(0, 75)], **options)
    for cuts in ((0, 1, 2, 40, 75), (0, 13, 74, 75), (0, *range(69, 76))):
        assert torch.equal(rows_of(batch, list(pairwise(cuts)), **options), whole), cuts
    together, lse = extend(*batch.tensors, **options)
    assert torch.equal(together, whole)
    batch.check(together, lse, window=window, softcap=softcap)


@pytest.mark.usefixtures("dot_by_rows")
def test_rows_keep_their_bits_whatever_else_is_in_the_batch(device):
    batch = PagedBatch(RAGGED, device=device)
    query, key_cache, value_cache, tables, query_start, seq_lens = batch.tensors
    together, _ = extend(*batch.tensors, scale=batch.scale, batch_invariant=True)
    for index, (first, stop) in enumerate(pairwise(query_start.tolist())):
        one = slice(index, index + 1)
        start = torch.tensor([0, stop - first], dtype=torch.int32, device=device)
        alone, _ = extend(
            *(query[first:stop], key_cache, value_cache, tables[one], start, seq_lens[one]),
            scale=batch.scale,
            batch_invariant=True,
        )
        assert torch.equal(alone, together[first:stop]), index


@pytest.mark.skipif(torch.cuda.is_available(), reason="recording what is read needs Triton's interpreter")
def test_a_batch_invariant_call_reads_nothing_else(device, monkeypatch):
    batch = PagedBatch(RAGGED, device=device)
    call = partial(extend, *batch.tensors, scale=batch.scale, batch_invariant=True)
    assert slots_read(monkeypatch, batch.value_cache, call) <= slots_owned(batch)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_has_left_the_windows_is_not_read(device, batch_invariant):
    batch = PagedBatch([(3, 100), (1, 64), (10, 10)], device=device)
    options = {"scale": batch.scale, "window": 21, "batch_invariant": batch_invariant}
    expected, _ = extend(*batch.tensors, **options)
    slots = batch.key_cache.flatten(0, 1), batch.value_cache.flatten(0, 1)
    for table, length, first in zip(batch.block_tables.tolist(), (100, 64, 10), (97, 63, 0), strict=True):
        for position in range(max(first - 20, 0)):
            for cache in slots:
                cache[table[position // 16] * 16 + position % 16] = torch.nan
        assert first < length
    assert torch.equal(extend(*batch.tensors, **options)[0], expected)
