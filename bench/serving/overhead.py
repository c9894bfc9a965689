"""The cost of caching where nothing can be shared: two engines in one process, without and with it, in turns.

No two prompts share a prefix, so caching has no benefit here and must cost almost nothing. Both engines have the same
weights and get the same requests. They take turns step by step, so that other work on the machine disturbs both alike.
A round's ratio compares the sums of their times. Forward passes, computed tokens and preemptions are also counted,
since noise can't change them. Caching only changes the time that an engine spends outside of the model. So that time is
also measured separately, and the difference is given as a share of the whole, which shows even differences smaller than
the noise of the whole.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from bench.timing import settle

if TYPE_CHECKING:
    from kvblocks.engine import Engine
    from kvblocks.engine.generation import Generation

MAX_LOSS = 0.02
NUM_ROUNDS = 5
NAMES = ("without", "with")


@dataclass(frozen=True)
class Case:
    """Requests that have nothing in common. One comes every `gap_steps` steps; 0: all come at once.

    prompt_tokens, max_tokens: the minimum and the maximum. num_blocks: the blocks of each engine's pool.
    num_batched_tokens: the most tokens of a step. is_pressed: whether the pool is too small for the running requests.
    """

    name: str
    num_requests: int
    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]
    gap_steps: int
    num_blocks: int
    num_batched_tokens: int = 512
    is_pressed: bool = False

    @property
    def about(self) -> str:
        """A description in words."""
        (shortest, longest), (fewest, most) = self.prompt_tokens, self.max_tokens
        arrival = {0: "all at once", 1: "one a step"}.get(self.gap_steps, f"one every {self.gap_steps} steps")
        return (
            f"{self.num_requests} requests of {shortest} to {longest} tokens, {fewest} to {most} generated, {arrival},"
            f" {self.num_blocks} blocks, {self.num_batched_tokens} tokens a step at most"
        )


CPU_CASES = (
    Case("continuous batching", 8, (16, 64), (6, 16), 2, 40),
    Case("paged attention under pressure", 6, (32, 40), (16, 24), 0, 10, is_pressed=True),
    Case("chunked prefill", 3, (160, 224), (4, 8), 1, 48, num_batched_tokens=64),
)
QUICK_CASES = (
    Case("continuous batching", 3, (16, 40), (2, 6), 1, 16),
    Case("paged attention under pressure", 4, (16, 24), (16, 24), 0, 6, is_pressed=True),
    Case("chunked prefill", 2, (100, 140), (2, 4), 1, 24, num_batched_tokens=64),
)
GPU_CASES = (
    Case("continuous batching", 64, (256, 1024), (64, 256), 4, 6144),
    Case("paged attention under pressure", 48, (512, 768), (256, 384), 0, 1024, is_pressed=True),
    Case("chunked prefill", 8, (6144, 8192), (32, 64), 1, 6144, num_batched_tokens=512),
)


class WatchedRunner:
    """Counts and times the forward passes of an engine's runner."""

    def __init__(self, engine: "Engine", clock: Callable[[], float]) -> None:
        self._run, self._clock = engine.runner.run, clock
        self.seconds, self.num_passes, self.num_tokens = 0.0, 0, 0

    def run(self, chunks: Sequence[Any]) -> torch.Tensor:
        """Compute a step."""
        start = self._clock()
        logits = self._run(chunks)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self.seconds += self._clock() - start
        self.num_passes += 1
        self.num_tokens += sum(chunk.num_tokens for chunk in chunks)
        return logits


class Contestant:
    """An engine that is timed beside another one on the same requests. clock: in seconds."""

    def __init__(self, engine: "Engine", clock: Callable[[], float]) -> None:
        self.engine, self._clock = engine, clock
        self.watched = WatchedRunner(engine, clock)
        engine.runner.run = self.watched.run  # type: ignore[method-assign]
        self.seconds = 0.0
        self._waiting: list[tuple[int, list[int], int]] = []
        self._generations: list[Generation] = []
        self._num_steps = self._num_evicted = 0

    def begin(self, requests: Sequence[tuple[int, list[int], int]]) -> None:
        """Begin a round. requests: the step that each comes at, its prompt, and how many tokens it generates."""
        self.seconds = self.watched.seconds = 0.0
        self.watched.num_passes = self.watched.num_tokens = self._num_steps = 0
        self._waiting, self._generations = list(requests), []
        self._num_evicted = self.engine.manager.stats.num_evicted_blocks

    def step(self) -> bool:
        """Submit the requests that are due, and compute a step. Returns False if nothing was left to do."""
        if not self._waiting and not self.engine.has_work:
            return False
        start = self._clock()
        while self._waiting and self._waiting[0][0] <= self._num_steps:
            _, prompt, max_tokens = self._waiting.pop(0)
            self._generations += self.engine.submit(prompt, max_tokens=max_tokens, ignore_eos=True)
        self.engine.step()
        self.seconds += self._clock() - start
        self._num_steps += 1
        return True

    def outcome(self) -> dict[str, Any]:
        """Return the results of the round. Raises RuntimeError if a request failed."""
        failed = [generation.error for generation in self._generations if generation.error is not None]
        if failed:
            raise RuntimeError(f"expected answers, got {failed[0]!r}")
        return {
            "seconds": self.seconds,
            "seconds_outside": self.seconds - self.watched.seconds,
            "num_steps": self.watched.num_passes,
            "num_computed_tokens": self.watched.num_tokens,
            "num_preemptions": sum(generation.request.num_preemptions for generation in self._generations),
            "num_evicted_blocks": self.engine.manager.stats.num_evicted_blocks - self._num_evicted,
            "token_ids": [generation.completion.token_ids for generation in self._generations if generation.completion],
        }


