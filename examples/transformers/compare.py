"""Compares transformers' continuous batching with its own cache and with kvblocks: tokens computed, seconds.

    python examples/transformers/compare.py MODEL [--num-requests 24] [--num-blocks 200] [--device cpu]

MODEL is what `AutoModelForCausalLM.from_pretrained` takes: a name on Hugging Face, or a folder. The prompts are a
common prefix of 256 tokens followed by random tokens.
"""

import argparse
from random import Random
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

from kvblocks.integrations.transformers import install, uninstall

NUM_SHARED, MOST_OWN, MAX_TOKENS, PAGE_SIZE = 256, 32, 16, 32


def count_steps(counts: dict[str, int]) -> None:
    """Add the tokens of each step that is prepared from now on to `counts`."""
    processor = continuous_api.ContinuousBatchProcessor
    original = processor.prepare_next_batch

    def prepare(self: Any) -> bool:
        is_ready: bool = original(self)
        if is_ready:
            ios = self.inputs_and_outputs
            ios = ios.io_pairs[ios.current_pair].host_io if hasattr(ios, "io_pairs") else ios
            counts["tokens"] += sum(request.query_length for request in ios.requests_in_batch)
        return is_ready

    processor.prepare_next_batch = prepare


def run(model: Any, prompts: list[list[int]], num_blocks: int, counts: dict[str, int]) -> dict[str, Any]:
    """Answer all prompts; returns the answers, the tokens computed and the seconds."""
    counts["tokens"] = 0
    batching = ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=512, max_memory_percent=0.9)
    setattr(
        batching, "page_size" if hasattr(batching, "page_size") else "block_size", PAGE_SIZE
    )  # the latter up to 5.17
    began = perf_counter()
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=batching,
        progress_bar=False,
    )
    answers = {name: output.generated_tokens for name, output in outputs.items()}
    return {"answers": answers, "tokens": counts["tokens"], "seconds": perf_counter() - began}


def main() -> None:
    """Compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--num-blocks", type=int, default=200, help=f"of {PAGE_SIZE} tokens (default 200)")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(given.device).eval()
    source, most = Random(0), model.config.get_text_config().vocab_size - 1
    shared = [source.randint(3, most) for _ in range(NUM_SHARED)]
    prompts = [
        shared + [source.randint(3, most) for _ in range(source.randint(1, MOST_OWN))]
        for _ in range(given.num_requests)
    ]
    counts = {"tokens": 0}
    count_steps(counts)
    results = {"transformers' own": run(model, prompts, given.num_blocks, counts)}
    install()  # all that kvblocks needs
    results["kvblocks"] = run(model, prompts, given.num_blocks, counts)
    uninstall()
    print(f"{'cache':<20}{'tokens computed':>17}{'seconds':>10}")
    for name, result in results.items():
        print(f"{name:<20}{result['tokens']:>17,}{result['seconds']:>10.1f}")
    theirs, ours = (result["answers"] for result in results.values())
    print("all answers are identical" if theirs == ours else "ANSWERS DIFFER")
    print("What this doesn't show: requests that come one by one. It is one run, so the seconds are noisy.")
    if theirs != ours:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
