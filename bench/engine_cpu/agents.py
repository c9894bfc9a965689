"""The benefit of a session gate on the real engine: agents that take turns, with and without it.

    python -m bench.engine_cpu.agents [--model smollm2] [--agents 24] [--fitting 6] [--turns 5] [--rounds 1]
        [--json FILE]

Each agent has a session. Its first prompt has `--prompt` random tokens. It gets an answer of `--answer` tokens, pauses,
and sends everything again with `--result` random tokens more, as after a tool call. Prompts, pauses and beginnings are
the same for all runs, by seed. The pool holds the last prompts and answers of `--fitting` agents. Agents begin within
`--within` seconds, and the pauses are exponential with a mean of `--pause` seconds, and at most four times as long.

A row is a run. "completion_s" is the time until all agents are done, and "cpu_s" is the processor time of that, which
other work on the machine affects less. The delay of a session is the time from its beginning to its end without its
pauses. "computed_share" is the share of all prompts' tokens that were computed.
Both runs of a round follow each other, and rounds alternate in which one is first. One torch thread.

What it doesn't show: other models and pools, a GPU, or sessions longer than these.
"""

import argparse
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch

from bench.conditions import conditions, keep, print_conditions
from bench.random_model import open_model
from kvblocks.engine import Engine

BLOCK_SIZE = 16
WORDS = 250  # token ids from which prompts are made
WAIT_S = 0.05


@dataclass(eq=False)
class ScriptedAgent:
    """A session: its first prompt, what tools say after each answer, and the pauses, in seconds."""

    name: str
    begins_s: float
    prompt: list[int]
    results: list[list[int]]
    pauses_s: list[float]


def make_agents(given: argparse.Namespace, seed: int) -> list[ScriptedAgent]:
    """Return the agents of a round."""
    random = Random(seed)

    def words(number: int) -> list[int]:
        return [random.randrange(3, 3 + WORDS) for _ in range(number)]

    return [
        ScriptedAgent(
            f"agent {number}",
            random.uniform(0.0, given.within),
            words(given.prompt),
            [words(given.result) for _ in range(given.turns - 1)],
            [min(4 * given.pause, random.expovariate(1 / given.pause)) for _ in range(given.turns - 1)],
        )
        for number in range(given.agents)
    ]


def run(engine: Engine, agents: list[ScriptedAgent], num_answer: int) -> dict[str, float]:
    """Return the results of a run."""
    started, began_cpu = time.monotonic(), time.process_time()
    coming = [(agent.begins_s, number, agent.prompt, 0) for number, agent in enumerate(agents)]
    heapq.heapify(coming)
    asked: dict[Any, tuple[int, list[int], int]] = {}
    delays, ttfts, longest = [], [], 0.0
    num_prompted = num_cached = 0
    while coming or asked:
        now = time.monotonic() - started
        while coming and coming[0][0] <= now:
            _, number, prompt, turn = heapq.heappop(coming)
            options: Any = {"max_tokens": num_answer, "ignore_eos": True, "session": agents[number].name}
            (generation,) = engine.submit(prompt, **options)
            asked[generation] = number, prompt, turn
        if not engine.has_work:
            wakes = [WAIT_S, *([coming[0][0] - now] if coming else [])]
            if engine.wake_at is not None:
                wakes.append(engine.wake_at - time.monotonic())
            time.sleep(max(0.0, min(wakes)))
            continue
        ended = [generation for generation in engine.step() if generation.finish_reason is not None]
        now = time.monotonic() - started
        for generation in ended:
            number, prompt, turn = asked.pop(generation)
            agent, answer = agents[number], generation.completion
            if answer is None or generation.finish_reason != "length":
                raise RuntimeError(f"{agent.name}: expected a whole answer, got {generation.finish_reason}")
            num_prompted += answer.num_prompt_tokens
            num_cached += answer.num_cached_tokens
            ttfts.append(answer.ttft_s)
            longest = max(longest, answer.ttft_s)
            if turn == len(agent.results):
                delays.append(now - agent.begins_s - sum(agent.pauses_s))
            else:
                following = [*prompt, *answer.token_ids, *agent.results[turn]]
                heapq.heappush(coming, (now + agent.pauses_s[turn], number, following, turn + 1))
    return {
        "completion_s": time.monotonic() - started,
        "cpu_s": time.process_time() - began_cpu,
        "delay_mean_s": mean(delays),
        "delay_most_s": max(delays),
        "ttft_mean_s": mean(ttfts),
        "ttft_most_s": longest,
        "computed_share": 1 - num_cached / num_prompted,
        "num_prompt_tokens": num_prompted,
    }


def rounds(given: argparse.Namespace, model: Any, num_blocks: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each run."""
    for number in range(given.rounds):
        agents = make_agents(given, number + 1)
        for has_gate in (False, True) if number % 2 == 0 else (True, False):
            engine = Engine(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, session_gate=has_gate)
            model = engine.model
            yield {"gate": has_gate, "seed": number + 1, **run(engine, agents, given.answer)}


def main(arguments: list[str] | None = None) -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(prog="bench.engine_cpu.agents", description="Agents, with and without a gate.")
    parser.add_argument("--model", default="smollm2")
    for name, default in (("agents", 24), ("fitting", 6), ("turns", 5), ("rounds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("prompt", 192), ("answer", 8), ("result", 56)):
        parser.add_argument(f"--{name}", type=int, default=default, help="tokens")
    for name, seconds in (("within", 10.0), ("pause", 2.0)):
        parser.add_argument(f"--{name}", type=float, default=seconds, help="seconds")
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num_last = given.prompt + given.turns * given.answer + (given.turns - 1) * given.result
    num_blocks = ceil(given.fitting * num_last / BLOCK_SIZE)
    facts = conditions(
        model=Path(given.model).name,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_last_tokens=num_last,
        threads=1,
        **{name: getattr(given, name) for name in ("agents", "fitting", "turns", "prompt", "answer", "result")},
        within_s=given.within,
        pause_mean_s=given.pause,
    )
    print_conditions(facts)
    rows: list[dict[str, Any]] = []
    with open_model(given.model) as folder:
        for row in rounds(given, folder, num_blocks):
            rows.append(row)
            print(
                f"seed {row['seed']} {'gate' if row['gate'] else 'no gate':7}  completion {row['completion_s']:7.1f} s"
                f"  cpu {row['cpu_s']:6.1f} s"
                f"  delay mean {row['delay_mean_s']:7.1f} most {row['delay_most_s']:7.1f} s"
                f"  ttft mean {row['ttft_mean_s']:6.2f} most {row['ttft_most_s']:6.1f} s"
                f"  computed {row['computed_share']:.3f}",
                flush=True,
            )
            keep(given.json, facts, rows)


if __name__ == "__main__":
    main()
