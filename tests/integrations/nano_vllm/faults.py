"""Block managers with a fault each, which the tests must notice: what they compare isn't nothing."""

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
    """The last block of a prompt too, of which nothing is left to compute then."""

    def _look_up(self, seq):
        own = Sequence(seq.seq_id, seq.token_ids)
        self._asked = seq, own, self.manager.get_computed_blocks(own)
        return self._asked[1:]


class CachesTooEarly(KVBlocksBlockManager):
    """What is about to be computed, where a prompt may read only what is."""

    def allocate(self, seq, num_cached_blocks):
        super().allocate(seq, num_cached_blocks)
        self.manager.cache_blocks(self._sequences[seq.seq_id], seq.num_tokens)


class CachesABlockMore(KVBlocksBlockManager):
    """The block that isn't full yet, as if the step had filled it."""

    def hash_blocks(self, seq):
        super().hash_blocks(seq)
        own = self._sequences[seq.seq_id]
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        self.manager.cache_blocks(own, min(own.num_computed_tokens, end + self.block_size))


class CachesChunksToCome(KVBlocksEarlyBlockManager):
    """All of a prompt, of which only a chunk belongs to the step."""

    def can_allocate(self, seq):
        for other in self._prefills.values():
            self.manager.cache_blocks(self._sequences[other.seq_id], other.num_tokens)
        return super().can_allocate(seq)


class ForgetsWhatItAppended(KVBlocksBlockManager):
    """A block that decoding fills is never cached."""

    def hash_blocks(self, seq):
        if seq.num_scheduled_tokens > 1:
            super().hash_blocks(seq)


class RoomForOneMore(KVBlocksBlockManager):
    def can_append(self, seq):
        return seq.num_tokens % self.block_size != 1 or self.manager.num_free_blocks >= 2


FAULTS = (ForgetsToFree, FindsOneBlockMore, CachesTooEarly, ForgetsWhatItAppended, RoomForOneMore)
