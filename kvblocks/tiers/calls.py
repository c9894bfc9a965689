"""`ManagerCalls`: what tiers need of their manager."""

from collections.abc import Callable
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hit import CacheHit
from kvblocks.core.sequence import Sequence
from kvblocks.core.slots import Commit
from kvblocks.tiers.hit import TierHit


class ManagerCalls:
    """What `Tiers` needs of its manager.

    check_owned: the manager's check of a sequence. commit: caches what `prepare_commit` returned. rewind: releases a
    sequence's slots after a token; called inside a change of the manager. start: gives a sequence blocks for its hit,
    for loads, and for tokens after them; called with what `allocate` has checked. end: ends a change, and runs `check`
    if the manager checks after each change.
    """

    def __init__(
        self,
        check_owned: Callable[[Any, str], Sequence],
        commit: Callable[[Commit], None],
        rewind: Callable[[Sequence, int], None],
        start: Callable[[Sequence, CacheHit | None, list[TierHit], Any], list[KVCacheBlock] | None],
        end: Callable[[], None],
    ) -> None:
        self.check_owned = check_owned
        self.commit = commit
        self.rewind = rewind
        self.start = start
        self.end = end
