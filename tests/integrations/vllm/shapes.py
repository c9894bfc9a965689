"""Tiny models of several shapes in the whole engine: `python -m integrations.vllm.shapes NAME...`.

Each model answers the same prompts under vLLM's own scheduler and under ours, with all of vLLM's options at their
defaults. Its weights are random. The answer is a line of JSON behind MARK: by shape, for each scheduler its manager's
class, the tokens of all answers, how many tokens of each prompt were cached, and how many groups of layers there are.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

MARK = "answer: "
OURS = "kvblocks.integrations.vllm.KVBlocksAsyncScheduler"
VOCABULARY = 512
WINDOW = 64
NUM_BLOCKS = 400
# Random weights are between minus and plus this, so that answers vary.
WEIGHTS = {"gemma 3": 0.3, "gpt-oss": 1.0, "mistral": 0.3, "lfm2": 0.3, "qwen3-next": 0.3}
DTYPES = {"qwen3-next": "bfloat16"}  # vLLM's kernel of gated delta nets for CPUs has no other
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "vocab_size": VOCABULARY,
    "torch_dtype": "float32",
}
WINDOWS_AND_FULL = ["sliding_attention", "full_attention"] * 2
SHAPES: dict[str, dict[str, Any]] = {
    "gemma 3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": WINDOWS_AND_FULL,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 64,
        "block_dim": 64,
        "block_ff_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 256,  # so that a block of attention, which is as large as a state, has few tokens
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
    },
    "bert": {"architectures": ["BertModel"], "model_type": "bert", "num_hidden_layers": 1, "type_vocab_size": 2},
}


def make_prompts() -> list[list[list[int]]]:
    """Return rounds of prompts: conversations with a common beginning, each a turn longer in the next round."""
    random = Random(5)

    def some(number: int) -> list[int]:
        return [random.randrange(10, VOCABULARY) for _ in range(number)]

    shared = some(200)
    turns = [shared[: 150 + 20 * (i % 3)] + some(40 + 9 * i) for i in range(6)]
    rounds = []
    for _ in range(3):
        rounds.append([list(turn) for turn in turns])
        turns = [turn + some(50) for turn in turns]
    return rounds


def run(folder: str, scheduler: str | None, weights: float, dtype: str) -> dict[str, Any]:
    """Return what is seen of an engine with this scheduler; None: vLLM's own. weights: their largest size."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import dummy_loader

    initialize: Any = dummy_loader.initialize_single_dummy_weight
    initialize = getattr(initialize, "func", initialize)
    dummy_loader.initialize_single_dummy_weight = partial(initialize, low=-weights, high=weights)
    model = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype,
        block_size=32,
        max_model_len=512,
        max_num_seqs=4,
        num_gpu_blocks_override=NUM_BLOCKS,
        scheduler_cls=scheduler,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    for prompts in make_prompts():
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for output in model.generate(given, params, use_tqdm=False):
            tokens.append(list(output.outputs[0].token_ids))
            cached.append(output.num_cached_tokens)
    core: Any = model.llm_engine.engine_core
    inner = core.engine_core.scheduler
    return {
        "manager": type(inner.kv_cache_manager).__name__,
        "tokens": tokens,
        "cached": cached,
        "groups": len(inner.kv_cache_config.kv_cache_groups),
        "interval": inner.kv_cache_config.prefix_cache_retention_interval,
    }


def embed(folder: str, scheduler: str | None) -> dict[str, Any]:
    """Return what is seen of an engine whose model has no KV cache. Without `LLM`, which asks for a tokenizer."""
    from vllm import EngineArgs, LLMEngine, PoolingParams

    arguments = EngineArgs(
        model=folder,
        runner="pooling",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        scheduler_cls=scheduler,
        disable_log_stats=True,
    )
    engine: Any = LLMEngine.from_engine_args(arguments)
    for number, prompt in enumerate(make_prompts()[0]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, PoolingParams(task="embed"))
    embedded: dict[str, list[float]] = {}
    while engine.has_unfinished_requests():
        embedded |= {output.request_id: output.outputs.data.tolist() for output in engine.step()}
    inner = engine.engine_core.engine_core.scheduler
    return {
        "manager": type(inner.kv_cache_manager).__name__,
        "embeddings": embedded,
        "groups": len(inner.kv_cache_config.kv_cache_groups),
    }


def main(names: list[str]) -> None:
    """Run them, and print the answer."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # noqa: SLF001  which would import vLLM again for every shape
    answers = {}
    for name in names:
        folder = Path(tempfile.mkdtemp(prefix="kvblocks-vllm-shape-"))
        (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[name]), encoding="utf-8")
        look = partial(run, weights=WEIGHTS[name], dtype=DTYPES.get(name, "float32")) if name in WEIGHTS else embed
        answers[name] = [look(str(folder), scheduler) for scheduler in (None, OURS)]
    print(MARK + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
