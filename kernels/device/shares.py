"""Divides a call's tiles of keys evenly among a fixed number of programs (stream-K).

A *unit* is a tile of query rows, with the keys that they attend to. In `decode` it is a sequence, in `extend` some rows
of a sequence, in `prefix_decode` some members of a cohort. A unit has the same number of tiles of keys for each head of
K and V. All tiles of a call form one line, ordered by unit, then by head, then by key. Each program takes an equal
section of the line, its *share*. If the line can't be divided evenly, the first programs take one tile more. (After
Osama and others, "Stream-K", 2023, which splits matrix products.)

So a program has at most two heads in common with other programs: the first and the last head of its share. It writes at
most two *parts* for them, which a second launch merges. A head of a unit that is completely in one share is written
directly to the output. `ends`, int32 [num_units], says where in the line each unit ends, and alone determines the
shares. The device computes it from the lengths, without atomics and without a plan from the host. It is the same in
every layer, so a step computes it once.

A part is attention of a unit's rows over some of their keys: fp32 rows, divided by their sums, and their lse to base e.
Part 2 * program continues a head that an earlier program began. Part 2 * program + 1 begins a head.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvblocks.kernels.device.tiles import LN_2, LOG2_E

_SEARCHED = tl.constexpr(128)
"""How many ends a search loads at once. It takes one load for up to this many units, and two for up to their square."""
_FAR = tl.constexpr(0x7FFFFFFF)
SPREAD = tl.constexpr(4)
"""How many programs merge a head of a prompt's tile. On an H200 it took as long with 4 of them as with 32."""


