"""One engine in a separate process, which answers each line on stdin with a line on stdout. Needs only its engine.

    python contestant.py kvblocks|llama.cpp|vllm MODEL NUM_CLIENTS MAX_TOKENS DTYPE

Lines are JSON. A request is {"prompts": lists of token ids, "num_tokens": n}. The answer is the processor time that
`num_tokens` greedy tokens after each prompt took, of all threads of the process together. The interpreter that runs
this file must have the engine.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Complete = Callable[[list[list[int]], int], int]
"""Generates a number of greedy tokens after each prompt, all prompts at once. Returns how many tokens there are."""


def open_kvblocks(model: str, num_clients: int, max_tokens: int, dtype: str) -> tuple[Complete, str]:
    """Open the checkout's engine; `dtype` may end in ", deterministic"."""
    import torch

    import kvblocks
    from kvblocks.engine import Engine

    torch.set_num_threads(1)
    dtype, _, mode = dtype.partition(", ")
    engine: Any = Engine(
        model, num_blocks=num_clients * (max_tokens // 16 + 2), dtype=dtype, deterministic=mode == "deterministic"
    )

    def complete(prompts: list[list[int]], num_tokens: int) -> int:
        asked = [engine.submit(prompt, max_tokens=num_tokens, ignore_eos=True) for prompt in prompts]
        while engine.has_work:
            engine.step()
        return sum(len(generation.completion.token_ids) for generations in asked for generation in generations)

    return complete, kvblocks.__version__


def open_llama_cpp(model: str, num_clients: int, max_tokens: int, _dtype: str) -> tuple[Complete, str]:
    """Open PyPI's xllamacpp: llama.cpp's server, called inside this process. `model` is a GGUF file, used as it is."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_parallel = num_clients
    parameters.n_ctx = num_clients * max_tokens
    parameters.n_gpu_layers = 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_prompt = False
    parameters.cache_ram_mib = 0
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)
    pool = ThreadPoolExecutor(num_clients)

    def ask(prompt: list[int], num_tokens: int) -> int:
        asked = {"prompt": prompt, "n_predict": num_tokens, "ignore_eos": True, "temperature": 0.0, "top_k": 1}
        answer: Any = server.handle_completions({**asked, "cache_prompt": False})
        return int((json.loads(answer) if isinstance(answer, str) else answer)["usage"]["completion_tokens"])

    def complete(prompts: list[list[int]], num_tokens: int) -> int:
        return sum(pool.map(ask, prompts, [num_tokens] * len(prompts)))

    return complete, str(xllamacpp.__version__)


def open_vllm(model: str, num_clients: int, max_tokens: int, dtype: str) -> tuple[Complete, str]:
    """Open vLLM's CPU engine in this process, without compiling, which would take minutes."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    import vllm

    engine = vllm.LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=max_tokens,
        max_num_seqs=num_clients,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def complete(prompts: list[list[int]], num_tokens: int) -> int:
        asked = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return complete, str(vllm.__version__)


OPENERS = {"kvblocks": open_kvblocks, "llama.cpp": open_llama_cpp, "vllm": open_vllm}


def main() -> None:
    """Answer until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an engine prints goes to stderr
    engine, model, num_clients, max_tokens, dtype = sys.argv[1:]
    complete, version = OPENERS[engine](model, int(num_clients), int(max_tokens), dtype)
    print(json.dumps({"version": version}), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start, start_wall = time.process_time(), time.perf_counter()
        num_tokens = complete(asked["prompts"], asked["num_tokens"])
        times = {"seconds": time.process_time() - start, "wall": time.perf_counter() - start_wall}
        print(json.dumps({**times, "num_tokens": num_tokens}), file=replies, flush=True)


if __name__ == "__main__":
    main()
