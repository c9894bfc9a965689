"""Products of a model's weights with few rows, in the layouts of torch and numpy, compared with a whole decode step.

    export THP_MEM_ALLOC_ENABLE=1 OPENBLAS_NUM_THREADS=1
    python -m bench.engine_cpu.products [--rows 1 8] [--rounds N] [--quick] [--json FILE]

A decoded token reads all weights once. So each contestant multiplies all matrices of SmolLM2-135M (538 MB in float32,
random numbers), in the order of its layers, which leaves the caches as a step does. "reading" sums the same matrices.
"a step" is a complete step of the engine, with as many clients as rows. All take turns in one process, on one thread; a
turn is one run that doesn't count and three that do. Times are milliseconds of processor time; GB/s count the weights
once. "of the best" is the share of the fastest product's speed that the step reaches, by medians. --quick: 2 layers and
no engine, to check that it runs.

`kvblocks` commands ask torch for huge pages, like the first variable. numpy is left out unless the second variable
limits its OpenBLAS to one thread.

What it does not show: other models, processors and dtypes, several threads.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import process_time_ns
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.conditions import conditions, keep, print_conditions
from kvblocks.engine import Engine
from kvblocks.engine.model.products import pack, product

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
NUM_LAYERS = 30
PROMPT, RUNS_A_TURN = 32, 3
STEP = "a step of the engine"
READING = "reading alone (a sum)"

Run = Callable[[], object]
Make = Callable[[], Run]
"""Lays out a contestant's weights, so that a process holds one contestant's at a time."""


def make_products(matrices: list[Tensor], num_rows: int) -> dict[str, Make]:
    """Return the contestants: each multiplies all matrices [out, in] by `num_rows` rows."""
    rows = {width: torch.randn(num_rows, width) for width in {matrix.shape[1] for matrix in matrices}}
    inputs = [rows[matrix.shape[1]] for matrix in matrices]
    makes: dict[str, Make] = {
        READING: lambda: partial(_each, Tensor.sum, matrices),
        "F.linear": lambda: partial(_each, F.linear, inputs, matrices),
        "weights as [in, out]": lambda: partial(
            _each, torch.mm, inputs, [matrix.t().contiguous() for matrix in matrices]
        ),
    }
    if os.environ.get("OPENBLAS_NUM_THREADS") == "1":
        columns = [some.numpy().T if num_rows > 1 else some[0].numpy() for some in inputs]
        makes["numpy"] = lambda: partial(_each, np.matmul, [matrix.numpy() for matrix in matrices], columns)
    else:
        print("# numpy is left out: expected OPENBLAS_NUM_THREADS=1 in the environment", flush=True)
    if torch.backends.mkl.is_available():
        makes["MKL, packed weights"] = lambda: partial(
            _each,
            lambda some, packed, matrix: torch.ops.mkl._mkl_linear(some, packed, matrix, None, num_rows),  # noqa: SLF001
            inputs,
            [torch.ops.mkl._mkl_reorder_linear_weight(matrix, num_rows) for matrix in matrices],  # noqa: SLF001
            matrices,
        )
    if pack(matrices[0]).is_mkldnn:
        makes["oneDNN, blocked weights"] = lambda: partial(
            _each, lambda some, packed: product(some, packed, None), inputs, [pack(matrix) for matrix in matrices]
        )
    return makes


def _same(run: Run) -> Run:
    return run


def _each(multiply: Callable[..., object], *columns: Sequence[object]) -> None:
    for arguments in zip(*columns, strict=True):
        multiply(*arguments)


def make_step(engine: Engine, num_clients: int, num_steps: int) -> Run:
    """Return a decode step of `num_clients` clients, which can run `num_steps` times."""
    generator = torch.Generator().manual_seed(num_clients)
    for _ in range(num_clients):
        prompt = torch.randint(1000, 40000, (PROMPT,), generator=generator).tolist()
        engine.submit(prompt, max_tokens=num_steps + 8, ignore_eos=True)
    for _ in range(4):  # the prompts, and the one-time work of first steps
        engine.step()
    return engine.step


def take_turns(makes: dict[str, Make], num_rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of processor time of every round, by contestant. A turn's first run doesn't count."""
    found: dict[str, list[float]] = {name: [] for name in makes}
    for _ in range(num_rounds):
        for name, make in makes.items():
            run = make()
            run()  # brings the contestant's code back, which the others drove out of the caches
            start = process_time_ns()
            for _ in range(RUNS_A_TURN):
                run()
            found[name].append((process_time_ns() - start) / RUNS_A_TURN / 1e6)
            del run
    return found


def make_rows(found: dict[str, list[float]], num_rows: int, num_bytes: int) -> list[dict[str, Any]]:
    """Return a row for each contestant."""
    medians = {name: statistics.median(times) for name, times in found.items()}
    best = min(median for name, median in medians.items() if name not in (STEP, READING))
    return [
        {
            "product": name,
            "rows": num_rows,
            "least_ms": min(times),
            "median_ms": medians[name],
            "most_ms": max(times),
            "gb_per_s": num_bytes / medians[name] / 1e6,
            "of_the_best": best / medians[name],
        }
        for name, times in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        prog="bench.engine_cpu.products", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = [*LAYER * (2 if asked.quick else NUM_LAYERS), *([] if asked.quick else [HEAD])]
    matrices = [torch.randn(shape) * 0.02 for shape in shapes]
    num_bytes = sum(matrix.nbytes for matrix in matrices)
    facts = conditions(torch=torch.__version__, threads=1, clock="processor time", num_rounds=asked.rounds)
    del facts["num_blocks"], facts["block_size"], facts["collector"]
    print_conditions(facts)
    print(f"{'product':<28}{'rows':>5}{'least ms':>10}{'median':>8}{'most':>8}{'GB/s':>7}{'of the best':>13}")
    kept: list[dict[str, Any]] = []
    for num_rows in asked.rows:
        makes = make_products(matrices, num_rows)
        if not asked.quick:
            engine = Engine("smollm2", num_blocks=num_rows * 32)
            step = make_step(engine, num_rows, asked.rounds * (1 + RUNS_A_TURN))
            makes[STEP] = partial(_same, step)
        kept += (rows := make_rows(take_turns(makes, asked.rounds), num_rows, num_bytes))
        for row in rows:
            times = f"{row['least_ms']:>10.1f}{row['median_ms']:>8.1f}{row['most_ms']:>8.1f}"
            print(
                f"{row['product']:<28}{num_rows:>5}{times}{row['gb_per_s']:>7.1f}{row['of_the_best']:>13.0%}",
                flush=True,
            )
    keep(asked.json, facts, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