@triton.jit
def share_begin(program, num_tiles, num_programs):
    """Where in the line of `num_tiles` a program's share begins. It stops where the next program's share begins."""
    return program * (num_tiles // num_programs) + tl.minimum(program, num_tiles % num_programs)


@triton.jit
def share_of(tile, num_tiles, num_programs):
    """The program whose share contains a tile of the line."""
    least = num_tiles // num_programs
    num_larger = num_tiles % num_programs
    in_larger = num_larger * (least + 1)
    beyond = num_larger + (tile - in_larger) // tl.maximum(least, 1)
    return tl.where(tile < in_larger, tile // (least + 1), beyond)


@triton.jit
def find_unit(end_ptr, tile, num_units):
    """The first unit that ends after a tile of the line, or the last one if none does.

    O(log num_units), to base 128.
    """
    low = 0
    size = num_units
    while size > 1:
        step = tl.cdiv(size, _SEARCHED)
        at = (tl.arange(0, _SEARCHED) + 1) * step - 1
        ends = tl.load(end_ptr + low + at, mask=at < size, other=_FAR)
        skipped = tl.sum((ends <= tile).to(tl.int32), 0) * step
        low += skipped
        size = tl.minimum(step, size - skipped)
    return tl.minimum(low, num_units - 1)


@triton.jit
def find_work(end_ptr, num_units, tile, NUM_KV_HEADS: tl.constexpr):
    """A tile's unit and head, its index among the head's tiles, and how many tiles the head has."""
    unit = find_unit(end_ptr, tile, num_units)
    begin = tl.load(end_ptr + unit - 1, mask=unit > 0, other=0)
    head_tiles = tl.maximum((tl.load(end_ptr + unit) - begin) // NUM_KV_HEADS, 1)  # the line may have no tiles
    kv_head = (tile - begin) // head_tiles
    return unit, kv_head, tile - begin - kv_head * head_tiles, head_tiles


@triton.jit
def find_heads(end_ptr, num_units, program, num_programs, NUM_KV_HEADS: tl.constexpr):
    """Where a program's share begins and stops, the first head in it, and the head after the last one in it.

    Heads are numbered across all units: unit * NUM_KV_HEADS + head. Some heads in this range may have no tiles.
    """
    num_tiles = tl.load(end_ptr + num_units - 1)
    begin = share_begin(program, num_tiles, num_programs)
    stop = share_begin(program + 1, num_tiles, num_programs)
    highest = tl.maximum(num_tiles - 1, 0)
    unit, kv_head, _, _ = find_work(end_ptr, num_units, tl.minimum(begin, highest), NUM_KV_HEADS)
    first = unit * NUM_KV_HEADS + kv_head
    unit, kv_head, _, _ = find_work(end_ptr, num_units, tl.minimum(tl.maximum(stop - 1, 0), highest), NUM_KV_HEADS)
    return begin, stop, first, tl.where(begin < stop, unit * NUM_KV_HEADS + kv_head + 1, first)


@triton.jit
def find_tiles(end_ptr, index, begin, stop, NUM_KV_HEADS: tl.constexpr):
    """A head's tiles in a share. index: the head's number, as in `find_heads`.

    Returns the unit, the head in it, where the head's tiles in the share begin and stop, and how many tiles the head
    has.
    """
    unit = index // NUM_KV_HEADS
    kv_head = index % NUM_KV_HEADS
    unit_begin = tl.load(end_ptr + unit - 1, mask=unit > 0, other=0)
    head_tiles = (tl.load(end_ptr + unit) - unit_begin) // NUM_KV_HEADS
    head_begin = unit_begin + kv_head * head_tiles
    return unit, kv_head, tl.maximum(begin - head_begin, 0), tl.minimum(stop - head_begin, head_tiles), head_tiles


@triton.jit
def find_cut(end_ptr, num_units, num_programs, program, NUM_KV_HEADS: tl.constexpr):
    """The head that is split where the share of `program` begins, if that is its first split.

    Returns the unit, the head of K and V, the program with its first part, and the number of parts, which is 0 if there
    is nothing to merge. Call it for every program from 1 on: each split head is found for exactly one of them.
    """
    num_tiles = tl.load(end_ptr + num_units - 1)
    begin = share_begin(program, num_tiles, num_programs)
    tile = tl.minimum(begin, tl.maximum(num_tiles - 1, 0))
    unit, kv_head, number, head_tiles = find_work(end_ptr, num_units, tile, NUM_KV_HEADS)
    first = share_of(tile - number, num_tiles, num_programs)
    last = share_of(tile - number + head_tiles - 1, num_tiles, num_programs)
    is_cut = (begin < num_tiles) & (number > 0) & (first == program - 1)
    return unit, kv_head, first, tl.where(is_cut, last - first + 1, 0)


@triton.jit
def let_merge_begin(PDL: tl.constexpr):
    """Let the merge, which is the next launch, begin once all programs have called this or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_parts(PDL: tl.constexpr):
    """Wait until the launch before has ended, and what it wrote can be read. All programs of a merge must call this.

    Before the call, only what earlier launches wrote may be read, such as `ends`.
    """
    if PDL:
        gdc_wait()


@triton.jit
def merge_rows(
    part_ptr,
    part_lse_ptr,
    first,
    num_parts,
    packed,
    is_row,
    STRIDE: tl.constexpr,
    PART_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Merge ROWS rows of `num_parts` parts (at least one), reading PARTS of them at once.

    part_ptr: fp32 [parts, PART_ROWS, HEAD_DIM]; part_lse_ptr: fp32 [parts, PART_ROWS]; packed: int32 [ROWS], the rows;
    is_row: which of them to read. With a STRIDE of 1 the parts' numbers are first, first + 1, ...; with 2 they are
    those of the programs from `first` on. Returns fp32 [ROWS, HEAD_DIM] and the lse, fp32 [ROWS]: 0 and -inf without
    keys.
    """
    element = tl.arange(0, HEAD_DIM)
    output = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, num_parts, PARTS):
        index = start + tl.arange(0, PARTS)
        number = first.to(tl.int64) * STRIDE + index * STRIDE
        if STRIDE == 2:
            number += (index == 0).to(tl.int64)
        row = number[:, None] * PART_ROWS + packed[None, :]
        is_read = (index < num_parts)[:, None] & is_row[None, :]
        lse = tl.load(part_lse_ptr + row, mask=is_read, other=-float("inf")) * LOG2_E
        rows_at = part_ptr + row[:, :, None] * HEAD_DIM + element[None, None, :]
        rows = tl.load(rows_at, mask=is_read[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(lse - base[None, :])
        kept = tl.exp2(top - base)
        output = output * kept[:, None] + tl.sum(rows * weights[:, :, None], 0)
        total = total * kept + tl.sum(weights, 0)
        top = new_top
    has_seen = total > 0
    divisor = tl.where(has_seen, total, 1.0)
    lse = tl.where(has_seen, (top + tl.log2(divisor)) * LN_2, -float("inf"))
    return output / divisor[:, None], lse
