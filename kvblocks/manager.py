"""The facade that engines call: sequences in, block tables out.

A step of an engine looks up each new sequence (`get_computed_blocks`), makes room for what it will compute
(`allocate_slots`, `append_slots`), runs the model over the block tables, and frees what has finished. A block is
cached as soon as it is allocated full, before its KV is computed, so that a later sequence of the same step hits it;
that is sound for engines that store a step's keys and values, layer by layer, before they attend. `abort` is for the
step that died.

Every call that raises, or returns None because the pool can't serve it, has changed nothing.

A manager has one owner at a time: it takes no lock, and calls from several threads at once are an error of the
caller's. The calls' names are those of vLLM v1's KVCacheManager.
"""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from typing import SupportsIndex

from kvblocks.arguments import Text, check_count
from kvblocks.block import KVCacheBlock
from kvblocks.cache_hit import CacheHit
from kvblocks.errors import InvalidArgumentError, SequenceStateError
from kvblocks.events import CacheEvent
from kvblocks.hashing import HashFunction, get_hash_function
from kvblocks.pool import BlockPool
from kvblocks.prefix_index import PrefixIndex
from kvblocks.registration import check_hit, find_blocks, forget_unwritten
from kvblocks.sequence import Sequence
from kvblocks.slots import SlotAllocator
from kvblocks.stats import CacheStats
from kvblocks.tokens import TokenIds, pack_tokens


