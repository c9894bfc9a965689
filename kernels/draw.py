"""Draws the tokens of all rows in one launch, with one program per draw, whatever its parameters.

A weight is e ** (scale * (logit - largest)), scaled so that the largest is UNIT, and truncated to an integer. So sums
are exact in any order. Without limits, the token is the first at which the running sum over the vocabulary exceeds
`uniform` times the whole sum. With limits, tokens are ranked by logit, and equal ones by index. min_p, top_k and top_p
determine how many of the first ranks are allowed, and the running sum goes by rank.

Nothing is sorted. The bits of a logit's distance from the largest order the ranks, and all tokens at one distance have
the same weight. So a bisection over distances finds where a running sum exceeds a number, and a division finds which of
the equal tokens it is. To make bisections cheap, a first pass copies the likely tokens to a short list: each of a row's
TILE lanes knows its largest logit, and the LIKELY-th largest of these is a bound that at least LIKELY tokens reach. A
search that the list can't answer reads the whole row, so the result never depends on the list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kvblocks.kernels.launching import INTERPRETED
from kvblocks.kernels.layout import KernelArgumentError, check_contiguous, check_devices, check_dtype

TILE = 2048
"""How many logits a program reads at a time."""
LIKELY = 512
"""The minimum number of tokens in the list, if a vocabulary has that many lanes."""
MAX_LISTED = 8192
"""The capacity of the list. A row with more equally likely tokens has no list."""
NUM_PARAMETERS = 6
NUM_RESULTS = 3
MAX_VOCABULARY = 2**30

IS_NUMBER, IS_WEIGHT = tl.constexpr(value=True), tl.constexpr(value=False)
"""What a search sums up."""
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_INFINITE_BITS = tl.constexpr(0x7F800000)
_NO_WEIGHT = tl.constexpr(45.0)
"""A distance without weight: e ** -45 * UNIT is below 1 for every possible UNIT."""


@triton.jit
def read_below(values_ptr, start, size, largest, TILE: tl.constexpr):
    """How far TILE values from `start` on are below the largest, as fp32: at most 0, and -inf after the end."""
    index = start + tl.arange(0, TILE)
    value = tl.load(values_ptr + index, mask=index < size, other=0.0)
    below = tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST) - largest
    return tl.where(index < size, below, float("-inf"))


@triton.jit
def distance(below):
    """The bits of -below, which have the same order as the numbers: int32, at least 0."""
    return below.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weigh(below, scale, UNIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """The weights, as int64."""
    if INTERPRETED:
        power = tl.exp(below * scale)
    else:
        power = libdevice.exp(below * scale)  # as torch has it; Triton's own is less exact far from 0
    return (power * UNIT).to(tl.int64)


@triton.jit
def sum_near(
    values_ptr,
    size,
    largest,
    scale,
    most,
    COUNTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The sum of the weights of values whose distance is at most `most`. COUNTS: their number instead."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, size, TILE):
        below = read_below(values_ptr, start, size, largest, TILE)
        is_near = distance(below) <= most
        if COUNTS:
            total += is_near.to(tl.int64)
        else:
            total += tl.where(is_near, weigh(below, scale, UNIT, INTERPRETED), 0)
    return tl.sum(total)


@triton.jit
def find_distance(
    values_ptr,
    size,
    largest,
    scale,
    goal,
    COUNTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The smallest distance up to which the sum of weights, or the number (COUNTS), exceeds `goal`.

    If it never does, a distance without any weight.
    """
    low = tl.full((), 0, tl.int32)
    high = distance(tl.full((), -_NO_WEIGHT, tl.float32) / scale)
    while low < high:
        middle = low + (high - low) // 2
        is_enough = sum_near(values_ptr, size, largest, scale, middle, COUNTS, UNIT, TILE, INTERPRETED) > goal
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    return low


