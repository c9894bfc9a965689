"""Disks that return wrong bytes, fill up or go away: a miss, a count and a warning, never a wrong block."""

import errno
import logging
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tiers.disk import stores
from tiers.disk.histories import BLOCK_BYTES, OPTIONS, identity_of, payload_of
from tiers.disk.stores import SECRET, fill, open_store, reads, remembered
from tiers.disk.test_kill import ROOT

from kvblocks import KVCacheManager, Tier
from kvblocks.tiers.disk import DiskError
from kvblocks.tiers.disk.complaints import Complaints
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import Sealer

STRIDE = 4096 + 8192


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with 24 blocks, of which a crash left some in the log. Do not write into it."""
    folder = tmp_path_factory.mktemp("filled")
    with open_store(folder / "made") as store:
        fill(store, {slot: slot for slot in range(16)})
        store.remember({3: None})
        store.erase([5])
        fill(store, {slot: slot for slot in range(16, 24)})
        shutil.copytree(folder / "made", folder / "store")
    return folder / "store"


NUMBERS = sorted(set(range(24)) - {3, 5})


def check_copy(folder, **more):
    """Open a damaged store, and return which slots can be read. Reads all of them, whatever is remembered."""
    with open_store(folder, **more) as store:
        for slot, number in remembered(store):
            assert slot < store.num_slots
            reads(store, slot, number)
        found = [slot for slot in range(24) if reads(store, slot, slot)]
        fill(store, {3: 1000, 30: 1001})  # and it goes on
        assert reads(store, 3, 1000) and reads(store, 30, 1001)
    with open_store(folder, **more) as store:
        assert remembered(store)[-2:] == [(3, 1000), (30, 1001)]
        assert reads(store, 3, 1000)
    return found


def test_the_undamaged_copy_is_whole(filled, tmp_path):
    shutil.copytree(filled, tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        assert [number for _, number in remembered(store)] == NUMBERS
    assert (filled / "kvblocks.index-wal").stat().st_size > 0
    # A forgotten block is still there for whoever knows what to ask for. An erased one is not.
    assert check_copy(tmp_path / "store") == sorted({*NUMBERS, 3})


FILES = ["kvblocks.arena", "kvblocks.index", "kvblocks.index-wal", "kvblocks.json", "kvblocks.lock"]


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits(filled, tmp_path, name):
    """`check_copy` fails if a wrong byte is taken for right."""
    dice = random.Random(name)
    for turn in range(60):
        folder = tmp_path / str(turn)
        shutil.copytree(filled, folder)
        content = bytearray((folder / name).read_bytes())
        for _ in range(dice.choice([1, 1, 10, 1000])):
            content[dice.randrange(min(len(content), dice.choice([200, 5000, 10**9])))] ^= 1 << dice.randrange(8)
        (folder / name).write_bytes(content)
        found = check_copy(folder)
        if name not in {"kvblocks.arena", "kvblocks.json"}:
            assert found == sorted({*NUMBERS, 3})
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", FILES)
def test_truncations_and_garbage(filled, tmp_path, name):
    size = (filled / name).stat().st_size
    dice = random.Random(name)
    contents = [(filled / name).read_bytes()[:cut] for cut in (0, 1, size // 3, size // 2 + 1, size - 1)]
    contents += [dice.randbytes(size), bytes(size), (filled / name).read_bytes() + dice.randbytes(5000)]
    for turn, content in enumerate(contents):
        shutil.copytree(filled, tmp_path / str(turn))
        (tmp_path / str(turn) / name).write_bytes(content)
        check_copy(tmp_path / str(turn))
    shutil.copytree(filled, tmp_path / "without")
    (tmp_path / "without" / name).unlink()
    check_copy(tmp_path / "without")


def test_a_flipped_bit_costs_its_block_only(tmp_path, caplog):
    with open_store(tmp_path) as store:
        fill(store, {slot: slot for slot in range(4)})
        with (tmp_path / "kvblocks.arena").open("r+b") as file:
            file.seek(2 * STRIDE + 4096 + 777)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))
        out = bytearray(4 * BLOCK_BYTES)
        assert store.read(range(4), [identity_of(number) for number in range(4)], out) == 2
        assert reads(store, 3, 3)
        assert store.stats.num_damaged_blocks == 1 and store.stats.num_read_blocks == 3
    (record,) = caplog.records
    assert record.name == "kvblocks.tiers.disk" and record.levelno == logging.WARNING
    assert record.message == (
        f"{tmp_path}: slot 2: expected the block that was stored there, got other bytes, or none: not used"
    )


def test_an_index_that_cannot_be_read_is_started_anew_with_a_line(filled, tmp_path, caplog):
    shutil.copytree(filled, tmp_path / "store")
    (tmp_path / "store" / "kvblocks.index-wal").unlink()
    (tmp_path / "store" / "kvblocks.index").write_bytes(b"no database" * 1000)
    with open_store(tmp_path / "store") as store:
        assert remembered(store) == []
    assert "starting anew, with nothing in it: SQLite says: file is not a database" in caplog.text


@pytest.mark.parametrize("call", ["remembered", "sync"])
def test_an_index_that_is_damaged_while_open_is_started_anew(tmp_path, caplog, call):
    with open_store(tmp_path, max_bytes=8_000_000) as store:
        stores.lengthen(store)
        store.remember({slot: identity_of(slot) for slot in range(store.num_slots)})
        store.erase([0])  # the log is empty now
        path = tmp_path / "kvblocks.index"
        path.write_bytes(path.read_bytes()[:4096] + b"\xee" * (path.stat().st_size - 4096))
        store._index._connection.execute("PRAGMA cache_size = 1")  # noqa: SLF001
        store._index._connection.execute("PRAGMA shrink_memory")  # noqa: SLF001
        if call == "remembered":
            assert remembered(store) == []
        store.remember({1: identity_of(5), 2: None})
        store.sync()
        assert "starting anew" in caplog.text
        assert remembered(store) == [(1, 5)]
    with open_store(tmp_path, max_bytes=8_000_000) as store:
        assert remembered(store) == [(1, 5)]


# Planted.


def plant(folder, slot, number, sealer, payload=None):
    """Write a record and a payload into an arena as somebody would who knows the format."""
    payload = payload_of(number) if payload is None else payload
    with (folder / "kvblocks.arena").open("r+b") as file:
        file.seek(slot * STRIDE)
        file.write(sealer.seal(identity_of(number), payload).ljust(4096, b"\0") + payload)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_planted_block_is_a_miss_without_the_secret(tmp_path, secret):
    with open_store(tmp_path, secret=secret) as store:
        fill(store, {0: 0, 1: 1, 2: 2})
    evil = bytes(BLOCK_BYTES)
    for slot, sealer in enumerate([Sealer(OPTIONS["fingerprint"]), Sealer(OPTIONS["fingerprint"], b"guessed" * 4)]):
        plant(tmp_path, slot, slot, sealer, evil)
    with open_store(tmp_path, secret=secret) as store:
        out = bytearray(BLOCK_BYTES)
        # Without a secret the first one can't be told from a real one.
        assert store.read([0], [identity_of(0)], out) == (0 if secret else 1)
        assert store.read([1], [identity_of(1)], out) == 0
        assert reads(store, 2, 2)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_blocks_that_were_moved_or_are_of_another_model_are_misses(tmp_path, secret):
    with open_store(tmp_path, secret=secret) as store:
        fill(store, {slot: slot for slot in range(4)})
        arena = tmp_path / "kvblocks.arena"
        content = bytearray(arena.read_bytes())
        content[:STRIDE] = content[STRIDE : 2 * STRIDE]
        arena.write_bytes(content)
        plant(tmp_path, 2, 2, Sealer(b"b" * 32, secret))
        assert not reads(store, 0, 0) and reads(store, 0, 1) and reads(store, 1, 1)
        assert not reads(store, 2, 2) and reads(store, 3, 3)


NOBODY = 65534

PLANTS = [
    "UPDATE slots SET slot = 1000000 WHERE slot = 1",
    "UPDATE slots SET slot = -1 WHERE slot = 1",
    "UPDATE slots SET parent = 5 WHERE slot = 1",
    "UPDATE slots SET parent = x'00' WHERE slot = 1",
    "UPDATE slots SET keys = zeroblob(513) WHERE slot = 1",
    "UPDATE slots SET keys = 'text' WHERE slot = 1",
    "UPDATE slots SET keys = x'ff0102' WHERE slot = 1",
    "UPDATE slots SET tokens = zeroblob(17) WHERE slot = 1",
    "UPDATE slots SET number = 'text' WHERE slot = 1",
    "UPDATE slots SET number = 9223372036854775807 WHERE slot = 1",
    "INSERT INTO slots VALUES (40, 40, x'', x'', zeroblob(16))",
    "CREATE TABLE other (x)",
    "CREATE TRIGGER more AFTER INSERT ON slots BEGIN DELETE FROM slots; END",
    "DROP TABLE slots",
    "DROP TABLE slots; CREATE VIEW slots AS SELECT 1 slot, 1 number, x'' parent, x'' keys, zeroblob(16) tokens",
    "ALTER TABLE slots ADD COLUMN more",
]


@pytest.mark.parametrize("statements", PLANTS)
def test_planted_rows_are_misses(filled, tmp_path, statements):
    shutil.copytree(filled, tmp_path / "store")
    connection = sqlite3.connect(tmp_path / "store" / "kvblocks.index")
    connection.executescript(statements)
    connection.close()
    with open_store(tmp_path / "store") as store:
        pairs = store.remembered()
        assert all(0 <= slot < store.num_slots for slot, _ in pairs)
        tier = Tier("disk", store.num_slots, BLOCK_BYTES, is_persistent=True)
        assert KVCacheManager(4, 4, tiers=[tier]).tiers.restore("disk", pairs) <= len(pairs)
        assert all(store.read([slot], [identity], bytearray(BLOCK_BYTES)) in (0, 1) for slot, identity in pairs)
    assert check_copy(tmp_path / "store") == sorted({*NUMBERS, 3})


def test_rows_that_are_no_blocks_are_counted(filled, tmp_path, caplog):
    shutil.copytree(filled, tmp_path / "store")
    connection = sqlite3.connect(tmp_path / "store" / "kvblocks.index")
    connection.executescript(PLANTS[2] + ";UPDATE slots SET tokens = x'' WHERE slot > 20")
    connection.close()
    with open_store(tmp_path / "store") as store:
        assert {slot for slot, _ in store.remembered()} == set(NUMBERS) - {1, 21, 22, 23}
        assert store.stats.num_damaged_blocks == 4
    assert "4 rows of the index are no blocks: not used" in caplog.text


def test_rows_that_are_damaged_while_open_are_left_out(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        good = (1, 5, b"p" * 32, b"k", bytes(16))
        bad = [(store.num_slots, *good[1:]), (-1, *good[1:]), (b"1", *good[1:]), (1, b"5", *good[2:])]
        bad += [(1, 5, None, b"", bytes(16)), (1, 5, b"p", b"", bytes(16)), (1, 5, b"", 7, bytes(16))]
        bad += [(1, 5, b"", b"k" * 513, bytes(16)), (1, 5, b"", b"", bytes(15)), (1, 5, b"", b"", 1.5)]
        column = (2, 6, b"p" * 32, b"\0", b"\1\0\0\0")
        bad += [(*column[:2], b"p" * 31, *column[3:]), (*column[:2], b"", *column[3:]), (*column[:4], bytes(4))]
        bad += [(*column[:4], bytes(5)), (*column[:4], b""), (*column[:3], b"\0\0", column[4])]
        monkeypatch.setattr(store._index, "rows", lambda read: [read(row) for row in (good, column, *bad)])  # noqa: SLF001
        assert store.remembered() == [(1, BlockIdentity(*good[2:])), (2, BlockIdentity(b"p" * 32, b"", b"", 1))]
        assert store.stats.num_damaged_blocks == len(bad) == 16


def test_an_index_that_somebody_else_has_open_is_not_thrown_away(filled, tmp_path):
    shutil.copytree(filled, tmp_path / "store")
    connection = sqlite3.connect(tmp_path / "store" / "kvblocks.index", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(DiskError, match="database is locked"):
        open_store(tmp_path / "store")
    connection.close()
    with open_store(tmp_path / "store") as store:
        assert [number for _, number in remembered(store)] == NUMBERS


# Full.


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_fails_a_write_and_nothing_else(tmp_path, monkeypatch, caplog):
    with open_store(tmp_path) as store:
        fill(store, {0: 0, 1: 1})
        for name in ("pwritev", "pwrite"):
            monkeypatch.setattr(os, name, full)
        for _ in range(3):
            with pytest.raises(DiskError, match=r"write: expected room on the disk, got .*No space left on device"):
                stores.write(store, {1: 11, 2: 12})
        monkeypatch.undo()
        assert store.stats.num_failed_writes == 3 and store.stats.num_written_blocks == 2
        assert reads(store, 0, 0) and reads(store, 1, 1) and not reads(store, 1, 11)
        fill(store, {1: 11, 2: 12})
        assert reads(store, 1, 11) and reads(store, 2, 12)
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1  # one in ten seconds


def test_a_write_in_pieces_is_whole(tmp_path, monkeypatch):
    """A system may write less than it was given."""
    real = os.pwritev, os.pwrite

    def some(descriptor, parts, offset):
        return real[1](descriptor, b"".join(parts)[: first[0]], offset)

    first = [0]
    with open_store(tmp_path) as store:
        for slot, first[0] in enumerate([1, 4095, 4096, 4097, 9000, 10095]):
            monkeypatch.setattr(os, "pwritev", some)
            monkeypatch.setattr(os, "pwrite", lambda one, data, at: real[1](one, data[:700], at))
            stores.write(store, {slot: slot})
            monkeypatch.undo()
            assert reads(store, slot, slot)
        monkeypatch.setattr(os, "pwritev", some)
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(DiskError, match="No space left"):
            stores.write(store, {0: 99})
        monkeypatch.undo()
        assert not reads(store, 0, 0) and not reads(store, 0, 99) and reads(store, 1, 1)


def test_a_read_in_pieces_is_whole(tmp_path, monkeypatch):
    real = os.preadv, os.pread

    def some(descriptor, buffers, offset):
        data, at = real[1](descriptor, pieces, offset), 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return len(data)

    with open_store(tmp_path) as store:
        fill(store, {0: 7})
        monkeypatch.setattr(os, "preadv", some)
        monkeypatch.setattr(os, "pread", lambda one, size, at: real[1](one, min(size, 900), at))
        for pieces in (1, 4095, 4096, 4097, 9000, 10095):
            assert reads(store, 0, 7), pieces


def test_a_disk_that_cannot_read_is_a_miss(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path) as store:
        fill(store, {0: 7})
        monkeypatch.setattr(os, "preadv", fail)
        assert [reads(store, 0, 7) for _ in range(5)] == [False] * 5
        monkeypatch.undo()
        assert reads(store, 0, 7) and store.stats.num_damaged_blocks == 5
    assert len(caplog.records) == 1 and "Input/output error" in caplog.text


def test_a_flush_that_fails_remembers_nothing_of_it(tmp_path, monkeypatch):
    """The system may have dropped what it couldn't write, and reports that only once."""

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path) as store:
        fill(store, {0: 0, 1: 1})
        stores.write(store, {1: 11, 2: 12})
        store.remember({1: identity_of(11), 2: identity_of(12)})
        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(DiskError, match=r"sync: expected a disk that can be written, got .*Input/output error"):
            store.sync()
        monkeypatch.undo()
        assert store.needs_sync and store.stats.num_failed_syncs == 1
        store.remember({3: None})
        store.sync()
        assert remembered(store) == [(0, 0)]