def make_requests(case: Case, vocab_size: int, seed: int) -> list[tuple[int, list[int], int]]:
    """Return the requests of a round: others for each seed."""
    chooser = Random(f"{case.name} {seed}")
    return [
        (
            number * case.gap_steps,
            [chooser.randrange(vocab_size) for _ in range(chooser.randint(*case.prompt_tokens))],
            chooser.randint(*case.max_tokens),
        )
        for number in range(case.num_requests)
    ]


def run_round(contestants: dict[str, Contestant], requests: Sequence[tuple[int, list[int], int]]) -> dict[str, Any]:
    """Have both answer the requests. They take turns step by step, and who is first alternates."""
    for contestant in contestants.values():
        contestant.begin(requests)
    order, is_going = list(contestants.values()), True
    while is_going:
        went = [contestant.step() for contestant in order]
        is_going = any(went)
        order.reverse()
    return {name: contestant.outcome() for name, contestant in contestants.items()}


def measure_case(case: Case, model: Any, clock: Callable[[], float], num_rounds: int = NUM_ROUNDS) -> dict[str, Any]:
    """Run a case. A first round isn't counted; it fills the pool with blocks that nobody asks for again."""
    from kvblocks.engine import Engine, StepLimits

    contestants = {}
    for name in NAMES:
        engine = Engine(
            model, num_blocks=case.num_blocks, enable_prefix_caching=name == "with", deterministic=True, schedule="fcfs"
        )
        engine.limits = StepLimits(max_num_batched_tokens=case.num_batched_tokens, max_num_seqs=64)
        contestants[name] = Contestant(engine, clock)
    run_round(contestants, make_requests(case, model.config.vocab_size, -1))
    settle()
    try:
        seeds = range(num_rounds)
        rounds = [run_round(contestants, make_requests(case, model.config.vocab_size, seed)) for seed in seeds]
    finally:
        gc.enable()
    return summarize_rounds(case, rounds)


def summarize_rounds(case: Case, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a case's row: each engine's sums over all rounds, and the rounds' ratios with / without."""
    ratios = [one["with"]["seconds"] / one["without"]["seconds"] for one in rounds]
    keys = [key for key in rounds[0]["with"] if key != "token_ids"]
    sums = {name: {key: sum(one[name][key] for one in rounds) for key in keys} for name in NAMES}
    for total in sums.values():
        total["outside_us_per_step"] = total["seconds_outside"] / total["num_steps"] * 1e6
    more_s = sums["with"]["seconds_outside"] - sums["without"]["seconds_outside"]
    row = {
        "run": case.name,
        "about": case.about,
        "num_rounds": len(rounds),
        **sums,
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "loss_outside": more_s / sums["without"]["seconds"],
        "is_identical": all(one["with"]["token_ids"] == one["without"]["token_ids"] for one in rounds),
    }
    return row | {"targets": judge_case(case, row)}


def judge_case(case: Case, row: dict[str, Any]) -> dict[str, bool]:
    """Return which targets a case meets. Under pressure caching may help: a preempted request hits its own blocks."""
    counts = [[row[name][key] for key in ("num_steps", "num_computed_tokens")] for name in NAMES]
    met = {"identical answers": row["is_identical"]}
    if case.is_pressed:
        met["preempts, without and with"] = all(row[name]["num_preemptions"] > 0 for name in NAMES)
        met["no more forward passes, no more tokens computed"] = all(b <= a for a, b in zip(*counts, strict=True))
    else:
        met["as many forward passes, as many tokens computed"] = counts[0] == counts[1]
    met[f"outside of the model at most {MAX_LOSS:.0%} of the whole more"] = row["loss_outside"] <= MAX_LOSS
    met[f"median time at most {MAX_LOSS:.0%} more"] = row["ratio"] <= 1 + MAX_LOSS
    return met


def measure_overhead(
    folder: Path, device: torch.device, cases: Sequence[Case], num_rounds: int = NUM_ROUNDS
) -> list[dict[str, Any]]:
    """Run the cases on a model, and return their rows. Times are processor time; on a GPU, wall-clock time."""
    from kvblocks.engine import LoadedModel

    clock = time.perf_counter if device.type == "cuda" else time.process_time
    model = LoadedModel.load(folder, device) if cases else None
    return [measure_case(case, model, clock, num_rounds) for case in cases]


def is_noisy(row: dict[str, Any]) -> bool:
    """Whether the rounds differ by more than the allowed loss, so that the times alone prove nothing."""
    return bool(row["ratio_most"] - row["ratio_least"] > MAX_LOSS)


def spread_line(row: dict[str, Any]) -> str:
    """Return a case's time in a line."""
    line = (
        f"time with / without: {row['ratio']:.3f} ({row['ratio_least']:.3f} to {row['ratio_most']:.3f} in"
        f" {row['num_rounds']} rounds); outside of the model {row['without']['outside_us_per_step']:.0f} us a step"
        f" without, {row['with']['outside_us_per_step']:.0f} with: {row['loss_outside']:+.2%} of the whole"
    )
    noisy = f"; the rounds differ by more than {MAX_LOSS:.0%}, so the counts say more than the time"
    return line + (noisy if is_noisy(row) else "")
