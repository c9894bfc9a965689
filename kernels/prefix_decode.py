"""Attention of decoding requests over the blocks that they share. Each shared run is read once for its whole cohort.

The idea is from Hydragen and from FlashInfer's cascade. Requests with a common prefix begin with the same physical
blocks. So the queries of a cohort, with all their heads, form one matrix that multiplies one copy of K: one matrix
product of 128 rows, for example, instead of many of 4. The output is a partial result with its lse.
`cascade.cascade_decode`, whose first pass this is, merges it with the attention over each request's own blocks.

Cohorts nest: for example, 64 requests share a system prompt, and eight of them also share a document after it. A
request is in at most one cohort of each level, and gets one partial result from each of its cohorts. One launch
computes all cohorts of all levels. Their runs are divided by tiles of keys (`device.shares`), so that a few long runs
fill a GPU as well as many short ones.
"""

import torch
from torch import Tensor

from kvblocks.kernels.device.prefix import prefix_ends_kernel, prefix_kernel
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
    check_devices,
    check_indices,
    check_shape,
)
from kvblocks.kernels.runs import SharedRuns
from kvblocks.kernels.table import PREFIX_DECODE, Launch, count_programs

_Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def new_lse(query: Tensor, runs: SharedRuns) -> Tensor:
    """A new lse of -inf for every level, row and head. It stays -inf for rows that are in no cohort of a level.

    Each call with the same runs writes the same elements, those of the cohorts' rows, so all layers of a step can use
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
    """Attend for single queries over the runs of blocks that they share, and nothing else. At least one cohort.

    tensors: as in `cascade_decode`; a cohort's blocks are read from its first member's table. lse: the result of
    `new_lse`, which is changed. Returns partial results, fp32 [num_levels, num_rows, num_heads, head_dim], undefined
    for rows in no cohort of a level, and the launch that merges what was split.
    """
    query, key_cache, *_ = tensors
    num_units = _count_units(query, key_cache, runs, shares.launch)
    check_indices("shares.ends", shares.ends, num_units)
    check_shape("lse", lse, (runs.num_levels, shape.num_rows, shape.num_heads))
    check_devices(query=query, shares=shares.ends, lse=lse)
    output = torch.empty((*lse.shape, shape.cache.head_dim), dtype=torch.float32, device=query.device)
    constants = tile_constants(query, key_cache, shares.launch, options)
    num_programs = count_programs(query.device, shares.launch)
    parts, part_lse = empty_parts(query, num_programs, constants["TILE_M"])
    results = (output, lse, parts, part_lse)
    prefix_kernel[(num_programs,)](
        *(*tensors, runs.members, runs.cohort_start),
        *(runs.run_start, runs.run_stop, runs.level, shares.ends, *results),
        *(runs.num_cohorts, num_units, shape.num_rows, *scaling(options)),
        *strides(*tensors),
        NUM_KV_HEADS=shape.cache.num_kv_heads,
        **constants,
    )
    kept = {name: constants[name] for name in ("GROUP", "HEAD_DIM", "TILE_M")}
    return output, Merge(
        (num_programs - 1, constants["TILE_M"] // MERGED_ROWS),
        (
            *(runs.members, runs.cohort_start, runs.level, shares.ends, *results),
            *(runs.num_cohorts, num_units, shape.num_rows, num_programs),
        ),
        {"NUM_KV_HEADS": shape.cache.num_kv_heads, **kept}
        | {"ROWS": MERGED_ROWS, "PARTS": parts_at_once(MERGED_ROWS, shape.cache.head_dim)},
    )


def share_runs(query: Tensor, key_cache: Tensor, runs: SharedRuns, *, launch: Launch | None = None) -> Shares:
    """Plan how `attend_runs` divides its work, for all calls with these runs. At least one cohort; shapes as there.

    launch: used instead of the table's entry. All layers of a step can use the same shares. One launch of one program.
    Changes nothing, and never waits for the device.
    """
    launch = find_launch(PREFIX_DECODE, query, key_cache) if launch is None else launch
    num_units = _count_units(query, key_cache, runs, launch)
    ends = torch.empty(num_units, dtype=torch.int32, device=query.device)
    prefix_ends_kernel[(1,)](
        *(runs.cohort_start, runs.run_start, runs.run_stop, ends, runs.num_cohorts, num_units),
        NUM_KV_HEADS=key_cache.shape[2],
        BLOCK_SIZE=key_cache.shape[1],
        TILE_Q=tile_queries(query, key_cache, launch),
        TILE_N=launch.tile_keys,
        CHUNK=CHUNK,
    )
    return Shares(ends, launch)


def _count_units(query: Tensor, key_cache: Tensor, runs: SharedRuns, launch: Launch) -> int:
    """The most tiles of members that there can be."""
    return runs.members.shape[0] // tile_queries(query, key_cache, launch) + runs.num_cohorts
