"""Which blocks are evicted for a victim that an eviction policy names: always leaves first."""

from kvblocks.core.block import KVCacheBlock, Run

_LATEST = 1 << 62  # for blocks that aren't free: later than any release


def free_stretch(victim: KVCacheBlock, max_blocks: int, released: dict[int, int]) -> list[KVCacheBlock]:
    """Return the free blocks to evict for `victim`, a free cached block: those below it, and the victim last.

    At most `max_blocks`, each after all blocks below it; of several branches the least recently used first. If the
    victim has duplicates, or is an attached block, it is returned alone. released: by block id, when it
    became free. Changes nothing. O(blocks returned + owned blocks between them + branches).
    """
    run, index = victim.run, victim.index
    assert run is not None, f"{victim}: isn't cached"
    if run.blocks[index] is not victim or (run.duplicates and index in run.duplicates):
        return [victim]
    if not run.children and not run.duplicates:  # fast path: the end of a run, if all of it is free
        tail = run.blocks[max(index, len(run.blocks) - max_blocks) :]
        if not any([block.ref_cnt for block in tail]):  # noqa: C419  # a generator costs more
            tail.reverse()
            return tail
    found: list[KVCacheBlock] = []
    # Stacks instead of recursion, since a prefix may have more branches below each other than calls may be nested.
    # emits: stretches to return, as (run, high, low). parts: (run, low), for all that is cached from there on; it must
    # be taken apart first. A None in `emits` stands for the top item of `parts`.
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
    """Split what is cached from position `low` of a run on at its first branching.

    Pushes the stretch above the branches, then the branches, the least recently used last. So that one is popped first.
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
    for position in range(high, low - 1, -1):
        block = run.blocks[position]
        if not block.ref_cnt and len(found) < max_blocks:
            found.append(block)
