"""Causal attention of ragged rows over block tables: prefill, chunked prefill and speculative verification.

A program computes attention for tiles of rows, one head of K and V at a time, over all or some of a tile's keys.
`device.tiles` says how rows are packed and found. The work is divided by tiles of keys (`device.shares`), so that a few
new tokens on a long context fill a GPU as well as a whole prompt does. A second launch merges what was split.

The host only computes the grid, from shapes alone, so a call can be captured in a CUDA graph and replayed with other
lengths, as long as the shapes stay the same.

A row's bits depend a little on the rest of the batch: on the rows that share its tile, on where shares begin, and on
the size of the tiles. `batch_invariant` cuts all sequences at the same positions, multiples of PIECE_KEYS, and adds up
a row's pieces one by one (`device.pieces`). It uses one kind of loop and one tile size for all rows. Then a row's own
position determines what the row adds up, and in which order. Tiles of keys begin at multiples of the tile's size. A
tile in which a row sees nothing doesn't change the row: its weights are 0, and the sum is multiplied by 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvblocks.kernels import table
from kvblocks.kernels.device.extend import extend_ends_kernel, extend_kernel, extend_merge_kernel
from kvblocks.kernels.device.pieces import piece_kernel, piece_merge_kernel
from kvblocks.kernels.device.shares import SPREAD
from kvblocks.kernels.launching import (
    CHUNK,
    MERGED_ROWS,
    Shares,
    empty_parts,
    empty_results,
    facts_of,
    find_launch,
    merge_options,
    parts_at_once,
    scaling,
    strides,
    tile_constants,
    tile_queries,
)
from kvblocks.kernels.layout import (
    AttentionOptions,
    AttentionShape,
    check_attention,
    check_contiguous,
    check_devices,
    check_dtype,
    check_indices,
    check_shape,
)
from kvblocks.kernels.table import EXTEND, EXTEND_FIXED, EXTEND_NARROW, Launch, count_programs

NARROW_ROWS = 32
"""Small tiles are used up to this many rows per sequence on average, where each head of a group counts as a row."""
HEAD_COST = 4
"""The cost of a head of a tile of rows beyond its keys, in tiles of keys: 5.0 us at 1.4 us per tile on an H200.

These two numbers, and 85 us for everything else, explain four workloads within 2 %, with heads of 128 in bf16. Without
this cost the programs with a prompt's first rows, which have many heads with few keys, took nearly twice as long as the
others.
"""
PIECE_KEYS = 2048
"""Batch-invariant calls cut sequences at multiples of this, which is a multiple of every tile of keys.

A row's bits depend on it. Smaller pieces keep more SMs busy with a short context, but each costs as much as HEAD_COST
tiles more. By these numbers one row on 32k or 128k tokens takes less time with pieces of 2,048 than of 1,024 or 4,096.
That was not measured.
"""
FULL_TILES = 2
"""With this many full tiles of rows and heads per program of the fixed grid, tiles alone fill a device."""
MOST_PART_BYTES = 256 << 20
"""The most bytes of the parts of a batch-invariant call. If they would take more, programs add them up as they go."""


def extend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_invariant: bool = False,
    output: Tensor | None = None,
    launch: Launch | None = None,
    shares: Shares | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch over block tables.

    query: [num_rows, num_heads, head_dim] in fp32, fp16 or bf16, the sequences' rows one after another; key_cache,
    value_cache: [num_blocks, block_size, num_kv_heads, head_dim] in the same dtype or e4m3; block_tables: int32
    [num_seqs, max_blocks]; query_start: int32 [num_seqs + 1], each sequence's first row, then the end of the last;
    seq_lens: int32 [num_seqs], the tokens in context, this step's included: their K and V are stored already. Row i of
    a sequence with n rows is at position `seq_len - n + i`. A sequence may have no rows. The other options are in
    `AttentionOptions`.

    A row before position 0, or of no sequence, sees nothing: its output is 0, and its lse is -inf or its sink.

    batch_invariant: whether a row's bits depend only on its query and position and on its sequence's K and V, not on
    the other rows of the call. This is slower, since even a few rows are computed in tiles for prompts. output: where
    to write, contiguous. launch: used instead of the table's entry. shares: the result of `share_rows` for these rows
    and lengths, this window and `batch_invariant`, whose launch is then used.

    Returns the output, [num_rows, num_heads, head_dim] in the query's dtype, and its lse, fp32 [num_rows, num_heads]:
    the natural logarithm of the softmax's denominator. Raises KernelArgumentError. Changes nothing but `output`, and
    never waits for the device.
    """
    options = AttentionOptions(scale, window, softcap, sinks, k_scale, v_scale)
    tensors = (query, key_cache, value_cache, block_tables, query_start, seq_lens)
    if shares is None:
        if _check_call(tensors, options, output).num_rows == 0:
            return empty_results(query, output)
        rows = (query, key_cache, query_start, seq_lens)
        shares = share_rows(*rows, window=window, batch_invariant=batch_invariant, launch=launch)
    used = shares
    facts = (batch_invariant, *facts_of(options, *tensors, output))
    if batch_invariant:
        pieces = used.prepared(facts, lambda: _prepare_pieces(tensors, options, output, used))
        return _attend_pieces(tensors, options, pieces, used, empty_results(query, output))
    call = used.prepared(facts, lambda: _prepare(tensors, options, output, used))
    return _attend_shared(tensors, options, call, used, empty_results(query, output))


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Call:
    """What is worked out before the launches. num_programs: of the first; merging: the constants of the second.

    merging is empty where nothing is to be merged. For pieces: `num_slots` is as in `piece_kernel`, and num_parts says
    how many parts of each row and head are in memory: 0 where no row has more than one piece.
    """

    shape: AttentionShape
    num_units: int
    num_programs: int
    strides: tuple[int, ...]
    constants: dict[str, int | bool]
    merging: dict[str, int | bool]
    num_slots: int = 0
    num_parts: int = 0


