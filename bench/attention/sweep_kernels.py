"""Measure ways to launch the attention kernels on this GPU, and print the fastest as entries for kernels/table.py.

`python -m bench.attention.sweep_kernels` sweeps all, `--kernel DECODE --head-dim 128 --bytes 2` one entry. Every
candidate runs on the same few batches, each replayed from a CUDA graph. The one with the smallest product of times
wins, so all batches count equally. A candidate that does not compile, does not fit, or computes a wrong result is out.

Candidates of an entry are compiled by several processes (`--processes`), and then measured one after another. `--json
FILE` writes each candidate's times to a file at once. Another run with the same file continues after what it has.

The table's current entries were chosen by reasoning and by compiling ahead of time, without a GPU. So far a sweep has
checked one of them, on an H200 (see kernels/table.py).
"""

import argparse
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from bench.attention import sass
from bench.attention.recording import SMS, Recording, record
from bench.attention.sweep_results import SweepResults, Times
from kvblocks.kernels import table
from kvblocks.kernels.layout import FP8
from kvblocks.kernels.table import Launch

HEADS = (32, 8)
BLOCK_SIZE = 16
NUM_CALLS, NUM_REPLAYS = 20, 7
TOLERANCE = 0.05
"""Outputs are of order 0.1 to 1. Rounding changes them by far less than this, and a wrong kernel by far more."""

# (sequences, rows of each, tokens in context). What decoding reads is more than an L2 cache holds, or the cache's
# bandwidth would be measured.
SHAPES = {
    "DECODE": ((1, 1, 131072), (16, 1, 4096), (64, 1, 4096), (256, 1, 1024)),
    "EXTEND": ((1, 4096, 4096), (4, 1024, 5120), (16, 256, 256)),
    "EXTEND_NARROW": ((32, 4, 4096), (128, 2, 1024)),
}
ROW_TILES = {"DECODE": (16,), "EXTEND": (32, 64, 128), "EXTEND_NARROW": (16, 32)}
PROGRAMS_PER_SM = {"DECODE": (1, 2, 3, 4), "EXTEND": (1,), "EXTEND_NARROW": (1,)}
DTYPES = {1: (torch.bfloat16, FP8), 2: (torch.bfloat16, torch.bfloat16), 4: (torch.float32, torch.float32)}

CASCADE_SHAPES = ((8, 512), (64, 512), (256, 512))
"""(sequences, tokens in context). Only the first page is shared, so a cascade reads nearly as much as `decode`."""

Call = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Timing:
    """One candidate's median microseconds for each of its kernel's shapes."""

    launch: Launch
    microseconds: tuple[float, ...]

    @property
    def score(self) -> float:
        """The geometric mean: less is better."""
        return math.exp(statistics.fmean(math.log(time) for time in self.microseconds))


def candidates(kernel: str, head_dim: int, element_bytes: int) -> Iterator[Launch]:
    """Yield what is worth trying: tiles whose K takes 2 to 64 KiB."""
    for tile_keys, num_warps, num_stages in product((16, 32, 64, 128), (4, 8), (1, 2, 3, 4, 5)):
        if 2**11 <= tile_keys * head_dim * element_bytes <= 2**16:
            for tile_rows, programs in product(ROW_TILES[kernel], PROGRAMS_PER_SM[kernel]):
                yield Launch(tile_keys, num_warps, num_stages, tile_rows, programs)


