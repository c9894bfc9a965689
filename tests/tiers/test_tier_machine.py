"""Random walks of the memory machine with tiers: no hit on unwritten or foreign bytes, no leak, no lost hold.

`python tests/tiers/test_tier_machine.py FIRST END STEPS` walks from other seeds, as many and as long as you like.
"""

import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.tier_machine import TierMachine

from kvblocks import Tier

NUM_STEPS = 400


def make_machine(seed: int, *, debug: bool = False) -> TierMachine:
    """A machine of one or two tiers, whose sizes and rules the seed decides."""
    chosen = random.Random(seed)
    block_size = chosen.choice([1, 2, 4])
    tiers = []
    for name, sizes, kinds in (
        ("host", [4, 16, 60], ["freed", "freed", "computed", "reused"]),
        ("disk", [20, 80], ["freed", "reused", "computed"]),
    )[: chosen.choice([1, 2, 2])]:
        tier = Tier(
            name,
            chosen.choice(sizes),
            100,
            store=chosen.choice(kinds),
            min_store_tokens=chosen.choice([None, 8]),
            max_transfer_blocks=chosen.choice([1, 2, 32]),
            is_persistent=chosen.random() < 0.6,
        )
        tiers.append(tier)
    hash_algorithm = chosen.choice(["xxh3_128", lambda preimage: bytes([sum(preimage) % 8])])
    options = {"hash_algorithm": hash_algorithm, "enable_events": chosen.random() < 0.3, "debug": debug}
    return TierMachine(seed, chosen.choice([28, 40, 64]) // block_size, block_size, tiers, **options)


@pytest.mark.parametrize("first", range(0, 240, 80))
def test_no_order_of_answers_shows_wrong_bytes(first: int) -> None:
    counts: dict[str, int] = {}
    for seed in range(first, first + 80):
        machine = make_machine(seed, debug=seed == first)
        machine.walk(NUM_STEPS)
        machine.finish()
        for what, number in machine.counts.items():
            counts[what] = counts.get(what, 0) + number
    # Walks that never met these would prove little.
    met = ("stores", "found below", "loads", "loaded", "failed", "freed while loading", "back while loading")
    met += ("forgotten", "restored", "found again")
    assert all(counts.get(what, 0) > 0 for what in met), counts
    assert counts["stores"] > 100 and counts["found below"] > 10


if __name__ == "__main__":
    begin, end, steps = (int(argument) for argument in sys.argv[1:])
    start, totals = time.monotonic(), dict[str, int]()
    for number in range(begin, end):
        walker = make_machine(number)
        try:
            walker.walk(steps)
            walker.finish()
        except BaseException:
            print(f"seed {number}")
            raise
        for key, count in walker.counts.items():
            totals[key] = totals.get(key, 0) + count
    print(f"{(end - begin) * steps} steps in {time.monotonic() - start:.0f} s: {totals}")
