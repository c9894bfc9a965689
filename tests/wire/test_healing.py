"""A publisher's ledger and a mirror, batch by batch: damaged, interrupted and lost batches are repaired."""

import pytest

from kvblocks import BlockStored
from kvblocks.wire import Converter, EventMirror
from kvblocks.wire.frames import SnapshotChunk
from kvblocks.wire.ledger import Ledger, Limits
from kvblocks.wire.publisher import new_epoch


def sent(ledger: Ledger) -> list[tuple[int, bytes]]:
    """Send what waits, and return it."""
    batches = []
    while (batch := ledger.take()) is not None:
        payload = ledger.encode(batch)
        ledger.keep(batch.number, payload)
        batches.append((batch.number, payload))
    return batches


def answer(ledger: Ledger, mirror: EventMirror, num_rounds: int) -> int:
    """Answer all asks, and return how many there were."""
    num_asks = 0
    for _ in range(num_rounds):
        for ask in mirror.take_asks():
            num_asks += 1
            if ask.number is None:
                snapshot = ledger.snapshot(1.0)
                total = ledger.head(snapshot, ask.request, 0).total
                for index in range(total):
                    head = ledger.head(snapshot, ask.request, index)
                    mirror.receive_chunk("w", SnapshotChunk(head, ledger.chunk(snapshot, index)))
            else:
                for number, payload in ledger.replay(ask.number):
                    mirror.receive_replayed("w", number, payload)
                mirror.end_replay("w")
    return num_asks


def followed(epoch: int = new_epoch()) -> tuple[Ledger, EventMirror]:
    """A publisher's books with two batches, and a mirror that has them."""
    ledger, mirror = Ledger(Converter(), Limits(), epoch, 0, 1.0), EventMirror()
    mirror.add("w")
    ledger.add([record(1)], 1.0)
    for number, payload in sent(ledger):
        mirror.receive("w", number, payload)
    answer(ledger, mirror, 3)
    assert mirror.is_complete("w")
    return ledger, mirror


def record(number: int) -> BlockStored:
    return BlockStored((number.to_bytes(32),), None, bytes(16), 4)


def test_a_damaged_number_is_asked_for_once():
    ledger, mirror = followed()
    ledger.add([record(2)], 1.0)
    ((number, payload),) = sent(ledger)
    mirror.receive("w", number, payload)
    mirror.receive("w", number + (1 << 40), payload)
    assert answer(ledger, mirror, 100) == 2  # a replay, and then a snapshot
    assert mirror.is_complete("w")
    assert mirror.num_held("w") == 0


def test_a_batch_that_was_held_when_the_clock_went_back_is_forgotten():
    old, mirror = followed()
    old.add([record(2)], 1.0)
    old.add([record(3)], 1.0)
    mirror.receive("w", *sent(old)[1])
    new = Ledger(Converter(), Limits(), old.epoch - (1000 << 20), 0, 1.0)
    for number in range(4, 10):
        new.add([record(number)], 1.0)
    for number, payload in sent(new):
        mirror.receive("w", number, payload)
    mirror.end_replay("w")
    assert answer(new, mirror, 100) < 5
    assert mirror.is_complete("w")
    assert mirror.count("w") == new.num_cached == 6
    assert mirror.num_held("w") == 0


def test_an_interrupted_batch_is_a_gap(monkeypatch):
    ledger, mirror = followed()
    follow = ledger._follow  # noqa: SLF001

    def interrupt(event):
        follow(event)
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger, "_follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ledger.add([record(2)], 1.0)
    monkeypatch.setattr(ledger, "_follow", follow)
    ledger.add([record(3)], 1.0)
    for number, payload in sent(ledger):
        mirror.receive("w", number, payload)
    assert not mirror.is_complete("w")
    answer(ledger, mirror, 3)
    assert mirror.is_complete("w")
    assert mirror.count("w") == ledger.num_cached == 3


def test_a_mirror_goes_on_with_another_client():
    ledger, mirror = followed()
    ledger.add([record(2)], 1.0)
    ledger.add([record(3)], 1.0)
    mirror.receive("w", *sent(ledger)[1])
    assert len(mirror.take_asks()) == 1  # which nobody answers: the client has gone
    mirror.ask_anew("w")
    answer(ledger, mirror, 3)
    assert mirror.is_complete("w")
    assert mirror.count("w") == 3
