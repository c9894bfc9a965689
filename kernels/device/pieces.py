"""The Triton kernels of batch-invariant `extend`: attention by pieces, and the sum of a row's pieces.

The positions of every sequence are cut at multiples of PIECE. A *piece* is a tile of rows, for one head of K and V,
over the keys between two such cuts. A row's result consists only of its own pieces, always in the same way: those with
a key that it sees are added up one by one, from the first to the last. It doesn't matter which program computes a
piece, or which other rows are in the tile. A row whose keys are in one piece gets that piece's result unchanged.

There are two ways to distribute pieces, which give the same bits:

* Evenly among a fixed number of programs (`device.shares`, with pieces instead of tiles). All parts are kept, and a
  second launch adds them up. So even one row on a long context keeps every SM busy.
* One program computes all pieces of a tile's head, and adds them up as it goes, with room for two parts per row. This
  is for prompts, which have enough tiles, and whose parts would be large.

The loop over keys is compiled once for both. The additions are written so that the compiler has no choice: `fma` where
it could fuse, base-2 logarithms that no product follows, and division rounded to nearest.
"""

import triton
import triton.language as tl

from kvblocks.kernels.device.extend import find_rows, first_key
from kvblocks.kernels.device.shares import SPREAD, find_work, let_merge_begin, share_begin, wait_for_parts
from kvblocks.kernels.device.tiles import LN_2, LOG2_E, attend_pages, begin_rows, finish_rows, head_scale, narrow_rows


@triton.jit
def find_pieces(position, window, PIECE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The numbers of the first and last piece that rows at these positions see, or 0 and 0 before position 0."""
    return first_key(position, window, PIECE, HAS_WINDOW) // PIECE, tl.maximum(position, 0) // PIECE


@triton.jit
def find_lse(row_max, row_sum):
    """The base-2 lse of a piece's rows; -inf for rows that see nothing."""
    return tl.where(row_sum > 0, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), -float("inf"))


@triton.jit
def add_piece(output, top, total, piece, piece_lse):
    """Add a piece to the sum of earlier pieces. output, piece: fp32 [ROWS, HEAD_DIM]; the others: fp32 [ROWS].

    top: the largest base-2 lse of a piece; total: the sum of the pieces' weights, the largest of which is 1; output:
    the sum of the weighted pieces. Initially these are -inf, 0 and 0.
    """
    new_top = tl.maximum(top, piece_lse)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    kept = tl.exp2(top - base)
    weight = tl.exp2(piece_lse - base)
    output = tl.fma(piece, tl.broadcast_to(weight[:, None], piece.shape), output * kept[:, None])
    return output, new_top, tl.fma(total, kept, weight)


@triton.jit
def finish_sum(output, top, total):
    """The rows' attention and base-e lse: 0 and -inf for rows that see nothing."""
    divisor = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, (top + tl.log2(divisor)) * LN_2, -float("inf"))
    return output * tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)[:, None], lse


@triton.jit
def add_part(
    begin,
    piece,
    seq_start,
    seq_rows,
    first,
    before,
    kv_head,
    window,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    part_sum_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Add a piece to the sums so far of ROWS rows of a tile, from `begin` on. Store the result after their last piece.

    Both are read from memory, since together they don't fit into the registers. Part 2 * i is the sum of row and head
    i, and part 2 * i + 1 is their piece.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    packed = begin + tl.arange(0, ROWS)
    row = first + packed // GROUP
    first_piece, last_piece = find_pieces(before + row, window, PIECE, HAS_WINDOW)
    is_part = (packed < TILE_Q * GROUP) & (row < seq_rows) & (first_piece <= piece) & (piece <= last_piece)
    is_part = is_part & (first_piece < last_piece)
    head_at = (seq_start + row).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP
    element = tl.arange(0, HEAD_DIM)
    sum_at = part_ptr + (head_at * (2 * HEAD_DIM))[:, None] + element[None, :]
    is_later = is_part & (first_piece < piece)
    part = tl.load(sum_at + HEAD_DIM, mask=is_part[:, None], other=0.0)
    part_lse = tl.load(part_lse_ptr + head_at * 2 + 1, mask=is_part, other=-float("inf"))
    output = tl.load(sum_at, mask=is_later[:, None], other=0.0)
    top = tl.load(part_lse_ptr + head_at * 2, mask=is_later, other=-float("inf"))
    total = tl.load(part_sum_ptr + head_at, mask=is_later, other=0.0)
    output, top, total = add_piece(output, top, total, part, part_lse)
    tl.debug_barrier()  # another thread may have to read first what this one writes
    is_kept = is_part & (piece < last_piece)
    tl.store(sum_at, output, mask=is_kept[:, None])
    tl.store(part_lse_ptr + head_at * 2, top, mask=is_kept)
    tl.store(part_sum_ptr + head_at, total, mask=is_kept)
    output, lse = finish_sum(output, top, total)
    is_done = is_part & (piece == last_piece)
    output_at = output_ptr + (head_at * HEAD_DIM)[:, None] + element[None, :]
    tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=is_done[:, None])
    tl.store(lse_ptr + head_at, lse, mask=is_done)


