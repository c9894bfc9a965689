"""An upper bound for the hits of any policy, given the order of requests: MIN with bypass on single blocks.

docs/design/replay.md has the proof. The bound ignores prefixes, holds and waits, and may decline to cache a block.
"""

import heapq

import numpy as np

from kvblocks.replay.trace import Numbers, Trace


def next_uses(blocks: Numbers) -> Numbers:
    """Return, for each reference, the position of the next one to the same block, or -1.

    blocks: the references in order. O(references x log(references)).
    """
    order = np.argsort(blocks, kind="stable")
    found = np.full(len(blocks), -1, np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    found[order[:-1][same]] = order[1:][same]
    return found


def next_uses_in(trace: Trace, order: list[int]) -> Numbers:
    """Return `next_uses(references_in(trace, order))`, but faster. O(references), by NumPy."""
    ends = np.cumsum([int(trace.ends[request + 1] - trace.ends[request]) for request in order], dtype=np.int64)
    found = np.full(int(ends[-1]) if order else 0, -1, np.int64)
    last = np.full(trace.num_unique_blocks, -1, np.int64)  # by block: where it was used last
    for request, end in zip(order, ends.tolist(), strict=True):
        path = trace.blocks_of(request).astype(np.intp)
        here = np.arange(end - len(path), end)
        before = last[path]
        known = before >= 0
        found[before[known]] = here[known]
        last[path] = here
    return found


def references_in(trace: Trace, order: list[int]) -> Numbers:
    """Return the concatenated blocks of all requests in this order. O(references)."""
    if not order:
        return trace.blocks[:0]
    return np.concatenate([trace.blocks_of(request) for request in order])


def max_hits(uses: Numbers, num_blocks: int) -> int:
    """Return the most references that any cache of `num_blocks` blocks can hit, even with knowledge of the future.

    uses: the result of `next_uses`. At each moment at most num_blocks blocks are kept, each for its next use. If there
    are more, the block whose next use is furthest away is given up, which may be the one just used. Source: L. A.
    Belady's MIN.

    A prompt's blocks are usually next used one after another, too, so references with consecutive next uses are handled
    at once, as a stretch. O(references), by NumPy, and O(log stretches) for each stretch.
    """
    if not len(uses):
        return 0
    edges = np.flatnonzero(np.diff(uses) != (uses[:-1] >= 0)) + 1
    starts = np.concatenate([np.zeros(1, np.int64), edges])
    lengths = np.diff(np.concatenate([starts, [len(uses)]]))
    kept = KeptUses(num_blocks)
    for start, length, following in zip(starts.tolist(), lengths.tolist(), uses[starts].tolist(), strict=True):
        kept.pass_over(start, start + length, following)
    return kept.num_hits


class KeptUses:
    """The positions at which kept blocks are next used, as disjoint ranges [begin, end) that don't touch."""

    def __init__(self, num_blocks: int) -> None:
        self._num_left = num_blocks  # how many more may be kept
        self._ends: dict[int, int] = {}  # by begin
        self._nearest: list[int] = []  # heaps of begins, the latter of negative ones; some ranges are gone
        self._furthest: list[int] = []
        self.num_hits = 0

    def pass_over(self, begin: int, end: int, following: int) -> None:
        """Handle the references from `begin` to `end` - 1.

        Their blocks are next used from `following` on, or never if -1. O(log ranges) for each range that it meets.
        """
        while begin < end:
            first = self._first()
            if first == begin:
                number = self._take(begin, end)
                self.num_hits += number
                if following >= 0:
                    self._add(following, number)
            else:
                number = (end if first is None else min(first, end)) - begin
                if following >= 0:
                    number = min(number, following - begin)  # what is kept now may be met soon
                    self._keep(following, number)
            begin += number
            following += number if following >= 0 else 0

    def _first(self) -> int | None:
        """Return where the nearest range begins."""
        nearest = self._nearest
        while nearest and nearest[0] not in self._ends:
            heapq.heappop(nearest)
        return nearest[0] if nearest else None

    def _take(self, begin: int, end: int) -> int:
        """Remove the range that begins here, or its part below `end`. Returns how many positions that is."""
        last = self._ends.pop(begin)
        self._num_left += last - begin
        if last > end:
            self._add(end, last - end)
        return min(last, end) - begin

    def _add(self, begin: int, number: int) -> None:
        """Keep a range, for which there is room."""
        self._ends[begin] = begin + number
        self._num_left -= number
        heapq.heappush(self._nearest, begin)
        heapq.heappush(self._furthest, -begin)

    def _keep(self, begin: int, number: int) -> None:
        """Keep a range, or its first positions, in what room is left and in that of further positions."""
        room = min(number, self._num_left)
        missing = number - room
        while missing and self._furthest:
            furthest = -self._furthest[0]
            end = self._ends.get(furthest)
            if end is None:
                heapq.heappop(self._furthest)
                continue
            if furthest < begin:
                break
            given = min(missing, end - furthest)
            missing -= given
            room += given
            self._num_left += given
            if end - given > furthest:
                self._ends[furthest] = end - given
            else:
                del self._ends[furthest]
        if room:
            self._add(begin, room)
