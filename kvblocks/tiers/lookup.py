"""Lookups over the device and the tiers together: which blocks a hit needs, and where each of them is.

A *place* here is the device or a tier. Each place keeps side groups' blocks attached to the primary group's blocks
(`core.attached`). A block that one place lacks may be in another.
"""

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.checkpoints import Checkpoint, Checkpoints
from kvblocks.core.layout import GroupLayout, SideGroup
from kvblocks.core.prefix_index import PrefixIndex

Found = list[tuple[int, KVCacheBlock]]
"""Consecutive blocks of a group, each as (number of the place that has it, block)."""


class PrefixCopy:
    """What one place has of a prefix: its index, and its primary blocks of the prefix, from the first one on."""

    def __init__(self, index: PrefixIndex, blocks: list[KVCacheBlock]) -> None:
        self.index = index
        self.blocks = blocks

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Its checkpoints of all prefixes; None where no group keeps a state. O(1)."""
        return None if self.index.attached is None else self.index.attached.checkpoints

    def attached(self, side_group: SideGroup, number: int) -> KVCacheBlock | None:
        """Return block `number` of a side group's part of the prefix; None if this place lacks it. O(1)."""
        position, column = side_group.home(number)
        found = self.index.attached
        return None if found is None or position >= len(self.blocks) else found.at(self.blocks[position], column)

    def checkpoint(self, end: int) -> Checkpoint | None:
        """Return the checkpoint after the first `end` tokens of the prefix; None if this place lacks it. O(1)."""
        checkpoints, number = self.checkpoints, end // self.index.block_size
        if checkpoints is None or not 0 < number <= len(self.blocks):
            return None
        return checkpoints.at(self.blocks[number - 1])

    def last_checkpoint(self, end: int) -> int:
        """Return how many tokens, at most `end`, its last checkpoint of the prefix is after; 0: it has none.

        See `Checkpoints.num_up_to_last`.
        """
        checkpoints, size = self.checkpoints, self.index.block_size
        most = min(end // size, len(self.blocks))
        return 0 if checkpoints is None else checkpoints.num_up_to_last(self.blocks, most) * size


def find_checkpoint(places: list[PrefixCopy], end: int) -> tuple[int, Checkpoint] | None:
    """Return the first place with a checkpoint after `end` tokens, and the checkpoint. O(places)."""
    for number, place in enumerate(places):
        found = place.checkpoint(end)
        if found is not None:
            return number, found
    return None


def find_needed(
    places: list[PrefixCopy], side_group: SideGroup, end: int, num_tokens: int | None
) -> tuple[int, Found | None]:
    """Return the blocks that a hit of `end` tokens needs of a side group: the number of the first one, and all of them.

    If blocks are missing, return the number of the last missing one, and None. If several places have a block, the
    first of these places counts. num_tokens: how many tokens the sequence has; None: not known, so it may end at `end`.
    O(blocks).
    """
    first, last = side_group.kind.needed_blocks(end, end if num_tokens is None else num_tokens)
    found: Found = []
    for number in range(last - 1, first - 1, -1):
        for place, where in enumerate(places):
            block = where.attached(side_group, number)
            if block is not None:
                found.append((place, block))
                break
        else:
            return number, None
    return first, found[::-1]


def find_all_needed(
    layout: GroupLayout, places: list[PrefixCopy], end: int, num_tokens: int | None
) -> list[tuple[int, Found]] | None:
    """Return the answers of `find_needed` for all side groups; None if a block is missing. O(blocks)."""
    tables: list[tuple[int, Found]] = []
    for side_group in layout.side_groups:
        first, found = find_needed(places, side_group, end, num_tokens)
        if found is None:
            return None
        tables.append((first, found))
    return tables


def find_longest(
    layout: GroupLayout | None, places: list[PrefixCopy], num_blocks: int, num_tokens: int | None
) -> tuple[int, list[tuple[int, Found]]]:
    """Return the number of tokens of the longest hit within `num_blocks` primary blocks, and what it needs.

    layout: None where there is one group. The blocks may be in different places. Where layers keep a state, the hit
    ends where one of the places has a checkpoint. What it needs is as `find_all_needed` returns it. Without a hit, the
    answer is 0 and []. O(blocks seen x groups).
    """
    if layout is None:
        return num_blocks * places[0].index.block_size, []
    end = num_blocks * layout.block_size // layout.alignment * layout.alignment
    groups = [*layout.side_groups]
    while end:
        if layout.state is not None:
            end = max([place.last_checkpoint(end) for place in places]) // layout.alignment * layout.alignment
            if not end:
                break
        for number, side_group in enumerate(groups):
            missing, found = find_needed(places, side_group, end, num_tokens)
            if found is None:
                end = missing * side_group.block_size // layout.alignment * layout.alignment
                groups.insert(0, groups.pop(number))  # the next round begins with it, so a long gap costs O(1) a block
                break
        else:
            return end, find_all_needed(layout, places, end, num_tokens) or []
    return 0, []
