"""The mirror equals the cache at every quiet moment, whatever the network and the workers do."""

import sys
from random import Random

import msgspec
import pytest
from model.where import where
from wire.simulation import MEDIUM, Network, Worker

from kvblocks import InvalidArgumentError
from kvblocks.wire import CODECS, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventMirror
from kvblocks.wire.convert import to_u64
from kvblocks.wire.frames import VERSION, SnapshotChunk, SnapshotHead
from kvblocks.wire.holdings import Location
from kvblocks.wire.ledger import Ledger, Limits

GPU = Location(0, 0, MEDIUM)
FEW = Limits(num_kept_batches=20, max_queued_batches=6)


def play(seed: int, num_rounds: int, badness: float, limits: Limits, codec: str = "vllm") -> tuple[int, Network]:
    """Let workers run, die and restart over a bad network. Compare at quiet moments. Return the number of events."""
    random = Random(seed)
    workers = [Worker(f"w{number}", Random(seed * 7 + number), limits, codec) for number in range(3)]
    mirror = EventMirror(max_held=500)
    network = Network(workers, mirror, random, badness)
    for number in range(num_rounds):
        with where(seed, number, "round"):
            for worker in workers:
                for _ in range(random.randrange(4)):
                    worker.step()
                network.publish(worker, random.choice([1, 2, 1 << 30]))
                if random.random() < 0.01:
                    worker.kill(random.choice([None, worker.epoch - (1 << 20)]))  # its clock may have gone back
            network.pass_time(random.random() * 2)
            if number % 25 == 24:
                network.settle()
                for worker in workers:
                    assert network.is_quiet(worker), (number, worker.name)
                    assert mirror.places(worker.name) == worker.cached(), (number, worker.name)
                    assert mirror.num_held(worker.name) == 0
    return sum(worker.num_events for worker in workers), network


@pytest.mark.parametrize("badness", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("limits", [Limits(), FEW], ids=["roomy", "tight"])
def test_the_mirror_equals_the_cache_at_every_quiet_moment(badness, limits):
    num_events, stats = 0, []
    for seed in range(3):
        num, network = play(seed, 150, badness, limits)
        num_events += num
        stats.append(network.mirror.stats)
    assert num_events > 3000
    if badness:
        for what in ("num_late", "num_malformed", "num_snapshots"):
            assert any(getattr(one, what) for one in stats), what


@pytest.mark.exhaustive
def test_a_hundred_thousand_events():
    num_events = 0
    for seed in range(100, 128):
        badness = Random(seed).choice([0.01, 0.05, 0.3])
        num, _ = play(seed, 300, badness, FEW, Random(seed).choice([*CODECS]))
        num_events += num
    assert num_events > 100_000


def stored(*hashes: int, medium: str | None = MEDIUM, group: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes), token_ids=[1] * len(hashes), block_size=1, medium=medium, group_idx=group
    )


def removed(*hashes: int, medium: str | None = MEDIUM, group: int | None = None) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium=medium, group_idx=group)


def payload(*events, rank: int | None = 0) -> bytes:
    return CODECS["vllm"].encode(EventBatch(1.0, list(events), rank))


def mirror_of(*events, rank: int = 0) -> EventMirror:
    mirror = EventMirror()
    mirror.add("w")
    mirror.receive("w", 0, payload(*events, rank=rank))
    return mirror


def chunk(request: int, number: int, *events, epoch: int = 0, index: int = 0, total: int = 1) -> SnapshotChunk:
    return SnapshotChunk(SnapshotHead(VERSION, request, epoch, number, index, total), payload(*events))


def test_a_prefix_is_found_as_far_as_it_is_cached():
    mirror = mirror_of(stored(1, 2, 3), stored(5))
    assert [mirror.find("w", names) for names in ([1, 2, 3, 4, 5], [1, 2], [4, 1], [], [2**64 + 1])] == [3, 2, 0, 0, 1]
    assert mirror.find("w", [1 - 2**64, (2).to_bytes(32, "big")]) == 2  # however they are written
    assert mirror.find("w", [1], rank=1) == mirror.find("w", [1], group=1) == mirror.find("w", [1], medium="CPU") == 0


