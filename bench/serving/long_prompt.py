"""The cost of a long prompt for short chats after it, their cost for the long prompt, and the cost of both together.

    python -m bench.serving.long_prompt      # --chunk N, --chats N, --rounds N, --json FILE

Two engines answer the same requests: one computes whole steps of the long prompt until it is done ("before"), the other
as `kvblocks serve` does, by layers ("after"). Times are processor time of each engine's own steps, so other users of
the machine hardly matter. The engine that has used less goes next. A chat may come in the middle of a step, and waits
for its end, as in the server. Chats come alone, then behind the long prompt, then one of them; then the long prompt is
alone.

Many chats after the long prompt cost more than one: "before" answers all of them at the end, in one batch, and "after"
answers each when it comes, in steps of a few tokens. So the bench also prints the time of a token after the first one.

Not shown: HTTP and the event loop, a GPU, several long prompts at once.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.conditions import conditions, keep, print_conditions
from bench.random_model import open_model
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.schedule.long_prompts import LongPrompts
from kvblocks.server.settings import CPU_CHUNK_TOKENS

NAMES = ("before", "after")


class WholeSteps(LongPrompts):
    """No turns: long prompts, however many there are, take what is left of each step."""

    def begin_step(self, running: list[Any], *_: object, **__: object) -> list[Any]:
        """As `LongPrompts`."""
        return running

    def has_place(self, *_: object) -> bool:
        """As `LongPrompts`."""
        return True


@dataclass(frozen=True)
class Asked:
    """A request: when it comes, in seconds of the engine's time, its prompt, and how many tokens it generates."""

    at_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Sizes:
    """What is asked. A chat comes every `gap_s` seconds, from `gap_s` on."""

    num_long_tokens: int = 5700
    num_chat_tokens: int = 40
    num_chats: int = 10
    gap_s: float = 2.9
    max_tokens: int = 16


class Contestant:
    """An engine with a clock of its own, which stands still while others compute."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.now_s = engine, 0.0
        self.ttft_s: list[float] = []  # of each request, in order of arrival
        self.token_s: list[float] = []  # likewise, of a token behind the first one
        self.num_tokens = 0

    def answer(self, asked: Sequence[Asked]) -> Iterator[None]:
        """Answer all requests, and pause after each step. Begins at 0 seconds."""
        waiting, came, first, last = list(asked), {}, {}, {}
        self.now_s, self.num_tokens = 0.0, sum(len(one.prompt) + one.max_tokens for one in asked)
        while waiting or self.engine.has_work:
            if not self.engine.has_work:
                self.now_s = max(self.now_s, waiting[0].at_s)
            while waiting and waiting[0].at_s <= self.now_s:
                one = waiting.pop(0)
                (generation,) = self.engine.submit(one.prompt, max_tokens=one.max_tokens, ignore_eos=True)
                came[generation] = one.at_s
            start_s = time.process_time()
            changed = self.engine.step()
            self.now_s += time.process_time() - start_s
            for generation in changed:
                if generation.error is not None:
                    raise generation.error
                first.setdefault(generation, self.now_s)
                last[generation] = self.now_s
            yield
        self.ttft_s = [first[generation] - at_s for generation, at_s in came.items()]
        self.token_s = [(last[one] - first[one]) / max(1, len(one.pieces) - 1) for one in came]


def run(contestants: dict[str, Contestant], asked: Sequence[Asked]) -> dict[str, dict[str, Any]]:
    """Have all contestants answer the requests. Whoever has used least time goes next."""
    going = {name: contestant.answer(asked) for name, contestant in contestants.items()}
    while going:
        name = min(going, key=lambda name: contestants[name].now_s)
        if next(going[name], ...) is ...:
            del going[name]
    return {
        name: {"ttft_s": one.ttft_s, "token_s": one.token_s, "seconds": one.now_s, "num_tokens": one.num_tokens}
        for name, one in contestants.items()
    }


def measure(model: LoadedModel, sizes: Sizes, chunk: int, num_rounds: int) -> list[dict[str, Any]]:
    """Run all cases `num_rounds` times, and return a row for each case."""
    contestants = {}
    for name in NAMES:
        num_blocks = (sizes.num_long_tokens + sizes.num_chats * (sizes.num_chat_tokens + sizes.max_tokens)) // 16 + 99
        engine = Engine(model, num_blocks=num_blocks, enable_prefix_caching=False)
        engine.limits = StepLimits(max_num_chunk_tokens=chunk if name == "after" else None)
        if name == "before":
            engine.scheduler.long_prompts = WholeSteps(engine.manager)
        contestants[name] = Contestant(engine)
    found: dict[str, list[dict[str, dict[str, Any]]]] = {}
    run(contestants, cases(sizes, model.config.vocab_size, -1)["chats alone"])  # sets up libraries
    for number in range(num_rounds):
        for case, asked in cases(sizes, model.config.vocab_size, number).items():
            found.setdefault(case, []).append(run(contestants, asked))
    return [row_of(case, rounds) for case, rounds in found.items()]


def cases(sizes: Sizes, vocab_size: int, seed: int) -> dict[str, list[Asked]]:
    """Return the requests of each case: others for each seed, but the same chats in both cases."""
    chooser = random.Random(f"long prompt {seed}")

    def prompt(num_tokens: int) -> list[int]:
        return [chooser.randrange(vocab_size) for _ in range(num_tokens)]

    long = Asked(0.0, prompt(sizes.num_long_tokens), sizes.max_tokens)
    chats = [prompt(sizes.num_chat_tokens) for _ in range(sizes.num_chats)]
    return {
        "chats alone": [Asked(1e6 * number, chat, sizes.max_tokens) for number, chat in enumerate(chats)],
        "chats behind the long prompt": [
            long,
            *(Asked(sizes.gap_s * number, chat, sizes.max_tokens) for number, chat in enumerate(chats, 1)),
        ],
        "one chat behind the long prompt": [long, Asked(sizes.gap_s, chats[0], sizes.max_tokens)],
        "the long prompt alone": [long],
    }


def row_of(case: str, rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return a case's numbers: TTFT of chats and seconds per token after the first one, and TTFT of the long prompt.

    Also tokens per second, including the tokens of prompts.
    """
    row: dict[str, Any] = {"case": case}
    for name in NAMES:
        ttft_s = [value for one in rounds for value in one[name]["ttft_s"][has_long(case) :]]
        token_s = [value for one in rounds for value in one[name]["token_s"][has_long(case) :]]
        numbers = {"tokens_per_s": [one[name]["num_tokens"] / one[name]["seconds"] for one in rounds]}
        numbers["long_ttft_s"] = [one[name]["ttft_s"][0] for one in rounds if has_long(case)]
        row[name] = {"chat_ttft_s": ttft_s, "chat_token_s": token_s, **numbers}
    return row


