"""Decode steps of the engine on a GPU: `python -m bench.attention.engine_gpu [--json FILE]`.

A random model of a common shape decodes batches of several sizes, through the Triton kernels with and without CUDA
graphs, and through torch's attention. Batches whose requests share a prefix are decoded without cascade attention, and
with it, both with and without CUDA graphs. The difference that cascade attention makes without graphs, divided by the
number of layers, is `eager_microseconds` of `CASCADE` in kernels/table.py. The bench times whole steps, with scheduling
and sampling, after some untimed ones: the median, minimum and maximum of NUM_STEPS. It also counts what a step uploads.
All contestants run the same model on the same prompts.

`--rehearse` needs no GPU: a tiny model runs every case once, in Triton's interpreter; nothing is timed, and the tokens
of all contestants must be the same.

Not shown: prefill, sampling with a temperature, requests that come and go, and other models.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from bench.attention.kernel_keys import fix_keys
from bench.conditions import cpu_model, gpu_state, keep, source

if TYPE_CHECKING:
    from kvblocks.engine import Engine, LoadedModel

NO_GPU = """bench.attention.engine_gpu: expected a GPU that torch can use, got none.
`--rehearse` runs every case once on the CPU, tiny, in Triton's interpreter, to check that all of it works."""
NUM_WARM_STEPS, NUM_STEPS = 16, 100
BLOCK_SIZE = 16
FLASH_ATTN_BLOCK_SIZE = 256
"""The smallest page that flash-attn takes, in tokens."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`batch` requests of `context` tokens each, the first `num_shared` of which are the same in all."""

    batch: int
    context: int
    num_shared: int = 0

    @property
    def name(self) -> str:
        """The case's name in the results."""
        shared = f", {self.num_shared} shared" if self.num_shared else ""
        return f"batch {self.batch} x {self.context} tokens{shared}"


CASES = (
    *(Case(1, 1024), Case(8, 1024), Case(64, 1024)),
    *(Case(8, 1024, num_shared=512), Case(64, 1024, num_shared=512), Case(64, 4096, num_shared=3584)),
)
TINY_CASES = (Case(1, 20), Case(3, 20), Case(3, 40, num_shared=32))
# About 1.1e9 parameters, as many as Llama 3.2's smallest has, and its shape but for a smaller vocabulary.
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
TINY_SHAPE = SHAPE | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


def random_model(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> "LoadedModel":
    """Return a model with random weights, made as a Hugging Face folder and loaded like any other."""
    from bench.random_model import write_weights
    from kvblocks.engine import LoadedModel

    fields = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False} | shape
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), fields, dtype)
        return LoadedModel.load(folder, device, dtype)


