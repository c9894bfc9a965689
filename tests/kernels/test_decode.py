"""The decode kernel compared with the oracle: dtypes, heads, windows, ragged batches and any split of the work.

The keys lie in scattered blocks, and all else is NaN. So a read of any other slot shows in the result.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.kernels import decode as decode_module
from kvblocks.kernels import oracle
from kvblocks.kernels.decode import decode
from kvblocks.kernels.layout import FP8, KernelArgumentError
from kvblocks.kernels.table import Launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPLITS = pytest.mark.parametrize("split_keys", [None, 24])
# Small tiles, so that short sequences have several, on fewer programs than there are heads.
SMALL = Launch(tile_keys=16, num_warps=4, num_stages=2, programs_per_sm=3)


@pytest.fixture(autouse=True)
def memory_begins_as_nan():
    """What torch.empty returns is NaN, so that a part or an output that nobody wrote is noticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Case:
    """Sequences of some lengths, whose keys lie in scattered blocks of caches that hold NaN everywhere else.

    Slots that a window has left are NaN too, and a table's entries before the window or after the sequence name a block
    of NaN.
    """

    def __init__(self, lengths, *, heads=(4, 2), head_dim=64, block_size=16, dtype=torch.float32, **options):
        """heads: of queries, of K and V. options: those of `AttentionOptions`, `kv_dtype`, `seed`."""
        generator = torch.Generator().manual_seed(options.pop("seed", 0))
        kv_dtype = options.pop("kv_dtype", dtype)
        self.options = {"scale": head_dim**-0.5, **options}
        window = options.get("window")
        num_heads, num_kv_heads = heads
        firsts = [0 if window is None else max(0, length - window) for length in lengths]
        counts = [-(-length // block_size) for length in lengths]
        free = torch.randperm(sum(counts) + 2, generator=generator, dtype=torch.int32).tolist()
        shape = (len(free), block_size, num_kv_heads, head_dim)
        caches = [torch.full(shape, torch.nan).to(kv_dtype) for _ in range(2)]
        self.block_tables = torch.full((len(lengths), max([1, *counts]) + 1), free.pop(), dtype=torch.int32)
        for index, (first, length, count) in enumerate(zip(firsts, lengths, counts, strict=True)):
            blocks = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
            self.block_tables[index, first // block_size : count] = blocks[first // block_size :]
            positions = torch.arange(first, length)
            for cache in caches:
                own = torch.randn(length - first, num_kv_heads, head_dim, generator=generator).to(kv_dtype)
                slots = blocks[positions // block_size].long() * block_size + positions % block_size
                cache.view(-1, num_kv_heads, head_dim)[slots] = own
        self.caches = [cache.to(DEVICE) for cache in caches]
        self.block_tables = self.block_tables.to(DEVICE)
        self.query = torch.randn(len(lengths), num_heads, head_dim, generator=generator).to(DEVICE, dtype)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    @property
    def tensors(self):
        return self.query, *self.caches, self.block_tables, self.seq_lens

    def run(self, split_keys=None, launch=SMALL, **changes):
        return decode(*self.tensors, split_keys=split_keys, launch=launch, **{**self.options, **changes})

    def check(self, result):
        """Compare with the oracle, within what rounding can do.

        The weights and the output are rounded to the query's dtype, so an output may be wrong by half a unit in the
        last place (a whole one in the interpreter, which cuts bf16 off) of itself and of the mean of |V|. Float32 sums
        of up to some thousand terms of order 1 add 4e-6 to that; a tenth of it was measured.
        """
        output, lse = (tensor.double().cpu() for tensor in result)
        query, key_cache, value_cache, *rest = self.tensors
        rows = torch.arange(len(query) + 1)
        batch = (rest[0], rows, rest[1])
        expected, expected_lse = oracle.attention(query, key_cache, value_cache, *batch, **self.options)
        # The mean of |V|.
        magnitude, _ = oracle.attention(query, key_cache, value_cache.float().abs(), *batch, **self.options)
        cut_off = query.dtype == torch.bfloat16 and DEVICE.type == "cpu"
        epsilon = torch.finfo(query.dtype).eps / (1 if cut_off else 2) if query.dtype != torch.float32 else 0.0
        error = (output - expected).abs()
        allowed = epsilon * (expected.abs() + magnitude) + 4e-6 * (1 + magnitude)
        assert (error <= allowed).all(), f"off by up to {(error / allowed).max():.2f} times what rounding can do"
        seen = expected_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, seen)
        assert (lse - expected_lse)[seen].abs().le(4e-6 * (1 + expected_lse[seen].abs())).all()


@pytest.mark.every(11)
@SPLITS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(dtype, kv) for dtype in (torch.float32, torch.float16, torch.bfloat16) for kv in (dtype, FP8)],
)
def test_dtypes_and_head_dims(dtype, kv_dtype, head_dim, split_keys):
    names = ("k_scale", "v_scale") if kv_dtype == FP8 else ()
    scales = {name: torch.tensor([0.5, 1.7], device=DEVICE) for name in names}
    case = Case([37, 5], heads=(6, 2), head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, **scales)
    case.check(case.run(split_keys))


@pytest.mark.every(5)
@SPLITS
@pytest.mark.parametrize("tile_keys", [16, 64])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_below_and_above_the_tile(block_size, tile_keys, split_keys):
    case = Case([130, 63], heads=(2, 1), block_size=block_size, dtype=torch.float16)
    case.check(case.run(split_keys, dataclasses.replace(SMALL, tile_keys=tile_keys)))


@pytest.mark.every(5)
@SPLITS
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (6, 2), (5, 1), (24, 1)])
def test_groups_of_heads(heads, split_keys):
    case = Case([40, 17], heads=heads)
    case.check(case.run(split_keys))


