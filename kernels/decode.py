"""Attention of one query per sequence over block tables: a decode step.

The keys of a sequence are split over several programs, whose parts a second launch merges. There are two ways to split:

* Stream-K, the default: a fixed number of programs share the tiles of all sequences and heads evenly. The tiles stand
  in one row, sequence by sequence, head by head, and a program takes the next so many. So at most one head's tiles
  begin before the program's and at most one's go on after them: at most two parts. A head that a program has to itself
  is written straight to the output. Where the shares lie follows from the lengths alone, so the merge works it out
  again: no atomics, no plan from the host. (After Osama and others, "Stream-K", 2023, which splits matrix products.)
* Splits of a fixed number of keys: which splits a sequence has, and the order in which they are merged, depends on its
  own length only. So its bits do not depend on the batch. The price is unequal work, and parts for every split.

The host reads nothing but shapes, so a call can be captured in a CUDA graph and replayed with other block tables and
lengths in the same tensors.
"""

import torch
import triton
from torch import Tensor

from kvblocks.kernels.decode_kernels import split_kernel, split_merge_kernel, stream_kernel, stream_merge_kernel
from kvblocks.kernels.layout import (
    QUERY_DTYPES,
    AttentionOptions,
    AttentionShape,
    KernelArgumentError,
    check_attention,
    check_devices,
    check_dtype,
    check_last_stride,
    check_shape,
    is_interpreted,
)
from kvblocks.kernels.table import DECODE, Launch, count_programs, find