def test_media_and_groups_are_told_apart():
    mirror = mirror_of(stored(1, 2), stored(2, 3, medium="CPU"), stored(1, group=1))
    assert mirror.find("w", [1, 2, 3]) == 3
    assert [mirror.find("w", [1, 2, 3], medium=medium) for medium in ("GPU", "CPU", None)] == [2, 0, 3]
    assert mirror.find("w", [1, 2], group=1) == 1 and mirror.count("w") == 5
    mirror.receive("w", 1, payload(removed(2), removed(9), removed(1, medium="DISK")))
    assert mirror.find("w", [1, 2, 3], medium="GPU") == 1 and mirror.count("w") == 4
    mirror.receive("w", 2, payload(removed(1, group=1)))
    assert Location(0, 1, MEDIUM) not in mirror.places("w")


def test_the_best_worker_has_the_longest_prefix():
    mirror = EventMirror()
    assert mirror.best([1]) is None
    for worker, names, rank in [("a", [1], 0), ("b", [1, 2, 9], 0), ("b", [1, 2, 3], 1), ("c", [2, 3], 0)]:
        mirror.add(worker)
        mirror.receive(
            worker, (mirror.number(worker) or -1) + 1 if rank == 0 else 1, payload(stored(*names), rank=rank)
        )
    assert mirror.overlaps([1, 2, 3]) == {("a", 0): 1, ("b", 0): 2, ("b", 1): 3, ("c", 0): 0}
    assert mirror.best([1, 2, 3]) == (("b", 1), 3)
    assert mirror.best([7]) is None
    mirror.remove("b")
    assert mirror.workers == ["a", "c"] and mirror.best([1, 2, 3]) == (("a", 0), 1)


def test_a_rank_clears_only_what_it_has_itself():
    mirror = mirror_of(stored(1))
    mirror.receive("w", 1, payload(stored(1), rank=1))
    mirror.receive("w", 2, payload(AllBlocksCleared(), rank=1))
    assert mirror.places("w") == {GPU: frozenset({1})}


def test_an_unknown_worker_is_refused():
    mirror = mirror_of()
    for call in (mirror.remove, mirror.count, mirror.number, mirror.is_complete, mirror.give_up, mirror.end_replay):
        with pytest.raises(InvalidArgumentError, match=r"worker: expected one of \['w'\], got 'x'"):
            call("x")


def test_a_gap_is_asked_for_and_filled():
    mirror = mirror_of(stored(1))
    mirror.receive("w", 2, payload(removed(1)))
    mirror.receive("w", 3, payload(stored(3)))
    assert not mirror.is_complete("w") and mirror.find("w", [1]) == 1
    (ask,) = mirror.take_asks()
    assert ask.number == 1 and mirror.take_asks() == []
    mirror.receive_replayed("w", 1, payload(stored(2)))
    assert mirror.is_complete("w") and mirror.places("w") == {GPU: frozenset({2, 3})}
    mirror.receive_replayed("w", 2, payload(removed(1)))
    mirror.end_replay("w")
    assert mirror.take_asks() == [] and mirror.number("w") == 3 and mirror.stats.num_late == 1


def test_what_can_be_replayed_no_more_comes_from_a_snapshot():
    mirror = mirror_of(stored(1))
    mirror.receive("w", 9, payload(stored(9)))
    mirror.take_asks()
    mirror.receive_replayed("w", 8, payload(stored(8)))
    mirror.end_replay("w")
    (ask,) = mirror.take_asks()
    assert ask.number is None
    mirror.receive_chunk("w", chunk(ask.request, 8, AllBlocksCleared(), stored(5, 8), total=2))
    assert mirror.number("w") == 0
    mirror.receive_chunk("w", chunk(ask.request, 8, stored(6), index=1, total=2))
    assert mirror.places("w") == {GPU: frozenset({5, 6, 8, 9})} and mirror.is_complete("w")
    assert (mirror.number("w"), mirror.epoch("w"), mirror.stats.num_snapshots) == (9, 0, 1)


@pytest.mark.parametrize("change", [{"version": 2}, {"total": 0}, {"index": 1}, {"request": 77}, {"total": 1 << 20}])
def test_chunks_that_are_not_understood_change_nothing(change):
    mirror = mirror_of(stored(1))
    mirror.receive("w", 9, payload(stored(9)))
    mirror.receive_replayed("w", 8, payload())
    mirror.end_replay("w")
    (ask,) = mirror.take_asks()
    head, body = chunk(ask.request, 8, AllBlocksCleared(), stored(5))
    mirror.receive_chunk("w", SnapshotChunk(msgspec.structs.replace(head, **change), body))
    mirror.receive_chunk("w", SnapshotChunk(head, b"\x93"))
    assert mirror.number("w") == 0 and mirror.find("w", [1]) == 1
    mirror.give_up("w")
    (again,) = mirror.take_asks()
    assert again.number is None and again.request != ask.request
    mirror.receive_chunk("w", SnapshotChunk(msgspec.structs.replace(head, request=again.request), body))
    assert mirror.is_complete("w") and mirror.find("w", [5]) == 1 and mirror.find("w", [1]) == 0


