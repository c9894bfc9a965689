"""`Uses`: tells a shared store which blocks are hit, so that it doesn't evict the most used ones.

A prompt whose blocks are all on the device loads nothing, so nobody asks the store for it. Instead, the thread of the
stores tells the store of the use, and the request doesn't wait. The store may answer that blocks are gone, because it
was flushed or has evicted them. The tier's map is then corrected, and the blocks are stored again when a sequence that
has them ends.
"""

import logging
import time
from collections import deque
from collections.abc import Hashable

from kvblocks import Tiers
from kvblocks.engine.tiers.asked import Asked
from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.tiers.store import Owner, RecentUses, SharedStore, StoreError

logger = logging.getLogger("kvblocks.engine.tiers")

MOST_WAITING = 64
"""The most uses that wait for the thread of the stores. Further ones are skipped until there is room again."""


class Uses:
    """The uses to tell `store`. stores: the carrier of its tier. Only the engine's thread calls this."""

    def __init__(self, stores: Carrier, store: SharedStore, tiers: Tiers) -> None:
        self._stores = stores
        self._store = store
        self._tiers = tiers
        self._recent = RecentUses()
        self._num_waiting = 0
        self._ended: deque[tuple[Asked, Hashable]] = deque()

    def note(self, asked: Asked) -> None:
        """Note that blocks are used now. The store is told soon, unless it has just been told of them. O(tokens)."""
        if not asked.num_blocks or self._num_waiting >= MOST_WAITING or self._store.is_away:
            return
        name = asked.name()
        if self._recent.is_due(name, time.monotonic()):
            owner = Owner(asked.sequence.salt, self._tiers.quota_of(self._stores.name, asked.sequence.salt))
            self._num_waiting += 1
            self._stores.call(lambda: self._tell(asked, name, owner))

    def take(self) -> bool:
        """Correct the tier's map for blocks that are gone. Returns whether any are."""
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
