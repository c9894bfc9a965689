"""A publisher's answers, by a clock of the test: whose turn it is, and what may be on its way."""

from itertools import islice

import pytest

from kvblocks import BlockStored
from kvblocks.wire import Converter, decode
from kvblocks.wire.answers import MOST_WAITING, PATIENCE_S, Answers
from kvblocks.wire.frames import END, VERSION, SnapshotRequest, read_reply
from kvblocks.wire.ledger import Ledger, Limits

NUM_BATCHES = 40


class Publisher:
    """A ledger's answers, and a network that takes messages when the test says so."""

    def __init__(self, num_blocks: int = 1, **limits: int) -> None:
        self.ledger = Ledger(Converter(), Limits(**limits), 0, 0, 1.0)
        for number in range(num_blocks):
            self.ledger.add([BlockStored((number.to_bytes(32, "big"),), None, bytes(16), 4)], 1.0)
        while (batch := self.ledger.take()) is not None:
            self.ledger.keep(batch.number, self.ledger.encode(batch))
        self.answers = Answers(self.ledger, Limits(**limits), b"topic", lambda: self.ledger.snapshot(2.0))
        self.sent: list[tuple[str, list[bytes]]] = []
        self.taken: set[int] = set()
        self.now = 0.0

    def ask(self, client: str, asked: int | SnapshotRequest) -> None:
        self.answers.ask(client.encode(), asked)

    def send(self, most: int = 10_000) -> str:
        """Send messages while there is room, and return to whom."""
        clients = []
        self.answers.settle(self.now)
        for client, parts in islice(self.answers.due(), most):
            number = len(self.sent)
            self.answers.sent(client, parts, lambda number=number: number in self.taken, self.now)
            self.sent.append((client.decode(), list(parts)))
            clients.append(client.decode())
        return "".join(clients)

    def take(self, client: str, most: int = 10_000) -> None:
        """The client reads messages."""
        unread = [at for at, (one, _) in enumerate(self.sent) if one == client and at not in self.taken]
        self.taken |= {*unread[:most]}

    def replies(self, client: str) -> list[int]:
        """The numbers that were sent to a client; -1 for the end."""
        replies = [read_reply(parts) for one, parts in self.sent if one == client]
        return [getattr(reply, "number", -1) for reply in replies]