EPOCH = 1 << 50


def joined() -> EventMirror:
    """A mirror that has joined a publisher of ours by a snapshot."""
    mirror = EventMirror(max_held=50)
    mirror.add("w")
    mirror.receive("w", EPOCH + 7, payload(stored(7)))
    (ask,) = mirror.take_asks()
    mirror.receive_chunk("w", chunk(ask.request, EPOCH + 7, AllBlocksCleared(), stored(1, 7), epoch=EPOCH))
    assert mirror.is_complete("w") and mirror.epoch("w") == EPOCH and mirror.count("w") == 2
    return mirror


def test_epochs_never_mix():
    mirror = joined()
    mirror.receive("w", EPOCH + 9, payload(stored(9)))  # 8 is lost, and then the worker starts anew
    mirror.receive("w", 2 * EPOCH, payload(AllBlocksCleared()))
    assert mirror.is_complete("w") and mirror.count("w") == 0 and mirror.take_asks() == []
    mirror.receive("w", EPOCH + 8, payload(stored(8)))  # late
    mirror.receive("w", 2 * EPOCH + 1, payload(stored(2)))
    mirror.receive_replayed("w", EPOCH + 9, payload(stored(9)))
    mirror.receive_chunk("w", chunk(1, EPOCH + 8, AllBlocksCleared(), stored(7), epoch=EPOCH))
    assert mirror.places("w") == {GPU: frozenset({2})}


def test_a_restart_whose_first_batches_are_lost_is_found():
    mirror = joined()
    mirror.receive("w", 2 * EPOCH + 1, payload(stored(2)))
    (ask,) = mirror.take_asks()
    mirror.receive_replayed("w", 2 * EPOCH, payload(AllBlocksCleared()))
    assert ask.number == EPOCH + 8 and mirror.places("w") == {GPU: frozenset({2})} and mirror.is_complete("w")


def test_a_publisher_whose_clock_went_back_is_followed():
    mirror = joined()
    for number in range(3):
        mirror.receive("w", EPOCH - 100 + number, payload(stored(number)))
    (ask,) = mirror.take_asks()
    assert ask.number is None
    mirror.receive_chunk("w", chunk(ask.request, EPOCH - 98, AllBlocksCleared(), stored(2), epoch=EPOCH - 100))
    mirror.receive("w", EPOCH - 97, payload(stored(3)))
    assert mirror.places("w") == {GPU: frozenset({2, 3})} and mirror.is_complete("w")


@pytest.mark.parametrize("step", [0, -100])
def test_a_held_batch_that_no_publisher_knows_is_dropped(step):
    """Either its number was damaged, or its epoch is from before the publisher's clock went back."""
    mirror = joined()
    mirror.receive("w", EPOCH + 1000, payload(stored(9)))
    (ask,) = mirror.take_asks()
    assert ask.number == EPOCH + 8
    mirror.end_replay("w")
    (ask,) = mirror.take_asks()
    assert ask.number is None
    epoch = EPOCH + step
    mirror.receive_chunk("w", chunk(ask.request, epoch + 7, AllBlocksCleared(), stored(1), epoch=epoch))
    assert mirror.is_complete("w") and mirror.take_asks() == [] and mirror.stats.num_unheld == 1
    mirror.receive("w", epoch + 8, payload(stored(2)))
    assert mirror.places("w") == {GPU: frozenset({1, 2})}


def test_a_publisher_that_never_fills_a_gap_is_asked_with_pauses():
    mirror, num_asks = joined(), 0
    mirror.receive("w", EPOCH + 1000, payload())
    for number in range(100):
        for ask in mirror.take_asks():
            num_asks += 1
            mirror.receive("w", EPOCH + 2000 + number, payload())
            if ask.number is None:
                mirror.receive_chunk("w", chunk(ask.request, EPOCH + 7, AllBlocksCleared(), epoch=EPOCH))
            else:
                mirror.end_replay("w")
    assert num_asks < 10 and mirror.take_asks() == []
    mirror.give_up("w")
    assert len(mirror.take_asks()) == 1


