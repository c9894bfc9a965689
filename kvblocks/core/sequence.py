"""A sequence of tokens and the blocks that hold its keys and values.

A sequence keeps several counts, since they differ in engines: the tokens that are known (`num_tokens`), the tokens
whose KV is computed or will be by the step they were allocated for (`num_computed_tokens`), and the tokens whose KV
counts as written, so that their blocks may be cached (`num_written_tokens`). The blocks may have room for more tokens
than are known.

The caller makes a sequence and adds tokens to it; only the manager writes the attributes about blocks. A sequence keeps
its tokens when it is freed, so it can be allocated again.
"""

from array import array
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, final

from kvblocks.arguments import (
    Flag,
    Text,
    check_count,
    check_flag,
    check_id,
    check_integer,
    counted,
    is_a,
    shown,
    wrong,
)
from kvblocks.closed import Closed
from kvblocks.core.block import Epoch, KVCacheBlock, Run
from kvblocks.core.tokens import TokenIds, own_tokens, pack_tokens
from kvblocks.errors import InvalidArgumentError
from kvblocks.hashing.extra_keys import PositionKey, SequenceKeys, check_keys

if TYPE_CHECKING:
    from kvblocks.core.tables import SideTables

_NO_KEYS: tuple[PositionKey, ...] = ()


