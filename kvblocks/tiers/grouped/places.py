"""Where a prefix's blocks are, on the device or in a tier, and which of them a hit that ends at a token needs.

A tier keeps side groups' blocks as the device does, attached to the primary group's (`groups.index`). So one walk
serves device and tiers together: a block that one place lacks may be in another.
"""

from kvblocks.core.block import KVCacheBlock
from kvblocks.groups.hit import needed_blocks
from kvblocks.groups.index import GroupIndex
from kvblocks.groups.layout import GroupLayout, SideGroup

Found = list[tuple[int, KVCacheBlock]]
"""Consecutive blocks, each with the number of the place that has it."""


class Place:
    """A map and the blocks in it that hold a prefix of the primary group, from its beginning on."""

    def __init__(self, index: GroupIndex, blocks: list[KVCacheBlock]) -> None:
        self.index = index
        self.blocks = blocks

    def attached(self, side_group: SideGroup, number: int) -> KVCacheBlock | None:
        """Return a side group's block of the prefix, None if it isn't here. O(1)."""
        position, column = side_group.home(number)
        return self.index.attached(self.blocks[position], column) if position < len(self.blocks) else None


def find_needed(
    places: list[Place], side_group: SideGroup, end: int, num_tokens: int | None
) -> tuple[int, Found | None]:
    """Return the first block that a hit of `end` tokens needs of a group, and all blocks from there on.

    If several places have a block, the first place counts. num_tokens: known of the sequence; None: any number, `end`
    included. If blocks are missing: the number of the last missing one, and None. O(blocks).
    """
    first, last = needed_blocks(side_group, end, end if num_tokens is None else num_tokens)
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
    layout: GroupLayout, places: list[Place], end: int, num_tokens: int | None
) -> list[tuple[int, Found]] | None:
    """Return what a hit of `end` tokens needs, by `layout.side_groups`; None unless all blocks are there. O(blocks)."""
    tables: list[tuple[int, Found]] = []
    for side_group in layout.side_groups:
        first, found = find_needed(places, side_group, end, num_tokens)
        if found is None:
            return None
        tables.append((first, found))
    return tables


def find_longest(
    layout: GroupLayout, places: list[Place], num_blocks: int, num_tokens: int | None
) -> tuple[int, list[tuple[int, Found]]]:
    """Return how many tokens a hit over all places can have in `num_blocks` primary blocks, and what it needs.

    The second is as `find_all_needed` returns it. 0 and [] where there is no such hit. O(blocks seen x groups).
    """
    end = num_blocks * layout.block_size // layout.alignment * layout.alignment
    groups = [*layout.side_groups]
    while end:
        for number, side_group in enumerate(groups):
            missing, found = find_needed(places, side_group, end, num_tokens)
            if found is None:
                end = missing * side_group.block_size // layout.alignment * layout.alignment
                groups.insert(0, groups.pop(number))  # next time it is asked first: a long gap costs O(1) per block
                break
        else:
            return end, find_all_needed(layout, places, end, num_tokens) or []
    return 0, []