def test_a_damaged_number_does_not_say_whose_publisher_it_is():
    mirror = EventMirror()
    mirror.add("w")
    mirror.receive("w", 5, payload(stored(5)))
    mirror.receive("w", EPOCH, payload(stored(6)))
    for _ in range(3):
        mirror.give_up("w")
    assert mirror.take_asks()[-1].number == 0


def test_a_snapshot_that_is_older_than_what_has_come_since_is_dropped():
    mirror = joined()
    mirror.receive("w", EPOCH + 10, payload(stored(10)))
    mirror.receive_replayed("w", EPOCH + 9, payload())
    mirror.end_replay("w")
    (ask,) = mirror.take_asks()
    mirror.receive("w", EPOCH + 8, payload(stored(8)))
    mirror.receive("w", EPOCH + 9, payload())
    mirror.receive_chunk("w", chunk(ask.request, EPOCH + 6, AllBlocksCleared(), stored(6), epoch=EPOCH))
    assert mirror.places("w") == {GPU: frozenset({1, 7, 8, 10})} and mirror.is_complete("w")


def test_a_publisher_of_ours_that_was_not_heard_at_first_is_known_by_its_numbers():
    mirror = EventMirror()
    mirror.add("w")
    for _ in range(3):
        mirror.give_up("w")
    assert mirror.take_asks()[-1].number == 0
    mirror.end_replay("w")
    mirror.receive("w", EPOCH + 7, payload(stored(7)))
    (ask,) = mirror.take_asks()
    assert ask.number is None
    mirror.receive_chunk("w", chunk(ask.request, EPOCH + 7, AllBlocksCleared(), stored(7), epoch=EPOCH))
    assert mirror.is_complete("w")


def test_a_snapshot_takes_the_place_of_all_that_was_known():
    mirror = mirror_of(stored(1))
    mirror.receive("w", 9, payload(stored(9)))
    mirror.give_up("w")
    mirror.give_up("w")
    mirror.give_up("w")
    ask = mirror.take_asks()[-1]
    assert ask.number is None
    mirror.receive_chunk("w", chunk(ask.request, 8, stored(5)))
    assert mirror.places("w") == {GPU: frozenset({5, 9})}


def test_chunks_of_two_snapshots_never_mix():
    mirror = joined()
    mirror.receive("w", EPOCH + 10, payload())
    mirror.receive_replayed("w", EPOCH + 10, payload())
    mirror.end_replay("w")
    (ask,) = mirror.take_asks()
    mirror.receive_chunk("w", chunk(ask.request, EPOCH + 9, AllBlocksCleared(), stored(1), epoch=EPOCH, total=2))
    mirror.receive_chunk("w", chunk(ask.request, 2 * EPOCH, stored(2), epoch=2 * EPOCH, index=1, total=2))
    assert mirror.number("w") == EPOCH + 7
    mirror.receive_chunk("w", chunk(ask.request, 2 * EPOCH, AllBlocksCleared(), epoch=2 * EPOCH, index=0, total=2))
    assert mirror.places("w") == {GPU: frozenset({2})} and mirror.number("w") == 2 * EPOCH


def test_a_batch_that_cannot_be_read_costs_a_snapshot():
    mirror = joined()
    mirror.receive("w", EPOCH + 8, b"\x93")
    mirror.receive("w", EPOCH + 9, payload(stored(9)))
    (ask,) = mirror.take_asks()
    assert ask.number is None and mirror.stats.num_malformed == 1 and mirror.count("w") == 2
    mirror.receive_chunk("w", chunk(ask.request, EPOCH + 8, AllBlocksCleared(), stored(8), epoch=EPOCH))
    assert mirror.places("w") == {GPU: frozenset({8, 9})}


def test_what_is_held_is_bounded():
    mirror = joined()
    for number in range(100):
        mirror.receive("w", EPOCH + 20 + number, payload(stored(*range(4))))
    assert mirror.num_held("w") == 10 and mirror.stats.num_unheld == 90


def other(*, can_ask: bool = True) -> EventMirror:
    """A mirror of a publisher that has answered no request for a snapshot, after three batches."""
    mirror = EventMirror()
    mirror.add("w", can_ask=can_ask)
    mirror.receive("w", 5, payload(stored(5)))
    for _ in range(3 * can_ask):
        (ask,) = mirror.take_asks()
        assert ask.number is None
        mirror.give_up("w")
    return mirror


