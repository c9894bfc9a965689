"""Where a token's keys and values are in transformers' tensors, by kvblocks' block tables.

The allocator of a kind of attention asks here for the rows of a request's tokens. transformers keeps a sliding window
in a ring buffer. Here the window has a block table like the others: a token stays where it was written until its block
has left the window. So prefixes can also be hit in sliding layers.
"""

from dataclasses import dataclass

import torch

from kvblocks import KVCacheManager
from kvblocks.integrations.transformers.records import Records


@dataclass(frozen=True)
class Geometry:
    """Where kvblocks' blocks are in transformers' tensor, for one kind of attention or one group of layers.

    group: its number in kvblocks. num_pages: how many of transformers' blocks make a kvblocks block. num_used_pages:
    how many of those hold tokens. Some may be unused, since block sizes of groups must divide each other.
    """

    group: int
    num_pages: int = 1
    num_used_pages: int = 1


class Rows:
    """The base of both kinds of attention: reads kvblocks' tables."""

    __slots__ = ()  # so that `__class__` of an existing allocator can be set to a class with this second base

    kv_manager: KVCacheManager
    kv_records: Records
    kv_geometry: Geometry
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

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the rows of the step's tokens, each of which has a slot of its own."""
        return self.physical_indices(request_id, past_length, past_length + query_length)


class FullRows(Rows):
    """Full attention, which reads all of a request's past."""

    __slots__ = ()

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the rows of all tokens, including the step's own, which are written first."""
        return self.physical_indices(request_id, 0, past_length + query_length)

    def fill_block_table(
        self,
        request_id: str,
        past_length: int,  # noqa: ARG002  # transformers' own signature
        query_length: int,  # noqa: ARG002
        block_table: torch.Tensor,
    ) -> None:
        """Fill a row of the table that kernels read.

        Used only if all layers attend alike, since only then are ids equal.
        """
        ids = self.kv_records[request_id].sequence.group_block_ids(self.kv_geometry.group)
        pages_stride = self.block_physical_stride // self.tokens_per_page
        entries = torch.tensor(ids, dtype=block_table.dtype) * pages_stride
        block_table[: len(ids)].copy_(entries, non_blocking=True)


class SlidingRows(Rows):
    """A sliding window: first the visible part of the past is read, then the step's tokens are added and written."""

    __slots__ = ()

    sliding_window: int
    sentinel_index: int

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the rows of the past that the window sees, and a sentinel for each of the step's tokens."""
        first = max(0, past_length - self.sliding_window + 1)
        return self.physical_indices(request_id, first, past_length) + [self.sentinel_index] * query_length
