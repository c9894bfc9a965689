"""The workload, and how it is run: a tiny random Llama, 120 requests over 10 prefixes, all queued at the start."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import continuous_api

from kvblocks.integrations.transformers import install, uninstall

NUM_REQUESTS, NUM_PREFIXES, PREFIX_TOKENS = 120, 10, 96
OWN_TOKENS = (8, 48)  # of a prompt, behind its prefix
NEW_TOKENS, PAGE_SIZE, MAX_BATCH_TOKENS = 32, 16, 512
VOCABULARY = 1000
OWN, EARLY, LATE = "transformers", "kvblocks, early", "kvblocks, late"
CONTESTANTS = (OWN, EARLY, LATE)


@dataclass
class Outcome:
    """The results of a run: computed tokens, steps, seconds, and the answers by request."""

    num_tokens: int
    num_steps: int
    seconds: float
    answers: dict[str, list[int]]


def make_model() -> Any:
    """Return a model of two layers, with weights so large that wrong KV would show in its answers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def make_prompts(seed: int, num_requests: int) -> list[list[int]]:
    """Return prompts that begin with one of ten prefixes and end with tokens of their own."""
    source = Random(seed)
    prefixes = [_tokens(source, PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    return [source.choice(prefixes) + _tokens(source, source.randint(*OWN_TOKENS)) for _ in range(num_requests)]


def _tokens(source: Random, number: int) -> list[int]:
    return [source.randrange(3, VOCABULARY) for _ in range(number)]


@contextmanager
def installed(contestant: str) -> Iterator[None]:
    """Put a contestant's cache in place."""
    if contestant != OWN:
        install(commit="early" if contestant == EARLY else "late")
    try:
        yield
    finally:
        uninstall()


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the tokens and the steps of all batches that are prepared inside."""
    counts = [0, 0]
    original = continuous_api.ContinuousBatchProcessor.prepare_next_batch

    def prepare(processor: Any) -> bool:
        is_ready: bool = original(processor)
        if is_ready:
            counts[0] += sum(request.query_length for request in processor.inputs_and_outputs.requests_in_batch)
            counts[1] += 1
        return is_ready

    continuous_api.ContinuousBatchProcessor.prepare_next_batch = prepare
    try:
        yield counts
    finally:
        continuous_api.ContinuousBatchProcessor.prepare_next_batch = original


def run(model: Any, prompts: list[list[int]], num_blocks: int, contestant: str) -> Outcome:
    """Answer all prompts. They are queued before the first step, so that a run is the same each time."""
    # On a CPU without psutil it logs errors that don't matter.
    logging.getLogger("ContinuousBatchingLogger").disabled = True
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=MAX_BATCH_TOKENS, max_memory_percent=0.9)
    setattr(config, "page_size" if hasattr(config, "page_size") else "block_size", PAGE_SIZE)  # the latter up to 5.17
    with installed(contestant), counted() as counts:
        manager = model.init_continuous_batching(generation, continuous_batching_config=config)
        manager.warmup()
        manager.add_requests(prompts, max_new_tokens=NEW_TOKENS)
        began = perf_counter()
        manager.start()
        answers: dict[str, list[int]] = {}
        while len(answers) < len(prompts):
            output = manager.get_result(timeout=60)
            assert output is not None and output.error is None, f"expected an answer, got {output}"
            answers[output.request_id] = output.generated_tokens
        seconds = perf_counter() - began
        manager.stop(block=True)
    return Outcome(counts[0], counts[1], seconds, answers)
