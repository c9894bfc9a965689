"""Random walks of the memory machine with tiers: no hit on unwritten or foreign bytes, no leak, no lost hold.

`python tests/tiers/test_tier_machine.py FIRST END STEPS [groups]` walks from the seeds FIRST to END - 1, STEPS steps
each; with several groups, if you say so.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.tier_machine import TierMachine

from kvblocks import ChunkedLocal, EventOptions, FullAttention, SlidingWindow, Tier

NUM_STEPS = 400

GROUPS = (
    lambda: [FullAttention(2), SlidingWindow(2, 4)],
    lambda: [FullAttention(2), SlidingWindow(2, 5, keeps_passed=True)],
    lambda: [SlidingWindow(1, 3), FullAttention(1)],
    lambda: [FullAttention(2), FullAttention(2)],
    lambda: [FullAttention(2), ChunkedLocal(2, 6)],
    lambda: [ChunkedLocal(4, 6), FullAttention(2), SlidingWindow(2, 3)],
    lambda: [FullAttention(2), FullAttention(4), SlidingWindow(2, 6)],
    lambda: [FullAttention(4), SlidingWindow(2, 4), SlidingWindow(1, 1)],
    lambda: [FullAttention(1), SlidingWindow(2, 3), SlidingWindow(4, 9)],
    lambda: [SlidingWindow(2, 7), FullAttention(2), SlidingWindow(2, 2), FullAttention(1)],
)


def make_machine(seed: int, *, debug: bool = False, is_grouped: bool = False) -> TierMachine:
    """A machine of one or two tiers, whose sizes and rules the seed decides. is_grouped: with several groups."""
    chosen = random.Random(seed)
    block_size = chosen.choice([1, 2, 4])
    groups = chosen.choice(GROUPS)() if is_grouped else []
    scale = len(groups) or 1
    tiers = []
    for name, sizes, kinds in (
        ("host", [4, 16, 60], ["freed", "freed", "computed", "reused"]),
        ("disk", [20, 80], ["freed", "reused", "computed"]),
    )[: chosen.choice([1, 2, 2])]:
        tier = Tier(
            name,
            chosen.choice(sizes) * scale,
            100,
            store=chosen.choice(kinds),
            min_store_tokens=chosen.choice([None, 8]),
            window_store_tokens=chosen.choice([None, 1, 2, 8]) if is_grouped else None,
            max_transfer_blocks=chosen.choice([1, 2, 32]),
            is_persistent=chosen.random() < 0.6,
            medium=f"{name} memory",
        )
        tiers.append(tier)
    hash_algorithm = chosen.choice(["xxh3_128", lambda preimage: bytes([sum(preimage) % 8])])
    options: dict[str, Any] = {"hash_algorithm": hash_algorithm, "debug": debug}
    if chosen.random() < 0.3:  # names that tell apart prefixes which share one
        options |= {"enable_events": EventOptions(hits=True, tiers=True), "hash_algorithm": "xxh3_128"}
    num_slots = chosen.choice([28, 40, 64])
    if not is_grouped:
        return TierMachine(seed, num_slots // block_size, block_size, tiers, **options)
    num_blocks = sum(
        min(num_slots, 24 + getattr(group, "window", getattr(group, "chunk_size", 40))) // group.block_size
        for group in groups
    )
    return TierMachine(seed, num_blocks, None, tiers, groups=groups, **options)


@pytest.mark.every(3)
@pytest.mark.parametrize("is_grouped", [False, True], ids=["one group", "several groups"])
@pytest.mark.parametrize("first", range(0, 120, 40))
def test_no_order_of_answers_shows_wrong_bytes(first: int, *, is_grouped: bool, met: Any) -> None:
    for seed in range(first, first + 40):
        machine = make_machine(seed, debug=seed == first, is_grouped=is_grouped)
        machine.walk(NUM_STEPS)
        machine.finish()
        met["grouped" if is_grouped else "single"].add(machine.counts)


@pytest.mark.parametrize("kind", ["single", "grouped"])
def test_the_walks_met_all_cases(kind: str, met: Any) -> None:
    least = {"stores": 2000, "found below": 1000, "loads": 60, "loaded": 18, "failed": 290, "hit and loads": 7}
    least |= {"freed while loading": 25, "back while loading": 17, "forgotten": 120, "restored": 1300}
    least |= {"found again": 270, "restarted": 22, "found after a restart": 15, "copies lost": 50}
    least |= {"told below": 60_000, "hits told": 220, "removals told": 75, "smaller commits": 75}
    least |= {"stores answered before an abort": 200, "uncached blocks lost": 50}
    least |= {"blocks of stores free before others": 500, "blocks of loads free before others": 150}
    met[kind].check(120, least)


@pytest.mark.parametrize("is_grouped", [False, True], ids=["one_group", "several_groups"])
def test_the_first_walks_show_no_wrong_bytes(*, is_grouped: bool) -> None:
    """A short form of the above, for `make test-fast`, with all checks after each call."""
    for seed in range(6):
        machine = make_machine(seed, debug=True, is_grouped=is_grouped)
        machine.walk(NUM_STEPS)
        machine.finish()


if __name__ == "__main__":
    begin, end, steps = (int(argument) for argument in sys.argv[1:4])
    has_groups = sys.argv[4:] == ["groups"]
    start, totals = time.monotonic(), dict[str, int]()
    for number in range(begin, end):
        walker = make_machine(number, is_grouped=has_groups)
        try:
            walker.walk(steps)
            walker.finish()
        except BaseException:
            print(f"seed {number}")
            raise
        for key, count in walker.counts.items():
            totals[key] = totals.get(key, 0) + count
    print(f"{(end - begin) * steps} steps in {time.monotonic() - start:.0f} s: {totals}")
