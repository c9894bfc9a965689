"""`ManagerCalls`: what tiers do to their manager's sequences."""

from collections.abc import Callable
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hit import CacheHit
from kvblocks.core.sequence import Sequence
from kvblocks.core.slots import Commit
from kvblocks.tiers.hit import TierHit


class ManagerCalls:
    """The manager's own ways of changing a sequence, for loads that begin and end."""

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
