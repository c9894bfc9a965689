"""An upper bound of the hits of any policy: MIN with bypass on single blocks, for a given order of requests.

docs/design/replay.md has the proof. The bound ignores prefixes, holds and waits, and may leave a block out of the cache
altogether.
"""

import numpy as np

from kvblocks.replay.trace import Numbers, Trace


def next_uses(blocks: Numbers) -> Numbers:
    """Return for each reference the position of the next one to the same block; -1 if there is none.

    blocks: the references in order. O(references x log(references)).
    """
    order = np.argsort(blocks, kind="stable")
    found = np.full(len(blocks), -1, np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    found[order[:-1][same]] = order[1:][same]
    return found


def references_in(trace: Trace, order: list[int]) -> Numbers:
    """Return the blocks of all requests in an order, one after another. O(references)."""
    if not order:
        return trace.blocks[:0]
    return np.concatenate([trace.blocks_of(request) for request in order])


def max_hits(uses: Numbers, num_blocks: int) -> int:
    """Return how many references any cache of `num_blocks` blocks can hit at most if the future is known.

    uses: from `next_uses`. At each moment at most num_blocks blocks are kept, each for its next use. If there are more,
    the block whose next use is furthest is given up; it may be the one that was just used. Source: L. A. Belady's MIN.
    O(references), and a search of a byte in memory for each block that is given up.
    """
    kept = bytearray(len(uses))  # by position: whether the block used there is kept until its next use
    num_kept = num_hits = furthest = 0
    for position, following in enumerate(uses.tolist()):
        if kept[position]:
            num_hits += 1
            num_kept -= 1
        if following < 0:
            continue
        if num_kept < num_blocks:
            num_kept += 1
            kept[following] = 1
            furthest = max(furthest, following)
        elif following < furthest:
            kept[following] = 1
            kept[furthest] = 0
            furthest = kept.rfind(1, position + 1, furthest)
    return num_hits