def test_a_deletion_whose_flush_failed_overwrites_again(tmp_path, monkeypatch):
    """The system may have dropped the zeros, though it shows them."""

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path) as store:
        fill(store, {3: 3})
        before = (tmp_path / "kvblocks.arena").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(DiskError, match="bytes of blocks are left"):
                store.erase([3])
        with (tmp_path / "kvblocks.arena").open("r+b") as arena:
            place = store._layout.offset(3) + store._layout.num_room_bytes  # noqa: SLF001
            arena.seek(place)
            arena.write(before[place:])
        store.erase([3])
        assert not any((tmp_path / "kvblocks.arena").read_bytes())


def test_a_deletion_that_failed_goes_on_where_it_was(tmp_path, monkeypatch):
    """A large one takes minutes, and `ForgetError` says that a second call continues."""
    with open_store(tmp_path) as store:
        fill(store, {1: 1, 2: 2, 3: 3})
        offset, real, places = store._layout.offset, os.pwrite, []  # noqa: SLF001
        monkeypatch.setattr("kvblocks.tiers.disk.arena._MOST_UNFLUSHED", 1)

        def fail(descriptor, data, place):
            if place >= offset(2):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, data, place)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            with pytest.raises(DiskError, match="bytes of blocks are left"):
                store.erase([1, 2, 3])
        monkeypatch.setattr(os, "pwrite", lambda *given: places.append(given[2]) or real(*given))
        store.erase([1, 2, 3])
        assert places and all(offset(2) <= place < offset(4) for place in places)
        assert not any((tmp_path / "kvblocks.arena").read_bytes())


