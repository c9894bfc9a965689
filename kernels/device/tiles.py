"""Shared by the attention kernels: finding the tile of rows of a program, and attention over consecutive pages.

Rows are packed: a tile of TILE_M rows contains TILE_M // GROUP consecutive queries, with all GROUP query heads that
share a head of K and V. So one read of a page serves GROUP heads of many queries, and GROUP may be any number.

Tiles are found without a plan. Segments start at s[0], s[1], ...; the tiles of segment i are numbered from
`s[i] // TILE + i`. So each segment has at least as many tiles as it needs, whatever its length, and at most one more. A
program past its segment's end has nothing to do. (vLLM's unified kernel numbers its tiles in this way.)

The softmax is the online one (Milakov and Gimelshein; FlashAttention), to base 2, since the hardware has exp2. A page's
number is read one tile ahead of its K and V, so their addresses are known when the loop needs them, and the compiler
pipelines the copies with as few stages as for contiguous K and V.
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
    """As `find_segment`, for several tiles: int32 of any shape, which is also the shape of the result."""
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
    """The product of two matrices, plus `sums` if given, in fp32. The second matrix may have a narrower dtype."""
    if INTERPRETED:
        # Triton's interpreter multiplies bf16 matrices wrongly.
        first = first.to(tl.float32)
    return tl.dot(first, second.to(first.dtype), sums, input_precision="ieee")


@triton.jit
def head_scale(scale_ptr, kv_head):
    """The factor of a head's K or V, in fp32; 1 without scales."""
    factor = tl.full([], 1.0, tl.float32)
    if scale_ptr is not None:
        factor = tl.load(scale_ptr + kv_head)
    return factor


