"""The calls that an engine's steps make: look up, allocate, append, reserve, free, abort.

`KVCacheManager` is this and what an engine asks between its steps. Every call that raises, or returns None because the
pool can't serve it, has changed nothing but `last_refusal`; one that is left half done is known, see `change`.
"""

from collections.abc import Sequence as Items
from typing import Any, SupportsIndex

from kvblocks.arguments import Given, asked_once, check_count, check_integer, listed
from kvblocks.block import KVCacheBlock
from kvblocks.cache_hit import CacheHit, check_hit
from kvblocks.change import CHANGING, DEBUGGING, IDLE
from kvblocks.companions import GroupIndex
from kvblocks.errors import InvalidArgumentError, SequenceStateError
from kvblocks.group_lookup import find_hit
from kvblocks.group_slots import GroupSlots
from kvblocks.in_flight import InFlight
from kvblocks.ownership import SequenceOwner, as_sequence, check_no_step, check_start, check_step, not_a_sequence
from kvblocks.pool import BlockPool
from kvblocks.registration import forget_unwritten
from kvblocks.retention import Retention
from kvblocks.sequence import Sequence
from kvblocks.steps import StepAllocator
from kvblocks.tokens import MAX_TOKEN_ID, TokenIds, pack_tokens

_NO_PLAIN_TOKEN = (AttributeError, BufferError, TypeError, OverflowError, ValueError)
"""What adding a token the short way raises where the long way may still take it, or knows what is wrong with it."""

Step = tuple[list[Sequence], dict[Sequence, int]]
"""The sequences of a step, and their places in it."""


