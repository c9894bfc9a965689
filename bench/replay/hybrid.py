"""The benefit of KV-cache groups for a model with windows: hit rate and memory of a Gemma-3-shaped model.

    python -m bench.replay.hybrid [--trace FILE] [--requests N] [--gib 8 32] [--json FILE]

FILE: a trace of Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces), jsonl or jsonl.gz, a
request a line: input_length, output_length, hash_ids (an id for each 512 tokens of the prompt; equal ids mean equal
prefixes). Without one, a small trace is generated that has conversations and shared system prompts.

The model is Gemma 3 4B's: 34 layers of 4 KV heads of 256, five with a window of 1024 to one with full attention, in
bf16. Three managers get the same bytes:

    all full                all layers attend to everything
    groups                  the groups that `kvblocks.plan` makes
    groups, by last use     the same groups, but blocks that leave a window are queued by last use, like all others;
                            the difference to "groups" is what the order of reuse does

Requests come in the trace's order and run 8 at a time. Prompts are computed in chunks, answers one token a step. When
the pool is full, the youngest request starts over.

To be quick, one token here stands for 16 of the trace. The window, the chunks and the blocks of 128 tokens are divided
by 16 too, so no rate changes. The last tokens of a prompt that don't fill 512 are left out: their id doesn't say what a
longer prompt shares with them. Outputs are tokens that never come again, since the trace doesn't say what they were. So
a next turn hits its predecessor's prompt, and all after that is new. What it doesn't show: time. Arrival times are not
used.
"""

import argparse
import gzip
import json
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from bench.conditions import conditions, keep, print_conditions
from kvblocks import FullAttention, Group, KVCacheManager, KVLayer, Sequence, SlidingWindow, plan

SCALE = 16  # tokens of the trace for each token here
TRACE_BLOCK = 512 // SCALE
BLOCK_SIZE, WINDOW, CHUNK_TOKENS, NUM_RUNNING = 128 // SCALE, 1024 // SCALE, 2048 // SCALE, 8
LAYERS = [KVLayer(0 if (layer + 1) % 6 == 0 else 1, 4, 256) for layer in range(34)]
KINDS: tuple[Group, Group] = (FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, WINDOW))
ELEMENT_BYTES = 2 * SCALE  # a token here takes the memory of SCALE of the trace's
FRESH_TOKENS = 1 << 31  # ids from here on never come again


@dataclass(frozen=True)
class Request:
    """One line of a trace, in tokens of this bench."""

    prompt: "array[int]"
    num_output_tokens: int


@dataclass(frozen=True)
class Outcome:
    """The results for a trace. Rates are shares of the prompts' tokens.

    hit_rate: tokens that were cached when their request first started. limited_rate: tokens that the full-attention
    group had cached at a start, but a window had not. mean_running: how many sequences ran on average.
    bytes_per_token: memory that running sequences owned, for each of their tokens. num_preemptions: how often a
    sequence started over.
    """

    manager: str
    gib: float
    num_blocks: int
    hit_rate: float
    limited_rate: float
    mean_running: float
    bytes_per_token: float
    num_preemptions: int