@triton.jit
def find_own_pieces(end_ptr, num_units, program, num_programs, num_slots, NUM_KV_HEADS: tl.constexpr):
    """Where a program's pieces begin and stop in the line of all: an even share, or without slots, a unit's head."""
    if num_slots == 0:
        unit = program // NUM_KV_HEADS
        unit_begin = tl.load(end_ptr + unit - 1, mask=unit > 0, other=0)
        head_pieces = (tl.load(end_ptr + unit) - unit_begin) // NUM_KV_HEADS
        begin = unit_begin + program % NUM_KV_HEADS * head_pieces
        stop = begin + head_pieces
    else:
        num_pieces = tl.load(end_ptr + num_units - 1)
        begin = share_begin(program, num_pieces, num_programs)
        stop = share_begin(program + 1, num_pieces, num_programs)
    return begin, stop


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "num_units", "num_slots", "window", "stride_table"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "start_ptr",
        "len_ptr",
        "end_ptr",
        "sink_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
    ],
)
def piece_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    end_ptr,
    sink_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    part_sum_ptr,
    num_rows,
    num_seqs,
    num_units,
    num_slots,
    window,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    stride_query_row,
    stride_query_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    NARROWED: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute one program's pieces. Grid: (any number of programs,), or without slots (num_units * NUM_KV_HEADS,).

    num_slots: how many parts each row has room for; 0: each program adds up its own. Then the programs of a prompt's
    last rows, which have the most keys, begin first. PIECE is a multiple of TILE_N.

    Shapes as in `extend`; last strides are 1; output_ptr and lse_ptr are contiguous. part_ptr: fp32 [num_rows,
    num_heads, num_slots, HEAD_DIM]; part_lse_ptr: fp32 [num_rows, num_heads, num_slots], to base 2. Without slots there
    are two parts of each row and head, as in `add_part`; part_sum_ptr, fp32 [num_rows, num_heads], has weights of sums.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    let_merge_begin(PDL)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    begin, end = find_own_pieces(end_ptr, num_units, program, tl.num_programs(0), num_slots, NUM_KV_HEADS)
    packed = tl.arange(0, TILE_M)
    element = tl.arange(0, HEAD_DIM)
    # Values that the compiler moves out of this loop would take registers throughout the inner loop, over keys.
    for tile in tl.range(begin, end, num_stages=1, disable_licm=True):
        unit, kv_head, number, _ = find_work(end_ptr, num_units, tile, NUM_KV_HEADS)
        seq, seq_start, seq_rows, first, before = find_rows(start_ptr, len_ptr, unit, num_rows, num_seqs, TILE_Q)
        row = first + packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        is_row = (packed < TILE_Q * GROUP) & (row < seq_rows)
        at_row = (seq_start + row).to(tl.int64)
        query_at = at_row * stride_query_row + head.to(tl.int64) * stride_query_head
        query = tl.load(query_ptr + query_at[:, None] + element[None, :], mask=is_row[:, None], other=0.0)
        query, row_scale = narrow_rows(query, scale * head_scale(k_scale_ptr, kv_head), NARROWED)
        output, odd, row_max, row_sum = begin_rows(TILE_M, HEAD_DIM, PAIRED)
        piece = first_key(before + first, window, PIECE, HAS_WINDOW) // PIECE + number
        if HAS_SINKS:
            first_piece, _ = find_pieces(before + row, window, PIECE, HAS_WINDOW)
            sink = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            row_max = tl.where(piece == first_piece, sink, row_max)
            row_sum = tl.where(piece == first_piece, 1.0, row_sum)

        start = tl.maximum(piece * PIECE, first_key(before + first, window, TILE_N, HAS_WINDOW))
        stop = tl.maximum(before + tl.minimum(first + TILE_Q, seq_rows), 0)
        output, odd, row_max, row_sum = attend_pages(
            query, output, odd, row_max, row_sum, before + row, start, tl.minimum(piece * PIECE + PIECE, stop),
            table_ptr + seq.to(tl.int64) * stride_table,
            k_ptr + kv_head.to(tl.int64) * stride_k_head, v_ptr + kv_head.to(tl.int64) * stride_v_head,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, row_scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, TILE_N, STAGES, MASKED=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_WINDOW=HAS_WINDOW,
            INTERPRETED=INTERPRETED,
        )  # fmt: skip
        output, lse = finish_rows(output, odd, row_max, row_sum, head_scale(v_scale_ptr, kv_head))

        first_piece, last_piece = find_pieces(before + row, window, PIECE, HAS_WINDOW)
        is_seen = is_row & (first_piece <= piece) & (piece <= last_piece)
        head_at = at_row * NUM_HEADS + head
        is_part = is_seen & (first_piece < last_piece)
        is_whole = is_seen & (first_piece == last_piece)
        output_at = output_ptr + (head_at * HEAD_DIM)[:, None] + element[None, :]
        tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=is_whole[:, None])
        tl.store(lse_ptr + head_at, lse, mask=is_whole)
        if (number > 0) | (tl.max(last_piece, 0) > piece):
            slot = tl.where(num_slots > 0, head_at * num_slots + piece - first_piece, head_at * 2 + 1)
            tl.store(part_ptr + (slot * HEAD_DIM)[:, None] + element[None, :], output, mask=is_part[:, None])
            tl.store(part_lse_ptr + slot, find_lse(row_max, row_sum), mask=is_part)
            if num_slots == 0:
                tl.debug_barrier()
                for begin_row in tl.range(0, TILE_M, TILE_M // 2, num_stages=1):
                    add_part(
                        begin_row, piece, seq_start, seq_rows, first, before, kv_head, window,
                        output_ptr, lse_ptr, part_ptr, part_lse_ptr, part_sum_ptr,
                        NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_M, TILE_M // 2, PIECE, HAS_WINDOW,
                    )  # fmt: skip
                tl.debug_barrier()  # the next piece comes to the same place


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "num_slots", "window"],
    do_not_specialize_on_alignment=["start_ptr", "len_ptr"],
)
def piece_merge_kernel(
    start_ptr,
    len_ptr,
    output_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_rows,
    num_seqs,
    num_slots,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the parts of the rows of a unit's head, ROWS rows at a time. Grid: (num_units, NUM_KV_HEADS, SPREAD).

    PARTS parts are loaded before the first of them is added. The other arguments are as in `piece_kernel`.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    kv_head = tl.program_id(1)
    _, seq_start, seq_rows, first, before = find_rows(start_ptr, len_ptr, tl.program_id(0), num_rows, num_seqs, TILE_Q)
    num_packed = tl.minimum(seq_rows - first, TILE_Q) * GROUP
    element = tl.arange(0, HEAD_DIM)
    wait_for_parts(PDL)
    for begin in tl.range(tl.program_id(2) * ROWS, num_packed, SPREAD * ROWS):
        packed = begin + tl.arange(0, ROWS)
        row = first + packed // GROUP
        first_piece, last_piece = find_pieces(before + row, window, PIECE, HAS_WINDOW)
        is_merged = (packed < num_packed) & (first_piece < last_piece)
        num_pieces = tl.where(is_merged, last_piece - first_piece + 1, 0)
        head_at = (seq_start + row).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP
        output = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for least in tl.range(0, tl.max(num_pieces, 0), PARTS):
            for index in tl.static_range(PARTS):
                slot_at = head_at * num_slots + least + index
                is_read = least + index < num_pieces
                part_at = part_ptr + (slot_at * HEAD_DIM)[:, None] + element[None, :]
                part = tl.load(part_at, mask=is_read[:, None], other=0.0)
                part_lse = tl.load(part_lse_ptr + slot_at, mask=is_read, other=-float("inf"))
                output, top, total = add_piece(output, top, total, part, part_lse)
        output, lse = finish_sum(output, top, total)
        output_at = output_ptr + (head_at * HEAD_DIM)[:, None] + element[None, :]
        tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=is_merged[:, None])
        tl.store(lse_ptr + head_at, lse, mask=is_merged)
