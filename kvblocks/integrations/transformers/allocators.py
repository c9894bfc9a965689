"""transformers' cache allocators, made to use kvblocks' block tables. For transformers 5.18 and newer.

transformers' tensor is divided into sectors, a sector into blocks of one kind of attention, and a block into one page
of `tokens_per_page` tokens per layer. If all layers have the same kind of attention, a kvblocks block is one of
transformers' blocks. Otherwise it is a sector, which then holds several pages of tokens (`Geometry`). Sectors 0 and 1
are for transformers' padding; kvblocks' ids begin after them.

The tensors, their views and `update` stay as they are.
"""

from typing import Any

from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from kvblocks import Group, kind_of_layers
from kvblocks.integrations.transformers.records import count_needed_blocks
from kvblocks.integrations.transformers.rows import FullRows, Geometry, Rows, SlidingRows


def plan_groups(cache: Any) -> tuple[list[Group], list[Geometry], int]:
    """Return kvblocks' groups for a PagedAttentionCache's allocators, with their geometries and the first block id."""
    allocators = list(cache.cache_allocators.values())
    is_mixed = len(allocators) > 1
    pages = [allocator.blocks_per_sector if is_mixed else 1 for allocator in allocators]
    used = [number - number % min(pages) for number in pages]
    groups: list[Group] = []
    geometries: list[Geometry] = []
    for number, allocator in enumerate(allocators):
        block_size = allocator.tokens_per_page * used[number]
        window = getattr(allocator, "sliding_window", None)
        groups.append(kind_of_layers(block_size, window))
        geometries.append(Geometry(number, pages[number], used[number]))
    return groups, geometries, 2 if is_mixed else 2 * allocators[0].blocks_per_sector


class OnKVBlocks(Rows):
    """The base of both allocators, which read kvblocks' tables and keep no lists of their own."""

    __slots__ = ()

    kv_is_first: bool

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Return how many kvblocks blocks are needed in all groups. The first allocator answers for all of them."""
        if not self.kv_is_first:
            return 0
        return count_needed_blocks(self.kv_manager, self.kv_records, request_id, past_length + query_length)

    def pairs_to_copy(self, source: int, destination: int) -> tuple[list[int], list[int]]:
        """Return the ids of transformers' blocks to copy when one of kvblocks' blocks is copied."""
        num_pages = self.kv_geometry.num_pages
        return (
            list(range(source * num_pages, (source + 1) * num_pages)),
            list(range(destination * num_pages, (destination + 1) * num_pages)),
        )


class KVBlocksFullAllocator(FullAttentionCacheAllocator, OnKVBlocks, FullRows):
    """The allocator for full attention, on kvblocks."""

    needs_new_blocks = OnKVBlocks.needs_new_blocks
    get_read_indices = FullRows.get_read_indices
    get_write_indices = FullRows.get_write_indices
    fill_block_table = FullRows.fill_block_table


class KVBlocksSlidingAllocator(SlidingAttentionCacheAllocator, OnKVBlocks, SlidingRows):
    """The allocator for sliding windows, on kvblocks."""

    needs_new_blocks = OnKVBlocks.needs_new_blocks
    get_read_indices = SlidingRows.get_read_indices
    get_write_indices = SlidingRows.get_write_indices


OURS = {"full_attention": KVBlocksFullAllocator, "sliding_attention": KVBlocksSlidingAllocator}
"""The classes that replace transformers' allocators, by attention type."""