_INTERPRETED = is_interpreted()


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    split_keys: int | None = None,
    output: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's last position over all its keys.

    query: [num_seqs, num_heads, head_dim] in fp32, fp16 or bf16; key_cache, value_cache: [num_blocks, block_size,
    num_kv_heads, head_dim] in the same dtype or e4m3; block_tables: int32 [num_seqs, max_blocks]; seq_lens: int32
    [num_seqs], the tokens in context, this one's included, whose K and V are stored already: at most as many as the
    table has slots. A length of 0 is a row of padding: its output is 0 and its lse -inf, or its sink. Slots that a
    sequence does not own, or that its window has left, are not read. The rest: `AttentionOptions`.

    split_keys: None shares the work evenly; a number splits sequences into so many keys, and their bits then do not
    depend on the batch. output: where to write, or None; any supported dtype, fp32 say for parts that will be merged.
    launch: instead of the table's entry.

    Returns the output, [num_seqs, num_heads, head_dim], and the natural logarithm of what it was divided by, fp32
    [num_seqs, num_heads]. Raises KernelArgumentError. Changes `output` only, and never waits for the device.
    """
    options = AttentionOptions(scale, window, softcap, sinks, k_scale, v_scale)
    shape = check_attention(query, key_cache, value_cache, block_tables, seq_lens, options)
    check_shape("query", query, (shape.num_seqs, *query.shape[1:]))
    if split_keys is not None and split_keys < 1:
        raise KernelArgumentError(f"split_keys: expected None or at least 1, got {split_keys}")
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    check_shape("output", output, tuple(query.shape))
    check_dtype("output", output, QUERY_DTYPES)
    check_last_stride("output", output)
    check_devices(query=query, output=output)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if launch is None:
        # With queries in fp32 the tiles are computed in fp32, whatever K and V are stored as.
        element_bytes = 4 if query.dtype == torch.float32 else key_cache.element_size()
        launch = find(DECODE, query.device, shape.cache.head_dim, element_bytes)
    if shape.num_seqs > 0:
        tensors = (query, key_cache, value_cache, block_tables, seq_lens)
        if split_keys is None:
            _decode_stream(tensors, options, shape, launch, (output, lse))
        else:
            _decode_split(tensors, options, shape, launch, (output, lse), split_keys)
    return output, lse


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _decode_stream(
    tensors: _Inputs, options: AttentionOptions, shape: AttentionShape, launch: Launch, results: tuple[Tensor, Tensor]
) -> None:
    """Stream-K. Changes `results`, the output and the lse."""
    query, key_cache, value_cache, block_tables, seq_lens = tensors
    output, lse = results
    group_size, head_dim, num_kv_heads = shape.group_size, shape.cache.head_dim, shape.cache.num_kv_heads
    num_programs = count_programs(query.device, launch)
    parts = torch.empty(num_programs, 2, group_size, head_dim, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(num_programs, 2, group_size, dtype=torch.float32, device=query.device)
    window = options.window or 0
    constants = {
        "MAX_SEQS": triton.next_power_of_2(shape.num_seqs),
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group_size,
        "HEAD_DIM": head_dim,
        "TILE_N": launch.tile_keys,
        "HAS_WINDOW": options.window is not None,
        "HAS_SINKS": options.sinks is not None,
    }
    stream_kernel[(num_programs,)](
        *(query, key_cache, value_cache, block_tables, seq_lens, options.sinks, output, lse, parts, part_lse),
        *(shape.num_seqs, window, *_numbers(options), *_strides(tensors), *output.stride()[:2]),
        **constants,
        **_tile_constants(options, shape, launch),
    )
    stream_merge_kernel[(shape.num_seqs, shape.num_heads)](
        *(seq_lens, options.sinks, output, lse, parts, part_lse),
        *(shape.num_seqs, num_programs, window, *output.stride()[:2]),
        **constants,
    )


def _decode_split(
    tensors: _Inputs,
    options: AttentionOptions,
    shape: AttentionShape,
    launch: Launch,
    results: tuple[Tensor, Tensor],
    split_keys: int,
) -> None:
    """Splits of a fixed number of keys. Changes `results`, the output and the lse."""
    query, key_cache, value_cache, block_tables, seq_lens = tensors
    output, lse = results
    max_keys = shape.max_blocks * shape.cache.block_size
    if options.window is not None:
        max_keys = min(max_keys, options.window)
    max_splits = max(1, triton.cdiv(max_keys, split_keys))
    grid = (shape.num_seqs, shape.cache.num_kv_heads, max_splits)
    part_shape = (*grid, shape.group_size)
    parts = torch.empty(*part_shape, shape.cache.head_dim, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(part_shape, dtype=torch.float32, device=query.device)
    window = options.window or 0
    constants = {
        "GROUP": shape.group_size,
        "HEAD_DIM": shape.cache.head_dim,
        "HAS_WINDOW": options.window is not None,
        "HAS_SINKS": options.sinks is not None,
    }
    split_kernel[grid](
        *(query, key_cache, value_cache, block_tables, seq_lens, options.sinks, parts, part_lse),
        *(window, split_keys, *_numbers(options), *_strides(tensors)),
        **constants,
        TILE_N=launch.tile_keys,
        **_tile_constants(options, shape, launch),
    )
    split_merge_kernel[(shape.num_seqs, shape.num_heads)](
        *(seq_lens, options.sinks, output, lse, parts, part_lse),
        *(window, split_keys, max_splits, *output.stride()[:2]),
        **constants,
    )


def _numbers(options: AttentionOptions) -> tuple[float, float, float]:
    return options.scale * options.k_scale, options.softcap or 0.0, options.v_scale


def _strides(tensors: _Inputs) -> tuple[int, ...]:
    query, key_cache, value_cache, block_tables, _ = tensors
    caches = (*key_cache.stride()[:3], *value_cache.stride()[:3])
    return (*query.stride()[:2], *caches, block_tables.stride(0))


def _tile_constants(options: AttentionOptions, shape: AttentionShape, launch: Launch) -> dict[str, int | bool]:
    return {
        "BLOCK_SIZE": shape.cache.block_size,
        # 16 rows are the least that tensor cores multiply.
        "TILE_M": max(16, triton.next_power_of_2(shape.group_size)),
        "STAGES": launch.num_stages,
        "HAS_SOFTCAP": options.softcap is not None,
        "INTERPRETED": _INTERPRETED,
        "num_warps": launch.num_warps,
    }
