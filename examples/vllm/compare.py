"""Compares vLLM with its own KV cache manager and with kvblocks: answers, hit rate, the scheduler's time.

    python examples/vllm/compare.py MODEL [--num-requests 40] [--block-size 16] [--num-blocks 2000]

MODEL is what `vllm serve` takes: a name on Hugging Face, or a folder. Each engine runs in a separate process, one after
the other, so the model is loaded twice. The prompts are a common prefix of 1,024 tokens followed by random tokens. On a
CPU use --block-size 32 --dtype float32.
"""

import argparse
import json
import os
import subprocess
import sys
from random import Random
from time import thread_time_ns
from typing import Any

SCHEDULERS = {"vLLM's own": None, "kvblocks": "kvblocks.integrations.vllm.KVBlocksScheduler"}
NUM_SHARED, MOST_OWN, MAX_TOKENS = 1024, 64, 24
MARK = "result: "


def run(arguments: argparse.Namespace, scheduler: str | None) -> dict[str, Any]:
    """Answer all prompts with one scheduler; returns the tokens and what was counted."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    spent = [0, 0]  # steps, and the scheduler thread's nanoseconds
    for name in ("schedule", "update_from_output"):
        original = getattr(Scheduler, name)

        def timed(*given: Any, _original: Any = original, _is_step: bool = name == "schedule", **named: Any) -> Any:
            began = thread_time_ns()
            answer = _original(*given, **named)
            spent[0] += _is_step
            spent[1] += thread_time_ns() - began
            return answer

        setattr(Scheduler, name, timed)
    model = LLM(
        arguments.model,
        dtype=arguments.dtype,
        block_size=arguments.block_size,
        num_gpu_blocks_override=arguments.num_blocks,
        max_model_len=2048,
        enforce_eager=True,
        async_scheduling=False,
        scheduler_cls=scheduler,
    )
    random = Random(0)
    most = model.llm_engine.model_config.get_vocab_size() - 1
    shared = [random.randint(3, most) for _ in range(NUM_SHARED)]
    prompts = [
        shared + [random.randint(3, most) for _ in range(random.randint(1, MOST_OWN))]
        for _ in range(arguments.num_requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "hit_rate": sum(output.num_cached_tokens or 0 for output in outputs) / sum(map(len, prompts)),
        "num_steps": spent[0],
        "us_per_step": spent[1] / 1e3 / max(spent[0], 1),
    }


def run_apart(name: str) -> dict[str, Any]:
    """Call `run` in a separate process. The scheduler runs in that process, too, so that it can be timed."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    result: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return result


def main() -> None:
    """Compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=2000)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", choices=SCHEDULERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(MARK + json.dumps(run(arguments, SCHEDULERS[arguments.only])), flush=True)
        return
    results = {name: run_apart(name) for name in SCHEDULERS}
    print(f"{'KV cache manager':<20}{'hit rate':>10}{'steps':>8}{'scheduler, us a step':>24}")
    for name, result in results.items():
        print(f"{name:<20}{result['hit_rate']:>10.1%}{result['num_steps']:>8}{result['us_per_step']:>24.0f}")
    theirs, ours = results.values()
    print("all answers are identical" if theirs["tokens"] == ours["tokens"] else "ANSWERS DIFFER")
    print(
        "What this doesn't show: the model's own time, which is most of a step. It is one run, so the times are noisy."
    )
    if theirs["tokens"] != ours["tokens"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
