"""A mirror: a consumer's record of what many workers have cached, correct in spite of lost and reordered batches.

It does no input or output: its caller passes in what arrives, and sends the requests that it returns. A worker's
batches are numbered. The batch with the next number is applied. One with a lower number is late or a duplicate, and is
dropped. One with a higher number is held, and the batches between are asked for. If those can't be had, a snapshot is
asked for. Batches of two epochs never mix: all numbers of a later epoch are higher (see `kvblocks.wire.ledger`), and
its first batch says that nothing is cached.

Other publishers have no snapshots, and start again at 0 when they restart. For these, a lower number that isn't a
duplicate means a restart. What a replay lacks is then forgotten, and `is_complete` says so.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvblocks.arguments import wrong
from kvblocks.wire.codecs import Hash, decode
from kvblocks.wire.errors import MalformedFrameError
from kvblocks.wire.frames import VERSION, SnapshotChunk, SnapshotHead
from kvblocks.wire.holdings import CLEARED, Change, Holdings, Location, changes_of

MAX_CHUNKS: Final = 1 << 16
"""The most chunks in a snapshot. This many hold 67 million blocks."""

_NUM_RECENT: Final = 1024  # numbers that are remembered, to tell doubles of another publisher
_NUM_TRIES: Final = 3  # after so many unanswered asks a publisher counts as one without snapshots
_MAX_COUNTER: Final = 1 << 32  # other publishers number from 0; ours from their epoch, which is higher
_NUM_SUSPICIOUS: Final = 3  # so many batches in a row from before the epoch: the publisher's clock went back


class Ask(NamedTuple):
    """What to ask a worker for: all batches from `number` on or, if `number` is None, a snapshot, by `request`."""

    worker: str
    number: int | None
    request: int


class WorkerRank(NamedTuple):
    """One cache: that of one data-parallel rank of a worker."""

    worker: str
    rank: int


@dataclass(slots=True)
class MirrorStats:
    """Counters.

    num_late: messages dropped as late, as duplicates, or as chunks that were not asked for. num_unheld: early batches
    for which there was no room, and held ones that were dropped without being applied.
    """

    num_applied: int = 0
    num_late: int = 0
    num_unheld: int = 0
    num_malformed: int = 0
    num_unknown_events: int = 0
    num_snapshots: int = 0
    num_restarts: int = 0


class _EarlyBatch(NamedTuple):
    """A batch that came early.

    mark: equal for duplicates. size: how much of `max_held` it takes. request: the last request made before it came.
    """

    changes: list[Change]
    mark: int
    size: int
    request: int


class _Worker:
    """What is known of one publisher."""

    def __init__(self, name: str, *, can_ask: bool) -> None:
        self.name = name
        self.can_ask = can_ask
        self.holdings = Holdings()
        self.next: int | None = None
        """The number of the next batch; None while nothing is known of its cache."""
        self.epoch: int | None = None
        self.floor = 0
        """Lower numbers are from before the epoch, or from before everything was cleared."""
        self.is_complete = False
        self.held: dict[int, _EarlyBatch] = {}
        self.held_size = 0
        self.ask: Ask | None = None
        self.has_applied = False
        """Whether anything was applied since the ask."""
        self.num_tries = 0
        self.num_rounds = 0
        """Snapshots in a row after which batches were still missing."""
        self.has_snapshots: bool | None = None
        self.num_suspicious = 0
        self.head: SnapshotHead | None = None
        self.chunks: dict[int, list[Change]] = {}
        self.recent: OrderedDict[int, int] = OrderedDict()


class EventMirror:
    """Knows which blocks each worker has cached, by the hashes in its events. Not thread-safe.

    max_held: how many batches and blocks, added up, are held for a worker while others are missing. It takes a few
    dozen bytes for each block that a worker caches, plus what is held.
    """

    def __init__(self, *, max_held: int = 1 << 18) -> None:
        self.stats = MirrorStats()
        self._workers: dict[str, _Worker] = {}
        self._asks: deque[Ask] = deque()
        self._max_held = max_held
        self._num_requests = 0

    @property
    def workers(self) -> list[str]:
        """The names of all workers."""
        return list(self._workers)

    def add(self, worker: str, *, can_ask: bool = True) -> None:
        """Add a worker and ask what it has. can_ask: whether it can be asked at all. A known worker stays as it is."""
        if worker not in self._workers:
            self._workers[worker] = _Worker(worker, can_ask=can_ask)
            self._ask(self._workers[worker])

    def remove(self, worker: str) -> None:
        """Forget a worker and all that it had cached. Raises InvalidArgumentError for an unknown worker."""
        self._get(worker)
        del self._workers[worker]

    def is_complete(self, worker: str) -> bool:
        """Whether everything that the worker had cached after the last applied batch is known: no batch is missing."""
        state = self._get(worker)
        return state.is_complete and state.next is not None and not state.held

    def number(self, worker: str) -> int | None:
        """Return the number of the last batch applied; None while nothing is known of the worker's cache."""
        due = self._get(worker).next
        return None if due is None else due - 1

    def epoch(self, worker: str) -> int | None:
        """Return the worker's epoch; None until a snapshot has told it."""
        return self._get(worker).epoch

    def count(self, worker: str) -> int:
        """Return how many blocks a worker has cached. A block counts once per group and medium. O(groups x media)."""
        return self._get(worker).holdings.count()

    def places(self, worker: str) -> dict[Location, frozenset[int]]:
        """Return the low 64 bits of the hashes of a worker's blocks, by rank, group and medium. O(blocks)."""
        return self._get(worker).holdings.places()

    def num_held(self, worker: str) -> int:
        """Return how many batches of a worker are held because earlier ones are missing."""
        return len(self._get(worker).held)

    def find(
        self,
        worker: str,
        hashes: Iterable[Hash],
        *,
        rank: int = 0,
        group: int = 0,
        medium: str | None = None,
        states: int | None = None,
    ) -> int:
        """Return how many of the first blocks of a prefix a worker has cached. O(blocks found).

        hashes: those of the prefix's blocks, in any form: signed, unsigned, or digests. medium: where they are cached;
        None: anywhere. states: for models with recurrent layers, the number of their group. Then only blocks up to the
        last one with a state count, since a worker can't go on from any later block.
        """
        return self._get(worker).holdings.find(hashes, rank, group, medium, states)

    def overlaps(
        self, hashes: Sequence[Hash], *, group: int = 0, medium: str | None = None, states: int | None = None
    ) -> dict[WorkerRank, int]:
        """Return what `find` returns, for each rank of each worker. O(ranks x blocks found)."""
        return {
            WorkerRank(name, rank): state.holdings.find(hashes, rank, group, medium, states)
            for name, state in self._workers.items()
            for rank in state.holdings.ranks() or [0]
        }

    def best(
        self, hashes: Sequence[Hash], *, group: int = 0, states: int | None = None
    ) -> tuple[WorkerRank, int] | None:
        """Return who has the most of the first blocks, as `find` counts them, and how many; None if there are none."""
        found = self.overlaps(hashes, group=group, states=states)
        holder = max(found, key=lambda one: found[one], default=None)
        return None if holder is None or not found[holder] else (holder, found[holder])

    def take_asks(self) -> list[Ask]:
        """Return what must be asked since the last call. An ask that a later one replaces is left out."""
        asks = [ask for ask in self._asks if ask.worker in self._workers and self._workers[ask.worker].ask == ask]
        self._asks.clear()
        return asks

    def ask_anew(self, worker: str) -> None:
        """Ask again for what is missing, since earlier asks won't be answered."""
        state = self._get(worker)
        state.ask = None
        self._ask(state)

    def receive(self, worker: str, number: int, payload: bytes) -> None:
        """Take a live batch. No payload makes it raise. O(blocks)."""
        state = self._get(worker)
        changes = self._read(payload)
        if number >= _MAX_COUNTER and state.has_snapshots is False:
            # The publisher is one of ours. It wasn't there, or didn't hear, when it was asked.
            state.has_snapshots, state.ask = None, None
        if state.next is not None and number < state.next:
            self._take_late(state, number, payload, changes)
        elif changes is None:
            self._take_malformed(state, number)
        elif state.next == number:
            self._apply(state, number, changes, hash(payload))
            self._go_on(state)
        elif _is_start(number, changes):
            self._start(state, number, changes, hash(payload), is_complete=True)
        elif not state.can_ask:
            self._start(state, number, changes, hash(payload), is_complete=False)
        else:
            self._hold(state, number, changes, hash(payload))
            self._ask(state)

    def receive_replayed(self, worker: str, number: int, payload: bytes) -> None:
        """Take a replayed batch."""
        state = self._get(worker)
        is_wanted = state.ask is not None and state.ask.number is not None
        if is_wanted and state.has_snapshots is False and (state.next is None or number > state.next):
            changes = self._read(payload)
            if changes is not None and not state.has_applied:
                # This is all that a publisher without snapshots keeps. Earlier batches can't be known.
                self._start(state, number, changes, hash(payload), is_complete=_is_start(number, changes))
                return
        if state.next is not None and number < state.next:
            self.stats.num_late += 1
        else:
            self.receive(worker, number, payload)

    def end_replay(self, worker: str) -> None:
        """Record that a replay has ended."""
        state = self._get(worker)
        ask = state.ask
        if ask is None or ask.number is None:
            return
        made_progress, state.ask = state.has_applied, None
        state.num_tries = 0
        if state.has_snapshots is False and state.held:
            if not made_progress:
                number = min(state.held)
                held = state.held[number]
                self._start(state, number, held.changes, held.mark, is_complete=False)
                return
            self._drop_disowned(state, ask.request)
        # A batch that was held before the ask is still not due: what is before it can't be replayed, or it is damaged.
        is_in_vain = not made_progress or any(held.request < ask.request for held in state.held.values())
        self._go_on(state, wants_snapshot=is_in_vain)

    def receive_chunk(self, worker: str, chunk: SnapshotChunk) -> None:
        """Take a chunk of a snapshot. A chunk that the last request didn't ask for is dropped."""
        state, head = self._get(worker), chunk.head
        if head.version == VERSION:
            state.has_snapshots, state.num_tries = True, 0
        if state.ask is None or state.ask.number is not None or state.ask.request != head.request:
            self.stats.num_late += 1
            return
        if head.version != VERSION or head.total == 0:
            return  # not understood, or refused: asked for again after a while
        changes = self._read(chunk.payload) if 0 <= head.index < head.total <= MAX_CHUNKS else None
        if changes is None:
            return
        if state.head is None or _whole(state.head) != _whole(head):
            state.head, state.chunks = head, {}
        state.chunks[head.index] = changes
        if len(state.chunks) == head.total:
            self._take_snapshot(state, head)

    def give_up(self, worker: str) -> None:
        """Record that an ask was not answered, and ask again. After a few attempts, ask for the other kind.

        The kinds are replays and snapshots. Without an open ask, nothing happens.
        """
        state = self._get(worker)
        if state.ask is None:
            return
        state.num_tries += 1
        wanted_snapshot, state.ask = state.ask.number is None, None
        # Of the held numbers the lowest counts, since the highest may be a damaged one.
        number = state.next if state.next is not None else min(state.held, default=0)
        if wanted_snapshot and state.num_tries >= _NUM_TRIES and not state.has_snapshots and number < _MAX_COUNTER:
            state.has_snapshots, state.num_tries = False, 0
        elif not wanted_snapshot and state.num_tries >= _NUM_TRIES:
            wanted_snapshot, state.num_tries = True, 0
        self._go_on(state, wants_snapshot=wanted_snapshot)

    def _get(self, worker: str) -> _Worker:
        if worker not in self._workers:
            raise wrong("worker", f"one of {list(self._workers)[:20]}", worker)
        return self._workers[worker]

    def _read(self, payload: bytes) -> list[Change] | None:
        """Return the changes in a payload; None if it is malformed."""
        try:
            batch = decode(payload)
        except MalformedFrameError:
            self.stats.num_malformed += 1
            return None
        self.stats.num_unknown_events += batch.num_unknown
        return changes_of(batch)

    def _take_late(self, state: _Worker, number: int, payload: bytes, changes: list[Change] | None) -> None:
        self.stats.num_late += 1
        if state.has_snapshots:
            state.num_suspicious += number < state.floor
            if state.num_suspicious >= _NUM_SUSPICIOUS:
                self._ask(state, wants_snapshot=True)
        elif number in state.recent and state.recent[number] == hash(payload):
            pass
        elif state.has_snapshots is None and state.can_ask and number > 0:
            self._ask(state, wants_snapshot=True)  # late or a restart: which, depends on the publisher's kind
        elif changes is not None:
            self.stats.num_restarts += 1
            self._forget(state)
            self.receive(state.name, number, payload)

    def _take_malformed(self, state: _Worker, number: int) -> None:
        """Handle a batch that can't be read. It is lost for good: only a snapshot has its contents."""
        if state.next != number:
            return  # asked for when its turn comes
        if state.has_snapshots is False or not state.can_ask:
            state.next, state.is_complete = number + 1, False
            self._go_on(state)
        else:
            self._ask(state, wants_snapshot=True)

    def _apply(self, state: _Worker, number: int, changes: list[Change], mark: int) -> None:
        state.holdings.apply(changes)
        state.next = number + 1
        state.has_applied = True
        state.num_suspicious = 0
        if _is_start(number, changes):
            state.is_complete, state.floor = True, number
        if not state.has_snapshots:
            state.recent[number] = mark
            if len(state.recent) > _NUM_RECENT:
                state.recent.popitem(last=False)
        self.stats.num_applied += 1

    def _start(self, state: _Worker, number: int, changes: list[Change], mark: int, *, is_complete: bool) -> None:
        """Begin with a batch before which nothing was cached, or nothing is known."""
        state.holdings.clear()
        state.is_complete = is_complete
        state.epoch = None
        if is_complete:
            state.ask = None
        self._apply(state, number, changes, mark)
        self._go_on(state)

    def _forget(self, state: _Worker) -> None:
        state.holdings.clear()
        state.held.clear()
        state.recent.clear()
        state.held_size, state.floor = 0, 0
        state.next, state.is_complete, state.ask, state.epoch = None, False, None, None

    def _hold(self, state: _Worker, number: int, changes: list[Change], mark: int) -> None:
        size = 1 + sum(len(hashes) for _, _, hashes in changes)
        if number in state.held:
            self.stats.num_late += 1
        elif state.held_size + size > self._max_held:
            self.stats.num_unheld += 1
        else:
            state.held[number] = _EarlyBatch(changes, mark, size, self._num_requests)
            state.held_size += size

    def _go_on(self, state: _Worker, *, wants_snapshot: bool = False) -> None:
        """Apply held batches that are due, and ask for what is missing."""
        self._apply_held(state)
        if state.next is not None and state.held and min(state.held) < state.next:
            due = state.next
            state.held = {number: held for number, held in state.held.items() if number > due}
            state.held_size = sum(held.size for held in state.held.values())
        lacks = not state.is_complete and state.has_snapshots is not False
        if state.next is None or state.held or lacks or (wants_snapshot and state.has_snapshots):
            self._ask(state, wants_snapshot=wants_snapshot or lacks)
        elif state.ask is not None and state.ask.number is not None:
            state.ask = None  # nothing is missing any longer
        if not state.held:
            state.num_rounds = 0

    def _apply_held(self, state: _Worker) -> None:
        while state.next is not None and state.next in state.held:
            held = state.held.pop(state.next)
            state.held_size -= held.size
            self._apply(state, state.next, held.changes, held.mark)

    def _drop_disowned(self, state: _Worker, request: int) -> None:
        """Drop batches that were held before a request and that its answer doesn't cover.

        A publisher's snapshot covers everything that it has sent. So either such a batch's number was damaged, or its
        publisher is gone and the clock of the next one went back. Its turn would never come.
        """
        kept = {number: held for number, held in state.held.items() if held.request >= request}
        self.stats.num_unheld += len(state.held) - len(kept)
        state.held, state.held_size = kept, sum(held.size for held in kept.values())

    def _ask(self, state: _Worker, *, wants_snapshot: bool = False) -> None:
        """Ask for a snapshot or a replay, unless an ask is open."""
        if not state.can_ask or (state.ask is not None and not (wants_snapshot and state.ask.number is not None)):
            return
        number: int | None = None
        if state.has_snapshots is False:
            number = state.next or 0
        elif state.next is not None and not wants_snapshot:
            number = state.next
        self._num_requests += 1
        state.ask = Ask(state.name, number, self._num_requests)
        state.has_applied = False
        state.head, state.chunks = None, {}
        self._asks.append(state.ask)

    def _take_snapshot(self, state: _Worker, head: SnapshotHead) -> None:
        chunks, state.chunks, state.head, state.ask = state.chunks, {}, None, None
        # A snapshot from before batches that were applied since the ask is out of date, and isn't used.
        if state.next is None or head.number + 1 >= state.next or not state.has_applied:
            self.stats.num_snapshots += 1
            state.holdings.clear()
            for index in range(head.total):
                state.holdings.apply(chunks[index])
            state.next, state.epoch = head.number + 1, head.epoch
            state.floor, state.is_complete, state.num_suspicious = head.epoch, True, 0
            state.recent.clear()
        self._apply_held(state)
        self._drop_disowned(state, head.request)
        self._go_on(state)
        state.num_rounds += bool(state.held)
        if state.num_rounds > _NUM_TRIES and self._asks and self._asks[-1] == state.ask:
            self._asks.pop()  # asked for when patience ends, so that a publisher isn't asked without pause


def _whole(head: SnapshotHead) -> tuple[int, ...]:
    """Return what all chunks of one snapshot have in common."""
    return head.request, head.epoch, head.number, head.total


def _is_start(number: int, changes: list[Change]) -> bool:
    """Whether a batch says all that is cached: the very first one, or one that begins by clearing everything."""
    return number == 0 or (bool(changes) and changes[0][0] == CLEARED)
