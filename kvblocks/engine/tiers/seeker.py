"""`Seeker`: asks a shared store which blocks of waiting prompts it has, on a thread of its own.

No index of this process knows what other servers have stored, so the store is asked once for each prompt before the
prompt is admitted. The prompt waits for the answer for at most the store's `lookup_timeout_s`. After that, nothing is
loaded from the store for it. Prompts that come together are asked for in one batch.

If this server already has all blocks of a prompt, the store is only told that they are used, and nobody waits (`Uses`).

The same thread retries a failed store, so that no prompt waits for that, and deletes what a reset has given up.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from kvblocks import Sequence, Tiers
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.tiers.asked import Asked, ask_for
from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.engine.tiers.uses import Uses
from kvblocks.tiers.store import SharedStore

logger = logging.getLogger("kvblocks.engine.tiers")

MOST_TOGETHER = 32
"""The most prompts that are asked for in one batch."""

ENOUGH_BLOCKS = 1024
"""No more prompts join a batch that has this many blocks, since all prompts of a batch get their answers together."""

DELETE_S = 60.0
"""How many seconds the deletion after a reset may take before it is tried again."""

_RETRY_S = 1.0


@dataclass(eq=False, slots=True)
class _Search:
    """A request's lookup. until_s: when the request stops waiting."""

    request: Request
    asked: Asked
    until_s: float
    is_over: threading.Event = field(default_factory=threading.Event)


