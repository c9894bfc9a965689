"""Which blocks have only pins as owners. A call that finds too few free blocks may take those of low priority.

Finding out takes a pass over all pinned blocks, so the answer is kept for the next call, which a scheduler makes in its
next step. The answer may change in two cases. When a pin comes to hold other blocks, `Pins` calls `forget`. When a
block that stays owned gets or loses an owner, the free queue counts the change, for all blocks together. Taking and
freeing unshared blocks doesn't change the answer. In a pool where prefixes are shared all the time, each call looks
again.
"""

from collections.abc import Iterable

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.pool import BlockPool

KEEP = 100
"""The priority of pins that are never given up before they expire."""

Pinned = Iterable[tuple[KVCacheBlock, int]]
"""The blocks that one pin holds, with priorities."""


class PinnedBlocks:
    """Which blocks of `pool` are owned only by pins. The answer is kept while it is valid."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._may_go: dict[KVCacheBlock, bool] | None = None
        """The answer that is kept: by block, whether all its pins would give it up."""
        self._num_going = 0
        """How many of them would be given up."""
        self._num_shared_changes = 0
        """The free queue's count of changes when the answer was found."""

    def forget(self) -> None:
        """Drop the kept answer, because pins hold other blocks than before. O(1)."""
        self._may_go = None

    @property
    def known(self) -> dict[KVCacheBlock, bool] | None:
        """For each block, whether it would be given up; None if no valid answer is kept. O(1)."""
        if self._num_shared_changes != self._pool.queue.num_shared_changes:
            self._may_go = None
        return self._may_go

    def count(self, pins: Iterable[Pinned], touched: list[KVCacheBlock], num_wanted: int) -> tuple[int, int]:
        """Return how many blocks pins would give up, and how many not, once `touched` have another owner.

        Counting stops when `num_wanted` would be given up. O(touched) while an answer is kept, otherwise O(pinned
        blocks).
        """
        may_go = self.known
        if may_go is None:
            may_go = self._learn(pins, touched, num_wanted)
            if may_go is None:
                return num_wanted, 0
        num_going, num_staying = self._num_going, len(may_go) - self._num_going
        for block in set(touched):
            if block in may_go:
                num_going -= may_go[block]
                num_staying -= not may_go[block]
        return num_going, num_staying

    def note_given_up(self, known: dict[KVCacheBlock, bool] | None, blocks: list[KVCacheBlock]) -> None:
        """Update the answer that was `known` before pins gave up `blocks`, in order of priority. O(blocks).

        If other pins still hold such a block, their priority is at least as high as that of the pin that gave it up, so
        nothing changes for this block.
        """
        self._may_go = known
        self._num_shared_changes = self._pool.queue.num_shared_changes
        if known is not None:
            for block in blocks:
                if not block.ref_cnt:
                    self._num_going -= known.pop(block, False)  # 0 for a virtual block

    def check(self, pins: Iterable[Pinned]) -> None:
        """Raise AssertionError unless the kept answer is right. O(pinned blocks)."""
        priorities: dict[KVCacheBlock, list[int]] = {}
        for held in pins:
            for block, priority in held:
                priorities.setdefault(block, []).append(priority)
        may_go = {block: max(given) < KEEP for block, given in priorities.items() if len(given) == block.ref_cnt}
        is_right = self.known is None or (self.known == may_go and self._num_going == sum(may_go.values()))
        assert is_right, f"pins: expected that only they hold {may_go}, known is {self.known}"

    def _learn(
        self, pins: Iterable[Pinned], touched: list[KVCacheBlock], num_wanted: int
    ) -> dict[KVCacheBlock, bool] | None:
        """Compute and keep the answer; None as soon as `num_wanted` blocks other than `touched` would be given up."""
        taken = set(touched)
        may_go: dict[KVCacheBlock, bool] = {}
        num_pins: dict[KVCacheBlock, int] = {}  # only blocks with several owners
        staying: set[KVCacheBlock] = set()  # those of them that a pin never gives up
        num_found = 0
        for held in pins:
            for block, priority in held:
                if block.ref_cnt > 1:
                    num_pins[block] = num_pins.get(block, 0) + 1
                    if priority >= KEEP:
                        staying.add(block)
                    if num_pins[block] < block.ref_cnt:
                        continue
                may_go[block] = goes = priority < KEEP and block not in staying
                if goes and block not in taken:
                    num_found += 1
            if num_found >= num_wanted:
                return None
        self._may_go = may_go
        self._num_going = sum(may_go.values())
        self._num_shared_changes = self._pool.queue.num_shared_changes
        return may_go