def test_a_commit_that_fails_is_tried_again_and_newer_changes_win(tmp_path, monkeypatch):
    def fail(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with open_store(tmp_path) as store:
        fill(store, {0: 0, 1: 1, 2: 2})
        store.remember({0: identity_of(10), 1: None, 3: identity_of(13)})
        with monkeypatch.context() as patch:
            patch.setattr(store._index, "write", fail)  # noqa: SLF001
            with pytest.raises(DiskError, match="database or disk is full"):
                store.sync()
            assert store.needs_sync and remembered(store) == [(0, 0), (1, 1), (2, 2)]
            real = store._folder.check_there  # noqa: SLF001

            def meanwhile(arena):
                store.remember({0: identity_of(20)})
                real(arena)

            patch.setattr(store._folder, "check_there", meanwhile)  # noqa: SLF001
            with pytest.raises(DiskError):
                store.sync()
        store.sync()
        assert remembered(store) == [(2, 2), (3, 13), (0, 20)]


LIMITED = """
import resource, sys
from tiers.disk import stores
from tiers.disk.histories import identity_of
from kvblocks.tiers.disk import DiskError

with stores.open_store(sys.argv[1], max_bytes=30_000_000) as store:
    stores.fill(store, {slot: slot for slot in range(8)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    failures = 0
    for slot in range(8, 20):
        try:
            stores.write(store, {slot: slot})
        except DiskError as error:
            assert "File too large" in str(error), error
            failures += 1
    assert failures and not stores.reads(store, 19, 19)
    store.remember({slot: identity_of(slot) for slot in range(store.num_slots)})
    try:
        store.sync()
    except DiskError as error:
        print("sync:", error)
    assert stores.remembered(store) == [(slot, slot) for slot in range(8)]
    assert all(stores.reads(store, slot, slot) for slot in range(8))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.sync()
    assert len(store.remembered()) == store.num_slots
    print("done")
"""


def test_a_limit_of_the_system_fails_writes_and_syncs_until_it_is_lifted(tmp_path):
    tests = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tests}"}
    command = [sys.executable, "-c", LIMITED, tmp_path / "store"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sync: DiskStore.sync: expected a disk that can be written, got ")
    assert done.stdout.endswith("done\n") and resource.getrlimit(resource.RLIMIT_FSIZE)[0] < 0
    with open_store(tmp_path / "store", max_bytes=30_000_000) as store:
        assert all(reads(store, slot, slot) for slot in range(8))


# Gone.


@pytest.mark.parametrize("what", ["folder", "kvblocks.arena", "kvblocks.index", "another folder"])
def test_a_folder_that_vanishes(tmp_path, what):
    folder = tmp_path / "store"
    store = open_store(folder)
    fill(store, {0: 0, 1: 1})
    store.remember({0: None})
    if what.startswith("kvblocks"):
        (folder / what).unlink()
    else:
        shutil.rmtree(folder)
    if what == "another folder":
        open_store(folder).close()
    for call in (lambda: stores.write(store, {2: 2}), store.sync, lambda: store.erase([1])):
        with pytest.raises(DiskError, match="expected the files that were opened, got a folder without them"):
            call()
    reads(store, 1, 1)  # right, or a miss: it raises nothing
    with pytest.raises(DiskError):
        store.close()
    with open_store(folder) as store:
        found = [reads(store, slot, number) for slot, number in remembered(store)]
        assert not any(found)  # nothing came back


@pytest.fixture
def forbidding_folder():
    """A folder of a user to whom something can be forbidden: for this test we are not root."""
    user = os.geteuid()
    folder = Path(tempfile.mkdtemp())
    if user == 0:
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)
    yield folder
    os.seteuid(user)
    shutil.rmtree(folder)


