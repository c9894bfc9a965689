"""The publisher over real sockets: what vLLM's clients expect, and what happens when something goes wrong."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
import zmq

from bench.ports import free_ports
from kvblocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    InvalidArgumentError,
    KVBlocksError,
    KVCacheManager,
    Sequence,
)
from kvblocks.wire import (
    Converter,
    EventBatch,
    EventMirror,
    EventPublisher,
    MirrorClient,
    PublisherClosedError,
    Source,
    decode,
)
from kvblocks.wire.convert import to_u64
from kvblocks.wire.frames import (
    END,
    SNAPSHOT,
    VERSION,
    SnapshotHead,
    pack_number,
    read_reply,
    read_request,
    replay_request,
    snapshot_reply,
    snapshot_request,
)
from kvblocks.wire.ledger import Limits
from kvblocks.wire.publisher import check_endpoint, new_epoch

LOCAL = "tcp://127.0.0.1:0"
SECONDS = 60  # limit for what comes at once, unless the machine is very busy


def stored(number: int, num_blocks: int = 1) -> BlockStored:
    digests = tuple((number + block).to_bytes(32, "big") for block in range(num_blocks))
    return BlockStored(digests, None, bytes(16 * num_blocks), 4)


def make(**options) -> EventPublisher:
    return EventPublisher(LOCAL, LOCAL, **{"heartbeat": None} | options)


@contextmanager
def subscriber(publisher: EventPublisher, topic: bytes = b""):
    """A plain subscriber, once the publisher knows of it. It comes too late for the first batch."""
    wait_for(lambda: publisher.num_sent)
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.RCVTIMEO = 1000 * SECONDS
    socket.subscribe(topic)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(publisher.endpoint)
    assert monitor.poll(1000 * SECONDS)
    socket.disable_monitor()
    monitor.close(0)
    with asker(publisher) as asks:  # the subscription follows the handshake, and is there before what comes later
        asks.send_multipart(replay_request(publisher.number + 1))
        assert asks.recv_multipart()[2] == END
    time.sleep(0.2)  # in the milliseconds behind a batch, libzmq doesn't look whether there is one
    try:
        yield socket
    finally:
        socket.close(0)


@contextmanager
def asker(publisher: EventPublisher):
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.RCVTIMEO = 1000 * SECONDS
    assert publisher.replay_endpoint
    socket.connect(publisher.replay_endpoint)
    try:
        yield socket
    finally:
        socket.close(0)


class SlowConverter(Converter):
    """A publisher whose thread is kept waiting until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()
        self.may_go.set()

    def convert(self, events):
        assert self.may_go.wait(SECONDS)
        return super().convert(events)


def wait_for(condition) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_frames_and_replays_are_vllms():
    """As vLLM's own subscriber reads them: three parts; a replay has a part before and ends in -1."""
    with make(topic="kv@pod@model", epoch=0) as publisher, subscriber(publisher, b"kv@pod@") as socket:
        assert publisher.publish([stored(1), BlockRemoved((bytes(32),))])
        topic, number, payload = socket.recv_multipart()
        assert (topic, number) == (b"kv@pod@model", (1).to_bytes(8, "big"))
        batch = decode(payload)
        assert batch.data_parallel_rank == 0 and [event.block_hashes for event in batch.events] == [[1], [0]]
        with asker(publisher) as asks:
            asks.send_multipart((b"", (0).to_bytes(8, "big")))
            replies = [asks.recv_multipart() for _ in range(3)]
        assert [reply[0] for reply in replies] == [b""] * 3
        assert replies[1][1:] == [topic, number, payload] and replies[2][1:] == [b"", END, b""]
        assert decode(replies[0][3]).events == Converter().convert([AllBlocksCleared()])


