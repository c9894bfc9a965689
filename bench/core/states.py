"""The cost of recurrent states in a manager: decoded tokens, lookups, saves, restores, and the copies of a step.

    python -m bench.core.states [--quick] [--json FILE]

All cases take turns in one process (see `bench.timing`). A "save" is what `take_copies` does for a prompt whose
checkpoint takes a number of blocks. These are empty, or hold another checkpoint, or the K and V of other prompts, whose
checkpoints go with them. For comparison, decoded tokens and lookups are also timed with full attention alone, and with
a window.

Not shown: the copies themselves, which the engine makes, and real traffic, in which many checkpoints of prefixes of
different lengths mix with K and V (`kvblocks replay` runs traces).
"""

import argparse
from array import array
from collections.abc import Callable
from pathlib import Path

from bench.conditions import conditions, keep, print_conditions
from bench.core.micro import NUM_DECODED, NUM_SEQUENCES, to_row
from bench.core.ours import decode_one_by_one, free_all
from bench.core.workload import BLOCK_SIZE, FreshPrompts, calls_for, prompt, random_tokens
from bench.timing import Case, measure
from kvblocks import FullAttention, Group, KVCacheManager, RecurrentState, Sequence, SlidingWindow

LONG = 32_768
PARTS = (1, 101, 390)
"""Blocks of a checkpoint: Qwen3-Next's 37.7 MiB are 101 blocks of 16 tokens, and Nemotron-H-8B's 97 MiB are 390."""
NUM_SAVES = 32

Kinds = Callable[[], list[Group]]
KINDS: dict[str, Kinds] = {
    "full attention": lambda: [FullAttention(BLOCK_SIZE)],
    "and a window": lambda: [FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 1024)],
    "and a state": lambda: [FullAttention(BLOCK_SIZE), RecurrentState(BLOCK_SIZE, 2 * NUM_SEQUENCES, 101)],
}


def _has_state(manager: KVCacheManager) -> bool:
    return any(isinstance(group, RecurrentState) for group in manager.groups)


def _step(manager: KVCacheManager) -> None:
    if _has_state(manager):
        manager.states.take_copies()


def _start(manager: KVCacheManager, number: int, tokens: "array[int] | list[int]") -> Sequence:
    """Return a running sequence whose prompt is scheduled, in chunks that end where its state is to be saved."""
    sequence = Sequence(number, tokens)
    hit = manager.get_computed_blocks(sequence)
    if _has_state(manager):
        cut = manager.states.next_cut(sequence, sequence.num_tokens, hit)
        if cut < sequence.num_tokens:
            manager.allocate_slots(sequence, cut - hit.num_tokens, hit)
            _step(manager)
            hit = None
    manager.allocate_slots(sequence, hit=hit)
    _step(manager)
    return sequence


def decode_cases(manager: KVCacheManager) -> dict[str, Case]:
    """Return decoding by a call for each token, and by `append_step` with the copies of each step; per token."""
    fresh, step = FreshPrompts(), random_tokens(NUM_SEQUENCES, seed=0)

    def prepare() -> list[Sequence]:
        return [
            _start(manager, number, fresh.make(BLOCK_SIZE + number % BLOCK_SIZE)) for number in range(NUM_SEQUENCES)
        ]

    def singly(sequences: list[Sequence]) -> list[Sequence]:
        decode_one_by_one(manager, sequences, step)
        return sequences

    def together(sequences: list[Sequence]) -> list[Sequence]:
        for _ in range(NUM_DECODED):
            manager.append_step(sequences, step)
            _step(manager)
        return sequences

    num_tokens = NUM_SEQUENCES * NUM_DECODED
    return {
        "decode, a call a token": Case(singly, num_tokens, prepare, free_all(manager)),
        "decode, a call a step": Case(together, num_tokens, prepare, free_all(manager)),
    }


def lookup_case(manager: KVCacheManager) -> Case:
    """Return the lookup of a long prompt that is cached; per call."""
    tokens = array("I", prompt(LONG))
    manager.free(_start(manager, 0, tokens))
    found = manager.get_computed_blocks(Sequence("probe", tokens)).num_tokens
    assert found > LONG * 0.9, f"hit {found} of {LONG} tokens"
    num_calls = calls_for(LONG)

    def run(_: None) -> None:
        for _call in range(num_calls):
            manager.get_computed_blocks(Sequence("probe", tokens))

    return Case(run, num_calls)