@pytest.mark.every(9)
@SPLITS
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 16, 31, 1000])
def test_options_together(window, has_sinks, softcap, split_keys):
    sinks = torch.linspace(-1, 2, 4, device=DEVICE) if has_sinks else None
    # A scale of 1 makes scores of order 8, which a softcap of 2 changes.
    case = Case([67, 0, 16, 1], window=window, softcap=softcap, sinks=sinks, scale=1.0)
    case.check(case.run(split_keys))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_in_the_dtype_of_a_model(dtype):
    sinks = torch.tensor([0.3, -2.0, 3.0, 0.0], dtype=dtype, device=DEVICE)
    case = Case([33, 0], sinks=sinks, dtype=dtype)
    case.check(case.run())


@pytest.mark.every(5)
@SPLITS
@pytest.mark.parametrize(
    "lengths",
    [[1], [0], [0, 0, 0], [0, 15, 0, 0, 16, 17, 0], [1, 1, 1, 1, 1], [160, 1], [1, 160], [31, 32, 33, 47, 48, 49]],
    ids=str,
)
def test_ragged_batches_with_rows_of_padding(lengths, split_keys):
    case = Case(lengths, heads=(2, 1))
    case.check(case.run(split_keys))


@pytest.mark.every(4)
@pytest.mark.parametrize("num_programs", [1, 2, 3, 4, 5, 7, 10, 13, 40])
def test_any_number_of_programs(num_programs):
    # 13 tiles of 2 heads: heads that end where a share ends, that cross shares, and that cover whole shares.
    case = Case([100, 40, 30, 1], heads=(2, 2))
    case.check(case.run(launch=dataclasses.replace(SMALL, programs_per_sm=num_programs)))


@pytest.mark.every(2)
@SPLITS
def test_a_head_with_more_parts_than_a_merge_reads_at_once(split_keys):
    # Scores of order 8, so that the largest has weight; four heads, so that it comes early in some and late in others.
    case = Case([16 * 40], heads=(4, 1), scale=1.0)
    case.check(case.run(split_keys, dataclasses.replace(SMALL, programs_per_sm=50)))


@pytest.mark.every(3)
@pytest.mark.parametrize(("split_keys", "window"), [(None, None), (2**15, None), (None, 4096)])
def test_lengths_of_128k(split_keys, window):
    case = Case([2**17, 2**17 - 1, 3], heads=(1, 1), window=window, dtype=torch.float16, block_size=128)
    # The interpreter's time depends on the number of tiles. Tiles as large as these would fit no GPU.
    large = Launch(tile_keys=2048, num_warps=4, num_stages=1, programs_per_sm=5)
    case.check(case.run(split_keys, large if DEVICE.type == "cpu" else None))


