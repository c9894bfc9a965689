"""A mirror with sockets: it subscribes to publishers over ZMQ, and asks them for lost batches."""

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from kvblocks.arguments import check_number, wrong
from kvblocks.wire.errors import MalformedFrameError, missing
from kvblocks.wire.frames import ReplayEnd, SnapshotChunk, read_batch, read_reply, replay_request, snapshot_request
from kvblocks.wire.mirror import EventMirror

try:
    import zmq
except ImportError as _error:
    raise missing("pyzmq", _error) from _error

_LEAST_S: Final = 0.01  # the least time that a call may spend on messages that have come
_MOST_WAIT: Final = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class Source:
    """Where a worker publishes.

    endpoint: where its batches are sent. replay_endpoint: where to ask for replays; None: the worker can't be asked.
    topic: the prefix of its batches' topics.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(slots=True)
class _Line:
    """A worker's sockets. asks: None if it can't be asked. heard_at: when the last live message or answer came."""

    source: Source
    live: "zmq.Socket[bytes]"
    asks: "zmq.Socket[bytes] | None"
    asked_at: float | None = None
    heard_at: float = field(default_factory=time.monotonic)


class MirrorClient:
    """Feeds a mirror from the publishers of workers. Not thread-safe: only one thread may call `receive`.

    sources: for each worker's name, where it publishes. patience: seconds without an answer after which it asks again.
    """

    def __init__(
        self, sources: Mapping[str, Source], *, mirror: EventMirror | None = None, patience: float = 1.0
    ) -> None:
        if not check_number("patience", patience) > 0:
            raise wrong("patience", "seconds above 0", patience)
        self.mirror = mirror or EventMirror()
        self.num_malformed = 0
        self._patience = patience
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._poller = zmq.Poller()
        self._lines: dict[str, _Line] = {}
        self._turns: dict[zmq.Socket[bytes], str] = {}  # the worker of each socket; who was read last is last
        try:
            for worker, source in sources.items():
                self.add(worker, source)
        except BaseException:
            self.close()
            raise

    def add(self, worker: str, source: Source) -> None:
        """Listen to a worker. Raises InvalidArgumentError for a known worker, zmq.ZMQError for a bad endpoint."""
        if worker in self._lines:
            raise wrong("worker", "a name that is not in use", worker)
        live = self._connect(zmq.SUB, source.endpoint, source.topic)
        asks = None
        if source.replay_endpoint is not None:
            try:
                asks = self._connect(zmq.DEALER, source.replay_endpoint)
            except BaseException:
                live.close(0)
                raise
            self._poller.register(asks, zmq.POLLIN)
            self._turns[asks] = worker
        self._poller.register(live, zmq.POLLIN)
        self._turns[live] = worker
        self._lines[worker] = _Line(source, live, asks)
        if worker in self.mirror.workers:
            self.mirror.ask_anew(worker)  # another client's requests are not answered here
        self.mirror.add(worker, can_ask=asks is not None)

    def remove(self, worker: str) -> None:
        """Stop listening to a worker, and forget what it had. Raises InvalidArgumentError for an unknown worker."""
        self.mirror.remove(worker)
        line = self._lines.pop(worker)
        for one in (line.live, line.asks):
            if one is not None:
                self._poller.unregister(one)
                del self._turns[one]
                one.close(0)

    def silence(self, worker: str) -> float:
        """Return how many seconds ago something last came from a worker. If above its heartbeat, it may be gone."""
        if worker not in self._lines:
            raise wrong("worker", f"one of {list(self._lines)[:20]}", worker)
        return time.monotonic() - self._lines[worker].heard_at

    def receive(self, timeout: float = 0.0) -> int:
        """Process messages that have come, and ask for what is missing. Return the number of messages.

        timeout: seconds that the call may take, for waiting and for processing together; less than 0.01 counts as 0.01
        while there is something to process. It ends earlier when all that has come is processed, and with the message
        that it is at. Workers take turns, message by message, over calls too, so that none waits for all that another
        one sent. It waits no longer than `patience`. Call this again and again: it also notices answers that don't
        come. Raises InvalidArgumentError.
        """
        seconds = max(0.0, min(check_number("timeout", timeout), self._patience, _MOST_WAIT))
        end = time.monotonic() + max(seconds, _LEAST_S)
        ready = dict(self._poller.poll(int(1000 * seconds)))  # a poll below 0 would never end
        turns = deque(source for source in self._turns if source in ready)
        num_taken = 0
        while turns:
            source = turns.popleft()
            self._turns[source] = worker = self._turns.pop(source)
            if self._take(worker, self._lines[worker], source):
                num_taken += 1
                turns.append(source)
            if time.monotonic() >= end:
                break
        self._lose_patience()
        for ask in self.mirror.take_asks():
            if ask.worker not in self._lines or self._lines[ask.worker].asks is None:
                continue  # not this client's worker, or one that can't be asked
            self._send(
                self._lines[ask.worker],
                replay_request(ask.number) if ask.number is not None else snapshot_request(ask.request),
            )
        return num_taken

    def close(self) -> None:
        """Close the sockets. The mirror stays as it is."""
        for line in self._lines.values():
            line.live.close(0)
            if line.asks is not None:
                line.asks.close(0)
        self._lines.clear()
        self._turns.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, kind: int, endpoint: str, topic: str = "") -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        try:
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.RCVHWM, 100_000)
            if "[" in endpoint:
                made.setsockopt(zmq.IPV6, 1)
            if kind == zmq.SUB:
                made.subscribe(topic.encode())
            made.connect(endpoint)
        except BaseException:
            made.close(0)
            raise
        return made

    def _take(self, worker: str, line: _Line, source: "zmq.Socket[bytes]") -> bool:
        """Process one message. Return False if none has come."""
        try:
            parts = source.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        line.heard_at = time.monotonic()
        try:
            if source is line.live:
                _, at, payload = read_batch(parts)
                self.mirror.receive(worker, at, payload)
            else:
                self._take_reply(worker, line, parts)
        except MalformedFrameError:
            self.num_malformed += 1
        return True

    def _take_reply(self, worker: str, line: _Line, parts: list[bytes]) -> None:
        reply = read_reply(parts)
        line.asked_at = time.monotonic()  # the worker answers, so patience starts again
        if isinstance(reply, SnapshotChunk):
            self.mirror.receive_chunk(worker, reply)
        elif isinstance(reply, ReplayEnd):
            self.mirror.end_replay(worker)
        else:
            self.mirror.receive_replayed(worker, reply.number, reply.payload)

    def _lose_patience(self) -> None:
        now = time.monotonic()
        for worker, line in self._lines.items():
            if line.asked_at is not None and now - line.asked_at > self._patience:
                assert line.asks is not None
                if line.asks.poll(0):
                    continue  # it has answered; the answer's turn hasn't come
                line.asked_at = None
                self.mirror.give_up(worker)

    def _send(self, line: _Line, parts: list[bytes]) -> None:
        assert line.asks is not None
        line.asked_at = time.monotonic()
        with suppress(zmq.Again):  # there is no peer: it asks again when patience ends
            line.asks.send_multipart(parts, zmq.NOBLOCK)
