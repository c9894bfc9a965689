"""Lookups with several groups: the longest prefix for which every group has the blocks that attention needs.

A group with full attention needs all blocks of the prefix. A windowed group needs the blocks that the next token's
query sees: those of the last window - 1 tokens of the hit. A full hit needs one token more, since its last token is
computed again. The core finds the primary group's cached prefix. From its end the search goes back: a missing block of
a side group rules out every hit that needs it, so the next candidate ends where that block begins.
"""

from dataclasses import dataclass
from typing import SupportsIndex

from kvblocks.arguments import check_count
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hit import CacheHit, HitLimit, HitSource
from kvblocks.core.sequence import Sequence
from kvblocks.groups.index import GroupIndex, Row, removal_key
from kvblocks.groups.layout import SideGroup

Tables = list[tuple[int, list[KVCacheBlock]]]
"""By `layout.side_groups`: the first table index that a hit needs, and the blocks from there to the hit's end."""


class GroupHit(CacheHit):
    """A `CacheHit` of several groups. tables: its blocks of the side groups."""

    __slots__ = ("group_index", "num_matched", "tables")

    def __init__(
        self,
        sequence: Sequence,
        blocks: list[KVCacheBlock],
        tables: Tables,
        num_matched: int,
        index: GroupIndex,
        source: HitSource,
    ) -> None:
        """blocks: the primary group's blocks of the hit. num_matched: how many the primary group alone has cached."""
        super().__init__(sequence, blocks, len(blocks) * index.block_size, sequence.num_tokens, source)
        self.group_index = index
        self.num_matched = num_matched
        self.tables = tables

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the primary group alone has cached. O(1)."""
        return self.num_matched * self.index.block_size

    def group_blocks(self, group: SupportsIndex) -> list[KVCacheBlock | None]:
        """Return the blocks of a group's table, None where the hit needs none. O(blocks)."""
        layout = self.group_index.layout
        number = check_count("group", group, 0, len(layout.groups) - 1)
        for side_group, (first, held) in zip(layout.side_groups, self.tables, strict=True):
            if side_group.group == number:
                return [*[None] * first, *held]
        return [*self.blocks]

    def _cut_to(self, num_blocks: int) -> CacheHit:
        """Return a hit of at most the first `num_blocks` blocks, fewer than this one has."""
        num_tokens = self.sequence.num_tokens
        hit = longest_hit(self.group_index, self.sequence, self.blocks[:num_blocks], num_tokens, self.source)
        hit.version = self.version
        return hit

    def has_lost_attached(self) -> bool:
        """Whether a side group's block of this hit is no longer cached where it was found. O(blocks)."""
        for side_group, (first, held) in zip(self.group_index.layout.side_groups, self.tables, strict=True):
            if _find(self.group_index, side_group, self.blocks, first, first + len(held)) != held:
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Limit:
    """What limits a hit: the group's block `number` isn't cached."""

    side_group: SideGroup
    number: int


def longest_hit(
    index: GroupIndex, sequence: Sequence, matched: list[KVCacheBlock], num_tokens: int, source: HitSource
) -> GroupHit:
    """Return the longest hit that every group can serve. Changes nothing. O(blocks looked at).

    matched: the primary group's cached blocks; the hit has these or fewer. num_tokens: the sequence's known tokens.
    """
    end, tables, _ = _longest_end(index, matched, num_tokens)
    num_hit = end // index.block_size
    blocks = matched if num_hit == len(matched) else matched[:num_hit]
    return GroupHit(sequence, blocks, tables, len(matched), index, source)


def find_limit(index: GroupIndex, matched: list[KVCacheBlock], num_tokens: int) -> tuple[int, HitLimit | None]:
    """Return how many tokens of `matched` can be hit, and which group limits it. As `SlotAllocator.find_limit`."""
    end, _, limit = _longest_end(index, matched, num_tokens)
    if limit is None:
        return end, None
    group, first = limit.side_group, limit.number * limit.side_group.block_size
    position, column = group.home(limit.number)
    key = removal_key(group.group, index.name(matched[position], group, column)) if index.needs_digests else b""
    return end, HitLimit(group.group, group.window, first, first + group.block_size, key)


def _longest_end(index: GroupIndex, matched: list[KVCacheBlock], num_tokens: int) -> tuple[int, Tables, _Limit | None]:
    """Return how many tokens the longest hit has, its tables, and what first limited it (None: nothing).

    matched: the primary group's blocks. num_tokens: the sequence's known tokens.
    """
    size, alignment = index.layout.block_size, index.layout.alignment
    end = len(matched) * size // alignment * alignment
    limit: _Limit | None = None
    while True:
        tables: Tables = []
        rows: dict[int, list[Row]] = {}  # by first index: groups of the same kind need the same rows
        for side_group in index.layout.side_groups:
            first, last = needed_blocks(side_group, end, num_tokens)
            found: list[KVCacheBlock | None]
            if not side_group.is_cached:
                found = []
            elif side_group.block_size != size:
                found = _find(index, side_group, matched, first, last)
            elif (
                first not in rows
                and last > first
                and index.attached(matched[last - 1], side_group.first_column) is None
            ):
                first, found = last - 1, [None]  # so that stretches without attached blocks cost O(1) a block
            else:
                if first not in rows:
                    rows[first] = index.rows(matched, first, last)
                column = side_group.first_column
                found = [row[column] for row in rows[first]]
            held = [block for block in found if block is not None]
            if len(held) < len(found):
                missing = first + max([i for i, block in enumerate(found) if block is None])
                limit = limit or _Limit(side_group, missing)
                end = missing * side_group.block_size // alignment * alignment
                break
            tables.append((first, held))
        if len(tables) == len(index.layout.side_groups):
            return end, tables, limit


def needed_blocks(side_group: SideGroup, end: int, num_tokens: int) -> tuple[int, int]:
    """Return the range of a group's blocks that a hit of `end` tokens needs: the first one, and the last one + 1.

    The range is empty for a group that isn't cached. It then begins where the sequence's own blocks begin.
    """
    if not end:
        return 0, 0
    first = side_group.first_needed(end - 1 if end == num_tokens else end)
    return first, end // side_group.block_size if side_group.is_cached else first


def _find(
    index: GroupIndex, side_group: SideGroup, matched: list[KVCacheBlock], first: int, end: int
) -> list[KVCacheBlock | None]:
    """Return a group's blocks first to end - 1 of a prefix, None for those that aren't cached. O(end - first)."""
    homes = [side_group.home(number) for number in range(first, end)]
    return [index.attached(matched[position], column) for position, column in homes]
