"""`Uses`: tells a shared store which blocks hits use, so that it doesn't evict what is used most.

A prompt whose blocks are all on the device loads nothing, so nobody asks the store for it. The store is told of such a
use behind the request's back, on the thread of its stores. Its answer may be that blocks are gone, since it was flushed
or has evicted them. Then the tier's map learns it, and they are stored again when a sequence that has them ends.
"""

import logging
import time
from collections import deque
from collections.abc import Hashable

from kvblocks.engine.tiers.asked import Asked
from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.tiers.store import SharedStore, StoreError
from kvblocks.tiers.store.recent import RecentUses
from kvblocks.tiers.store.store import Owner
from kvblocks.tiers.tiers import Tiers

logger = logging.getLogger("kvblocks.engine.tiers")

MOST_WAITING = 64
"""So many uses wait for the thread of the stores at most; others aren't told, but those that come later may be."""


class Uses:
    """What `store` is to be told. stores: the carrier of the stores to its tier. Only the engine's thread calls it."""

    def __init__(self, stores: Carrier, store: SharedStore, tiers: Tiers) -> None:
        self._stores = stores
        self._store = store
        self._tiers = tiers
        self._recent = RecentUses()
        self._num_waiting = 0
        self._ended: deque[tuple[Asked, Hashable]] = deque()

    def note(self, asked: Asked) -> None:
        """Take note that blocks are used now. The store is told soon, unless it was a moment ago. O(tokens)."""
        if not asked.num_blocks or self._num_waiting >= MOST_WAITING or self._store.is_away:
            return
        name = asked.name()
        if self._recent.is_due(name, time.monotonic()):
            owner = Owner(asked.prefix.salt, self._tiers.quota_of(self._stores.name, asked.prefix.salt))
            self._num_waiting += 1
            self._stores.call(lambda: self._tell(asked, name, owner))

    def take(self) -> bool:
        """Correct the tier's map where blocks are gone. Returns whether any are."""
        had_any = False
        while self._ended:
            asked, name = self._ended.popleft()
            self._num_waiting -= 1
            if asked.found is None:
                self._recent.forget(name)
                continue
            number, attached = asked.answer()
            if number < asked.num_blocks and number * asked.block_size < asked.sequence.num_tokens:
                self._tiers.note_found(self._stores.name, asked.sequence, number, attached)
                had_any = True
        return had_any

    def _tell(self, asked: Asked, name: Hashable, owner: Owner) -> None:
        """On the thread of the stores."""
        try:
            asked.found = self._store.touch(owner, asked.digests())
        except StoreError:
            pass  # the store counts it, and logs a warning now and then
        except Exception:
            logger.exception("tier %r could not be told what is used", self._stores.name)
        self._ended.append((asked, name))