def test_numbers_go_on_from_an_epoch_that_is_later_than_all_before():
    epochs = [new_epoch()]
    time.sleep(0.01)
    with make(data_parallel_rank=3) as publisher, subscriber(publisher) as socket:
        epochs.append(publisher.epoch)
        publisher.publish([stored(1)])
        _, number, payload = socket.recv_multipart()
        assert int.from_bytes(number, "big") == publisher.epoch + 1
        assert decode(payload).data_parallel_rank == 3
    time.sleep(0.01)
    epochs.append(new_epoch())
    assert epochs == sorted(epochs) and len({*epochs}) == 3 and 1 << 60 < epochs[0] < 1 << 62


def test_no_events_are_no_batch():
    with make(epoch=0) as publisher, subscriber(publisher) as socket:
        wait_for(lambda: publisher.num_sent == 1)
        assert publisher.publish([]) and publisher.publish([stored(1)])
        assert int.from_bytes(socket.recv_multipart()[1], "big") == 1


def test_heartbeats_are_numbered():
    with make(epoch=0, heartbeat=0.05) as publisher, subscriber(publisher) as socket:
        first, second = (socket.recv_multipart() for _ in range(2))
        assert int.from_bytes(second[1], "big") == int.from_bytes(first[1], "big") + 1
        assert decode(first[2]).events == decode(second[2]).events == []


def test_a_snapshot_is_what_was_said_up_to_its_number():
    with make() as publisher, asker(publisher) as asks:
        publisher.publish([stored(0, 3000)])
        publisher.publish([BlockRemoved(((5).to_bytes(32, "big"),))])
        asks.send_multipart(snapshot_request(7))
        chunks = [read_reply(asks.recv_multipart()) for _ in range(3)]
    assert [chunk.head.index for chunk in chunks] == [0, 1, 2]
    head = chunks[0].head
    assert (head.version, head.request, head.epoch, head.total) == (VERSION, 7, publisher.epoch, 3)
    assert head.number == publisher.epoch + 2
    first, *rest = [event for chunk in chunks for event in decode(chunk.payload).events]
    assert first == Converter().convert([AllBlocksCleared()])[0]
    assert [name for event in rest for name in event.block_hashes] == [n for n in range(3000) if n != 5]
    parents = {event.block_hashes[0]: event.parent_block_hash for event in rest}
    assert all(len(event.token_ids) == 4 * len(event.block_hashes) for event in rest)
    assert parents[0] is None and parents[6] == 5 and parents[32] == 31


def test_what_does_not_fit_is_dropped_and_seen():
    """The publisher's thread is kept from its queue while more events come than the queue holds."""
    limits, converter = Limits(max_queued_batches=3), SlowConverter()
    with make(limits=limits, epoch=0, converter=converter) as publisher, subscriber(publisher) as socket:
        wait_for(lambda: publisher.num_queued == 0)
        converter.may_go.clear()
        publisher.publish([stored(1)])
        wait_for(lambda: publisher.num_queued == 0)
        fits = [publisher.publish([stored(number)]) for number in range(2, 8)]
        assert fits == [True] * 3 + [False] * 3 and publisher.num_dropped == 3
        converter.may_go.set()
        wait_for(lambda: publisher.num_queued == 0)
        publisher.publish([stored(8)])
        assert [int.from_bytes(socket.recv_multipart()[1], "big") for _ in range(5)] == [1, 2, 3, 4, 8]
        with MirrorClient({"w": Source(publisher.endpoint, publisher.replay_endpoint)}) as client:
            publisher.publish([stored(9)])
            wait_for(lambda: client.receive(0.1) >= 0 and client.mirror.number("w") == 9)
            assert client.mirror.is_complete("w") and client.mirror.count("w") == 9


def test_bytes_are_bounded_too():
    limits = Limits(max_queued_bytes=10_000)
    with make(limits=limits) as publisher:
        assert not publisher.publish([stored(0, 100)])
        assert publisher.publish([stored(0)]) and publisher.num_dropped == 1