def test_a_folder_without_permission(forbidding_folder):
    with open_store(forbidding_folder / "a" / "store") as store:
        fill(store, {0: 0})
        (forbidding_folder / "a").chmod(0)
        try:
            assert reads(store, 0, 0)
            with pytest.raises(DiskError, match="Permission denied"):
                open_store(forbidding_folder / "a" / "store")
        finally:
            (forbidding_folder / "a").chmod(0o700)


def test_a_system_without_locks_is_refused_by_name_and_nobody_else_notices(tmp_path):
    code = """
import sys
sys.modules["fcntl"] = None
import kvblocks.tiers.disk as disk
try:
    disk.DiskStore(sys.argv[1], fingerprint=bytes(32), num_block_bytes=64, block_size=4, max_bytes=2**24)
except disk.DiskError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "expected a POSIX system, whose locks a disk tier needs" in done.stdout
    assert not list(tmp_path.iterdir())


# Warnings.


def test_warnings_of_a_kind_come_once_in_a_while(caplog):
    now = [0.0]
    complaints = Complaints(10, lambda: now[0])
    for time, kind in [(0, "a"), (1, "a"), (2, "b"), (9.9, "a"), (10, "a"), (10.1, "a"), (30, "a")]:
        now[0] = time
        complaints.warn(kind, f"{kind} at {time}")
    assert [record.message for record in caplog.records] == [
        *("a at 0", "b at 2", "a at 10 (and 2 more like it before)", "a at 30 (and 1 more like it before)"),
    ]
