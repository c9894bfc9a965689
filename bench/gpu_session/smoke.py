"""The item `smoke`: checks every entry of the launch table and every option of the kernels once against float64.

Each case is a small call of one kernel. The first call of a process compiles it, so several processes share the cases.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu_session.cases import Case, Facts

if TYPE_CHECKING:
    from bench.attention.cases import Contestant, Workload

LARGEST_ERRORS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.01}
"""The largest root mean square errors that count as right, relative to the exact results."""


@dataclass(frozen=True)
class Smoke:
    """A call of a kernel."""

    name: str
    workload: "Workload"
    call: "Contestant"

    def run(self, device: torch.device) -> Facts:
        """Compute it, and compare some of its rows with the exact result."""
        from bench.attention import cases

        batch = cases.build(self.workload, device, 0)
        output = self.call(batch)
        error = cases.Checker(batch).error(output)
        is_right = error <= LARGEST_ERRORS[self.workload.dtype] and bool(output.isfinite().all())
        return {"error": error, "is_right": is_right}


def kernels() -> "list[tuple[str, Workload, Contestant]]":
    """Every way of computing attention, with lengths that make it share, split and merge."""
    from bench.attention.cases import Workload, our_contestants

    prompts = Workload("prompts", [(300, 4000), (1, 900), (64, 64), (17, 17)])
    workloads = (
        Workload("decodes", [(1, length) for length in (4097, 1, 640, 33_000, 2048, 15)]),
        prompts,
        Workload("few rows", [(3, 3000), (3, 100), (2, 64), (3, 3)]),
        Workload("shared", [(1, 2100 + 7 * index) for index in range(8)], num_shared=2048),
    )
    found = {}
    for workload in workloads:
        for name, way, _ in our_contestants(workload):
            if workload.name != "shared" or "cascade" in name:
                found[f"{workload.name}: {name}"] = (workload, way)
    return [(name, *pair) for name, pair in found.items()]


def smokes() -> Iterator[Smoke]:
    """Yield the most important first: heads of 128 in bf16, then other sizes and dtypes, then options and pages."""
    known = kernels()
    dtypes = {"bf16": (torch.bfloat16, False), "e4m3": (torch.bfloat16, True), "fp16": (torch.float16, False)}
    dtypes["fp32"] = (torch.float32, False)
    for head_dim in (128, 64, 256):
        for dtype_name, (dtype, is_fp8) in dtypes.items():
            for name, workload, call in known:
                shape = replace(workload, head_dim=head_dim, dtype=dtype, is_fp8=is_fp8)
                yield Smoke(f"{name}, head_dim {head_dim}, {dtype_name}", shape, call)
    for name, workload, call in known:
        options: tuple[dict[str, Any], ...] = ({"window": 100}, {"softcap": 5.0}, {"window": 100, "softcap": 5.0})
        for chosen in options[1:2] if workload.num_shared else options:  # a cascade has no windows
            told = ", ".join(f"{key} {value:g}" for key, value in chosen.items())
            yield Smoke(f"{name}, {told}", replace(workload, options=chosen), call)
        for block_size in (32, 64, 128):
            yield Smoke(f"{name}, pages of {block_size}", replace(workload, block_size=block_size), call)


def cases(*, is_rehearsal: bool) -> Iterator[Case]:
    """Yield all cases on the GPU, or one shrunk call of each kernel in Triton's interpreter."""
    from bench.attention.cases import shrink

    device = torch.device("cpu" if is_rehearsal else "cuda")
    for smoke in list(smokes())[: len(kernels())] if is_rehearsal else smokes():
        tried = replace(smoke, workload=_narrow(shrink(smoke.workload), smoke)) if is_rehearsal else smoke
        yield tried.name, partial(tried.run, device)


def _narrow(shrunk: "Workload", smoke: Smoke) -> "Workload":
    """A prompt that `shrink` made, with as few rows as its kernel is for."""
    if smoke.name.startswith("few rows"):
        return replace(shrunk, lengths=[(3, 40), (2, 9)])
    return shrunk
