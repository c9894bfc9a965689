"""Cascade decoding: shared runs are read once, and results equal plain decoding and the oracle.

Sharing may save reads, and must change nothing else.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.paged_batch import SUM_ERROR, PagedBatch, head_scales, slots_owned, slots_read, store_fp8

from kvblocks.kernels import oracle
from kvblocks.kernels.cascade import cascade_decode, own_parts, share_cascade
from kvblocks.kernels.layout import KernelArgumentError
from kvblocks.kernels.runs import SharedRuns
from kvblocks.kernels.table import Launch

# Six requests share three blocks, of which two cohorts share more; two requests share nothing.
NESTED = [([0, 2, 3, 5, 6, 7], 0, 3), ([0, 3], 3, 8), ([2, 5, 7], 3, 4), ([5, 7], 4, 5)]
NESTED_LENGTHS = [140, 33, 65, 300, 0, 81, 48, 80]


def share(lengths, cohorts, *, device, **shape):
    """A batch of decodes whose tables agree where `cohorts` say so, and the runs."""
    batch = PagedBatch([(1, length) for length in lengths], device=device, **shape)
    for members, start, stop in cohorts:
        for member in members[1:]:
            # The blocks that the member held there before belong to nobody now.
            for column in range(start, stop):
                block = int(batch.block_tables[member, column])
                batch.key_cache.view(torch.uint8)[block] = 0x7F if batch.key_cache.element_size() == 1 else 0xFF
                batch.value_cache.view(torch.uint8)[block] = 0x7F if batch.value_cache.element_size() == 1 else 0xFF
            batch.block_tables[member, start:stop] = batch.block_tables[members[0], start:stop]
    return batch, SharedRuns.build(cohorts, len(lengths), device)


def run_cascade(batch, runs, *, num_programs=None, **options):
    """num_programs: share the runs among so many, in tiles of 16 keys."""
    query, key_cache, value_cache, block_tables, _, seq_lens = batch.tensors
    own = own_parts(block_tables, seq_lens, runs, key_cache.shape[1])
    if num_programs is not None:
        launch = Launch(16, 4, 2, tile_rows=16, programs_per_sm=num_programs)
        options["shares"] = share_cascade(query, key_cache, own, runs, launch=launch)
    return cascade_decode(query, key_cache, value_cache, own, block_tables, runs, scale=batch.scale, **options)


def check(batch, runs, *, num_programs=None, **options):
    output, lse = run_cascade(batch, runs, num_programs=num_programs, **options)
    assert output.dtype == batch.query.dtype and lse.dtype == torch.float32
    batch.check(output, lse, **options)


def test_poison_is_where_nobody_owns_a_slot(device):
    batch, _ = share(NESTED_LENGTHS, NESTED, device=device)
    is_clean = ~batch.key_cache.isnan().any(-1).any(-1).flatten()
    assert set(is_clean.nonzero().flatten().tolist()) == slots_owned(batch)


@pytest.mark.every(3)
@pytest.mark.parametrize("num_programs", [None, 1, 3, 13])
def test_nested_cohorts(device, num_programs):
    check(*share(NESTED_LENGTHS, NESTED, device=device), num_programs=num_programs)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("lengths", "cohorts"),
    [
        pytest.param([40, 50], [], id="no cohorts"),
        pytest.param([17], [([0], 0, 1)], id="a cohort of one"),
        pytest.param([64, 64, 64], [([0, 1, 2], 0, 4)], id="everything shared"),
        pytest.param([100, 0, 33], [([0, 2], 0, 2)], id="a row of padding"),
        pytest.param([20] * 40, [(list(range(39, -1, -1)), 0, 1)], id="more members than a tile has rows"),
        pytest.param([20] * 9, [([0, 8], 0, 1), ([3, 1], 0, 1), ([2, 4, 5], 0, 1)], id="cohorts side by side"),
        pytest.param([2000, 1999], [([1, 0], 0, 124)], id="a long run"),
    ],
)
def test_shapes_of_cohorts(device, lengths, cohorts):
    check(*share(lengths, cohorts, device=device))


@pytest.mark.every(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_dtypes_and_block_sizes(device, dtype, block_size):
    lengths = [3 * block_size + 5, 3 * block_size, 2 * block_size + 7]
    cohorts = [([2, 0, 1], 0, 2), ([1, 0], 2, 3)]
    check(*share(lengths, cohorts, device=device, dtype=dtype, block_size=block_size, head_dim=128))


@pytest.mark.every(5)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (16, 2), (71, 1)])
def test_heads(device, head_dim, heads):
    check(*share([50, 40, 35], [([0, 1, 2], 0, 2)], device=device, heads=heads, head_dim=head_dim))


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_in_e4m3(device, dtype):
    batch, runs = share(NESTED_LENGTHS, NESTED, device=device, dtype=dtype)
    scales = head_scales(batch)
    check(store_fp8(batch, **scales), runs, **scales)


def test_softcap_and_sinks(device):
    batch, runs = share(NESTED_LENGTHS, NESTED, device=device)
    check(batch, runs, softcap=3.0)
    check(batch, runs, sinks=batch.sinks)  # counted once, also where nothing is a request's alone


def test_each_level_is_attention_over_its_run_alone(device):
    """By the lse, the logarithm of the sum of all weights. Where a row is in no cohort of a level, there are none."""
    batch, runs = share(NESTED_LENGTHS, NESTED, device=device)
    query, key_cache, value_cache, tables, _, seq_lens = batch.tensors
    own = own_parts(tables, seq_lens, runs, 16)
    shares = share_cascade(query, key_cache, own, runs)
    cascade_decode(query, key_cache, value_cache, own, tables, runs, scale=0.1, shares=shares)
    lses = shares.lse
    assert lses.shape == (3, 8, 4) and lses.dtype == torch.float32
    unseen = torch.ones(lses.shape[:2], dtype=torch.bool)
    for (members, start, stop), level in zip(NESTED, runs.level.tolist(), strict=True):
        for row in members:
            one = (query[row : row + 1], key_cache, value_cache, tables[row : row + 1, start:stop])
            lengths = torch.tensor([0, 1]), torch.tensor([(stop - start) * 16])
            _, expected = oracle.attention(*one, *lengths, scale=0.1)
            torch.testing.assert_close(lses[level, row : row + 1].double().cpu(), expected, rtol=0, atol=SUM_ERROR)
            unseen[level, row] = False
    assert (lses.cpu()[unseen] == -torch.inf).all() and unseen.sum() == 3 * 8 - 13


@pytest.mark.every(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter records what is read; a GPU can't")
@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_no_slot_is_read_that_no_request_owns(device, monkeypatch, cache):
    batch, runs = share(NESTED_LENGTHS, NESTED, device=device)
    read = slots_read(monkeypatch, getattr(batch, cache), lambda: run_cascade(batch, runs, num_programs=3))
    assert read == slots_owned(batch)


def test_own_parts_are_what_lies_behind_the_runs(device):
    batch, runs = share(NESTED_LENGTHS, NESTED, device=device)
    assert runs.num_shared.tolist() == [8, 0, 4, 8, 0, 5, 3, 5]
    own = own_parts(batch.block_tables, batch.seq_lens, runs, 16)
    assert own.seq_lens.tolist() == [12, 33, 1, 172, 0, 1, 0, 0]
    for row, (start, length) in enumerate(zip(runs.num_shared.tolist(), own.seq_lens.tolist(), strict=True)):
        num_blocks = -(-length // 16)
        expected = batch.block_tables[row, start : start + num_blocks]
        assert torch.equal(own.block_tables[row, :num_blocks], expected)
    many = torch.arange(3000, dtype=torch.int32, device=device).reshape(2, 1500)
    few = SharedRuns.build([([0], 0, 1)], 2, device)
    own = own_parts(many, torch.full((2,), 16 * 1500, dtype=torch.int32, device=device), few, 16)
    assert torch.equal(own.block_tables[0, :1499], many[0, 1:]) and torch.equal(own.block_tables[1], many[1])


def test_cohorts_without_members_are_padding(device):
    batch, runs = share(NESTED_LENGTHS, NESTED, device=device)
    nothing = torch.zeros(5, dtype=torch.int32, device=device)
    padded = SharedRuns(
        members=torch.cat([runs.members, nothing + 4]),
        cohort_start=torch.cat([runs.cohort_start, nothing + len(runs.members)]),
        run_start=torch.cat([runs.run_start, nothing]),
        run_stop=torch.cat([runs.run_stop, nothing + 100]),
        level=torch.cat([runs.level, nothing]),
        num_shared=runs.num_shared,
        num_levels=4,
    )
    check(batch, padded)


@st.composite
def forests(draw):
    """Lengths and nested cohorts: each cohort is cut into smaller ones that share more."""
    num_rows = draw(st.integers(1, 10))
    cohorts, depth = [], [0] * num_rows
    open_cohorts = [draw(st.permutations(range(num_rows)))]
    while open_cohorts and len(cohorts) < 6:
        rows = open_cohorts.pop()
        cut = draw(st.integers(0, len(rows)))
        for part in (rows[:cut], rows[cut:]):
            if part and draw(st.booleans()):
                start = depth[part[0]]
                stop = start + draw(st.integers(1, 5))
                cohorts.append((list(part), start, stop))
                for row in part:
                    depth[row] = stop
                open_cohorts.append(part)
    return [16 * depth[row] + draw(st.integers(0, 40)) for row in range(num_rows)], cohorts


@settings(max_examples=settings().max_examples // 4)
@given(forest=forests(), num_programs=st.integers(1, 6), has_sinks=st.booleans(), seed=st.integers(0, 1 << 16))
def test_small_random_forests(device, forest, num_programs, has_sinks, seed):
    batch, runs = share(*forest, device=device, seed=seed)
    check(batch, runs, num_programs=num_programs, sinks=batch.sinks if has_sinks else None)


@pytest.mark.parametrize(
    ("cohorts", "message"),
    [
        ([([0, 4], 0, 1)], "expected different rows below 4 .* got rows .0, 4. and columns 0 to 1"),
        ([([0, -1], 0, 1)], "expected different rows below 4"),
        ([([0, 0], 0, 1)], "expected different rows below 4"),
        ([([], 0, 1)], "expected different rows below 4"),
        ([([0, 1], 0, 0)], "a run of at least one block"),
        ([([0, 1], 1, 2)], "expected row 0's next run to start at 0, got 1"),
        ([([0, 1], 0, 2), ([1, 2], 2, 3)], "expected row 2's next run to start at 0, got 2"),
    ],
)
def test_wrong_cohorts_are_named(cohorts, message):
    with pytest.raises(KernelArgumentError, match=message):
        SharedRuns.build(cohorts, 4)


def test_wrong_arguments_are_named(device):
    batch, runs = share([40, 50], [([0, 1], 0, 2)], device=device)
    batch.query = torch.cat([batch.query, batch.query[:1]])
    with pytest.raises(KernelArgumentError, match="query: expected a row for each of 2 tables, got 3"):
        run_cascade(batch, runs)
    batch, _ = share([40, 50, 60], [([0, 1], 0, 2)], device=device)
    with pytest.raises(KernelArgumentError, match=r"num_shared: expected the shape \(3,\), got \(2,\)"):
        run_cascade(batch, runs)


def test_layers_share_what_they_have_the_same(device):
    batch, runs = share(NESTED_LENGTHS, NESTED, device=device)
    query, key_cache, value_cache, block_tables, _, seq_lens = batch.tensors
    own = own_parts(block_tables, seq_lens, runs, key_cache.shape[1])
    launch = Launch(16, 4, 2, tile_rows=16, programs_per_sm=3)
    shares = share_cascade(query, key_cache, own, runs, launch=launch)
    for layer in range(3):
        batch.query = torch.roll(query, layer, 1) * (1 + layer)
        tensors = (batch.query, key_cache, value_cache, own, block_tables, runs)
        batch.check(*cascade_decode(*tensors, scale=batch.scale, shares=shares))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_call_serves_other_cohorts(device):
    batch, runs = share([100, 90, 80], [([0, 1, 2], 0, 2), ([0, 1], 2, 4)], device=device, dtype=torch.bfloat16)
    run_cascade(batch, runs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")  # and it never waits
    try:
        with torch.cuda.graph(graph):
            results = run_cascade(batch, runs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    fewer = SharedRuns.build([([0, 1], 0, 4)], 3, device)
    runs.members[:2] = fewer.members
    runs.cohort_start.copy_(torch.tensor([0, 2, 2]))
    runs.run_stop[0] = 4
    runs.num_shared.copy_(fewer.num_shared)
    graph.replay()
    batch.check(*results)
