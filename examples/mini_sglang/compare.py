"""Compares mini-sglang with its radix tree and with kvblocks: answers, tokens found and time in the cache.

    python examples/mini_sglang/compare.py MODEL [--num-requests 64] [--page-size 1]

MODEL is what mini-sglang takes: a name on Hugging Face, or a folder. Needs a GPU and mini-sglang
(docs/integrations/mini-sglang.md). Each cache runs in a separate process, one after the other, so the model is loaded
twice. Each prompt is one of two common prefixes of 1,024 tokens followed by random tokens, and is sent twice.
"""

import argparse
import json
import subprocess
import sys
from random import Random
from time import perf_counter
from typing import Any

CACHES = ("radix", "kvblocks")
NUM_SHARED, MOST_OWN, MAX_TOKENS = 1024, 200, 32
MARK = "result: "


def answer(arguments: argparse.Namespace, cache_type: str) -> dict[str, Any]:
    """Answer all prompts with one cache; returns the tokens and what was counted."""
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    from kvblocks.integrations.mini_sglang import register

    register()
    llm = LLM(arguments.model, cache_type=cache_type, page_size=arguments.page_size)
    cache = llm.cache_manager.prefix_cache
    found, spent = 0, 0.0
    for name in ("match_prefix", "insert_prefix", "lock_handle", "evict"):
        original = getattr(cache, name)

        def timed(*given: Any, _original: Any = original, **named: Any) -> Any:
            nonlocal found, spent
            began = perf_counter()
            result = _original(*given, **named)
            spent += perf_counter() - began
            found += getattr(getattr(result, "cuda_handle", None), "cached_len", 0)  # only a match has it
            return result

        setattr(cache, name, timed)
    random = Random(0)
    shared = [[random.randint(3, 30_000) for _ in range(NUM_SHARED)] for _ in range(2)]
    prompts = [
        shared[number % 2] + [random.randint(3, 30_000) for _ in range(random.randint(1, MOST_OWN))]
        for number in range(arguments.num_requests // 2)
    ] * 2
    began = perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
    return {
        "tokens": [output["token_ids"] for output in outputs],
        "found": found,
        "prompt_tokens": sum(map(len, prompts)),
        "cache_seconds": spent,
        "seconds": perf_counter() - began,
    }


def answer_apart(cache_type: str) -> dict[str, Any]:
    """Call `answer` in a separate process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", cache_type]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    result: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return result


def main() -> None:
    """Compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--only", choices=CACHES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(MARK + json.dumps(answer(arguments, arguments.only)), flush=True)
        return
    results = {cache_type: answer_apart(cache_type) for cache_type in CACHES}
    print(f"{'cache':<12}{'prompt tokens':>15}{'found':>10}{'in the cache, s':>18}{'in all, s':>12}")
    for name, result in results.items():
        numbers = f"{result['prompt_tokens']:>15}{result['found']:>10}{result['cache_seconds']:>18.3f}"
        print(f"{name:<12}{numbers}{result['seconds']:>12.2f}")
    theirs, ours = results.values()
    num_equal = sum(map(list.__eq__, theirs["tokens"], ours["tokens"]))
    print(f"equal answers, of {len(ours['tokens'])}: {num_equal}")
    print("A prompt that waits is looked up again in each step, and its cached tokens are counted each time.")


if __name__ == "__main__":
    main()
