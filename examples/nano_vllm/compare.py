"""Compares nano-vllm with its own block manager and with kvblocks: answers, prompt tokens computed, time.

    python examples/nano_vllm/compare.py MODEL [--num-requests 64]

MODEL is a folder with a Qwen3, as nano-vllm takes it. Needs a GPU and nano-vllm (docs/integrations/nano-vllm.md). Each
block manager runs in a separate process, one after the other, so the model is loaded three times. Each prompt is one of
two common prefixes of 1,024 tokens followed by random tokens.
"""

import argparse
import json
import subprocess
import sys
from random import Random
from time import perf_counter
from typing import Any

from kvblocks.integrations import nano_vllm

MANAGERS = {"nano-vllm's own": None, "kvblocks": False, "kvblocks, early": True}  # `early` of `install`, if called
NUM_SHARED, MOST_OWN, MAX_TOKENS = 1024, 200, 32
MARK = "result: "


def answer(model: str, num_requests: int, *, early: bool | None) -> dict[str, Any]:
    """Answer all prompts; returns the tokens and the counts. early: None for nano-vllm's own block manager."""
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.sampling_params import SamplingParams

    if early is not None:
        nano_vllm.install(early=early)
    llm = LLMEngine(model, enforce_eager=True, max_model_len=2048)
    num_computed, num_steps, step = 0, 0, llm.step

    def counted() -> Any:
        nonlocal num_computed, num_steps
        outputs, num_tokens = step()  # positive: prompt tokens computed; negative: decoded tokens
        num_computed += max(num_tokens, 0)
        num_steps += 1
        return outputs, num_tokens

    llm.step = counted
    random = Random(0)
    most = llm.model_runner.config.hf_config.vocab_size - 1
    shared = [[random.randint(3, most) for _ in range(NUM_SHARED)] for _ in range(2)]
    prompts = [
        shared[number % 2] + [random.randint(3, most) for _ in range(random.randint(1, MOST_OWN))]
        for number in range(num_requests)
    ]
    params = SamplingParams(temperature=1e-5, max_tokens=MAX_TOKENS, ignore_eos=True)  # practically greedy
    began = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    nano_vllm.uninstall()
    return {
        "tokens": [output["token_ids"] for output in outputs],
        "computed": num_computed,
        "prompt_tokens": sum(map(len, prompts)),
        "steps": num_steps,
        "seconds": perf_counter() - began,
    }


def answer_apart(name: str) -> dict[str, Any]:
    """Call `answer` in a separate process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    result: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return result


def main() -> None:
    """Compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--only", choices=MANAGERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        result = answer(arguments.model, arguments.num_requests, early=MANAGERS[arguments.only])
        print(MARK + json.dumps(result), flush=True)
        return
    results = {name: answer_apart(name) for name in MANAGERS}
    print(f"{'block manager':<20}{'prompt tokens':>15}{'computed':>10}{'steps':>8}{'seconds':>10}")
    for name, result in results.items():
        numbers = f"{result['prompt_tokens']:>15}{result['computed']:>10}{result['steps']:>8}"
        print(f"{name:<20}{numbers}{result['seconds']:>10.2f}")
    theirs, *ours = results.values()
    num_equal = [sum(map(list.__eq__, theirs["tokens"], other["tokens"])) for other in ours]
    print(f"equal answers, of {arguments.num_requests}: {num_equal[0]}; early: {num_equal[1]}")
    print("In half precision, rounding depends on the batch, so early answers may differ after some tokens.")


if __name__ == "__main__":
    main()
