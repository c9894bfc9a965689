"""The calls that an engine's steps make: look up, allocate, append, reserve, free, abort.

`KVCacheManager` is this and what an engine asks between its steps. Every call that raises, or returns None because the
pool can't serve it, has changed nothing but `last_refusal`; one that is left half done is known, see `change`.
"""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from typing import Any, SupportsIndex

from kvblocks.arguments import check_count
from kvblocks.block import KVCacheBlock
from kvblocks.cache_hit import CacheHit
from kvblocks.change import CHANGING, DEBUGGING, IDLE, Changeable
from kvblocks.companions import GroupIndex
from kvblocks.errors import InvalidArgumentError, SequenceStateError
from kvblocks.group_lookup import find_hit
from kvblocks.group_slots import GroupSlots
from kvblocks.in_flight import InFlight
from kvblocks.pool import BlockPool
from kvblocks.registration import check_hit, forget_unwritten
from kvblocks.retention import Retention
from kvblocks.sequence import Sequence
from kvblocks.steps import StepAllocator
from kvblocks.tokens import MAX_TOKEN_ID, TokenIds, pack_tokens

_NO_PLAIN_TOKEN = (AttributeError, BufferError, TypeError, OverflowError, ValueError)
"""What adding a token the short way raises where the long way may still take it, or knows what is wrong with it."""

Step = tuple[list[Sequence], dict[Sequence, int]]


