"""What a `PrefixCache` returns: what a lookup found, and what an insertion did.

A `PrefixMatch` is a plain value that owns nothing until it is entered; then it holds its blocks until it is left. It
doesn't hold them from the lookup on, for two reasons. If somebody kept a match in a variable, a traceback or a log, its
blocks could never be evicted. And its finalizer would have to release them, in any thread and during any call.
"""

from array import array
from typing import Any, NamedTuple, Protocol, Self, final
from warnings import warn

from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.sequence import Sequence
from kvblocks.errors import BlockStateError
from kvblocks.prefix_cache.evicted import EvictedBlocks
from kvblocks.prefix_cache.payloads import PayloadEntry


def ids_of(blocks: list[KVCacheBlock]) -> list[int]:
    """Return the blocks' ids, in order. O(blocks)."""
    return [block.block_id for block in blocks]


class Hold:
    """Keeps the first blocks of a prefix from being evicted. Compared by identity."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self.blocks = blocks


class HoldingCache(Protocol):
    """The calls of a cache that a match uses."""

    def _hold(self, match: "PrefixMatch", hold: Hold) -> None:
        """Bring `match` up to date and hold its blocks with `hold`."""

    def _let_go(self, hold: Hold) -> None:
        """End `hold`. Does no harm if it is called twice, or if the hold has no blocks."""


@final
class PrefixMatch(Closed):
    """The longest cached prefix of some tokens, as of the lookup, and a context manager that holds its blocks.

    As a value it owns nothing: any later call, from any thread, may evict its blocks. `with` holds the blocks until its
    body ends, normally or by an exception, and the match stays true until then. If anything was evicted since the
    lookup, entering looks the tokens up again. Then there are two cases. If nothing of the match was read yet, it takes
    what is cached now, so `with cache.match_prefix(tokens) as match` never fails. If the match was read and is no
    longer true, entering raises StaleHitError, since the caller may have acted on it. A match may be entered again,
    even while it is held.

    An insertion's match works in the same way, as of the insertion. Only one thread at a time may use a match. Made by
    a `PrefixCache`; sequence, blocks, version and is_read are for the cache.
    """

    __slots__ = (
        *("_cache", "_holds", "_kv_block_ids", "_num_tokens", "_packed_ids", "_payloads"),
        *("blocks", "is_read", "sequence", "version"),
    )

    def __init__(self, cache: HoldingCache, sequence: Sequence) -> None:
        self._holds: list[Hold] = []  # first, since the finalizer reads it
        self._cache = cache
        self._packed_ids: array[int] | None = None  # made at the first use; the ids can't change after that
        self._payloads: list[tuple[int, Any]] = []
        self.sequence = sequence
        self.is_read = False

    @property
    def match_length(self) -> int:
        """How many tokens are cached: block_size for each block. O(1)."""
        self.is_read = True
        return self._num_tokens

    @property
    def matched_kv_blocks(self) -> list[int]:
        """The ids of the blocks that hold the cached tokens, in order. Don't change the list. O(1)."""
        self.is_read = True
        return self._kv_block_ids

    @property
    def packed_kv_blocks(self) -> "array[int]":
        """The ids of `matched_kv_blocks` as an array of int64, typecode "q". Don't change the array.

        numpy.frombuffer(…, "int64") and torch.frombuffer(…, dtype=torch.int64) take it without a copy, but torch's
        takes no empty array. O(blocks) once, then O(1).
        """
        self.is_read = True
        packed = self._packed_ids
        if packed is None:
            packed = self._packed_ids = array("q", self._kv_block_ids)
        return packed

    @property
    def matched_tokens(self) -> list[int]:
        """The cached tokens. O(their number)."""
        self.is_read = True
        return self.sequence.token_ids(0, self._num_tokens)

    @property
    def remaining_tokens(self) -> list[int]:
        """The tokens after the cached ones, whose KV must be computed; perhaps none. O(their number)."""
        self.is_read = True
        return self.sequence.token_ids(self._num_tokens)

    @property
    def payload(self) -> Any:
        """What `PrefixCache.attach` attached to exactly these tokens and keys; None if nothing. O(1)."""
        num_tokens, payload = self.last_payload
        return payload if num_tokens == self.sequence.num_tokens else None

    @property
    def last_payload(self) -> tuple[int, Any]:
        """The longest prefix of the tokens that has a payload: its length in tokens, and the payload.

        (0, None) if there is none. All of its full blocks are cached, but it may end in the middle of a block. For
        models with recurrent layers, which can go on only where a state was kept, so that matched tokens after this
        length are of no use. O(1).
        """
        self.is_read = True
        return self._payloads[-1] if self._payloads else (0, None)

    @property
    def payloads(self) -> list[tuple[int, Any]]:
        """All prefixes of the tokens that have a payload, the shortest first: the length in tokens and the payload of
        each.

        Don't change the list. O(1).
        """
        self.is_read = True
        return self._payloads

    def __enter__(self) -> Self:
        """Hold the blocks. Raises StaleHitError, in which case nothing is held. O(blocks), and perhaps a lookup."""
        hold = Hold([])
        try:
            self._cache._hold(self, hold)  # noqa: SLF001  # a match is a part of its cache
            self._holds.append(hold)
        except BaseException:
            self._cache._let_go(hold)  # noqa: SLF001  # after an interrupt, the cache may hold the blocks without `_holds` knowing
            if hold in self._holds:
                self._holds.remove(hold)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Release the blocks. Never waits. Raises BlockStateError when they aren't held."""
        if not self._holds:
            raise BlockStateError(f"expected a match that was entered, got {self}")
        self._cache._let_go(self._holds[-1])  # noqa: SLF001  # before `pop`, so that an interrupt can't lose the hold
        self._holds.pop()

    def __del__(self) -> None:
        """Release blocks that are still held, because `__exit__` was never called, and issue a ResourceWarning."""
        if self._holds:
            for hold in self._holds:
                self._cache._let_go(hold)  # noqa: SLF001
            warn(
                f"{self} was entered and never left; its blocks are free again",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def show(
        self,
        blocks: list[KVCacheBlock],
        kv_block_ids: list[int],
        block_size: int,
        version: int,
        payloads: list[PayloadEntry],
    ) -> Any:
        """Set the matching blocks, with their ids, as of `version`. Only for the cache.

        payloads: as `PrefixStore.payloads` returns them. Returns the payloads that the match had, so that their
        finalizers, which may do anything, run only after the change.
        """
        self.blocks = blocks
        self.version = version
        self._kv_block_ids = kv_block_ids
        self._num_tokens = len(blocks) * block_size
        previous = self._payloads
        self._payloads = [(entry.num_tokens, entry.payload) for entry in payloads] if payloads else []
        return previous

    def renew(self, blocks: list[KVCacheBlock], version: int) -> None:
        """Set the blocks and their version; the match has their ids already. Only for the cache."""
        self.blocks = blocks
        self.version = version

    def is_still(self, blocks: list[KVCacheBlock]) -> bool:
        """Whether the match is still true if a lookup finds `blocks` now. Only for the cache. O(blocks)."""
        return ids_of(blocks) == self._kv_block_ids

    def __repr__(self) -> str:
        held = ", held" if self._holds else ""
        return f"PrefixMatch({self._num_tokens} of {self.sequence.num_tokens} tokens{held})"


class PrefixInsert(NamedTuple):
    """What an insertion did. Every given id is now either in the cache or in `unused_kv_blocks`.

    - num_cached_blocks: blocks of the prefix that are cached now.
    - num_new_blocks: how many of these the call added.
    - unused_kv_blocks: given ids that the cache did not take, because another block holds the prefix already, there was
      no room, or there were more ids than full blocks. They are the caller's again.
    - evicted_kv_blocks: ids that the cache evicted to make room, which are the caller's again, too. Its `payloads` are
      the evicted payloads.
    - match: what `match_prefix` of the tokens would find now; `stats` doesn't count it.
    - unused_payloads: given payloads that were not attached, for lack of room or of a full block.
    """

    num_cached_blocks: int
    num_new_blocks: int
    unused_kv_blocks: list[int]
    evicted_kv_blocks: EvictedBlocks
    match: PrefixMatch
    unused_payloads: list[Any]
