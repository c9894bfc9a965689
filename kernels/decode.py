"""Attention of one query per sequence over block tables: a decode step.

The keys of a sequence are split among several programs, whose parts are merged by a second launch. There are two ways
to split:

* Even shares, the default: a fixed number of programs divide the tiles of all sequences and heads (`device.shares`).
* Splits of a fixed number of keys: a sequence's splits, and the order in which they are merged, depend on its own
  length only. So its bits do not depend on the batch. The price is unequal work, and a part for every split.

The host reads only shapes, so a call can be captured in a CUDA graph and replayed with other block tables and lengths
in the same tensors.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvblocks.kernels import table
from kvblocks.kernels.device.decode import (
    decode_ends_kernel,
    split_kernel,
    split_merge_kernel,
    stream_kernel,
    stream_merge_kernel,
)
from kvblocks.kernels.launching import (
    CHUNK,
    Merge,
    Shares,
    empty_parts,
    empty_results,
    facts_of,
    find_launch,
    make_room,
    merge_options,
    parts_at_once,
    scaling,
    strides,
    tile_constants,
)
from kvblocks.kernels.layout import (
    QUERY_DTYPES,
    AttentionOptions,
    AttentionShape,
    KernelArgumentError,
    check_attention,
    check_devices,
    check_dtype,
    check_indices,
    check_last_stride,
    check_shape,
)
from kvblocks.kernels.table import DECODE, Launch, count_programs


def share_decodes(
    query: Tensor, key_cache: Tensor, seq_lens: Tensor, *, window: int | None = None, launch: Launch | None = None
) -> Shares:
    """Plan how `decode` divides its work, for all calls with these lengths and this window. Shapes are as there.

    `decode` makes the shares itself if it gets none. All layers with the same window can use the same shares. launch:
    used instead of the table's entry. One launch of one program. Changes nothing, and never waits for the device.
    """
    launch = find_launch(DECODE, query, key_cache) if launch is None else launch
    ends = torch.empty_like(seq_lens)
    if len(seq_lens) > 0:
        decode_ends_kernel[(1,)](
            *(seq_lens, ends, len(seq_lens), window or 0),
            NUM_KV_HEADS=key_cache.shape[2],
            TILE_N=launch.tile_keys,
            HAS_WINDOW=window is not None,
            CHUNK=CHUNK,
        )
    return Shares(ends, launch)


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    split_keys: int | None = None,
    output: Tensor | None = None,
    launch: Launch | None = None,
    shares: Shares | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend for the last position of each sequence, over all its keys.

    query: [num_seqs, num_heads, head_dim] in fp32, fp16 or bf16; key_cache, value_cache: [num_blocks, block_size,
    num_kv_heads, head_dim] in the same dtype or e4m3; block_tables: int32 [num_seqs, max_blocks]; seq_lens: int32
    [num_seqs], the tokens in context, the query's own included: their K and V are stored already. A length is at most
    the number of slots in the sequence's table. A length of 0 is a row of padding: its output is 0 and its lse -inf, or
    its sink. Slots that a sequence does not own, or that its window has left, are not read. The other options are in
    `AttentionOptions`.

    split_keys: None divides the work evenly. A number splits sequences into pieces of this many keys, after which bits
    do not depend on the batch. output: where to write, or None; any supported dtype, such as fp32 for parts to be
    merged. launch: used instead of the table's entry. shares: the result of `share_decodes` for these lengths and this
    window, whose launch is then used.

    Returns the output, [num_seqs, num_heads, head_dim], and its lse, fp32 [num_seqs, num_heads]: the natural logarithm
    of the softmax's denominator. Raises KernelArgumentError. Changes `output` only, and never waits for the device.
    """
    options = AttentionOptions(scale, window, softcap, sinks, k_scale, v_scale)
    tensors = (query, key_cache, value_cache, block_tables, seq_lens)
    if split_keys is not None and split_keys < 1:
        raise KernelArgumentError(f"split_keys: expected None or at least 1, got {split_keys}")
    if split_keys is None:
        return _decode_shared(tensors, options, output, launch, shares)
    shape = _check_call(tensors, options, output)
    results = empty_results(query, output)
    if shape.num_seqs > 0:
        launch = find_launch(DECODE, query, key_cache) if launch is None else launch
        _decode_split(tensors, options, shape, launch, results, split_keys)
    return results


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _decode_shared(
    tensors: _Inputs, options: AttentionOptions, output: Tensor | None, launch: Launch | None, shares: Shares | None
) -> tuple[Tensor, Tensor]:
    """`decode` by even shares. shares: None: they are made."""
    query, key_cache, *_, seq_lens = tensors
    if shares is None:
        _check_call(tensors, options, output)
        shares = share_decodes(query, key_cache, seq_lens, window=options.window, launch=launch)
    used = shares

    def prepare() -> StreamCall:
        return prepare_stream(tensors, options, _check_call(tensors, options, output), used)

    call = used.prepared(facts_of(options, *tensors, output), prepare)
    results = empty_results(query, output)
    if call.shape.num_seqs > 0:
        merge = attend_stream(tensors, options, call, used, results)
        if merge.num_programs > 0:
            stream_merge_kernel[merge.grid](*merge.arguments, **merge.constants, **merge_options(query.device))
    return results


