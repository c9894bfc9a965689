"""A sequence of tokens and the blocks that hold its keys and values.

Three numbers are kept apart, because engines let them drift apart: the tokens that are known (`num_tokens`), the slots
that exist for them (`num_slots`) and the tokens whose KV is computed, or will be by the step they were allocated for
(`num_computed_tokens`). The caller makes a sequence and adds tokens to it; everything about blocks is the manager's to
write. The tokens outlive the blocks: a sequence that was freed can be allocated again.
"""

from array import array
from collections.abc import Hashable, Iterable
from operator import index
from typing import Any, NoReturn, SupportsIndex

from kvblocks.arguments import Text, check_count, check_name, check_text
from kvblocks.block import KVCacheBlock
from kvblocks.epoch import Epoch
from kvblocks.errors import InvalidArgumentError
from kvblocks.group_tables import GroupTable, GroupTables
from kvblocks.hashing import PositionKey, encode_extra_keys
from kvblocks.tokens import TokenIds, pack_tokens


class Sequence:
    """One request: its tokens, what else its KV depends on, and its block table.

    sequence_id: the caller's name for it; two sequences that hold blocks at the same time need different ones.
    prompt_token_ids: a list or other iterable of ints, or a buffer (see `tokens.pack_tokens`), which is used without
    a copy and must not change while the sequence is in use. At least one token, each 0 to 2**32 - 1. salt: sequences
    with different salts (None is one of them) never share a block. lora: the adapter's name, likewise. extra_keys:
    (start, end, key) for spans of tokens whose KV depends on more than their ids, such as the placeholders of an
    image and its hash; key is a str or bytes.

    Raises InvalidTokensError and InvalidArgumentError. O(tokens) for ints; O(1) for a buffer of 4-byte integers.
    num_prompt_tokens, num_tokens: given at first, and known now. blocks: those of the block table, in order.
    num_computed_tokens: tokens whose KV is computed, or will be by the step that they were last allocated for.
    num_readonly_tokens: positions below it lie in blocks that were hit; their KV is there and must not be written.
    The other attributes are for the manager.
    """

    __slots__ = (
        "_block_ids",
        "_encoded_keys",
        "appender",
        "blocks",
        "epoch",
        "extra_keys",
        "has_keys",
        "lora",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_readonly_tokens",
        "num_registered_blocks",
        "num_tokens",
        "owner",
        "salt",
        "sequence_id",
        "tokens",
        "was_truncated",
        "window_tables",
    )

    def __init__(
        self,
        sequence_id: Hashable,
        prompt_token_ids: TokenIds,
        *,
        salt: Text | None = None,
        lora: Text | None = None,
        extra_keys: Iterable[PositionKey] = (),
    ) -> None:
        try:
            hash(sequence_id)
        except TypeError:
            raise InvalidArgumentError(f"sequence_id: expected something hashable, got {sequence_id!r}") from None
        self.sequence_id = sequence_id
        self.tokens = pack_tokens(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(self.tokens)
        self.salt = None if salt is None else check_name("salt", salt)
        self.lora = None if lora is None else check_name("lora", lora)
        self.extra_keys: tuple[PositionKey, ...] = ()
        if extra_keys != ():
            self.extra_keys = _check_position_keys(extra_keys, self.num_tokens)
        self.has_keys = salt is not None or lora is not None or self.extra_keys != ()
        self._encoded_keys: tuple[int, dict[int, bytes] | None] | None = None
        self.was_truncated = False  # an earlier hit may be of tokens that it has no more
        self.owner: object | None = None
        self.window_tables: GroupTables | None = None  # the tables beside `blocks`, of a manager of several groups
        self.appender: object | None = None  # the owner, while the next token certainly goes to a block of its own
        self.reset_blocks()

    @property
    def block_ids(self) -> list[int]:
        """The block table: ids of the blocks that hold the sequence, first to last.

        While the sequence is allocated the table only grows, except that `truncate` shortens it and that a sequence
        which was forked or truncated gets another block in the place of its last, unfilled one. The list is the
        sequence's own; don't change it. With several groups it is the table of the primary one, the first that has full
        attention, or group 0's if there is none; see `group_block_ids`. O(blocks added since the last look).
        """
        block_ids = self._block_ids
        if len(block_ids) < len(self.blocks):
            if self.window_tables is not None and self.window_tables.layout.primary is None:
                return self.group_block_ids(0)
            block_ids += [block.block_id for block in self.blocks[len(block_ids) :]]
        return block_ids

    def group_block_ids(self, group: SupportsIndex = 0) -> list[int]:
        """Return the block table of a KV-cache group: token i is in the block at place i // the group's block size.

        Places before `first_live_block` are dead: what they held has left the window. They hold 0, an id in range
        that must not be read. As `block_ids` otherwise: the list is the sequence's own, its end grows, and dead places
        become 0. Raises InvalidArgumentError. O(groups), and O(blocks added) for the primary one.
        """
        table = self._group_table(group)
        return self.block_ids if table is None else table.block_ids

    def group_blocks(self, group: SupportsIndex = 0) -> list[KVCacheBlock | None]:
        """Return the blocks of a KV-cache group's table, None in dead places. As `group_block_ids`. O(blocks)."""
        table = self._group_table(group)
        if table is None:
            return [*self.blocks]
        return [*[None] * table.num_dead, *table.blocks]

    def first_live_block(self, group: SupportsIndex = 0) -> int:
        """Return the first place of a KV-cache group's table that isn't dead. As `group_block_ids`. O(groups)."""
        table = self._group_table(group)
        return 0 if table is None else table.num_dead

    @property
    def new_group_blocks(self) -> list[list[KVCacheBlock]]:
        """By group, the blocks that the last call which made room gave; of a manager of several groups. O(1)."""
        return [] if self.window_tables is None else self.window_tables.new_blocks

    def _group_table(self, group: SupportsIndex) -> GroupTable | None:
        if self.window_tables is None:
            check_count("group", group, 0, 0)
            return None
        return self.window_tables.table(check_count("group", group, 0, len(self.window_tables.layout.groups) - 1))

    @property
    def is_allocated(self) -> bool:
        """Whether a manager holds blocks for it. O(1)."""
        return self.owner is not None

    def token_ids(self, start: int = 0, end: int | None = None) -> list[int]:
        """Return the known tokens from position `start` up to `end` (None: all), generated ones included. O(tokens)."""
        return self.tokens[start:end].tolist()

    def append_tokens(self, token_ids: TokenIds) -> None:
        """Add tokens that have no slots yet; `allocate_slots` makes room for them. O(new tokens).

        For tokens whose slots are wanted at once, use the manager's `append_slots`. Raises InvalidTokensError.
        """
        self.append_packed(pack_tokens(token_ids))

    def append_token(self, token_id: SupportsIndex) -> None:
        """Add one token. TypeError or OverflowError if it is none. O(1), and once O(prompt) if that is a buffer."""
        try:
            self.tokens.append(token_id)  # type: ignore[union-attr, arg-type]  # a view has no append
        except (AttributeError, BufferError):
            self.append_packed(array("I", (index(token_id),)))
        else:
            self.num_tokens += 1

    def append_packed(self, tokens: "array[int] | memoryview[int]") -> None:
        """Add tokens that `pack_tokens` returned. O(new tokens), and once O(prompt) if that is the caller's buffer."""
        own = self.tokens
        if not isinstance(own, array):
            own = self.tokens = array("I", own.tobytes())
        more = tokens if isinstance(tokens, array) else array("I", tokens.tobytes())
        try:
            own.extend(more)
        except BufferError:  # somebody looks at the old array still, a traceback for example: leave it to them
            self.tokens = own + more
        self.num_tokens += len(more)

    def truncate_tokens(self, num_tokens: int) -> None:
        """Drop what was appended behind the first `num_tokens`. Only for the manager. O(tokens dropped)."""
        if num_tokens < self.num_tokens:
            self.was_truncated = True
            try:
                del self.tokens[num_tokens:]  # type: ignore[union-attr]  # a view has no appended tokens
            except BufferError:  # somebody looks at the array still: leave it to them
                self.tokens = self.tokens[:num_tokens]
            self.num_tokens = num_tokens

    def truncate_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Cut the block table to its first `num_blocks` and return the rest. Only for the manager. O(rest)."""
        dropped = self.blocks[num_blocks:]
        del self.blocks[num_blocks:], self._block_ids[num_blocks:]
        return dropped

    def replace_block(self, place: int, block: KVCacheBlock) -> None:
        """Put another block in a place of the table. Only for the manager. O(1)."""
        self.blocks[place] = block
        if place < len(self._block_ids):
            self._block_ids[place] = block.block_id

    def fork(self, sequence_id: Hashable) -> "Sequence":
        """Return a sequence without blocks that has the same tokens and keys, and its own from then on. O(tokens)."""
        own = self.tokens
        twin = Sequence(sequence_id, own, salt=self.salt, lora=self.lora)
        twin.tokens = own[:] if isinstance(own, array) else own
        twin.extra_keys, twin.has_keys, twin._encoded_keys = self.extra_keys, self.has_keys, self._encoded_keys
        twin.num_prompt_tokens = self.num_prompt_tokens
        return twin

    def packed_tokens(self) -> memoryview:
        """Return the known tokens as bytes, packed u32, without a copy; a view of them as they are now."""
        return memoryview(self.tokens).cast("B")

    def encoded_keys(self, block_size: int) -> dict[int, bytes] | None:
        """Return the encoded extra keys by block, None without any. O(blocks that spans touch) once, then O(1)."""
        if not self.has_keys:
            return None
        if self._encoded_keys is None or self._encoded_keys[0] != block_size:
            keys = encode_extra_keys(self.salt, self.lora, self.extra_keys, block_size)
            self._encoded_keys = block_size, keys or None
        return self._encoded_keys[1]

    def check(self, block_size: int) -> None:
        """Raise AssertionError unless its numbers fit together and only registered blocks are cached. O(blocks)."""
        num_slots = len(self.blocks) * block_size
        assert self.num_tokens == len(self.tokens), f"{self}: has {len(self.tokens)}"
        assert self.num_computed_tokens <= min(num_slots, self.num_tokens), f"{self}: tokens without slots"
        assert self.num_registered_blocks <= self.num_computed_tokens // block_size, f"{self}: cached before it is full"
        # Blocks of before a reset may be cached by `renew` of another sequence that shares them.
        if self.epoch is None or self.epoch.is_current:
            for place, block in enumerate(self.blocks[self.num_registered_blocks :], self.num_registered_blocks):
                is_shared = self.appender is None and place == self.num_computed_tokens // block_size
                assert is_shared or not block.is_cached, f"{self}: {block} is cached, but not by it"
        if self.appender is not None and self.num_computed_tokens % block_size:
            last = self.blocks[self.num_computed_tokens // block_size]
            assert last.ref_cnt == 1 and not last.is_cached, f"{self}: would write to {last}"

    def describe_for(self, manager: object) -> str:
        """Say what stands in the way of `manager` using this sequence. For error messages."""
        if self.owner is None:
            return f"{self}, which holds no blocks (never allocated, or freed)"
        return f"{self}, which {'was renamed' if self.owner is manager else 'belongs to another manager'}"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: two sequences would own one block table."""
        raise TypeError(f"{self}: a sequence can't be copied or pickled; make a new one of its token_ids()")

    def __repr__(self) -> str:
        state = f"{len(self.blocks)} blocks" if self.owner is not None else "not allocated"
        return f"Sequence({self.sequence_id!r}, {self.num_tokens} tokens, {state})"

    def reset_blocks(self) -> None:
        """Forget the block table. Only for the manager that releases it."""
        self.blocks: list[KVCacheBlock] = []
        self._block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_readonly_tokens = 0
        self.num_registered_blocks = 0
        self.epoch: Epoch | None = None
        self.owner = self.appender = None


def _check_position_keys(keys: Any, num_tokens: int) -> tuple[PositionKey, ...]:
    if not hasattr(keys, "__iter__"):
        raise InvalidArgumentError(f"extra_keys: expected an iterable of (start, end, key), got {keys!r}")
    return tuple([_check_position_key(key, num_tokens) for key in keys])


def _check_position_key(key: Any, num_tokens: int) -> PositionKey:
    if not isinstance(key, (tuple, list)) or len(key) != 3:
        raise InvalidArgumentError(f"extra_keys: expected (start, end, key), got {key!r}")
    start = check_count("extra_keys: start", key[0], 0, num_tokens - 1)
    end = check_count("extra_keys: end", key[1], start + 1, num_tokens)
    payload = key[2]
    if not isinstance(payload, (str, bytes)) or not payload:
        raise InvalidArgumentError(f"extra_keys: expected a non-empty str or bytes as key, got {payload!r}")
    return start, end, payload if isinstance(payload, bytes) else check_text("extra_keys", payload)
