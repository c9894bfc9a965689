"""What the attention kernels share: which tile of rows a program computes, and attention over a run of pages.

Rows are packed: a tile of TILE_M rows holds TILE_M // GROUP consecutive queries, with all GROUP query heads that share
a head of K and V. So one read of a page serves GROUP heads of many queries, and GROUP may be any number.

Tiles are found without a plan: of segments that start at s[0], s[1], ..., the tiles of segment i are numbered from
`s[i] // TILE + i`. That leaves each segment at least the tiles that it needs, whatever its length, and at most one
more; a program past its segment's end has nothing to do. (vLLM's unified kernel numbers its tiles in this way.)

The softmax is the online one (Milakov and Gimelshein; FlashAttention), to base 2: exp2 is what the hardware has. A
page's number is read one tile ahead of its K and V: then their addresses depend on nothing that the loop is still
waiting for, and the compiler pipelines the copies with as few stages as for contiguous K and V.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_segment(start_ptr, tile, num_segments, TILE: tl.constexpr):
    """The segment that `tile` belongs to; start_ptr: int32 [num_segments], ascending. O(log num_segments)."""
    low = 0
    high = num_segments
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(start_ptr + middle) // TILE + middle <= tile
        low = tl.where(is_at_or_after, middle, low)
        high = tl.where(is_at_or_after, high, middle)
    return low


@triton.jit
def find_segments(start_ptr, tile, num_segments, TILE: tl.constexpr):
    """`find_segment` of several tiles, int32 of any shape: int32 of the same."""
    width = 1
    while width < num_segments:
        width *= 2
    low = tile * 0
    while width > 0:
        middle = low + width
        is_segment = middle < num_segments
        is_at_or_after = tl.load(start_ptr + middle, mask=is_segment, other=0) // TILE + middle <= tile
        low = tl.where(is_segment & is_at_or_after, middle, low)
        width //= 2
    return low


@triton.jit
def softcap_scores(scores, softcap):
    """Return softcap * tanh(scores / softcap), by an exponential that can't overflow."""
    shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
    capped = softcap * ((1.0 - shrunk) / (1.0 + shrunk))
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def multiply(first, second, sums, INTERPRETED: tl.constexpr):
    """Add the product of two matrices to `sums`, if there are any, in fp32; the second may be of a narrower dtype."""
    if INTERPRETED:
        # Triton's interpreter multiplies bf16 matrices wrongly.
        first = first.to(tl.float32)
    return tl.dot(first, second.to(first.dtype), sums, input_precision="ieee")


@triton.jit
def see(row_position, position, window, HAS_WINDOW: tl.constexpr):
    """Whether rows at some positions see keys at others: those up to their own, less those that have left a window."""
    is_visible = position <= row_position
    if HAS_WINDOW:
        is_visible = is_visible & (position > row_position - window)
    return is_visible


@triton.jit
def is_held(position, stop, row_position, window, HAS_WINDOW: tl.constexpr):
    """Whether positions come before `stop`, and have not left the windows of all rows."""
    held = position < stop
    if HAS_WINDOW:
        held = held & (position > tl.min(row_position, 0) - window)
    return held


@triton.jit
def attend_pages(
    query,
    output,
    row_max,
    row_sum,
    row_position,
    start,
    stop,
    table_ptr,
    k_ptr,
    v_ptr,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Go on with the online softmax of TILE_M rows over the positions from `start` to `stop`.

    query: [TILE_M, HEAD_DIM]; output: fp32 [TILE_M, HEAD_DIM], not divided yet; row_max, to base 2, and row_sum: fp32
    [TILE_M]; row_position: int32 [TILE_M]; table_ptr: the sequence's row of the block tables; k_ptr, v_ptr: the head's
    first element. No position from `stop` on is read.

    MASKED: a row sees the positions up to its own, less those that have left its window; what has left the windows of
    all rows is not read. Without it every row sees every position, and `stop - start` must be a multiple of TILE_N.
    Returns output, row_max and row_sum.
    """
    offset = tl.arange(0, TILE_N)
    element = tl.arange(0, HEAD_DIM)
    block = tl.load(table_ptr + (start + offset) // BLOCK_SIZE, mask=start + offset < stop, other=0)
    for first in tl.range(start, stop, TILE_N, num_stages=STAGES):
        position = first + offset
        page = block.to(tl.int64)
        ahead = position + TILE_N
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        slot = position % BLOCK_SIZE
        k_at = k_ptr + (page * stride_k_block + slot * stride_k_slot)[None, :] + element[:, None]
        v_at = v_ptr + (page * stride_v_block + slot * stride_v_slot)[:, None] + element[None, :]
        if MASKED:
            # A slot that isn't the sequence's, or isn't any more, may hold NaN, which 0 times it still is: no reading.
            is_own = is_held(position, stop, row_position, window, HAS_WINDOW)
            key = tl.load(k_at, mask=is_own[None, :], other=0.0)
            value = tl.load(v_at, mask=is_own[:, None], other=0.0)
        else:
            key = tl.load(k_at)
            value = tl.load(v_at)
        scores = multiply(query, key, None, INTERPRETED)
        # What is left to multiply with is fused into the subtraction of the maximum.
        factor = scale * LOG2_E
        if HAS_SOFTCAP:
            scores = softcap_scores(scores * scale, softcap)
            factor = LOG2_E
        if MASKED:
            is_visible = see(row_position[:, None], position[None, :], window, HAS_WINDOW)
            scores = tl.where(is_visible & (position < stop)[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        base = new_max
        if MASKED:
            # A row that has seen nothing yet.
            base = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores * factor - base[:, None])
        kept = tl.exp2(row_max - base)
        row_sum = row_sum * kept + tl.sum(weights, 1)
        row_max = new_max
        output = output * kept[:, None]
        output = multiply(weights.to(query.dtype), value, output, INTERPRETED)
    return output, row_max, row_sum


@triton.jit
def begin_rows(TILE_M: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The output, row_max and row_sum of rows that have seen nothing yet."""
    row_max = tl.full([TILE_M], -float("inf"), tl.float32)
    return tl.zeros([TILE_M, HEAD_DIM], tl.float32), row_max, tl.zeros([TILE_M], tl.float32)


@triton.jit
def finish_rows(output, row_max, row_sum):
    """Return the rows' attention and the natural logarithm of what it was divided by: 0 and -inf for unseeing rows."""
    has_seen = row_sum > 0
    divisor = tl.where(has_seen, row_sum, 1.0)
    lse = tl.where(has_seen, (row_max + tl.log2(divisor)) * LN_2, -float("inf"))
    return output / divisor[:, None], lse
