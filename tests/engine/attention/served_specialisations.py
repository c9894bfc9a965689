"""Serve random requests as if on a GPU, and print as JSON what Triton would compile for them.

test_specialisations.py starts it as a process of its own, without TRITON_INTERPRET. It needs no GPU: kernels are
recorded (`bench.attention.recording`) and not launched. So the tokens mean nothing, but the steps and their shapes are
right, since they depend on lengths alone. Memory begins as zeros, since no token can be drawn from NaN.
"""

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from engine.small_models import EVEN, GEMMA3, converted, random_weights

from bench.attention.recording import record
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.attention import triton_attention
from kvblocks.engine.attention.cascade import CascadePlanner
from kvblocks.engine.run.decode_step import run_in_place
from kvblocks.engine.run.device_runner import DeviceRunner
from kvblocks.kernels.table import CascadeThreshold

NUM_BLOCKS = 300
SMALL = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "tie_word_embeddings": False, "num_layers": 2}
MODELS = {
    "plain": replace(EVEN, **SMALL | {"num_heads": 8, "num_kv_heads": 2}),
    "windows": replace(GEMMA3, **SMALL | {"head_dim": 64, "windows": (27, None)}),
}


def make_engine(config, *, deterministic):
    """An engine whose decode steps run in buckets, and as cascades if anything is shared."""
    weights = converted(random_weights(config), torch.bfloat16)
    engine = Engine(
        LoadedModel(config, weights), num_blocks=NUM_BLOCKS, attention="triton", deterministic=deterministic
    )
    engine.limits = StepLimits(max_num_batched_tokens=200, max_num_seqs=40)
    cascade = None
    if not deterministic:
        full = [group.sees_all for group in engine.manager.groups].index(True)
        found = engine.manager.inspect.shared_prefixes
        cascade = CascadePlanner(found, 16, torch.device("cpu"), CascadeThreshold(1, 0.0), full)
    model = engine.runner.model
    engine.runner = DeviceRunner(
        model, NUM_BLOCKS, 16, capture=None if deterministic else run_in_place, cascade=cascade
    )
    return engine


def serve(engine, num_rounds):
    """Batches of 1 to 33 prompts of 1 to 250 tokens, some with a common beginning, and answers of 2 to 11."""
    rng = random.Random(0)
    shared = [rng.randrange(96) for _ in range(100)]
    for size in rng.choices([1, 2, 5, 17, 33], k=num_rounds):
        prompts = [
            shared[: rng.choice([0, 0, 40, 100])] + [rng.randrange(96) for _ in range(rng.randrange(1, 250))]
            for _ in range(size)
        ]
        engine.generate(prompts, max_tokens=rng.randrange(2, 12), ignore_eos=True)


def main(name, num_rounds):
    """Warm up, serve, and print how many specialisations of each kernel there were after each."""
    torch.set_num_threads(1)
    with (
        record("sm90") as recording,
        patch.object(triton_attention, "is_interpreted", lambda: True),
        patch.object(torch, "empty", torch.zeros),
    ):
        engine = make_engine(MODELS[name.removesuffix(", deterministic")], deterministic=name.endswith("deterministic"))

        def count():
            return Counter(specialisation.name for specialisation in recording.specialisations.values())

        engine.warm_up()
        warm = count()
        serve(engine, num_rounds)
        runner = engine.runner
        steps = {"launches": len(recording.launches), "cascades": runner.num_cascades, "replays": runner.num_replays}
        print(json.dumps({"warm": warm, "served": count(), **steps}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