@final
class Sequence(Closed):
    """One request: its tokens, what else its KV depends on, and its block table.

    Arguments:

    - sequence_id: the caller's name for it, of any type that is hashable and equal to itself (NaN isn't). Two sequences
      that hold blocks at the same time need different ids.
    - prompt_token_ids: at least one token, each 0 to 2**32 - 1, as a list or other iterable of ints, or as a buffer
      (see `tokens.pack_tokens`).
    - salt: sequences with different salts never share a block; None counts as a salt of its own.
    - lora: the name of the LoRA adapter; None: no adapter. Sequences that differ in it never share a block either.
    - extra_keys: (start, end, key) for each span of tokens whose KV depends on more than their ids, such as an image's
      placeholders and its hash. key is a str or bytes.
    - session: the conversation that this request belongs to, hashable; None: no conversation. It doesn't change what is
      shared. Eviction policies may use it to predict what will be hit again (see `manager.sessions`).
    - copy: False lends the sequence a buffer of 4-byte integers, which it then uses as it is. Nobody may change the
      buffer from then on while the sequence, a fork of it or a hit of either is in use. Otherwise its tokens change
      with the buffer, and prefixes are cached, and hit, that nobody computed. The first token that is appended ends the
      loan, since the sequence then copies the buffer. All other prompts are copied in any case.

    Raises InvalidTokensError and InvalidArgumentError. O(tokens), of which a copy is a memcpy of 4 bytes a token; O(1)
    for a buffer of unsigned 4-byte integers that is lent.

    Attributes that callers may read:

    - num_prompt_tokens: number of prompt tokens.
    - blocks: the blocks of the block table, in order.
    - num_computed_tokens: tokens whose KV is computed, or will be by the step they were last allocated for.
    - num_readonly_tokens: tokens before this position lie in full blocks that were hit, or are shared by a fork. Their
      KV is there and must not be written. A multiple of the block size.
    - first_own_token: position of the first token that it computes or loads itself. Those before it came with a hit, or
      from its parent by a fork, so others were to write them.
    - num_given_tokens: first_own_token, or less if a block before it was replaced by a copy.
    - delayed_from: position of the first token that isn't cached until `cache_blocks` reports it as written; None: no
      token is delayed.
    - lost_from: position of the first token whose KV was never written or is bad; everything computed after it is lost
      too. None: no token is lost.
    - state_marks: where `manager.states.mark` was called.

    The other attributes are for the manager.
    """

    __slots__ = (
        "_block_ids",
        "blocks",
        "delayed_from",
        "epoch",
        "first_own_token",
        "fits_below",
        "keys",
        "lost_from",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_given_tokens",
        "num_prompt_tokens",
        "num_readonly_tokens",
        "owner",
        "run",
        "sequence_id",
        "session",
        "side_tables",
        "start_number",
        "state_marks",
        "tail_owner",
        "tokens",
        "was_truncated",
    )

    def __init__(
        self,
        sequence_id: Hashable,
        prompt_token_ids: TokenIds,
        *,
        salt: Text | None = None,
        lora: Text | None = None,
        extra_keys: Iterable[PositionKey] = _NO_KEYS,
        session: Hashable = None,
        copy: Flag = True,
    ) -> None:
        if type(sequence_id) is not str and type(sequence_id) is not int:
            check_id("sequence_id", sequence_id)
        if session is not None:
            check_id("session", session)
        self.sequence_id = sequence_id
        self.session = session
        ids: Any = prompt_token_ids
        self.tokens: array[int] | memoryview[int]
        if copy is not True and not check_flag("copy", copy):
            self.tokens = pack_tokens(ids)
        elif type(ids) is array and ids.typecode == "I" and ids:  # `own_tokens`, inlined for arrays
            self.tokens = ids[:]
        else:
            self.tokens = own_tokens(ids)
        self.num_prompt_tokens = len(self.tokens)
        self.keys: SequenceKeys | None = None
        if salt is not None or lora is not None or extra_keys is not _NO_KEYS:
            self.keys = check_keys(salt, lora, extra_keys, self.num_prompt_tokens)
        self.blocks: list[KVCacheBlock] = []
        self._block_ids: list[int] | None = None  # made when it is first used
        self.num_computed_tokens = 0
        self.delayed_from: int | None = None
        self.lost_from: int | None = None
        self.num_readonly_tokens = self.num_given_tokens = self.first_own_token = 0
        self.num_cached_blocks = self.start_number = 0
        self.state_marks: tuple[int, ...] = ()
        self.was_truncated = False  # an earlier hit may be for tokens that it no longer has
        self.owner: object | None = None  # of its blocks: its manager's `Change`; None: it has none
        self.tail_owner: object | None = None  # the owner, while the next token certainly goes to an unshared block
        self.fits_below = 0  # if num_computed_tokens is smaller, one more token fits the last block without filling it;
        # negative: likewise, once a token that was added without a slot has one
        self.epoch: Epoch | None = None
        self.run: Run | None = None  # a hint: the run of its last cached block, or None
        self.side_tables: SideTables | None = None  # the tables beside `blocks`, of a manager of several groups

    @property
    def num_tokens(self) -> int:
        """How many tokens are known. O(1)."""
        return len(self.tokens)

    @property
    def num_written_tokens(self) -> int:
        """How many tokens, from the first one on, count as written, whether or not their blocks are cached. O(1).

        These are all tokens with slots, or those before the first one that is delayed or lost. Only such tokens are
        ever cached.
        """
        num_written = self.num_computed_tokens if self.delayed_from is None else self.delayed_from
        return num_written if self.lost_from is None else min(num_written, self.lost_from)

    @property
    def salt(self) -> str | None:
        """The salt that the sequence was made with. O(1)."""
        return None if self.keys is None else self.keys.salt

    @property
    def lora(self) -> str | None:
        """The name of its LoRA adapter. O(1)."""
        return None if self.keys is None else self.keys.lora

    @property
    def extra_keys(self) -> tuple[PositionKey, ...]:
        """The keys of its spans of tokens, as they were passed in. O(1)."""
        return () if self.keys is None else self.keys.extra_keys

    @property
    def block_ids(self) -> list[int]:
        """The block table: the ids of the blocks that hold the sequence, first to last.

        While the sequence is allocated, the table only grows, with two exceptions. `truncate` and `rewind` shorten it,
        and after a fork or a truncation another block may replace the last, partly filled one.

        This is the sequence's own list; don't change it. With several groups it is the primary group's table, or group
        0's if there is no primary group; see `group_block_ids`. O(blocks added since the last use).
        """
        block_ids = self._block_ids
        if block_ids is None:
            block_ids = self._block_ids = []
        if len(block_ids) < len(self.blocks):
            if self.side_tables is not None and self.side_tables.layout.primary is None:
                return self.group_block_ids(0)
            block_ids += [block.block_id for block in self.blocks[len(block_ids) :]]
        return block_ids

    def group_block_ids(self, group: SupportsIndex = 0) -> list[int]:
        """Return the block table of a KV-cache group: token i is in the block at index i // the group's block size.

        Entries before `first_live_block` are dead, because their blocks have left the window. A dead entry is 0, a
        valid id whose block must not be read. As with `block_ids`, the list is the sequence's own, and it grows at its
        end. Raises InvalidArgumentError. O(groups), plus O(blocks added) for the primary group.
        """
        number = self._check_group(group)
        ids = None if self.side_tables is None else self.side_tables.block_ids(number)
        return self.block_ids if ids is None else ids

    def group_blocks(self, group: SupportsIndex = 0) -> list[KVCacheBlock | None]:
        """Return the blocks of a KV-cache group's table, None for dead entries. Raises InvalidArgumentError. O(blocks).

        For a group that keeps a state, these are checkpoints' blocks that copies or loads in progress read or write.
        """
        number = self._check_group(group)
        blocks = None if self.side_tables is None else self.side_tables.blocks(number)
        return [*self.blocks] if blocks is None else blocks

    def first_live_block(self, group: SupportsIndex = 0) -> int:
        """Return the first index of a group's table that isn't dead. Raises InvalidArgumentError. O(groups)."""
        number = self._check_group(group)
        return 0 if self.side_tables is None else self.side_tables.first_live_block(number)

    @property
    def new_group_blocks(self) -> list[list[KVCacheBlock]]:
        """By group, the new blocks of the last call that made room; empty with only one group. O(1)."""
        return [] if self.side_tables is None else self.side_tables.new_blocks

    @property
    def state_slot(self) -> int | None:
        """The slot with its recurrent state while it is allocated; None if no layers keep a state. O(1)."""
        state = None if self.side_tables is None else self.side_tables.live_state
        return None if state is None else state.slot

    def _check_group(self, group: SupportsIndex) -> int:
        last = 0 if self.side_tables is None else len(self.side_tables.layout.groups) - 1
        return check_count("group", group, 0, last)

    @property
    def is_allocated(self) -> bool:
        """Whether it is allocated in a manager. O(1)."""
        return self.owner is not None

    def token_ids(self, start: SupportsIndex = 0, end: SupportsIndex | None = None) -> list[int]:
        """Return the known tokens from position `start` up to `end` (None: to the last), including generated ones.
        O(tokens).

        Negative positions count from the end, as in a slice. Raises InvalidArgumentError.
        """
        first = start if type(start) is int else check_integer("start", start)
        last = end if end is None or type(end) is int else check_integer("end", end)
        tokens: Any = self.tokens
        part: list[int] = tokens[first:last].tolist()
        return part

    def append_tokens(self, token_ids: TokenIds, *, extra_keys: Iterable[PositionKey] = _NO_KEYS) -> None:
        """Add tokens without slots; `allocate_slots` makes room for them later.

        extra_keys: for spans of the new tokens, with positions counted from the sequence's first token. For tokens that
        need slots at once, use the manager's `append_slots`. Raises InvalidTokensError and InvalidArgumentError. O(new
        tokens).
        """
        given: Any = token_ids
        if type(given) is list and len(given) == 1 and type(given[0]) is int and extra_keys is _NO_KEYS:
            fits_below = self.fits_below
            self.fits_below = 0
            try:
                self.tokens.append(given[0])  # type: ignore[union-attr]  # a view has no append
            except (AttributeError, BufferError, OverflowError):
                pass  # the slow path either adds it or reports what is wrong
            else:
                self.fits_below = -fits_below if fits_below > 0 else fits_below
                return
        packed = pack_tokens(token_ids)
        if extra_keys is not _NO_KEYS:
            start, num_tokens = len(self.tokens), len(self.tokens) + len(packed)
            more = check_keys(None, None, extra_keys, num_tokens)
            if more is not None and min(key[0] for key in more.extra_keys) < start:
                raise wrong("extra_keys", f"spans of the new tokens, from {start} on", more.extra_keys)
            added = () if more is None else more.extra_keys
            keys = check_keys(self.salt, self.lora, (*self.extra_keys, *added), num_tokens)
            self.append_packed(packed)
            self.keys = keys
            return
        self.append_packed(packed)

    def append_checked(self, token_id: int) -> None:
        """Add one token that was checked. Only for the manager. O(1), and once O(prompt) if the prompt was lent."""
        self.fits_below = 0
        try:
            self.tokens.append(token_id)  # type: ignore[union-attr]  # a view has no append
        except (AttributeError, BufferError):
            self.append_packed(array("I", (token_id,)))

    def drop_last(self) -> None:
        """Undo `append_checked`, before anybody has seen the token. Only for the manager. O(1)."""
        try:
            self.tokens.pop()  # type: ignore[union-attr]  # `append_checked` has made an array
        except BufferError:  # a view of the array exists: make a new array
            self.tokens = self.tokens[:-1]

    def append_packed(self, tokens: "array[int] | memoryview[int]") -> None:
        """Add tokens that `pack_tokens` returned. Only for the manager.

        O(new tokens), and once O(prompt) if the prompt is a buffer that the caller lent.
        """
        self.fits_below = 0  # first, so that after an exception anywhere the fast path isn't taken
        own = self.tokens
        if not isinstance(own, array):
            own = self.tokens = array("I", own.tobytes())
        more = tokens if isinstance(tokens, array) else array("I", tokens.tobytes())
        try:
            own.extend(more)
        except BufferError:  # a view of the old array exists, in a traceback for example: make a new array
            self.tokens = own + more

    def lose(self, num_tokens: int, block_size: int) -> None:
        """Record that the KV after the first `num_tokens` tokens is lost. Only for the manager. O(1).

        block_size: that of the primary group.
        """
        if num_tokens < (self.num_computed_tokens if self.lost_from is None else self.lost_from):
            self.lost_from = num_tokens
            self.num_cached_blocks = min(self.num_cached_blocks, num_tokens // block_size)

    def settle(self, num_written_tokens: int = 0) -> None:
        """Record that what it was to write of the first `num_written_tokens` tokens is written, and drop marks that lie
        after the last slot.

        The marks are `delayed_from` and `lost_from`. A loss among given tokens stays, since others were to write them.
        Only for the manager. O(1).
        """
        if self.delayed_from is not None:
            start = max(self.delayed_from, num_written_tokens)
            self.delayed_from = start if start < self.num_computed_tokens else None
        if self.lost_from is not None:
            start = self.lost_from
            if start >= self.first_own_token:
                start = max(start, num_written_tokens)
            self.lost_from = start if start < self.num_computed_tokens else None

    def num_written_after(self, num_reported_tokens: int) -> int:
        """Return what `num_written_tokens` will be once so many tokens are reported as written. Only for the manager.

        O(1).
        """
        number = max(num_reported_tokens, self.num_written_tokens)
        lost_from = self.lost_from
        return number if lost_from is None or lost_from >= self.first_own_token else min(number, lost_from)

    def unwritten(
        self, blocks: list[KVCacheBlock], num_dead: int, block_size: int, num_tokens: int
    ) -> list[KVCacheBlock]:
        """Return the blocks of one of its tables that are lost if only its first `num_tokens` tokens were written.

        blocks: the table, without its first `num_dead` entries. See `SlotAllocator.unwritten_blocks`. Only for the
        manager.
        """
        start = max(self.num_given_tokens, num_tokens)
        end = self.num_computed_tokens if self.delayed_from is None else self.delayed_from
        first = max(start // block_size - num_dead, 0)
        return blocks[first : max(-(-end // block_size) - num_dead, 0)] if start < end else []

    def truncate_tokens(self, num_tokens: int) -> None:
        """Drop the tokens that were appended after the first `num_tokens`. Only for the manager. O(tokens dropped)."""
        if num_tokens < self.num_tokens:
            self.was_truncated = True
            try:
                del self.tokens[num_tokens:]  # type: ignore[union-attr]  # a view has no appended tokens
            except BufferError:  # a view of the array exists: make a new array
                self.tokens = self.tokens[:num_tokens]

    def truncate_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Cut the block table to its first `num_blocks` blocks and return the rest. Only for the manager. O(rest)."""
        dropped = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        if self._block_ids is not None:
            del self._block_ids[num_blocks:]
        return dropped

    def replace_block(self, index: int, block: KVCacheBlock) -> None:
        """Put another block at an index of the table. Only for the manager. O(1)."""
        self.blocks[index] = block
        if self._block_ids is not None and index < len(self._block_ids):
            self._block_ids[index] = block.block_id

    def fork(self, sequence_id: Hashable) -> "Sequence":
        """Return a new sequence without blocks that has a copy of the tokens and the same keys. O(tokens).

        Raises InvalidArgumentError.
        """
        own = self.tokens
        child = Sequence(sequence_id, own, copy=isinstance(own, array))  # a buffer that was lent is lent to both
        child.session = self.session
        child.keys = self.keys
        child.state_marks = self.state_marks
        child.num_prompt_tokens = self.num_prompt_tokens
        return child

    def packed_tokens(self) -> memoryview:
        """Return a view of the known tokens as bytes, packed u32, without a copy."""
        return memoryview(self.tokens).cast("B")

    def encoded_keys(self, block_size: int) -> dict[int, bytes] | None:
        """Return the encoded extra keys by block, None if there are none. Only for the manager.

        O(blocks that spans touch) once, then O(1).
        """
        return None if self.keys is None else self.keys.encoded(block_size)

    def check(self, block_size: int, smallest_block_size: int) -> None:
        """Raise AssertionError unless its numbers are consistent and only full blocks are cached. O(blocks).

        smallest_block_size: the smallest block size of a group. Only for the manager.
        """
        num_slots = len(self.blocks) * block_size
        assert self.num_computed_tokens <= min(num_slots, self.num_tokens), f"{self}: tokens without slots"
        assert self.num_cached_blocks <= self.num_computed_tokens // block_size, f"{self}: cached before it is full"
        num_full = self.num_computed_tokens // block_size
        is_whole = self.num_readonly_tokens in range(0, num_full * block_size + 1, block_size)
        assert is_whole, f"{self}: read-only tokens in part of a block"
        num_given = self.num_given_tokens
        assert self.num_readonly_tokens == num_given // block_size * block_size, f"{self}: {num_given} tokens given"
        assert num_given <= self.first_own_token <= self.num_computed_tokens, f"{self}: its first own token"
        assert self.delayed_from is None or self.delayed_from < self.num_computed_tokens, f"{self}: its delayed_from"
        assert self.lost_from is None or self.lost_from < self.num_computed_tokens, f"{self}: its lost_from"
        assert self.num_cached_blocks <= self.num_written_tokens // block_size, f"{self}: cached before it is written"
        if self.epoch is not None and self.epoch.is_current:
            for block in self.blocks[: self.num_cached_blocks]:
                assert block.is_cached, f"{self}: {block} counts as cached by it"
        for index, block in enumerate(self.blocks[num_full:]):  # sequences that share full blocks may cache them
            is_shared = self.tail_owner is None and not index
            assert is_shared or not block.is_cached, f"{self}: {block} is cached, and not full"
        if self.fits_below > self.num_computed_tokens:
            assert self.tail_owner is self.owner is not None, f"{self}: fits_below without a tail_owner"
            assert self.num_computed_tokens == self.num_tokens, f"{self}: tokens without slots"
            room = smallest_block_size - 1 - self.num_computed_tokens % smallest_block_size
            assert self.num_computed_tokens % smallest_block_size, f"{self}: its next token begins a block"
            assert self.fits_below - self.num_computed_tokens <= room, f"{self}: fits_below is behind its last block"
        if self.tail_owner is not None and self.num_computed_tokens % block_size:
            last = self.blocks[self.num_computed_tokens // block_size]
            assert last.ref_cnt == 1 and not last.is_cached, f"{self}: would write to {last}"

    def describe_for(self, manager: object) -> str:
        """Return why `manager` can't use this sequence. Only for the manager's error messages."""
        if self.owner is None:
            return f"{self}, which holds no blocks (never allocated, or freed)"
        if self.owner is not manager:
            return f"{self}, which belongs to another manager"
        return f"{self}, whose sequence_id, or the id's hash, isn't what it was at its allocation: set it back"

    def __reduce__(self) -> NoReturn:
        """Raise TypeError. A sequence can't be copied or pickled, since two sequences would own one block table."""
        raise TypeError(f"{self}: a sequence can't be copied or pickled; make a new one of its token_ids()")

    def __repr__(self) -> str:
        state = counted(len(self.blocks), "block") if self.owner is not None else "not allocated"
        return f"Sequence({shown(self.sequence_id)}, {counted(self.num_tokens, 'token')}, {state})"

    def reset_blocks(self) -> None:
        """Forget the block tables. Only for the manager that releases them."""
        self.blocks = []
        self._block_ids = None
        self.num_computed_tokens = self.num_cached_blocks = self.fits_below = 0
        self.num_readonly_tokens = self.num_given_tokens = self.first_own_token = 0
        self.tail_owner = self.epoch = self.run = self.delayed_from = self.lost_from = self.side_tables = None
        self.owner = None  # last, so that after an interruption no other manager takes the sequence


def not_a_sequence(call: str, value: object) -> InvalidArgumentError:
    """Return the error for a value that is no sequence."""
    return wrong(call, "a Sequence", value)


def as_sequence(call: str, value: object) -> Sequence:
    """Return `value` if it is a sequence, else raise InvalidArgumentError."""
    given: Any = value
    if not is_a(given, Sequence):
        raise not_a_sequence(call, value)
    sequence: Sequence = given
    return sequence