@triton.jit
def narrow_rows(query, scale, NARROWED: tl.constexpr):
    """A query's rows in the dtype of the matrix product, [TILE_M, HEAD_DIM], and the factor of their scores.

    NARROWED is for queries in bf16 with K in e4m3. One instruction converts two numbers from e4m3 to fp16, but bf16
    would take another, slow instruction for each number. So the rows become fp16, too. Each row is multiplied by a
    power of 2 that brings its largest number to between 2**14 and 2**15. Then no number overflows, and only numbers
    below 2**-31 times the largest lose bits. The factor is fp32 [TILE_M] if NARROWED, else a number.
    """
    scale = tl.full([], 1.0, tl.float32) * scale
    if NARROWED:
        wide = query.to(tl.float32)
        exponent = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23) - 141
        # A bound for rows of zeros, or nearly so. Infinite rows stay infinite.
        exponent = tl.maximum(exponent, -100)
        query = (wide * ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
        scale = scale * ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return query, scale


@triton.jit
def beside_scores(number):
    """Reshape a number, or one number per row, to multiply scores of [TILE_M, TILE_N]."""
    if number.type.is_block():
        number = number[:, None]
    return number


@triton.jit
def see(row_position, position, window, HAS_WINDOW: tl.constexpr):
    """Whether rows see keys, by position: a row sees keys up to its own position that haven't left its window."""
    is_visible = position <= row_position
    if HAS_WINDOW:
        is_visible = is_visible & (position > row_position - window)
    return is_visible


@triton.jit
def is_held(position, stop, row_position, window, HAS_WINDOW: tl.constexpr):
    """Whether positions are before `stop` and in the window of at least one row."""
    held = position < stop
    if HAS_WINDOW:
        held = held & (position > tl.min(row_position, 0) - window)
    return held


@triton.jit
def widen_codes(codes):
    """Convert e4m3 numbers, int32 from 0 to 255, to fp32, by way of fp16 numbers with the same bits, times 256."""
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def unpack_pairs(pairs, INTERPRETED: tl.constexpr):
    """Unpack the two e4m3 numbers in each int16 to fp16: the lower numbers, then the higher ones.

    Four numbers take one byte permutation and two conversions, since Triton packs two neighbors of a thread.
    """
    if INTERPRETED:
        # The interpreter has no inline PTX.
        codes = pairs.to(tl.int32)
        return widen_codes(codes & 0xFF).to(tl.float16), widen_codes((codes >> 8) & 0xFF).to(tl.float16)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 sorted;
            .reg .b16 lower, higher;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lower, higher}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, higher;
        }
        """,
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def attend_pages(
    query,
    output,
    odd,
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
    """Continue the online softmax of TILE_M rows over the positions from `start` to `stop`.

    query: [TILE_M, HEAD_DIM]; output, odd: as in `begin_rows`, not yet divided; scale: as in `narrow_rows`; row_max (to
    base 2) and row_sum: fp32 [TILE_M]; row_position: int32 [TILE_M]; table_ptr: the sequence's row of the block tables;
    k_ptr, v_ptr: the head's first element. No position from `stop` on is read.

    MASKED: a row sees the positions up to its own, except those that have left its window. Positions that have left the
    windows of all rows are not read. If not MASKED, every row sees every position, and `stop - start` must be a
    multiple of TILE_N. Returns output, odd, row_max and row_sum.
    """
    offset = tl.arange(0, TILE_N)
    element = tl.arange(0, HEAD_DIM)
    v_element = element
    if odd.type.is_block():
        v_element = tl.arange(0, HEAD_DIM // 2)
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        stride_v_block = stride_v_block // 2
        stride_v_slot = stride_v_slot // 2
    # The factor that scores still lack: it is fused into the subtraction of their maximum.
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        factor = tl.full([], LOG2_E, tl.float32)
    block = tl.load(table_ptr + (start + offset) // BLOCK_SIZE, mask=start + offset < stop, other=0)
    for first in tl.range(start, stop, TILE_N, num_stages=STAGES):
        position = first + offset
        page = block.to(tl.int64)
        ahead = position + TILE_N
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        slot = position % BLOCK_SIZE
        k_at = k_ptr + (page * stride_k_block + slot * stride_k_slot)[None, :] + element[:, None]
        v_at = v_ptr + (page * stride_v_block + slot * stride_v_slot)[:, None] + v_element[None, :]
        if MASKED:
            # A slot that is not the sequence's, or no longer, may hold NaN. 0 * NaN is NaN, so the slot is not read.
            is_own = is_held(position, stop, row_position, window, HAS_WINDOW)
            key = tl.load(k_at, mask=is_own[None, :], other=0.0)
            value = tl.load(v_at, mask=is_own[:, None], other=0.0)
        else:
            key = tl.load(k_at)
            value = tl.load(v_at)
        scores = multiply(query, key, None, INTERPRETED)
        if HAS_SOFTCAP:
            scores = softcap_scores(scores * beside_scores(scale), softcap)
        if MASKED:
            is_visible = see(row_position[:, None], position[None, :], window, HAS_WINDOW)
            scores = tl.where(is_visible & (position < stop)[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        base = new_max
        if MASKED:
            # For a row that has seen nothing yet.
            base = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores * beside_scores(factor) - base[:, None])
        kept = tl.exp2(row_max - base)
        row_sum = row_sum * kept + tl.sum(weights, 1)
        row_max = new_max
        weights = weights.to(query.dtype)
        output = output * kept[:, None]
        if odd.type.is_block():
            value, odd_value = unpack_pairs(value, INTERPRETED)
            odd = multiply(weights, odd_value, odd * kept[:, None], INTERPRETED)
        output = multiply(weights, value, output, INTERPRETED)
    return output, odd, row_max, row_sum


@triton.jit
def begin_rows(TILE_M: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRED: tl.constexpr):
    """The initial output, odd, row_max and row_sum of rows that have seen nothing yet.

    output: fp32 [TILE_M, HEAD_DIM]; odd: the number 0.

    PAIRED is for V in e4m3 that is multiplied in fp16. Then `output` has the elements with even indexes and `odd` those
    with odd ones, fp32 [TILE_M, HEAD_DIM // 2] each, and V is read as pairs of numbers. The reason is how a warp's
    product (mma) gets V from shared memory: one instruction loads and transposes 16-bit elements, but 8-bit elements
    are loaded byte by byte. (A warpgroup's product, wgmma, reads V from shared memory itself, where V is written once
    more in any case.)
    """
    row_max = tl.full([TILE_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    if PAIRED:
        output = tl.zeros([TILE_M, HEAD_DIM // 2], tl.float32)
        odd = tl.zeros([TILE_M, HEAD_DIM // 2], tl.float32)
    else:
        output = tl.zeros([TILE_M, HEAD_DIM], tl.float32)
        odd = tl.full([], 0.0, tl.float32)
    return output, odd, row_max, row_sum


@triton.jit
def finish_rows(output, odd, row_max, row_sum, v_scale):
    """Return the rows' attention, fp32 [TILE_M, HEAD_DIM], and the natural logarithm of the softmax's denominator.

    These are 0 and -inf for rows that see nothing. output, odd, row_max and row_sum: as in `begin_rows`.
    """
    has_seen = row_sum > 0
    divisor = tl.where(has_seen, row_sum, 1.0)
    lse = tl.where(has_seen, (row_max + tl.log2(divisor)) * LN_2, -float("inf"))
    if odd.type.is_block():
        output = tl.join(output, odd).reshape(output.shape[0], 2 * output.shape[1])
    return output * v_scale / divisor[:, None], lse
