"""How each kernel is launched: tiles, warps and stages, by architecture, head_dim and the width of K and V.

The table is checked in, not tuned at run time, so the first call of a process is as fast as the others, and the same
machine always runs the same code. The entries below were chosen by reasoning and by compiling ahead of time (no spills,
and K and V are loaded while the previous tile is computed). One entry was compared with all others on a GPU, an H200:
`decode` with heads of 128 in 16 bits on sm90 is within 1 % of the best of 152. `bench.attention.sweep_kernels` measures
entries on a GPU and prints those to put here.

Each kernel has a dictionary of its own, from (family, head_dim, bytes of an element of K) to a `Launch`. `FAMILIES` has
the families. "any" stands for an architecture without entries, and for Triton's interpreter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

FAMILIES = ("sm80", "sm89", "sm90", "sm100", "gfx942", "any")
"""A100; consumer Ampere and Ada (sm86 to sm89, with less shared memory); H100 and H200; B200; MI300; all others."""

Key = tuple[str, int, int]
"""(family, head_dim, bytes of an element of K)."""


@dataclass(frozen=True)
class Launch:
    """One way to launch a kernel. A kernel ignores the fields that don't apply to it.

    `tile_keys`: keys per iteration of the inner loop; `tile_rows`: query rows of a program, where each head of a group
    counts as a row; `programs_per_sm`: programs of a fixed grid per SM.
    """

    tile_keys: int
    num_warps: int
    num_stages: int
    tile_rows: int = 16
    programs_per_sm: int = 1


def family(device: torch.device) -> str:
    """The family of a device's architecture. Asks the driver for its properties once, never waits for the device.

    O(1), since it is called several times per layer, and asking torch each time would slow down a step noticeably.
    """
    if device.type != "cuda":
        return "any"
    return _family_of_gpu(device) if device.index is None else _remembered_family(device)


def _family_of_gpu(device: torch.device) -> str:
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return "gfx942" if name.startswith("gfx942") else "any"
    major, minor = torch.cuda.get_device_capability(device)
    names = {8: "sm80" if minor == 0 else "sm89", 9: "sm90", 10: "sm100"}
    return names.get(major, "any")  # sm120 has a third less shared memory than sm100, and other tensor cores


_remembered_family = cache(_family_of_gpu)
"""Cached for devices with an index, since "cuda" alone may mean different devices."""


def find(kernel: Mapping[Key, Launch], device: torch.device, head_dim: int, element_bytes: int) -> Launch:
    """The entry for a device in a kernel's dictionary. Every dictionary has all head_dims and widths under "any"."""
    found = kernel.get((family(device), head_dim, element_bytes))
    return found if found is not None else kernel["any", head_dim, element_bytes]