class SequenceManager(SequenceOwner):
    """Gives the blocks of `pool` to sequences and takes them back. A part of `KVCacheManager`; not made by itself."""

    def __init__(
        self, pool: BlockPool, retention: Retention, slots: StepAllocator, *, enable_caching: bool, debug: bool
    ) -> None:
        super().__init__(debug=debug)
        self.block_size = pool.index.block_size
        self.enable_caching = enable_caching
        self._pool = pool
        self._index = pool.index
        self._retention = retention
        self._slots = slots
        self._group_slots = slots if isinstance(slots, GroupSlots) else None
        self._group_index = pool.index if isinstance(pool.index, GroupIndex) else None
        self._in_flight = InFlight(pool.index, self)
        slots.manager = self
        # Until one of its sequences is freed: the next batch is mostly the same.
        self._last_step: Step = ([], {})
        self._largest_size = self.block_size if self._group_index is None else self._group_index.layout.hit_size
        # When debugging or naming changes, a token that begins or fills a block goes the long way.
        self._fills_quickly = not debug and not self._index.names_changes and self._group_index is None
        self._num_queries = self._num_hits = self._num_queried_tokens = self._num_hit_tokens = 0

    def get_computed_blocks(self, sequence: Given[Sequence]) -> CacheHit:
        """Return the longest cached prefix of a sequence that isn't allocated. Changes nothing.

        Looks at all known tokens, so a sequence that was freed hits the blocks of its generated tokens too. The hit is
        empty when caching is off. Raises SequenceStateError when the sequence holds blocks, InvalidArgumentError. One
        dict lookup and one memcmp for each run of blocks that were cached together; O(blocks) where sequences parted
        at every block.
        """
        if type(sequence) is not Sequence:  # what is like one would do until it is to change
            as_sequence("get_computed_blocks", sequence)
        own: Sequence = sequence  # type: ignore[assignment]
        if self.change_state or own.owner is not None:
            self.check_whole()
            if own.owner is not None:
                raise SequenceStateError(f"get_computed_blocks: expected a sequence without blocks, got {own}")
        if self._group_index is not None:
            return find_hit(self._group_index, own, self._in_flight, enable_caching=self.enable_caching)
        tokens = own.tokens
        num_tokens = len(tokens)
        if not self.enable_caching:
            return CacheHit(own, [], 0, num_tokens, self._in_flight)
        block_size = self.block_size
        # As `find_blocks`, which costs a call and a second view.
        view = tokens if type(tokens) is memoryview else memoryview(tokens)
        keys = None if own.keys is None else own.encoded_keys(block_size)
        blocks = self._index.match(view, keys, num_tokens // block_size)
        return CacheHit(own, blocks, len(blocks) * block_size, num_tokens, self._in_flight)

    def allocate_slots(
        self,
        sequence: Given[Sequence],
        num_new_tokens: SupportsIndex | None = None,
        *,
        hit: Given[CacheHit] | None = None,
        num_lookahead_tokens: SupportsIndex = 0,
    ) -> list[KVCacheBlock] | None:
        """Make room for the next `num_new_tokens` known tokens (None: all the rest) and cache the blocks that get full.

        For a sequence without blocks this is the start, and `hit` is what `get_computed_blocks` found for it (None:
        use nothing of the cache); the tokens are those after the hit's. For one that has some it is the next chunk,
        and there is no hit. num_lookahead_tokens: slots to add behind them for tokens that aren't known yet, such as
        drafts; nothing in them is cached before `append_slots` says which tokens were accepted. Returns the new blocks,
        perhaps none; or None, with nothing changed, when the pool can't serve it.

        Raises SequenceStateError (another manager's, an id in use, a hit for a sequence that has blocks), StaleHitError
        (the hit's blocks have been evicted since), InvalidArgumentError (no tokens left, or fewer than asked for).
        O(hit blocks + new blocks).
        """
        if self.change_state:
            self.check_whole()
        if type(sequence) is not Sequence or (hit is not None and type(hit) is not CacheHit):
            check_start(sequence, hit)
        own: Sequence = sequence  # type: ignore[assignment]
        found: CacheHit | None = hit  # type: ignore[assignment]
        num_wanted = None if num_new_tokens is None else asked_once(num_new_tokens)
        num_lookahead = check_count("num_lookahead_tokens", num_lookahead_tokens, 0)
        is_start = own.owner is None
        if is_start:
            start = 0 if found is None else check_hit(self._index, own, found)
        else:
            start = self._check_continued(own, found)
        num_left = own.num_tokens - start
        if not num_left:
            raise InvalidArgumentError(f"allocate_slots: expected tokens without slots, got {own} with none left")
        if num_wanted is None:
            end = own.num_tokens
        else:
            end = start + check_count("num_new_tokens", num_wanted, 1, num_left)
        if is_start:
            blocks = self._start(own, end, num_lookahead, found)
        else:
            blocks = self._slots.grow(own, end, num_lookahead)
        if blocks is not None:
            self._in_flight.note(own)
        self._end()
        return blocks

    def append_slots(self, sequence: Given[Sequence], token_ids: TokenIds) -> list[KVCacheBlock] | None:
        """Add decoded tokens and make room for them, in reserved slots first. Blocks that get full are cached.

        token_ids: one or several accepted tokens, in any form that `Sequence` takes. Returns the new blocks, perhaps
        none, where one that replaces a shared block (`fork`, `truncate`) comes first; or None, with nothing changed and
        the tokens not added, when the pool can't serve it.

        Raises SequenceStateError (not this manager's, or tokens without slots are left) and InvalidTokensError. O(1) a
        token, and O(block_size) for one that fills a block.
        """
        if self.change_state:
            return self._append_checked(sequence, token_ids)
        try:
            own: Sequence = sequence  # type: ignore[assignment]  # compiled code looks at its type here
            is_ours = own.appender is self
        except (AttributeError, TypeError):
            raise not_a_sequence("append_slots", sequence) from None
        if is_ours and type(token_ids) is list and len(token_ids) == 1:
            num_tokens = own.num_computed_tokens
            if num_tokens < own.next_edge:
                # It fits the last block without filling it: 14 of 16 decoded tokens, and nothing else changes.
                try:
                    own.tokens.append(token_ids[0])  # type: ignore[union-attr]  # a view has no append
                    own.num_computed_tokens = num_tokens + 1
                except BaseException as error:
                    self.change_state = CHANGING
                    own.truncate_tokens(own.num_computed_tokens)  # what isn't counted
                    self.change_state = IDLE
                    if own.num_computed_tokens > num_tokens or not isinstance(error, _NO_PLAIN_TOKEN):
                        raise
                else:
                    return []
            elif (
                self._fills_quickly
                and num_tokens == len(own.tokens)
                and type(token_ids[0]) is int
                and 0 <= token_ids[0] <= MAX_TOKEN_ID
            ):
                self.change_state = CHANGING
                blocks = self._slots.append_one(own, token_ids[0])
                self.change_state = IDLE
                return blocks
        packed = pack_tokens(token_ids)  # first, since it may run the caller's own code, which may do anything
        if own.owner is not self or own.num_computed_tokens != len(own.tokens):
            self._check_appendable(own, "append_slots")
        blocks = self._slots.append(own, packed)
        self._end()
        return blocks

    def _append_checked(self, sequence: Given[Sequence], token_ids: TokenIds) -> list[KVCacheBlock] | None:
        """`append_slots` of a manager that is checked after each change, or that was left half done."""
        self.check_whole()
        self.change_state = IDLE
        try:
            blocks = self.append_slots(sequence, token_ids)
        finally:
            was_short = self.change_state == IDLE
            if was_short:
                self.change_state = DEBUGGING
        if was_short:
            self.check()
        return blocks

    def append_step(self, sequences: Items[Sequence], token_ids: TokenIds) -> list[tuple[int, int, int]] | None:
        """Add one decoded token to each of `sequences` and make room for it: a whole decode step in one call.

        token_ids: as many as sequences. Returns (place in `sequences`, position in its table, block id) for each
        sequence whose table changed: all that an engine has to write to the step's block tables. None, with nothing
        changed for any of them, when the pool can't serve all.

        Raises SequenceStateError, InvalidTokensError and, for repeated sequences or too few or many tokens,
        InvalidArgumentError. O(sequences).
        """
        if self._group_index is not None and len(self._group_index.layout.groups) > 1:
            got = len(self._group_index.layout.groups)
            raise InvalidArgumentError(
                f"append_step: expected a manager of one group, got {got}: use append_group_step"
            )
        return self._append_step(sequences, token_ids)

    def _append_step(self, sequences: Items[Sequence], token_ids: TokenIds) -> list[tuple[int, int, int]] | None:
        if self.change_state:
            self.check_whole()
        batch: list[Sequence] = (
            [*sequences] if type(sequences) is list else listed("sequences", "an iterable of sequences", sequences)
        )
        if not batch:
            check_no_step(token_ids)
            return []
        tokens: list[Any] = token_ids if type(token_ids) is list else pack_tokens(token_ids).tolist()
        if len(batch) != len(tokens):
            check_step(batch, len(tokens))
        try:
            at_edge = [s for s in batch if s.num_computed_tokens >= s.next_edge or s.appender is not self]
        except (AttributeError, TypeError):
            check_step(batch, len(tokens))  # says which is no sequence
            raise
        for sequence in at_edge:
            if sequence.owner is not self or sequence.num_computed_tokens != len(sequence.tokens):
                self._check_appendable(sequence, "append_step")
        if batch != self._last_step[0]:
            self._note_batch(batch)  # only now, so that nobody else's sequence is kept
        changes = self._slots.append_step(batch, tokens, at_edge, self._last_step[1])
        self._end()
        return changes

    def _note_batch(self, batch: list[Sequence]) -> None:
        """Find the places of a step's sequences. Raises InvalidArgumentError when one comes twice."""
        places = dict(zip(batch, range(len(batch)), strict=True))
        if len(places) != len(batch):
            check_step(batch, len(batch))
        self._last_step = batch, places

    def reserve_slots(self, sequence: Given[Sequence], num_tokens: SupportsIndex) -> list[KVCacheBlock] | None:
        """Make room for `num_tokens` more tokens than are known, such as drafts. Nothing of them is cached.

        `append_slots` fills the room. Returns the new blocks, perhaps none; or None, with nothing changed, when the
        pool can't serve it. Raises SequenceStateError and InvalidArgumentError. O(new blocks).
        """
        number = check_count("num_tokens", num_tokens, 0)
        blocks = self._slots.reserve(self._check_owned(sequence, "reserve_slots"), number)
        self._end()
        return blocks

    def free(self, sequence: Given[Sequence]) -> None:
        """Give the sequence's blocks back, last first. What is cached of it stays so until the blocks are reused.

        All that it was given slots for must have been computed. A token that was appended last and that no step has
        computed must not stay cached: then call `abort` with num_tokens - 1. The sequence keeps its tokens and can be
        allocated again. Raises SequenceStateError when it isn't this manager's or holds no blocks (a double free).
        O(blocks), a lookup for each pin that begins alike and lacks blocks, and once O(sequences) after a step.
        """
        self._give_back(sequence, "free", None)

    def _give_back(self, sequence: Given[Sequence], call: str, num_computed_tokens: SupportsIndex | None) -> None:
        """Give back what a sequence holds; num_computed_tokens: that are written, None: all. O(as `free`, `abort`)."""
        if self.change_state:
            self.check_whole()
        try:  # `_check_owned`, without the call
            own: Sequence = sequence  # type: ignore[assignment]
            owner = own.owner
        except (AttributeError, TypeError):
            raise not_a_sequence(call, sequence) from None
        if owner is not self or self._sequences.get(own.sequence_id) is not own:
            raise self._refusal(call, sequence)
        if num_computed_tokens is not None:
            num_computed_tokens = check_count("num_computed_tokens", num_computed_tokens, 0, own.num_computed_tokens)
        self.change_state = CHANGING
        try:
            del self._sequences[own.sequence_id]  # first of all, since it asks for the id's hash
        except BaseException:
            self._keep(own)
            raise
        if num_computed_tokens is not None:
            self._forget_unwritten(own, num_computed_tokens)
        if self._retention.lacking:
            self._retention.extend(own)
        if self._last_step[0]:
            self._last_step = ([], {})
        num_cached = own.num_registered_blocks if own.epoch is self._index.epoch else 0
        self._pool.release_table(own.blocks, num_cached)
        self._in_flight.drop(own)
        if own.window_tables is not None and self._group_slots is not None:
            self._group_slots.release(own)
        own.reset_blocks()
        self.change_state = self._rest_state  # `_end`, without the call
        if self.change_state:
            self.check()

    def abort(self, sequence: Given[Sequence], num_computed_tokens: SupportsIndex) -> None:
        """Free a sequence of a step that died; of its tokens, the first `num_computed_tokens` have their KV written.

        What it caches beyond them is cached no more, nor is anything chained to that. Abort every sequence of the
        step, also those that may have hit such a block, which they keep in their tables until then, and those that
        waited for a copy (`take_copies`). Raises SequenceStateError, InvalidArgumentError. O(blocks + blocks of pins).
        """
        self._give_back(sequence, "abort", check_integer("num_computed_tokens", num_computed_tokens))

    def _forget_unwritten(self, sequence: Sequence, num_computed_tokens: int) -> None:
        forget_unwritten(self._index, sequence, num_computed_tokens)
        if self._index.detached:
            self._pool.requeue_detached()
        if self._retention.pins:
            self._retention.drop_uncached()

    def _start(
        self, sequence: Sequence, end: int, num_lookahead_tokens: int, hit: CacheHit | None
    ) -> list[KVCacheBlock] | None:
        epoch = self._index.epoch if self.enable_caching else None
        self._claim(sequence, "allocate_slots")
        try:
            blocks = self._slots.start(sequence, epoch, end, num_lookahead_tokens, hit)
        except BaseException:
            if sequence.owner is None:  # nothing was changed yet
                self._unclaim(sequence)
            raise
        if blocks is None:
            self._unclaim(sequence)
            return None
        sequence.appender = self
        self._num_queries += 1
        self._num_queried_tokens += sequence.num_tokens
        if hit is not None and hit.blocks:
            sequence.num_readonly_tokens = hit.num_readonly_tokens
            self._num_hits += 1
            self._num_hit_tokens += hit.num_tokens
        return blocks

    def check(self) -> None:
        """Raise AssertionError unless all invariants of docs/design.md hold (never under python -O). O(pool)."""
        self.check_whole()
        tables = [table for sequence in self._sequences.values() for table in self._slots.tables(sequence)]
        self._pool.check(tables + self._retention.tables())
        self._retention.check()
        batch, places = self._last_step
        assert places == {sequence: i for i, sequence in enumerate(batch)}, "step: places of another batch"
        self._check_sequences(self.block_size, self._slots.edge_size)

    def _end(self) -> None:
        """End a change, and check that all is consistent if that is wanted."""
        rest = self._rest_state
        self.change_state = rest
        if rest:
            self.check()