class SequenceManager(Changeable):
    """Gives the blocks of `pool` to sequences and takes them back. A part of `KVCacheManager`; not made by itself."""

    def __init__(
        self, pool: BlockPool, retention: Retention, slots: StepAllocator, *, enable_caching: bool, debug: bool
    ) -> None:
        super().__init__("manager", debug=debug)
        self.block_size = pool.index.block_size
        self.enable_caching = enable_caching
        self._pool = pool
        self._index = pool.index
        self._retention = retention
        self._slots = slots
        self._group_slots = slots if isinstance(slots, GroupSlots) else None
        self._group_index = pool.index if isinstance(pool.index, GroupIndex) else None
        self._in_flight = InFlight(pool.index, self)
        self._sequences: dict[Hashable, Sequence] = {}
        slots.manager = self
        # The sequences of the last step and their places, until one is freed: the next batch is mostly the same.
        self._step: Step = ([], {})
        self._largest_size = self.block_size if self._group_index is None else self._group_index.layout.hit_size
        # When debugging or naming changes, a token that begins or fills a block goes the long way.
        self._fills_quickly = not debug and not self._index.names_changes and self._group_index is None
        self._num_queries = self._num_hits = self._num_queried_tokens = self._num_hit_tokens = 0

    def get_computed_blocks(self, sequence: Sequence) -> CacheHit:
        """Return the longest cached prefix of a sequence that isn't allocated. Changes nothing.

        Looks at all known tokens, so a sequence that was freed hits the blocks of its generated tokens too. The hit is
        empty when caching is off. Raises SequenceStateError when the sequence holds blocks. One dict lookup and one
        memcmp for each run of blocks that were cached together.
        """
        if self.change_state or sequence.owner is not None:
            self.check_whole()
            if sequence.owner is not None:
                raise SequenceStateError(f"get_computed_blocks: expected a sequence without blocks, got {sequence}")
        if self._group_index is not None:
            return find_hit(self._group_index, sequence, self._in_flight, enable_caching=self.enable_caching)
        tokens = sequence.tokens
        num_tokens = len(tokens)
        if not self.enable_caching:
            return CacheHit(sequence, [], 0, num_tokens, self._in_flight)
        block_size = self.block_size
        # As `find_blocks`, which costs a call and a second view.
        view = tokens if type(tokens) is memoryview else memoryview(tokens)
        keys = None if sequence.keys is None else sequence.encoded_keys(block_size)
        blocks = self._index.match(view, keys, num_tokens // block_size)
        return CacheHit(sequence, blocks, len(blocks) * block_size, num_tokens, self._in_flight)

    def allocate_slots(
        self,
        sequence: Sequence,
        num_new_tokens: SupportsIndex | None = None,
        *,
        hit: CacheHit | None = None,
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
        is_start = sequence.owner is None
        start = self._check_start(sequence, hit) if is_start else self._check_continued(sequence, hit)
        num_left = sequence.num_tokens - start
        if not num_left:
            raise InvalidArgumentError(f"allocate_slots: expected tokens without slots, got {sequence} with none left")
        if num_new_tokens is None:
            end = sequence.num_tokens
        else:
            end = start + check_count("num_new_tokens", num_new_tokens, 1, num_left)
        num_lookahead = check_count("num_lookahead_tokens", num_lookahead_tokens, 0)
        if is_start:
            blocks = self._start(sequence, end, num_lookahead, hit)
        else:
            blocks = self._slots.grow(sequence, end, num_lookahead)
        if blocks is not None:
            self._in_flight.note(sequence)
        self._end()
        return blocks

    def append_slots(self, sequence: Sequence, token_ids: TokenIds) -> list[KVCacheBlock] | None:
        """Add decoded tokens and make room for them, in reserved slots first. Blocks that get full are cached.

        token_ids: one or several accepted tokens, in any form that `Sequence` takes. Returns the new blocks, perhaps
        none, where one that replaces a shared block (`fork`, `truncate`) comes first; or None, with nothing changed and
        the tokens not added, when the pool can't serve it.

        Raises SequenceStateError (not this manager's, or tokens without slots are left) and InvalidTokensError. O(1) a
        token, and O(block_size) for one that fills a block.
        """
        if self.change_state:
            return self._append_checked(sequence, token_ids)
        if sequence.appender is self and type(token_ids) is list and len(token_ids) == 1:
            num_tokens = sequence.num_computed_tokens
            if num_tokens < sequence.next_edge:
                # It fits the last block without filling it: 14 of 16 decoded tokens, and nothing else changes.
                try:
                    sequence.tokens.append(token_ids[0])  # type: ignore[union-attr]  # a view has no append
                    sequence.num_computed_tokens = num_tokens + 1
                except BaseException as error:
                    self.change_state = CHANGING
                    sequence.truncate_tokens(sequence.num_computed_tokens)  # what isn't counted
                    self.change_state = IDLE
                    if sequence.num_computed_tokens > num_tokens or not isinstance(error, _NO_PLAIN_TOKEN):
                        raise
                else:
                    return []
            elif (
                self._fills_quickly
                and num_tokens == len(sequence.tokens)
                and type(token_ids[0]) is int
                and 0 <= token_ids[0] <= MAX_TOKEN_ID
            ):
                blocks = self._slots.append_one(sequence, token_ids[0])
                self.change_state = IDLE
                return blocks
        if sequence.owner is not self or sequence.num_computed_tokens != len(sequence.tokens):
            self._check_appendable(sequence, "append_slots")
        blocks = self._slots.append(sequence, pack_tokens(token_ids))
        self._end()
        return blocks

    def _append_checked(self, sequence: Sequence, token_ids: TokenIds) -> list[KVCacheBlock] | None:
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
        batch = list(sequences)
        if not batch:
            _check_step(batch, len(list(token_ids)))
            return []
        tokens: list[Any] = token_ids if type(token_ids) is list else pack_tokens(token_ids).tolist()
        if len(batch) != len(tokens):
            _check_step(batch, len(tokens))
        at_edge = [s for s in batch if s.num_computed_tokens >= s.next_edge or s.appender is not self]
        for sequence in at_edge:
            if sequence.owner is not self or sequence.num_computed_tokens != len(sequence.tokens):
                self._check_appendable(sequence, "append_step")
        if batch != self._step[0]:
            self._note_batch(batch)  # only now, so that nobody else's sequence is kept
        try:
            changes = self._slots.append_step(batch, tokens, at_edge, self._step[1])
        except (TypeError, OverflowError, ValueError):
            pack_tokens(tokens)  # says what is wrong with them
            raise
        self._end()
        return changes

    def _note_batch(self, batch: list[Sequence]) -> None:
        """Find the places of a step's sequences. Raises InvalidArgumentError when one comes twice."""
        places = dict(zip(batch, range(len(batch)), strict=True))
        if len(places) != len(batch):
            _check_step(batch, len(batch))
        self._step = batch, places

    def reserve_slots(self, sequence: Sequence, num_tokens: SupportsIndex) -> list[KVCacheBlock] | None:
        """Make room for `num_tokens` more tokens than are known, such as drafts. Nothing of them is cached.

        `append_slots` fills the room. Returns the new blocks, perhaps none; or None, with nothing changed, when the
        pool can't serve it. Raises SequenceStateError and InvalidArgumentError. O(new blocks).
        """
        self._check_owned(sequence, "reserve_slots")
        blocks = self._slots.reserve(sequence, check_count("num_tokens", num_tokens, 0))
        self._end()
        return blocks

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back, last first. What is cached of it stays so until the blocks are reused.

        All that it was given slots for must have been computed. A token that was appended last and that no step has
        computed must not stay cached: then call `abort` with num_tokens - 1. The sequence keeps its tokens and can be
        allocated again. Raises SequenceStateError when it isn't this manager's or holds no blocks (a double free).
        O(blocks), a lookup for each pin that begins alike and lacks blocks, and once O(sequences) after a step.
        """
        self._check_owned(sequence, "free")
        self.change_state = CHANGING
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """`free`, as the end of a change."""
        if self._retention.lacking:
            self._retention.extend(sequence)
        if self._step[0]:
            self._step = ([], {})
        self._pool.release(sequence.blocks)
        del self._sequences[sequence.sequence_id]
        self._in_flight.drop(sequence)
        if sequence.window_tables is not None and self._group_slots is not None:
            self._group_slots.release(sequence)
        sequence.reset_blocks()
        self.change_state = self._rest_state
        if self.change_state:
            self.check()

    def abort(self, sequence: Sequence, num_computed_tokens: SupportsIndex) -> None:
        """Free a sequence of a step that died; of its tokens, the first `num_computed_tokens` have their KV written.

        What it caches beyond them is cached no more, nor is anything chained to that. Abort every sequence of the
        step, also those that may have hit such a block, which they keep in their tables until then, and those that
        waited for a copy (`take_copies`). Raises SequenceStateError, InvalidArgumentError. O(blocks + blocks of pins).
        """
        self._check_owned(sequence, "abort")
        written = check_count("num_computed_tokens", num_computed_tokens, 0, sequence.num_computed_tokens)
        self.begin_change()
        self._forget_unwritten(sequence, written)
        self._free(sequence)

    def _forget_unwritten(self, sequence: Sequence, num_computed_tokens: int) -> None:
        forget_unwritten(self._index, sequence, num_computed_tokens)
        if self._retention.pins:
            self._retention.drop_uncached()

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
        if self.change_state:
            self.check_whole()
        if sequence.owner is not self or self._sequences.get(sequence.sequence_id) is not sequence:
            raise SequenceStateError(f"{call}: expected a sequence allocated here, got {sequence.describe_for(self)}")

    def _check_appendable(self, sequence: Sequence, call: str) -> None:
        self._check_owned(sequence, call)
        if sequence.num_computed_tokens != sequence.num_tokens:
            got = f"{sequence.num_computed_tokens} slots for {sequence}"
            raise SequenceStateError(f"{call}: expected slots for all tokens, got {got}")

    def _start(
        self, sequence: Sequence, end: int, num_lookahead_tokens: int, hit: CacheHit | None
    ) -> list[KVCacheBlock] | None:
        epoch = self._index.epoch if self.enable_caching else None
        blocks = self._slots.start(sequence, epoch, end, num_lookahead_tokens, hit)
        if blocks is None:
            return None
        sequence.appender = self
        self._sequences[sequence.sequence_id] = sequence
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
        batch, places = self._step
        assert places == {sequence: i for i, sequence in enumerate(batch)}, "step: places of another batch"
        for sequence_id, sequence in self._sequences.items():
            assert sequence.owner is self and sequence.sequence_id == sequence_id, f"{sequence}: not under its own id"
            sequence.check(self.block_size, self._slots.edge_size)
            for table in [] if sequence.window_tables is None else sequence.window_tables.tables:
                table.check(sequence.num_computed_tokens)

    def _end(self) -> None:
        """End a change, and check that all is consistent if that is wanted."""
        rest = self._rest_state
        self.change_state = rest
        if rest:
            self.check()


def _check_step(sequences: Items[Sequence], num_tokens: int) -> None:
    num_different = len(set(sequences))
    if not num_different == len(sequences) == num_tokens:
        got = f"{len(sequences)} sequences, {num_different} of them different, and {num_tokens} tokens"
        raise InvalidArgumentError(f"append_step: expected different sequences and a token for each, got {got}")
