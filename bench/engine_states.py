"""The benefit of cached recurrent states in the engine: the demo's requests on a random model shaped like a hybrid one.

    python -m bench.engine_states [--model qwen3-next-small] [--marks] [--rounds N] [--threads N] [--json FILE]

Four customers ask, and the first one asks again; all prompts begin with one handbook. Two engines of one process share
the model and answer each request in turns, one without prefix caching and one with states saved and restored. Each
round begins with an empty cache. Times are seconds from a call to its first token. The share of copies is the time of
`copy_states` as a share of the time of all steps. --marks: marks the end of the handbook, as the server does.

The random model has Qwen3-Next's layers, three gated delta nets for each attention, and its sizes of heads, but fewer
and narrower layers, and fewer experts. A state takes as much memory as about 1,550 tokens of K and V, as in the real
model with both in one dtype. `kimi-linear-small` is the same for Kimi Linear.

What it does not show: a GPU, the real model, several requests at once, and a pool that is full.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.conditions import conditions, keep, print_conditions
from bench.random_model import SHAPES, write_model
from kvblocks.core.state_copy import StateCopy
from kvblocks.engine.completion import Completion
from kvblocks.engine.demo.script import SUPPORT_DESK
from kvblocks.engine.engine import Engine
from kvblocks.engine.run.runner import LoadedModel

KV_CACHE_MEMORY = "256MiB"
MAX_TOKENS = 24
NAMES = ("customer 1", "customer 2", "customer 3", "customer 4", "customer 1 again")


class Timed:
    """An engine whose copies of states are timed, and its steps."""

    def __init__(self, model: LoadedModel, *, caches: bool) -> None:
        self.engine = Engine(model, kv_cache_memory=KV_CACHE_MEMORY, enable_prefix_caching=caches)
        self.copies_s = self.steps_s = 0.0
        self._copy, self._step = self.engine.runner.copy_states, self.engine.step
        self.engine.runner.copy_states = self.copy_states  # type: ignore[method-assign]

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """As the runner's, timed."""
        start_s = perf_counter()
        self._copy(copies)
        self.copies_s += perf_counter() - start_s

    def answer(self, prompt: list[int], marks: tuple[int, ...]) -> Completion:
        """Answer a prompt with MAX_TOKENS tokens."""
        start_s = perf_counter()
        (completion,) = self.engine.generate([prompt], max_tokens=MAX_TOKENS, ignore_eos=True, marks=marks)
        self.steps_s += perf_counter() - start_s
        return completion


def prompts_of(model: LoadedModel, first_answer: str | None = None) -> list[list[int]]:
    """The customers' prompts; with the first one's answer, also its next prompt."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "the random model has a tokenizer"
    system = {"role": "system", "content": SUPPORT_DESK.system_prompt}
    chats = [[system, {"role": "user", "content": question}] for question in SUPPORT_DESK.questions]
    if first_answer is not None:
        answer = {"role": "assistant", "content": first_answer}
        chats.append([*chats[0], answer, {"role": "user", "content": SUPPORT_DESK.follow_up}])
    return [tokenizer.apply_chat_template(chat) for chat in chats]


def marks_of(model: LoadedModel) -> tuple[int, ...]:
    """Where the customers' prompts begin to differ: after the handbook, and what the template writes after it."""
    prompts = prompts_of(model)
    return (next(at for at, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1),)


def run_round(
    engines: dict[bool, Timed], model: LoadedModel, marks: tuple[int, ...], *, starts_with: bool
) -> dict[bool, list[Completion]]:
    """Answer all requests once with each engine, in turns."""
    found: dict[bool, list[Completion]] = {False: [], True: []}
    for timed in engines.values():
        timed.engine.manager.reset_prefix_cache()
    for number in range(len(NAMES)):
        answer = found[False][0].text if number == len(NAMES) - 1 else None
        prompt = prompts_of(model, answer)[number]
        for caches in (starts_with, not starts_with):
            found[caches].append(engines[caches].answer(prompt, marks))
    return found


def rows_of(rounds: list[dict[bool, list[Completion]]]) -> list[dict[str, Any]]:
    """A row for each request."""
    rows = []
    for number, name in enumerate(NAMES):
        row: dict[str, Any] = {"request": name}
        for caches, label in ((False, "without"), (True, "with")):
            completions = [one[caches][number] for one in rounds]
            times = [completion.ttft_s for completion in completions]
            row |= {
                "prompt_tokens": completions[-1].num_prompt_tokens,
                f"cached_tokens_{label}": completions[-1].num_cached_tokens,
                f"computed_tokens_{label}": completions[-1].num_computed_tokens,
                f"ttft_s_{label}": [min(times), median(times), max(times)],
            }
        row["ratio"] = row["ttft_s_without"][1] / row["ttft_s_with"][1]
        rows.append(row)
    return rows


def measure(model: LoadedModel, num_rounds: int, marks: tuple[int, ...]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and what states cost and saved in all rounds together."""
    engines = {caches: Timed(model, caches=caches) for caches in (False, True)}
    run_round(engines, model, marks, starts_with=False)  # warms up
    for timed in engines.values():
        timed.copies_s = timed.steps_s = 0.0
    before = engines[True].engine.manager.states.stats
    rounds = [run_round(engines, model, marks, starts_with=bool(number % 2)) for number in range(num_rounds)]
    rows, own = rows_of(rounds), engines[True]
    stats, plan = own.engine.manager.states.stats, own.engine.plan
    total = {
        "hit_share": sum(row["cached_tokens_with"] for row in rows) / sum(row["prompt_tokens"] for row in rows),
        "computed_tokens_without": sum(row["computed_tokens_without"] for row in rows),
        "computed_tokens_with": sum(row["computed_tokens_with"] for row in rows),
        "copies_share": own.copies_s / own.steps_s,
        "copies_ms_a_round": 1000 * own.copies_s / num_rounds,
        "saved_a_round": (stats.num_saved - before.num_saved) / num_rounds,
        "restored_a_round": (stats.num_restored - before.num_restored) / num_rounds,
        "state_bytes": plan.state_bytes,
        "state_blocks": plan.state_blocks,
        "block_bytes": plan.block_bytes,
        "same_answers": all(
            one[False][number].token_ids == one[True][number].token_ids
            for one in rounds
            for number in range(len(NAMES))
        ),
    }
    return rows, total


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        prog="bench.engine_states", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-next-small", choices=sorted(SHAPES))
    parser.add_argument("--marks", action="store_true", help="mark the end of the handbook")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    facts = conditions(torch=torch.__version__, threads=asked.threads, num_rounds=asked.rounds, model=asked.model)
    facts |= {
        "marks": asked.marks,
        "num_blocks": f"as many as {KV_CACHE_MEMORY} hold",
        "dtype": "float32",
        "max_tokens": MAX_TOKENS,
    }
    print_conditions(facts)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES[asked.model])
        model = LoadedModel.load(folder)
    rows, total = measure(model, asked.rounds, marks_of(model) if asked.marks else ())
    print(f"{'request':<18}{'prompt':>7}{'cached':>8}{'computed':>15}{'first token, s':>18}{'ratio':>8}")
    for row in rows:
        computed = f"{row['computed_tokens_without']} -> {row['computed_tokens_with']}"
        times = f"{row['ttft_s_without'][1]:.2f} -> {row['ttft_s_with'][1]:.2f}"
        head = f"{row['request']:<18}{row['prompt_tokens']:>7}{row['cached_tokens_with']:>8}"
        print(f"{head}{computed:>15}{times:>18}{row['ratio']:>8.1f}")
    for name, value in total.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    keep(asked.json, facts, rows, total=total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
