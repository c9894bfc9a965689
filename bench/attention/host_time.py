"""The host's time for a layer's launches, without a GPU: `python -m bench.attention.host_time [--json FILE]`.

A step with a prompt mostly takes as long as the host needs to launch it, since such a step is no CUDA graph. Here
launches do nothing, and the bench times our own Python around them: checks, shapes, and tensors for results. Times are
this thread's CPU time, so that other processes matter little: minimum and median of samples.

Not shown: Triton's own time for a launch, the matrix products, the driver, and a GPU.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any
from unittest.mock import patch

import torch

from bench.conditions import conditions

NUM_CALLS, NUM_SAMPLES = 200, 15
BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, WIDTH = 16, 64, 4, 2, 256
STEPS = {"decodes": (2, 0), "prompts": (0, 2), "decodes and prompts": (2, 2)}
"""Pairs: how many sequences have one row, and how many have twenty."""


def time_call(call: Callable[[], object], num_samples: int = NUM_SAMPLES) -> dict[str, float]:
    """Microseconds of the thread's CPU time for a call, after one untimed call."""
    call()
    samples = []
    for _ in range(num_samples):
        start = thread_time()
        for _ in range(NUM_CALLS):
            call()
        samples.append((thread_time() - start) / NUM_CALLS * 1e6)
    return {"least": min(samples), "median": statistics.median(samples)}


def measure(num_samples: int = NUM_SAMPLES) -> dict[str, dict[str, float]]:
    """The times of a layer's parts, by name. Needs a process whose kernels aren't interpreted."""
    from triton.runtime.jit import JITFunction

    from kvblocks.engine.attention.attention import HeadAngles, KVCache
    from kvblocks.engine.attention.batch import SequenceRows, StepBatch
    from kvblocks.engine.attention.triton_attention import TritonAttention
    from kvblocks.engine.model.config import ModelConfig
    from kvblocks.engine.model.layer_attention import LayerAttention
    from kvblocks.engine.model.rope import RopeTable

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_layers": 1, "num_heads": NUM_HEADS}
    sizes |= {"num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": 128, "max_position_embeddings": 1024}
    config, dtype = ModelConfig(**sizes), torch.bfloat16
    how: LayerAttention = config.attention[0]
    attention, cache = TritonAttention(), KVCache.allocate(config, 16, BLOCK_SIZE, dtype=dtype)
    rope = RopeTable.build(config.ropes[0], 1024, HEAD_DIM, torch.empty(1, dtype=dtype))
    found = {}
    with patch.object(JITFunction, "run", lambda *_, **__: None), torch.inference_mode():
        for name, (num_decodes, num_prompts) in STEPS.items():
            rows = [SequenceRows([5], 40, [0, 1, 2])] * num_decodes + [SequenceRows([5] * 20, 0, [3, 4])] * num_prompts
            batch = StepBatch.build(rows, BLOCK_SIZE)
            step = attention.begin(batch, cache)
            query = torch.empty(batch.num_tokens, NUM_HEADS, HEAD_DIM, dtype=dtype)
            found[f"{name}: attention"] = time_call(lambda own=step, rows=query: own.attend(0, rows, how), num_samples)
        heads = torch.empty(batch.num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
        angles, slots = HeadAngles(rope, batch.positions, None, 1e-5), batch.slot_mappings[0]
        found["heads that are rotated and stored"] = time_call(lambda: step.place(0, heads, angles, slots), num_samples)
        hidden, weight = torch.empty(batch.num_tokens, WIDTH, dtype=dtype), torch.empty(WIDTH, dtype=dtype)
        operations = attention.row_ops(config)
        found["a sum and a norm"] = time_call(lambda: operations.add(hidden, hidden, None, weight), num_samples)
        found["the MLP's gate"] = time_call(lambda: operations.gate(hidden), num_samples)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Return the exit status: 2 in the interpreter."""
    parser = argparse.ArgumentParser(prog="bench.attention.host_time", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--quick", action="store_true", help="one sample: only checks that it runs")
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("bench.attention.host_time: expected TRITON_INTERPRET to be unset", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    found = measure(1 if given.quick else NUM_SAMPLES)
    for name, times in found.items():
        print(f"{name:<36} {times['least']:6.1f} us, median {times['median']:6.1f}")
    if given.json is not None:
        text = json.dumps({"conditions": conditions(torch=torch.__version__), "microseconds": found}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