def save_case(num_parts: int, what: str) -> Case:
    """Return `take_copies` of a step that saves the states of NUM_SAVES prompts; per save.

    what: which blocks the checkpoints get: "empty" ones, those of other "checkpoints", or those of other "prompts",
    whose checkpoints go with them.
    """
    num_prompts = {"empty": 4, "checkpoints": 2, "prompts": 2}[what]
    num_blocks = NUM_SAVES * ((num_parts + 4) * num_prompts - num_parts * (what == "checkpoints"))
    fresh = FreshPrompts()
    manager = KVCacheManager(
        num_blocks, groups=[FullAttention(BLOCK_SIZE), RecurrentState(BLOCK_SIZE, 2 * NUM_SAVES, num_parts)]
    )
    running: list[list[Sequence]] = []

    def prepare() -> None:
        started = [Sequence(object(), fresh.make(4 * BLOCK_SIZE + 1)) for _ in range(NUM_SAVES)]
        for sequence in started:
            allocated = manager.allocate_slots(sequence, 4 * BLOCK_SIZE)
            assert allocated is not None, "no room for a prompt"
        running.append(started)

    def tidy(_: object) -> None:
        while len(running) > (what == "checkpoints"):
            ended = running.pop(0)
            own = [block for sequence in ended for block in sequence.block_ids]
            for sequence in ended:
                manager.free(sequence)
            if what == "checkpoints":  # the next prompts get these blocks, and not those of checkpoints
                manager.evict_blocks(own)
        if what == "empty":
            manager.evict_blocks(manager.inspect.free_block_ids())

    def run(_: object) -> None:
        before = manager.states.stats.num_saved
        manager.states.take_copies()
        assert manager.states.stats.num_saved == before + NUM_SAVES, "a state wasn't saved"

    return Case(run, NUM_SAVES, prepare, tidy)


def restore_case(num_parts: int) -> Case:
    """Return starting a sequence with a hit, the copies of the step, and its end; per sequence."""
    manager = KVCacheManager(8192, groups=[FullAttention(BLOCK_SIZE), RecurrentState(BLOCK_SIZE, 2, num_parts)])
    tokens = array("I", prompt(4096))
    manager.free(_start(manager, 0, tokens))

    def run(_: None) -> None:
        sequence = Sequence("probe", tokens)
        hit = manager.get_computed_blocks(sequence)
        manager.allocate_slots(sequence, hit=hit)
        manager.states.take_copies()
        manager.free(sequence)

    return Case(run, 1, tidy=lambda _: None)


def measure_all(num_blocks: int, num_rounds: int, num_samples: int) -> list[dict[str, object]]:
    """Return a row for each item."""
    managers = {name: KVCacheManager(num_blocks, groups=make()) for name, make in KINDS.items()}
    made = {name: decode_cases(manager) for name, manager in managers.items()}
    rows = []
    for item in made["full attention"]:
        spreads = measure({name: cases[item] for name, cases in made.items()}, num_rounds, num_samples)
        rows += [to_row(f"{item}, {name}", spread, "us/token", 1000) for name, spread in spreads.items()]
    lookups = {f"match 32k tokens, {name}": lookup_case(manager) for name, manager in managers.items()}
    saves = {
        f"save {parts} blocks, {what}": save_case(parts, what)
        for parts in PARTS
        for what in ("empty", "checkpoints", "prompts")
    }
    restores = {f"start with a hit, {parts} blocks": restore_case(parts) for parts in PARTS}
    for cases in (lookups, saves, restores):
        spreads = measure(cases, num_rounds, num_samples)
        rows += [to_row(item, spread, "us/call", 1000) for item, spread in spreads.items()]
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.core.states", description="What recurrent states cost a manager.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller pool: a few seconds, noisy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the result there")
    given = parser.parse_args(arguments)
    num_blocks, num_rounds, num_samples = (10_000, 2, 2) if given.quick else (20_000, 15, 5)
    facts = conditions(num_blocks=num_blocks, num_rounds=num_rounds, num_samples=num_samples)
    print_conditions(facts)
    rows = measure_all(num_blocks, num_rounds, num_samples)
    print(f"{'item':<44}{'unit':<10}{'min':>10}{'median':>10}{'max':>10}")
    for row in rows:
        numbers = f"{row['min']:>10}{row['median']:>10}{row['max']:>10}"
        print(f"{row['item']:<44}{row['unit']:<10}{numbers}")
    keep(given.json, facts, rows)


if __name__ == "__main__":
    main()