@triton.jit
def look_at(values_ptr, size, largest, scale, where, UNIT: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The sum of weights and the number of tokens nearer than a distance, and the weight of a token at that distance.

    All are int64. The weight is 0 if there is no such token.
    """
    total = tl.zeros([TILE], tl.int64)
    number = tl.zeros([TILE], tl.int64)
    own = tl.zeros([TILE], tl.int64)
    for start in range(0, size, TILE):
        below = read_below(values_ptr, start, size, largest, TILE)
        weight = weigh(below, scale, UNIT, INTERPRETED)
        is_nearer = distance(below) < where
        total += tl.where(is_nearer, weight, 0)
        number += is_nearer.to(tl.int64)
        own = tl.maximum(own, tl.where(distance(below) == where, weight, 0))
    return tl.sum(total), tl.sum(number), tl.max(own)


@triton.jit
def choose_source(row_ptr, vocab_size, list_ptr, list_size, is_listed):
    """Where a search reads: the list or the row."""
    if is_listed:
        values_ptr = list_ptr
        size = list_size
    else:
        values_ptr = row_ptr
        size = vocab_size
    return values_ptr, size


@triton.jit
def read_row(row_ptr, vocab_size, TILE: tl.constexpr):
    """The largest of each lane, the index of the row's first largest logit, and whether there is a NaN."""
    lane = tl.arange(0, TILE)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    index = lane
    nans = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        value = tl.load(row_ptr + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        is_larger = value > largest
        largest = tl.where(is_larger, value, largest)
        index = tl.where(is_larger, start + lane, index)
        nans |= (value != value).to(tl.int32)  # noqa: PLR0124
    is_first = largest == tl.max(largest)
    token = tl.min(tl.where(is_first, index, 0x7FFFFFFF))
    return largest, token, tl.max(nans) > 0


@triton.jit
def list_bound(lanes, largest, LIKELY: tl.constexpr):
    """A distance that the nearest values of at least LIKELY lanes don't exceed."""
    near = distance(tl.minimum(tl.maximum(lanes, -_LARGEST), _LARGEST) - largest)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), _INFINITE_BITS, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        is_enough = tl.sum((near <= middle).to(tl.int32)) >= LIKELY
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    return low


@triton.jit
def sum_row(
    row_ptr,
    vocab_size,
    list_ptr,
    bound,
    least,
    largest,
    scale,
    MAX_LISTED: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """List the values whose distance is at most `bound`. A bound below 0 lists nothing.

    Returns the sum of all weights, how many are at least `least`, how many are listed, and the sum of these.
    """
    total = tl.zeros([TILE], tl.int64)
    listed = tl.zeros([TILE], tl.int64)
    number = tl.zeros([TILE], tl.int64)
    size = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        index = start + tl.arange(0, TILE)
        below = read_below(row_ptr, start, vocab_size, largest, TILE)
        weight = weigh(below, scale, UNIT, INTERPRETED)
        total += weight
        number += ((weight >= least) & (index < vocab_size)).to(tl.int64)
        is_listed = (distance(below) <= bound) & (index < vocab_size)
        count = tl.sum(is_listed.to(tl.int32))
        if count > 0:
            listed += tl.where(is_listed, weight, 0)
            place = size + tl.cumsum(is_listed.to(tl.int32)) - 1
            value = tl.load(row_ptr + index, mask=is_listed, other=0.0)
            tl.store(list_ptr + place, value, mask=is_listed & (place < MAX_LISTED))
            size += count
    return tl.sum(total), tl.sum(number), size, tl.sum(listed)


@triton.jit
def find_token(
    row_ptr, vocab_size, largest, scale, where, goal, UNIT: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The first index at which a running sum over the row exceeds `goal`.

    where: if below 0, weights are summed up; otherwise the tokens at this distance are counted.
    """
    token = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int64)
    for start in range(0, vocab_size, TILE):
        if before <= goal:
            index = start + tl.arange(0, TILE)
            below = read_below(row_ptr, start, vocab_size, largest, TILE)
            if where < 0:
                own = weigh(below, scale, UNIT, INTERPRETED)
            else:
                own = (distance(below) == where).to(tl.int64)
            after = before + tl.sum(own)
            if after > goal:
                running = before + tl.cumsum(own)
                token = tl.min(tl.where(running > goal, index, 0x7FFFFFFF))
            before = after
    return token


@triton.jit
def draw_kernel(
    logits_ptr,
    parameters_ptr,
    results_ptr,
    list_ptr,
    vocab_size,
    stride_row,
    UNIT: tl.constexpr,
    LIKELY: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Draw one token. Grid: (num_draws,). The arguments are those of `draw_tokens`."""
    draw = tl.program_id(0).to(tl.int64)
    own_ptr = parameters_ptr + draw * 6
    row_ptr = logits_ptr + tl.load(own_ptr).to(tl.int64) * stride_row
    scale = tl.load(own_ptr + 1).to(tl.float32)
    top_k = tl.load(own_ptr + 2).to(tl.int64)
    top_p = tl.load(own_ptr + 3)
    min_p = tl.load(own_ptr + 4)
    uniform = tl.load(own_ptr + 5)
    list_ptr += draw * MAX_LISTED
    lanes, token, is_broken = read_row(row_ptr, vocab_size, TILE)
    if (scale > 0) & (is_broken == 0):
        largest = tl.minimum(tl.maximum(tl.max(lanes), -_LARGEST), _LARGEST)
        is_limited = (top_p < 1) | (min_p > 0) | (top_k < vocab_size)
        bound = tl.full((), -1, tl.int32)
        if is_limited:
            bound = list_bound(lanes, largest, LIKELY)
        least = tl.ceil(min_p * UNIT).to(tl.int64)
        goal, number, size, listed = sum_row(
            row_ptr, vocab_size, list_ptr, bound, least, largest, scale, MAX_LISTED, UNIT, TILE, INTERPRETED
        )
        tl.debug_barrier()  # the list is read by other threads than wrote it
        has_list = size <= MAX_LISTED
        where = tl.full((), -1, tl.int32)
        if is_limited:
            limit = tl.maximum(tl.minimum(number, top_k), 1)
            if limit < vocab_size:
                found_ptr, found_size = choose_source(row_ptr, vocab_size, list_ptr, size, has_list & (limit <= size))
                farthest = find_distance(
                    found_ptr, found_size, largest, scale, limit - 1, IS_NUMBER, UNIT, TILE, INTERPRETED
                )
                nearer, count, weight = look_at(
                    found_ptr, found_size, largest, scale, farthest, UNIT, TILE, INTERPRETED
                )
                goal = nearer + (limit - count) * weight
            reached = tl.maximum(tl.minimum(tl.ceil(goal.to(tl.float64) * top_p).to(tl.int64), goal), 1)
            found_ptr, found_size = choose_source(row_ptr, vocab_size, list_ptr, size, has_list & (listed >= reached))
            farthest = find_distance(
                found_ptr, found_size, largest, scale, reached - 1, IS_WEIGHT, UNIT, TILE, INTERPRETED
            )
            nearer, count, weight = look_at(found_ptr, found_size, largest, scale, farthest, UNIT, TILE, INTERPRETED)
            goal = nearer + (reached - nearer + weight - 1) // weight * weight
        goal = (goal.to(tl.float64) * uniform).to(tl.int64)
        if is_limited:
            found_ptr, found_size = choose_source(row_ptr, vocab_size, list_ptr, size, has_list & (listed > goal))
            where = find_distance(found_ptr, found_size, largest, scale, goal, IS_WEIGHT, UNIT, TILE, INTERPRETED)
            nearer, count, weight = look_at(found_ptr, found_size, largest, scale, where, UNIT, TILE, INTERPRETED)
            goal = (goal - nearer) // weight
        token = find_token(row_ptr, vocab_size, largest, scale, where, goal, UNIT, TILE, INTERPRETED)
    tl.store(results_ptr + draw * 3, token.to(tl.float64))
    tl.store(results_ptr + draw * 3 + 1, is_broken.to(tl.float64))
    tl.store(results_ptr + draw * 3 + 2, 1.0)


def draw_tokens(logits: Tensor, parameters: Tensor) -> Tensor:
    """Draw a token for each row of `parameters`: float64 [num_draws, NUM_RESULTS].

    logits: float32 [num_rows, vocab], rows contiguous. parameters: contiguous float64 [num_draws, NUM_PARAMETERS] on
    the same device: the row of logits; 1 / temperature rounded to float32, or 0 to take the first of the largest
    logits; top_k, from 1 to the size of the vocabulary, which is no limit; top_p, 1 for no limit; min_p, 0 for no
    limit; and the random number in [0, 1). Values are not checked. Several draws may share a row.

    Results: the token, whether the row has a NaN (then the token is meaningless), and 1, since the token is certain.
    Infinite logits count as the largest and smallest float32. One launch, O(vocab) for each draw, or O(vocab x 31) if
    limits leave more than the listed tokens. Raises KernelArgumentError. Changes nothing, and never waits for the
    device.
    """
    check_dtype("logits", logits, (torch.float32,))
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_VOCABULARY or logits.stride(1) != 1:
        raise KernelArgumentError(
            f"logits: expected [num_rows, vocab], rows contiguous, at most {MAX_VOCABULARY} tokens; got the shape"
            f" {tuple(logits.shape)} with strides {logits.stride()}"
        )
    check_dtype("parameters", parameters, (torch.float64,))
    if parameters.dim() != 2 or parameters.shape[1] != NUM_PARAMETERS:
        raise KernelArgumentError(
            f"parameters: expected [num_draws, {NUM_PARAMETERS}], got the shape {tuple(parameters.shape)}"
        )
    check_contiguous("parameters", parameters)
    check_devices(logits=logits, parameters=parameters)
    num_draws, vocab_size = len(parameters), logits.shape[1]
    results = torch.empty(num_draws, NUM_RESULTS, dtype=torch.float64, device=logits.device)
    listed = torch.empty(num_draws, MAX_LISTED, dtype=torch.float32, device=logits.device)
    if num_draws:
        draw_kernel[(num_draws,)](
            *(logits, parameters, results, listed, vocab_size, logits.stride(0)),
            UNIT=float(2 ** (62 - vocab_size.bit_length())),
            LIKELY=LIKELY,
            MAX_LISTED=MAX_LISTED,
            TILE=TILE,
            INTERPRETED=INTERPRETED,
            num_warps=16,
        )
    return results