def make_call(
    kernel: str, shape: tuple[int, int, int], head_dim: int, element_bytes: int, device: torch.device
) -> Call:
    """A call of a kernel on a batch whose blocks are scattered."""
    from kvblocks.kernels.decode import decode
    from kvblocks.kernels.extend import extend

    num_seqs, num_rows, context = shape
    dtype, kv_dtype = DTYPES[element_bytes]
    max_blocks = -(-context // BLOCK_SIZE)
    torch.manual_seed(0)
    tables = torch.randperm(num_seqs * max_blocks, device=device).int().view(num_seqs, max_blocks)
    cache_shape = (num_seqs * max_blocks, BLOCK_SIZE, HEADS[1], head_dim)
    key_cache, value_cache = (torch.randn(cache_shape, device=device, dtype=dtype).to(kv_dtype) for _ in range(2))
    query = torch.randn(num_seqs * num_rows, HEADS[0], head_dim, device=device, dtype=dtype)
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
    start = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_rows
    scale = head_dim**-0.5
    if kernel == "DECODE":
        return lambda: decode(query, key_cache, value_cache, tables, seq_lens, scale=scale)
    return lambda: extend(query, key_cache, value_cache, tables, start, seq_lens, scale=scale)


def measure(call: Call) -> float:
    """Median microseconds of one call, of NUM_CALLS in a CUDA graph that is replayed NUM_REPLAYS times."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / NUM_CALLS * 1000)
    return statistics.median(times)


def try_launch(
    launch: Launch, launches: dict[table.Key, Launch], key: table.Key, calls: list[Call], expected: list[Tensor]
) -> Timing | None:
    """Time a candidate as the entry `key` of a kernel's dictionary. Returns None if it is out.

    Restores the dictionary.
    """
    before = launches.get(key)
    launches[key] = launch
    try:
        for call, output in zip(calls, expected, strict=True):
            if not (call()[0].float() - output).abs().max() < TOLERANCE:
                print(f"    {launch}: wrong")
                return None
        return Timing(launch, tuple(measure(call) for call in calls))
    except Exception as error:  # noqa: BLE001 - compiler and driver may raise anything; the sweep goes on
        print(f"    {launch}: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}")
        return None
    finally:
        del launches[key]
        if before is not None:
            launches[key] = before


def record_launch(launch: Launch, kernel: str, key: table.Key) -> Recording:
    """What a candidate launches on all shapes of its kernel, for the key's family. Nothing is computed."""
    launches: dict[table.Key, Launch] = getattr(table, kernel)
    with record(key[0]) as recording, patch.dict(launches, {key: launch}):
        for shape in SHAPES[kernel]:
            make_call(kernel, shape, *key[1:], torch.device("meta"))()
    return recording


def _compile_share(kernel: str, key: table.Key, launches: list[Launch]) -> None:
    for launch in launches:
        with suppress(Exception):  # whatever it is, measuring the candidate meets it again, and says so
            for specialisation in record_launch(launch, kernel, key).specialisations.values():
                sass.build(specialisation, key[0])


def compile_candidates(kernel: str, key: table.Key, launches: list[Launch], num_processes: int) -> None:
    """Compile candidates into Triton's cache, in processes that use no GPU.

    If the compiler kills one, that is no error. The measurements then find them there. Compiling them one by one would
    take most of a sweep's time.
    """
    if num_processes < 2 or not launches or key[0] not in SMS:
        return
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(_compile_share, kernel, key, launches[i::num_processes]) for i in range(num_processes)]
        for share in shares:
            with suppress(BrokenProcessPool):
                share.result()


def sweep(kernel: str, head_dim: int, element_bytes: int, results: SweepResults, num_processes: int) -> None:
    """Sweep one entry. Print the fastest candidate, with its times and the mean of the table's current entry."""
    launches: dict[table.Key, Launch] = getattr(table, kernel)
    device = torch.device("cuda")
    key = (table.family(device), head_dim, element_bytes)
    present = launches.get(key) or launches["any", head_dim, element_bytes]
    tried = dict.fromkeys([present, *candidates(kernel, head_dim, element_bytes)])
    compile_candidates(kernel, key, [one for one in tried if not results.knows(kernel, key, one)], num_processes)
    calls = [make_call(kernel, shape, head_dim, element_bytes, device) for shape in SHAPES[kernel]]
    expected = [call()[0].float() for call in calls]

    def times_of(launch: Launch) -> Times:
        found = try_launch(launch, launches, key, calls, expected)
        return None if found is None else found.microseconds

    found = {launch: results.measured(kernel, key, launch, partial(times_of, launch)) for launch in tried}
    timings = [Timing(launch, times) for launch, times in found.items() if times is not None]
    if not timings:
        print(f"  # {kernel} {key}: no candidate ran")
        return
    best = min(timings, key=lambda timing: timing.score)
    was = next((timing.score for timing in timings if timing.launch == present), math.nan)
    fields = f"{best.launch.tile_keys}, {best.launch.num_warps}, {best.launch.num_stages}"
    more = f", tile_rows={best.launch.tile_rows}, programs_per_sm={best.launch.programs_per_sm}"
    times = ", ".join(f"{time:.1f}" for time in best.microseconds)
    print(f'    ("{key[0]}", {head_dim}, {element_bytes}): Launch({fields}{more}),')
    print(f"    # {kernel}: {times} us for {SHAPES[kernel]}; mean {best.score:.1f}, the present entry's {was:.1f}")


