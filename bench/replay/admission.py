"""How many writes a disk tier's admission rules save on a trace, and how many hits they cost.

    python -m bench.replay.admission [--trace FILE] [--requests N] [--device 0.02] [--disk 0.2] [--json FILE]

FILE is jsonl or jsonl.gz. It is a trace of Mooncake's (a request a line, hash_ids: an id for each 512 tokens), or one
of agents' sessions from kv-cache-tester (a line opens a session, its requests follow, an id for each 64 tokens).
Without a FILE a small trace of conversations is generated. 16 sessions run at a time, and their requests take turns.

An id of the trace is a block here. Each request looks up its prompt, loads what the tier has, computes the rest, and
ends; answers are left out. --device, --disk: blocks of the pool and of the tier, as shares of the different blocks in
the trace. Each row is a rule: `store` and `min_store_tokens` of the tier (in tokens of the trace). A row's shares are
of the blocks asked for: found on the device, loaded from the disk, computed, and written to the disk.

What it does not show: time. Every load is taken, every transfer succeeds at once.
"""

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from bench.conditions import conditions, keep, print_conditions
from bench.replay.hybrid import generate_trace, read_lines
from kvblocks import KVCacheManager, Sequence, Tier
from kvblocks.tiers.tier import StoreWhen

NUM_SESSIONS = 16  # at a time
RULES: tuple[tuple[StoreWhen, int | None], ...] = (
    ("freed", None),
    ("reused", None),
    ("reused", 256),
    ("reused", 1024),
    ("reused", 4096),
    ("reused", 16384),
)


@dataclass(frozen=True)
class Outcome:
    """A rule's result: shares of the requested blocks. wear: blocks written for each block loaded."""

    store: str
    min_store_tokens: int | None
    device: float
    loaded: float
    computed: float
    written: float
    wear: float | None


def read_requests(lines: Iterable[str]) -> tuple[int, list[list[int]]]:
    """Return the tokens of an id, and the ids of each request in turn."""
    rows = [json.loads(line) for line in lines]
    if rows and "session" in rows[0]:
        return int(rows[0]["block_size"]), list(_take_turns(_sessions(rows)))
    return 512, [row["hash_ids"] for row in rows]


def _sessions(rows: Iterable[dict[str, Any]]) -> Iterator[list[list[int]]]:
    """Yield each session's requests; ids are made different from other sessions'."""
    requests: list[list[int]] = []
    before: list[int] = []
    number = -1
    for row in rows:
        if "session" in row:
            if requests:
                yield requests
            requests, before = [], []
            number += 1
            continue
        added = [index for start, length in row["h"] for index in range(start, start + length)]
        before = [*before[: row["p"]], *[number << 20 | index for index in added]]
        requests.append(before)
    if requests:
        yield requests


def _take_turns(sessions: Iterator[list[list[int]]]) -> Iterator[list[int]]:
    """Yield requests of NUM_SESSIONS sessions in turn. When a session ends, the next one begins."""
    running = deque(deque(requests) for requests in islice(sessions, NUM_SESSIONS))
    while running:
        session = running.popleft()
        yield session.popleft()
        if session:
            running.append(session)
        else:
            running.extend(deque(requests) for requests in islice(sessions, 1))


def replay(
    requests: list[list[int]], block_tokens: int, sizes: tuple[int, int], rule: tuple[StoreWhen, int | None]
) -> Outcome:
    """Run all requests under a rule. sizes: blocks of the device and of the disk."""
    store, least = rule
    min_blocks = None if least is None else -(-least // block_tokens)
    tier = Tier("disk", sizes[1], 1, store=store, min_store_tokens=min_blocks)
    manager = KVCacheManager(sizes[0], 1, tiers=[tier])
    numbers = count()
    num_asked = num_hit = num_loaded = 0
    for ids in requests:
        sequence = Sequence(next(numbers), ids[: sizes[0] // 2])
        hit = manager.get_computed_blocks(sequence)
        loads = manager.tiers.find(hit)
        if manager.tiers.allocate(sequence, hit, loads, 0 if loads else None) is None:
            raise ValueError(f"expected room for {sequence}, got {manager.last_refusal}")
        _move(manager)
        if sequence.num_computed_tokens < sequence.num_tokens:
            manager.allocate_slots(sequence)
        num_asked += sequence.num_tokens
        num_hit += hit.num_tokens
        num_loaded += sum([load.num_tokens for load in loads])
        manager.free(sequence)
        while manager.tiers.is_busy:
            _move(manager)
    (stats,) = manager.tiers
    shares = [number / num_asked for number in (num_hit, num_loaded, num_asked - num_hit - num_loaded)]
    wear = stats.num_stored_blocks / num_loaded if num_loaded else None
    return Outcome(store, least, *shares, stats.num_stored_blocks / num_asked, wear)


def _move(manager: KVCacheManager) -> None:
    for transfer in manager.tiers.take_transfers():
        manager.tiers.complete(transfer, ok=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.replay.admission", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--device", type=float, default=0.02)
    parser.add_argument("--disk", type=float, default=0.2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.trace is None:
        lines: list[str] = list(generate_trace(given.requests))
    else:
        lines = read_lines(given.trace)
    block_tokens, requests = read_requests(lines)
    requests = [ids for ids in requests if ids][: given.requests]
    num_different = len({block for ids in requests for block in ids})
    longest = max(map(len, requests))
    sizes = max(2 * longest + 2, int(given.device * num_different)), int(given.disk * num_different)
    name = "generated" if given.trace is None else given.trace.name
    facts = conditions(trace=name, num_requests=len(requests), num_different_blocks=num_different)
    facts |= {"num_blocks": sizes[0], "num_disk_blocks": sizes[1], "block_size": block_tokens}
    facts = {key: value for key, value in facts.items() if key not in ("collector", "load_average")}
    print_conditions(facts)
    print(f"\n{'store':8}{'from tokens':>12}{'device':>9}{'loaded':>9}{'computed':>10}{'written':>9}{'wear':>7}")
    outcomes = []
    for rule in RULES:
        outcome = replay(requests, block_tokens, sizes, rule)
        outcomes.append(outcome)
        least = "" if outcome.min_store_tokens is None else str(outcome.min_store_tokens)
        wear = "n/a" if outcome.wear is None else f"{outcome.wear:.2f}"
        print(
            f"{outcome.store:8}{least:>12}{outcome.device:9.3f}{outcome.loaded:9.3f}{outcome.computed:10.3f}"
            f"{outcome.written:9.3f}{wear:>7}",
            flush=True,
        )
    keep(given.json, facts, [asdict(outcome) for outcome in outcomes])


if __name__ == "__main__":
    main()
