"""Where a server's time goes with and without prefix caching: computing prompts, decoding, or neither.

    python -m bench.serving.shares              # --workloads "multi-turn chat,pool pressure", --model M, --json FILE

Caching only saves the computation of prompts, so its gain in tokens per second depends on the share of time that this
took. This runs workloads of `bench.serving` in one process, through two engines in turn, and adds up the processor's
time by kinds of steps. All conversations begin at once, so no time is lost to arrivals, and the next turn of a chat
begins as soon as its answer is complete. What it does not show: HTTP, and waiting for clients.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.conditions import conditions, keep, print_conditions
from bench.random_model import open_model
from bench.serving.workloads import Conversation, Sizes, Workload, make_workloads
from kvblocks.engine import Engine, LoadedModel

if TYPE_CHECKING:
    from kvblocks.engine.generation import Generation

NAMES = ("without", "with")
NUM_BLOCKS = 700
SIZES = replace(Sizes(), num_requests=8)
COLUMNS = (
    ("seconds", "processor's time, s"),
    ("prompt_s", "of that, steps with prompts"),
    ("decode_s", "steps that only decode"),
    ("outside_s", "outside of the model"),
    ("tokens_per_s", "generated tokens a second"),
    ("num_prompt_tokens", "prompt tokens computed"),
    ("num_decode_steps", "steps that only decode"),
    ("rows_a_step", "rows in each of them, mean"),
    ("step_p50_s", "step of a token, median, s"),
)


class Watched:
    """An engine's runner that notes, for each pass, its time and how many tokens each row has."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        self.passes: list[tuple[float, list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, chunks: Sequence[Any]) -> torch.Tensor:
        """Compute a step."""
        start = time.process_time()
        logits = self._runner.run(chunks)
        self.passes.append((time.process_time() - start, [chunk.num_tokens for chunk in chunks]))
        return logits


def talk(engine: Engine, conversation: Conversation) -> Iterator["Generation"]:
    """Submit a conversation's prompts one after another. Go on when the answer to the last one is complete."""
    limits = {"max_tokens": conversation.max_tokens, "ignore_eos": True}
    if not conversation.turns:
        yield from engine.submit(list(conversation.prompt), **limits)
        return
    messages = [{"role": "system", "content": conversation.system}]
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        [generation] = engine.submit(engine.model.tokenizer.apply_chat_template(messages), **limits)
        yield generation
        assert generation.completion is not None
        messages.append({"role": "assistant", "content": generation.completion.text})


def run(model: LoadedModel, workload: Workload, *, caches: bool) -> dict[str, Any]:
    """Run a workload through a new engine, and return its times and counts."""
    engine = Engine(
        model, num_blocks=workload.num_blocks or NUM_BLOCKS, enable_prefix_caching=caches, deterministic=True
    )
    engine.generate([[5] * 64], max_tokens=3, ignore_eos=True)
    engine.runner = watched = Watched(engine)  # type: ignore[assignment]
    start, steps = time.process_time(), []
    going = [(talks, next(talks)) for talks in (talk(engine, one) for one in workload.conversations)]
    token_ids: list[list[int]] = []
    while going:
        num_passes, begun = len(watched.passes), time.process_time()
        engine.step()
        if len(watched.passes) > num_passes:
            steps.append((time.process_time() - begun, watched.passes[-1][1]))
        still = []
        for talks, generation in going:
            if generation.completion is not None:
                token_ids.append(generation.completion.token_ids)
            following = generation if generation.completion is None else next(talks, None)
            still += [] if following is None else [(talks, following)]
        going = still
    seconds = time.process_time() - start
    return summarize(seconds, steps, watched.passes) | {
        "tokens_per_s": sum(map(len, token_ids)) / seconds,
        "token_ids": sorted(token_ids),
    }


def summarize(
    seconds: float, steps: Sequence[tuple[float, list[int]]], passes: Sequence[tuple[float, list[int]]]
) -> dict[str, Any]:
    """Return the sums by kinds of steps. A row of one token decodes; so does a prompt's last token, if it is alone."""
    decodes = [(taken, rows) for taken, rows in passes if max(rows) == 1]
    prompt_s = sum(taken for taken, rows in passes if max(rows) > 1)
    decode_s = sum(taken for taken, _ in decodes)
    return {
        "seconds": seconds,
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "outside_s": seconds - prompt_s - decode_s,
        "num_prompt_tokens": sum(tokens for _, rows in passes for tokens in rows if tokens > 1),
        "num_decode_steps": len(decodes),
        "rows_a_step": statistics.mean(len(rows) for _, rows in decodes),
        "step_p50_s": statistics.median(taken for taken, rows in steps for tokens in rows if tokens == 1),
    }


def measure(model: LoadedModel, workload: Workload) -> dict[str, Any]:
    """Run a workload without caching and with it, and return both and their ratio."""
    without, cached = (run(model, workload, caches=name == "with") for name in NAMES)
    is_identical = without.pop("token_ids") == cached.pop("token_ids")
    # Had prompts cost nothing, and all else as much as without caching.
    bound = without["seconds"] / (without["decode_s"] + without["outside_s"])
    ratio = cached["tokens_per_s"] / without["tokens_per_s"]
    facts = {"workload": workload.name, "about": workload.about, "is_identical": is_identical}
    return {**facts, "without": without, "with": cached, "ratio": ratio, "bound": bound}


def show(row: dict[str, Any]) -> None:
    """Print a workload's table."""
    print(f"\n{row['workload']}: {row['about']}")
    print(f"{'':<36}{'without':>12}{'with':>12}")
    for key, title in COLUMNS:
        print(f"{title:<36}" + "".join(f"{row[name][key]:>12,.3f}" for name in NAMES))
    print(f"tokens a second: x{row['ratio']:.2f}; if prompts cost nothing, x{row['bound']:.2f}", flush=True)
    print(f"answers are {'equal' if row['is_identical'] else 'DIFFERENT'}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status: 1 if answers were different."""
    parser = argparse.ArgumentParser(prog="bench.serving.shares", description="Where a server's time goes.")
    parser.add_argument("--model", default="smollm2", help="as for bench.serving")
    parser.add_argument(
        "--workloads", default="shared prefix,multi-turn chat,pool pressure", help="names, separated by commas"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    given = parser.parse_args(arguments)
    names = [name.strip() for name in given.workloads.split(",")]
    torch.set_num_threads(1)
    with open_model(given.model) as folder:
        facts = conditions(
            model=folder.name, threads=1, num_blocks=NUM_BLOCKS, block_size=16, mode="deterministic, greedy"
        )
        print_conditions(facts)
        model = LoadedModel.load(folder, torch.device("cpu"))
        encode = model.tokenizer.encode
        workloads = make_workloads(SIZES, lambda text: encode(text, add_special_tokens=False))
        rows = []
        for workload in [one for one in workloads if one.name in names]:
            rows.append(measure(model, workload))
            show(rows[-1])
    keep(given.json, facts, rows)
    return int(not all(row["is_identical"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