@dataclass(frozen=True)
class StreamCall:
    """What is prepared before a call of `attend_stream`.

    constants, merging: the constants of the kernel and of the merge.
    """

    shape: AttentionShape
    num_programs: int
    strides: tuple[int, ...]
    constants: dict[str, int | bool]
    merging: dict[str, int]


def prepare_stream(tensors: _Inputs, options: AttentionOptions, shape: AttentionShape, shares: Shares) -> StreamCall:
    """Check that the shares fit these tensors, which `check_attention` has checked. Changes nothing."""
    query, *caches, _seq_lens = tensors
    check_indices("shares.ends", shares.ends, shape.num_seqs)
    check_devices(query=query, shares=shares.ends)
    launch = make_room(shares.launch, query, caches[0], options)
    heads = {"NUM_KV_HEADS": shape.cache.num_kv_heads}
    flags = {"HAS_WINDOW": options.window is not None, "HAS_SINKS": options.sinks is not None}
    early = {"PDL": table.launches_early(query.device)}
    return StreamCall(
        shape,
        count_programs(query.device, launch),
        strides(query, *caches),
        heads | tile_constants(query, caches[0], launch, options) | flags | early,
        {
            **heads,
            "GROUP": shape.group_size,
            "HEAD_DIM": shape.cache.head_dim,
            "PARTS": parts_at_once(1, shape.cache.head_dim),
        },
    )


def attend_stream(
    tensors: _Inputs, options: AttentionOptions, call: StreamCall, shares: Shares, results: tuple[Tensor, Tensor]
) -> Merge:
    """Decode by even shares, except for the merge, which is returned. Changes `results`, the output and the lse."""
    output, lse = results
    shape, num_programs = call.shape, call.num_programs
    parts, part_lse = empty_parts(tensors[0], num_programs, shape.group_size)
    output_strides = output.stride()[:2]
    stream_kernel[(num_programs,)](
        *(*tensors, shares.ends, options.sinks, output, lse, parts, part_lse),
        *(shape.num_seqs, options.window or 0, *scaling(options), *call.strides, *output_strides),
        **call.constants,
    )
    return Merge(
        (num_programs - 1, shape.group_size),
        (shares.ends, output, lse, parts, part_lse, shape.num_seqs, num_programs, *output_strides),
        call.merging,
    )


def _check_call(tensors: _Inputs, options: AttentionOptions, output: Tensor | None) -> AttentionShape:
    """The sizes of a call. Raises KernelArgumentError."""
    query = tensors[0]
    shape = check_attention(*tensors, options)
    check_shape("query", query, (shape.num_seqs, *query.shape[1:]))
    if output is not None:
        check_shape("output", output, tuple(query.shape))
        check_dtype("output", output, QUERY_DTYPES)
        check_last_stride("output", output)
        check_devices(query=query, output=output)
    return shape


def _decode_split(
    tensors: _Inputs,
    options: AttentionOptions,
    shape: AttentionShape,
    launch: Launch,
    results: tuple[Tensor, Tensor],
    split_keys: int,
) -> None:
    """Splits of a fixed number of keys. Changes `results`, the output and the lse."""
    query, *caches, seq_lens = tensors
    output, lse = results
    max_keys = shape.max_blocks * shape.cache.block_size
    if options.window is not None:
        max_keys = min(max_keys, options.window)
    max_splits = max(1, triton.cdiv(max_keys, split_keys))
    num_kv_heads = shape.cache.num_kv_heads
    part_shape = (shape.num_seqs, num_kv_heads, max_splits, shape.group_size)
    parts = torch.empty(*part_shape, shape.cache.head_dim, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(part_shape, dtype=torch.float32, device=query.device)
    window = options.window or 0
    flags = {"HAS_WINDOW": options.window is not None, "HAS_SINKS": options.sinks is not None}
    split_kernel[(shape.num_seqs * num_kv_heads * max_splits,)](
        *(*tensors, options.sinks, parts, part_lse),
        *(num_kv_heads, max_splits, window, split_keys, *scaling(options), *strides(query, *caches)),
        **flags,
        **tile_constants(query, caches[0], launch, options),
        PDL=table.launches_early(query.device),
    )
    split_merge_kernel[(shape.num_seqs, shape.num_heads)](
        *(seq_lens, options.sinks, output, lse, parts, part_lse),
        *(window, split_keys, max_splits, *output.stride()[:2]),
        **flags,
        GROUP=shape.group_size,
        HEAD_DIM=shape.cache.head_dim,
        PARTS=parts_at_once(1, shape.cache.head_dim),
        **merge_options(query.device),
    )
