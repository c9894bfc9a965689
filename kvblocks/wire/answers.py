"""A publisher's answers to consumers' requests, without input or output: whose turn it is, and what is in flight.

A consumer that doesn't read must take neither memory nor the turns of others. So each message counts as on its way
until its consumer's connection has taken it, the bytes on their way are bounded for each consumer and in all, and
messages are made one at a time, when there is room. Of what may be on its way in all, a consumer gets at most a
sixteenth of what is left, so dozens that don't read leave some to others. A consumer that takes no message to its end
for `PATIENCE_S` loses its answers, and a snapshot already after a second if another consumer waits for its place.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Final

from kvblocks.wire.frames import END, VERSION, SnapshotRequest, pack_number, snapshot_reply
from kvblocks.wire.ledger import Ledger, Limits, Snapshot

PATIENCE_S: Final = 5.0
"""Seconds after which a consumer that takes nothing loses its answers."""

PATIENCE_IF_FULL_S: Final = 1.0
"""Seconds after which it loses a snapshot if there is no place for another consumer's."""

MOST_WAITING: Final = 32
"""Requests of one consumer that wait for its earlier ones. Further ones are dropped; it asks again."""

_SHARE: Final = 16
_BYTES_A_MESSAGE: Final = 2048  # bookkeeping of a message on its way, ours and libzmq's

Asked = int | SnapshotRequest
"""What a consumer asks for: all batches from a number on, or a snapshot."""

Parts = tuple[bytes, ...] | list[bytes]


class _Consumer:
    """A consumer that sent a request. moved_at: when it last took a message, or had none to take."""

    def __init__(self) -> None:
        self.waiting: deque[Asked] = deque()
        self.running: Asked | None = None
        self.answer: Generator[Parts] | None = None
        self.on_the_way: deque[tuple[Callable[[], bool], int]] = deque()
        self.num_bytes = 0
        self.moved_at = 0.0

    @property
    def is_asking(self) -> bool:
        return self.running is not None or bool(self.waiting)


class Answers:
    """The answers of one publisher. Not thread-safe.

    topic: sent with each replayed batch. take_snapshot: returns the ledger's snapshot, under its lock.
    """

    def __init__(self, ledger: Ledger, limits: Limits, topic: bytes, take_snapshot: Callable[[], Snapshot]) -> None:
        self.num_lost = 0
        self.num_bytes = 0
        self._ledger = ledger
        self._limits = limits
        self._topic = topic
        self._take_snapshot = take_snapshot
        self._num_snapshots = 0
        self._now = 0.0
        self._consumers: dict[bytes, _Consumer] = {}  # who was served last is last

    @property
    def is_asked(self) -> bool:
        """Whether anybody waits for an answer. O(consumers that have asked and not read all)."""
        return any(consumer.is_asking for consumer in self._consumers.values())

    def ask(self, client: bytes, asked: Asked) -> None:
        """Take a request. A client's requests are answered in order, but a snapshot's replaces its earlier ones."""
        consumer = self._consumers.setdefault(client, _Consumer())
        if isinstance(asked, SnapshotRequest):
            consumer.waiting = deque(one for one in consumer.waiting if not isinstance(one, SnapshotRequest))
            if isinstance(consumer.running, SnapshotRequest):
                self._end(consumer)
        if len(consumer.waiting) < MOST_WAITING:
            consumer.waiting.append(asked)

    def due(self) -> Iterator[tuple[bytes, Parts]]:
        """Yield messages and whom to send them to, in turn, while there is room. Call `sent` or `forget` after each."""
        turns = deque(client for client, consumer in self._consumers.items() if consumer.is_asking)
        while turns:
            client = turns.popleft()
            consumer = self._consumers[client]
            if not self._has_room(consumer):
                continue
            parts = self._next(consumer)
            if parts is None:
                continue
            self._consumers[client] = self._consumers.pop(client)
            yield client, parts
            if client in self._consumers:
                turns.append(client)

    def sent(self, client: bytes, parts: Parts, is_taken: Callable[[], bool], now: float) -> None:
        """Record a sent message. is_taken: returns whether the client's connection has taken it."""
        consumer = self._consumers[client]
        num_bytes = sum(map(len, parts)) + _BYTES_A_MESSAGE
        if not consumer.on_the_way:
            consumer.moved_at = now
        consumer.on_the_way.append((is_taken, num_bytes))
        consumer.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def settle(self, now: float) -> None:
        """See what was taken, and drop the answers of those who have taken nothing for too long. O(consumers)."""
        self._now = now
        for client, consumer in list(self._consumers.items()):
            while consumer.on_the_way and consumer.on_the_way[0][0]():
                num_bytes = consumer.on_the_way.popleft()[1]
                consumer.num_bytes -= num_bytes
                self.num_bytes -= num_bytes
                consumer.moved_at = now
            if consumer.is_asking and self._stalled_s(consumer) > PATIENCE_S:
                self.forget(client)
                self.num_lost += 1
            elif not consumer.on_the_way and not consumer.is_asking:
                del self._consumers[client]

    def forget(self, client: bytes) -> None:
        """Drop a client's answers. What is on its way to it still counts."""
        consumer = self._consumers[client]
        consumer.waiting.clear()
        self._end(consumer)

    def _has_room(self, consumer: _Consumer) -> bool:
        left = self._limits.max_answer_bytes - self.num_bytes
        return consumer.num_bytes < min(self._limits.max_consumer_bytes, left // _SHARE)

    def _stalled_s(self, consumer: _Consumer) -> float:
        return self._now - consumer.moved_at if consumer.on_the_way else 0.0

    def _make_room_for_a_snapshot(self) -> bool:
        """Return whether another snapshot may be sent, if need be instead of one that nobody reads."""
        if self._num_snapshots < self._limits.num_snapshots:
            return True
        running = [one for one in self._consumers.values() if isinstance(one.running, SnapshotRequest)]
        longest = max(running, key=self._stalled_s, default=None)
        if longest is None or self._stalled_s(longest) <= PATIENCE_IF_FULL_S:
            return False
        longest.waiting.clear()
        self._end(longest)
        self.num_lost += 1
        return True

    def _next(self, consumer: _Consumer) -> Parts | None:
        """Return the next message; None if all its requests are answered."""
        while consumer.is_asking:
            if consumer.running is None:
                consumer.running = asked = consumer.waiting.popleft()
                consumer.answer = self._replay(asked) if isinstance(asked, int) else self._snapshot(asked)
            parts = None if consumer.answer is None else next(consumer.answer, None)
            if parts is not None:
                return parts
            self._end(consumer)
        return None

    def _end(self, consumer: _Consumer) -> None:
        if consumer.answer is not None:
            consumer.answer.close()
        consumer.running = consumer.answer = None

    def _replay(self, number: int) -> Generator[Parts]:
        for at, payload in self._ledger.replay(number):
            yield (b"", self._topic, pack_number(at), payload)
        yield (b"", b"", END, b"")

    def _snapshot(self, asked: SnapshotRequest) -> Generator[Parts]:
        if asked.version != VERSION or not self._make_room_for_a_snapshot():
            yield snapshot_reply(self._ledger.refusal(asked.request), b"")
            return
        self._num_snapshots += 1
        try:
            snapshot = self._take_snapshot()
            index, total = 0, 1
            while index < total:
                head = self._ledger.head(snapshot, asked.request, index)
                yield snapshot_reply(head, self._ledger.chunk(snapshot, index))
                index, total = index + 1, head.total
        finally:
            self._num_snapshots -= 1