def test_consumers_take_turns_and_each_gets_its_replays_in_order():
    publisher = Publisher(NUM_BATCHES)
    for turn in range(20):
        for client in "abc":
            publisher.ask(client, 25 + turn)
    clients = publisher.send(7)
    while sent := publisher.send(7):
        assert len(sent) <= 7
        clients += sent
    for client in "abc":
        wanted = [number for turn in range(20) for number in (*range(25 + turn, NUM_BATCHES + 1), -1)]
        assert publisher.replies(client) == wanted
    assert clients == "abc" * (len(clients) // 3) and not publisher.answers.is_asked
    assert publisher.sent[-1][1] == [b"", b"", END, b""]


def test_what_is_on_the_way_to_one_consumer_is_bounded_and_goes_on_when_it_reads():
    publisher = Publisher(NUM_BATCHES, max_consumer_bytes=20_000)
    publisher.ask("a", 0)
    num_sent = len(publisher.send())
    assert 5 < num_sent < NUM_BATCHES / 2 and publisher.answers.num_bytes < 20_000 + 4096
    assert publisher.send() == "" and publisher.answers.is_asked
    publisher.take("a", 3)
    assert publisher.send() == "aaa"
    while publisher.answers.is_asked:
        publisher.take("a")
        publisher.send()
    assert publisher.replies("a") == [*range(NUM_BATCHES + 1), -1]
    publisher.take("a")
    publisher.send()
    assert publisher.answers.num_bytes == 0 and not publisher.answers._consumers  # noqa: SLF001


def test_what_is_on_the_way_in_all_is_bounded_and_there_is_room_for_one_more():
    publisher = Publisher(NUM_BATCHES, max_answer_bytes=200_000)
    for number in range(25):
        publisher.ask(chr(ord("A") + number), 0)
        assert publisher.send(), "some room is left"
        assert publisher.answers.num_bytes < 200_000 + 4096
    publisher.ask("z", NUM_BATCHES)
    assert publisher.send(1) == "z"


def test_who_reads_nothing_loses_its_answers():
    publisher = Publisher(NUM_BATCHES, max_consumer_bytes=20_000)
    for client in "ab":
        publisher.ask(client, 0)
    publisher.send()
    publisher.now = PATIENCE_S - 0.1
    publisher.take("b", 1)  # it reads, slowly
    assert publisher.send() == "b" and publisher.answers.num_lost == 0
    publisher.now = PATIENCE_S + 0.1
    publisher.send()
    assert publisher.answers.num_lost == 1 and publisher.answers.is_asked
    publisher.ask("a", 7)  # it hasn't read since
    assert publisher.send() == "" and publisher.answers.num_lost == 2
    publisher.take("a")
    publisher.send()
    publisher.ask("a", NUM_BATCHES)
    assert publisher.send() == "aa"
    publisher.now = 2 * PATIENCE_S
    publisher.take("b", 1)
    publisher.send()
    assert publisher.answers.num_lost == 2


def test_who_has_nothing_to_read_loses_nothing():
    """While others take all the room, it waits."""
    publisher = Publisher(NUM_BATCHES, max_answer_bytes=1)
    publisher.ask("a", 0)
    assert publisher.send() == ""
    publisher.now = 100.0
    assert publisher.send() == "" and publisher.answers.num_lost == 0 and publisher.answers.is_asked


def test_a_replay_leaves_out_what_is_forgotten_meanwhile_and_ends_where_it_was_to_end():
    publisher = Publisher(NUM_BATCHES, max_consumer_bytes=20_000, num_kept_batches=NUM_BATCHES)
    publisher.ask("a", 0)
    publisher.send()
    sent = publisher.replies("a")
    for number in range(30):
        publisher.ledger.keep(NUM_BATCHES + 1 + number, b"later")
    while publisher.answers.is_asked:
        publisher.take("a")
        publisher.send()
    assert publisher.replies("a") == [*sent, *range(31, NUM_BATCHES + 1), -1]


def test_requests_of_one_consumer_are_bounded():
    publisher = Publisher(3)
    for _ in range(MOST_WAITING + 10):
        publisher.ask("a", 100)
    assert publisher.send() == "a" * MOST_WAITING


def test_a_snapshot_replaces_its_consumers_earlier_ones_and_gives_its_place_back():
    publisher = Publisher(3000, num_snapshots=1, max_consumer_bytes=1)
    for request in range(3):
        publisher.ask("a", SnapshotRequest(VERSION, request))
    assert publisher.send() == "a"
    publisher.ask("b", SnapshotRequest(VERSION, 7))
    assert publisher.send() == "b"
    assert read_reply(publisher.sent[-1][1]).head.total == 0, "one at a time"
    publisher.ask("a", SnapshotRequest(VERSION, 3))
    for _ in range(4):
        publisher.take("a")
        publisher.send()
    heads = [read_reply(parts).head for client, parts in publisher.sent if client == "a"]
    assert [(head.request, head.index, head.total) for head in heads] == [(2, 0, 3), (3, 0, 3), (3, 1, 3), (3, 2, 3)]
    publisher.take("b")
    publisher.ask("b", SnapshotRequest(VERSION, 8))
    publisher.send()
    reply = read_reply(publisher.sent[-1][1])
    assert (reply.head.request, reply.head.total, decode(reply.payload).ts) == (8, 3, 2.0)
    publisher.answers.forget(b"b")
    publisher.take("a")
    publisher.ask("a", SnapshotRequest(VERSION, 9))
    publisher.send()
    assert read_reply(publisher.sent[-1][1]).head.total == 3


def test_a_snapshot_that_nobody_reads_makes_room_for_another():
    publisher = Publisher(3000, num_snapshots=2, max_consumer_bytes=1)
    publisher.ask("a", SnapshotRequest(VERSION, 1))
    publisher.send()
    publisher.now = 0.5
    publisher.ask("b", SnapshotRequest(VERSION, 2))
    publisher.send()
    publisher.ask("c", SnapshotRequest(VERSION, 3))
    publisher.send()
    assert read_reply(publisher.sent[-1][1]).head.total == 0, "a has read nothing for half a second"
    publisher.now = 1.1
    publisher.take("c")
    publisher.ask("c", SnapshotRequest(VERSION, 4))
    assert publisher.send() == "c" and publisher.answers.num_lost == 1
    assert read_reply(publisher.sent[-1][1]).head.total == 3
    publisher.take("a")
    publisher.take("b")
    assert publisher.send() == "b", "a has lost its own"
    publisher.ask("d", SnapshotRequest(VERSION, 5))
    publisher.send()
    assert read_reply(publisher.sent[-1][1]).head.total == 0, "b reads, and c is new"


def test_an_answer_that_cant_be_made_ends_alone():
    publisher = Publisher(3)
    publisher.ledger.add([BlockStored((b"x",), None, b"odd", 4)], 1.0)  # three bytes are no token
    for client in "ab":
        publisher.ask(client, SnapshotRequest(VERSION, 1))
        publisher.ask(client, 3)
    with pytest.raises(ValueError, match="bytes"):
        publisher.send()
    with pytest.raises(ValueError, match="bytes"):
        publisher.send()
    publisher.send()
    assert publisher.replies("a") == publisher.replies("b") == [3, -1]
