"""Random walks of the memory machine with live states: no token is computed from a wrong state, and nothing leaks.

`python tests/states/test_state_walks.py FIRST END STEPS [tiers]` walks from the seeds FIRST to END - 1, STEPS steps
each; with tiers below, if you say so.
"""

import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.state_machine import StateMachine

from kvblocks import ChunkedLocal, EventOptions, FullAttention, RecurrentState, SlidingWindow, Tier
from kvblocks.retention.policies import NAMED

ATTENDING = (
    lambda: [FullAttention(2)],
    lambda: [FullAttention(1)],
    lambda: [FullAttention(4)],
    lambda: [FullAttention(2), SlidingWindow(2, 4)],
    lambda: [FullAttention(2), SlidingWindow(2, 5, keeps_passed=True)],
    lambda: [SlidingWindow(1, 3), FullAttention(1)],
    lambda: [FullAttention(2), FullAttention(4)],
    lambda: [FullAttention(2), ChunkedLocal(2, 6)],
)


def eight_values(preimage: bytes) -> bytes:
    return bytes([sum(preimage) % 8])


def make_tiers(chosen: random.Random) -> list[Tier]:
    """One or two tiers."""
    sizes = (("host", [20, 60, 120], ["freed", "computed", "reused"]), ("disk", [60, 200], ["freed", "reused"]))
    return [
        Tier(
            name,
            chosen.choice(numbers),
            100,
            store=chosen.choice(kinds),
            min_store_tokens=chosen.choice([None, 8]),
            window_store_tokens=chosen.choice([None, 2, 8]),
            max_transfer_blocks=chosen.choice([1, 2, 32]),
            is_persistent=chosen.random() < 0.6,
            medium=f"{name} memory",
        )
        for name, numbers, kinds in sizes[: chosen.choice([1, 2, 2])]
    ]


def make_machine(seed: int, *, debug: bool = False, has_tiers: bool = False) -> StateMachine:
    """A machine whose groups, state, sizes and options the seed decides. has_tiers: with one or two tiers."""
    chosen = random.Random(seed)
    groups = chosen.choice(ATTENDING)()
    size = max(group.block_size for group in groups)
    block_size = size * chosen.choice([1, 1, 1, 2])
    state = RecurrentState(
        block_size,
        num_slots=chosen.choice([2, 3, 4]),
        num_blocks=chosen.choice([1, 2, 3, 5]),
        every=chosen.choice([None, None, None, block_size, 2 * block_size]),
        num_kept=chosen.choice([0, 0, 0, 1, 2]),
    )
    options: dict[str, Any] = {"debug": debug}
    options["hash_algorithm"] = chosen.choice(["xxh3_128", "xxh3_128", eight_values])
    if chosen.random() < 0.3:
        options["eviction"] = chosen.choice(sorted(NAMED))
    num_blocks = chosen.choice([40, 64, 100]) // min(group.block_size for group in groups) + 4 * state.checkpoint_blocks
    if has_tiers and chosen.random() < 0.3:  # names that tell apart prefixes which share one
        options |= {"enable_events": EventOptions(hits=True, tiers=True), "hash_algorithm": "xxh3_128"}
    return StateMachine(seed, num_blocks, groups, state, make_tiers(chosen) if has_tiers else [], **options)


def walk(seed: int, num_steps: int, *, debug: bool = False, has_tiers: bool = False) -> StateMachine:
    machine = make_machine(seed, debug=debug, has_tiers=has_tiers)
    machine.walk(num_steps)
    machine.finish()
    return machine


@pytest.mark.every(2)
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_token_is_computed_from_a_wrong_state(first: int, met: Any) -> None:
    for seed in range(first, first + 10):
        met["walks"].add(walk(seed, 150, debug=seed % 2 == 0).counts)


def test_the_walks_met_all_cases(met: Any) -> None:
    least = {"cleared": 150, "cuts": 300, "hits": 120, "limited hits": 45, "restored": 60, "saved": 110, "marks": 20}
    least |= {"present": 6, "passed": 250, "refused": 150, "rewound to the beginning": 15, "truncations refused": 10}
    met["walks"].check(40, least)


@pytest.mark.every(3)
@pytest.mark.parametrize("first", range(0, 60, 12))
def test_no_state_comes_from_a_tier_that_is_another_s(first: int, met: Any) -> None:
    for seed in range(first, first + 12):
        met["below"].add(walk(seed, 250, debug=seed == first, has_tiers=True).counts)


def test_the_walks_with_tiers_met_all_cases(met: Any) -> None:
    least = {"stores": 2000, "states found below": 1000, "loads": 65, "loaded": 15, "failed": 300, "crowds": 1000}
    least |= {
        "attached found again": 280,
        "restored": 1000,
        "told below": 35_000,
        "saved": 800,
        "freed while loading": 30,
    }
    met["below"].check(60, least)


if __name__ == "__main__":
    begin, end, steps = (int(argument) for argument in sys.argv[1:4])
    below = sys.argv[4:] == ["tiers"]
    start, totals, failures = time.monotonic(), dict[str, int](), 0
    for number in range(begin, end):
        try:
            walker = walk(number, steps, debug=number % 3 == 0, has_tiers=below)
        except Exception as error:  # noqa: BLE001  # the next seed may fail in another way
            failures += 1
            print(f"seed {number}: {type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
            traceback.print_tb(error.__traceback__, limit=-3)
            continue
        for key, count in walker.counts.items():
            totals[key] = totals.get(key, 0) + count
    print(f"{(end - begin) * steps} steps in {time.monotonic() - start:.0f} s, {failures} failures: {totals}")
