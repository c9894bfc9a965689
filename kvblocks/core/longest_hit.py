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
from kvblocks.core.attached import AttachedBlocks, removal_key
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.core.hit import CacheHit, HitSource
from kvblocks.core.layout import SideGroup
from kvblocks.core.loading import Loads, Tables
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence


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


class HitParts:
    """What a hit has besides the primary group's blocks: other groups' blocks, and a state."""

    __slots__ = ("attached", "checkpoint", "loads", "num_matched", "num_tier_tokens", "tables")

    def __init__(self, attached: AttachedBlocks, blocks: list[KVCacheBlock], tables: Tables, num_matched: int) -> None:
        """blocks: the primary group's blocks of the hit."""
        self.attached = attached
        self.tables = tables
        """Its blocks of the side groups."""
        self.num_matched = num_matched
        """How many blocks the primary group alone has cached."""
        self.num_tier_tokens = 0
        """Tokens that the primary group has in a tier, from the first one, as far as tiers were looked up."""
        self.checkpoint: Checkpoint | None = None
        """The checkpoint at its end; None if it needs none. A sequence that starts with a checkpoint owns its blocks
        until the engine has taken the copy to the sequence's slot.
        """
        self.loads: Loads | None = None
        """What a sequence that starts with this hit loads; None: nothing."""
        if blocks and attached.checkpoints is not None:
            self.checkpoint = attached.checkpoints.at(blocks[-1])

    def group_blocks(self, group: SupportsIndex, blocks: list[KVCacheBlock]) -> list[KVCacheBlock | None]:
        """Return the blocks of a group's table, None where the hit needs none. blocks: the primary group's. O(blocks).

        Raises InvalidArgumentError.
        """
        layout = self.attached.layout
        number = check_count("group", group, 0, len(layout.groups) - 1)
        for side_group, (first, held) in zip(layout.side_groups, self.tables, strict=True):
            if side_group.group == number:
                return [*[None] * first, *held]
        return [*blocks] if number == layout.primary else []

    def cut(self, hit: CacheHit, num_blocks: int) -> CacheHit:
        """Return a hit of at most the first `num_blocks` blocks, fewer than `hit` has, and still cached."""
        index, sequence, held = hit.index, hit.sequence, hit.blocks[:num_blocks]
        if hit.version != index.version:  # some of them may be cached no more, or hold another prefix
            found = find_blocks(index, sequence, num_blocks * index.block_size)
            pairs = enumerate(zip(held, found, strict=False))
            held = held[: next((at for at, (block, now) in pairs if block is not now), len(found))]
        cut = longest_hit(self.attached, sequence, held, sequence.num_tokens, hit.source)
        cut.version = hit.version
        return cut

    def are_lost(self, blocks: list[KVCacheBlock]) -> bool:
        """Whether one of them is no longer cached where it was found. blocks: the primary group's. O(blocks)."""
        if self.checkpoint is not None and not self.checkpoint.is_cached:
            return True
        for side_group, (first, held) in zip(self.attached.layout.side_groups, self.tables, strict=True):
            if _find(self.attached, side_group, blocks, first, first + len(held)) != held:
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
    attached: AttachedBlocks, sequence: Sequence, matched: list[KVCacheBlock], num_tokens: int, source: HitSource
) -> CacheHit:
    """Return the longest hit that every group can serve. Changes nothing. O(blocks looked at).

    matched: the primary group's cached blocks; the hit has these or fewer. num_tokens: the sequence's known tokens.
    """
    end, tables, _ = _longest_end(attached, matched, num_tokens)
    num_hit = end // attached.layout.block_size
    blocks = matched if num_hit == len(matched) else matched[:num_hit]
    parts = HitParts(attached, blocks, tables, len(matched))
    return CacheHit(sequence, blocks, end, sequence.num_tokens, source, parts)


def find_limit(index: PrefixIndex, matched: list[KVCacheBlock], num_tokens: int) -> tuple[int, HitLimit | None]:
    """Return how many tokens of `matched` can be hit, and why no more can. Changes nothing.

    num_tokens: how many tokens the sequence has. The reason is None if only the alignment limits the hit.
    """
    attached = index.attached
    if attached is None:
        return len(matched) * index.block_size, None
    end, _, limit = _longest_end(attached, matched, num_tokens)
    if limit is None:
        return end, None
    if isinstance(limit, _NoState):
        layout, size = attached.layout, index.block_size
        state = layout.state
        assert state is not None, "no group keeps a state"
        ends = range(limit.end, limit.first, -layout.alignment) if index.needs_digests else range(0)
        gone = [removal_key(state, matched[place // size - 1].block_hash or b"") for place in ends]
        return end, HitLimit(state, layout.groups[state].label, limit.first, limit.end, gone, is_state=True)
    group, first = limit.side_group, limit.number * limit.side_group.block_size
    position, column = group.home(limit.number)
    keys: list[bytes] = []
    if index.needs_digests:
        keys.append(removal_key(group.group, attached.name(matched[position], group, column)))
    return end, HitLimit(group.group, group.kind.label, first, first + group.block_size, keys, is_state=False)


def _longest_end(
    attached: AttachedBlocks, matched: list[KVCacheBlock], num_tokens: int
) -> tuple[int, Tables, _Limit | _NoState | None]:
    """Return how many tokens the longest hit has, its tables, and what first limited it (None: nothing).

    matched: the primary group's blocks. num_tokens: the sequence's known tokens.
    """
    size, alignment = attached.layout.block_size, attached.layout.alignment
    end = len(matched) * size // alignment * alignment
    limit: _Limit | _NoState | None = None
    checkpoints = attached.checkpoints
    if checkpoints is not None or attached.layout.has_gaps:
        end = min(end, (num_tokens - 1) // alignment * alignment)
    while True:
        if checkpoints is not None:
            with_state = checkpoints.num_up_to_last(matched, end // size) * size
            if with_state < end:
                limit = limit or _NoState(with_state, end)
                end = with_state
        tables: Tables = []
        for side_group in attached.layout.side_groups:
            first, last = side_group.kind.needed_blocks(end, num_tokens)
            found: list[KVCacheBlock | None]
            if not side_group.kind.is_cached:
                found = []
            elif side_group.block_size != size:
                found = _find(attached, side_group, matched, first, last)
            elif last > first and attached.at(matched[last - 1], side_group.first_column) is None:
                first, found = last - 1, [None]  # so that stretches without attached blocks cost O(1) a block
            else:
                found = attached.stretch(matched, side_group.first_column, first, last)
            if None in found:
                missing = first + max([i for i, block in enumerate(found) if block is None])
                limit = limit or _Limit(side_group, missing)
                end = missing * side_group.block_size // alignment * alignment
                break
            tables.append((first, found))  # type: ignore[arg-type]  # none of them is None
        if len(tables) == len(attached.layout.side_groups):
            return end, tables, limit


def _find(
    attached: AttachedBlocks, side_group: SideGroup, matched: list[KVCacheBlock], first: int, end: int
) -> list[KVCacheBlock | None]:
    """Return a group's blocks first to end - 1 of a prefix, None for those that aren't cached. O(end - first)."""
    homes = [side_group.home(number) for number in range(first, end)]
    return [attached.at(matched[position], column) for position, column in homes]
