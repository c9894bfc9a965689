"""Lookups with several groups: the longest prefix for which every group has the blocks that attention needs.

A group with full attention needs all blocks of the prefix. A windowed group needs the blocks that the next token's
query sees: those of the last window - 1 tokens of the hit. A full hit needs one token more, since its last token is
computed again. The core finds the primary group's cached prefix. The search goes back from its end: a missing block of
a side group rules out every hit that needs it, so the next candidate ends where that block begins.

Layers that keep a state need a checkpoint where the hit ends. Such a hit ends before the sequence's last token, because
the state after that token gives no logits, and can't be undone so that the token could be computed again.
"""

from dataclasses import dataclass
from typing import SupportsIndex

from kvblocks.arguments import check_count
from kvblocks.core.attached import GroupIndex, Row, removal_key
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.core.hit import CacheHit, HitSource
from kvblocks.core.layout import SideGroup
from kvblocks.core.sequence import Sequence

Tables = list[tuple[int, list[KVCacheBlock]]]
"""By `layout.side_groups`: the first table index that a hit needs, and the blocks from there to the hit's end."""


class HitLimit:
    """Why a hit is shorter than the primary group's cached prefix: `group` lacks tokens first_token to end_token - 1.

    kind: how the group's layers attend, for people. is_state: whether the group lacks a checkpoint after any of these
    tokens, rather than blocks. removal_keys: the keys of what is missing in the removal history, the most useful first.
    Read-only.
    """

    __slots__ = ("end_token", "first_token", "group", "is_state", "kind", "removal_keys")

    def __init__(
        self, group: int, kind: str, first_token: int, end_token: int, removal_keys: list[bytes], *, is_state: bool
    ) -> None:
        self.group = group
        self.kind = kind
        self.first_token = first_token
        self.end_token = end_token
        self.removal_keys = removal_keys
        self.is_state = is_state


class GroupHit(CacheHit):
    """A `CacheHit` of several groups.

    tables: its blocks of the side groups. checkpoint: the one at its end; None if it needs none. A sequence that starts
    with a checkpoint owns the checkpoint's blocks until the engine has taken the copy to the sequence's slot.
    num_tier_tokens: tokens that the primary group has in a tier, counted from the sequence's first one, as far as tiers
    were looked up for this hit.
    """

    __slots__ = ("checkpoint", "group_index", "num_matched", "num_tier_tokens", "tables")

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
        self.num_tier_tokens = 0
        self.checkpoint: Checkpoint | None = None
        if blocks and index.checkpoints is not None:
            self.checkpoint = index.checkpoints.at(blocks[-1])

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the primary group alone has cached. O(1)."""
        return self.num_matched * self.index.block_size

    @property
    def checkpoint_block_ids(self) -> tuple[int, ...]:
        """The ids of its checkpoint's blocks, where layers keep a state; otherwise empty. O(their number)."""
        return () if self.checkpoint is None else tuple([block.block_id for block in self.checkpoint.blocks])

    def group_blocks(self, group: SupportsIndex) -> list[KVCacheBlock | None]:
        """Return the blocks of a group's table, None where the hit needs none. O(blocks)."""
        layout = self.group_index.layout
        number = check_count("group", group, 0, len(layout.groups) - 1)
        for side_group, (first, held) in zip(layout.side_groups, self.tables, strict=True):
            if side_group.group == number:
                return [*[None] * first, *held]
        return [*self.blocks] if number == layout.primary else []

    def _cut_to(self, num_blocks: int) -> CacheHit:
        """Return a hit of at most the first `num_blocks` blocks, fewer than this one has, and still cached."""
        index, sequence, held = self.group_index, self.sequence, self.blocks[:num_blocks]
        if self.version != index.version:  # some of them may be cached no more, or hold another prefix
            found = find_blocks(index, sequence, num_blocks * index.block_size)
            pairs = enumerate(zip(held, found, strict=False))
            held = held[: next((at for at, (block, now) in pairs if block is not now), len(found))]
        hit = longest_hit(index, sequence, held, sequence.num_tokens, self.source)
        hit.version = self.version
        return hit

    def has_lost_attached(self) -> bool:
        """Whether an attached block of this hit is no longer cached where it was found. O(blocks)."""
        if self.checkpoint is not None and not self.checkpoint.is_cached:
            return True
        for side_group, (first, held) in zip(self.group_index.layout.side_groups, self.tables, strict=True):
            if _find(self.group_index, side_group, self.blocks, first, first + len(held)) != held:
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Limit:
    """What limits a hit: the group's block `number` isn't cached."""

    side_group: SideGroup
    number: int


@dataclass(frozen=True, slots=True)
class _NoState:
    """What limits a hit: no checkpoint after more than `first` and at most `end` tokens."""

    first: int
    end: int


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
    """Return how many tokens of `matched` can be hit, and why no more can. Changes nothing.

    num_tokens: how many tokens the sequence has. The reason is None if only the alignment limits the hit.
    """
    end, _, limit = _longest_end(index, matched, num_tokens)
    if limit is None:
        return end, None
    if isinstance(limit, _NoState):
        layout, size = index.layout, index.block_size
        state = layout.state
        assert state is not None, "no group keeps a state"
        ends = range(limit.end, limit.first, -layout.alignment) if index.needs_digests else range(0)
        gone = [removal_key(state, matched[place // size - 1].block_hash or b"") for place in ends]
        return end, HitLimit(state, layout.groups[state].label, limit.first, limit.end, gone, is_state=True)
    group, first = limit.side_group, limit.number * limit.side_group.block_size
    position, column = group.home(limit.number)
    keys: list[bytes] = []
    if index.needs_digests:
        keys.append(removal_key(group.group, index.name(matched[position], group, column)))
    return end, HitLimit(group.group, group.kind.label, first, first + group.block_size, keys, is_state=False)


def _longest_end(
    index: GroupIndex, matched: list[KVCacheBlock], num_tokens: int
) -> tuple[int, Tables, _Limit | _NoState | None]:
    """Return how many tokens the longest hit has, its tables, and what first limited it (None: nothing).

    matched: the primary group's blocks. num_tokens: the sequence's known tokens.
    """
    size, alignment = index.layout.block_size, index.layout.alignment
    end = len(matched) * size // alignment * alignment
    limit: _Limit | _NoState | None = None
    checkpoints = index.checkpoints
    if checkpoints is not None or index.layout.has_gaps:
        end = min(end, (num_tokens - 1) // alignment * alignment)
    while True:
        if checkpoints is not None:
            with_state = checkpoints.num_up_to_last(matched, end // size) * size
            if with_state < end:
                limit = limit or _NoState(with_state, end)
                end = with_state
        tables: Tables = []
        rows: dict[int, list[Row]] = {}  # by first index: groups of the same kind need the same rows
        for side_group in index.layout.side_groups:
            first, last = side_group.kind.needed_blocks(end, num_tokens)
            found: list[KVCacheBlock | None]
            if not side_group.kind.is_cached:
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


def _find(
    index: GroupIndex, side_group: SideGroup, matched: list[KVCacheBlock], first: int, end: int
) -> list[KVCacheBlock | None]:
    """Return a group's blocks first to end - 1 of a prefix, None for those that aren't cached. O(end - first)."""
    homes = [side_group.home(number) for number in range(first, end)]
    return [index.attached(matched[position], column) for position, column in homes]
