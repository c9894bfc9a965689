"""Slots: how a sequence gets blocks for more of its tokens, and how those that fill up become cached.

One place for the order of things that keeps a failing call harmless: first see whether the pool can serve it, then
compute what a caller's hash function may refuse to, and only then touch, take, copy, and cache. From there on a change
is under way; the manager, which has more to change, says when it is over.

Copy on write: a token must not be written to a block that somebody else reads, be it another block table or the
cache. Full blocks are never written again, so this concerns only the last, partly filled block of a sequence that was
forked or truncated: it gets a block of its own in that place, and `copies` says what the engine has to copy there.
"""

from array import array

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import cache_filled_blocks, cache_full_blocks, digests_ahead
from kvblocks.core.change import CHANGING, Changeable
from kvblocks.core.epoch import Epoch
from kvblocks.core.hit import CacheHit
from kvblocks.core.pool import BlockPool
from kvblocks.core.sequence import Sequence
from kvblocks.retention.pins import Pins


class SlotAllocator:
    """Gives the blocks of `pool` to sequences, pinned ones too where `pins` gives them up.

    manager: whose it is, which that sets. num_taken_blocks: how many it gave. copies: (source, destination) block ids
    to copy, in order, since last taken. smallest_block_size: the size of the smallest blocks.
    """

    manager: Changeable

    def __init__(self, pool: BlockPool, pins: Pins) -> None:
        self._pool = pool
        self._pins = pins
        self._index = pool.index
        self._block_size = self.smallest_block_size = pool.index.block_size
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
        if not self._pool.can_take(num_missing, held) and self._pins.refuses(num_missing, held):
            return None
        digests = digests_ahead(self._index, sequence, epoch, held, len(held), end)
        sequence.owner = self.manager  # first, so that what is left half done is nobody else's to allocate
        self._pool.touch(held)
        sequence.epoch = epoch
        sequence.blocks += held
        sequence.num_cached_blocks = len(held)
        blocks = self._take(num_missing, sequence)
        sequence.blocks += blocks
        self._count(sequence, end)
        cache_full_blocks(self._index, sequence, digests)
        return blocks

    def grow(self, sequence: Sequence, end: int, num_lookahead_tokens: int) -> list[KVCacheBlock] | None:
        """Give a sequence with blocks what its first `end` tokens need. As `start`. O(new blocks)."""
        shared = self._shared_place(sequence, sequence.num_computed_tokens)
        num_missing = self._num_missing_blocks(sequence, end + num_lookahead_tokens)
        if self._lacks(num_missing + (shared is not None)):
            return None
        digests = self._digests_ahead(sequence, end)
        self.manager.change_state = CHANGING
        return self._grow(sequence, end, num_missing, shared, digests)

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[KVCacheBlock] | None:
        """Give a sequence slots for `num_tokens` more than are known. As `start`. O(new blocks)."""
        shared = self._shared_place(sequence, sequence.num_computed_tokens) if num_tokens else None
        num_missing = self._num_missing_blocks(sequence, sequence.num_tokens + num_tokens)
        if self._lacks(num_missing + (shared is not None)):
            return None
        self.manager.change_state = CHANGING
        blocks = self._add_blocks(sequence, num_missing, shared)
        if num_tokens:
            self._find_fits_below(sequence)
        return blocks

    def append(self, sequence: Sequence, tokens: "array[int] | memoryview[int]") -> list[KVCacheBlock] | None:
        """Add packed tokens to a sequence all of whose tokens have slots, with slots for them. As `start`."""
        num_before = sequence.num_tokens
        end = num_before + len(tokens)
        shared = self._shared_place(sequence, num_before)
        num_missing = self._num_missing_blocks(sequence, end)
        if self._lacks(num_missing + (shared is not None)):
            return None
        digests = self._append_tokens(sequence, tokens)
        return self._grow(sequence, end, num_missing, shared, digests)

    def append_one(self, sequence: Sequence, token: int) -> list[KVCacheBlock] | None:
        """`append` of one token to a sequence that shares no block it writes to, while changes need no names.

        O(1), and O(block_size) when it fills a block.
        """
        block_size = self._block_size
        num_tokens = len(sequence.tokens) + 1
        blocks: list[KVCacheBlock] = []
        if num_tokens > len(sequence.blocks) * block_size:
            if not self._pool.num_free_blocks and self._pins.refuses(1, []):
                return None
            sequence.append_checked(token)
            blocks = self._take_one(sequence)
            sequence.blocks += blocks
        else:
            sequence.append_checked(token)
        sequence.num_computed_tokens = num_tokens
        place = num_tokens % block_size
        if place:
            sequence.fits_below = num_tokens - place + block_size - 1  # `_find_fits_below`, without the call
        else:
            cache_filled_blocks(self._index, [sequence])
        return blocks

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies since the last call, and forget them. O(1)."""
        copies, self.copies = self.copies, []
        return copies

    def tables(self, sequence: Sequence) -> list[list[KVCacheBlock]]:
        """Return all that a sequence holds, by table. O(1)."""
        return [sequence.blocks]

    def _append_tokens(self, sequence: Sequence, tokens: "array[int] | memoryview[int]") -> bytearray | None:
        """Begin a change by adding packed tokens; returns the digests of what they fill, if changes have names.

        A hash function that raises takes the tokens back, and no change is under way.
        """
        num_before, fits_below = sequence.num_tokens, sequence.fits_below
        self.manager.change_state = CHANGING
        sequence.append_packed(tokens)
        try:
            return self._digests_ahead(sequence, sequence.num_tokens)
        except BaseException:
            sequence.truncate_tokens(num_before)
            sequence.fits_below = fits_below
            self.manager.end_change()
            raise

    def _grow(
        self, sequence: Sequence, end: int, num_missing: int, shared: int | None, digests: bytearray | None
    ) -> list[KVCacheBlock]:
        """Give a sequence what its first `end` tokens need, and cache what they fill."""
        blocks = self._add_blocks(sequence, num_missing, shared)
        self._count(sequence, end)
        cache_full_blocks(self._index, sequence, digests)
        return blocks

    def _count(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Say how many tokens are computed, of a sequence with room for them."""
        sequence.num_computed_tokens = num_computed_tokens
        self._find_fits_below(sequence)

    def _find_fits_below(self, sequence: Sequence) -> None:
        """Note how far tokens can simply be added to a sequence none of whose blocks is shared any more."""
        num_tokens = sequence.num_computed_tokens
        place = num_tokens % self.smallest_block_size
        if place and num_tokens == len(sequence.tokens):
            sequence.fits_below = num_tokens - place + self.smallest_block_size - 1

    def _num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(sequence.blocks))

    def _lacks(self, num_blocks: int) -> bool:
        return num_blocks > self._pool.num_free_blocks and self._pins.refuses(num_blocks, [])

    def _shared_place(self, sequence: Sequence, position: int) -> int | None:
        """Return the place in its table of the block that the token at `position` must not be written to.

        None when there is none; the next token then needs no such question until the sequence is forked or truncated.
        """
        if sequence.tail_owner is not None:
            return None
        place = position // self._block_size
        if position % self._block_size:
            block = sequence.blocks[place]
            if block.ref_cnt > 1 or block.is_cached:
                return place
        sequence.tail_owner = sequence.owner
        return None

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
        self._pins.extend(sequence)
        sequence.replace_block(place, block)
        sequence.num_readonly_tokens = min(sequence.num_readonly_tokens, place * self._block_size)
        sequence.tail_owner = sequence.owner
        self._pool.release_table([source])
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
            self._pins.give_up(num_blocks - num_free)

    def _take_one(self, sequence: Sequence) -> list[KVCacheBlock]:
        if not self._pool.num_free_blocks:
            return self._take(1, sequence)
        self.num_taken_blocks += 1
        return [self._pool.take_one()]

    def _digests_ahead(self, sequence: Sequence, end: int) -> bytearray | None:
        if not self._index.needs_digests:
            return None
        num_held = sequence.num_cached_blocks
        return digests_ahead(self._index, sequence, sequence.epoch, sequence.blocks, num_held, end)
