"""The host's time for a step, without a GPU: `python -m bench.attention.host_steps [--json FILE]`.

An engine decodes on a stand-in for a GPU: packing, uploads and block tables are real, but a step's graph and the kernel
that draws do nothing. So the bench times the host's work for a step: scheduling, packing, launching, reading tokens and
making pieces. Penalties are computed by the CPU, on a small vocabulary. Times are this thread's CPU time, so that other
processes matter little. Besides decode steps, one step is timed that admits prompts: most have a cached prefix.

With overlap this time is hidden while the device computes; without overlap it is added. Not shown: CUDA's time for a
launch and a copy, decoding text, and a GPU.
"""

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING

import torch

from bench.conditions import conditions

if TYPE_CHECKING:
    from kvblocks.engine import Engine

BATCHES = (1, 32, 256)
TOP_P = {"temperature": 0.8, "top_p": 0.9}
DRAWS: dict[str, dict[str, float]] = {
    "greedy": {},
    "top_p": TOP_P,
    "penalties": {**TOP_P, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
}
NUM_STEPS, NUM_WARM, PROMPT, BLOCK_SIZE, VOCABULARY = 60, 20, 64, 16, 64
NUM_HITS, NUM_COLD, PREFIX, SUFFIX = 32, 16, 1024, 16
"""Prompts that a step admits: so many with a cached prefix, so many without, and their numbers of tokens."""


def stand_in(batch: int, *, overlaps: bool, num_tokens: int = PROMPT + NUM_STEPS + NUM_WARM + 8) -> "Engine":
    """An engine whose device does nothing, with room for `batch` requests of `num_tokens` tokens."""
    from bench.gpu_session.engine import random_model
    from kvblocks.engine import Engine, StepLimits
    from kvblocks.engine.attention.cascade import CascadePlanner
    from kvblocks.engine.model.config import ModelConfig
    from kvblocks.engine.run.device_runner import DeviceRunner

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    config = ModelConfig(**sizes, head_dim=32, vocab_size=VOCABULARY, max_position_embeddings=2048)
    model = random_model(config, torch.device("cpu"), torch.float32)
    num_blocks = batch * -(-num_tokens // BLOCK_SIZE) + 8
    engine = Engine(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, attention="torch", overlap=overlaps)
    engine.limits = StepLimits(max_num_batched_tokens=8192, max_num_seqs=batch)
    logits = torch.zeros(512, VOCABULARY)  # of as many rows as a step may want
    drawn = torch.zeros(512, 3, dtype=torch.float64)
    drawn[:, 2] = 1.0

    class StandIn(DeviceRunner):
        def _compute(self, batch: object, score: object = None) -> torch.Tensor:  # noqa: ARG002
            return logits

    cascade = CascadePlanner(engine.manager.inspect.shared_prefixes, BLOCK_SIZE, torch.device("cpu"), token_bytes=128)
    engine.runner = StandIn(
        engine.runner.model,
        num_blocks,
        BLOCK_SIZE,
        capture=lambda step: lambda: logits[: step.logits.shape[0]],
        cascade=cascade,
    )
    engine.stepper.sampler.draw_tokens = lambda _, parameters: drawn[: len(parameters)].clone()
    return engine


def time_steps(batch: int, options: dict[str, float], *, overlaps: bool, num_steps: int) -> dict[str, float]:
    """Milliseconds of the thread's CPU time for a decode step of `batch` requests: minimum and median."""
    engine = stand_in(batch, overlaps=overlaps)
    generator = torch.Generator().manual_seed(0)
    for prompt in torch.randint(VOCABULARY, (batch, PROMPT), generator=generator).tolist():
        engine.submit(prompt, max_tokens=num_steps + NUM_WARM, ignore_eos=True, seed=1, **options)
    while engine.scheduler.waiting or any(not request.num_output_tokens for request in engine.scheduler.running):
        engine.step()
    for _ in range(4):
        engine.step()
    samples = []
    gc.collect()
    gc.disable()  # a collection looks at all objects of a process, and falls into any step
    try:
        for _ in range(num_steps):
            start = thread_time()
            engine.step()
            samples.append((thread_time() - start) * 1e3)
    finally:
        gc.enable()
    return {"least": min(samples), "median": statistics.median(samples)}


def time_admissions(num_steps: int) -> dict[str, float]:
    """As `time_steps`, for a step that admits prompts: NUM_HITS with a cached prefix, and NUM_COLD without."""
    batch = NUM_HITS + NUM_COLD
    engine = stand_in(batch, overlaps=False, num_tokens=PREFIX + 2 * SUFFIX)
    generator = torch.Generator().manual_seed(0)

    def prompts(number: int, length: int) -> list[list[int]]:
        found: list[list[int]] = torch.randint(VOCABULARY, (number, length), generator=generator).tolist()
        return found

    (prefix,) = prompts(1, PREFIX)
    engine.generate([prefix], max_tokens=1, ignore_eos=True)
    samples = []
    for _ in range(num_steps):
        tails = prompts(batch, SUFFIX)
        for number, tail in enumerate(tails):
            engine.submit(prefix + tail if number < NUM_HITS else tail, max_tokens=2, ignore_eos=True)
        gc.collect()
        gc.disable()
        start = thread_time()
        engine.step()
        samples.append((thread_time() - start) * 1e3)
        gc.enable()
        while engine.has_work:
            engine.step()
    return {"least": min(samples), "median": statistics.median(samples)}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.attention.host_steps", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--quick", action="store_true", help="few steps: only checks that it runs")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    for batch in BATCHES[:2] if given.quick else BATCHES:
        for how, options in DRAWS.items():
            for overlaps in (False, True):
                name = f"{batch} requests, {how}, {'overlap' if overlaps else 'no overlap'}"
                times = time_steps(batch, options, overlaps=overlaps, num_steps=3 if given.quick else NUM_STEPS)
                found[name] = times
                print(f"{name:<50} {times['least']:6.2f} ms, median {times['median']:6.2f}", flush=True)
    name = f"{NUM_HITS} prompts with {PREFIX} cached tokens, {NUM_COLD} without"
    found[name] = times = time_admissions(3 if given.quick else NUM_STEPS)
    print(f"{name:<50} {times['least']:6.2f} ms, median {times['median']:6.2f}", flush=True)
    if given.json is not None:
        text = json.dumps({"conditions": conditions(torch=torch.__version__), "milliseconds": found}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
