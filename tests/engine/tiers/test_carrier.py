"""Carriers: transfers run in order, on a thread, fail one by one, and are made durable in time."""

import logging
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from kvblocks import KVCacheManager, Sequence, Tier
from kvblocks.engine.tiers import carrier as carrier_module
from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.engine.tiers.offload import Offload


class Place:
    """A place that records its calls, and fails on demand. gate: an event that stores wait for."""

    def __init__(self):
        self.calls = []
        self.fails = set()
        self.gate = threading.Event()
        self.gate.set()

    def store(self, move):
        self.gate.wait(60)
        return self._call("store", move.slots, len(move.identities), move.after)

    def load(self, move):
        return self._call("load", move.slots, len(move.identities), move.after)

    def remember(self, changes):
        self._call("remember", sorted(changes))

    def settle(self):
        self._call("settle")

    def note_used(self, slots):
        self._call("note_used", slots)

    def forget(self, salt, slots, timeout_s):
        self._call("forget", slots)

    def stats(self):
        return None

    def close(self):
        self._call("close")

    def _call(self, name, *given):
        self.calls.append((name, *given))
        if name in self.fails:
            raise OSError(f"{name} failed")
        return True


@pytest.fixture
def place():
    return Place()


@pytest.fixture
def carrier(place):
    made = Carrier("host", place, SimpleNamespace(mark=lambda: "mark"), lambda: None)
    yield made
    place.fails.clear()
    place.gate.set()
    made.close()


def a_store(num_blocks=2):
    manager = KVCacheManager(16, 4, tiers=[Tier("host", 16, 10)])
    sequence = Sequence("a", range(4 * num_blocks))
    manager.allocate_slots(sequence)
    manager.free(sequence)
    (transfer,) = manager.tiers.take_transfers()
    return manager, transfer


def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.001)


def test_a_transfer_ends_with_what_it_moved(place, carrier):
    _, transfer = a_store()
    carrier.begin(transfer)
    until(lambda: place.calls)
    carrier.close()
    (ended,) = carrier.ended()
    assert (ended.transfer, ended.ok) == (transfer, True)
    assert place.calls == [("store", [0, 1], 2, "mark"), ("close",)]
    assert carrier.num_bytes == {"load": 0, "store": 20}
    assert carrier.seconds["store"] == ended.seconds
    assert list(carrier.ended()) == []


def test_what_fails_is_told_logged_and_not_counted(place, carrier, caplog):
    place.fails.add("store")
    _, transfer = a_store()
    with caplog.at_level(logging.ERROR, "kvblocks.engine.tiers"):
        carrier.begin(transfer)
        carrier.close()
    (ended,) = carrier.ended()
    assert not ended.ok
    assert carrier.num_bytes == {"load": 0, "store": 0}
    assert "a store of 2 blocks failed in tier 'host'" in caplog.text


@pytest.mark.parametrize("name", ["remember", "settle", "close"])
def test_a_place_that_fails_otherwise_goes_on(place, carrier, caplog, name):
    place.fails.add(name)
    with caplog.at_level(logging.ERROR, "kvblocks.engine.tiers"):
        carrier.remember({1: None})
        _, transfer = a_store()
        carrier.begin(transfer)
        carrier.close()
    assert "tier 'host' could not remember what it holds" in caplog.text
    assert [ended.ok for ended in carrier.ended()] == [True]
    assert [call[0] for call in place.calls] == ["remember", "store", "settle", "close"]


def test_what_is_remembered_is_settled_in_time_though_transfers_go_on(place, carrier, monkeypatch):
    monkeypatch.setattr(carrier_module, "PATIENCE_S", 0.05)
    carrier.remember({1: None})
    _, transfer = a_store()
    end = time.monotonic() + 60
    while ("settle",) not in place.calls:
        carrier.begin(transfer)
        assert time.monotonic() < end, "it is never settled"
        time.sleep(0.005)
    carrier.close()
    assert [call[0] for call in place.calls].count("settle") == 1


def test_what_could_not_be_settled_is_tried_again(place, carrier, monkeypatch):
    monkeypatch.setattr(carrier_module, "PATIENCE_S", 0.01)
    tries = []

    def fail_twice():
        tries.append(None)
        if len(tries) <= 2:
            raise OSError("settle failed")

    monkeypatch.setattr(place, "settle", fail_twice)
    carrier.remember({1: None})
    until(lambda: len(tries) == 3)
    time.sleep(0.05)
    assert len(tries) == 3


def test_slots_are_erased_between_what_came_before_and_after(place, carrier):
    transfers = [a_store()[1] for _ in range(2)]
    carrier.begin(transfers[0])
    carrier.forget("ann", [3, 5], 1.0).result(60)
    carrier.begin(transfers[1])
    carrier.close()
    assert [call[:2] for call in place.calls] == [("store", [0, 1]), ("forget", [3, 5]), ("store", [0, 1]), ("close",)]


