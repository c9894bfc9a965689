"""Lookups where there are several groups: the longest prefix for which every group can serve attention.

Groups of full attention need all blocks of the prefix, windowed ones those that the next token's query sees: of the
tokens before the hit's end the last window - 1, and one more where the whole prompt is cached, since its last token is
then computed again. The primary group's cached prefix is found as ever; from its end the walk goes back: a missing
companion ends every hit that would need it, so the next candidate ends where that block begins.
"""

from dataclasses import dataclass

from kvblocks.arguments import check_count
from kvblocks.block import KVCacheBlock
from kvblocks.cache_hit import CacheHit
from kvblocks.companions import GroupIndex
from kvblocks.group_layout import Companion
from kvblocks.in_flight import InFlight
from kvblocks.registration import find_blocks
from kvblocks.sequence import Sequence


class GroupHit(CacheHit):
    """A `CacheHit` of several groups. tables: by `layout.companions`: the first needed place, and the blocks."""

    __slots__ = ("group_index", "num_matched", "tables")

    def __init__(
        self, sequence: Sequence, blocks: list[KVCacheBlock], num_matched: int, index: GroupIndex, in_flight: InFlight
    ) -> None:
        """blocks: the primary group's, of the hit. num_matched: how many of them there were without other groups."""
        super().__init__(sequence, blocks, len(blocks) * index.block_size, index, in_flight)
        self.group_index = index
        self.num_matched = num_matched
        self.tables: list[tuple[int, list[KVCacheBlock]]] = []
        for companion in index.layout.companions:
            first, end = needed_blocks(companion, self.num_readonly_tokens, sequence.num_tokens)
            self.tables.append((first, index.companions(companion, blocks, first, end)))

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the primary group alone has cached. O(1)."""
        return self.num_matched * self.index.block_size

    def group_blocks(self, group: int) -> list[KVCacheBlock | None]:
        """Return the blocks of a group's table, None where it needs none. O(blocks)."""
        layout = self.group_index.layout
        check_count("group", group, 0, len(layout.groups) - 1)
        for companion, (first, held) in zip(layout.companions, self.tables, strict=True):
            if companion.group == group:
                return [*[None] * first, *held]
        return [*self.blocks]

    def has_lost_companions(self) -> bool:
        """Whether a block of another group than the primary one hangs no more where it did. O(blocks)."""
        index = self.group_index
        for companion, (first, held) in zip(index.layout.companions, self.tables, strict=True):
            if index.companions(companion, self.blocks, first, first + len(held)) != held:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Limit:
    """What ended a hit: a group's block `number` isn't cached. end: of the longest hit that would have needed it."""

    companion: Companion
    number: int
    end: int


def find_hit(index: GroupIndex, sequence: Sequence, in_flight: InFlight, *, enable_caching: bool) -> GroupHit:
    """Return the longest cached prefix that every group can serve. Changes nothing. O(runs + tokens + blocks seen)."""
    matched = find_blocks(index, sequence) if enable_caching else []
    end, _ = longest_end(index, matched, sequence.num_tokens)
    return GroupHit(sequence, matched[: end // index.block_size], len(matched), index, in_flight)


def longest_end(index: GroupIndex, matched: list[KVCacheBlock], num_tokens: int) -> tuple[int, Limit | None]:
    """Return how many tokens the longest hit has, and what kept the longest prefix of the primary group from being it.

    matched: the primary group's blocks. num_tokens: known of the sequence.
    """
    layout = index.layout
    size, step = layout.block_size, layout.hit_size
    end = len(matched) * size // step * step
    limit: Limit | None = None
    is_settled = False
    while end and not is_settled:
        is_settled = True
        for companion in layout.companions:
            missing = _last_missing(index, companion, matched, end, num_tokens)
            if missing is not None:
                limit = limit or Limit(companion, missing, end)
                end = missing * companion.block_size // step * step
                is_settled = False
                break
    return end, limit


def needed_blocks(companion: Companion, end: int, num_tokens: int) -> tuple[int, int]:
    """Return the first block, and the one behind the last, that a hit of `end` tokens needs of a group."""
    if not end:
        return 0, 0
    return companion.first_needed(end - 1 if end == num_tokens else end), end // companion.block_size


def _last_missing(
    index: GroupIndex, companion: Companion, matched: list[KVCacheBlock], end: int, num_tokens: int
) -> int | None:
    """Return the last block of a group that a hit of `end` tokens needs and that isn't cached, None if all are."""
    first, last = needed_blocks(companion, end, num_tokens)
    found = index.companions(companion, matched, first, last)
    return last - 1 - len(found) if len(found) < last - first else None
