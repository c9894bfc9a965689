"""Even shares of a line of tiles, compared with plain lists; and what calls with the same shares check once."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.kernels import decode as decode_module
from kvblocks.kernels import extend as extend_module
from kvblocks.kernels.decode import decode, share_decodes
from kvblocks.kernels.device.shares import find_cut, find_unit, find_work, share_begin, share_of
from kvblocks.kernels.extend import extend, share_rows
from kvblocks.kernels.layout import KernelArgumentError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Numbers are never constants in these kernels, as in those that ship: Triton 3.6.0 can't compile a search of 1 unit.


@triton.jit(do_not_specialize=["num_tiles", "num_programs"])
def shares_kernel(begin_ptr, program_ptr, num_tiles, num_programs):
    for program in tl.range(0, num_programs + 1):
        tl.store(begin_ptr + program, share_begin(program, num_tiles, num_programs))
    for tile in tl.range(0, num_tiles):
        tl.store(program_ptr + tile, share_of(tile, num_tiles, num_programs))


@triton.jit(do_not_specialize=["num_units", "num_tiles"])
def units_kernel(end_ptr, found_ptr, num_units, num_tiles):
    for tile in tl.range(0, num_tiles):
        tl.store(found_ptr + tile, find_unit(end_ptr, tile, num_units))


@triton.jit(do_not_specialize=["num_units", "num_tiles"])
def work_kernel(end_ptr, work_ptr, num_units, num_tiles, heads: tl.constexpr):
    for tile in tl.range(0, num_tiles):
        unit, head, number, head_tiles = find_work(end_ptr, num_units, tile, heads)
        tl.store(work_ptr + 4 * tile, unit)
        tl.store(work_ptr + 4 * tile + 1, head)
        tl.store(work_ptr + 4 * tile + 2, number)
        tl.store(work_ptr + 4 * tile + 3, head_tiles)


@triton.jit(do_not_specialize=["num_units", "num_programs"])
def cuts_kernel(end_ptr, cut_ptr, num_units, num_programs, heads: tl.constexpr):
    for program in tl.range(1, num_programs):
        unit, head, first, num_parts = find_cut(end_ptr, num_units, num_programs, program, heads)
        tl.store(cut_ptr + 4 * program, unit)
        tl.store(cut_ptr + 4 * program + 1, head)
        tl.store(cut_ptr + 4 * program + 2, first)
        tl.store(cut_ptr + 4 * program + 3, num_parts)


def numbers(size):
    return torch.full((size,), -7, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("num_tiles", "num_programs"), [(0, 3), (1, 1), (2, 5), (12, 4), (13, 4), (40, 7), (6, 6)])
def test_shares_differ_by_a_tile_at_most_and_cover_the_line(num_tiles, num_programs):
    begins, programs = numbers(num_programs + 1), numbers(num_tiles + 1)
    shares_kernel[(1,)](begins, programs, num_tiles, num_programs)
    begins = begins.tolist()
    assert begins[0] == 0 and begins[-1] == num_tiles
    sizes = [stop - start for start, stop in pairwise(begins)]
    assert max(sizes) - min(sizes) <= 1
    assert programs.tolist()[:-1] == [program for program, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize("num_units", [1, 2, 127, 128, 129, 300, 128 * 128, 128 * 128 + 1])
def test_units_are_found_however_many_there_are(num_units):
    generator = torch.Generator().manual_seed(num_units)
    ends = torch.randint(0, 3, (num_units,), generator=generator).cumsum(0)
    ends[-1] += 1
    asked = 40  # of the first tiles; and of the last, by the line's other end
    for shift in (0, int(ends[-1]) - asked):
        line = torch.searchsorted(ends, torch.arange(asked) + shift, right=True)
        found = numbers(asked)
        units_kernel[(1,)]((ends - shift).int().to(DEVICE), found, num_units, min(asked, int(ends[-1])))
        num_asked = min(asked, int(ends[-1]))
        assert found.tolist()[:num_asked] == line.clamp(max=num_units - 1).tolist()[:num_asked]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    num_heads=st.integers(1, 3),
    num_programs=st.integers(1, 12),
)
def test_every_tile_is_some_units_and_every_split_head_is_merged_once(sizes, num_heads, num_programs):
    line = [(unit, head) for unit, size in enumerate(sizes) for head in range(num_heads) for _ in range(size)]
    ends = (torch.tensor(sizes) * num_heads).cumsum(0).int().to(DEVICE)
    work = numbers(4 * len(line) + 1)
    work_kernel[(1,)](ends, work, len(sizes), len(line), num_heads)
    expected = [[unit, head, index - line.index((unit, head)), sizes[unit]] for index, (unit, head) in enumerate(line)]
    assert work[:-1].view(-1, 4).tolist() == expected
    cuts = numbers(4 * num_programs)
    cuts_kernel[(1,)](ends, cuts, len(sizes), num_programs, num_heads)
    least, larger = divmod(len(line), num_programs)
    programs = [program for program in range(num_programs) for _ in range(least + (program < larger))]
    holders = {}
    for program, head in zip(programs, line, strict=True):
        holders.setdefault(head, []).append(program)
    split = sorted([*head, min(held), len(set(held))] for head, held in holders.items() if len(set(held)) > 1)
    merged = [cut for cut in cuts.view(-1, 4).tolist()[1:] if cut[3] > 0]
    assert sorted(merged) == split


def call_of(kind):
    """A call of two sequences with shares, its arguments, and a number of layers' caches."""
    generator = torch.Generator().manual_seed(3)
    layers = [torch.randn(2, 4, 16, 1, 64, generator=generator).to(DEVICE) for _ in range(2)]
    lengths = torch.tensor([20, 9], dtype=torch.int32, device=DEVICE)
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(2, 2, 64, generator=generator).to(DEVICE)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    arguments = {"query": query, "key_cache": layers[0][0], "value_cache": layers[0][1], "block_tables": tables}
    arguments |= {"seq_lens": lengths, "scale": 0.125}
    if kind == "decode":
        return decode, arguments | {"shares": share_decodes(query, layers[0][0], lengths)}, layers
    shares = share_rows(query, layers[0][0], starts, lengths)
    return extend, arguments | {"query_start": starts, "shares": shares}, layers


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_the_layers_of_a_step_are_checked_once(kind, monkeypatch):
    call, arguments, layers = call_of(kind)
    checked = []
    for module in (decode_module, extend_module):
        check = module.check_attention
        monkeypatch.setattr(module, "check_attention", lambda *args, own=check: checked.append(args) or own(*args))
    for layer in layers:
        one = arguments | {"key_cache": layer[0], "value_cache": layer[1]}
        together, alone = call(**one), call(**{**one, "shares": None})
        assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    assert len(checked) == 1 + 2 * len(layers)  # a call that makes its own shares checks before and behind that