@settings(max_examples=settings().max_examples // 4)
@given(data=st.data())
def test_any_small_batch(data):
    draw = data.draw
    num_kv_heads = draw(st.integers(1, 3), label="num_kv_heads")
    num_heads = num_kv_heads * draw(st.integers(1, 3), label="group_size")
    sinks = torch.linspace(-2, 2, num_heads, device=DEVICE) if draw(st.booleans(), label="sinks") else None
    case = Case(
        draw(st.lists(st.integers(0, 70), min_size=1, max_size=4), label="lengths"),
        heads=(num_heads, num_kv_heads),
        block_size=draw(st.sampled_from([16, 32]), label="block_size"),
        dtype=draw(st.sampled_from([torch.float32, torch.float16]), label="dtype"),
        window=draw(st.none() | st.integers(1, 80), label="window"),
        softcap=draw(st.none() | st.just(1.5), label="softcap"),
        sinks=sinks,
        seed=draw(st.integers(0, 3), label="seed"),
    )
    tile_keys = draw(st.sampled_from([16, 32]), label="tile_keys")
    num_programs = draw(st.integers(1, 9), label="num_programs")
    split_keys = draw(st.none() | st.integers(5, 90), label="split_keys")
    case.check(case.run(split_keys, Launch(tile_keys, 4, 2, programs_per_sm=num_programs)))


def test_bits_of_fixed_splits_do_not_depend_on_the_batch():
    case = Case([75, 3, 160, 41], dtype=torch.float16, window=70)
    query, key_cache, value_cache, block_tables, seq_lens = case.tensors
    output, lse = case.run(24)
    for rows in ([0], [3, 1], [2, 0, 3]):
        # The padding of the table to its longest sequence goes too.
        width = -(-int(seq_lens[rows].max()) // 16)
        batch = (query[rows], key_cache, value_cache, block_tables[rows, :width].contiguous(), seq_lens[rows])
        alone, alone_lse = decode(*batch, split_keys=24, launch=SMALL, **case.options)
        assert torch.equal(alone, output[rows])
        assert torch.equal(alone_lse, lse[rows])


@SPLITS
def test_slices_and_other_strides(split_keys):
    case = Case([40, 19], dtype=torch.float16)
    case.check(case.run(split_keys))
    expected = case.run(split_keys)
    wide = torch.full((2, 12, 64), torch.nan, dtype=torch.float16, device=DEVICE)
    wide[:, 3:7] = case.query
    case.query = wide[:, 3:7]
    case.caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in case.caches]
    case.block_tables = torch.cat([case.block_tables, case.block_tables - 1], 1)[:, : case.block_tables.shape[1]]
    output = torch.full((2, 9, 64), torch.nan, dtype=torch.float16, device=DEVICE)
    written = output[:, 2:6]
    result = case.run(split_keys, output=written)
    assert result[0] is written
    assert torch.equal(written, expected[0])
    assert torch.equal(result[1], expected[1])
    assert output[:, [0, 1, 6, 7, 8]].isnan().all()


@SPLITS
def test_output_in_float32_for_merging(split_keys):
    case = Case([40, 0], dtype=torch.float16)
    output = torch.empty(2, 4, 64, device=DEVICE)
    case.check(case.run(split_keys, output=output))
    assert not torch.equal(output, output.half().float())


@SPLITS
def test_a_block_beyond_two_to_the_31_elements(split_keys):
    # Untouched memory costs nothing: only the pages of the sequence's slots are allocated.
    # Neither a block's number nor the stride has more than 31 bits, but their product does.
    case = Case([20], heads=(2, 1), dtype=torch.float16, kv_dtype=FP8)
    torch.use_deterministic_algorithms(False)
    memory = torch.empty(2**31 + 2**16, dtype=torch.uint8, device=DEVICE)
    torch.use_deterministic_algorithms(True)
    far = []
    for cache, at in zip(case.caches, (0, 4096), strict=True):
        apart = memory[at:].as_strided((3, 16, 1, 64), (2**30, 64, 64, 1)).view(FP8)
        apart[2] = cache[case.block_tables[0, 0]]
        apart[0] = cache[case.block_tables[0, 1]]
        far.append(apart)
    expected = case.run(split_keys)
    case.caches, case.block_tables = far, torch.tensor([[2, 0]], dtype=torch.int32, device=DEVICE)
    result = case.run(split_keys)
    assert torch.equal(result[0], expected[0])


class Recorder:
    """A stand-in for a kernel, which records its grids and launches nothing."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        return lambda *_, **__: self.grids.append(grid)


@SPLITS
def test_nothing_is_read_on_the_host(monkeypatch, split_keys):
    # Tensors on torch's device "meta" have no values, so reading one fails.
    recorder = Recorder()
    for name in ("decode_ends_kernel", "stream_kernel", "stream_merge_kernel", "split_kernel", "split_merge_kernel"):
        monkeypatch.setattr(decode_module, name, recorder)
    case = Case([40, 19])
    query, *rest = (tensor.to("meta") for tensor in case.tensors)
    output, _ = decode(query, *rest, split_keys=split_keys, **case.options)
    assert output.is_meta
    assert len(recorder.grids) == (3 if split_keys is None else 2)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs need a GPU")
@SPLITS
def test_a_graph_is_replayed_with_other_tables_and_lengths(split_keys):
    # As many blocks in both.
    cases = [Case([70, 33, 0], seed=0), Case([5, 70, 17], seed=1)]
    tensors = [tensor.clone() for tensor in cases[0].tensors]
    decode(*tensors, split_keys=split_keys, **cases[0].options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = decode(*tensors, split_keys=split_keys, **cases[0].options)
    for case in cases:
        for static, new in zip(tensors, case.tensors, strict=True):
            static.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        case.check(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": lambda query: query[:1]}, r"query: expected the shape \(2, 4, 64\), got \(1, 4, 64\)"),
        ({"split_keys": 0}, "split_keys: expected None or at least 1, got 0"),
        ({"output": lambda query: query[:, :3]}, r"output: expected the shape \(2, 4, 64\), got \(2, 3, 64\)"),
        ({"output": lambda query: query.double()}, "output: expected torch"),
        ({"softcap": -1.0}, r"softcap: expected None or a number above 0, got -1\.0"),
    ],
)
def test_bad_arguments(change, message):
    case = Case([5, 3])
    query = case.query
    change = {name: value(query) if callable(value) else value for name, value in change.items()}
    case.query = change.pop("query", query)
    with pytest.raises(KernelArgumentError, match=message):
        case.run(**change)


def test_an_empty_batch():
    case = Case([5])
    query, key_cache, value_cache, block_tables, seq_lens = case.tensors
    output, lse = decode(query[:0], key_cache, value_cache, block_tables[:0], seq_lens[:0], scale=1.0)
    assert output.shape == (0, 4, 64)
    assert lse.shape == (0, 4)
