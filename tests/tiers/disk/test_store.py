"""A store, call by call."""

import errno
import os
import random
import sqlite3
import threading
import time

import pytest
from tiers.disk import stores
from tiers.disk.histories import BLOCK_BYTES, OPTIONS, identity_of, payload_of
from tiers.disk.stores import fill, open_store, reads, remembered

from kvblocks import FullAttention, InvalidArgumentError, KVCacheManager, Sequence, SlidingWindow, Tier
from kvblocks.tiers.disk import DiskError, DiskStats, DiskStore
from kvblocks.tiers.identity import BlockIdentity


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store") as opened:
        yield opened


# Writing, reading, remembering.


def test_what_was_written_is_read(store):
    payload = payload_of(1) + payload_of(2) + payload_of(3)
    identities = [identity_of(number) for number in (1, 2, 3)]
    store.write([5, 0, 9], identities, payload)
    out = bytearray(len(payload))
    assert store.read([5, 0, 9], identities, out) == 3
    assert out == payload
    assert store.stats == DiskStats(
        num_written_blocks=3, num_written_bytes=3 * BLOCK_BYTES, num_read_blocks=3, num_read_bytes=3 * BLOCK_BYTES
    )


def test_buffers_of_other_types_do(store):
    numpy = pytest.importorskip("numpy")
    array = numpy.frombuffer(payload_of(1), dtype=numpy.float32).reshape(2, -1)
    store.write([1], [identity_of(1)], array)
    out = numpy.zeros_like(array)
    assert store.read([numpy.int64(1)], iter([identity_of(1)]), out) == 1
    assert out.tobytes() == payload_of(1)


def test_reading_ends_at_the_first_block_that_is_another(store):
    fill(store, {0: 10, 1: 11, 2: 12})
    out = bytearray(3 * BLOCK_BYTES)
    assert store.read([0, 1, 2], [identity_of(10), identity_of(99), identity_of(12)], out) == 1
    assert out[:BLOCK_BYTES] == payload_of(10)
    assert store.stats.num_damaged_blocks == 1
    assert store.read([], [], bytearray()) == 0


def test_a_slot_that_was_never_written_is_a_miss(store):
    assert not reads(store, store.num_slots - 1, 1)
    fill(store, {3: 3})
    assert not reads(store, 0, 1)


def test_what_was_remembered_is_there_later_in_its_order(tmp_path):
    with open_store(tmp_path) as store:
        fill(store, {4: 1, 2: 2, 9: 3})
        fill(store, {7: 4, 2: 5})
        store.remember({4: None, 9: None})
        store.remember({9: identity_of(3)})
    with open_store(tmp_path) as store:
        assert remembered(store) == [(7, 4), (2, 5), (9, 3)]
        fill(store, {0: 6})
    with open_store(tmp_path) as store:
        assert remembered(store) == [(7, 4), (2, 5), (9, 3), (0, 6)]
        assert all(reads(store, slot, number) for slot, number in remembered(store))


def test_the_order_of_use_is_there_later(tmp_path):
    with open_store(tmp_path) as store:
        fill(store, {slot: slot for slot in range(6)})
        store.note_used([3, 0])
        assert not store.needs_sync and store.has_uses, "it can wait"
        store.note_used([3])
        store.sync()
        assert remembered(store) == [(1, 1), (2, 2), (4, 4), (5, 5), (0, 0), (3, 3)] and not store.has_uses
        store.note_used([1, 9])  # nothing is known of slot 9
        fill(store, {1: 7})
        store.note_used([2])
    with open_store(tmp_path) as store:
        assert remembered(store) == [(4, 4), (5, 5), (0, 0), (3, 3), (1, 7), (2, 2)]
        with pytest.raises(InvalidArgumentError, match="note_used: slot"):
            store.note_used([store.num_slots])