def _attend_shared(
    tensors: _Inputs, options: AttentionOptions, call: _Call, shares: Shares, results: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """`extend` by even shares of tiles. Returns the results, the output and the lse, and changes them."""
    query, key_cache, value_cache, block_tables, query_start, seq_lens = tensors
    if call.shape.num_rows == 0:
        return results
    units = (query_start, seq_lens, shares.ends)
    sizes = (call.shape.num_rows, call.shape.num_seqs, call.num_units)
    part_rows = call.constants["TILE_M"]
    parts = empty_parts(query, call.num_programs, part_rows)
    extend_kernel[(call.num_programs,)](
        *(query, key_cache, value_cache, block_tables, *units, options.sinks, *results, *parts),
        *(*sizes, options.window or 0, *scaling(options), *call.strides),
        **call.constants,
    )
    if call.merging:
        extend_merge_kernel[(call.num_programs - 1, SPREAD.value)](
            *(*units, *results, *parts, *sizes, call.num_programs), **call.merging
        )
    return results


def _attend_pieces(
    tensors: _Inputs, options: AttentionOptions, call: _Call, shares: Shares, results: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Batch-invariant `extend`. Returns the results, the output and the lse, and changes them."""
    query, key_cache, value_cache, block_tables, query_start, seq_lens = tensors
    if call.shape.num_rows == 0:
        return results
    shape, device = (*query.shape[:2], call.num_parts), query.device
    parts = torch.empty(*shape, query.shape[2], dtype=torch.float32, device=device)
    part_lse = torch.empty(shape, dtype=torch.float32, device=device)
    part_sum = torch.empty(shape[:2], dtype=torch.float32, device=device)
    window, sizes = options.window or 0, (call.shape.num_rows, call.shape.num_seqs)
    piece_kernel[(call.num_programs,)](
        *(query, key_cache, value_cache, block_tables, query_start, seq_lens, shares.ends, options.sinks, *results),
        *(parts, part_lse, part_sum, *sizes, call.num_units, call.num_slots, window),
        *(*scaling(options), *call.strides),
        **call.constants,
    )
    if call.merging:
        piece_merge_kernel[(call.num_units, call.constants["NUM_KV_HEADS"], SPREAD.value)](
            *(query_start, seq_lens, *results, parts, part_lse, *sizes, call.num_slots, window),
            **call.merging,
        )
    return results


def _prepare(tensors: _Inputs, options: AttentionOptions, output: Tensor | None, shares: Shares) -> _Call:
    """Check a call. Raises KernelArgumentError."""
    query, key_cache, value_cache, block_tables, *_ = tensors
    shape, num_units, constants = _check_shares(tensors, options, output, shares)
    num_programs = count_programs(query.device, shares.launch)
    merging = _merging(constants, shape) | {"num_warps": 4}
    return _Call(
        shape,
        num_units,
        num_programs,
        strides(query, key_cache, value_cache, block_tables),
        constants,
        merging if num_programs > 1 else {},
    )


def _prepare_pieces(tensors: _Inputs, options: AttentionOptions, output: Tensor | None, shares: Shares) -> _Call:
    """Check a batch-invariant call. Raises KernelArgumentError."""
    query, key_cache, value_cache, block_tables, *_ = tensors
    shape, num_units, constants = _check_shares(tensors, options, output, shares)
    num_programs, num_kv_heads = count_programs(query.device, shares.launch), shape.cache.num_kv_heads
    most = num_slots = _most_pieces(shape.max_blocks * shape.cache.block_size, options.window)
    num_full = query.shape[0] // tile_queries(query, key_cache, shares.launch)
    if num_full * num_kv_heads >= FULL_TILES * num_programs or 4 * query.numel() * num_slots > MOST_PART_BYTES:
        num_programs, num_slots = num_units * num_kv_heads, 0
    pieces: dict[str, int | bool] = {"PIECE": PIECE_KEYS}
    early: dict[str, int | bool] = {"PDL": table.launches_early(query.device)}
    merging = _merging(constants, shape) | pieces | {"HAS_WINDOW": options.window is not None}
    return _Call(
        shape,
        num_units,
        num_programs,
        strides(query, key_cache, value_cache, block_tables),
        constants | pieces | early,
        merging | merge_options(query.device) if num_slots > 1 else {},
        num_slots,
        (num_slots or 2) if most > 1 else 0,
    )


def _most_pieces(num_keys: int, window: int | None) -> int:
    """The most pieces that hold keys which one row sees, of a sequence of so many keys. At least 1."""
    most = max(-(-num_keys // PIECE_KEYS), 1)
    return most if window is None else min(most, (window - 1) // PIECE_KEYS + 2)


def _check_shares(
    tensors: _Inputs, options: AttentionOptions, output: Tensor | None, shares: Shares
) -> tuple[AttentionShape, int, dict[str, int | bool]]:
    """The sizes of a call, its number of units, and its constants. Raises KernelArgumentError."""
    query, key_cache, _values, _tables, query_start, _seq_lens = tensors
    shape = _check_call(tensors, options, output)
    num_units = _count_units(query, key_cache, query_start, shares.launch)
    if shape.num_rows > 0:  # without rows nothing is launched, whatever the shares are
        check_indices("shares.ends", shares.ends, num_units)
        check_devices(query=query, shares=shares.ends)
    flags = {"HAS_WINDOW": options.window is not None, "HAS_SINKS": options.sinks is not None}
    heads = {"NUM_KV_HEADS": shape.cache.num_kv_heads}
    return shape, num_units, heads | tile_constants(query, key_cache, shares.launch, options) | flags


def _merging(constants: dict[str, int | bool], shape: AttentionShape) -> dict[str, int | bool]:
    """The constants of a merge, most of which are its call's."""
    names = ("NUM_KV_HEADS", "GROUP", "HEAD_DIM", "TILE_M")
    sizes = {"ROWS": MERGED_ROWS, "PARTS": parts_at_once(MERGED_ROWS, shape.cache.head_dim)}
    return {name: constants[name] for name in names} | sizes


def _check_call(tensors: _Inputs, options: AttentionOptions, output: Tensor | None) -> AttentionShape:
    """The sizes of a call. Raises KernelArgumentError."""
    query, key_cache, value_cache, block_tables, query_start, seq_lens = tensors
    shape = check_attention(query, key_cache, value_cache, block_tables, seq_lens, options)
    check_indices("query_start", query_start, shape.num_seqs + 1)
    check_devices(query=query, query_start=query_start)
    if output is not None:
        check_shape("output", output, tuple(query.shape))
        check_dtype("output", output, (query.dtype,))
        check_contiguous("output", output)
        check_devices(query=query, output=output)
    return shape


def share_rows(
    query: Tensor,
    key_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    window: int | None = None,
    batch_invariant: bool = False,
    launch: Launch | None = None,
) -> Shares:
    """Plan how `extend` divides its work, for all calls with these rows, lengths and options. Shapes are as there.

    `extend` makes the shares itself if it gets none. All layers with the same window can use the same shares. One
    launch of one program. Changes nothing, and never waits for the device.
    """
    if launch is None:
        launch = _choose_launch(query, key_cache, query_start, is_fixed=batch_invariant)
    num_units = _count_units(query, key_cache, query_start, launch)
    ends = torch.empty(num_units, dtype=torch.int32, device=query.device)
    extend_ends_kernel[(1,)](
        *(query_start, seq_lens, ends, query.shape[0], len(seq_lens), num_units, window or 0),
        NUM_KV_HEADS=key_cache.shape[2],
        TILE_Q=tile_queries(query, key_cache, launch),
        TILE_N=PIECE_KEYS if batch_invariant else launch.tile_keys,
        HAS_WINDOW=window is not None,
        HEAD_COST=0 if batch_invariant else HEAD_COST,
        CHUNK=CHUNK,
    )
    return Shares(ends, launch)


def _count_units(query: Tensor, key_cache: Tensor, query_start: Tensor, launch: Launch) -> int:
    """The most tiles of rows that there can be: those of the sequences, and those of rows that no sequence has."""
    return query.shape[0] // tile_queries(query, key_cache, launch) + len(query_start)


def _choose_launch(query: Tensor, key_cache: Tensor, query_start: Tensor, *, is_fixed: bool) -> Launch:
    """The table's entry. Where sequences have few rows on average, as in speculative verification: one of small tiles.

    is_fixed: choose the same entry whatever the rows are.
    """
    group_size = query.shape[1] // key_cache.shape[2]
    if is_fixed:
        return find_launch(EXTEND_FIXED, query, key_cache)
    is_narrow = query.shape[0] * group_size <= NARROW_ROWS * (len(query_start) - 1)
    return find_launch(EXTEND_NARROW if is_narrow else EXTEND, query, key_cache)
