"""`ManagerCalls`: how tiers change their manager's sequences."""

from collections.abc import Callable
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hit import CacheHit
from kvblocks.core.sequence import Sequence
from kvblocks.core.slots import Commit
from kvblocks.tiers.hit import TierHit


class ManagerCalls:
    """The manager's methods that begin and end a sequence's loads."""

    def __init__(
        self,
        commit: Callable[[Commit], None],
        rewind: Callable[[Sequence, int], None],
        start: Callable[[Sequence, CacheHit | None, list[TierHit], Any], list[KVCacheBlock] | None],
    ) -> None:
        self.commit = commit
        """Caches what `prepare_commit` returned."""
        self.rewind = rewind
        """Releases a sequence's slots after a token. Called inside a change of the manager."""
        self.start = start
        """Gives a sequence blocks for its hit, for loads, and for tokens after them, as `allocate` has checked."""
