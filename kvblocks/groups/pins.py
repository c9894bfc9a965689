"""Pins where there are several groups: they keep what a hit of the whole pinned prefix needs of every group.

A pin holds the prefix's blocks of the primary group as ever, and once it holds all of them, what hangs from them and a
hit needs. That is worth nothing by halves, so it is held and given up together, before anything else of the pin: with
windows, a hit can't end anywhere else in the prefix on what the pin holds.

Invariants: a pin with hanging blocks holds all of its primary ones. Ghosts cost nothing, and count for nothing.
"""

from itertools import chain

from kvblocks.core.block import KVCacheBlock
from kvblocks.groups.hit import needed_blocks
from kvblocks.groups.index import GroupIndex
from kvblocks.groups.pool import GroupPool
from kvblocks.retention.pinned_blocks import Held
from kvblocks.retention.pins import Pin, Retention


class GroupRetention(Retention):
    """`Retention` over a `GroupPool`."""

    def __init__(self, pool: GroupPool, max_blocks: int) -> None:
        super().__init__(pool, max_blocks)
        self._group_pool = pool
        self._group_index: GroupIndex = pool.group_index

    def remove(self, pin: Pin) -> None:
        """End a pin; what it holds is free then, unless others hold it."""
        hanging, pin.hanging = pin.hanging, []
        super().remove(pin)
        self._pool.release_table(hanging)

    def drop_uncached(self) -> None:
        """Let go of what is cached no more, after an abort or a reset. O(pinned blocks)."""
        for pin in self.pins:
            if not all(block.is_cached for block in [*pin.hanging, *pin.blocks]):
                self._drop_hanging(pin)
        super().drop_uncached()

    def tables(self) -> list[list[KVCacheBlock]]:
        """Return all that pins hold. O(pins)."""
        return super().tables() + [pin.hanging for pin in self.pins]

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants hold. O(pinned blocks)."""
        super().check()
        for pin in self.pins:
            assert not pin.hanging or pin.hanging == self._find_hanging(pin), f"{pin}: holds other companions"

    def _count_wanted(self, pin: Pin) -> None:
        num_wanted = 0 if self._group_pool.ghosts is not None else pin.num_blocks
        for companion in self._group_index.layout.companions:
            first, end = needed_blocks(companion, self._end(pin), self._end(pin))
            num_wanted += end - first
        pin.num_wanted_blocks = num_wanted

    def _end(self, pin: Pin) -> int:
        """Return where hits that a pin keeps end: the last place in its prefix where any can."""
        step = self._group_index.layout.hit_size
        return pin.num_blocks * self._group_index.block_size // step * step

    def _lacks(self, pin: Pin) -> bool:
        num_ours = 0 if self._group_pool.ghosts is not None else pin.num_blocks
        return super()._lacks(pin) or (not pin.hanging and pin.num_wanted_blocks > num_ours)

    def _extend(self, pin: Pin) -> None:
        super()._extend(pin)
        if not pin.hanging and not super()._lacks(pin):
            pin.hanging = self._find_hanging(pin)
            self._pool.touch(pin.hanging)
            self._note(pin)

    def _find_hanging(self, pin: Pin) -> list[KVCacheBlock]:
        """Return what a hit of the whole pin needs beside the primary group; nothing unless all of it is cached."""
        found: list[KVCacheBlock] = []
        for companion in self._group_index.layout.companions:
            first, end = needed_blocks(companion, self._end(pin), self._end(pin))
            for number in range(first, end):
                position, place = companion.home(number)
                block = self._group_index.companion(pin.blocks[position], place)
                if block is None:
                    return []
                found.append(block)
        return found

    def _give_up_end(self, pin: Pin) -> list[KVCacheBlock]:
        return self._drop_hanging(pin) if pin.hanging else super()._give_up_end(pin)

    def _drop_hanging(self, pin: Pin) -> list[KVCacheBlock]:
        hanging, pin.hanging = pin.hanging, []
        self._pool.release_table(hanging)
        self._note(pin)
        return hanging

    def _held_by(self, pin: Pin) -> Held:
        hanging = zip(pin.hanging, [pin.priorities[-1]] * len(pin.hanging), strict=True)
        return hanging if self._group_pool.ghosts is not None else chain(super()._held_by(pin), hanging)
