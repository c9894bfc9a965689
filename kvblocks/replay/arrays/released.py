"""The order in which blocks became free, and thus which one is the least recently used."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.intp]
"""Numbers of blocks of a trace, in a type that NumPy takes as an index without conversion."""

_MOST_STALE = 4  # times as many entries as blocks of the pool, before those that no longer hold are left out


class ReleaseOrder:
    """Blocks in the order in which they became free.

    numbers: for each block, when it last became free; 0 if it isn't free or isn't cached. number_of: the same memory
    for access to single blocks, which takes a third of the time. When a block is used again, its entry isn't searched
    for, but skipped when it comes to the front.
    """

    def __init__(self, num_unique: int, num_blocks: int) -> None:
        """num_unique: blocks of the trace. num_blocks: of the pool."""
        self.numbers = np.zeros(num_unique, np.int64)
        self.number_of = self.numbers.data
        self._num_blocks = num_blocks
        self._last = self._num_entries = 0
        self._stretches: deque[tuple[int, Blocks]] = deque()  # the number of the first block, and the blocks

    def add(self, blocks: Blocks) -> None:
        """Note that blocks became free, in this order. O(blocks) on average."""
        first, self._last = self._last + 1, self._last + len(blocks)
        self.numbers[blocks] = np.arange(first, self._last + 1)
        self._stretches.append((first, blocks))
        self._num_entries += len(blocks)
        if self._num_entries > _MOST_STALE * self._num_blocks + 1024:
            self._tidy()

    def forget(self, blocks: Blocks) -> None:
        """Note that blocks have owners again or are evicted. O(blocks)."""
        self.numbers[blocks] = 0

    def take(self, number: int) -> Blocks:
        """Take the `number` blocks that have been free longest, if there are so many. O(number) on average."""
        found: list[Blocks] = []
        while number:
            first, blocks = self._stretches.popleft()
            window = blocks[: 4 * number + 64]
            places = np.flatnonzero(self.numbers[window] == np.arange(first, first + len(window)))[:number]
            end = int(places[-1]) + 1 if len(places) == number else len(window)
            found.append(window[places])
            number -= len(places)
            self._num_entries -= end
            if end < len(blocks):
                self._stretches.appendleft((first + end, blocks[end:]))
        taken = found[0] if len(found) == 1 else np.concatenate(found)
        self.forget(taken)
        return taken

    def _tidy(self) -> None:
        """Leave out entries that no longer hold."""
        kept: deque[tuple[int, Blocks]] = deque()
        numbers = np.concatenate([np.arange(first, first + len(blocks)) for first, blocks in self._stretches])
        blocks = np.concatenate([blocks for _, blocks in self._stretches])
        holds = self.numbers[blocks] == numbers
        numbers, blocks = numbers[holds], blocks[holds]
        edges = np.flatnonzero(np.diff(numbers) != 1) + 1
        if len(blocks):
            kept.extend(zip(numbers[[0, *edges]].tolist(), np.split(blocks, edges), strict=True))
        self._stretches, self._num_entries = kept, len(blocks)
