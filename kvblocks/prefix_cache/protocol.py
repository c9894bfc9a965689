"""`PrefixCacheProtocol`: what an engine may expect of a prefix cache for blocks that it owns itself."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, runtime_checkable

from kvblocks.core.tokens import TokenIds
from kvblocks.prefix_cache.block_ids import BlockIds
from kvblocks.stats import HitCounts


class MatchProtocol(AbstractContextManager[Any], Protocol):
    """The longest cached prefix of some tokens. While it is entered, its blocks aren't evicted."""

    @property
    def match_length(self) -> int:
        """Tokens in the matched blocks."""

    @property
    def matched_kv_blocks(self) -> list[int]:
        """The ids of the matched blocks, in order."""

    @property
    def remaining_tokens(self) -> list[int]:
        """The tokens after the match."""


class InsertProtocol(Protocol):
    """What an insertion did."""

    @property
    def num_cached_blocks(self) -> int:
        """How many of the prefix's blocks are cached now."""

    @property
    def unused_kv_blocks(self) -> list[int]:
        """The given ids that weren't taken, and stay the caller's."""

    @property
    def evicted_kv_blocks(self) -> list[int]:
        """The ids that made room, and are the caller's again."""


@runtime_checkable
class PrefixCacheProtocol(Protocol):
    """The calls of `PrefixCache` that an engine needs, for implementations of your own and stand-ins in tests.

    `PrefixCache` says what each call does, and any implementation has to pass tests/prefix_cache/test_contract.py. As
    with every Protocol, `isinstance` looks at names only.
    """

    max_blocks: int
    block_size: int

    def match_prefix(self, token_ids: TokenIds) -> MatchProtocol:
        """Return the longest cached prefix, which becomes the most recently used."""

    def query_match_len(self, token_ids: TokenIds) -> int:
        """Return how many tokens `match_prefix` would find. Changes nothing."""

    def insert_prefix(self, token_ids: TokenIds, kv_block_ids: BlockIds) -> InsertProtocol:
        """Cache these tokens in these blocks, one for each full block."""

    def evict(self, num_blocks: SupportsIndex) -> list[int]:
        """Evict this many blocks that nothing holds, and return their ids."""

    def pin_prefix(self, token_ids: TokenIds) -> int:
        """Keep the longest cached prefix from being evicted. Return how many tokens are pinned."""

    def unpin_prefix(self, token_ids: TokenIds) -> int:
        """Remove the latest pin of these tokens. Return how many tokens were pinned."""

    def cached_block_count(self) -> int:
        """Return how many blocks are cached."""

    def evictable_count(self) -> int:
        """Return how many blocks are neither pinned nor held by a match."""

    def clear(self) -> list[int]:
        """Unpin and evict everything. Return the ids, which are the caller's again."""

    @property
    def stats(self) -> HitCounts:
        """What lookups found since the cache was made."""


if TYPE_CHECKING:  # so that the type checker compares the two
    from kvblocks.prefix_cache.cache import PrefixCache

    _cache: type[PrefixCacheProtocol] = PrefixCache
