"""Slots: how a sequence gets blocks for more of its tokens, and how those that fill up become cached.

One place for the order of things that keeps a failing call harmless: first see whether the pool can serve it, then
compute what a caller's hash function may refuse to, and only then touch, take, and cache.
"""

from array import array
from collections.abc import Sequence as Items

from kvblocks.block import Epoch, KVCacheBlock
from kvblocks.pool import BlockPool
from kvblocks.registration import digests_ahead, register_full_blocks
from kvblocks.sequence import Sequence


class SlotAllocator:
    """Gives the blocks of `pool` to sequences. num_taken_blocks: how many it gave."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._index = pool.index
        self._block_size = pool.index.block_size
        self.num_taken_blocks = 0

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks the sequence lacks for `num_tokens` tokens. O(1)."""
        return max(0, -(-num_tokens // self._block_size) - len(sequence.blocks))

    def start(
        self, sequence: Sequence, epoch: Epoch | None, end: int, hit: list[KVCacheBlock]
    ) -> list[KVCacheBlock] | None:
        """Give a sequence without blocks those of `hit` and what its first `end` tokens need beyond them.

        epoch: of what cache it is; None: nothing of it is to be cached.

        Returns the new blocks; None, with nothing changed, when the pool can't serve it. O(blocks).
        """
        num_missing = max(0, self.num_missing_blocks(sequence, end) - len(hit))
        if not self._pool.can_take(num_missing, hit):
            return None
        digests = digests_ahead(self._index, sequence, epoch, hit, end)
        self._pool.touch(hit)
        sequence.epoch = epoch
        sequence.blocks += hit
        sequence.num_registered_blocks = len(hit)
        return self._fill(sequence, end, num_missing, digests)

    def grow(self, sequence: Sequence, end: int) -> list[KVCacheBlock] | None:
        """Give a sequence with blocks what its first `end` tokens need. As `start`. O(new blocks)."""
        num_missing = self.num_missing_blocks(sequence, end)
        if num_missing > self._pool.num_free_blocks:
            return None
        digests = self._digests_ahead(sequence, end)
        return self._fill(sequence, end, num_missing, digests)

    def append(self, sequence: Sequence, tokens: "array[int] | memoryview[int]") -> list[KVCacheBlock] | None:
        """Add packed tokens to a sequence all of whose tokens have slots, with slots for them. As `start`."""
        if len(tokens) == 1 and self._index.events is None:
            return self._append_one(sequence, tokens[0])
        num_before = sequence.num_tokens
        end = num_before + len(tokens)
        if self.num_missing_blocks(sequence, end) > self._pool.num_free_blocks:
            return None
        sequence.append_packed(tokens)
        try:
            return self.grow(sequence, end)
        except BaseException:
            sequence.truncate_tokens(num_before)
            raise

    def append_step(
        self, sequences: Items[Sequence], tokens: "array[int] | memoryview[int]", at_edge: list[int]
    ) -> list[tuple[int, int]] | None:
        """Add one token to each sequence, as `append`; the new blocks as (place in `sequences`, block id).

        at_edge: places of the sequences whose token is the first or the last of its block.
        """
        block_size = self._block_size
        full = [i for i in at_edge if sequences[i].num_tokens == len(sequences[i].blocks) * block_size]
        ended = [sequences[i] for i in at_edge if (sequences[i].num_tokens + 1) % block_size == 0]
        if len(full) > self._pool.num_free_blocks:
            return None
        for sequence, token in zip(sequences, tokens, strict=True):
            num_tokens = sequence.num_tokens + 1
            try:
                sequence.tokens.append(token)  # type: ignore[union-attr]  # a view has no append
                sequence.num_tokens = num_tokens
            except (AttributeError, BufferError):
                sequence.append_token(token)
            sequence.num_computed_tokens = num_tokens
        digests: list[bytearray | None] = [None] * len(ended)
        if self._index.events is not None:
            try:
                digests = [self._digests_ahead(sequence, sequence.num_tokens) for sequence in ended]
            except BaseException:
                for sequence in sequences:
                    sequence.num_computed_tokens -= 1
                    sequence.truncate_tokens(sequence.num_computed_tokens)
                raise
        blocks = self.take(len(full))
        for i, block in zip(full, blocks, strict=True):
            sequences[i].blocks.append(block)
        for sequence, ahead in zip(ended, digests, strict=True):
            register_full_blocks(self._index, sequence, ahead)
        return [(i, block.block_id) for i, block in zip(full, blocks, strict=True)]

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take new blocks from the pool, which must have them. O(num_blocks)."""
        self.num_taken_blocks += num_blocks
        return self._pool.take(num_blocks) if num_blocks else []

    def _append_one(self, sequence: Sequence, token: int) -> list[KVCacheBlock] | None:
        """`append` of one token when no event is recorded, so that nothing can fail after the first check."""
        block_size, end = self._block_size, sequence.num_tokens + 1
        blocks: list[KVCacheBlock] = []
        if end > len(sequence.blocks) * block_size:
            if not self._pool.num_free_blocks:
                return None
            blocks.append(self._pool.take_one())
            sequence.blocks += blocks
            self.num_taken_blocks += 1
        sequence.append_token(token)
        sequence.num_computed_tokens = end
        if end % block_size == 0:
            register_full_blocks(self._index, sequence, None)
        return blocks

    def _digests_ahead(self, sequence: Sequence, end: int) -> bytearray | None:
        if self._index.events is None:
            return None
        registered = sequence.blocks[: sequence.num_registered_blocks]
        return digests_ahead(self._index, sequence, sequence.epoch, registered, end)

    def _fill(self, sequence: Sequence, end: int, num_missing: int, digests: bytearray | None) -> list[KVCacheBlock]:
        blocks = self.take(num_missing)
        sequence.blocks += blocks
        sequence.num_computed_tokens = end
        register_full_blocks(self._index, sequence, digests)
        return blocks
