"""Work of a manager with several groups of layers, for `bench.core.versus`.

Prompts have 4,017 tokens, 250 blocks of which are hit. Windows have 512 tokens. "natural" adds a token to its sequence
and calls `allocate_slots`, as the tutorial does. Bias: calls run in a loop, so caches are warmer than in an engine. Not
shown: a pool that is full, and prompts that share only a part. It counts the process's CPU time.
"""

import itertools
from collections.abc import Iterator
from time import process_time_ns

from bench.timing import Case
from kvblocks import CacheHit, FullAttention, Group, KVCacheManager, RecurrentState, Sequence, SlidingWindow

BLOCK_SIZE = 16
NUM_BLOCKS = 60_000
HIT_TOKENS = 4_000
OWN_TOKENS = 17
NUM_PROMPTS = 16
NUM_RUNNING = 64
NUM_STEPS = 32
"""Two blocks a sequence."""


def models() -> dict[str, list[Group] | None]:
    """Return the groups of each manager, by its name in the table."""
    full, window = FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 512)
    return {
        "one group": None,
        "a window": [full, window],
        "three windows": [full, window, window, window],
        "a state": [full, RecurrentState(BLOCK_SIZE, 2 * NUM_RUNNING)],
    }


def group_cases() -> dict[str, Case]:
    """Return the cases of all managers; per call, and per token."""
    return {f"{name}: {way}": case for name, groups in models().items() for way, case in _cases(name, groups).items()}


def _cases(name: str, groups: list[Group] | None) -> dict[str, Case]:
    manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, groups=groups)
    has_state, numbers = name == "a state", itertools.count()
    prompt = list(range(HIT_TOKENS))
    first = Sequence(next(numbers), prompt)

    def begin(sequence: Sequence, hit: CacheHit | None = None) -> None:
        manager.allocate_slots(sequence, hit=hit)
        if has_state:
            manager.states.take_copies()

    def fresh() -> list[Sequence]:
        begin(first)  # so that it is cached, whatever was evicted since
        manager.free(first)
        return [Sequence(next(numbers), [*prompt, *[7] * OWN_TOKENS]) for _ in range(NUM_PROMPTS)]

    def look_up(sequences: list[Sequence]) -> list[tuple[Sequence, CacheHit]]:
        return [(sequence, manager.get_computed_blocks(sequence)) for sequence in sequences]

    def start(found: list[tuple[Sequence, CacheHit]]) -> list[Sequence]:
        for sequence, hit in found:
            begin(sequence, hit)
        return [sequence for sequence, _ in found]

    def free(sequences: list[Sequence]) -> None:
        for sequence in sequences:
            manager.free(sequence)

    running = list(_running(numbers))
    for sequence in running:
        begin(sequence)

    def append(steps: range) -> None:
        for token in steps:
            for sequence in running:
                manager.append_slots(sequence, [token])

    def natural(steps: range) -> None:
        for token in steps:
            for sequence in running:
                sequence.append_tokens([token])
                manager.allocate_slots(sequence)

    def step(steps: range) -> None:
        for token in steps:
            manager.append_step(running, [token] * NUM_RUNNING)

    def rewind(_: object) -> None:
        for sequence in running:
            manager.free(sequence)
        running[:] = _running(numbers)
        for sequence in running:
            begin(sequence)

    tokens = NUM_RUNNING * NUM_STEPS
    steps = range(NUM_STEPS)
    return {
        "a hit": Case(look_up, NUM_PROMPTS, prepare=fresh, clock=process_time_ns),
        "a start": Case(start, NUM_PROMPTS, prepare=lambda: look_up(fresh()), tidy=free, clock=process_time_ns),
        "a token": Case(append, tokens, prepare=lambda: steps, tidy=rewind, clock=process_time_ns),
        "a token, natural": Case(natural, tokens, prepare=lambda: steps, tidy=rewind, clock=process_time_ns),
        "a token of a step": Case(step, tokens, prepare=lambda: steps, tidy=rewind, clock=process_time_ns),
    }


def _running(numbers: Iterator[int]) -> list[Sequence]:
    """Return new sequences whose prompts have nothing in common."""
    return [Sequence(number, [number + 10_000] * 600) for number, _ in zip(numbers, range(NUM_RUNNING), strict=False)]
