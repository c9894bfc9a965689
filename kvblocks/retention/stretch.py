"""Which blocks go for a victim that an eviction policy names: leaves first, whatever it names."""

from kvblocks.core.block import KVCacheBlock, Run

_LATEST = 1 << 62  # later than any release: of what isn't free


def free_stretch(victim: KVCacheBlock, max_blocks: int, released: dict[int, int]) -> list[KVCacheBlock]:
    """Return the free blocks that go when `victim`, free and cached, is to go: those below it, and it at last.

    At most `max_blocks`, each after all that are below it; of several branches the least recently used first. A block
    whose prefix another one holds too, or that is attached to one, has nothing below. released: by block id, when it
    became free. Changes nothing. O(blocks returned, and owned ones between them, and branches).
    """
    run, index = victim.run, victim.index
    assert run is not None, f"{victim}: isn't cached"
    if run.blocks[index] is not victim or (run.duplicates and index in run.duplicates):
        return [victim]
    if not run.children and not run.duplicates:  # the short way: a run's end, all of it free
        tail = run.blocks[max(index, len(run.blocks) - max_blocks) :]
        if not any([block.ref_cnt for block in tail]):  # noqa: C419  # a generator costs more
            tail.reverse()
            return tail
    found: list[KVCacheBlock] = []
    # From the end: stretches of runs to emit, (run, high, low), and what is to be taken apart first. A list, since a
    # prefix may have parted more often than calls may be nested.
    emits: list[tuple[Run, int, int] | None] = [None]
    parts: list[tuple[Run, int]] = [(run, index)]
    while emits and len(found) < max_blocks:
        emit = emits.pop()
        if emit is None:
            below, low = parts.pop()
            _take_apart(below, low, emits, parts, released)
        else:
            _emit(emit, found, max_blocks)
    return found


def _take_apart(
    run: Run,
    low: int,
    emits: list[tuple[Run, int, int] | None],
    parts: list[tuple[Run, int]],
    released: dict[int, int],
) -> None:
    """Split what is cached from position `low` of a run on where it branches first: the branches, then what is above.

    `emits` and `parts` are stacks, where a None in the first stands for the next of the second.
    """
    end = len(run.blocks)
    positions = [] if not run.children else [position for position in run.children if position >= low]
    if not positions:
        emits.append((run, end - 1, low))
        return
    first = min(positions)
    assert run.children is not None
    branches = [(child, 0) for child in run.children[first]]
    if first + 1 < end:
        branches.append((run, first + 1))
    emits.append((run, first, low))
    ages = [(-released.get(below.blocks[start].block_id, _LATEST), i) for i, (below, start) in enumerate(branches)]
    for _, i in sorted(ages):
        emits.append(None)
        parts.append(branches[i])


def _emit(emit: tuple[Run, int, int], found: list[KVCacheBlock], max_blocks: int) -> None:
    """Add the free blocks of positions high to low of a run."""
    run, high, low = emit
    duplicates = run.duplicates or {}
    for position in range(high, low - 1, -1):
        for block in (run.blocks[position], *duplicates.get(position, ())):
            if not block.ref_cnt and len(found) < max_blocks:
                found.append(block)