def test_who_erases_hears_of_what_fails(place, carrier):
    place.fails.add("forget")
    with pytest.raises(OSError, match="forget failed"):
        carrier.forget(None, [3], 1.0).result(60)


def test_nothing_is_settled_where_nothing_is_remembered(place, carrier):
    carrier.remember({})
    carrier.close()
    assert place.calls == [("close",)]


def test_closing_carries_out_what_was_begun(place, carrier):
    place.gate.clear()
    transfers = [a_store()[1] for _ in range(3)]
    for transfer in transfers:
        carrier.begin(transfer)
    threading.Timer(0.05, place.gate.set).start()
    carrier.close()
    carrier.close()
    assert [ended.transfer for ended in carrier.ended()] == transfers


def test_offload_says_what_ended_and_waits_for_it(place):
    manager, transfer = a_store()
    manager.tiers.complete(transfer, ok=True)
    other = Sequence("b", range(100, 108))
    manager.allocate_slots(other)
    manager.free(other)
    ends = SimpleQueue()
    carrier = Carrier("host", place, SimpleNamespace(mark=lambda: None), lambda: ends.put(None))
    offload = Offload(manager.tiers, [carrier], ends)
    offload.advance()
    assert offload.has_work
    offload.wait(60)
    (traffic,) = offload.traffic()
    assert (traffic.tier, traffic.num_bytes) == ("host", {"load": 0, "store": 20})
    offload.close(0.0)
    offload.close(10.0)
    assert [call[0] for call in place.calls] == ["store", "close"]
    assert not offload.has_work


# Loads beside all else.


def a_load(manager):
    """A load of what `a_store` stored."""
    crowd = Sequence("crowd", range(1000, 1064))
    manager.allocate_slots(crowd)
    manager.abort(crowd, 0)
    again = Sequence("again", [*range(8), 99])
    hit = manager.get_computed_blocks(again)
    assert manager.tiers.allocate(again, hit, manager.tiers.find(hit)) is not None
    (transfer,) = manager.tiers.take_transfers()
    assert transfer.is_load
    return transfer


@pytest.mark.parametrize("busy_with", ["store", "settle", "forget"])
def test_a_load_waits_for_no_store_no_flush_and_no_deletion(place, carrier, monkeypatch, busy_with):
    monkeypatch.setattr(carrier_module, "PATIENCE_S", 0.0)
    manager, transfer = a_store()
    manager.tiers.complete(transfer, ok=True)
    gate, has_begun = threading.Event(), threading.Event()

    def hang(*_):
        has_begun.set()
        assert gate.wait(60)

    monkeypatch.setattr(place, busy_with, hang)
    if busy_with == "store":
        carrier.begin(a_store()[1])
    elif busy_with == "settle":
        carrier.remember({1: None})
    else:
        carrier.forget("ann", [1], 1.0)
    assert has_begun.wait(60)
    carrier.begin(a_load(manager))
    until(lambda: ("load", [0, 1], 2, "mark") in place.calls)
    assert not gate.is_set()
    gate.set()


def test_the_order_of_use_alone_is_settled_later(place, carrier, monkeypatch):
    monkeypatch.setattr(carrier_module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(carrier_module, "USES_S", 0.3)
    start = time.monotonic()
    carrier.note_used([3])
    until(lambda: ("settle",) in place.calls)
    assert time.monotonic() - start >= 0.3
    monkeypatch.setattr(carrier_module, "USES_S", 1e6)
    carrier.note_used([4])
    carrier.remember({1: None})
    until(lambda: place.calls.count(("settle",)) == 2)  # with what is remembered it is settled too
    carrier.close()
    assert [call for call in place.calls if call[0] == "note_used"] == [("note_used", [3]), ("note_used", [4])]


def test_uses_do_not_pile_up_while_a_place_hangs(place, carrier):
    place.gate.clear()
    _, transfer = a_store()
    carrier.begin(transfer)
    until(lambda: not carrier._commands.qsize())  # noqa: SLF001
    for number in range(1000):
        carrier.note_used([number % 5, 7])
    assert carrier._commands.qsize() == 1  # noqa: SLF001
    place.gate.set()
    until(lambda: ("note_used", [0, 1, 2, 3, 4, 7]) in place.calls)
    carrier.note_used([2])
    carrier.close()
    assert place.calls[-3:] == [("note_used", [2]), ("settle",), ("close",)]


def test_uses_are_noted_after_an_interrupted_note(place, carrier, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(carrier, "_commands", SimpleNamespace(put=interrupt))
        with pytest.raises(KeyboardInterrupt):
            carrier.note_used([3])
    carrier.note_used([4])
    until(lambda: ("note_used", [4]) in place.calls)
