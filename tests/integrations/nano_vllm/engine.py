"""All of nano-vllm on a CPU: its LLM, a random Qwen3 with two small layers, flash-attn and its Triton kernel in torch.

    NANO_SRC=… python tests/integrations/nano_vllm/engine.py    # prints what each block manager's run was

Run in a process of its own, since parts of torch.cuda are replaced. Nothing on disk is changed; of nano-vllm's own
modules only `store_kvcache`, which launches a kernel, is replaced.
"""
# ruff: noqa: E402  # what must be set before torch and nano-vllm are imported stands between the imports

import atexit
import importlib
import json
import os
import runpy
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch
import torch.distributed

from integrations.nano_vllm.sources import add_packages
from kvblocks.integrations import nano_vllm

# name, temperature, whether `install` is told to cache early; None: nano-vllm's own manager
RUNS = (
    ("own", 1.0, None),
    ("late", 1.0, False),
    ("own greedy", 1e-4, None),
    ("late greedy", 1e-4, False),
    ("early greedy", 1e-4, True),
)
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "nano_vllm" / "compare.py"
NUM_BLOCKS, BLOCK_SIZE, VOCABULARY = 16, 256, 512
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}


def attend(query, key, value, scale):
    """Causal attention of the last queries over all keys; [tokens, heads, head_dim]."""
    num_new, num_keys, share = len(query), len(key), query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(share, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    behind = torch.arange(num_keys) > torch.arange(num_keys - num_new, num_keys)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(behind, float("-inf")).softmax(-1), value)


def gather(cache, table, num_tokens):
    return cache[table[: -(-num_tokens // BLOCK_SIZE)].long()].flatten(0, 1)[:num_tokens]


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, block_table, **_):
    outputs = []
    for number in range(len(cu_seqlens_q) - 1):
        query = q[cu_seqlens_q[number] : cu_seqlens_q[number + 1]]
        first, end = cu_seqlens_k[number].item(), cu_seqlens_k[number + 1].item()
        if block_table is None:
            keys, values = k[first:end], v[first:end]
        else:
            keys, values = (gather(cache, block_table[number], end - first) for cache in (k, v))
        outputs.append(attend(query, keys, values, softmax_scale))
    return torch.cat(outputs)


def with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, **_):
    rows = []
    for number, length in enumerate(cache_seqlens.tolist()):
        keys, values = (gather(cache, block_table[number], length) for cache in (k_cache, v_cache))
        rows.append(attend(q[number], keys, values, softmax_scale))
    return torch.stack(rows)


def store(key, value, k_cache, v_cache, slot_mapping):
    for new, cache in ((key, k_cache), (value, v_cache)):
        cache.view(-1, *cache.shape[2:])[slot_mapping.long()] = new


def prepare():
    """Make nano-vllm importable and runnable without a GPU."""
    flash_attn = ModuleType("flash_attn")
    flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache = varlen, with_kvcache
    flash_attn.__spec__ = ModuleSpec("flash_attn", None)  # transformers looks whether it is there
    importlib.import_module("transformers")  # while it isn't there, so that transformers doesn't use it

    sys.modules["flash_attn"] = flash_attn
    add_packages()
    original_tensor, original_init = torch.tensor, torch.distributed.init_process_group

    def tensor(*given, pin_memory=False, **named):
        return original_tensor(*given, **named)

    torch.tensor = tensor
    torch.distributed.init_process_group = lambda _, __, **named: original_init(
        "gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", **named
    )
    torch.Tensor.cuda = lambda self, **_: self
    torch.set_default_device = lambda _: None
    cuda = torch.cuda
    cuda.set_device = lambda _: None
    cuda.empty_cache = cuda.reset_peak_memory_stats = cuda.synchronize = lambda: None
    bytes_a_block = 2 * SHAPE["num_hidden_layers"] * BLOCK_SIZE * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4
    cuda.mem_get_info = lambda: (NUM_BLOCKS * bytes_a_block,) * 2
    cuda.memory_stats = lambda: {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}

    from nanovllm.engine import llm_engine
    from nanovllm.layers import attention

    attention.store_kvcache = store
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=str)
    llm_engine.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)


def write_model(folder):
    """A random Qwen3 of two small layers, as transformers saves it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, intermediate_size=128, max_position_embeddings=4096, dtype="float32", **SHAPE
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that what a token sees decides what comes next
    model.save_pretrained(folder)


def make_prompts():
    """Prompts that begin alike, too many for the pool at once, some of them longer than a step may be."""
    random = Random(1)
    shared = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (520, 300)]
    prompts = []
    for number in range(14):
        own = [random.randrange(VOCABULARY) for _ in range(random.choice((3, 40, 200, 245)))]
        prompts.append(shared[number % 2] + own)
    return [*prompts, prompts[3], prompts[4], [random.randrange(VOCABULARY) for _ in range(1500)]]


@torch.inference_mode()  # its sampler divides logits in place, which in float32 are the model's own
def run(folder, prompts, temperature):
    """Answer the prompts with whichever block manager stands in the scheduler."""
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.sampling_params import SamplingParams

    llm = LLMEngine(
        folder, enforce_eager=True, max_num_batched_tokens=2048, max_model_len=2048, gpu_memory_utilization=1.0
    )
    steps, step = [], llm.step

    def recorded():
        outputs, num_tokens = step()
        steps.append(num_tokens)
        return outputs, num_tokens

    llm.step = recorded
    torch.manual_seed(5)
    outputs = llm.generate(prompts, SamplingParams(temperature, max_tokens=24, ignore_eos=True), use_tqdm=False)
    manager = type(llm.scheduler.block_manager).__name__
    llm.exit()
    atexit.unregister(llm.exit)
    return {"manager": manager, "tokens": [output["token_ids"] for output in outputs], "steps": steps}


def main():
    prepare()
    prompts = make_prompts()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for name, temperature, early in RUNS:
            if early is not None:
                nano_vllm.install(early=early)
            results[name] = run(folder, prompts, temperature)
            nano_vllm.uninstall()
        example = runpy.run_path(str(EXAMPLE))["answer"]
        results["example"] = []
        for early in (None, False, True):
            with torch.inference_mode():
                results["example"].append(example(folder, 6, early=early))
            torch.distributed.destroy_process_group()
    print("result: " + json.dumps(results), flush=True)
    os._exit(0)  # the example leaves nano-vllm's own exit to the interpreter, whose process group has gone here


if __name__ == "__main__":
    main()
