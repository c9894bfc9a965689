"""Parts of a decode step at the shapes of Llama 3 8B: which kernels it runs, what drawing takes, and packed weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from bench.gpu_session.cases import Facts

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 128_256
STEEPNESS = (1.0, 3.0, 6.0)
"""Standard deviations of logits. Random weights give 1; with 6, a few tokens have most of the weight."""
DRAWS = {
    "greedy": (0.0, None, 1.0, 0.0),
    "temperature": (1.25, None, 1.0, 0.0),
    "top_p 0.9": (1.25, None, 0.9, 0.0),
    "top_k 50": (1.25, 50, 1.0, 0.0),
    "min_p 0.05": (1.25, None, 1.0, 0.05),
}
"""1 / temperature, or 0 for the largest logit; top_k; top_p; min_p."""
PRODUCTS = {"queries, keys and values": (4096, 1024, 1024), "gate and up": (14_336, 14_336)}
"""Columns of products that have the same input, of 4,096 numbers."""
NUM_LAYERS = 4
"""How many layers' weights take turns, so that none are in the L2 cache when they are needed again."""
MOST_KERNELS = 16


def kernel_times(call: Callable[[], object], number: int) -> Facts:
    """Microseconds of each kernel in a call, by CUPTI, and how often it ran; of the MOST_KERNELS that take most time.

    A kernel that begins early counts while it waits, so the sum may be more than the call takes.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(number):
            call()
        torch.cuda.synchronize()
    found = {event.key[:60]: (event.device_time_total, event.count) for event in profile.key_averages()}
    times = {key: (round(time / number, 1), count / number) for key, (time, count) in found.items() if time > 0}
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:MOST_KERNELS]
    return {"kernels_us": dict(longest), "all_kernels_us": round(sum(time for time, _ in times.values()), 1)}


def draws(device: torch.device, num_rows: int, vocabulary: int, steepness: tuple[float, ...] = STEEPNESS) -> Facts:
    """Microseconds of the kernel that draws, alone, for logits of each steepness."""
    from kvblocks.kernels.draw import draw_tokens

    facts: Facts = {}
    for deviation in steepness:
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(num_rows, vocabulary, generator=generator, device=device) * deviation
        for name, (scale, top_k, top_p, min_p) in DRAWS.items():
            rows = [[row, scale, top_k or vocabulary, top_p, min_p, (row + 0.5) / num_rows] for row in range(num_rows)]
            parameters = torch.tensor(rows, dtype=torch.float64).to(device)
            facts[f"{name}, steepness {deviation:g}"] = _microseconds([partial(draw_tokens, logits, parameters)])
    return facts


def products(device: torch.device) -> Facts:
    """Microseconds of products by packed weights, and by those weights apart."""
    facts: Facts = {}
    for num_rows in (1, 32, 256, 2048):
        rows = torch.randn(num_rows, 4096, device=device, dtype=torch.bfloat16)
        for name, sizes in PRODUCTS.items():
            shape = (sum(sizes), 4096)
            packed = [torch.randn(shape, device=device, dtype=torch.bfloat16) / 64 for _ in range(NUM_LAYERS)]
            apart = [[part.clone() for part in weight.split(sizes)] for weight in packed]
            ways = {"packed": [[weight] for weight in packed], "apart": apart}
            for way, layers in ways.items():
                calls = [partial(_multiply, rows, weights) for weights in layers]
                facts[f"{num_rows} rows, {name}, {way}"] = [_microseconds(calls) for _ in range(2)]
    return facts


def _multiply(rows: "Tensor", weights: "list[Tensor]") -> "list[Tensor]":
    return [torch.nn.functional.linear(rows, weight) for weight in weights]


def _microseconds(calls: Sequence[Callable[[], object]]) -> float | None:
    """The median time of a call; None without a GPU, where the calls are made once."""
    from bench.attention.timing import time_calls

    if torch.cuda.is_available():
        return round(time_calls(calls).median, 2)
    for call in calls:
        call()
    return None