def test_kept_batches_are_bounded():
    with make(limits=Limits(num_kept_batches=3, max_kept_bytes=600), epoch=0) as publisher, asker(publisher) as asks:
        for number in range(9):
            publisher.publish([stored(number)])
        wait_for(lambda: publisher.num_sent == 10)
        asks.send_multipart((b"", bytes(8)))
        numbers = [int.from_bytes(asks.recv_multipart()[2], "big") for _ in range(4)]
        assert numbers == [7, 8, 9, 2**64 - 1]
        publisher.publish([stored(0, 100)])
        wait_for(lambda: publisher.num_sent == 11)
        asks.send_multipart((b"", bytes(8)))
        assert asks.recv_multipart()[2] == END  # that one is larger than all that may be kept


def test_requests_that_are_none_are_answered_by_nothing():
    with make() as publisher, asker(publisher) as asks:
        for parts in ([b"x"], [b"", b"12"], [b"x", bytes(8)], [b"", SNAPSHOT, b"\xc1"], [b""] * 5):
            asks.send_multipart(parts)
        wait_for(lambda: publisher.num_errors == 5)
        asks.send_multipart((b"", b"\xff" * 7 + b"\xfe"))
        assert asks.recv_multipart() == [b"", b"", END, b""] and publisher.num_requests == 1


FLOODER = """
import os, sys, zmq

context = zmq.Context()
one = context.socket(zmq.DEALER if sys.argv[2] == "ask" else zmq.SUB)
monitor = one.get_monitor_socket(zmq.EVENT_DISCONNECTED)
one.connect(sys.argv[1])
if sys.argv[2] == "ask":
    one.send_multipart([b"", bytes(2**20)])
else:
    one.subscribe(bytes(2**20))
print("cut off" if monitor.poll(60_000) else "heard", flush=True)
os._exit(0)  # without the end of the context, which recurses over the topic's bytes
"""


@pytest.mark.parametrize("how", ["ask", "subscribe"])
def test_who_sends_more_than_a_request_is_cut_off(how):
    """Otherwise whoever can connect could have the engine's process take any memory."""
    with make() as publisher, asker(publisher) as asks:
        endpoint = publisher.replay_endpoint if how == "ask" else publisher.endpoint
        ended = subprocess.run(
            [sys.executable, "-c", FLOODER, endpoint, how], capture_output=True, text=True, check=True
        )
        assert ended.stdout.strip() == "cut off" and publisher.num_errors == publisher.num_requests == 0
        asks.send_multipart(snapshot_request(3))
        assert read_reply(asks.recv_multipart()).head.request == 3


