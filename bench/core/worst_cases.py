"""The cost of calls in adverse histories: checks whether times grow as the docstrings say.

    python -m bench.core.worst_cases [--cases evict,explain] [--rounds N] [--scale X] [--json FILE]

Each case is run at a quarter of its size and at its full size. A growth of 1 is constant time, 4 linear, 16 quadratic.
From outside the checkout, with PYTHONPATH=DIR:CHECKOUT, it measures the kvblocks in DIR, an older one for example,
where a case may take minutes. Inside the checkout, Python puts the checkout first.

Not shown: ordinary work, which `bench.core.compare` and `bench.core.versus` time, several adverse histories at once,
and the garbage collector, which is off.
"""

import argparse
import gc
from array import array
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import kvblocks
from bench.conditions import conditions, keep, print_conditions
from kvblocks import KVCacheManager, PrefixCache, Sequence, Tier

BLOCK_SIZE = 4
FRESH = 1 << 30  # tokens from here on are used nowhere else
Work = Callable[[], object]


class Worst(NamedTuple):
    """make(size) prepares a history and returns the work to time. title: what is timed."""

    title: str
    size: int
    make: Callable[[int], Work]


def _tokens(first_block: int, num_blocks: int) -> "array[int]":
    return array("I", range(first_block * BLOCK_SIZE, (first_block + num_blocks) * BLOCK_SIZE))


def _evict_interleaved(num_blocks: int, *, with_duplicate: bool) -> Work:
    """Two sequences with half the blocks each freed them in turns. The first block of one may have a duplicate."""
    half = num_blocks // 2
    manager = KVCacheManager(num_blocks + with_duplicate, BLOCK_SIZE)
    pair = [Sequence(name, _tokens(name * half, 1)) for name in range(2)]
    for sequence in pair:
        manager.allocate_slots(sequence)
        manager.append_slots(sequence, _tokens(sequence.sequence_id * half + 1, half - 1))
    if with_duplicate:
        manager.allocate_slots(Sequence("double", _tokens(0, 1)))
    for left in range(half - 1, 0, -1):
        for sequence in pair:
            manager.truncate(sequence, left * BLOCK_SIZE)
    for sequence in pair:
        manager.free(sequence)
    return lambda: manager.allocate_slots(Sequence("last", _tokens(num_blocks, num_blocks)))


def _evict_copies(num_blocks: int) -> Work:
    """One prefix of a block, computed by as many sequences at once. Each that ends has the block that hits get."""
    manager, copies = _copies(num_blocks)

    def work() -> None:
        for number, sequence in enumerate(copies):
            manager.free(sequence)
            manager.allocate_slots(Sequence(("last", number), _tokens(1 + number, 1)))

    return work


def _free_copies(num_blocks: int) -> Work:
    """One prefix of a block, computed by as many sequences at once. The last one that was computed ends first."""
    manager, copies = _copies(num_blocks)

    def work() -> None:
        for sequence in reversed(copies):
            manager.free(sequence)

    return work


def _copies(num_blocks: int) -> tuple[Any, list[Sequence]]:
    manager = KVCacheManager(num_blocks, BLOCK_SIZE)
    copies = [Sequence(number, _tokens(0, 1)) for number in range(num_blocks)]
    for sequence in copies:
        manager.allocate_slots(sequence)
    return manager, copies


def _leave_window(num_blocks: int) -> Work:
    """A prompt was computed in one call, with an eviction policy. All but a few blocks leave the window at once."""
    groups = [kvblocks.FullAttention(BLOCK_SIZE), kvblocks.SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)]
    manager = KVCacheManager(2 * num_blocks + 2, groups=groups, eviction="lru")
    prompt = Sequence("prompt", _tokens(0, num_blocks))
    manager.allocate_slots(prompt)
    return lambda: manager.append_slots(prompt, [0])