DEVIATIONS = [
    (lambda a: {"query": a["query"].half()}, "query: expected"),
    (lambda a: {"query": a["query"][:, :, ::2]}, "head_dim"),
    (lambda a: {"query": a["query"].transpose(1, 2).contiguous().transpose(1, 2)}, "stride"),
    (lambda a: {"key_cache": a["key_cache"][:, :8], "value_cache": a["value_cache"][:, :8]}, "block_size"),
    (lambda a: {"value_cache": a["value_cache"].half()}, "value_cache: expected"),
    (lambda a: {"block_tables": a["block_tables"].long()}, "block_tables: expected"),
    (lambda a: {"seq_lens": a["seq_lens"][:1]}, "seq_lens: expected"),
    (lambda a: {"scale": -1.0}, "scale: expected"),
    (lambda a: {"window": 0}, "window: expected"),
    (lambda a: {"sinks": torch.zeros(3, device=DEVICE)}, "sinks: expected"),
    (lambda a: {"output": a["query"][:1]}, "output: expected"),
    (lambda a: {"k_scale": torch.ones(1, device=DEVICE)}, "k_scale and v_scale"),
    (lambda a: {"block_tables": a["block_tables"].to("meta")}, "the device of query"),
]


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_call_that_differs_from_the_one_before_is_checked(kind):
    call, arguments, _ = call_of(kind)
    expected = call(**arguments)
    for changed, words in DEVIATIONS:
        with pytest.raises(KernelArgumentError, match=words):
            call(**arguments | changed(arguments))
    assert all(torch.equal(*pair) for pair in zip(call(**arguments), expected, strict=True))