@contextmanager
def deaf_asker(publisher: EventPublisher):
    """Somebody who asks and never reads, whose buffers are small."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 4096)
        socket.connect(publisher.replay_endpoint)
        yield socket


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_reads_nothing_takes_little_and_hinders_nobody():
    """A hundred replays of 40 MB each are asked for, by consumers that read none of them."""
    limits = Limits(max_consumer_bytes=1 << 20, max_answer_bytes=1 << 23)
    with make(limits=limits) as publisher, ExitStack() as stack:
        for number in range(200):
            publisher.publish([stored(1000 * number, 1000)])
        wait_for(lambda: publisher.num_sent == 201)
        before = resident_bytes()
        for _ in range(20):
            deaf = stack.enter_context(deaf_asker(publisher))
            for _ in range(5):
                deaf.send_multipart(replay_request(publisher.epoch))
        wait_for(lambda: publisher.num_requests == 100)
        with MirrorClient({"w": Source(publisher.endpoint, publisher.replay_endpoint)}, patience=SECONDS) as client:
            wait_for(lambda: client.receive(0.1) >= 0 and client.mirror.is_complete("w"))
        with asker(publisher) as asks:
            asks.send_multipart(replay_request(publisher.epoch))
            assert [asks.recv_multipart()[2] for _ in range(202)][-1] == END
        assert resident_bytes() - before < 64 << 20 and publisher.num_answer_bytes < 1 << 23
        assert publisher.num_errors == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere TCP has no such time limit")
def test_who_reads_nothing_for_a_while_goes(monkeypatch):
    for module in ("answers", "publisher"):
        monkeypatch.setattr(f"kvblocks.wire.{module}.PATIENCE_S", 0.3)
    with make(limits=Limits(max_consumer_bytes=1 << 21)) as publisher, deaf_asker(publisher) as deaf:
        for number in range(1000):
            publisher.publish([stored(1000 * number, 1000)])
        wait_for(lambda: publisher.num_sent == 1001)
        deaf.send_multipart(replay_request(publisher.epoch))
        wait_for(lambda: publisher.num_answer_bytes > 1 << 20)
        wait_for(lambda: not publisher._answers.is_asked)  # noqa: SLF001

        def is_cut_off():
            with asker(publisher) as asks:  # the publisher looks at what was taken when there is something to do
                asks.send_multipart(replay_request(publisher.number + 1))
                asks.recv_multipart()
            return publisher.num_answer_bytes < 1 << 20

        wait_for(is_cut_off)
        assert publisher.num_errors == 0


def test_who_asks_and_goes_is_forgotten():
    with make() as publisher:
        publisher.publish([stored(0, 3000)])
        for _ in range(20):
            with asker(publisher) as asks:
                asks.send_multipart(replay_request(0))
                asks.send_multipart(snapshot_request(1))
                asks.recv_multipart()
        with asker(publisher) as asks:
            asks.send_multipart(snapshot_request(3))
            assert read_reply(asks.recv_multipart()).head.request == 3
        wait_for(lambda: not publisher._answers.is_asked)  # noqa: SLF001
        assert publisher.num_errors == publisher.num_lost_answers == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_too_many_snapshots_at_once_are_refused():
    with make(limits=Limits(num_snapshots=0)) as publisher, asker(publisher) as asks:
        asks.send_multipart(snapshot_request(3))
        chunk = read_reply(asks.recv_multipart())
        assert (chunk.head.total, chunk.head.request, chunk.payload) == (0, 3, b"")


def test_a_batch_that_cannot_be_sent_ends_nothing():
    with make(epoch=0) as publisher, subscriber(publisher) as socket:
        publisher.publish([BlockStored((b"x",), None, b"odd", 4)])  # three bytes are no token
        publisher.publish([stored(2)])
        assert int.from_bytes(socket.recv_multipart()[1], "big") == 2
        assert publisher.num_errors == 1


def test_closing_sends_what_waits_and_frees_the_endpoints():
    publisher = make(epoch=0)
    with subscriber(publisher) as socket:
        for number in range(100):
            publisher.publish([stored(number)])
        publisher.close()
        publisher.close()
        assert [int.from_bytes(socket.recv_multipart()[1], "big") for _ in range(100)] == list(range(1, 101))
    with pytest.raises(PublisherClosedError, match="expected an open publisher, got a closed one"):
        publisher.publish([stored(1)])
    with EventPublisher(publisher.endpoint, publisher.replay_endpoint):
        pass


def test_bad_events_change_nothing():
    with make(epoch=0) as publisher, subscriber(publisher) as socket:
        wait_for(lambda: publisher.num_sent == 1)
        for bad in ([stored(1), None], [stored(1), 7]):
            with pytest.raises(InvalidArgumentError, match="expected"):
                publisher.publish(bad)
        publisher.publish([stored(2)])
        assert int.from_bytes(socket.recv_multipart()[1], "big") == 1
    with make(converter=Converter("sglang")) as publisher:
        number = publisher.number
        with pytest.raises(InvalidArgumentError, match="SGLang's events have no groups"):
            publisher.publish([stored(1), BlockStored((b"x",), None, b"", 4, (), 1)])
        assert publisher.snapshot() == (number, [])


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.1.2.3:1", "tcp://host:1", "tcp://eth0:1"]
)
def test_only_this_machine_is_bound_unless_told(endpoint):
    with pytest.raises(InvalidArgumentError, match=r"token ids.*allow_remote=True"):
        EventPublisher(endpoint)
    with pytest.raises(InvalidArgumentError, match="token ids"):
        EventPublisher(LOCAL, endpoint)
    check_endpoint(endpoint, allow_remote=True)


@pytest.mark.parametrize(
    "endpoint", ["tcp://localhost:1", "tcp://127.9.9.9:*", "tcp://[::1]:1", "ipc:///x", "inproc://x"]
)
def test_what_only_this_machine_reaches_is_bound(endpoint):
    check_endpoint(endpoint, allow_remote=False)


@pytest.mark.parametrize(
    "endpoint", ["", "udp://x:1", "tcp://127.0.0.1", "tcp://127.0.0.1:70000", "tcp://x:y", None, 5]
)
def test_endpoints_that_are_none_are_refused(endpoint):
    with pytest.raises(InvalidArgumentError, match="endpoint: expected"):
        EventPublisher(endpoint, allow_remote=True)


@pytest.mark.parametrize(
    "options", [{"topic": "\0x"}, {"topic": b"x"}, {"epoch": -1}, {"data_parallel_rank": -1}, {"heartbeat": 0}]
)
def test_options_are_checked(options):
    with pytest.raises(InvalidArgumentError, match="expected"):
        make(**options)


def test_a_long_heartbeat_ends_nothing():
    with make(heartbeat=86_400) as publisher:
        wait_for(lambda: publisher.num_sent == 1)
        assert publisher.publish([stored(1)])
        wait_for(lambda: publisher.num_sent == 2)
    for events in (None, 5):
        with make() as publisher, pytest.raises(InvalidArgumentError, match="events: expected"):
            publisher.publish(events)
    with pytest.raises(InvalidArgumentError, match="heartbeat: expected"):
        make(heartbeat=float("inf"))


def test_a_mirror_goes_on_with_another_client():
    mirror = EventMirror()
    with MirrorClient({"w": Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9")}, mirror=mirror) as client:
        client.receive()
    mirror.add("of another client")
    with make() as publisher:
        source = Source(publisher.endpoint, publisher.replay_endpoint)
        with MirrorClient({"w": source}, mirror=mirror, patience=SECONDS) as client:
            wait_for(lambda: client.receive(0.01) >= 0 and mirror.is_complete("w"))


def test_an_endpoint_in_use_is_an_error_and_leaks_nothing():
    with make() as publisher:
        with pytest.raises(KVBlocksError, match="expected a free address") as raised:
            EventPublisher(LOCAL, publisher.endpoint)
        assert not isinstance(raised.value, InvalidArgumentError)  # it may be free later
        assert [thread.name for thread in threading.enumerate()].count("kvblocks-events") == 1


ENGINE = """
import sys, time
from random import Random
from kvblocks import KVCacheManager, Sequence
from kvblocks.wire import EventPublisher