def read_lines(trace: Path, number: int | None = None) -> list[str]:
    """Return the first so many lines of a file, or all; its name may end in .gz."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8") as file:
        return list(islice(file, number))


def read_trace(lines: Iterable[str]) -> Iterator[Request]:
    """Yield the requests of a trace."""
    for line in lines:
        row: dict[str, Any] = json.loads(line)
        tokens = array("I")
        for hash_id in row["hash_ids"][: max(1, row["input_length"] // 512)]:
            tokens.extend([hash_id] * TRACE_BLOCK)
        yield Request(tokens, max(1, row["output_length"] // SCALE))


def generate_trace(num_requests: int) -> Iterator[str]:
    """Yield a trace of conversations that begin with one of a few system prompts."""
    chooser = random.Random(1)
    fresh = count(100)
    systems = [[next(fresh) for _ in range(chooser.randint(4, 12))] for _ in range(6)]
    talks: list[list[int]] = []
    for _ in range(num_requests):
        if len(talks) < 40 or chooser.random() < 0.3:
            talks = [*talks[-60:], list(chooser.choice(systems))]
        talk = chooser.choice(talks)
        talk += [next(fresh) for _ in range(chooser.randint(1, 8))]
        yield json.dumps({"input_length": 512 * len(talk), "output_length": chooser.randint(50, 700), "hash_ids": talk})


def replay(manager: KVCacheManager, requests: Iterable[Request]) -> tuple[float, float, float, int]:  # noqa: PLR0912
    """Run all requests. Returns the hit rate, two means (running sequences; blocks a token), and preemptions."""
    waiting = iter(requests)
    retried: list[tuple[Sequence, int]] = []
    running: list[tuple[Sequence, int]] = []
    started: set[Sequence] = set()
    fresh = count(FRESH_TOKENS)
    num_preemptions = num_steps = total_running = total_blocks = total_tokens = num_hit = num_asked = 0
    numbers = count()
    while True:
        while len(running) < NUM_RUNNING:
            request = None if retried else next(waiting, None)
            if not retried and request is None:
                break
            if request is not None:
                goal = len(request.prompt) + request.num_output_tokens
                retried.append((Sequence(next(numbers), request.prompt), goal))
            sequence, goal = retried[-1]
            hit = manager.get_computed_blocks(sequence)
            if (
                manager.allocate_slots(sequence, min(CHUNK_TOKENS, sequence.num_tokens - hit.num_tokens), hit=hit)
                is None
            ):
                break
            if sequence not in started:
                started.add(sequence)
                num_hit += hit.num_tokens
                num_asked += sequence.num_tokens
            running.append(retried.pop())
        if not running and retried:
            sequence, goal = retried[-1]
            raise ValueError(
                f"expected prompts that fit {manager.num_blocks} blocks, got one of {sequence.num_tokens} tokens"
            )
        if not running:
            return num_hit / num_asked, total_running / num_steps, total_blocks / total_tokens, num_preemptions
        num_steps += 1
        total_running += len(running)
        total_blocks += manager.num_blocks - manager.num_free_blocks
        total_tokens += sum(sequence.num_computed_tokens for sequence, _ in running)
        for sequence, goal in list(running):
            if not sequence.is_allocated:
                continue
            if sequence.num_computed_tokens == sequence.num_tokens:
                if sequence.num_tokens >= goal:
                    manager.free(sequence)
                    running.remove((sequence, goal))
                    continue
                sequence.append_tokens([next(fresh)])
            while (
                manager.allocate_slots(sequence, min(CHUNK_TOKENS, sequence.num_tokens - sequence.num_computed_tokens))
                is None
            ):
                victim = running.pop()
                manager.free(victim[0])
                retried.append(victim)
                num_preemptions += 1
                if victim[0] is sequence:
                    break


def managers(num_bytes: int) -> Iterator[tuple[str, KVCacheManager, int]]:
    """Yield (name, manager, bytes of a block) of each contestant, with pools of the same bytes."""
    full = plan([FullAttention(BLOCK_SIZE)], [layer._replace(kind=0) for layer in LAYERS], ELEMENT_BYTES, num_bytes)
    yield "all full", KVCacheManager(full.num_blocks, groups=full.groups), full.block_bytes
    grouped = plan(KINDS, LAYERS, ELEMENT_BYTES, num_bytes)
    yield "groups", KVCacheManager(grouped.num_blocks, groups=grouped.groups), grouped.block_bytes
    by_use = KVCacheManager(grouped.num_blocks, groups=grouped.groups)
    queue_by_use(by_use)
    yield "groups, by last use", by_use, grouped.block_bytes


def queue_by_use(manager: KVCacheManager) -> None:
    """Make a manager's pool queue blocks that leave a window by last use. Works in the plain build only."""
    pool: Any = manager._pool  # noqa: SLF001
    pool.release_passed = lambda passed, empty: pool.queue.release([*passed, *empty])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.replay.hybrid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--requests", type=int, default=None, help="requests of the trace (default: all; 400 without a trace)"
    )
    parser.add_argument("--gib", type=float, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.trace is None:
        lines: list[str] = list(generate_trace(given.requests or 400))
    else:
        lines = read_lines(given.trace, given.requests)
    name = "generated" if given.trace is None else given.trace.name
    facts = conditions(trace=name, num_requests=len(lines), window=WINDOW * SCALE, block_size=BLOCK_SIZE * SCALE)
    facts = {key: value for key, value in facts.items() if key not in ("num_blocks", "collector")}
    print_conditions(facts)
    head = f"{'GiB':>5}  {'manager':20}{'blocks':>8}{'hit rate':>10}{'limited':>9}"
    print(f"\n{head}{'running':>9}{'bytes/token':>13}{'preempted':>11}")
    outcomes = []
    for gib in given.gib:
        for title, manager, block_bytes in managers(int(gib * 2**30)):
            hit_rate, running, blocks, num_preemptions = replay(manager, read_trace(lines))
            stats = manager.stats
            outcome = Outcome(
                title,
                gib,
                manager.num_blocks,
                hit_rate,
                stats.num_limited_tokens / stats.num_queried_tokens,
                running,
                blocks * block_bytes / SCALE,
                num_preemptions,
            )
            outcomes.append(outcome)
            print(
                f"{gib:5g}  {title:20}{outcome.num_blocks:8}{outcome.hit_rate:10.3f}{outcome.limited_rate:9.3f}"
                f"{running:9.2f}{outcome.bytes_per_token:13,.0f}{num_preemptions:11}",
                flush=True,
            )
    keep(given.json, facts, [asdict(outcome) for outcome in outcomes])


if __name__ == "__main__":
    main()
