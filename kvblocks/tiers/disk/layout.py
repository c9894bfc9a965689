"""`Layout`: the largest size of each file in a store's folder, and where each slot begins. Also `DiskStats`."""

from dataclasses import dataclass

from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.sealing import NUM_RECORD_BYTES

PAGE = 4096  # bytes of a page of the index; slots are aligned to it
MOST_KEY_BYTES = 512  # of a block's extra keys; a block with more is not stored
MOST_WAL_BYTES = 2**20  # of the index's log between two calls of `sync`
LEAST_SLOTS = 4

_OTHER_BYTES = 2**21  # the lock, the marker, the log, and the index's first pages
_ROW_HEAD = 64  # of the index: a row's header, numbers, and its place in a page


def _pages_up(number: int) -> int:
    return -(-number // PAGE) * PAGE


@dataclass(frozen=True)
class DiskStats:
    """What a store did since it was opened. Bytes are those of payloads.

    - num_damaged_blocks: slots that didn't hold the expected block when they were read, and rows of the index that
      couldn't be used.
    - num_failed_writes: calls of `write` and `erase` that raised.
    - num_failed_syncs: calls of `sync` that raised.
    - num_synced_blocks: blocks whose bytes and rows a sync has put on the disk, so that no kill loses them.
    """

    num_written_blocks: int = 0
    num_written_bytes: int = 0
    num_read_blocks: int = 0
    num_read_bytes: int = 0
    num_damaged_blocks: int = 0
    num_failed_writes: int = 0
    num_syncs: int = 0
    num_failed_syncs: int = 0
    num_synced_blocks: int = 0


class Layout:
    """Sizes in bytes. A slot has room for a record, then for a payload; each begins at a page.

    The index is sized for its worst case: the longest identities, in pages of a B-tree that are only a third full.
    """

    def __init__(self, num_block_bytes: int, block_size: int, max_bytes: int) -> None:
        """Raises InvalidArgumentError if fewer than LEAST_SLOTS slots fit."""
        self.num_block_bytes = num_block_bytes
        self.num_token_bytes = 4 * block_size
        self.most_preimage_bytes = 8 + 32 + MOST_KEY_BYTES + self.num_token_bytes
        """The longest preimage in a record."""
        self.num_room_bytes = _pages_up(NUM_RECORD_BYTES + self.most_preimage_bytes)
        self.stride = self.num_room_bytes + _pages_up(num_block_bytes)
        row = self.most_preimage_bytes + _ROW_HEAD
        index_bytes = 3 * row if row < PAGE - _ROW_HEAD else PAGE + _pages_up(row + row // 16)
        index_bytes += index_bytes // 16  # the inner pages of the tree
        self.num_slots = max(0, max_bytes - _OTHER_BYTES) // (self.stride + 2 * index_bytes + index_bytes // 16)
        """How many slots fit, so that all files together never exceed max_bytes."""
        if self.num_slots < LEAST_SLOTS:
            least = _OTHER_BYTES + LEAST_SLOTS * (self.stride + 2 * index_bytes + index_bytes // 16)
            raise InvalidArgumentError(
                f"DiskStore: max_bytes: expected at least {least}, for {LEAST_SLOTS} slots of {self.stride} bytes and "
                f"what is kept beside them; got {max_bytes}"
            )
        self.most_index_pages = 16 + self.num_slots * index_bytes // PAGE
        """The most pages of the index, and of its log."""

    def offset(self, slot: int) -> int:
        """Return where a slot begins in the arena. O(1)."""
        return slot * self.stride