publisher = EventPublisher(sys.argv[1], sys.argv[2], heartbeat=0.05)
manager = KVCacheManager(200, 4, enable_events=True, hash_algorithm="sha256")
random = Random(int(sys.argv[3]))
print("up", flush=True)
for step in range(int(sys.argv[4])):
    sequence = Sequence(step, [random.randrange(4) for _ in range(random.randrange(4, 80))])
    if manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None:
        manager.free(sequence)
    publisher.publish(manager.take_events())
    time.sleep(0.0002)
print(*[block.block_hash.hex() for block in manager.blocks if block.block_hash], flush=True)
time.sleep(600)
"""


def test_workers_that_are_killed_and_started_again():
    """Real processes are killed with SIGKILL at work. The last ones run to a quiet moment."""
    ports = iter(free_ports(4))
    ends = [tuple(f"tcp://127.0.0.1:{next(ports)}" for _ in range(2)) for _ in range(2)]
    sources = {f"w{number}": Source(*end) for number, end in enumerate(ends)}
    random, running = Random(1), {}
    with MirrorClient(sources, patience=0.2) as client:
        try:
            for life in range(3):
                for number, end in enumerate(ends):
                    command = [
                        sys.executable,
                        "-c",
                        ENGINE,
                        *end,
                        str(10 * life + number),
                        "400" if life == 2 else "99999",
                    ]
                    running[number] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                for process in running.values():
                    assert process.stdout is not None and process.stdout.readline() == "up\n"
                if life < 2:
                    until = time.monotonic() + random.uniform(0.3, 0.6)
                    while time.monotonic() < until:
                        client.receive(0.05)
                    for process in running.values():
                        os.kill(process.pid, signal.SIGKILL)
                        process.wait()
                        process.stdout.close()
            for number, process in running.items():
                cached = {to_u64(bytes.fromhex(name)) for name in process.stdout.readline().split()}
                mirror, worker = client.mirror, f"w{number}"

                def is_equal(worker=worker, cached=cached, mirror=mirror):
                    client.receive(0.1)
                    return (
                        mirror.is_complete(worker)
                        and mirror.places(worker).values()
                        and cached == {*next(iter(mirror.places(worker).values()))}
                    )

                wait_for(is_equal)
                assert len(cached) > 50 and client.silence(worker) < SECONDS
        finally:
            for process in running.values():
                process.kill()
                process.wait()
                process.stdout.close()


def test_an_engine_is_followed_through_everything():
    """A manager in this process, published to a client that comes late and seldom reads."""
    manager = KVCacheManager(64, 4, enable_events=True, hash_algorithm="sha256")
    random = Random(2)
    limits = Limits(num_kept_batches=5, num_sending=20)
    with make(limits=limits, heartbeat=0.05) as publisher:
        for step in range(300):
            if step == 100:
                client = MirrorClient({"w": Source(publisher.endpoint, publisher.replay_endpoint)}, patience=0.2)
            sequence = Sequence(step, [random.randrange(3) for _ in range(random.randrange(4, 40))])
            if manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None:
                manager.free(sequence)
            publisher.publish(manager.take_events())
            if step > 100 and step % 50 == 0:
                client.receive(0.01)
        with client:
            cached = {to_u64(block.block_hash) for block in manager.blocks if block.block_hash is not None}
            last = publisher.number
            wait_for(lambda: client.receive(0.05) >= 0 and (client.mirror.number("w") or 0) >= last)
            wait_for(lambda: client.receive(0.05) >= 0 and client.mirror.is_complete("w"))
            (held,) = client.mirror.places("w").values()
            assert held == cached


def test_clients_check_what_they_are_given():
    with pytest.raises(InvalidArgumentError, match="patience"):
        MirrorClient({}, patience=0)
    with pytest.raises(zmq.ZMQError):
        MirrorClient({"w": Source("nowhere")})
    with make() as publisher, MirrorClient({"w": Source(publisher.endpoint)}) as client:
        with pytest.raises(InvalidArgumentError, match="a name that is not in use"):
            client.add("w", Source(publisher.endpoint))
        with pytest.raises(InvalidArgumentError, match="worker: expected one of"):
            client.silence("x")
        with pytest.raises(zmq.ZMQError):
            client.add("v", Source(publisher.endpoint, "nowhere"))
        client.remove("w")
        assert client.mirror.workers == [] and client.receive(0.01) == 0


@pytest.mark.parametrize(
    ("timeout", "waits"), [(-0.5, 0), (-float("inf"), 0), (0.05, 50), (9, 1000), (float("inf"), 1000)]
)
def test_a_wait_ends(timeout, waits, monkeypatch):
    """What is left of a deadline that has passed is below 0, where a poll would wait for ever."""
    asked = []
    with MirrorClient({}) as client:
        monkeypatch.setattr(client._poller, "poll", lambda wait: asked.append(wait) or [])  # noqa: SLF001
        assert client.receive(timeout) == 0 and asked == [waits]
        for wrong in (float("nan"), "1"):
            with pytest.raises(InvalidArgumentError, match="timeout: expected a number, got"):
                client.receive(wrong)
    with MirrorClient({}, patience=float("inf")) as client:
        monkeypatch.setattr(client._poller, "poll", lambda wait: asked.append(wait) or [])  # noqa: SLF001
        assert client.receive(float("inf")) == 0 and asked[-1] == 3_600_000


class SlowMirror(EventMirror):
    """Takes a second for each batch, by its own clock."""

    now = 0.0

    def receive(self, worker, number, payload):
        self.now += 1.0
        super().receive(worker, number, payload)


def test_a_call_keeps_its_time_and_workers_take_turns(monkeypatch):
    """However much has come, and from whom: a message more may be read after the time is over."""
    context, mirror = zmq.Context.instance(), SlowMirror()
    monkeypatch.setattr("kvblocks.wire.client.time.monotonic", lambda: mirror.now)
    payload = Converter().codec.encode(EventBatch(1.0, [], 0))
    sockets = {f"w{number}": context.socket(zmq.PUB) for number in range(3)}
    try:
        for name, socket in sockets.items():
            socket.bind(f"inproc://{name}-of-turns")
        sources = {name: Source(f"inproc://{name}-of-turns") for name in sockets}
        with MirrorClient(sources, mirror=mirror, patience=SECONDS) as client:
            for number, socket in enumerate(sockets.values()):
                for at in range(9 - number):
                    socket.send_multipart([b"", pack_number(at), payload])
            numbers = []
            for _ in range(4):
                assert client.receive(0.1) == client.receive() == 1
                numbers.append([mirror.number(name) for name in sockets])
            assert numbers == [[0, 0, None], [1, 0, 0], [1, 1, 1], [2, 2, 1]]
            assert client.receive(3.0) == 3 and [mirror.number(name) for name in sockets] == [3, 3, 2]
            assert client.receive(SECONDS) == 9 + 8 + 7 - 11 and client.receive() == 0
    finally:
        for socket in sockets.values():
            socket.close(0)


def test_an_answer_that_waits_for_its_turn_is_not_asked_for_again(monkeypatch):
    mirror = SlowMirror()
    monkeypatch.setattr("kvblocks.wire.client.time.monotonic", lambda: mirror.now)
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.bind("inproc://asked-once")
        with MirrorClient({"w": Source("inproc://nobody", "inproc://asked-once")}, mirror=mirror, patience=2) as client:
            client.receive()
            (name, *parts) = router.recv_multipart()
            assert read_request(parts).request == 1
            head = SnapshotHead(VERSION, 1, 5, 6, 0, 1)
            client._turns.clear()  # noqa: SLF001  # the answer's turn doesn't come
            router.send_multipart([name, *snapshot_reply(head, Converter().codec.encode(EventBatch(1.0, [], 0)))])
            mirror.now += 3
            client.receive()
            assert not router.poll(0)
            client._lines["w"].asks.recv_multipart()  # noqa: SLF001  # now there is none
            client.receive()
            assert read_request(router.recv_multipart()[1:]).request == 2


def test_malformed_messages_are_counted_and_skipped():
    context = zmq.Context.instance()
    with context.socket(zmq.PUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        with MirrorClient({"w": Source(f"tcp://127.0.0.1:{port}")}) as client:

            def hears():
                for parts in ([b"one"], [b"", b"1234567", b""], [b"", bytes(8), b"\xc1"], [b""] * 4):
                    pub.send_multipart(parts)
                client.receive(0.01)
                return client.num_malformed > 3 and client.mirror.stats.num_malformed

            wait_for(hears)
            assert client.mirror.number("w") is None
