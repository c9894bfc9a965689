"""Which blocks only pins hold: what a call that finds too few free blocks could have, and what it could not.

To know it takes a look at everything that is pinned. So it is kept for the next call, which a scheduler makes at its
next step. It may change when a pin holds other blocks, which `Pins` says, and when a block gets another owner
or loses one of several, which the free queue counts for all blocks alike. What is taken and freed otherwise makes no
difference. So a pool in which prefixes are shared all the time is looked at each time, once a call.
"""

from collections.abc import Iterable

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.pool import BlockPool

KEEP = 100
"""The priority of what is never given up before it expires."""

Held = Iterable[tuple[KVCacheBlock, int]]
"""What one pin holds, with priorities."""


class PinnedBlocks:
    """The blocks of `pool` that have pins and no other owners, while that is known."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._may_go: dict[KVCacheBlock, bool] | None = None  # by block, whether all its pins would give it up
        self._num_going = 0
        self._num_shared_changes = 0

    def forget(self) -> None:
        """Note that pins hold other blocks than before. O(1)."""
        self._may_go = None

    @property
    def known(self) -> dict[KVCacheBlock, bool] | None:
        """Whether each of them would be given up; None: that isn't known any more. O(1)."""
        if self._num_shared_changes != self._pool.num_shared_changes:
            self._may_go = None
        return self._may_go

    def count(self, pins: Iterable[Held], touched: list[KVCacheBlock], num_wanted: int) -> tuple[int, int]:
        """Return how many blocks would be given up, and how many not, when `touched` are taken first.

        Stops counting when there are `num_wanted` to be given up. O(touched) while it is known, else O(pinned blocks).
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
        """Keep what was `known` before pins gave up `blocks`, in the order of their priorities. O(blocks).

        Whatever pins hold one of these still, they have no lower priority than the one that gave it up.
        """
        self._may_go = known
        self._num_shared_changes = self._pool.num_shared_changes
        if known is not None:
            for block in blocks:
                if not block.ref_cnt:
                    self._num_going -= known.pop(block, False)  # nothing, of an anchor

    def check(self, pins: Iterable[Held]) -> None:
        """Raise AssertionError unless what is known is so. O(pinned blocks)."""
        priorities: dict[KVCacheBlock, list[int]] = {}
        for held in pins:
            for block, priority in held:
                priorities.setdefault(block, []).append(priority)
        may_go = {block: max(given) < KEEP for block, given in priorities.items() if len(given) == block.ref_cnt}
        is_right = self.known is None or (self.known == may_go and self._num_going == sum(may_go.values()))
        assert is_right, f"pins: expected that only they hold {may_go}, known is {self.known}"

    def _learn(
        self, pins: Iterable[Held], touched: list[KVCacheBlock], num_wanted: int
    ) -> dict[KVCacheBlock, bool] | None:
        """Find out, and keep it; None as soon as `num_wanted` blocks beside `touched` would be given up."""
        taken = set(touched)
        may_go: dict[KVCacheBlock, bool] = {}
        num_pins: dict[KVCacheBlock, int] = {}  # of blocks with several owners
        staying: set[KVCacheBlock] = set()  # those of them that some pin keeps
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
        self._num_shared_changes = self._pool.num_shared_changes
        return may_go