def has_long(case: str) -> bool:
    """Whether a case's first request is the long prompt."""
    return case != "chats alone"


def spread(values: Sequence[float]) -> str:
    """Return the minimum, median and maximum of at least one value."""
    return f"{min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table: seconds and tokens per second, minimum / median / maximum."""
    alone = statistics.median(rows[0]["after"]["chat_ttft_s"])
    for row in rows:
        print(f"\n{row['case']}")
        for name in NAMES:
            found = row[name]
            titles = {
                "chat_ttft_s": "chats' TTFT, s",
                "chat_token_s": "chats' next tokens, s each",
                "long_ttft_s": "the long prompt's TTFT, s",
            }
            for key, title in titles.items():
                if found[key]:
                    print(f"  {name:<8}{title:<28}{spread(found[key])}")
            if has_long(row["case"]):
                print(f"  {name:<8}{'tokens a second':<28}{spread(found['tokens_per_s'])}")
        if has_long(row["case"]):
            ratio = [
                one / two for one, two in zip(row["after"]["tokens_per_s"], row["before"]["tokens_per_s"], strict=True)
            ]
            print(f"  tokens a second, after / before: {spread(ratio)}")
        if row["after"]["chat_ttft_s"] and has_long(row["case"]):
            times = [value / alone for value in row["after"]["chat_ttft_s"]]
            print(f"  chats' TTFT, times alone: {spread(times)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.serving.long_prompt", description="Times short chats that come after a long prompt."
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Hugging Face folder")
    parser.add_argument(
        "--chunk", type=int, default=CPU_CHUNK_TOKENS, help="tokens of a prompt whose work a step may take"
    )
    parser.add_argument("--chats", type=int, default=Sizes.num_chats)
    parser.add_argument("--gap", type=float, default=Sizes.gap_s, help="seconds between two chats")
    parser.add_argument("--long", type=int, default=Sizes.num_long_tokens, help="tokens of the long prompt")
    parser.add_argument("--chat", type=int, default=Sizes.num_chat_tokens, help="tokens of a chat")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = Sizes(given.long, given.chat, given.chats, given.gap)
    with open_model(given.model) as folder:
        facts = conditions(model=folder.name, threads=1, clock="processor time", chunk=given.chunk, **vars(sizes))
        print_conditions(facts)
        rows = measure(LoadedModel.load(folder, "cpu"), sizes, given.chunk, given.rounds)
    show(rows)
    keep(given.json, facts, rows)


if __name__ == "__main__":
    main()
