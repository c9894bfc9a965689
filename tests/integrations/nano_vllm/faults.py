"""Block managers with one fault each. The tests must notice them, or they would check nothing."""

from kvblocks import Sequence
from kvblocks.integrations.nano_vllm import KVBlocksBlockManager, KVBlocksEarlyBlockManager


class ForgetsToFree(KVBlocksBlockManager):
    def deallocate(self, seq):
        own = self._sequences.pop(seq.seq_id)
        if seq.seq_id % 5:
            self.manager.free(own)
        seq.num_cached_tokens = 0
        seq.block_table.clear()


class FindsOneBlockMore(KVBlocksBlockManager):
    """Hits the last block of a prompt, too, so that nothing is left to compute."""

    def _look_up(self, seq):
        own = Sequence(seq.seq_id, seq.token_ids)
        self._asked = seq, own, self.manager.get_computed_blocks(own)
        return self._asked[1:]


class CachesTooEarly(KVBlocksBlockManager):
    """Hits blocks that are about to be computed, where a prompt may read only computed ones."""

    def allocate(self, seq, num_cached_blocks):
        super().allocate(seq, num_cached_blocks)
        self.manager.cache_blocks(self._sequences[seq.seq_id], seq.num_tokens)


class CachesABlockMore(KVBlocksBlockManager):
    """Caches the block that isn't full yet, as if the step had filled it."""

    def hash_blocks(self, seq):
        super().hash_blocks(seq)
        own = self._sequences[seq.seq_id]
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        self.manager.cache_blocks(own, min(own.num_computed_tokens, end + self.block_size))


class CachesChunksToCome(KVBlocksEarlyBlockManager):
    """Caches all of a prompt, though the step computes only a chunk."""

    def can_allocate(self, seq):
        for other in self._prefills.values():
            self.manager.cache_blocks(self._sequences[other.seq_id], other.num_tokens)
        return super().can_allocate(seq)


class ForgetsWhatItAppended(KVBlocksBlockManager):
    """Never caches a block that decoding fills."""

    def hash_blocks(self, seq):
        if seq.num_scheduled_tokens > 1:
            super().hash_blocks(seq)


class RoomForOneMore(KVBlocksBlockManager):
    def can_append(self, seq):
        return seq.num_tokens % self.block_size != 1 or self.manager.num_free_blocks >= 2


FAULTS = (ForgetsToFree, FindsOneBlockMore, CachesTooEarly, ForgetsWhatItAppended, RoomForOneMore)
