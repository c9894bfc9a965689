"""Counts the calls and modules involved in an ordinary call: `python tools/trace_calls.py [TREE] [--json]`.

For one call of a KVCacheManager it counts what Python's profiler sees begin in the modules of kvblocks:

- calls: the call itself and all Python functions that it leads to, at any depth. A property, a comprehension (before
  Python 3.12) and each resumption of a generator are also calls. C functions and inlined code don't count.
- modules: the modules of kvblocks that these functions are defined in.
- changes: how often a call begins in another module than the previous call. Returns don't count: a, b, a is two
  changes, whether the second a is called by b, or by the first a after b has returned.

It also counts the modules of kvblocks (without `kvblocks` itself) that a fresh process loads to use one manager of one
group. These are counts, not times: few calls may take long.

TREE is the checkout to measure, by default this one. It is put first on sys.path. The profiler doesn't see compiled
modules (*.so), so they aren't counted. The situations, with blocks of 16 tokens:

- lookup: `get_computed_blocks` of a prompt whose first five blocks are cached.
- allocate: `allocate_slots` of a prompt of five blocks after a lookup that found nothing, in a fresh pool.
- allocate, evicting: the same in a full pool. All its free blocks are cached, from prompts of four blocks each. A
  running sequence holds the first block of the oldest prompt, so blocks of two prompts are evicted.
- free: of a sequence of five blocks.
- append, ...: `append_slots` of one token that begins a block, fills one, or does neither.
- append_step: of eight sequences, for one of which a block begins.
- groups, ...: the same with FullAttention(16) and SlidingWindow(16, 32). A prompt of five blocks is longer than the
  window. The append begins a block. The free is of the sequence after that append.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

BLOCK = 16
FIVE = 5 * BLOCK
LOADED = """
import sys
sys.path.insert(0, sys.argv[1])
from kvblocks import KVCacheManager, Sequence
manager = KVCacheManager(64)
sequence = Sequence("a", range(80))
manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
manager.append_slots(sequence, [1])
manager.append_step([sequence], [1])
manager.free(sequence)
print(sum(name.startswith("kvblocks.") for name in sys.modules))
"""


class Way(NamedTuple):
    """The counts of one call; see the module's docstring."""

    situation: str
    calls: int
    modules: int
    changes: int


def trace(situation: str, call: Callable[..., object], *args: object, **options: object) -> Way:
    """Make one call and count what it involves."""
    begun: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            begun.append(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        call(*args, **options)
    finally:
        sys.setprofile(None)
    ours = [module for module in begun if module.partition(".")[0] == "kvblocks"]
    return Way(situation, len(ours), len(set(ours)), sum(one != other for one, other in pairwise(ours)))


def start(kvblocks: Any, manager: Any, number: int, num_tokens: int, first: int = 0) -> Any:
    """Allocate a sequence of so many tokens, counted up from `first`."""
    sequence = kvblocks.Sequence(number, range(first, first + num_tokens))
    manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
    return sequence


def full_manager(kvblocks: Any) -> Any:
    """A manager whose free blocks are all cached. A sequence holds the first block of the oldest prompt."""
    manager = kvblocks.KVCacheManager(4 * 4 + 1, BLOCK)
    for i in range(4):
        manager.free(start(kvblocks, manager, i, 4 * BLOCK, 1000 * i))
    start(kvblocks, manager, 4, BLOCK + 1)
    return manager


def trace_allocate(kvblocks: Any, situation: str, manager: Any) -> tuple[Way, Any]:
    """Trace the allocation of five blocks that aren't cached; returns the sequence too."""
    sequence = kvblocks.Sequence("new", range(9000, 9000 + FIVE))
    hit = manager.get_computed_blocks(sequence)
    return trace(situation, manager.allocate_slots, sequence, hit=hit), sequence


def trace_all(kvblocks: Any) -> list[Way]:
    """Trace all situations, each with a manager in the state that it needs."""
    manager = kvblocks.KVCacheManager(64, BLOCK)
    allocate, sequence = trace_allocate(kvblocks, "allocate", manager)
    free = trace("free", manager.free, sequence)
    lookup = trace("lookup", manager.get_computed_blocks, kvblocks.Sequence(1, range(9000, 9000 + FIVE + 1)))
    evicting, _ = trace_allocate(kvblocks, "allocate, evicting", full_manager(kvblocks))
    sequence = start(kvblocks, manager, 0, FIVE)
    begins = trace("append, begins a block", manager.append_slots, sequence, [1])
    inside = trace("append, in mid-block", manager.append_slots, sequence, [1])
    for _ in range(BLOCK - 3):
        manager.append_slots(sequence, [1])
    fills = trace("append, fills a block", manager.append_slots, sequence, [1])
    manager = kvblocks.KVCacheManager(64, BLOCK)
    batch = [start(kvblocks, manager, i, FIVE - (i and i + 3), 1000 * i) for i in range(8)]
    step = trace("append_step", manager.append_step, batch, [1] * 8)
    manager = kvblocks.KVCacheManager(64, groups=[kvblocks.FullAttention(BLOCK), kvblocks.SlidingWindow(BLOCK, 32)])
    grouped, sequence = trace_allocate(kvblocks, "groups, allocate", manager)
    grouped_append = trace("groups, append", manager.append_slots, sequence, [1])
    grouped_free = trace("groups, free", manager.free, sequence)
    return [lookup, allocate, evicting, free, begins, fills, inside, step, grouped, grouped_append, grouped_free]


def main() -> None:
    """Measure the tree and print its table, or with --json an object."""
    parser = argparse.ArgumentParser(description="Count the calls and modules that an ordinary call goes through.")
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--json", action="store_true", help="print an object in place of a table")
    options = parser.parse_args()
    tree = options.tree.resolve()
    sys.path.insert(0, str(tree))
    import kvblocks  # only now is TREE known

    if not Path(str(kvblocks.__file__)).resolve().is_relative_to(tree):
        sys.exit(f"trace_calls.py: expected a checkout with the folder kvblocks, got {tree}")
    ways = trace_all(kvblocks)
    command = [sys.executable, "-P", "-c", LOADED, str(tree)]
    loaded = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    if options.json:
        print(json.dumps({"calls": [way._asdict() for way in ways], "modules_loaded": loaded}, indent=2))
    else:
        for row in [("", "calls", "modules", "changes"), *ways, ("modules loaded", "", loaded, "")]:
            print("{:24}{:>8}{:>9}{:>9}".format(*row).rstrip())


if __name__ == "__main__":
    main()