def test_a_sync_that_fails_keeps_the_order_of_use(store, monkeypatch):
    fill(store, {slot: slot for slot in range(3)})
    store.note_used([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(store._index, "write", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))  # noqa: SLF001
        with pytest.raises(DiskError, match="broken"):
            store.sync()
    store.note_used([0])
    store.sync()
    assert remembered(store) == [(2, 2), (1, 1), (0, 0)]


def test_nothing_is_remembered_before_a_sync(store):
    stores.write(store, {1: 1})
    assert store.needs_sync
    store.remember({1: identity_of(1)})
    assert remembered(store) == []
    store.sync()
    assert remembered(store) == [(1, 1)] and not store.needs_sync and store.stats.num_synced_blocks == 1
    store.remember({1: None})
    assert remembered(store) == [(1, 1)] and store.needs_sync
    store.sync()
    assert remembered(store) == [] and (store.stats.num_syncs, store.stats.num_synced_blocks) == (2, 1)


def test_bytes_are_flushed_before_the_index_speaks_of_them(store, monkeypatch):
    """What is remembered during a flush of the arena waits for the next sync: the flush may have missed its bytes."""
    real = os.fdatasync
    stores.write(store, {1: 1})
    store.remember({1: identity_of(1)})

    def flush(descriptor):
        real(descriptor)
        stores.write(store, {2: 2})
        store.remember({2: identity_of(2)})

    monkeypatch.setattr(os, "fdatasync", flush)
    store.sync()
    monkeypatch.undo()
    assert remembered(store) == [(1, 1)] and store.needs_sync
    store.sync()
    assert remembered(store) == [(1, 1), (2, 2)]


def test_a_block_with_too_many_keys_is_not_stored(store):
    most, over = (BlockIdentity(b"", b"k" * number, bytes(16)) for number in (512, 513))
    fill(store, {0: 7})
    with pytest.raises(DiskError, match="expected at most 512 bytes of keys, got 513"):
        store.write([0, 1], [identity_of(1), over], bytes(2 * BLOCK_BYTES))
    assert reads(store, 0, 7) and store.stats.num_failed_writes == 1
    store.write([1], [most], bytes(BLOCK_BYTES))
    store.remember({1: most, 2: over})
    store.sync()
    assert store.remembered() == [(0, identity_of(7)), (1, most)]
    assert store.stats.num_damaged_blocks == 0  # it isn't in the index either
    assert store.read([1], [most], bytearray(BLOCK_BYTES)) == 1


def test_a_row_holds_an_identitys_parts(tmp_path):
    """Folders of earlier versions can be read for ever."""
    beside = BlockIdentity(b"p" * 32, b"", b"", 258)
    with open_store(tmp_path) as store:
        stores.lengthen(store)
        store.remember({3: BlockIdentity(b"", b"keys", bytes(16)), 1: beside})
    connection = sqlite3.connect(tmp_path / "kvblocks.index")
    (table,) = connection.execute("SELECT sql FROM sqlite_master").fetchone()
    rows = connection.execute("SELECT * FROM slots ORDER BY number").fetchall()
    connection.close()
    columns = "slot INTEGER PRIMARY KEY, number INTEGER NOT NULL, parent BLOB NOT NULL, keys BLOB NOT NULL"
    assert table == f"CREATE TABLE slots ({columns}, tokens BLOB NOT NULL)"
    assert rows == [(3, 0, b"", b"keys", bytes(16)), (1, 1, b"p" * 32, b"\0", b"\2\1\0\0")]
    with open_store(tmp_path) as store:
        assert store.remembered() == [(3, BlockIdentity(b"", b"keys", bytes(16))), (1, beside)]
        assert store.stats.num_damaged_blocks == 0


def test_blocks_of_columns_are_told_apart(store):
    beside = [BlockIdentity(b"p" * 32, b"", b"", column) for column in (1, 2)]
    store.write([0, 1], beside, payload_of(1) + payload_of(2))
    out = bytearray(BLOCK_BYTES)
    assert [store.read([slot], [one], out) for slot in range(2) for one in beside] == [1, 0, 0, 1]
    assert out == payload_of(2)


@pytest.mark.parametrize("groups", [[FullAttention(4)], [FullAttention(4), SlidingWindow(4, 8)]])
def test_a_manager_takes_back_what_another_one_stored(tmp_path, groups):
    def make(store):
        tiers = [Tier("disk", store.num_slots, BLOCK_BYTES, is_persistent=True)]
        return KVCacheManager(32, groups=groups, tiers=tiers, debug=True)

    with open_store(tmp_path) as store:
        manager = make(store)
        sequence = Sequence("a", range(20), salt="ours")
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        manager.free(sequence)
        while transfers := manager.tiers.take_transfers():
            for transfer in transfers:
                manager.tiers.complete(transfer, ok=True)
        changes = manager.tiers.take_changes()["disk"]
        payload = b"".join(payload_of(slot) for slot in changes)
        store.write(changes, changes.values(), payload)
        store.remember(changes)
    with open_store(tmp_path) as store:
        manager = make(store)
        assert manager.tiers.restore("disk", store.remembered()) == len(changes) == (5 if len(groups) == 1 else 7)
        (found,) = manager.tiers.find(manager.get_computed_blocks(Sequence("b", range(21), salt="ours")))
        assert found.num_tokens == 20 and not manager.tiers.find(manager.get_computed_blocks(Sequence("c", range(21))))
        assert store.read(*zip(*store.remembered(), strict=True), bytearray(len(payload))) == len(changes)


# Erasing.


def test_what_is_erased_is_nowhere(tmp_path):
    """Gone are its bytes, what the index and the records said of it, and what they said of the slot's former block."""
    with open_store(tmp_path) as store:
        fill(store, {slot: 101 + slot for slot in range(20)})
        fill(store, {1: 201})  # instead of 102
        stores.write(store, {2: 77})  # instead of 103, which is still in the index
        store.remember({2: identity_of(77), 4: identity_of(1)})
        store.erase([1, 2])
        found = stores.all_bytes(tmp_path)
        for number in (201, 102, 77, 103):
            assert identity_of(number).parent not in found and payload_of(number)[:100] not in found, number
        assert identity_of(101).parent in found and payload_of(101)[:100] in found  # the search can find
        assert not reads(store, 1, 201) and not reads(store, 2, 77) and reads(store, 3, 104)
        assert not store.needs_sync and {slot for slot, _ in remembered(store)} == set(range(20)) - {1, 2}


def test_what_is_erased_stays_so_without_a_close(tmp_path):
    with open_store(tmp_path / "one") as store:
        fill(store, {slot: slot for slot in range(8)})
        store.remember({5: None})
        store.sync()
        store.erase(range(4))
        (tmp_path / "two").mkdir()
        for path in (tmp_path / "one").iterdir():  # as a crash would leave them
            (tmp_path / "two" / path.name).write_bytes(path.read_bytes())
    with open_store(tmp_path / "two") as store:
        assert remembered(store) == [(4, 4), (6, 6), (7, 7)]


def test_a_kill_in_the_middle_of_a_deletion_brings_nothing_back(tmp_path, monkeypatch):
    """A large one takes minutes, longer than a supervisor waits."""
    with open_store(tmp_path / "one") as store:
        fill(store, {slot: slot for slot in range(8)})
        (tmp_path / "two").mkdir()

        def die(*_):
            for path in (tmp_path / "one").iterdir():  # as a kill would leave them
                (tmp_path / "two" / path.name).write_bytes(path.read_bytes())
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", die)
            with pytest.raises(DiskError, match="bytes of blocks are left"):
                store.erase(range(4))
    with open_store(tmp_path / "two") as store:
        assert remembered(store) == [(4, 4), (5, 5), (6, 6), (7, 7)]
        store.erase(range(4))
    arena, offset = (tmp_path / "two" / "kvblocks.arena").read_bytes(), store._layout.offset  # noqa: SLF001
    assert not any(arena[: offset(4)]) and any(arena[offset(4) :])


def test_bytes_whose_record_was_lost_are_erased(tmp_path):
    """A loss of power may leave a block's bytes without its record, as when it comes while the block is written."""
    with open_store(tmp_path) as store:
        fill(store, {2: 5})
        with (tmp_path / "kvblocks.arena").open("r+b") as arena:
            arena.seek(store._layout.offset(2))  # noqa: SLF001
            arena.write(bytes(store._layout.num_room_bytes))  # noqa: SLF001
        store.erase([2])
        assert not any((tmp_path / "kvblocks.arena").read_bytes())


def test_what_was_erased_is_not_overwritten_again(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        fill(store, {1: 1, 2: 2})
        store.erase([1, 2])
        stores.write(store, {2: 22})
        offset, places = store._layout.offset, []  # noqa: SLF001
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda *given: places.append(given[2]) or real(*given))
        store.erase([1, 2])
        assert places and all(offset(2) <= place < offset(3) for place in places)
        assert not any((tmp_path / "kvblocks.arena").read_bytes())


# Sizes.


def test_the_folder_never_holds_more_than_it_may(tmp_path, monkeypatch):
    """With the longest identities, in any order, in small and large commits. The log is measured when it is largest."""
    dice, worst = random.Random(1), 0

    def identity(slot):
        return BlockIdentity(dice.randbytes(32), dice.randbytes(dice.choice([0, 512, 512])), dice.randbytes(16))

    with open_store(tmp_path, max_bytes=24_000_000) as store:
        from kvblocks.tiers.disk.index import Index

        real = Index.checkpoint

        def checkpoint(index):
            nonlocal worst
            worst = max(worst, sum(stores.sizes(tmp_path).values()))
            real(index)

        monkeypatch.setattr(Index, "checkpoint", checkpoint)
        last = store.num_slots - 1
        stores.write(store, {last: 1})
        slots = list(range(store.num_slots))
        for turn in range(60):
            dice.shuffle(slots)
            some = slots[: dice.choice([10, 300, len(slots)])]
            store.remember({slot: identity(slot) if dice.random() < 0.8 or turn == 59 else None for slot in some})
            store.sync()
            worst = max(worst, sum(stores.sizes(tmp_path).values()))
        store.remember({slot: identity(slot) for slot in slots})
        store.sync()
        assert len(store.remembered()) == store.num_slots > 1000
        assert worst > 0.7 * 24_000_000
        assert sum(stores.sizes(tmp_path).values()) <= 24_000_000 and worst <= 24_000_000


@pytest.mark.parametrize("block_size", [1, 16, 1000, 5000])
def test_identities_of_any_block_size_have_room(tmp_path, block_size):
    identity = BlockIdentity(b"p" * 32, b"k" * 512, b"t" * (4 * block_size))
    with open_store(tmp_path, block_size=block_size, max_bytes=8_000_000) as store:
        last = store.num_slots - 1
        store.write([last], [identity], payload_of(1))
        store.remember(dict.fromkeys(range(store.num_slots), identity))
        store.sync()
        assert len(store.remembered()) == store.num_slots
        assert store.read([last], [identity], bytearray(BLOCK_BYTES)) == 1
        assert sum(stores.sizes(tmp_path).values()) <= 8_000_000


def test_beside_large_blocks_the_rest_takes_little():
    from kvblocks.tiers.disk.layout import Layout

    layout = Layout(2**18, 16, 10 * 2**30)
    assert layout.num_slots * 2**18 > 0.96 * 10 * 2**30


def test_another_size_keeps_what_fits(tmp_path):
    with open_store(tmp_path, max_bytes=8_000_000) as store:
        many = store.num_slots
        fill(store, {slot: slot for slot in range(many)})
    with open_store(tmp_path, max_bytes=3_000_000) as store:
        assert remembered(store) == [(slot, slot) for slot in range(store.num_slots)]
        assert store.num_slots < many and sum(stores.sizes(tmp_path).values()) <= 3_000_000
        fill(store, {0: 999})
    with open_store(tmp_path, max_bytes=8_000_000) as store:
        assert [slot for slot, _ in remembered(store)] == [*range(1, len(remembered(store))), 0]
        assert all(reads(store, slot, number) for slot, number in remembered(store))


def test_a_smaller_size_shrinks_the_index_too(tmp_path):
    def identity(slot):
        return BlockIdentity(slot.to_bytes(32, "little"), b"k" * 512, bytes(16))

    with open_store(tmp_path, max_bytes=100_000_000) as store:
        stores.lengthen(store)
        store.remember({slot: identity(slot) for slot in range(store.num_slots)})
    assert stores.sizes(tmp_path)["kvblocks.index"] > 3_500_000
    for _ in range(2):
        with open_store(tmp_path, max_bytes=3_500_000) as store:
            assert store.remembered() == [(slot, identity(slot)) for slot in range(store.num_slots)]
            assert sum(stores.sizes(tmp_path).values()) < 3_500_000
            store.remember({0: identity(0)})
            store.remember({slot: identity(slot) for slot in range(1, store.num_slots)})


def test_opening_many_entries(tmp_path, capsys):
    """Prints how long it takes. The reader decides whether that is too long."""
    options = OPTIONS | {"block_size": 16, "num_block_bytes": 4096, "max_bytes": 2**31}
    identities = [
        BlockIdentity(slot.to_bytes(32, "little"), b"", slot.to_bytes(64, "little")) for slot in range(100_000)
    ]
    with DiskStore(tmp_path, **options) as store:
        store.write([len(identities) - 1], identities[-1:], bytes(4096))
        store.remember(dict(enumerate(identities)))
    start = time.perf_counter()
    with DiskStore(tmp_path, **options) as store:
        opened = time.perf_counter()
        found = store.remembered()
        ended = time.perf_counter()
    assert [identity.tokens for _, identity in found] == [identity.tokens for identity in identities]
    with capsys.disabled():
        print(f"\n100,000 entries: opened in {opened - start:.2f} s, remembered in {ended - opened:.2f} s")


# Threads.


def test_threads_write_and_read_at_once(store):
    failures = []

    def work(first):
        try:
            for turn in range(40):
                blocks = {first + more: first * 1000 + turn * 4 + more for more in range(4)}
                stores.write(store, blocks)
                store.remember({slot: identity_of(number) for slot, number in blocks.items()})
                assert all(reads(store, slot, number) for slot, number in blocks.items())
                if turn % 8 == 0:
                    store.sync()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 16, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.sync()
    assert not failures and len(remembered(store)) == 16
    assert store.stats.num_written_blocks == store.stats.num_read_blocks == 640


# Errors of callers.

ONE = [identity_of(1)]
BYTES = payload_of(1)


@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        ("write", (5, ONE, BYTES), "write: slots: expected slots, got 5"),
        ("write", ([-1], ONE, BYTES), "write: slot: expected an int from 0 to"),
        ("write", ([10**6], ONE, BYTES), "got 1000000"),
        ("write", (["1"], ONE, BYTES), "got '1'"),
        ("write", ([True], ONE, BYTES), "got True"),
        ("write", ([1], [], BYTES), "expected 1 identities, one a slot; got 0"),
        ("write", ([1], [b"x"], BYTES), "expected a BlockIdentity, got b'x'"),
        ("write", ([1], [BlockIdentity(b"", b"", b"1234")], BYTES), "expected a BlockIdentity of 4 tokens"),
        (
            "write",
            ([1], [BlockIdentity(b"short", b"", bytes(16))], BYTES),
            "after b'' or a SHA-256 digest, or in a column, got",
        ),
        ("write", ([1, 1], ONE * 2, BYTES * 2), "expected each slot once, got [1, 1]"),
        ("write", ([1], ONE, BYTES[1:]), "payload: expected a C-contiguous buffer of 1 x 6000 bytes, got 5999 bytes"),
        ("write", ([1], ONE, "x" * 6000), "expected a C-contiguous buffer of 1 x 6000 bytes, got <class 'str'>"),
        ("write", ([1], ONE, memoryview(BYTES * 2)[::2]), "got 6000 bytes, not contiguous"),
        ("read", ([1], ONE, BYTES), "out: expected a buffer that can be written, got <class 'bytes'>"),
        ("read", ([1], ONE, bytearray(7)), "out: expected a C-contiguous buffer of 1 x 6000 bytes, got 7 bytes"),
        ("read", ([10**6], ONE, bytearray(6000)), "read: slot: expected an int from 0 to"),
        ("remember", ([1],), "remember: expected a dict of slots, and a BlockIdentity or None, got [1]"),
        ("remember", ({0: None, -1: None},), "remember: slot: expected an int from 0 to"),
        ("remember", ({0: None, 1: b"x"},), "expected a BlockIdentity, got b'x'"),
        ("remember", ({0: None, 1: BlockIdentity(b"", b"", b"")},), "expected a BlockIdentity of 4 tokens"),
        ("remember", ({0: None, 1: BlockIdentity(b"", b"", b"", 1)},), "expected a BlockIdentity of 4 tokens"),
        ("remember", ({0: None, 1: BlockIdentity(b"p" * 32, b"k", b"", 1)},), "expected a BlockIdentity of 4 tokens"),
        ("remember", ({0: None, 1: BlockIdentity(b"p" * 32, b"", bytes(16), 1)},), "expected a BlockIdentity of 4 tok"),
        ("erase", ([0, 10**6],), "erase: slot: expected an int from 0 to"),
        ("erase", (0,), "erase: expected slots, got 0"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(store, tmp_path, call, arguments, expected):
    fill(store, {0: 10, 1: 11})
    before, files = store.stats, stores.all_bytes(tmp_path / "store")
    with pytest.raises(InvalidArgumentError) as caught:
        getattr(store, call)(*arguments)
    assert expected in str(caught.value), caught.value
    assert (store.stats, stores.all_bytes(tmp_path / "store"), store.needs_sync) == (before, files, False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"folder": 5}, "DiskStore: folder: expected a path, got 5"),
        ({"folder": ""}, "DiskStore: folder: expected a path, got ''"),
        ({"folder": None}, "DiskStore: folder: expected a path, got None"),
        ({"folder": "a\0b"}, "DiskStore: folder: expected a path, got 'a\\x00b'"),
        ({"folder": "a\ud800b"}, "DiskStore: folder: expected a path, got 'a\\ud800b'"),
        ({"fingerprint": b"a"}, "fingerprint: expected 32 bytes, got 1"),
        ({"secret": b"a"}, "secret: expected at least 16 bytes, got 1"),
        ({"num_block_bytes": 0}, "num_block_bytes: expected an int of at least 1, got 0"),
        ({"block_size": 1.5}, "block_size: expected an int of at least 1, got 1.5"),
        ({"max_bytes": "10"}, "max_bytes: expected an int of at least 1, got '10'"),
        ({"max_bytes": 1_000_000}, "for 4 slots of 12288 bytes and what is kept beside them; got 1000000"),
    ],
)
def test_bad_options_are_refused_and_no_folder_is_made(tmp_path, change, expected):
    options = {"folder": tmp_path / "store", **OPTIONS, **change}
    with pytest.raises(InvalidArgumentError) as caught:
        DiskStore(options.pop("folder"), **options)
    assert expected in str(caught.value) and not [*tmp_path.iterdir()]


def test_the_least_size_is_said(tmp_path):
    with pytest.raises(InvalidArgumentError) as caught:
        open_store(tmp_path / "store", max_bytes=5)
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    with open_store(tmp_path / "store", max_bytes=least) as store:
        assert store.num_slots == 4
    with pytest.raises(InvalidArgumentError):
        open_store(tmp_path / "store", max_bytes=least - 1)


def test_a_store_that_was_closed_does_nothing(tmp_path):
    store = open_store(tmp_path)
    fill(store, {1: 1})
    store.close()
    store.close()
    calls = [("write", ([1], ONE, BYTES)), ("read", ([1], ONE, bytearray(BLOCK_BYTES))), ("remember", ({},))]
    for name, arguments in [*calls, ("sync", ()), ("erase", ([1],)), ("remembered", ())]:
        with pytest.raises(DiskError, match=f"{name}: expected an open store, got one that was closed"):
            getattr(store, name)(*arguments)
