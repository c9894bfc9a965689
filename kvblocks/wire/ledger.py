"""A publisher's bookkeeping, without input or output: batch numbers, the queue, and what is kept for replays.

Batches are numbered from the epoch on. The epoch is the number of the first batch, which says that nothing is cached. A
publisher that restarts has a higher epoch, so no two batches of a worker have the same number, and a later batch has a
higher one. A batch that doesn't fit into the queue is not sent. Its number stays unused, which every consumer sees as a
gap.

The ledger also follows which blocks are cached, including dropped batches. A snapshot is therefore the cache's contents
after all batches up to one number, and the engine is not asked for it.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import Any, Final, NamedTuple

from kvblocks.arguments import wrong
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlocksHit, BlockStored, CacheEvent, part_of
from kvblocks.wire.codecs import EventBatch
from kvblocks.wire.convert import Converter
from kvblocks.wire.frames import VERSION, SnapshotHead

PIECE_BLOCKS: Final = 32
"""An event stays in memory while any of its blocks is cached, so longer events are split into pieces of this size."""

CHUNK_BLOCKS: Final = 1024
"""Blocks in a chunk of a snapshot."""

_BYTES_A_BLOCK: Final = 100  # of a queued event, without its tokens: digest and bookkeeping
_BYTES_AN_EVENT: Final = 400

BlockKey = tuple[int | None, str, bytes]
_Place = tuple[BlockStored, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a publisher holds at most.

    - max_queued_batches, max_queued_bytes: what may wait to be sent; further batches are dropped.
    - num_kept_batches, max_kept_bytes: what is kept for replays.
    - num_sending: batches on their way to one slow consumer; that consumer loses further ones. There is no limit in
      bytes, so a consumer that doesn't read may cost the memory of this many of the largest batches.
    - max_consumer_bytes, max_answer_bytes: replayed batches and parts of snapshots that are on their way to one
      consumer that asked, and to all. What doesn't fit waits until they have read, and isn't made before. One message
      more may be on its way to each consumer, whatever its size.
    - num_snapshots: snapshots sent at the same time; further requests are refused.
    """

    max_queued_batches: int = 10_000
    max_queued_bytes: int = 1 << 26
    num_kept_batches: int = 10_000
    max_kept_bytes: int = 1 << 28
    num_sending: int = 10_000
    max_consumer_bytes: int = 1 << 22
    max_answer_bytes: int = 1 << 26
    num_snapshots: int = 16


class Queued(NamedTuple):
    """A batch that waits to be sent. num_bytes: its approximate size in memory."""

    number: int
    ts: float
    events: list[CacheEvent]
    num_bytes: int


class Snapshot(NamedTuple):
    """The cached blocks after all batches up to `number`, in the order in which they were cached.

    ts: when it was taken.
    """

    number: int
    places: list[_Place]
    ts: float

    def events(self, first: int = 0, end: int | None = None) -> list[BlockStored]:
        """Return events that store blocks first to end - 1, consecutive blocks of one event together. O(blocks)."""
        return list(_joined(islice(self.places, first, end)))


