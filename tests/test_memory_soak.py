"""Long random walks over the simulated KV memory, in every configuration that the short ones walk in.

`PYTHONPATH=. python tests/test_memory_soak.py STEPS [FIRST] [WORD ...]` makes STEPS steps in each configuration whose
name has all the words, in walks with the seeds from FIRST on. It goes on after a failure, and says how many there were.
"""

import itertools
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from groups.test_group_stateful import SETS
from model.group_history import GroupHistory
from model.history import History, RandomChooser, walk
from states.test_state_stateful import STATE_SETS, make_history
from states.test_state_walks import walk as walk_states
from test_stateful import VARIANTS
from tiers.test_tier_machine import make_machine

STEPS_OF_A_WALK = 2000

Walk = Callable[[int, int], Any]
"""Walks so many steps from a seed."""


def of_one_group(variant: str, num_blocks: int, block_size: int) -> Walk:
    def make_walk(seed: int, num_steps: int) -> None:
        history = History(num_blocks, block_size, **VARIANTS[variant])
        walk(history, RandomChooser(seed), num_steps, forget_every=seed % 3 * 40)

    return make_walk


def of_groups(variant: str, name: str) -> Walk:
    def make_walk(seed: int, num_steps: int) -> None:
        history = GroupHistory((8 + seed % 5) * len(SETS[name]), SETS[name], **VARIANTS[variant])
        walk(history, RandomChooser(seed), num_steps, forget_every=seed % 3 * 40)

    return make_walk


def of_tiers(*, is_grouped: bool) -> Walk:
    def make_walk(seed: int, num_steps: int) -> None:
        machine = make_machine(seed, debug=seed % 10 == 0, is_grouped=is_grouped)
        machine.walk(num_steps)
        machine.finish()

    return make_walk


def of_states(variant: str, name: str) -> Walk:
    def make_walk(seed: int, num_steps: int) -> None:
        history = make_history(name, variant, 8 + seed % 3 * 8)
        walk(history, RandomChooser(seed), num_steps, forget_every=seed % 3 * 40)

    return make_walk


def of_the_state_machine(seed: int, num_steps: int) -> None:
    walk_states(seed, num_steps, debug=seed % 10 == 0)


CONFIGURATIONS: dict[str, Walk] = {
    f"{variant}, {num_blocks} blocks of {block_size}": of_one_group(variant, num_blocks, block_size)
    for variant in VARIANTS
    for num_blocks, block_size in ((6, 1), (10, 2), (24, 2), (30, 1), (12, 3), (14, 4))
}
CONFIGURATIONS |= {f"{variant}, groups: {name}": of_groups(variant, name) for variant in VARIANTS for name in SETS}
CONFIGURATIONS |= {"tiers, one group": of_tiers(is_grouped=False), "tiers, groups": of_tiers(is_grouped=True)}
CONFIGURATIONS |= {
    f"{variant}, states: {name}": of_states(variant, name) for variant in VARIANTS for name in STATE_SETS
}
CONFIGURATIONS |= {"states in a memory machine": of_the_state_machine}


def soak(name: str, num_steps: int, first: int) -> list[str]:
    """Walk in one configuration, with a seed after the other. Returns what failed."""
    failures = []
    for seed, start in zip(itertools.count(first), range(0, num_steps, STEPS_OF_A_WALK), strict=False):
        try:
            CONFIGURATIONS[name](seed, min(STEPS_OF_A_WALK, num_steps - start))
        except Exception as error:  # noqa: BLE001  # the next seed may fail in another way
            notes = "; ".join(getattr(error, "__notes__", [f"seed {seed}"]))
            failures.append(f"{name}: {notes}: {traceback.format_exception_only(error)[0].strip()}")
    return failures


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_long_walk_finds_anything(name: str) -> None:
    assert soak(name, 20_000, first=1000) == []


if __name__ == "__main__":
    steps, begin, words = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0]), sys.argv[3:]
    chosen = [name for name in CONFIGURATIONS if all(word in name for word in words)]
    found: list[str] = []
    for number, chosen_name in enumerate(chosen, 1):
        started = time.monotonic()
        failed = soak(chosen_name, steps, begin)
        found += failed
        taken = time.monotonic() - started
        print(f"{number}/{len(chosen)} {chosen_name}: {steps} steps, {len(failed)} failures, {taken:.0f} s", flush=True)
        for failure in failed[:5]:
            print(f"  {failure}", flush=True)
    print(f"{len(chosen) * steps:,} steps in {len(chosen)} configurations: {len(found)} failures")
    sys.exit(bool(found))