class KVCacheManager:
    """Manages a pool of `num_blocks` blocks of `block_size` tokens for one group of full-attention layers.

    hash_algorithm: "xxh3_128", "sha256" or a callable bytes -> bytes; names blocks to the outside, never decides a hit.
    enable_caching: whether prefixes are reused. enable_events: whether changes of the cached set are recorded for
    `take_events`; then take them regularly, since they are kept until taken. debug: run `check()` after every change.

    Raises InvalidArgumentError. O(num_blocks).
    """

    def __init__(
        self,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex = 16,
        *,
        hash_algorithm: Text | HashFunction = "xxh3_128",
        enable_caching: bool = True,
        enable_events: bool = False,
        debug: bool = False,
    ) -> None:
        self.block_size = check_count("block_size", block_size, 1)
        self._last_place = 0 if debug else self.block_size - 1  # when debugging, every append goes the long way
        self.enable_caching = enable_caching
        self._index = PrefixIndex(self.block_size, get_hash_function(hash_algorithm), enable_events=enable_events)
        self._pool = BlockPool(num_blocks, self._index)
        self._slots = SlotAllocator(self._pool)
        self._sequences: dict[Hashable, Sequence] = {}
        self._debug = debug
        self._num_queries = self._num_hits = self._num_queried_tokens = self._num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool. O(1)."""
        return len(self._pool.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, those with cached prefixes included. O(1)."""
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the pool that sequences hold, 0.0 to 1.0. O(1)."""
        return 1.0 - self._pool.num_free_blocks / len(self._pool.blocks)

    @property
    def stats(self) -> CacheStats:
        """Counters since the manager was made. O(1)."""
        return CacheStats(
            num_queries=self._num_queries,
            num_hits=self._num_hits,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_taken_blocks=self._slots.num_taken_blocks,
            num_evicted_blocks=self._pool.num_evicted_blocks,
            num_blocks=len(self._pool.blocks),
            num_free_blocks=self._pool.num_free_blocks,
            num_cached_blocks=self._index.num_cached_blocks,
        )

    def get_computed_blocks(self, sequence: Sequence) -> CacheHit:
        """Return the longest cached prefix of a sequence that isn't allocated. Changes nothing.

        Looks at all known tokens, so a sequence that was freed hits the blocks of its generated tokens too. The hit is
        empty when caching is off. Raises SequenceStateError when the sequence holds blocks. One dict lookup and one
        memcmp for each run of blocks that were cached together.
        """
        if sequence.owner is not None:
            raise SequenceStateError(f"get_computed_blocks: expected a sequence without blocks, got {sequence}")
        blocks = find_blocks(self._index, sequence) if self.enable_caching else []
        return CacheHit(sequence, blocks, len(blocks) * self.block_size, self._index)

    def allocate_slots(
        self, sequence: Sequence, num_new_tokens: SupportsIndex | None = None, *, hit: CacheHit | None = None
    ) -> list[KVCacheBlock] | None:
        """Make room for the next `num_new_tokens` known tokens (None: all the rest) and cache the blocks that get full.

        For a sequence without blocks this is the start, and `hit` is what `get_computed_blocks` found for it (None:
        use nothing of the cache); the tokens are those after the hit's. For one that has some it is the next chunk,
        and there is no hit. Returns the new blocks, perhaps none; or None, with nothing changed, when the pool can't
        serve it.

        Raises SequenceStateError (another manager's, an id in use, a hit for a sequence that has blocks), StaleHitError
        (the hit's blocks have been evicted since), InvalidArgumentError (no tokens left, or fewer than asked for).
        O(hit blocks + new blocks).
        """
        is_start = sequence.owner is None
        start = self._check_start(sequence, hit) if is_start else self._check_continued(sequence, hit)
        num_left = sequence.num_tokens - start
        if not num_left:
            raise InvalidArgumentError(f"allocate_slots: expected tokens without slots, got {sequence} with none left")
        if num_new_tokens is None:
            end = sequence.num_tokens
        else:
            end = start + check_count("num_new_tokens", num_new_tokens, 1, num_left)
        blocks = self._start(sequence, end, hit) if is_start else self._slots.grow(sequence, end)
        self._check_if_debugging()
        return blocks

    def append_slots(self, sequence: Sequence, token_ids: TokenIds) -> list[KVCacheBlock] | None:
        """Add decoded tokens and make room for them, in reserved slots first. Blocks that get full are cached.

        token_ids: one or several accepted tokens, in any form that `Sequence` takes. Returns the new blocks, perhaps
        none; or None, with nothing changed and the tokens not added, when the pool can't serve it.

        Raises SequenceStateError (not this manager's, or tokens without slots are left) and InvalidTokensError. O(1) a
        token, and O(block_size) for one that fills a block.
        """
        num_tokens = sequence.num_tokens
        if (
            0 < num_tokens % self.block_size < self._last_place
            and sequence.num_computed_tokens == num_tokens
            and sequence.owner is self
            and type(token_ids) is list
            and len(token_ids) == 1
        ):  # it fits the last block without filling it: 14 of 16 decoded tokens, and nothing else changes
            try:
                sequence.tokens.append(token_ids[0])  # type: ignore[union-attr]  # a view has no append
            except (AttributeError, BufferError, TypeError, OverflowError):
                pass  # the long way copes with it, or says what is wrong
            else:
                sequence.num_tokens = sequence.num_computed_tokens = num_tokens + 1
                return []
        if sequence.owner is not self or sequence.num_computed_tokens != num_tokens:
            self._check_appendable(sequence, "append_slots")
        blocks = self._slots.append(sequence, pack_tokens(token_ids))
        self._check_if_debugging()
        return blocks

    def append_step(self, sequences: Items[Sequence], token_ids: TokenIds) -> list[tuple[int, int]] | None:
        """Add one decoded token to each of `sequences` and make room for it: a whole decode step in one call.

        token_ids: as many as sequences. Returns (place in `sequences`, block id) for each sequence that got a new
        block, the last of its table: all that changed in the step's block tables. None, with nothing changed for any of
        them, when the pool can't serve all.

        Raises SequenceStateError, InvalidTokensError and, for repeated sequences or too few or many tokens,
        InvalidArgumentError. O(sequences).
        """
        if not sequences and not list(token_ids):
            return []
        tokens = pack_tokens(token_ids)
        if not len(set(sequences)) == len(sequences) == len(tokens):
            got = f"{len(sequences)} sequences, {len(set(sequences))} of them different, and {len(tokens)} tokens"
            raise InvalidArgumentError(f"append_step: expected different sequences and a token for each, got {got}")
        at_edge, block_size, last_place = [], self.block_size, self.block_size - 1
        for i, sequence in enumerate(sequences):
            num_tokens = sequence.num_tokens
            if sequence.owner is not self or sequence.num_computed_tokens != num_tokens:
                self._check_appendable(sequence, "append_step")
            if not 0 < num_tokens % block_size < last_place:
                at_edge.append(i)
        grown = self._slots.append_step(sequences, tokens, at_edge)
        self._check_if_debugging()
        return grown

    def reserve_slots(self, sequence: Sequence, num_tokens: SupportsIndex) -> list[KVCacheBlock] | None:
        """Make room for `num_tokens` more tokens than are known, such as drafts. Nothing of them is cached.

        `append_slots` fills the room. Returns the new blocks, perhaps none; or None, with nothing changed, when the
        pool can't serve it. Raises SequenceStateError and InvalidArgumentError. O(new blocks).
        """
        self._check_owned(sequence, "reserve_slots")
        end = sequence.num_tokens + check_count("num_tokens", num_tokens, 0)
        num_missing = self._slots.num_missing_blocks(sequence, end)
        if num_missing > self._pool.num_free_blocks:
            return None
        blocks = self._slots.take(num_missing)
        sequence.blocks += blocks
        self._check_if_debugging()
        return blocks

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back, last first. What is cached of it stays so until the blocks are reused.

        All that it was given slots for must have been computed. A token that was appended last and that no step has
        computed must not stay cached: then call `abort` with num_tokens - 1. The sequence keeps its tokens and can be
        allocated again. Raises SequenceStateError when it isn't this manager's or holds no blocks (a double free).
        O(blocks).
        """
        self._check_owned(sequence, "free")
        self._pool.release(sequence.blocks)
        del self._sequences[sequence.sequence_id]
        sequence.reset_blocks()
        self._check_if_debugging()

    def abort(self, sequence: Sequence, num_computed_tokens: SupportsIndex) -> None:
        """Free a sequence of a step that died; of its tokens, the first `num_computed_tokens` have their KV written.

        What it caches beyond them is cached no more, nor is anything chained to that. Abort every sequence of the
        step, those that may have hit such a block included: they keep it in their tables until then. Raises
        SequenceStateError, InvalidArgumentError. O(blocks).
        """
        self._check_owned(sequence, "abort")
        written = check_count("num_computed_tokens", num_computed_tokens, 0, sequence.num_computed_tokens)
        forget_unwritten(self._index, sequence, written)
        self.free(sequence)

    def reset_prefix_cache(self) -> None:
        """Stop caching everything, at any time: no block cached before is hit again. After a change of weights, say.

        Sequences go on; nothing of theirs, which is of before the reset, is cached until they are freed and allocated
        again. O(1) but for giving memory back.
        """
        self._index.clear()
        self._check_if_debugging()

    def take_events(self) -> list[CacheEvent]:
        """Return the changes of the cached set since the last call, oldest first, and forget them. O(1).

        Raises InvalidArgumentError unless the manager was made with enable_events=True.
        """
        return self._index.take_events()

    def free_block_ids(self) -> list[int]:
        """Return the ids of the free blocks, next to be taken first. O(free blocks)."""
        return self._pool.free_block_ids()

    def check(self) -> None:
        """Raise AssertionError unless all invariants of docs/design.md hold (never under python -O). O(pool)."""
        self._pool.check(sequence.blocks for sequence in self._sequences.values())
        for sequence_id, sequence in self._sequences.items():
            assert sequence.owner is self and sequence.sequence_id == sequence_id, f"{sequence}: not under its own id"
            sequence.check(self.block_size)

    def _check_start(self, sequence: Sequence, hit: CacheHit | None) -> int:
        if sequence.sequence_id in self._sequences:
            raise SequenceStateError(f"allocate_slots: expected another sequence_id than {sequence}'s, which is in use")
        if hit is None:
            return 0
        check_hit(self._index, sequence, hit)
        return hit.num_tokens

    def _check_continued(self, sequence: Sequence, hit: CacheHit | None) -> int:
        self._check_owned(sequence, "allocate_slots")
        if hit is not None:
            raise SequenceStateError(f"allocate_slots: expected no hit, since {sequence} has blocks; got {hit}")
        return sequence.num_computed_tokens

    def _check_owned(self, sequence: Sequence, call: str) -> None:
        if sequence.owner is not self or self._sequences.get(sequence.sequence_id) is not sequence:
            raise SequenceStateError(f"{call}: expected a sequence allocated here, got {sequence.describe_for(self)}")

    def _check_appendable(self, sequence: Sequence, call: str) -> None:
        self._check_owned(sequence, call)
        if sequence.num_computed_tokens != sequence.num_tokens:
            got = f"{sequence.num_computed_tokens} slots for {sequence}"
            raise SequenceStateError(f"{call}: expected slots for all tokens, got {got}")

    def _start(self, sequence: Sequence, end: int, hit: CacheHit | None) -> list[KVCacheBlock] | None:
        epoch = self._index.epoch if self.enable_caching else None
        blocks = self._slots.start(sequence, epoch, end, hit.blocks if hit is not None else [])
        if blocks is None:
            return None
        sequence.owner = self
        self._sequences[sequence.sequence_id] = sequence
        self._num_queries += 1
        self._num_queried_tokens += sequence.num_tokens
        if hit is not None and hit.blocks:
            sequence.num_readonly_tokens = hit.num_readonly_tokens
            self._num_hits += 1
            self._num_hit_tokens += hit.num_tokens
        return blocks

    def _check_if_debugging(self) -> None:
        if self._debug:
            self.check()