def make_cascade(num_seqs: int, context: int, head_dim: int) -> tuple[Call, Call]:
    """A call of `decode`, and one of `cascade_decode` with the same result."""
    from kvblocks.kernels.cascade import cascade_decode, own_parts, share_cascade
    from kvblocks.kernels.decode import decode, share_decodes
    from kvblocks.kernels.runs import SharedRuns

    device, scale, max_blocks = torch.device("cuda"), head_dim**-0.5, -(-context // BLOCK_SIZE)
    torch.manual_seed(0)
    tables = torch.randperm(num_seqs * max_blocks, device=device).int().view(num_seqs, max_blocks)
    tables[:, 0] = tables[0, 0]
    cache_shape = (num_seqs * max_blocks, BLOCK_SIZE, HEADS[1], head_dim)
    caches = [torch.randn(cache_shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    query = torch.randn(num_seqs, HEADS[0], head_dim, device=device, dtype=torch.bfloat16)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
    runs = SharedRuns.build([(range(num_seqs), 0, 1)], num_seqs, device)
    own = own_parts(tables, lengths, runs, BLOCK_SIZE)
    alone = share_decodes(query, caches[0], lengths)
    shares = share_cascade(query, caches[0], own, runs)
    return (
        lambda: decode(query, *caches, tables, lengths, scale=scale, shares=alone),
        lambda: cascade_decode(query, *caches, own, tables, runs, scale=scale, shares=shares),
    )


def measure_cascades(head_dim: int) -> None:
    """Print how much longer a layer takes with a cascade that saves no reading, in a graph.

    That is `captured_microseconds` of `table.CASCADE`.
    """
    for num_seqs, context in CASCADE_SHAPES:
        flat, cascade = make_cascade(num_seqs, context, head_dim)
        if not (flat()[0].float() - cascade()[0].float()).abs().max() < TOLERANCE:
            print(f"    # CASCADE, head_dim {head_dim}, {num_seqs} x {context}: wrong")
            continue
        times = measure(flat), measure(cascade)
        cost = times[1] - times[0]
        print(f"    # CASCADE, head_dim {head_dim}, {num_seqs} x {context}: captured_microseconds={cost:.1f}", end="")
        print(f"  (decode {times[0]:.1f} us, cascade_decode {times[1]:.1f}; the table has {table.CASCADE})")


def main() -> None:
    """Parse the arguments and sweep."""
    parser = argparse.ArgumentParser(prog="bench.attention.sweep_kernels", description=__doc__)
    parser.add_argument("--kernel", choices=sorted([*SHAPES, "CASCADE"]), action="append")
    parser.add_argument("--head-dim", type=int, choices=(64, 128, 256), action="append")
    parser.add_argument("--bytes", type=int, choices=(1, 2, 4), action="append", help="bytes of an element of K")
    parser.add_argument(
        "--json", type=Path, help="JSON lines: results are appended, and those of an earlier run reused"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="processes that compile (default: %(default)s)"
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.attention.sweep_kernels: expected a GPU, found none")
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = SweepResults(given.json, torch.cuda.get_device_name())
    kernels = given.kernel or [*SHAPES, "CASCADE"]
    if "CASCADE" in kernels:
        for head_dim in given.head_dim or (64, 128, 256):
            measure_cascades(head_dim)
    for kernel in (name for name in kernels if name in SHAPES):
        for head_dim, element_bytes in product(given.head_dim or (64, 128, 256), given.bytes or (1, 2, 4)):
            if element_bytes > 1 or torch.cuda.get_device_capability() >= (8, 9):
                sweep(kernel, head_dim, element_bytes, results, given.processes)


if __name__ == "__main__":
    main()
