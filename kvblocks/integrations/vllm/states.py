"""Caching the states of recurrent layers, which vLLM calls `mamba_cache_mode="align"`.

A request's state is in the last block of its table, and moves to the next block as the request goes on. Where a chunk
ended at a block's last token, that block keeps its state. vLLM's scheduler ends chunks there.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

from kvblocks import CacheHit, Group, KVCacheBlock, Sequence

Table = Items[KVCacheBlock | None]


class Before(NamedTuple):
    """What a sequence had before a call: its cached blocks, and the entries of its state tables."""

    num_cached_blocks: int
    lengths: list[int]


class CachedStates:
    """What a manager has to know about states. groups: the numbers of the groups that have states."""

    def __init__(self, groups: Items[Group]) -> None:
        self.groups = [number for number, group in enumerate(groups) if group.has_gaps]
        self._alignment = max(group.block_size for group in groups if group.has_tokens)
        self._of_step: set[bytes] = set()  # the names of the prefixes behind which this step's states are

    def boundary(self, hit: CacheHit, most: int) -> int:
        """Return where the tokens of a lookup begin to differ from cached ones, if that is after the hit; otherwise 0.

        most: the most tokens of a hit. The scheduler ends a chunk at the boundary, so that later requests find a state.
        """
        matched: int = min(getattr(hit, "num_matched_tokens", 0), most) // self._alignment * self._alignment
        return matched if matched > hit.num_tokens else 0

    def before(self, sequence: Sequence) -> Before:
        """Return what a sequence has now, to compare with after a call that continues it."""
        return Before(sequence.num_cached_blocks, [len(sequence.group_block_ids(group)) for group in self.groups])

    def note_step(self, sequence: Sequence, before: Before | None) -> None:
        """Note the states that this step computes and that others can find. before: None if the sequence starts."""
        first = sequence.num_readonly_tokens // self._alignment if before is None else before.num_cached_blocks
        if sequence.num_cached_blocks > first:
            table = sequence.group_blocks(self.groups[0])
            for number in range(first, sequence.num_cached_blocks):
                name = None if table[number] is None else sequence.blocks[number].block_hash
                if name is not None:
                    self._of_step.add(name)

    def is_of_step(self, hit: CacheHit | None) -> bool:
        """Whether a hit needs a state that this step computes. A request with such a hit starts in a later step."""
        return hit is not None and bool(self._of_step) and hit.blocks[-1].block_hash in self._of_step

    def new_step_starts(self) -> None:
        """Note that a step begins."""
        self._of_step.clear()

    def with_gaps(self, sequence: Sequence, tables: tuple[Table, ...], before: Before) -> tuple[Table, ...]:
        """Return the new entries of all tables. tables: the new blocks by group, without gaps."""
        more = list(tables)
        for group, length in zip(self.groups, before.lengths, strict=True):
            more[group] = sequence.group_blocks(group)[length:]
        return tuple(more)