class Ledger:
    """The bookkeeping of one publisher. Not thread-safe: the publisher has a lock.

    rank: the data-parallel rank in batches. ts: the time of the first batch, which is queued at once.
    """

    def __init__(self, converter: Converter, limits: Limits, epoch: int, rank: int, ts: float) -> None:
        self.epoch = epoch
        self.num_dropped = 0
        self._converter = converter
        self._limits = limits
        self._rank = rank
        self._next = epoch
        self._queue: deque[Queued] = deque()
        self._queued_bytes = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._cached: dict[BlockKey, _Place] = {}
        self.add([AllBlocksCleared()], ts)

    @property
    def next_number(self) -> int:
        """The number of the next batch."""
        return self._next

    @property
    def num_queued(self) -> int:
        """The number of batches that wait to be sent."""
        return len(self._queue)

    @property
    def num_cached(self) -> int:
        """The number of cached blocks after all batches so far, dropped ones included."""
        return len(self._cached)

    def add(self, events: Iterable[CacheEvent], ts: float) -> bool:
        """Number a batch of events and queue it. Return False if it was dropped. O(blocks); tokens are not looked at.

        Without events there is no batch. Raises InvalidArgumentError, with nothing changed, for objects that aren't
        kvblocks' records.
        """
        given: Any = events
        if not isinstance(given, Iterable):
            raise wrong("events", "records of kvblocks", events)
        batch: list[CacheEvent] = [event for event in events if not isinstance(event, BlocksHit)]  # hits change nothing
        num_bytes = sum(map(self._weigh, batch))
        if not batch:
            return True
        # The number is taken first: an interrupt after this leaves a gap, which every consumer sees.
        number, limits = self._next, self._limits
        self._next = number + 1
        for event in batch:
            self._follow(event)
        fits = len(self._queue) < limits.max_queued_batches
        if not fits or self._queued_bytes + num_bytes > limits.max_queued_bytes:
            self.num_dropped += 1
            return False
        self._put(Queued(number, ts, batch, num_bytes))
        return True

    def add_heartbeat(self, ts: float) -> None:
        """Queue an empty batch if nothing waits. Its number shows consumers whether they missed something."""
        if not self._queue:
            number = self._next
            self._next = number + 1
            self._put(Queued(number, ts, [], 0))

    def take(self) -> Queued | None:
        """Remove the next batch from the queue and return it; None if nothing waits."""
        if not self._queue:
            return None
        batch = self._queue.popleft()
        self._queued_bytes -= batch.num_bytes
        return batch

    def encode(self, batch: Queued) -> bytes:
        """Return a batch's payload. O(blocks + tokens). Changes nothing."""
        said = EventBatch(batch.ts, self._converter.convert(batch.events), self._rank)
        return self._converter.codec.encode(said)

    def keep(self, number: int, payload: bytes) -> None:
        """Keep a sent batch for replays, and forget the oldest beyond the limits."""
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept and (
            len(self._kept) > self._limits.num_kept_batches or self._kept_bytes > self._limits.max_kept_bytes
        ):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def replay(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the batches from `number` on that are kept now: their numbers and payloads, in order.

        Those that are forgotten before their turn are left out, so that a slow reader keeps none in memory. O(kept)
        for each, since the place of the next one is looked for.
        """
        end = self._kept[-1][0] if self._kept else -1
        while True:
            index = bisect_left(self._kept, (number, b""))
            if index == len(self._kept) or self._kept[index][0] > end:
                return
            batch = self._kept[index]
            yield batch
            number = batch[0] + 1

    def snapshot(self, ts: float) -> Snapshot:
        """Return what is cached after all batches so far. O(blocks), one pointer each."""
        return Snapshot(self._next - 1, list(self._cached.values()), ts)

    def head(self, snapshot: Snapshot, request: int, index: int) -> SnapshotHead:
        """Return the head of a chunk."""
        total = max(1, -(-len(snapshot.places) // CHUNK_BLOCKS))
        return SnapshotHead(VERSION, request, self.epoch, snapshot.number, index, total)

    def refusal(self, request: int) -> SnapshotHead:
        """Return the head of a refusal."""
        return SnapshotHead(VERSION, request, self.epoch, self._next - 1, 0, 0)

    def chunk(self, snapshot: Snapshot, index: int) -> bytes:
        """Return a chunk's payload: a batch of events. Applied one after another, all chunks give the snapshot."""
        first: list[CacheEvent] = [] if index else [AllBlocksCleared()]
        stored = snapshot.events(index * CHUNK_BLOCKS, (index + 1) * CHUNK_BLOCKS)
        said = self._converter.convert([*first, *stored])
        return self._converter.codec.encode(EventBatch(snapshot.ts, said, self._rank))

    def _put(self, batch: Queued) -> None:
        self._queue.append(batch)
        self._queued_bytes += batch.num_bytes

    def _weigh(self, event: CacheEvent) -> int:
        """Return the approximate size of an event in bytes. Raises InvalidArgumentError for other objects."""
        if isinstance(event, AllBlocksCleared):
            return _BYTES_AN_EVENT
        if not isinstance(event, BlockStored | BlockRemoved):
            raise wrong("events", "BlockStored, BlockRemoved or AllBlocksCleared", event)
        self._converter.check(event)
        size = _BYTES_AN_EVENT + _BYTES_A_BLOCK * len(event.block_hashes)
        return size + len(event.tokens) if isinstance(event, BlockStored) else size

    def _follow(self, event: CacheEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._cached.clear()
        elif isinstance(event, BlockRemoved):
            group, medium = event.group_idx, event.medium
            for digest in event.block_hashes:
                self._cached.pop((group, medium, digest), None)
        elif isinstance(event, BlockStored):
            num_blocks = len(event.block_hashes)
            for start in range(0, num_blocks, PIECE_BLOCKS):
                piece = part_of(event, start, start + PIECE_BLOCKS) if num_blocks > PIECE_BLOCKS else event
                keys = zip(repeat(event.group_idx), repeat(event.medium), piece.block_hashes, strict=False)
                self._cached.update(zip(keys, zip(repeat(piece), count(), strict=False), strict=False))


def _joined(places: Iterable[_Place]) -> Iterator[BlockStored]:
    """Yield events that store the blocks at `places`. Consecutive blocks of one event are together."""
    event, first, last = None, 0, -1
    for found, position in places:
        if found is event and position == last + 1:
            last = position
            continue
        if event is not None:
            yield part_of(event, first, last + 1)
        event, first, last = found, position, position
    if event is not None:
        yield part_of(event, first, last + 1)
