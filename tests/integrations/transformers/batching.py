"""Tiny random models, and transformers' continuous batching over them, its own and kvblocks'."""

import dataclasses
import random
from contextlib import contextmanager

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.generation.continuous_batching import cache as cache_module
from transformers.generation.continuous_batching import continuous_api

from kvblocks.integrations.transformers import install, uninstall
from kvblocks.integrations.transformers.parts import GROUPS
from kvblocks.integrations.transformers.probe import find_parts

VOCABULARY, PAGE = 199, 8
IS_GROUPED = find_parts() is GROUPS  # transformers 5.15 to 5.17
FIELDS = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
PAGE_SIZE = "page_size" if "page_size" in FIELDS else "block_size"  # its name; up to transformers 5.17 the latter

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(layer_types=None, window=None):
    """A model whose tokens depend strongly on all that it reads. With small weights, wrong KV would change nothing."""
    torch.manual_seed(0)
    if layer_types is None:
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES))
    else:
        model = Qwen2ForCausalLM(
            Qwen2Config(
                num_hidden_layers=len(layer_types),
                layer_types=list(layer_types),
                sliding_window=window,
                use_sliding_window=True,
                **SIZES,
            )
        )
    return model.eval()


@torch.no_grad()
def plain_logits(model, tokens):
    """The logits of all positions, by a forward pass without any cache."""
    # Up to transformers 5.18 batching leaves a model with its own attention.
    model.set_attn_implementation(model.config._attn_implementation.removeprefix("paged|"))
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def plain_answer(model, prompt, new):
    """The likeliest tokens of a model, each by a forward pass without any cache."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def make_prompts(seed, num_requests, num_prefixes=4, shared=40, own=24):
    """Prompts with common beginnings, each with an end of its own; some are equal."""
    source = random.Random(seed)
    prefixes = [[source.randrange(VOCABULARY) for _ in range(shared)] for _ in range(num_prefixes)]
    prompts = [
        source.choice(prefixes) + [source.randrange(VOCABULARY) for _ in range(source.randint(1, own))]
        for _ in range(num_requests)
    ]
    return [*prompts, list(prompts[0]), list(prompts[0]), prompts[-1][:1], prompts[-1][: 2 * PAGE]]


@contextmanager
def kvblocks_installed(commit="early"):
    install(commit=commit, debug=True)
    try:
        yield
    finally:
        uninstall()


class Run:
    """What came of a run: the tokens by the number of the prompt, the tokens computed, and the cache."""

    def __init__(self, outputs, num_computed, num_steps, cache):
        self.outputs, self.num_computed, self.num_steps, self.cache = outputs, num_computed, num_steps, cache

    @property
    def tokens(self):
        return {request_id: output.generated_tokens for request_id, output in self.outputs.items()}


def batching_config(num_blocks, model=None, **more):
    """A pool that holds `num_blocks` pages of tokens for all layers of a model."""
    if IS_GROUPED and model is not None:  # a block is one group's
        num_blocks *= len(cache_module.group_layers_by_attn_type(model.config)[0])
    given = {PAGE_SIZE: PAGE, "max_batch_tokens": 96, "max_memory_percent": 0.9, "seed": 1, **more}
    return ContinuousBatchingConfig(num_blocks=num_blocks, **given)


class Counted:
    """Counts the tokens of the steps that a ContinuousBatchProcessor prepares, and keeps its cache."""

    def __init__(self, monkeypatch):
        self.num_tokens = self.num_steps = 0
        self.cache = None
        original = continuous_api.ContinuousBatchProcessor.prepare_next_batch

        def prepare(processor):
            self.cache = processor.cache
            is_ready = original(processor)
            if is_ready:
                scheduled = scheduled_requests(processor)
                self.num_tokens += sum(request.query_length for request in scheduled)
                self.num_steps += 1
            return is_ready

        monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "prepare_next_batch", prepare)


def scheduled_requests(processor):
    """The requests of the step that was prepared last."""
    ios = processor.inputs_and_outputs
    if hasattr(ios, "io_pairs"):
        ios = ios.io_pairs[ios.current_pair].host_io
    return ios.requests_in_batch


def generate(model, prompts, num_blocks, monkeypatch, *, new=12, samples=1, **more):
    """Answer the prompts greedily, or by seeded sampling if several samples are asked for."""
    with monkeypatch.context() as patch:
        counted = Counted(patch)
        config = GenerationConfig(
            max_new_tokens=new,
            do_sample=samples > 1,
            num_return_sequences=samples,
            eos_token_id=-1,
            pad_token_id=0,
        )
        outputs = model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=config,
            continuous_batching_config=batching_config(num_blocks, model, **more),
            progress_bar=False,
        )
    return Run(outputs, counted.num_tokens, counted.num_steps, counted.cache)


def check_all_given_back(cache):
    """Check that nobody owns any block, and that the manager is sound."""
    assert cache.records == {}
    assert cache.manager.num_free_blocks == cache.manager.num_blocks
    cache.manager.check()
