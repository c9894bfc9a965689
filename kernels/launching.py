"""Shared by the host sides of `decode`, `extend` and `prefix_decode`: tiles, constants and strides of launches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvblocks.kernels import table
from kvblocks.kernels.layout import FP8, AttentionOptions, is_interpreted
from kvblocks.kernels.table import Key, Launch, find

INTERPRETED = is_interpreted()
CHUNK = 1024
"""How many units' ends (`device.shares`) a program computes at once."""
MERGED_ROWS = 4
"""How many rows of a tile a program merges at once."""


Prepared = TypeVar("Prepared")
Facts = tuple[object, ...]
"""Everything that the checks of a call look at. If two calls have equal facts, one check suffices."""


def facts_of(options: AttentionOptions, query: Tensor, *tensors: Tensor | None) -> Facts:
    """The facts of a call with these arguments."""
    given = (query, *tensors, options.sinks, options.k_scale, options.v_scale)
    return (
        torch.cuda.current_device() if query.is_cuda else None,
        *(options.scale, options.window, options.softcap),
        *[
            None
            if one is None
            else (one.shape, one.stride(), one.dtype, one.device, one.data_ptr() % 2 if one.dtype == FP8 else 0)
            for one in given
        ],
    )


@dataclass(frozen=True)
class Shares:
    """How a call's work is divided: see `device.shares`. Valid for calls with the same lengths, shapes and window.

    ends: int32 [num_units], on the device; launch: the table entry with the sizes of tiles.

    The layers of a step make calls with the same shares and with tensors of the same kinds. So what a call checks and
    prepares before it launches is kept here for the next one: see `prepared`.
    """

    ends: Tensor
    launch: Launch
    _last: list[tuple[Facts, Any]] = field(default_factory=list, repr=False, compare=False)

    def prepared(self, facts: Facts, prepare: Callable[[], Prepared]) -> Prepared:
        """Return what `prepare` returned for the previous call if that had the same facts; otherwise call it now."""
        if not self._last or self._last[0][0] != facts:
            self._last[:] = [(facts, prepare())]
        found: Prepared = self._last[0][1]
        return found


@dataclass(frozen=True)
class Merge:
    """The arguments of a kernel such as `stream_merge_kernel`, which merges the parts of heads that programs split.

    grid: (programs of the call minus 1, how many merge a head). A single program splits no head.
    """

    grid: tuple[int, int]
    arguments: tuple[object, ...]
    constants: dict[str, int]

    @property
    def num_programs(self) -> int:
        """The number of programs of the launch."""
        return self.grid[0] * self.grid[1]


def find_launch(kernel: dict[Key, Launch], query: Tensor, key_cache: Tensor) -> Launch:
    """The table's entry for a query and a cache. Queries in fp32 lead to tiles in fp32, whatever the dtype of K."""
    element_bytes = _element_bytes(query, key_cache)
    launch = find(kernel, query.device, query.shape[-1], element_bytes)
    rows = tile_rows(query.shape[1] // key_cache.shape[2], launch)
    return table.widen(launch, rows, query.shape[-1], element_bytes, table.family(query.device))


def make_room(launch: Launch, query: Tensor, key_cache: Tensor, options: AttentionOptions) -> Launch:
    """An entry of `decode`, changed to as many programs per SM as fit with these options, with the same tiles."""
    key = table.family(query.device), query.shape[-1], _element_bytes(query, key_cache)
    flags = {"has_softcap": options.softcap is not None, "has_sinks": options.sinks is not None}
    return table.make_room(launch, key, **flags)


def _element_bytes(query: Tensor, key_cache: Tensor) -> int:
    return 4 if query.dtype == torch.float32 else key_cache.element_size()


def tile_rows(group_size: int, launch: Launch) -> int:
    """TILE_M: the table's number of rows, or more if a group has more heads than that."""
    return max(launch.tile_rows, 1 << (group_size - 1).bit_length())


def tile_queries(query: Tensor, key_cache: Tensor, launch: Launch) -> int:
    """How many queries fit into a tile of rows: each takes one row for each head of a group."""
    group_size = query.shape[1] // key_cache.shape[2]
    return tile_rows(group_size, launch) // group_size


def tile_constants(
    query: Tensor, key_cache: Tensor, launch: Launch, options: AttentionOptions
) -> dict[str, int | bool]:
    """The constants and launch options of kernels that attend."""
    group_size = query.shape[1] // key_cache.shape[2]
    rows = tile_rows(group_size, launch)
    return {
        "GROUP": group_size,
        "HEAD_DIM": query.shape[2],
        "BLOCK_SIZE": key_cache.shape[1],
        "TILE_M": rows,
        "TILE_N": launch.tile_keys,
        "STAGES": launch.num_stages,
        "NARROWED": table.narrows_queries(query, key_cache, rows),
        "PAIRED": table.reads_pairs(query, key_cache, rows),
        "HAS_SOFTCAP": options.softcap is not None,
        "INTERPRETED": INTERPRETED,
        "num_warps": launch.num_warps,
    }


Scaling = tuple[Tensor | None, Tensor | None, float, float]


def scaling(options: AttentionOptions) -> Scaling:
    """The scales of K and of V, the scale of scores, and softcap or 0."""
    return options.k_scale, options.v_scale, options.scale, options.softcap or 0.0


def strides(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor) -> tuple[int, ...]:
    """The strides of the query's rows and heads, of blocks, slots and heads of K and V, and of the tables' rows."""
    return (*query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], block_tables.stride(0))


def empty_results(query: Tensor, output: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tensors to write to: the given output or a new one, and an lse."""
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return output, torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)


def empty_parts(query: Tensor, num_programs: int, part_rows: int) -> tuple[Tensor, Tensor]:
    """Uninitialized tensors for the parts of programs that divide a call's work: fp32 rows, and their lse."""
    parts = torch.empty(num_programs, 2, part_rows, query.shape[-1], dtype=torch.float32, device=query.device)
    part_lse = torch.empty(num_programs, 2, part_rows, dtype=torch.float32, device=query.device)
    return parts, part_lse


def merge_options(device: torch.device) -> dict[str, int | bool]:
    """The constant `PDL` and the launch options of a kernel that merges parts of the launch before it."""
    options: dict[str, int | bool] = {"PDL": table.launches_early(device), "num_warps": 4}
    return options | {"launch_pdl": True} if options["PDL"] else options


def parts_at_once(rows: int, head_dim: int) -> int:
    """How many parts of `rows` rows a merge reads at once: as many as take 32 registers per thread of 4 warps."""
    return max(2, 4096 // (rows * head_dim))
