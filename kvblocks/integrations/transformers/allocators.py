"""transformers' cache allocators with kvblocks' block tables: where a token's keys and values lie in the tensors.

transformers' tensor is cut into sectors, a sector into blocks of one kind of attention, and a block into a page of
`tokens_per_page` tokens for each layer. kvblocks' block is one of transformers' blocks where all layers attend alike,
and a sector where they don't, which then holds several pages of tokens (`Geometry`). Sectors 0 and 1 are
transformers' own, for padding; kvblocks' ids begin behind them.

The tensors, their views and `update` stay as they are. transformers keeps a sliding window in a ring; here it has
a table like the others, in which a token stays where it was written until its block has left the window. So
prefixes can be found again in sliding layers too.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from kvblocks import FullAttention, Group, KVCacheManager, SlidingWindow
from kvblocks.integrations.transformers.records import Records


@dataclass(frozen=True)
class Geometry:
    """How kvblocks' blocks lie in transformers' tensor, for one kind of attention.

    group: its number with kvblocks. num_pages: transformers' blocks that one of kvblocks' has, and how many of
    them hold tokens: num_used_pages, since of two groups' block sizes one has to divide the other.
    """

    group: int
    num_pages: int
    num_used_pages: int


def plan_groups(cache: Any) -> tuple[list[Group], list[Geometry], int]:
    """Return kvblocks' groups for the allocators of a PagedAttentionCache, their geometries, and the first block id."""
    allocators = list(cache.cache_allocators.values())
    is_mixed = len(allocators) > 1
    pages = [allocator.blocks_per_sector if is_mixed else 1 for allocator in allocators]
    used = [number - number % min(pages) for number in pages]
    groups: list[Group] = []
    geometries: list[Geometry] = []
    for number, allocator in enumerate(allocators):
        block_size = allocator.tokens_per_page * used[number]
        window = getattr(allocator, "sliding_window", None)
        groups.append(FullAttention(block_size) if window is None else SlidingWindow(block_size, window))
        geometries.append(Geometry(number, pages[number], used[number]))
    return groups, geometries, 2 if is_mixed else 2 * allocators[0].blocks_per_sector


class OnKVBlocks:
    """What both kinds of allocator ask kvblocks' tables for, in place of lists of their own."""

    __slots__ = ()  # and it comes behind transformers' class, so that an allocator that exists can become one of ours

    kv_manager: KVCacheManager
    kv_records: Records
    kv_geometry: Geometry
    kv_is_first: bool
    tokens_per_page: int
    block_physical_stride: int

    def physical_indices(self, request_id: str, start: int, end: int) -> list[int]:
        """Return the rows of the tensors that hold tokens `start` to `end` of a request. O(tokens)."""
        ids = self.kv_records[request_id].sequence.group_block_ids(self.kv_geometry.group)
        num_pages, num_used, size = self.kv_geometry.num_pages, self.kv_geometry.num_used_pages, self.tokens_per_page
        stride = self.block_physical_stride
        rows: list[int] = []
        while start < end:
            page, offset = divmod(start, size)
            index, inside = divmod(page, num_used)
            row = (ids[index] * num_pages + inside) * stride + offset
            length = min(size - offset, end - start)
            rows.extend(range(row, row + length))
            start += length
        return rows

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Return how many of kvblocks' blocks it takes, of all groups together; the first allocator tells for all."""
        if not self.kv_is_first:
            return 0
        record = self.kv_records.get(request_id)
        total = past_length + query_length
        if record is None:
            return sum(group.num_blocks(total, total) for group in self.kv_manager.groups)
        return self.kv_manager.get_num_blocks_to_allocate(record.sequence, total)

    def pairs_to_copy(self, source: int, destination: int) -> tuple[list[int], list[int]]:
        """Return transformers' block ids for a copy of one of kvblocks' blocks."""
        num_pages = self.kv_geometry.num_pages
        return (
            list(range(source * num_pages, (source + 1) * num_pages)),
            list(range(destination * num_pages, (destination + 1) * num_pages)),
        )


class KVBlocksFullAllocator(FullAttentionCacheAllocator, OnKVBlocks):
    """Full attention: all of a request's past is read."""

    needs_new_blocks = OnKVBlocks.needs_new_blocks

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the rows of all tokens, those that the step writes first included."""
        return self.physical_indices(request_id, 0, past_length + query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the rows of the step's tokens."""
        return self.physical_indices(request_id, past_length, past_length + query_length)

    def fill_block_table(
        self,
        request_id: str,
        past_length: int,  # noqa: ARG002  # transformers' own signature
        query_length: int,  # noqa: ARG002
        block_table: torch.Tensor,
    ) -> None:
        """Fill a row of the table that kernels read. Only where all layers attend alike: then ids are the same."""
        ids = self.kv_records[request_id].sequence.group_block_ids(self.kv_geometry.group)
        pages_stride = self.block_physical_stride // self.tokens_per_page
        entries = torch.tensor(ids, dtype=block_table.dtype) * pages_stride
        block_table[: len(ids)].copy_(entries, non_blocking=True)


class KVBlocksSlidingAllocator(SlidingAttentionCacheAllocator, OnKVBlocks):
    """A sliding window: what it sees of the past is read, then the step's tokens are put behind it and written."""

    sliding_window: int
    sentinel_index: int
    needs_new_blocks = OnKVBlocks.needs_new_blocks

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the rows of what the window sees of the past, and a sentinel for each of the step's tokens."""
        first = max(0, past_length - self.sliding_window + 1)
        return self.physical_indices(request_id, first, past_length) + [self.sentinel_index] * query_length

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the rows of the step's tokens: all have slots of their own."""
        return self.physical_indices(request_id, past_length, past_length + query_length)


OURS = {"full_attention": KVBlocksFullAllocator, "sliding_attention": KVBlocksSlidingAllocator}
"""By the name of an attention type, what its allocator becomes."""
