"""Attention of decoding requests over the blocks that they share: each shared run is read once for all of its group.

The idea is from Hydragen and from FlashInfer's cascade. Requests with a common prefix begin with the same physical
blocks. So the queries of a group, with all their heads, make one matrix that multiplies one copy of K: a matrix product
of 128 rows instead of many of 4. The output is a partial result with its lse. `cascade.cascade_decode` merges it with
the attention over each request's own blocks.

Groups nest: 64 requests share a system prompt, and eight of them also share a document after it. A request is then in
one group of each level, and gets one partial result from each. One launch computes all groups of all levels. Their runs
are shared out by tiles of keys (`device.shares`), so that a few long runs fill a GPU as well as many short ones. A
second launch merges what was split.
"""

import torch
from torch import Tensor

from kvblocks.kernels.device.prefix import prefix_ends_kernel, prefix_kernel, prefix_merge_kernel
from kvblocks.kernels.launching import (
    CHUNK,
    MERGED_ROWS,
    Merge,
    Shares,
    empty_parts,
    find_launch,
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
    check_devices,
    check_indices,
    check_shape,
)
from kvblocks.kernels.runs import SharedRuns
from kvblocks.kernels.table import PREFIX_DECODE, Launch


def prefix_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    runs: SharedRuns,
    *,
    scale: float,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    launch: Launch | None = None,
    shares: Shares | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of single queries over the runs of blocks that they share, and over nothing else.

    query: [num_rows, num_heads, head_dim] in fp32, fp16 or bf16, one row a request; key_cache, value_cache:
    [num_blocks, block_size, num_kv_heads, head_dim] in the same dtype or e4m3; block_tables: int32 [num_rows,
    max_blocks]; runs: see `SharedRuns`. A group's blocks are read from its first member's table. launch: used instead
    of the table's entry. shares: what `share_runs` made for these runs; its launch is then used.

    Returns partial results, fp32 [num_levels, num_rows, num_heads, head_dim], and their lse (natural logarithm), fp32
    [num_levels, num_rows, num_heads]. Where a row is in no group of a level, the lse is -inf and the partial result is
    undefined. Raises KernelArgumentError. Changes nothing, and never waits for the device.
    """
    options = AttentionOptions(scale, softcap=softcap, k_scale=k_scale, v_scale=v_scale)
    shape = check_attention(query, key_cache, value_cache, block_tables, runs.num_shared, options)
    runs.check(shape)
    lse = new_lse(query, runs)
    if runs.num_groups == 0:
        return torch.empty((*lse.shape, shape.cache.head_dim), dtype=torch.float32, device=query.device), lse
    shares = share_runs(query, key_cache, runs, launch=launch) if shares is None else shares
    output, merge = attend_runs((query, key_cache, value_cache, block_tables), runs, options, shape, shares, lse)
    if merge.num_programs > 0:
        prefix_merge_kernel[merge.grid](*merge.arguments, **merge.constants, num_warps=4)
    return output, lse


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def new_lse(query: Tensor, runs: SharedRuns) -> Tensor:
    """An lse of -inf for every level, row and head. It stays so for rows that are in no group of a level.

    Each call with the same runs writes the same elements, those of the groups' rows. So all layers of a step can use
    one tensor.
    """
    return torch.full((runs.num_levels, *query.shape[:2]), -torch.inf, dtype=torch.float32, device=query.device)


def attend_runs(
    tensors: _Inputs,
    runs: SharedRuns,
    options: AttentionOptions,
    shape: AttentionShape,
    shares: Shares,
    lse: Tensor,
) -> tuple[Tensor, Merge]:
    """`prefix_decode` of at least one group, but for the launch that is returned. lse: of `new_lse`; changes it."""
    query, key_cache, *_ = tensors
    num_units = _count_units(query, key_cache, runs, shares.launch)
    check_indices("shares.ends", shares.ends, num_units)
    check_shape("lse", lse, (runs.num_levels, shape.num_rows, shape.num_heads))
    check_devices(query=query, shares=shares.ends, lse=lse)
    output = torch.empty((*lse.shape, shape.cache.head_dim), dtype=torch.float32, device=query.device)
    constants = tile_constants(query, key_cache, shares.launch, options)
    num_programs, parts, part_lse = empty_parts(query, shares.launch, constants["TILE_M"])
    results = (output, lse, parts, part_lse)
    prefix_kernel[(num_programs,)](
        *(*tensors, runs.members, runs.group_start),
        *(runs.run_start, runs.run_stop, runs.level, shares.ends, *results),
        *(runs.num_groups, num_units, shape.num_rows, *scaling(options)),
        *strides(*tensors),
        NUM_KV_HEADS=shape.cache.num_kv_heads,
        **constants,
    )
    kept = {name: constants[name] for name in ("GROUP", "HEAD_DIM", "TILE_M")}
    return output, Merge(
        (num_programs - 1, constants["TILE_M"] // MERGED_ROWS),
        (
            *(runs.members, runs.group_start, runs.level, shares.ends, *results),
            *(runs.num_groups, num_units, shape.num_rows, num_programs),
        ),
        {"NUM_KV_HEADS": shape.cache.num_kv_heads, **kept}
        | {"ROWS": MERGED_ROWS, "PARTS": parts_at_once(MERGED_ROWS, shape.cache.head_dim)},
    )


def share_runs(query: Tensor, key_cache: Tensor, runs: SharedRuns, *, launch: Launch | None = None) -> Shares:
    """How `prefix_decode` shares out its work, for all calls with these runs, of at least one group; shapes as there.

    `prefix_decode` makes the shares itself where it gets none. All layers of a step can use the same shares. One launch
    of one program. Changes nothing, and never waits for the device.
    """
    launch = find_launch(PREFIX_DECODE, query, key_cache) if launch is None else launch
    num_units = _count_units(query, key_cache, runs, launch)
    ends = torch.empty(num_units, dtype=torch.int32, device=query.device)
    prefix_ends_kernel[(1,)](
        *(runs.group_start, runs.run_start, runs.run_stop, ends, runs.num_groups, num_units),
        NUM_KV_HEADS=key_cache.shape[2],
        BLOCK_SIZE=key_cache.shape[1],
        TILE_Q=tile_queries(query, key_cache, launch),
        TILE_N=launch.tile_keys,
        CHUNK=CHUNK,
    )
    return Shares(ends, launch)


def _count_units(query: Tensor, key_cache: Tensor, runs: SharedRuns, launch: Launch) -> int:
    """The most tiles of members that there can be."""
    return runs.members.shape[0] // tile_queries(query, key_cache, launch) + runs.num_groups