def widen(launch: Launch, rows: int, head_dim: int, element_bytes: int, family_name: str) -> Launch:
    """The entry, changed for tiles of `rows` rows (a power of 2) if that exceeds the entry's, as with large groups.

    The changes were found by compiling ahead of time. More warps keep the sums in registers. fp32 gets smaller tiles of
    keys, since it also holds tiles of K and V in registers. An SM gets no more programs than fit.
    """
    if rows <= launch.tile_rows:
        return launch
    is_wide = element_bytes == 4
    least_warps = 8 if rows >= 64 and (is_wide or family_name == "sm80") else launch.num_warps
    num_warps = min(16, max(launch.num_warps, least_warps, rows * head_dim // (1024 if is_wide else 2048)))
    tile_keys = max(16, launch.tile_keys // 2) if is_wide and rows >= 64 else launch.tile_keys
    fitting = 2 if rows == 32 and family_name in ("sm90", "sm100") else 1
    return replace(
        launch,
        tile_keys=tile_keys,
        num_warps=num_warps,
        num_stages=min(launch.num_stages, 2) if rows >= 128 else launch.num_stages,
        programs_per_sm=min(launch.programs_per_sm, fitting),
    )


CROWDED: tuple[Key, ...] = (("sm90", 128, 2), ("sm100", 128, 2))
"""Entries of `decode` with which only two programs fit on an SM, not three, in calls with a softcap and sinks.

Compiled by triton 3.6.0, these kernels take about 200 registers per thread, but at most 168 without softcap or without
sinks. A third program would run after the first two, which means two rounds of a third of the work instead of one of a
half.
"""


def make_room(launch: Launch, key: Key, *, has_softcap: bool, has_sinks: bool) -> Launch:
    """An entry of `decode` for a call with these options, with as many programs per SM as fit."""
    if key not in CROWDED or not (has_softcap and has_sinks):
        return launch
    return replace(launch, programs_per_sm=min(launch.programs_per_sm, 2))


def narrows_queries(query: Tensor, key_cache: Tensor, rows: int) -> bool:
    """Whether bf16 queries are multiplied with e4m3 as fp16: see `device.tiles.narrow_rows`. rows: the rows of a tile.

    A tile of keys then takes a fifth fewer instructions and 10 to 30 fewer registers. Large tiles on sm90 are the
    exception: their registers are full, and they would spill.
    """
    is_full = family(query.device) == "sm90" and rows >= 64 and query.shape[2] == 256
    return key_cache.dtype == torch.float8_e4m3fn and query.dtype == torch.bfloat16 and not is_full


def reads_pairs(query: Tensor, key_cache: Tensor, rows: int) -> bool:
    """Whether V is read as pairs of e4m3 numbers: see `device.tiles.begin_rows`. rows: the rows of a tile.

    With tensor cores that one warp uses, a tile of keys then takes a third fewer instructions and a fifth fewer
    registers. With tensor cores that a warpgroup uses, it takes more of both.
    """
    has_warpgroups = family(query.device) in ("sm90", "sm100") and rows >= 64
    return key_cache.dtype == torch.float8_e4m3fn and query.dtype != torch.float32 and not has_warpgroups


def launches_early(device: torch.device) -> bool:
    """Whether a merge of decodes or pieces is launched before the programs whose parts it merges have ended.

    By programmatic dependent launch (PDL), which came with compute capability 9.0. The merge finds its work meanwhile,
    and waits before it reads a part. On an H200 this saved 1 to 3 us of 47 to 276 us of decoding, and 20 of 1,558. A
    prompt's attention took 5 to 23 us more with it, of 465 and 1,528, so its merge waits for the end.
    """
    return family(device) in ("sm90", "sm100")


INTERPRETED_SMS = 2
"""The number of SMs to assume in the interpreter, which has none. It is above 1, so that work is divided there, too."""


def count_sms(device: torch.device) -> int:
    """The multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return _sms_of_gpu(device) if device.index is None else _remembered_sms(device)


def _sms_of_gpu(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


_remembered_sms = cache(_sms_of_gpu)


def count_programs(device: torch.device, launch: Launch) -> int:
    """How many programs a fixed grid has: the launch's number for each SM."""
    return launch.programs_per_sm * count_sms(device)


# Decoding reads K and V once and computes little with them, so its speed depends on how many bytes an SM has in flight.
# That must be at least the memory's bandwidth times its latency, some 25 KiB for an SM of an H100. A tile of 16 KiB of
# K and one of V, in two buffers, with two or three programs on an SM, make several times that, and fit in its shared
# memory and registers.
DECODE: dict[Key, Launch] = {
    ("sm80", 64, 2): Launch(128, 4, 3, programs_per_sm=2),
    ("sm80", 64, 4): Launch(64, 4, 3, programs_per_sm=2),
    ("sm80", 128, 2): Launch(64, 4, 3, programs_per_sm=2),
    ("sm80", 128, 4): Launch(32, 4, 3, programs_per_sm=2),
    ("sm80", 256, 2): Launch(32, 4, 3, programs_per_sm=2),
    ("sm80", 256, 4): Launch(16, 4, 3, programs_per_sm=1),
    ("sm90", 64, 1): Launch(64, 4, 4, programs_per_sm=3),
    ("sm90", 64, 2): Launch(128, 4, 3, programs_per_sm=3),
    ("sm90", 64, 4): Launch(64, 4, 3, programs_per_sm=3),
    ("sm90", 128, 1): Launch(64, 4, 4, programs_per_sm=3),
    ("sm90", 128, 2): Launch(64, 4, 3, programs_per_sm=3),
    ("sm90", 128, 4): Launch(32, 4, 3, programs_per_sm=2),
    ("sm90", 256, 1): Launch(32, 4, 4, programs_per_sm=3),
    ("sm90", 256, 2): Launch(32, 4, 3, programs_per_sm=2),
    ("sm90", 256, 4): Launch(16, 4, 3, programs_per_sm=2),
    ("sm100", 64, 1): Launch(64, 4, 4, programs_per_sm=3),
    ("sm100", 64, 2): Launch(128, 4, 3, programs_per_sm=3),
    ("sm100", 64, 4): Launch(32, 4, 4, programs_per_sm=3),
    ("sm100", 128, 1): Launch(64, 4, 3, programs_per_sm=2),
    ("sm100", 128, 2): Launch(64, 4, 3, programs_per_sm=3),
    ("sm100", 128, 4): Launch(32, 4, 3, programs_per_sm=2),
    ("sm100", 256, 1): Launch(32, 4, 4, programs_per_sm=2),
    ("sm100", 256, 2): Launch(32, 4, 3, programs_per_sm=2),
    ("sm100", 256, 4): Launch(16, 4, 3, programs_per_sm=2),
    ("gfx942", 64, 2): Launch(64, 4, 2, programs_per_sm=2),
    ("gfx942", 64, 4): Launch(32, 4, 2, programs_per_sm=2),
    ("gfx942", 128, 2): Launch(32, 4, 2, programs_per_sm=2),
    ("gfx942", 128, 4): Launch(16, 4, 2, programs_per_sm=2),
    ("gfx942", 256, 2): Launch(16, 4, 2, programs_per_sm=2),
    ("gfx942", 256, 4): Launch(16, 4, 1, programs_per_sm=1),
    ("any", 64, 1): Launch(64, 4, 4, programs_per_sm=2),
    ("any", 64, 2): Launch(64, 4, 3, programs_per_sm=2),
    ("any", 64, 4): Launch(32, 4, 3, programs_per_sm=2),
    ("any", 128, 1): Launch(32, 4, 4, programs_per_sm=2),
    ("any", 128, 2): Launch(32, 4, 3, programs_per_sm=2),
    ("any", 128, 4): Launch(16, 4, 3, programs_per_sm=2),
    ("any", 256, 1): Launch(16, 4, 4, programs_per_sm=2),
    ("any", 256, 2): Launch(16, 4, 3, programs_per_sm=2),
    ("any", 256, 4): Launch(16, 4, 2, programs_per_sm=1),
}
"""`decode`, both ways of splitting."""

# A tile of 128 rows feeds the tensor cores of sm90 and sm100: an instruction of a warpgroup takes 64 rows, and there
# are two warpgroups. Older architectures run out of registers with such tiles. Queries in fp32 are multiplied without
# tensor cores, in small tiles.
EXTEND: dict[Key, Launch] = {
    ("sm80", 64, 2): Launch(64, 8, 3, tile_rows=128),
    ("sm80", 64, 4): Launch(32, 4, 2, tile_rows=32),
    ("sm80", 128, 2): Launch(32, 8, 3, tile_rows=128),
    ("sm80", 128, 4): Launch(16, 4, 2, tile_rows=32),
    ("sm80", 256, 2): Launch(32, 8, 2, tile_rows=64),
    ("sm80", 256, 4): Launch(16, 8, 2, tile_rows=32),
    ("sm90", 64, 1): Launch(64, 8, 3, tile_rows=128),
    ("sm90", 64, 2): Launch(128, 8, 3, tile_rows=128),
    ("sm90", 64, 4): Launch(16, 4, 3, tile_rows=32),
    ("sm90", 128, 1): Launch(64, 8, 3, tile_rows=128),
    ("sm90", 128, 2): Launch(64, 8, 3, tile_rows=128),
    ("sm90", 128, 4): Launch(16, 8, 2, tile_rows=32),
    ("sm90", 256, 1): Launch(32, 4, 2, tile_rows=32, programs_per_sm=2),
    ("sm90", 256, 2): Launch(32, 8, 2, tile_rows=128),
    ("sm90", 256, 4): Launch(16, 8, 2, tile_rows=16),
    ("sm100", 64, 1): Launch(64, 8, 3, tile_rows=128),
    ("sm100", 64, 2): Launch(128, 8, 3, tile_rows=128),
    ("sm100", 64, 4): Launch(16, 4, 3, tile_rows=32),
    ("sm100", 128, 1): Launch(128, 8, 2, tile_rows=128),
    ("sm100", 128, 2): Launch(64, 8, 3, tile_rows=128),
    ("sm100", 128, 4): Launch(16, 8, 2, tile_rows=32),
    ("sm100", 256, 1): Launch(32, 8, 2, tile_rows=64),
    ("sm100", 256, 2): Launch(32, 8, 2, tile_rows=128),
    ("sm100", 256, 4): Launch(16, 8, 2, tile_rows=16),
    ("gfx942", 64, 2): Launch(64, 4, 2, tile_rows=128),
    ("gfx942", 64, 4): Launch(32, 4, 2, tile_rows=32),
    ("gfx942", 128, 2): Launch(32, 4, 2, tile_rows=128),
    ("gfx942", 128, 4): Launch(16, 4, 2, tile_rows=32),
    ("gfx942", 256, 1): Launch(32, 4, 2, tile_rows=64),
    ("gfx942", 256, 2): Launch(32, 4, 2, tile_rows=64),
    ("gfx942", 256, 4): Launch(16, 4, 2, tile_rows=32),
    ("any", 64, 1): Launch(32, 4, 2, tile_rows=64),
    ("any", 64, 2): Launch(32, 4, 2, tile_rows=64),
    ("any", 64, 4): Launch(32, 4, 2, tile_rows=32),
    ("any", 128, 1): Launch(32, 4, 2, tile_rows=64),
    ("any", 128, 2): Launch(32, 4, 2, tile_rows=64),
    ("any", 128, 4): Launch(16, 8, 2, tile_rows=32),
    ("any", 256, 1): Launch(32, 8, 2, tile_rows=64),
    ("any", 256, 2): Launch(32, 8, 2, tile_rows=64),
    ("any", 256, 4): Launch(16, 8, 2, tile_rows=16),
}
"""`extend` for sequences with many rows."""

EXTEND_FIXED: dict[Key, Launch] = EXTEND | {("sm90", 256, 2): Launch(32, 8, 2, tile_rows=64)}
"""Batch-invariant `extend`, for both prompts and decoding. It has other tiles where those of `extend` spill."""

EXTEND_NARROW: dict[Key, Launch] = {key: launch for key, launch in EXTEND.items() if key[2] == 4} | {
    ("sm89", 128, 1): Launch(32, 4, 3, tile_rows=32),
    ("sm90", 64, 1): Launch(32, 4, 4, tile_rows=32),
    ("sm100", 64, 2): Launch(64, 4, 3, tile_rows=32),
    ("any", 64, 1): Launch(64, 4, 3, tile_rows=32),
    ("any", 64, 2): Launch(128, 4, 2, tile_rows=32),
    ("any", 128, 1): Launch(64, 4, 3, tile_rows=32),
    ("any", 128, 2): Launch(64, 4, 2, tile_rows=32),
    ("any", 256, 1): Launch(32, 4, 2, tile_rows=32),
    ("any", 256, 2): Launch(32, 4, 2, tile_rows=32),
}
"""`extend` for sequences with few rows. As in decoding, its speed is limited by reading K and V."""

PREFIX_DECODE: dict[Key, Launch] = EXTEND | {
    ("sm90", 64, 4): Launch(16, 4, 2, tile_rows=32),
    ("sm90", 256, 1): Launch(16, 8, 2, tile_rows=64),
    ("sm100", 128, 1): Launch(64, 8, 3, tile_rows=128),
    ("sm100", 256, 2): Launch(64, 8, 2, tile_rows=64),
}
"""`prefix_decode`. Its loop over keys is that of `extend`; it has other tiles where those of `extend` would spill."""


@dataclass(frozen=True)
class CascadeThreshold:
    """When to use `cascade_decode` instead of `decode`.

    min_run_tokens: shorter shared runs don't count. min_saved_share: a cascade must save at least this share of the
    tokens that `decode` would read, counted once for each request. captured_microseconds, eager_microseconds: the cost
    of a cascade per layer in addition to its reads, captured in a CUDA graph or launched by the host instead of
    replaying a graph. The saved reads must take longer than this.
    """

    min_run_tokens: int
    min_saved_share: float
    captured_microseconds: float = 0.0
    eager_microseconds: float = 0.0


# The first cost is measured, on an H200: a cascade whose runs are a page long took 16, 25 and 46 us more than `decode`,
# for 8, 64 and 256 sequences of 512 tokens. The largest is taken, since the time saved is estimated too high where the
# L2 cache holds the runs: with 3,584 of 4,096 tokens shared by 64 sequences 83 us were saved, not the 276 that
# `_READ_BYTES` says. The second cost is rough: four more launches a layer took the host of an H200 220, 430 and 790 us,
# since the step without them took 10 to 20 ms. A cascade writes each row's partial results in fp32, one for each level
# and split, and reads them again. With 32 heads of 128 a part costs as much traffic as K and V of 8 tokens of 8 heads
# in bf16. So a run must be a few hundred tokens long. The rest of the step gets no faster, so a cascade that saves less
# than a third of the reads can't gain much.
CASCADE = CascadeThreshold(
    min_run_tokens=512, min_saved_share=0.3, captured_microseconds=45.0, eager_microseconds=500.0
)
"""For decode steps of the engine."""

# The makers' figures for the memories of A100 (80 GB), L40S, H100 SXM, B200 and MI300X. "any" is a guess. `decode` read
# 4.0e6 on an H200, which counts as an H100 here.
_READ_BYTES = {"sm80": 2.0e6, "sm89": 0.86e6, "sm90": 3.35e6, "sm100": 8.0e6, "gfx942": 5.3e6, "any": 1.0e6}


def read_bytes_per_microsecond(device: torch.device) -> float:
    """The most bytes that a device reads in a microsecond."""
    return _READ_BYTES[family(device)]
