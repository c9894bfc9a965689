"""Which prefixes of the device's cache are to be stored in a tier, by their last node.

A request owns nothing. Its blocks may be taken for something else before its store begins. In that case only what is
left of the prefix is stored, if anything, so that taking a block never waits for a copy.
"""

from kvblocks.core.block import Node, Run

MOST_REQUESTS = 4096
"""The most requests of a tier. Beyond that, the oldest is dropped.

An engine that never asks for transfers therefore loses hits, but uses no more memory.
"""


class StoreQueue:
    """The prefixes that are to be stored in one tier, the oldest request first.

    A request is put aside while the beginning of its prefix is being stored, so that it isn't considered before that
    store has ended.
    """

    def __init__(self) -> None:
        self._ends: dict[Run, int] = {}
        self._aside: dict[Run, int] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, node: Node) -> int:
        """Ask for the prefix that ends at a cached node. Returns how many older requests were dropped. O(1)."""
        run, position = node
        if run is None:
            return 0
        self._ends[run] = max(self._ends.get(run, 0), position + 1)
        if len(self._ends) + len(self._aside) <= MOST_REQUESTS:
            return 0
        oldest = self._aside or self._ends
        del oldest[next(iter(oldest))]
        return 1

    def put_aside(self, run: Run, num_blocks: int) -> None:
        """Ask for the first num_blocks blocks of a run, but not before `resume`. O(1)."""
        self._aside[run] = num_blocks

    def resume(self) -> None:
        """Ask again for what was put aside, ahead of newer requests. O(requests)."""
        if self._aside:
            newer, self._ends, self._aside = self._ends, self._aside, {}
            for run, num_blocks in newer.items():
                self._ends[run] = max(self._ends.get(run, 0), num_blocks)

    def drop(self, run: Run) -> None:
        """Drop the request for a run. O(1)."""
        self._ends.pop(run, None)
        self._aside.pop(run, None)

    def take_all(self) -> list[tuple[Run, int]]:
        """Return the requests as runs and numbers of first blocks, and forget them. O(requests)."""
        ends, self._ends = self._ends, {}
        return [*ends.items()]
