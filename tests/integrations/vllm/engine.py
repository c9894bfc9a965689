"""The whole engine with a real model, in a process of its own: `python -m integrations.vllm.engine REQUEST`.

REQUEST is a JSON object with the fields of `Run`. The answer is one line of JSON behind MARK: each request's tokens and
how many tokens of its prompt were cached, and how often a request was preempted, where that can be seen.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

MARK = "answer: "
MOST_REQUESTS = 41
PREFIX_TOKENS = 1024
VOCABULARY = 49_152  # of SmolLM2
TIMEOUT = 900


@dataclass(frozen=True, slots=True)
class Run:
    """What to run. scheduler: the class's dotted name, None for vLLM's own. in_process: whether the core is in ours.

    every: takes every n-th of the requests. has_gate: whether a session gate is before the queue; then the requests are
    of five sessions, and the answer has how many sessions the gate let in, and how many requests waited at most.
    """

    model: str
    num_blocks: int
    scheduler: str | None = None
    is_async: bool = False
    in_process: bool = True
    every: int = 1
    has_gate: bool = False

    def start(self) -> dict[str, Any]:
        """Return the answer of a process of its own."""
        root = Path(__file__).resolve().parents[3]
        path = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.in_process else "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "integrations.vllm.engine", json.dumps(asdict(self))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        for line in done.stdout.splitlines():
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        raise RuntimeError(f"the engine ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def make_prompts() -> list[list[int]]:
    """Return all prompts: a long common prefix, and something of their own behind it."""
    random = Random(7)
    prefix = [random.randrange(VOCABULARY) for _ in range(PREFIX_TOKENS)]
    return [prefix + [random.randrange(VOCABULARY) for _ in range(8 + 3 * i)] for i in range(MOST_REQUESTS)]


def main(run: Run) -> None:
    """Run the engine, and print the answer."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    preempt = Scheduler._preempt_request  # noqa: SLF001  vLLM has no other place to count them

    def counting(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = counting  # noqa: SLF001
    model = LLM(
        model=run.model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=1280,
        max_num_seqs=8,
        max_num_batched_tokens=1280,
        num_gpu_blocks_override=run.num_blocks,
        scheduler_cls=run.scheduler,
        async_scheduling=run.is_async,
        additional_config={"kvblocks_session_gate": True} if run.has_gate else {},
        disable_log_stats=True,
        seed=0,
    )
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in make_prompts()[:: run.every]]
    params = [
        SamplingParams(temperature=0, max_tokens=16 + 7 * (i % 6), ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    gate = None
    if run.has_gate:
        outputs, gate = take_turns(model.llm_engine, prompts, params)
    else:
        outputs = model.generate(prompts, params, use_tqdm=False)
    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "preempted": len(preempted) if run.in_process else None,
        "gate": gate,
    }
    print(MARK + json.dumps(answer), flush=True)


def take_turns(engine: Any, prompts: list[Any], params: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Have all prompts answered, those of five sessions. Returns the outputs, and what the gate did."""
    for number, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, given, session_id=f"session {number % 5}")
    entrance = engine.engine_core.engine_core.scheduler.entrance
    done, most_held = {}, 0
    while engine.has_unfinished_requests():
        done |= {int(output.request_id): output for output in engine.step() if output.finished}
        most_held = max(most_held, len(entrance.held))
    stats = entrance.gate.stats
    return [done[number] for number in range(len(prompts))], {
        "entries": stats.num_entries,
        "waiting": stats.num_waiting_requests,
        "most_held": most_held,
    }


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))
