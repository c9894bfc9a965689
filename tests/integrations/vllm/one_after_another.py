"""Engines of ours and of vLLM's, one after another in a process: `python -m integrations.vllm.one_after_another`.

The model is tiny, and its weights are dummies. The answer is a line of JSON behind MARK: for each engine its manager's
class, whether its requests are hashed, whether the parts of vLLM are its own again, and how many tokens were cached.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

MARK = "answer: "
OURS = "kvblocks.integrations.vllm.KVBlocksScheduler"
TINY = {"ffn_dim": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "word_embed_proj_dim": 64}


def model_folder() -> str:
    """Return a folder with a tiny model's configuration."""
    from bench.vllm.schedulers import OPT

    folder = Path(tempfile.mkdtemp(prefix="kvblocks-vllm-tiny-"))
    config = OPT | TINY | {"max_position_embeddings": 256, "torch_dtype": "float32", "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def run(folder: str, scheduler: str | None) -> dict[str, Any]:
    """Return what is seen of an engine that gets the same prompt twice."""
    from vllm import LLM, SamplingParams
    from vllm.v1.engine import core

    model = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=256,
        num_gpu_blocks_override=50,
        scheduler_cls=scheduler,
        disable_log_stats=True,
    )
    prompt: Any = {"prompt_token_ids": list(range(100))}
    params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, temperature=0)
    cached = [model.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    inner = getattr(model.llm_engine.engine_core, "engine_core", None)
    if inner is None:  # it is in a process of its own
        return {"cached": cached}
    return {
        "cached": cached,
        "manager": type(inner.scheduler.kv_cache_manager).__name__,
        "hashes": inner.request_block_hasher is not None,
        "is_whole": core.get_request_block_hasher.__module__ == "vllm.v1.core.kv_cache_utils"
        and core.EngineCore.add_lora.__module__ == "vllm.v1.engine.core"
        and not hasattr(core.get_request_block_hasher, "__wrapped__"),
    }


def main() -> None:
    """Run them, and print the answer."""
    folder = model_folder()
    order = [OURS, None] if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" else [OURS]
    print(MARK + json.dumps([run(folder, scheduler) for scheduler in order]), flush=True)


if __name__ == "__main__":
    main()
