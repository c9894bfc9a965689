"""`Budget`: the bytes of a `PrefixCache`, and when each of its blocks was last used.

With `max_bytes`, blocks and payloads share one bound and one order of use. The order of the blocks is that of their
queue. To make a block comparable with a payload, uses are numbered: a use of a path gives its number to all of the
path's blocks.
"""

from collections.abc import Sequence as Items

from kvblocks.core.block import KVCacheBlock


class Budget:
    """At most `max_bytes` bytes. num_bytes: the bytes of all blocks. use: the number of the latest use.

    sizes, uses: for each cached block, its bytes and the number of its latest use.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.use = 0
        self.sizes: dict[KVCacheBlock, int] = {}
        self.uses: dict[KVCacheBlock, int] = {}

    def add(self, blocks: list[KVCacheBlock], block_bytes: int) -> None:
        """Count new blocks of `block_bytes` bytes each. O(blocks)."""
        self.sizes.update(dict.fromkeys(blocks, block_bytes))
        self.num_bytes += block_bytes * len(blocks)

    def note_used(self, path: Items[KVCacheBlock]) -> None:
        """Record the latest use for a path's blocks, all of which moved to the queue's end. O(blocks)."""
        self.uses.update(dict.fromkeys(path, self.use))

    def remove(self, blocks: list[KVCacheBlock]) -> int:
        """Forget blocks. Returns how many bytes they had. O(blocks)."""
        freed = 0
        for block in blocks:
            freed += self.sizes.pop(block)
            del self.uses[block]
        self.num_bytes -= freed
        return freed

    def check(self, blocks: list[KVCacheBlock], queued: list[KVCacheBlock], num_payload_bytes: int) -> None:
        """Raise AssertionError unless the bytes are within the bound and are those of `blocks`. O(blocks)."""
        assert set(blocks) == self.sizes.keys() == self.uses.keys(), "budget: other blocks"
        assert self.num_bytes == sum(self.sizes.values()), "budget: bytes"
        total = self.num_bytes + num_payload_bytes
        assert total <= self.max_bytes, f"budget: {total} bytes of {self.max_bytes}"
        uses = [self.uses[block] for block in queued]
        assert uses == sorted(uses), "budget: not in the order of use"
