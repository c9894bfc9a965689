"""Which cached blocks follow which, to find what is evicted together with a victim, and in which order."""

import numpy as np
from numpy.typing import NDArray

from kvblocks.replay.arrays.released import Blocks

_NONE, _SEVERAL = -1, -2


class CachedTree:
    """The cached blocks of a pool. Most blocks have one child, kept in an array; `_branches` has those with several."""

    def __init__(self, num_unique: int) -> None:
        self._parent = np.full(num_unique, _NONE, np.int64)
        self._child = np.full(num_unique, _NONE, np.int64)
        # The same memory; for single blocks it takes a third of the time.
        self._parent_of, self._child_of = self._parent.data, self._child.data
        self._branches: dict[int, set[int]] = {}

    def add(self, path: Blocks, first: int) -> None:
        """Note that a prompt's blocks from index `first` on are now cached; those before it already were. O(blocks)."""
        self._parent[path[max(1, first) :]] = path[max(0, first - 1) : -1]
        self._child[path[first:-1]] = path[first + 1 :]
        self._child[path[-1]] = _NONE
        if first:
            parent, child = int(path[first - 1]), int(path[first])
            known = self._child_of[parent]
            if known == _NONE:
                self._child[parent] = child
            elif known == _SEVERAL:
                self._branches[parent].add(child)
            else:
                self._child[parent] = _SEVERAL
                self._branches[parent] = {known, child}

    def remove(self, blocks: Blocks, is_cached: NDArray[np.uint8]) -> None:
        """Note that blocks and all below them were evicted. is_cached: for each block, after that. O(blocks)."""
        for branching in blocks[self._child[blocks] == _SEVERAL].tolist():
            del self._branches[branching]
        self._child[blocks] = _NONE
        parents = self._parent[blocks]
        tops = np.flatnonzero((parents != _NONE) & (is_cached[parents] != 0))
        for top in tops.tolist():
            self._detach(int(blocks[top]), int(parents[top]))

    def remove_one(self, block: int) -> None:
        """As `remove`, for one block with none below it. O(1)."""
        parent = self._parent_of[block]
        if parent == _NONE:
            return
        if self._child_of[parent] == block:
            self._child_of[parent] = _NONE
        else:
            self._detach(block, parent)

    def _detach(self, block: int, parent: int) -> None:
        """A block is no longer among the children of its parent, which stays."""
        if self._child_of[parent] != _SEVERAL:
            self._child_of[parent] = _NONE
            return
        branches = self._branches[parent]
        branches.discard(block)
        if len(branches) == 1:
            self._child_of[parent] = next(iter(branches))
            del self._branches[parent]

    def has_below(self, block: int) -> bool:
        """Whether any cached block follows a block. O(1)."""
        return self._child_of[block] != _NONE

    def below(self, block: int, most: int, numbers: "memoryview[int]") -> list[int]:
        """Return at most `most` of a block and the blocks below it, each one after all that are below it.

        Of several branches, the one that was released first comes first. numbers: for each block, when it was released.
        O(blocks below it).
        """
        child = self._child_of
        found: list[int] = []
        todo: list[int | list[int]] = [block]  # a block to follow, or a stretch to return
        while todo and len(found) < most:
            each = todo.pop()
            if isinstance(each, list):
                found += each[::-1]
                continue
            stretch = [each]
            following = child[each]
            while following >= 0:
                stretch.append(following)
                following = child[following]
            todo.append(stretch)
            if following == _SEVERAL:
                branches = self._branches[stretch[-1]]
                oldest_last: list[int] = sorted(branches, key=lambda branch: -numbers[branch])
                todo += oldest_last
        return found[:most]
