"""Timing on a GPU: many calls, each on other memory than the one before, are captured in a CUDA graph.

The graph is replayed, and each replay is timed by CUDA events.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

NUM_SAMPLES = 9
GRAPH_SECONDS = 0.01
COPY_BYTES = 2 << 30
L2_TIMES = 4
"""All pools together have this many times the size of the L2 cache, so no call finds its K and V there."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: median, minimum and maximum of some samples."""

    median: float
    low: float
    high: float
    is_graph: bool


def l2_bytes(device: torch.device) -> int:
    """The size of the L2 cache."""
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


def count_copies(cache_bytes: int, device: torch.device) -> int:
    """How many pools together have L2_TIMES the size of the L2 cache."""
    return max(1, -(-L2_TIMES * l2_bytes(device) // cache_bytes))


def time_calls(calls: Sequence[Call]) -> Timing:
    """Time calls that are repeated in turn as one CUDA graph; without a graph if capturing fails."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    start = perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    num_rounds = max(1, min(200, int(GRAPH_SECONDS / (perf_counter() - start))))

    def run() -> None:
        for _ in range(num_rounds):
            for call in calls:
                call()

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay: Call = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        replay = run
    num_calls = num_rounds * len(calls)
    samples = [_time_once(replay) / num_calls for _ in range(NUM_SAMPLES + 2)][2:]
    return Timing(statistics.median(samples), min(samples), max(samples), replay is not run)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy by a kernel, counting bytes read and written.

    The kernel negates, since a plain copy in a graph isn't a kernel, and only reaches two thirds of this on an H200.
    """
    source = torch.randint(1 << 20, (COPY_BYTES // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    timing = time_calls([lambda: torch.neg(source, out=target)])
    return 2 * COPY_BYTES / (timing.median * 1e-6)


def _time_once(replay: Call) -> float:
    """Return the microseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