class Seeker:
    """Asks `store` for the blocks of waiting prompts. carrier: the carrier of the store's tier.

    num_columns: the number of columns of the side groups. on_end: called on the seeker's thread whenever an answer has
    come. Only the engine's thread calls the seeker.
    """

    def __init__(
        self,
        carrier: Carrier,
        store: SharedStore,
        tiers: Tiers,
        *,
        block_size: int,
        num_columns: int,
        on_end: Callable[[], None],
    ) -> None:
        self.name = carrier.name
        self._carrier = carrier
        self._store = store
        self._tiers = tiers
        self._block_size = block_size
        self._num_columns = num_columns
        self._on_end = on_end
        self._uses = Uses(carrier, store, tiers)
        self._searches: list[_Search] = []
        self._queue: queue.SimpleQueue[_Search | None] = queue.SimpleQueue()
        self._num_resets = tiers.num_resets
        self._must_delete = False
        self._deletion: Future[None] | None = None  # one that has begun and hasn't ended
        self._is_open = True
        store.on_failure = lambda: self._queue.put(None)  # wakes the thread, which then knows when to retry
        self._thread = threading.Thread(target=self._run, name=f"kvblocks-{carrier.name}-lookups", daemon=True)
        self._thread.start()

    @property
    def is_seeking(self) -> bool:
        """Whether a request waits for an answer. O(1)."""
        return bool(self._searches)

    @property
    def has_answer(self) -> bool:
        """Whether `take` has new answers. O(requests that wait for an answer)."""
        return any(search.is_over.is_set() for search in self._searches)

    def seek(self, waiting: Iterable[Request], lookups: Lookups) -> None:
        """Ask for waiting requests that haven't been asked for. They are not admitted before the answer.

        O(waiting requests). Requests whose blocks are all on the device or in a faster tier aren't asked for; the store
        is only told of the use.
        """
        self._note_resets()
        for request in waiting:
            if request.was_sought or request.max_hit_tokens is not None:  # a prompt that is scored loads nothing
                continue
            request.was_sought = True
            sequence = request.sequence
            num_blocks = (sequence.num_tokens - 1) // self._block_size
            is_at_hand = self._num_at_hand(request, lookups) >= num_blocks
            if self._store.is_away:
                if not is_at_hand:
                    self._tell(sequence, 0, [])
                continue
            asked = ask_for(sequence, self._block_size, self._num_columns)
            if is_at_hand:
                self._uses.note(asked)
                continue
            until_s = time.monotonic() + self._store.address.lookup_timeout_s
            search = _Search(request, asked, until_s)
            self._searches.append(search)  # first: a request that waits has a search, which ends in any case
            request.is_sought = True
            self._queue.put(search)

    def take(self) -> bool:
        """Pass new answers on to the tiers, and end expired waits. Returns whether there were any."""
        lost_any = self._uses.take()
        now_s, left = time.monotonic(), list[_Search]()
        for search in self._searches:
            if search.is_over.is_set() or now_s >= search.until_s:
                self._end(search)
            else:
                left.append(search)
        had_any = len(left) < len(self._searches)
        self._searches = left
        return had_any or lost_any

    def close(self) -> None:
        """End the thread, and close the store, without waiting for answers."""
        self._note_resets()
        if self._must_delete or self._deletion is not None:
            logger.warning("blocks that a reset gave up aren't deleted from the store: reset an engine that stays open")
        self._is_open = False
        self._queue.put(None)
        self._store.close()
        self._thread.join(self._store.address.timeout_s)

    # On the engine's thread.

    def _num_at_hand(self, request: Request, lookups: Lookups) -> int:
        """Return how many blocks from a request's start the device and the tiers above have."""
        hit = lookups.find(request)
        end = hit.num_tokens
        for part in self._tiers.find(hit):
            if part.tier != self.name:
                end = part.first_token + part.num_tokens
        return end // self._block_size

    def _end(self, search: _Search) -> None:
        request = search.request
        request.is_sought = False
        if request.finish_reason is not None or request.sequence.is_allocated:
            return
        number, attached = search.asked.answer() if search.is_over.is_set() else (0, [])
        self._tell(request.sequence, number, attached)
        if number and self._tiers.quota_of(self.name, search.asked.sequence.salt) is not None:
            self._uses.note(search.asked)  # the quota's order isn't that of the store's eviction

    def _tell(self, sequence: Sequence, num_blocks: int, attached: list[tuple[int, int]]) -> None:
        self._tiers.note_found(self.name, sequence, num_blocks, attached)

    def _note_resets(self) -> None:
        """After a reset, delete all of the model's blocks in the store, since all may be bad."""
        if self._num_resets != self._tiers.num_resets:
            self._num_resets = self._tiers.num_resets
            self._store.forbid_all()
            self._must_delete = True
            self._queue.put(None)

    # On its own thread.

    def _run(self) -> None:
        self._probe()  # connects before the first prompt comes
        while self._is_open:
            searches = self._next()
            if self._must_delete:
                self._delete()
            left_s = self._store.seconds_to_probe()
            if left_s is not None and left_s <= 0:
                self._probe()
            if searches:
                self._search(searches)

    def _next(self) -> list[_Search]:
        """Return the queued searches. If there are none, wait for one, or until other work is due."""
        found: list[_Search] = []
        number = 0
        is_deleting = self._must_delete or self._deletion is not None
        left_s = _RETRY_S if is_deleting else self._store.seconds_to_probe()
        with suppress(queue.Empty):
            first = self._queue.get(timeout=left_s)
            while True:
                if first is not None:
                    found.append(first)
                    number += first.asked.num_blocks * (1 + self._num_columns)
                if len(found) == MOST_TOGETHER or number >= ENOUGH_BLOCKS:
                    break
                first = self._queue.get_nowait()
        return found

    def _search(self, searches: list[_Search]) -> None:
        try:
            now_s = time.monotonic()
            asked = [search for search in searches if search.until_s > now_s]
            answers = self._store.find([(one.asked.sequence.salt, one.asked.digests()) for one in asked])
            for search, found in zip(asked, answers, strict=True):
                search.asked.found = found
        except Exception:
            logger.exception("tier %r could not be asked", self.name)
        for search in searches:
            search.is_over.set()
        self._on_end()

    def _probe(self) -> None:
        try:
            self._store.probe()
        except Exception:
            logger.exception("tier %r could not be tried", self.name)

    def _delete(self) -> None:
        """Queue the deletion after the stores that have begun, so that none of them comes after it."""
        if self._deletion is not None:
            return
        self._must_delete = False  # set first: a reset that comes meanwhile asks for another deletion
        self._deletion = self._carrier.call(lambda: self._store.forget_all(DELETE_S))
        self._deletion.add_done_callback(self._note_deleted)

    def _note_deleted(self, deletion: "Future[None]") -> None:
        error = deletion.exception()
        if error is not None:
            self._must_delete = True
            logger.warning("blocks that a reset gave up could not be deleted from the store yet: %s", error)
        self._deletion = None
