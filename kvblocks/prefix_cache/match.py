"""What a `PrefixCache` answers: what it found, and what an insertion did.

A `PrefixMatch` is a plain value that owns nothing until it is entered; then it holds its blocks until it is left.
Holding from the lookup on was the other way. It would have made every match that somebody keeps in a variable, a
traceback or a log a leak of cache memory, and letting go of it the work of a finalizer, which runs in any thread and in
the middle of anything.
"""

from array import array
from typing import Any, NamedTuple, Protocol, Self
from warnings import warn

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.sequence import Sequence
from kvblocks.errors import BlockStateError


def ids_of(blocks: list[KVCacheBlock]) -> list[int]:
    """Return the blocks' ids, in order. O(blocks)."""
    return [block.block_id for block in blocks]


class Hold:
    """Blocks of one prefix, from its first on, that may not be evicted. Compared by identity."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self.blocks = blocks


class MatchHolder(Protocol):
    """What a match asks of its cache."""

    def hold(self, match: "PrefixMatch", hold: Hold) -> None:
        """Bring `match` up to date and hold its blocks by `hold`."""

    def let_go(self, hold: Hold) -> None:
        """Hold them no longer. Telling it twice, or of a hold of nothing, does no harm."""


class PrefixMatch:
    """The longest cached prefix of some tokens, as of the lookup; and a context manager that keeps it.

    As a value it owns nothing: its blocks may be evicted by any later call, from any thread. `with` holds them, and so
    keeps true what the match says, until the body is left, by an exception too. Entering costs another lookup if
    anything has been evicted since. A match that nobody has read yet then says what is cached now, so that
    `with cache.match_prefix(tokens) as match` never fails; one that was read, and isn't true any more, raises
    StaleHitError, because somebody may have acted on it. It may be entered again, while it is held too.

    An insertion's match is the same, as of the insertion. Tokens given to a lookup as a buffer are used without a copy
    and must not change while the match is in use; an insertion's match has a copy. One match belongs to one thread at a
    time. Made by a `PrefixCache`; sequence, blocks, version and is_read are for that.
    """

    __slots__ = (
        *("_holder", "_holds", "_kv_block_ids", "_num_tokens", "_packed_ids", "_payload"),
        *("blocks", "is_read", "sequence", "version"),
    )

    def __init__(self, holder: MatchHolder, sequence: Sequence) -> None:
        self._holds: list[Hold] = []  # first of all, since a finalizer looks at it
        self._holder = holder
        self._packed_ids: array[int] | None = None  # made when first asked for; they can't change any more then
        self._payload: Any = None
        self.sequence = sequence
        self.is_read = False

    @property
    def match_length(self) -> int:
        """How many tokens are cached: block_size for each block. O(1)."""
        self.is_read = True
        return self._num_tokens

    @property
    def matched_kv_blocks(self) -> list[int]:
        """The ids of the blocks that hold them, in order. The list is the match's own; don't change it. O(1)."""
        self.is_read = True
        return self._kv_block_ids

    @property
    def packed_kv_blocks(self) -> "array[int]":
        """The same ids as an array of int64, typecode "q", which is the match's own; don't change it.

        numpy.frombuffer(…, "int64") and torch.frombuffer(…, dtype=torch.int64) take it without a copy (torch's takes
        no empty one). O(blocks) once, then O(1).
        """
        self.is_read = True
        packed = self._packed_ids
        if packed is None:
            packed = self._packed_ids = array("q", self._kv_block_ids)
        return packed

    @property
    def matched_tokens(self) -> list[int]:
        """The tokens that are cached. O(their number)."""
        self.is_read = True
        return self.sequence.token_ids(0, self._num_tokens)

    @property
    def remaining_tokens(self) -> list[int]:
        """The tokens after them, whose KV is to be computed; perhaps none. O(their number)."""
        self.is_read = True
        return self.sequence.token_ids(self._num_tokens)

    @property
    def payload(self) -> Any:
        """What `PrefixCache.attach` left for exactly these tokens and keys, None if nothing. O(1)."""
        self.is_read = True
        return self._payload

    def __enter__(self) -> Self:
        """Hold the blocks. Raises StaleHitError, holding nothing. O(blocks), and perhaps a lookup."""
        hold = Hold([])
        try:
            self._holder.hold(self, hold)
            self._holds.append(hold)
        except BaseException:
            self._holder.let_go(hold)  # an interrupt may come when it is held and isn't known here yet
            if hold in self._holds:
                self._holds.remove(hold)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the blocks; never waits. Raises BlockStateError when they aren't held."""
        if not self._holds:
            raise BlockStateError(f"expected a match that was entered, got {self}")
        self._holder.let_go(self._holds[-1])  # before it is forgotten here, so that an interrupt can't lose it
        self._holds.pop()

    def __del__(self) -> None:
        """Let go of what is still held, and say so: whoever entered it by hand has forgotten to leave it."""
        if self._holds:
            for hold in self._holds:
                self._holder.let_go(hold)
            warn(
                f"{self} was entered and never left; its blocks are free again",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def show(
        self, blocks: list[KVCacheBlock], kv_block_ids: list[int], block_size: int, version: int, payload: Any
    ) -> Any:
        """Say that these blocks, which have these ids, match, as of `version`. For the cache alone.

        Returns the payload that it had, which so outlives the change: its finalizer may do anything.
        """
        self.blocks = blocks
        self.version = version
        self._kv_block_ids = kv_block_ids
        self._num_tokens = len(blocks) * block_size
        previous = self._payload
        self._payload = payload
        return previous

    def renew(self, blocks: list[KVCacheBlock], version: int) -> None:
        """Say the same as before, as of `version`, when these blocks have its ids. For the cache alone."""
        self.blocks = blocks
        self.version = version

    def is_still(self, blocks: list[KVCacheBlock]) -> bool:
        """Whether what it says is true when it would find `blocks` now. For the cache alone. O(blocks)."""
        return ids_of(blocks) == self._kv_block_ids

    def __repr__(self) -> str:
        held = ", held" if self._holds else ""
        return f"PrefixMatch({self._num_tokens} of {self.sequence.num_tokens} tokens{held})"


class PrefixInsert(NamedTuple):
    """What an insertion did. Every id that was given is in the cache now or in `unused_kv_blocks`; none is lost.

    num_cached_blocks: blocks of the prefix that are cached now. num_new_blocks: those of them that this call added.
    unused_kv_blocks: given ids that the cache did not take, because another block holds that prefix already or because
    there was no room; they are the caller's. evicted_kv_blocks: ids that the cache gave up to make room, likewise.
    match: what `match_prefix` of the tokens would find now, not counted by the rates.
    """

    num_cached_blocks: int
    num_new_blocks: int
    unused_kv_blocks: list[int]
    evicted_kv_blocks: list[int]
    match: PrefixMatch