def _prefill(num_chunks: int, *, has_keys: bool, enable_events: bool, in_groups: bool = False) -> Work:
    """A prompt that is computed a block a call. With keys, each block has an extra key."""
    groups = [kvblocks.FullAttention(BLOCK_SIZE), kvblocks.SlidingWindow(BLOCK_SIZE, 64)] if in_groups else None
    options: dict[str, Any] = {"groups": groups, "enable_events": enable_events}
    manager = KVCacheManager(2 * num_chunks, BLOCK_SIZE, **options)
    keys = [(0, num_chunks * BLOCK_SIZE, "image")] if has_keys else []
    sequence = Sequence("prompt", _tokens(0, num_chunks), extra_keys=keys)

    def work() -> None:
        for _ in range(num_chunks):
            manager.allocate_slots(sequence, BLOCK_SIZE)

    return work


def _chain_of_runs(num_runs: int) -> tuple[Any, "array[int]"]:
    """A conversation that went two blocks on and took one back, again and again: a run for each block."""
    manager = KVCacheManager(2 * num_runs + 2, BLOCK_SIZE)
    sequence = Sequence("conversation", _tokens(0, 1))
    manager.allocate_slots(sequence)
    manager.append_slots(sequence, _tokens(1, 1))
    for number in range(1, num_runs):
        manager.truncate(sequence, number * BLOCK_SIZE)
        manager.append_slots(sequence, _tokens(FRESH // BLOCK_SIZE + 2 * number, 2))
    return manager, array("I", sequence.token_ids())


def _explain(num_runs: int) -> Work:
    manager, tokens = _chain_of_runs(num_runs)
    probe = Sequence("probe", tokens + _tokens(FRESH // 2, 1))
    return lambda: manager.inspect.explain(probe)


def _look_up(num_runs: int) -> Work:
    manager, tokens = _chain_of_runs(num_runs)
    probe = Sequence("probe", tokens)
    return lambda: manager.get_computed_blocks(probe)


def _tenants_in_use(num_tenants: int) -> Work:
    """All tenants are over their quota and use all their blocks. A tenant without quota cached the free blocks."""
    manager = KVCacheManager(num_tenants + 100, BLOCK_SIZE)
    manager.quotas.set_default(0)
    for number in range(num_tenants):
        manager.allocate_slots(Sequence(number, _tokens(0, 1), salt=str(number)))
    others = Sequence("others", _tokens(1, 100))
    manager.allocate_slots(others)
    manager.free(others)
    return lambda: manager.allocate_slots(Sequence("new", _tokens(FRESH // BLOCK_SIZE, 100)))


def _pinned(num_blocks: int, priority: int, num_left: int) -> Any:
    """Pins of 100 blocks each own half the pool. A sequence owns the other half but for `num_left` blocks."""
    manager = KVCacheManager(2 * num_blocks, BLOCK_SIZE)
    for first in range(0, num_blocks, 100):
        prompt = Sequence(first, _tokens(first, 100))
        manager.allocate_slots(prompt)
        manager.pins.pin(_tokens(first, 100), priority=priority)
        manager.free(prompt)
    running = Sequence("running", _tokens(num_blocks, num_blocks - num_left))
    manager.allocate_slots(running)
    return manager, running


def _refused(num_blocks: int) -> Work:
    """Asked again and again, as a scheduler does; the first answer isn't timed."""
    manager, running = _pinned(num_blocks, 100, 0)
    assert manager.append_slots(running, [0]) is None
    return lambda: manager.append_slots(running, [0])


def _refused_first(num_blocks: int) -> Work:
    manager, running = _pinned(num_blocks, 100, 0)
    return lambda: manager.append_slots(running, [0])


def _given_up(num_blocks: int) -> Work:
    """Every block that is taken is one that a pin gives up."""
    manager, running = _pinned(num_blocks, 50, 0)

    def work() -> None:
        for _ in range(100):
            manager.append_slots(running, [0] * BLOCK_SIZE)

    return work


def _left_holds(num_blocks: int) -> Work:
    """4,000 holds of one prefix of many blocks have ended, and no call was made since."""
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    cache.insert_prefix(_tokens(0, num_blocks), range(num_blocks))
    match = cache.match_prefix(_tokens(0, num_blocks))
    for _ in range(4000):
        match.__enter__()
    for _ in range(4000):
        match.__exit__()
    return cache.evictable_count


def _abort_storing(num_blocks: int) -> Work:
    """What a step computes is being stored already, 4 blocks of each sequence, and one of them is aborted."""
    tiers = [Tier("host", num_blocks, 1, store="computed")]
    manager = KVCacheManager(16 * num_blocks, BLOCK_SIZE, tiers=tiers)
    sequences = [Sequence(first, _tokens(first, 4)) for first in range(0, num_blocks, 4)]
    for sequence in sequences:
        manager.allocate_slots(sequence)
    assert sum(len(transfer.slots) for transfer in manager.tiers.take_transfers()) == num_blocks
    return lambda: manager.abort(sequences[-1], 0)


CASES = {
    "evict": Worst("evict two interleaved runs", 16_000, lambda n: _evict_interleaved(n, with_duplicate=False)),
    "evict-duplicate": Worst(
        "the same, one has a duplicate", 16_000, lambda n: _evict_interleaved(n, with_duplicate=True)
    ),
    "evict-copies": Worst("evict copies one by one", 50_000, _evict_copies),
    "free-copies": Worst("free copies of one block", 50_000, _free_copies),
    "leave-window": Worst("leave a window, policy", 4000, _leave_window),
    "chunks": Worst("prefill by blocks", 8000, lambda n: _prefill(n, has_keys=False, enable_events=False)),
    "chunks-keys": Worst("the same, with keys", 8000, lambda n: _prefill(n, has_keys=True, enable_events=False)),
    "chunks-events": Worst("the same, with events", 8000, lambda n: _prefill(n, has_keys=False, enable_events=True)),
    "chunks-keys-events": Worst("with keys and events", 8000, lambda n: _prefill(n, has_keys=True, enable_events=True)),
    "chunks-groups": Worst(
        "with keys, events, groups", 8000, lambda n: _prefill(n, has_keys=True, enable_events=True, in_groups=True)
    ),
    "explain": Worst("explain, runs of a block", 10_000, _explain),
    "look-up": Worst("look up, runs of a block", 100_000, _look_up),
    "tenants": Worst("allocate, tenants in use", 50_000, _tenants_in_use),
    "refused": Worst("refused, blocks pinned", 100_000, _refused),
    "refused-first": Worst("refused for the first time", 100_000, _refused_first),
    "given-up": Worst("100 blocks that pins give up", 100_000, _given_up),
    "abort-storing": Worst("abort beside open stores", 16_000, _abort_storing),
    "left-holds": Worst("count after 4,000 holds", 20_000, _left_holds),
}


def measure(case: Worst, size: int, num_rounds: int) -> float:
    """Return the minimum milliseconds of the case's work over all rounds, each with a new history."""
    times = []
    for _ in range(num_rounds):
        work = case.make(size)
        gc.collect()
        gc.disable()
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
        gc.enable()
    return 1000 * min(times)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.core.worst_cases", description="Times histories that are bad for a call."
    )
    parser.add_argument("--cases", help=f"only these of {','.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3, help="histories of each size; the shortest time counts")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of each case's size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    given = parser.parse_args(arguments)
    names = given.cases.split(",") if given.cases else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"--cases: expected some of {', '.join(CASES)}; got {', '.join(unknown)}")
    facts = conditions(num_rounds=given.rounds, scale=given.scale, block_size=BLOCK_SIZE, num_blocks="by case")
    print_conditions(facts)
    print(f"{'case':<20}{'':<30}{'size':>10}{'ms at a quarter':>18}{'ms':>12}{'growth':>10}")
    rows = []
    for name in names:
        case = CASES[name]
        size = max(int(case.size * given.scale) // 400 * 400, 400)
        quarter, whole = (measure(case, part, given.rounds) for part in (size // 4, size))
        row = {"case": name, "size": size, "quarter_ms": round(quarter, 4), "ms": round(whole, 4)}
        rows.append(row | {"growth": round(whole / quarter, 2)})
        print(f"{name:<20}{case.title:<30}{size:>10}{quarter:>18.3f}{whole:>12.3f}{whole / quarter:>10.2f}", flush=True)
    keep(given.json, facts, rows)


if __name__ == "__main__":
    main()