def contestants(case: Case, model: "LoadedModel", num_tokens: int) -> Iterator[tuple[str, "Engine"]]:
    """Yield engines with room for the case and `num_tokens` more tokens of each request."""
    from kvblocks.engine import Engine
    from kvblocks.engine.attention.cascade import CascadePlanner
    from kvblocks.engine.run.decode_step import GraphCapture, run_in_place
    from kvblocks.engine.run.device_runner import DeviceRunner
    from kvblocks.kernels.table import CascadeThreshold

    num_blocks = case.batch * -(-(case.context + num_tokens) // BLOCK_SIZE)

    def make(attention: str) -> "Engine":
        return Engine(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, attention=attention)

    def replace_runner(engine: "Engine", *, is_captured: bool, shares: bool) -> "Engine":
        computed = engine.runner.model
        engine.runner = None  # type: ignore[assignment]  # frees its cache before another one is made
        capture = (GraphCapture() if model.device.type == "cuda" else run_in_place) if is_captured else None
        threshold = CascadeThreshold(min_run_tokens=1, min_saved_share=0.0)
        find_cohorts = engine.manager.inspect.shared_prefixes
        cascade = CascadePlanner(find_cohorts, BLOCK_SIZE, model.device, threshold) if shares else None
        engine.runner = DeviceRunner(computed, num_blocks, BLOCK_SIZE, capture=capture, cascade=cascade)
        return engine

    yield "triton, graphs", replace_runner(make("triton"), is_captured=True, shares=False)
    yield "triton, no graphs", replace_runner(make("triton"), is_captured=False, shares=False)
    if case.num_shared:
        yield "triton, cascade", replace_runner(make("triton"), is_captured=True, shares=True)
        yield "triton, cascade, no graphs", replace_runner(make("triton"), is_captured=False, shares=True)
    yield "torch", make("torch")
    if find_spec("flash_attn") is not None and model.device.type == "cuda":
        size = FLASH_ATTN_BLOCK_SIZE
        num_large = case.batch * -(-(case.context + num_tokens) // size)
        yield "flash-attn", Engine(model, num_blocks=num_large, block_size=size, attention="flash-attn")


def prompts_of(case: Case, vocab_size: int) -> list[list[int]]:
    """Return the case's prompts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (case.batch, case.context), generator=generator)
    tokens[:, : case.num_shared] = tokens[0, : case.num_shared]
    prompts: list[list[int]] = tokens.tolist()
    return prompts


def run_case(case: Case, name: str, engine: "Engine", num_warm: int, num_steps: int) -> tuple[Row, list[list[int]]]:
    """Decode a case: its row, timed if it is on a GPU, and the tokens of each request."""
    from kvblocks.engine import StepLimits
    from kvblocks.engine.run.device_runner import DeviceRunner

    # All prompts are computed in one step. So all requests decode in the same steps, and the batch keeps its size.
    engine.limits = StepLimits(max_num_batched_tokens=case.batch * case.context, max_num_seqs=case.batch)
    prompts = prompts_of(case, engine.model.config.vocab_size)
    num_tokens = num_warm + num_steps + 2
    tokens: list[list[int]] = [[] for _ in prompts]
    stream = engine.stream(prompts, max_tokens=num_tokens, ignore_eos=True)
    piece = next(stream)
    tokens[piece.prompt_index].append(piece.token_id)
    for _ in range(num_warm):
        engine.step()
    assert [request.num_output_tokens for request in engine.scheduler.running] == [1 + num_warm] * case.batch
    counts = engine.runner.uploads if isinstance(engine.runner, DeviceRunner) else None
    before = (counts.num_transfers, counts.num_bytes) if counts else (0, 0)
    samples = []
    for _ in range(num_steps):
        start = perf_counter()
        engine.step()
        samples.append((perf_counter() - start) * 1e3)
    row: Row = {"case": case.name, "contestant": name}
    if counts:
        row |= {
            "transfers_per_step": (counts.num_transfers - before[0]) / num_steps,
            "uploaded_bytes_per_step": (counts.num_bytes - before[1]) / num_steps,
        }
    if engine.model.device.type == "cuda":
        row |= {"median_ms": statistics.median(samples), "min_ms": min(samples), "max_ms": max(samples)}
        row["tokens_per_second"] = case.batch / (row["median_ms"] * 1e-3)
    for piece in stream:
        tokens[piece.prompt_index].append(piece.token_id)
    return row, tokens


def show(row: Row) -> str:
    """Return one line."""
    line = f"  {row['contestant']:<20}"
    if "median_ms" in row:
        spread = f"[{row['min_ms']:.2f}, {row['max_ms']:.2f}]"
        line += f" {row['median_ms']:8.2f} ms {spread:<18} {row['tokens_per_second']:10.0f} tokens/s"
    if "transfers_per_step" in row:
        line += f"  {row['transfers_per_step']:.2f} transfers, {row['uploaded_bytes_per_step']:.0f} bytes a step"
    return line


def conditions(device: torch.device, shape: dict[str, int], dtype: torch.dtype) -> dict[str, object]:
    """Return the conditions of the measurement."""
    import triton

    import kvblocks

    return {
        "kvblocks": kvblocks.__version__,
        "source": source(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver, clocks and power": gpu_state() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "dtype": str(dtype),
        "block_size": BLOCK_SIZE,
        "model": shape,
        "steps": NUM_STEPS,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run and return the exit status: 2 without a GPU, 1 if a rehearsal's contestants differ."""
    parser = argparse.ArgumentParser(
        prog="bench.attention.engine_gpu", description="Times decode steps of the engine on a GPU."
    )
    parser.add_argument("--json", type=Path, help="also write conditions and results to this file")
    parser.add_argument("--rehearse", action="store_true", help="run everything once, tiny, without a GPU")
    given = parser.parse_args(arguments)
    if not given.rehearse and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device, dtype, shape, cases = torch.device("cuda"), torch.bfloat16, SHAPE, CASES
    num_warm, num_steps = NUM_WARM_STEPS, NUM_STEPS
    if given.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
        device, dtype, shape, cases = torch.device("cpu"), torch.float32, TINY_SHAPE, TINY_CASES
        num_warm, num_steps = 1, 2
    fix_keys()
    facts = conditions(device, shape, dtype)
    for name, value in facts.items():
        print(f"# {name}: {value}", flush=True)
    model = random_model(shape, device, dtype)
    results: list[Row] = []
    is_right = True
    for case in cases:
        print(case.name, flush=True)
        expected = None
        for name, engine in contestants(case, model, num_warm + num_steps + 2):
            row, tokens = run_case(case, name, engine, num_warm, num_steps)
            print(show(row), flush=True)
            results.append(row)
            keep(given.json, facts, results)  # whatever comes later, this is kept
            expected = expected or tokens
            if given.rehearse and tokens != expected:
                print(f"  {name}: WRONG, other tokens than the first contestant's", flush=True)
                is_right = False
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
