"""Events of an engine over ZMQ: live for all subscribers; replays and snapshots on request."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import ip_address
from itertools import islice
from random import SystemRandom
from types import TracebackType
from typing import Final, Self

from kvblocks.arguments import check_count, check_number, wrong
from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.events import BlockStored, CacheEvent
from kvblocks.wire.answers import PATIENCE_S, Answers
from kvblocks.wire.convert import Converter
from kvblocks.wire.errors import MalformedFrameError, PublisherClosedError, missing
from kvblocks.wire.frames import (
    MAX_NUMBER,
    pack_number,
    read_request,
)
from kvblocks.wire.ledger import Ledger, Limits, Snapshot

try:
    import zmq
except ImportError as _error:
    raise missing("pyzmq", _error) from _error

_log = logging.getLogger(__name__)

_NUM_AT_ONCE: Final = 64  # in turn, at most so many batches are sent, requests read, and answers sent
_MOST_ANSWERING_S: Final = 0.01  # in turn
_WAIT_FOR_ROOM_MS: Final = 5
_NO_LIMIT: Final = 0
_LINGER_MS: Final = 500
_RANDOM_BITS: Final = 20
_MOST_HEARTBEAT: Final = 86_400
_MOST_PART_BYTES: Final = 1 << 16  # of what a peer sends: a request or a topic. Longer ones end its connection


class EventPublisher:
    """Publishes what `take_events` returns, from a thread of its own. Thread-safe.

    - endpoint: where consumers subscribe, such as "tcp://127.0.0.1:5557"; port 0 takes a free one.
    - replay_endpoint: where they ask for replays and snapshots; None: nowhere.
    - topic: sent before each batch.
    - converter: the encoding; None: vLLM's.
    - data_parallel_rank: the rank that is written in batches.
    - heartbeat: seconds without events after which an empty batch is sent; None: never.
    - allow_remote: whether it may bind an address that other machines can reach. Token ids are private, and nothing
      here checks who listens.
    - epoch: the first batch's number; None: made from the time and random bits. vLLM begins with 0. With 0, a consumer
      may not notice a restart.

    Make it before the first event is taken, because it starts by saying that nothing is cached. Raises
    InvalidArgumentError, also for an address that can't be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        converter: Converter | None = None,
        data_parallel_rank: int = 0,
        heartbeat: float | None = 5.0,
        allow_remote: bool = False,
        limits: Limits | None = None,
        epoch: int | None = None,
    ) -> None:
        check_endpoint(endpoint, allow_remote=allow_remote)
        if replay_endpoint is not None:
            check_endpoint(replay_endpoint, allow_remote=allow_remote)
        if not isinstance(topic, str) or topic.startswith("\0"):
            raise wrong("topic", "a str that begins with no NUL", topic)
        first = new_epoch() if epoch is None else check_count("epoch", epoch, 0, MAX_NUMBER >> 1)
        rank = check_count("data_parallel_rank", data_parallel_rank, 0)
        if heartbeat is not None and not 0 < check_number("heartbeat", heartbeat) <= _MOST_HEARTBEAT:
            raise wrong("heartbeat", f"seconds above 0 and up to {_MOST_HEARTBEAT}, or None", heartbeat)
        self._topic = topic.encode()
        self._heartbeat = heartbeat
        self._limits = limits or Limits()
        self._ledger = Ledger(converter or Converter(), self._limits, first, rank, time.time())
        self._lock = threading.Lock()
        self._is_closing = False
        self._deadline = 0.0
        self._answers = Answers(self._ledger, self._limits, self._topic, self._snapshot)
        self._can_answer = False  # whether a consumer that waits for an answer had room for it
        self.num_sent = 0
        self.num_errors = 0
        self.num_requests = 0
        self._bind(endpoint, replay_endpoint)
        self._wakes, self._woken = socket.socketpair()
        self._wakes.settimeout(0)
        self._woken.settimeout(0)
        self._thread = threading.Thread(target=self._run, name="kvblocks-events", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The number of the first batch."""
        return self._ledger.epoch

    @property
    def number(self) -> int:
        """The number of the last batch, whether sent, waiting or dropped."""
        return self._ledger.next_number - 1

    @property
    def num_dropped(self) -> int:
        """How many batches were dropped because too much was waiting."""
        return self._ledger.num_dropped

    @property
    def num_queued(self) -> int:
        """How many batches wait to be sent."""
        return self._ledger.num_queued

    @property
    def num_lost_answers(self) -> int:
        """How often a consumer lost the answers that it had asked for, because it read nothing for 5 s."""
        return self._answers.num_lost

    @property
    def num_answer_bytes(self) -> int:
        """How many bytes of answers are on their way to consumers that asked."""
        return self._answers.num_bytes

    def publish(self, events: Iterable[CacheEvent]) -> bool:
        """Queue events to be sent as one batch. Return False if they were dropped, which consumers see as a gap.

        It doesn't wait for consumers or sockets. O(blocks), plus the wait for a lock: when a snapshot is asked for, the
        lock is held while a pointer per cached block is copied. Without events nothing is sent. Raises
        PublisherClosedError, and InvalidArgumentError for objects that aren't kvblocks' records; in both cases nothing
        has changed.
        """
        now = time.time()
        with self._lock:
            if self._is_closing:
                raise PublisherClosedError("publish: expected an open publisher, got a closed one")
            is_first_waiting = not self._ledger.num_queued
            fits = self._ledger.add(events, now)
        if is_first_waiting:
            self._wake()
        return fits

    def snapshot(self) -> tuple[int, list[BlockStored]]:
        """Return the last batch's number, and what is cached after all batches so far, parents first. O(blocks).

        Dropped batches are included, as in consumers' snapshots. Any thread may call it.
        """
        snapshot = self._snapshot()
        return snapshot.number, snapshot.events()

    def close(self, timeout: float = 2.0) -> None:
        """Send what waits, for at most `timeout` seconds, then stop. A second call does nothing."""
        with self._lock:
            if not self._is_closing:
                self._deadline = time.monotonic() + timeout
            self._is_closing = True
        self._wake()
        self._thread.join(timeout + 2 * _LINGER_MS / 1000)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind(self, endpoint: str, replay_endpoint: str | None) -> None:
        # Endpoints are free again only when their context has ended, so the publisher has one of its own. Endpoints
        # inside this process need the common context, or nobody would find them.
        is_inside = endpoint.startswith("inproc:") or (replay_endpoint or "").startswith("inproc:")
        self._own_context: zmq.Context[zmq.Socket[bytes]] | None = None if is_inside else zmq.Context()
        context = self._own_context or zmq.Context.instance()
        self._pub: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._router: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _bound(self._pub, endpoint, self._limits.num_sending)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._router = context.socket(zmq.ROUTER)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who has gone is an error, and forgotten
                self._router.setsockopt(zmq.TCP_MAXRT, int(1000 * PATIENCE_S))
                self._router.copy_threshold = 0
                self.replay_endpoint = _bound(self._router, replay_endpoint, _NO_LIMIT)  # `Answers` limits bytes
        except BaseException:
            self._close_sockets(0)
            raise

    def _close_sockets(self, linger_ms: int) -> None:
        for open_socket in (self._pub, self._router):
            if open_socket is not None:
                open_socket.close(linger_ms)
        if self._own_context is not None:
            self._own_context.term()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: the thread wakes anyway; closed: it has ended
            self._wakes.send(b"\0")

    def _run(self) -> None:
        """Send and answer until closed. From here on only this thread uses the sockets."""
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        sent_at = time.monotonic()
        try:
            while not self._is_over():
                poller.poll(self._wait_ms(sent_at))
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                try:
                    self._read_requests()
                    if self._send_some():
                        sent_at = time.monotonic()
                    elif self._heartbeat is not None and time.monotonic() - sent_at >= self._heartbeat:
                        with self._lock:
                            self._ledger.add_heartbeat(time.time())
                    self._send_answers()
                except zmq.ContextTerminated:
                    return
                except Exception:  # noqa: BLE001  # one bad batch or peer must not end the stream
                    self.num_errors += 1
                    _log.exception("kvblocks.wire: a batch or an answer was not sent")
        finally:
            with self._lock:
                self._is_closing = True
            self._close_sockets(_LINGER_MS)
            self._wakes.close()
            self._woken.close()

    def _is_over(self) -> bool:
        with self._lock:
            is_done = not (self._ledger.num_queued or self._answers.is_asked)
            return self._is_closing and (is_done or time.monotonic() > self._deadline)

    def _wait_ms(self, sent_at: float) -> int | None:
        if self._ledger.num_queued or self._can_answer:
            return 0
        if self._answers.is_asked:
            return _WAIT_FOR_ROOM_MS
        if self._heartbeat is None:
            return None
        return max(0, int(1000 * (sent_at + self._heartbeat - time.monotonic())) + 1)

    def _send_some(self) -> bool:
        for number in range(_NUM_AT_ONCE):
            with self._lock:
                batch = self._ledger.take()
            if batch is None:
                return number > 0
            payload = self._ledger.encode(batch)
            self._pub.send_multipart((self._topic, pack_number(batch.number), payload))
            self._ledger.keep(batch.number, payload)
            self.num_sent += 1
        return True

    def _read_requests(self) -> None:
        for _ in range(_NUM_AT_ONCE):
            if self._router is None:
                return
            try:
                client, *parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                asked = read_request(parts)
            except MalformedFrameError as error:
                self.num_errors += 1
                _log.warning("kvblocks.wire: %s", error)
                continue
            self.num_requests += 1
            self._answers.ask(client, asked)

    def _send_answers(self) -> None:
        """Send some of what was asked for. Live batches come next, so they never wait for whole answers."""
        if self._router is None:
            return
        self._can_answer = False
        began = time.monotonic()
        self._answers.settle(began)
        for client, parts in islice(self._answers.due(), _NUM_AT_ONCE):
            try:
                self._router.send_multipart((client, *parts[:-1]), zmq.SNDMORE)
                # Not copied: only then is it known when the connection has taken it.
                tracker = self._router.send(parts[-1], copy=False, track=True)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._answers.forget(client)  # it has gone
                continue
            self._answers.sent(client, parts, _is_taken(tracker), began)
            self._can_answer = True
            if time.monotonic() - began > _MOST_ANSWERING_S:
                return

    def _snapshot(self) -> Snapshot:
        with self._lock:
            return self._ledger.snapshot(time.time())


def _is_taken(tracker: "zmq.MessageTracker") -> Callable[[], bool]:
    return lambda: tracker.done


def new_epoch() -> int:
    """Return an epoch: the milliseconds since 1970, and 20 random bits. Later epochs are higher; all are below 2**63.

    Its numbers never reach those of a later publisher, unless it sends a million batches per millisecond.
    """
    return time.time_ns() // 1_000_000 << _RANDOM_BITS | SystemRandom().getrandbits(_RANDOM_BITS)


def check_endpoint(endpoint: str, *, allow_remote: bool) -> None:
    """Raise InvalidArgumentError unless `endpoint` is a valid endpoint that only this machine can reach.

    allow_remote: others may reach it too.
    """
    if not isinstance(endpoint, str) or not endpoint.startswith(("tcp://", "ipc://", "inproc://")):
        raise wrong("endpoint", "'tcp://HOST:PORT', 'ipc://PATH' or 'inproc://NAME'", endpoint)
    if not endpoint.startswith("tcp://"):
        return
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not colon or not (port == "*" or (port.isdecimal() and int(port) < 1 << 16)):
        raise wrong("endpoint", "'tcp://HOST:PORT'", endpoint)
    try:
        is_local = host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_local = False
    if not is_local and not allow_remote:
        raise InvalidArgumentError(
            f"endpoint: expected one that only this machine can reach, such as 'tcp://127.0.0.1:{port}', got"
            f" {endpoint!r}: events hold prompts' token ids, and whoever connects reads them. allow_remote=True"
            " (--kv-allow-remote) binds it anyway"
        )


def _bound(unbound: "zmq.Socket[bytes]", endpoint: str, hwm: int) -> str:
    """Bind a socket and return where."""
    unbound.setsockopt(zmq.SNDHWM, hwm)
    unbound.setsockopt(zmq.MAXMSGSIZE, _MOST_PART_BYTES)
    if "[" in endpoint:
        unbound.setsockopt(zmq.IPV6, 1)
    try:
        unbound.bind(endpoint)
    except zmq.ZMQError as error:
        kind = KVBlocksError if error.errno == zmq.EADDRINUSE else InvalidArgumentError  # in use: may be free later
        raise kind(f"endpoint: expected a free address of this machine, got {endpoint!r}: {error}") from error
    return unbound.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