def test_another_publisher_is_known_as_far_as_it_can_be_replayed():
    mirror = other()
    (ask,) = mirror.take_asks()
    assert ask.number == 0
    for number in (3, 4, 5):
        mirror.receive_replayed("w", number, payload(stored(number)))
    mirror.end_replay("w")
    assert mirror.places("w") == {GPU: frozenset({3, 4, 5})} and not mirror.is_complete("w")
    mirror.receive("w", 6, payload(AllBlocksCleared(), stored(6)))
    assert mirror.is_complete("w") and mirror.number("w") == 6


def test_another_publisher_is_known_wholly_from_its_first_batch():
    mirror = other()
    mirror.take_asks()
    for number in range(6):
        mirror.receive_replayed("w", number, payload(stored(number)))
    mirror.end_replay("w")
    assert mirror.count("w") == 6 and mirror.is_complete("w") and mirror.take_asks() == []


def test_another_publisher_that_cannot_fill_a_gap_is_begun_anew():
    mirror = other()
    mirror.take_asks()
    mirror.receive_replayed("w", 5, payload(stored(5)))
    mirror.end_replay("w")
    mirror.receive("w", 9, payload(stored(9)))
    (ask,) = mirror.take_asks()
    assert ask.number == 6
    mirror.end_replay("w")
    assert mirror.places("w") == {GPU: frozenset({9})} and not mirror.is_complete("w") and mirror.number("w") == 9


@pytest.mark.parametrize("can_ask", [True, False])
def test_a_lower_number_of_another_publisher_is_a_double_or_a_restart(can_ask):
    mirror = other(can_ask=can_ask)
    mirror.take_asks()
    mirror.receive_replayed("w", 5, payload(stored(5)))
    mirror.end_replay("w")
    mirror.receive("w", 5, payload(stored(5)))
    assert mirror.count("w") == 1 and not mirror.stats.num_restarts
    mirror.receive("w", 0, payload(stored(0)))
    assert mirror.places("w") == {GPU: frozenset({0})} and mirror.is_complete("w") and mirror.stats.num_restarts == 1


def test_without_an_endpoint_to_ask_a_gap_is_a_new_beginning():
    mirror = other(can_ask=False)
    assert mirror.count("w") == 1 and not mirror.is_complete("w")
    mirror.receive("w", 7, payload(stored(7)))
    assert mirror.places("w") == {GPU: frozenset({7})} and not mirror.is_complete("w") and not mirror.take_asks()


def test_unknown_events_are_counted_and_change_nothing():
    mirror = mirror_of(stored(1))
    mirror.receive("w", 1, msgspec.msgpack.encode([1.0, [{"type": "Pinned"}, ["Moved", 3]], 0]))
    assert mirror.stats.num_unknown_events == 2 and mirror.count("w") == 1


def test_hashes_are_kept_by_their_low_bits():
    assert to_u64(-1) == to_u64(b"\xff" * 32) == to_u64(b"\0" * 24 + b"\xff" * 8) == 2**64 - 1


def interrupted_at(line: int) -> tuple[bool, bool]:
    """Interrupt a ledger's `add` at its line-th line. Return whether it was, and whether a mirror is right or knows."""
    worker, num_lines = Worker("w", Random(1), Limits()), 0
    mirror = EventMirror()
    mirror.add("w")

    def trace(frame, event, _):
        nonlocal num_lines
        if frame.f_code not in (Ledger.add.__code__, Ledger._follow.__code__, Ledger._put.__code__):  # noqa: SLF001
            return None
        num_lines += event == "line"
        if event == "line" and num_lines == line:
            raise KeyboardInterrupt
        return trace

    source = Worker("x", Random(2), Limits())
    source.step()
    source.ledger.take()
    batch = source.ledger.take()
    assert batch is not None
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        worker.ledger.add(batch.events, 1.0)
        was_interrupted = False
    except KeyboardInterrupt:
        was_interrupted = True
    finally:
        sys.settrace(before)
    sent = worker.send()
    worker.heartbeat()
    for number, said in [*sent, *worker.send()]:
        mirror.receive("w", number, said)
    return was_interrupted, not mirror.is_complete("w") or mirror.count("w") == worker.ledger.num_cached


def test_an_interrupt_in_the_books_is_seen_as_a_gap():
    results = [interrupted_at(line) for line in range(1, 80)]
    assert results[0][0] and not results[-1][0] and all(is_right for _, is_right in results)
