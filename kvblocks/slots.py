"""Slots: how a sequence gets blocks for more of its tokens, and how those that fill up become cached.

One place for the order of things that keeps a failing call harmless: first see whether the pool can serve it, then
compute what a caller's hash function may refuse to, and only then touch, take, copy, and cache.

Copy on write: a token must not be written to a block that somebody else reads, be it another block table or the
cache. Full blocks are never written again, so this concerns only the last, partly filled block of a sequence that was
forked or truncated: it gets a block of its own in that place, and `copies` says what the engine has to copy there.
"""

from array import array
from collections.abc import Sequence as Items

from kvblocks.block import KVCacheBlock
from kvblocks.cache_hit import CacheHit
from kvblocks.epoch import Epoch
from kvblocks.pool import BlockPool
from kvblocks.registration import digests_ahead, register_full_blocks
from kvblocks.retention import Retention
from kvblocks.sequence import Sequence


class SlotAllocator:
    """Gives the blocks of `pool` to sequences, pinned ones too where `retention` gives them up.

    num_taken_blocks: how many it gave. copies: (source, destination) block ids to copy, in order, since last taken.
    """

    def __init__(self, pool: BlockPool, retention: Retention) -> None:
        self._pool = pool
        self._retention = retention
        self._index = pool.index
        self._block_size = pool.index.block_size
        self.num_taken_blocks = 0
        self.copies: list[tuple[int, int]] = []

    def start(
        self, sequence: Sequence, epoch: Epoch | None, end: int, num_lookahead_tokens: int, hit: CacheHit | None
    ) -> list[KVCacheBlock] | None:
        """Give a sequence without blocks those of `hit` and what its first `end` tokens need beyond them.

        epoch: of what cache it is; None: nothing of it is to be cached. num_lookahead_tokens: slots behind `end`.

        Returns the new blocks; None, with nothing changed, when the pool can't serve it. O(blocks).
        """
        held = hit.blocks if hit is not None else []
        num_missing = max(0, -(-(end + num_lookahead_tokens) // self._block_size) - len(held))
        if not self._pool.can_take(num_missing, held) and self._retention.refuses(num_missing, held):
            return None
        digests = digests_ahead(self._index, sequence, epoch, held, end)
        self._pool.touch(held)
        sequence.epoch = epoch
        sequence.blocks += held
        sequence.num_registered_blocks = len(held)
        blocks = self._take(num_missing, sequence)
        sequence.blocks += blocks
        sequence.num_computed_tokens = end
        register_full_blocks(self._index, sequence, digests)
        return blocks

    def grow(self, sequence: Sequence, end: int, num_lookahead_tokens: int) -> list[KVCacheBlock] | None:
        """Give a sequence with blocks what its first `end` tokens need. As `start`. O(new blocks)."""
        shared = self._shared_place(sequence, sequence.num_computed_tokens)
        num_missing = self._num_missing_blocks(sequence, end + num_lookahead_tokens)
        if self._lacks(num_missing + (shared is not None)):
            return None
        digests = self._digests_ahead(sequence, end)
        blocks = self._add_blocks(sequence, num_missing, shared)
        sequence.num_computed_tokens = end
        register_full_blocks(self._index, sequence, digests)
        return blocks

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[KVCacheBlock] | None:
        """Give a sequence slots for `num_tokens` more than are known. As `start`. O(new blocks)."""
        shared = self._shared_place(sequence, sequence.num_computed_tokens) if num_tokens else None
        num_missing = self._num_missing_blocks(sequence, sequence.num_tokens + num_tokens)
        if self._lacks(num_missing + (shared is not None)):
            return None
        return self._add_blocks(sequence, num_missing, shared)

    def append(self, sequence: Sequence, tokens: "array[int] | memoryview[int]") -> list[KVCacheBlock] | None:
        """Add packed tokens to a sequence all of whose tokens have slots, with slots for them. As `start`."""
        num_before = sequence.num_tokens
        end = num_before + len(tokens)
        shared = self._shared_place(sequence, num_before)
        if self._lacks(self._num_missing_blocks(sequence, end) + (shared is not None)):
            return None
        sequence.append_packed(tokens)
        try:
            return self.grow(sequence, end, 0)
        except BaseException:
            sequence.truncate_tokens(num_before)
            raise

    def append_one(self, sequence: Sequence, token: int) -> list[KVCacheBlock] | None:
        """`append` of one token to a sequence that shares no block it writes to, while changes need no names.

        Raises what `Sequence.append_token` does, changing nothing. O(1), and O(block_size) when it fills a block.
        """
        num_tokens = sequence.num_tokens + 1
        blocks: list[KVCacheBlock] = []
        if num_tokens > len(sequence.blocks) * self._block_size:
            if not self._pool.num_free_blocks and self._retention.refuses(1, []):
                return None
            sequence.append_token(token)
            blocks = self._take_one(sequence)
            sequence.blocks += blocks
        else:
            sequence.append_token(token)
        sequence.num_computed_tokens = num_tokens
        if num_tokens % self._block_size == 0:
            register_full_blocks(self._index, sequence, None)
        return blocks

    def append_step(
        self, sequences: list[Sequence], tokens: list[int], at_edge: list[int], unsure: list[int]
    ) -> list[tuple[int, int, int]] | None:
        """Add one token to each sequence, as `append`; the changes of block tables as (place, position, block id).

        at_edge: places of the sequences whose token is the first or the last of its block, and of those that are
        `unsure` too: their block may be shared. num_computed_tokens counts the new tokens already; the caller takes
        that back when nothing was done.
        """
        block_size = self._block_size
        shared = self._shared_places(sequences, unsure) if unsure else {}
        growing: list[int] = []
        ended: list[Sequence] = []
        for i in at_edge:
            sequence = sequences[i]
            num_tokens = sequence.num_computed_tokens
            if num_tokens % block_size == 0:
                ended.append(sequence)
            if num_tokens > len(sequence.blocks) * block_size or (shared and i in shared):
                growing.append(i)
        if self._lacks(len(growing)):
            return None
        for sequence, token in zip(sequences, tokens):  # noqa: B905  # as long as each other; `strict` isn't compiled
            try:
                sequence.tokens.append(token)  # type: ignore[union-attr]  # a view has no append
                sequence.num_tokens = sequence.num_computed_tokens
            except (AttributeError, BufferError):
                sequence.append_token(token)
        digests: list[bytearray | None] = [None] * len(ended)
        if self._index.names_changes:
            try:
                digests = [self._digests_ahead(sequence, sequence.num_tokens) for sequence in ended]
            except BaseException:
                for sequence in sequences:
                    sequence.truncate_tokens(sequence.num_tokens - 1)
                raise
        changes = self._grow_by_one(sequences, growing, shared)
        for sequence, ahead in zip(ended, digests, strict=True):
            register_full_blocks(self._index, sequence, ahead)
        return changes

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies since the last call, and forget them. O(1)."""
        copies, self.copies = self.copies, []
        return copies

    def tables(self, sequence: Sequence) -> list[list[KVCacheBlock]]:
        """Return all that a sequence holds, by table. O(1)."""
        return [sequence.blocks]

    def _grow_by_one(
        self, sequences: Items[Sequence], growing: list[int], shared: dict[int, int]
    ) -> list[tuple[int, int, int]]:
        changes: list[tuple[int, int, int]] = []
        for i, block in zip(growing, self._take_for([sequences[i] for i in growing]), strict=True):
            sequence = sequences[i]
            position = shared.get(i, len(sequence.blocks))
            if i in shared:
                self._replace(sequence, position, block)
            else:
                sequence.blocks.append(block)
            changes.append((i, position, block.block_id))
        return changes

    def _num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(sequence.blocks))

    def _lacks(self, num_blocks: int) -> bool:
        return num_blocks > self._pool.num_free_blocks and self._retention.refuses(num_blocks, [])

    def _shared_place(self, sequence: Sequence, position: int) -> int | None:
        """Return the place in its table of the block that the token at `position` must not be written to.

        None when there is none; the next token then needs no such question until the sequence is forked or truncated.
        """
        if sequence.appender is not None:
            return None
        place = position // self._block_size
        if position % self._block_size:
            block = sequence.blocks[place]
            if block.ref_cnt > 1 or block.is_cached:
                return place
        sequence.appender = sequence.owner
        return None

    def _shared_places(self, sequences: Items[Sequence], unsure: list[int]) -> dict[int, int]:
        """`_shared_place` of sequences of a step, by their places there; the last to leave a block may keep it."""
        places: dict[int, int] = {}
        num_leaving: dict[KVCacheBlock, int] = {}
        for i in unsure:
            place = self._shared_place(sequences[i], sequences[i].num_tokens)
            if place is not None:
                block = sequences[i].blocks[place]
                if block.is_cached or num_leaving.get(block, 0) < block.ref_cnt - 1:
                    num_leaving[block] = num_leaving.get(block, 0) + 1
                    places[i] = place
        return places

    def _add_blocks(self, sequence: Sequence, num_missing: int, shared: int | None) -> list[KVCacheBlock]:
        """Take new blocks for a sequence: one for the shared place if there is one, the others for its end."""
        if shared is None:
            blocks = self._take(num_missing, sequence)
            sequence.blocks += blocks
            return blocks
        blocks = self._take(num_missing + 1, sequence)
        self._replace(sequence, shared, blocks[0])
        sequence.blocks += blocks[1:]
        return blocks

    def _replace(self, sequence: Sequence, place: int, block: KVCacheBlock) -> None:
        source = sequence.blocks[place]
        self._retention.extend(sequence)
        sequence.replace_block(place, block)
        sequence.num_readonly_tokens = min(sequence.num_readonly_tokens, place * self._block_size)
        sequence.appender = sequence.owner
        self._pool.release([source])
        self.copies.append((source.block_id, block.block_id))

    def _take(self, num_blocks: int, sequence: Sequence) -> list[KVCacheBlock]:
        """Take new blocks from the pool, which must have them, or pins that give them up. O(num_blocks)."""
        if not num_blocks:
            return []
        self.num_taken_blocks += num_blocks
        history = self._index.history
        if history is not None:
            history.num_taken_blocks, history.sequence_id = self.num_taken_blocks, sequence.sequence_id
        self._make_free(num_blocks)
        return self._pool.take(num_blocks)

    def _make_free(self, num_blocks: int) -> None:
        num_free = self._pool.num_free_blocks
        if num_blocks > num_free:
            self._retention.give_up(num_blocks - num_free)

    def _take_one(self, sequence: Sequence) -> list[KVCacheBlock]:
        if not self._pool.num_free_blocks:
            return self._take(1, sequence)
        self.num_taken_blocks += 1
        return [self._pool.take_one()]

    def _take_for(self, sequences: list[Sequence]) -> list[KVCacheBlock]:
        """Take a block for each sequence, together unless it is remembered who took what. O(sequences)."""
        if not sequences or self._index.history is None:
            return self._take(len(sequences), sequences[0]) if sequences else []
        self._make_free(len(sequences))
        return [block for sequence in sequences for block in self._take(1, sequence)]

    def _digests_ahead(self, sequence: Sequence, end: int) -> bytearray | None:
        if not self._index.names_changes:
            return None
        registered = sequence.blocks[: sequence.num_registered_blocks]
        return digests_ahead(self._index, sequence, sequence.epoch, registered, end)
