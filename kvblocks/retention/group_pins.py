"""Pins with several groups: they keep the blocks of every group that a hit of the whole pinned prefix needs.

A pin holds the primary group's blocks of the prefix. Once it holds all of them, it also holds the attached blocks that
a hit of the whole prefix needs. With windows, no shorter hit can use these, so the attached blocks are held all
together or not at all, and the pin gives them up before its primary blocks. Where layers keep a state, a checkpoint at
the prefix's end is among them; sequences that pass there save one as long as the pin lacks it.

Invariants: a pin with attached blocks holds all of its primary blocks. Anchors don't count towards the budget.
"""

from itertools import chain

from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.group_pool import GroupPool
from kvblocks.core.pool import BlockPool
from kvblocks.core.sequence import Sequence
from kvblocks.retention.pinned_blocks import Held
from kvblocks.retention.pins import Pin, Pins


class GroupPins(Pins):
    """`Pins` over a `GroupPool`."""

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        super().__init__(pool, max_blocks)
        assert isinstance(pool, GroupPool), f"{pool}: not a pool of several groups"
        self._group_pool = pool
        self._group_index: GroupIndex = pool.group_index

    def remove(self, pin: Pin) -> None:
        """End a pin and release its blocks."""
        attached, pin.attached_blocks = pin.attached_blocks, []
        super().remove(pin)
        self._pool.release_table(attached)

    def drop_uncached(self) -> None:
        """Release blocks that are no longer cached, after an abort or a reset. O(pinned blocks)."""
        for pin in self.pins:
            if not all(block.is_cached for block in [*pin.attached_blocks, *pin.blocks]):
                self._drop_attached(pin)
        super().drop_uncached()

    def ends_in(self, sequence: Sequence) -> list[int]:
        """Return the ends, in tokens, of pins that lack blocks and that `sequence` begins with. O(their tokens)."""
        ends: list[int] = []
        size = self._group_index.block_size
        tokens, keys = sequence.packed_tokens(), sequence.encoded_keys(size) or {}
        for pin in self.lacking.get(bytes(tokens[: 4 * size]), ()):
            end = self._end(pin)
            if 0 < end <= sequence.num_tokens and pin.sequence.packed_tokens()[: 4 * end] == tokens[: 4 * end]:
                theirs = pin.sequence.encoded_keys(size) or {}
                if all(keys.get(block) == theirs.get(block) for block in range(end // size)):
                    ends.append(end)
        return ends

    def tables(self) -> list[list[KVCacheBlock]]:
        """Return the blocks that pins hold. O(pins)."""
        return super().tables() + [pin.attached_blocks for pin in self.pins]

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants hold. O(pinned blocks)."""
        super().check()
        for pin in self.pins:
            assert not pin.attached_blocks or pin.attached_blocks == self._find_attached(pin), (
                f"{pin}: holds other attached blocks"
            )

    def _count_wanted(self, pin: Pin) -> None:
        num_wanted = 0
        for side_group in self._group_index.layout.side_groups:
            first, end = side_group.kind.needed_blocks(self._end(pin), self._end(pin))
            num_wanted += end - first
        kind = self._group_index.layout.state_kind
        pin.num_wanted_attached_blocks = num_wanted + (
            0 if kind is None or not self._end(pin) else kind.checkpoint_blocks
        )
        pin.num_wanted_blocks = pin.num_wanted_attached_blocks
        if self._group_pool.anchors is None:
            pin.num_wanted_blocks += pin.num_blocks

    def _end(self, pin: Pin) -> int:
        """Return the longest hit, in tokens, that a pin can serve: its prefix down to a multiple of the alignment."""
        alignment = self._group_index.layout.alignment
        return pin.num_blocks * self._group_index.block_size // alignment * alignment

    def _lacks(self, pin: Pin) -> bool:
        return super()._lacks(pin) or (not pin.attached_blocks and pin.num_wanted_attached_blocks > 0)

    def _extend(self, pin: Pin) -> None:
        super()._extend(pin)
        if not pin.attached_blocks and not super()._lacks(pin):
            pin.attached_blocks = self._find_attached(pin)
            self._pool.touch(pin.attached_blocks)
            self._note(pin)

    def _find_attached(self, pin: Pin) -> list[KVCacheBlock]:
        """Return the side groups' blocks that a hit of the whole pin needs; none unless all of them are cached."""
        found: list[KVCacheBlock] = []
        end_block = self._end(pin) // self._group_index.block_size
        if self._group_index.checkpoints is not None and end_block:
            checkpoint = self._group_index.checkpoints.at(pin.blocks[end_block - 1])
            if checkpoint is None:
                return []
            found += checkpoint.blocks
        for side_group in self._group_index.layout.side_groups:
            first, end = side_group.kind.needed_blocks(self._end(pin), self._end(pin))
            for number in range(first, end):
                position, column = side_group.home(number)
                block = self._group_index.attached(pin.blocks[position], column)
                if block is None:
                    return []
                found.append(block)
        return found

    def _give_up_end(self, pin: Pin) -> list[KVCacheBlock]:
        return self._drop_attached(pin) if pin.attached_blocks else super()._give_up_end(pin)

    def _drop_attached(self, pin: Pin) -> list[KVCacheBlock]:
        attached, pin.attached_blocks = pin.attached_blocks, []
        self._pool.release_table(attached)
        self._note(pin)
        return attached

    def _held_by(self, pin: Pin) -> Held:
        attached = zip(pin.attached_blocks, [pin.priorities[-1]] * len(pin.attached_blocks), strict=True)
        return attached if self._group_pool.anchors is not None else chain(super()._held_by(pin), attached)
