"""A full volume: a store opens all the same, forgets all the same, and says what it gave up for that."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tiers.disk import stores
from tiers.disk.histories import BLOCK_BYTES, identity_of, payload_of
from tiers.disk.stores import fill, open_store, reads, remembered
from tiers.disk.test_kill import ROOT
from tiers.disk.volumes import KINDS, fill_up, mounted

from kvblocks.tiers.disk import DiskError, DiskFullError
from kvblocks.tiers.identity import BlockIdentity

BUDGET = 12_000_000


@pytest.fixture(params=KINDS)
def volume(tmp_path, request):
    with mounted(tmp_path / "volume", request.param, 16 * 2**20) as folder:
        yield folder


def in_a_process(program, *arguments):
    """Run a program of these tests until it kills itself, or ends."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).resolve().parents[2]}"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


FILL_AND_DIE = """
import os, signal, sys
from pathlib import Path
from kvblocks.tiers.disk import DiskError
from tiers.disk.histories import identity_of
from tiers.disk.stores import fill, open_store
from tiers.disk.volumes import fill_up
folder = Path(sys.argv[1])
store = open_store(folder / "kv", max_bytes=12_000_000)
for slot in range(0, 600, 20):
    fill(store, {one: one for one in range(slot, slot + 20)})
fill_up(folder)
try:
    for turn in range(99):
        store.remember({one: identity_of(one) for one in range(600)})
        store.sync()
except DiskError as error:
    print(error, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_on_a_full_volume(volume):
    ended = in_a_process(FILL_AND_DIE, volume)
    assert ended.returncode == -signal.SIGKILL and "full" in ended.stdout, (ended.stdout, ended.stderr)


def test_after_a_kill_on_a_full_volume_a_store_opens_and_has_most_blocks(volume, caplog):
    killed_on_a_full_volume(volume)
    for _ in range(2):
        with open_store(volume / "kv", max_bytes=BUDGET) as store:
            found = remembered(store)
            good = [reads(store, slot, number) for slot, number in found]
            assert sum(good) > 300, "most of 600 blocks"
            store.remember({found[0][0]: None})
            store.sync()
    given = [record.message for record in caplog.records if "its volume is full" in record.message]
    assert given and "what has to be written takes the place of its last" in given[0]


def test_forgetting_works_on_a_full_volume(volume, caplog):
    """All that was said of the blocks is gone: bytes, records, rows, and what the index's log has of rows."""
    gone, kept = range(0, 600, 2), range(1, 100, 2)
    with open_store(volume / "kv", max_bytes=BUDGET) as store:
        for start in range(0, 600, 20):
            fill(store, {slot: slot for slot in range(start, start + 20)})
        fill_up(volume)
        with suppress(DiskError):  # so that the index's log is full, too
            for turn in range(1, 9):
                store.remember({slot: identity_of(slot + 600 * turn) for slot in range(600)})
                store.sync()
        store.erase(gone)
        found = stores.all_bytes(volume / "kv")
        assert not any(payload_of(slot)[:100] in found for slot in gone[::15])
        for slot in gone[::10]:
            numbers = [
                slot + 600 * turn for turn in range(9) if (slot + 600 * turn) % 4 and (slot + 600 * turn) % 5 != 4
            ]
            assert not any(identity_of(number).parent in found for number in numbers), slot
        assert any(payload_of(slot)[:100] in found for slot in kept), "the search can find"
    with open_store(volume / "kv", max_bytes=BUDGET) as store:
        assert not {slot for slot, _ in store.remembered()} & {*gone}


def test_a_volume_without_any_room_is_said_to_be_full(volume):
    fill_up(volume)
    with pytest.raises(DiskFullError):
        open_store(volume / "kv", max_bytes=BUDGET)
    (volume / "filler").unlink()
    with open_store(volume / "kv", max_bytes=BUDGET) as store:
        fill(store, {0: 1})
        assert remembered(store) == [(0, 1)]


def test_another_fingerprint_on_a_full_volume_takes_the_place_of_the_kept_one(volume):
    with open_store(volume / "kv", max_bytes=BUDGET) as store:
        for start in range(0, 600, 20):
            fill(store, {slot: slot for slot in range(start, start + 20)})
    fill_up(volume)
    with open_store(volume / "kv", max_bytes=BUDGET, fingerprint=b"b" * 32) as store:
        with suppress(DiskError):
            fill(store, {slot: 1000 + slot for slot in range(20)})
        assert all(reads(store, slot, number) for slot, number in remembered(store))
    with open_store(volume / "kv", max_bytes=BUDGET) as store:
        assert all(reads(store, slot, number) for slot, number in remembered(store))


def test_a_size_that_the_volume_has_no_room_for_is_warned_of(volume, caplog):
    open_store(volume / "kv", max_bytes=BUDGET).close()
    assert not caplog.records
    open_store(volume / "kv", max_bytes=40_000_000).close()
    (record,) = caplog.records
    assert "expected room for its whole size, 40000000 bytes, got a volume with 1" in record.message


def test_the_root_of_a_volume_will_do(tmp_path):
    """`lost+found` is the file system's."""
    with mounted(tmp_path / "volume", "ext4", 16 * 2**20) as folder:
        assert (folder / "lost+found").is_dir()
        with open_store(folder) as store:
            fill(store, {0: 1})
        assert (folder / "lost+found").is_dir()


# Where nothing may be mounted, a limit of a file's size makes real writes fail.

LIMITED = """
import resource, sys
from kvblocks.tiers.disk import DiskError, DiskFullError
from tiers.disk.stores import fill, open_store, reads, remembered
limit = int(sys.argv[2])
if sys.argv[3] == "open":
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        open_store(sys.argv[1])
    except DiskFullError as error:
        print("full:", error)
else:
    with open_store(sys.argv[1]) as store:
        fill(store, {slot: slot for slot in range(30)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            store.erase([25])
        except DiskError as error:
            print("left:", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_without_any_room_opening_says_that_it_is_full(tmp_path):
    for _ in range(2):
        ended = in_a_process(LIMITED, tmp_path / "kv", 10, "open")
        assert ended.returncode == 0 and ended.stdout.startswith("full: "), (ended.stdout, ended.stderr)
    with open_store(tmp_path / "kv") as store:
        fill(store, {0: 1})
        assert remembered(store) == [(0, 1)]


def test_a_deletion_that_fails_says_what_is_left(tmp_path):
    ended = in_a_process(LIMITED, tmp_path / "kv", 4096, "erase")
    assert "left: DiskStore.erase: expected a disk that can be written (bytes of blocks are left" in ended.stdout, ended
    with open_store(tmp_path / "kv") as store:
        store.erase([25])
        assert payload_of(25)[:100] not in stores.all_bytes(tmp_path / "kv")


def test_holes_stay_holes_where_slots_are_erased(tmp_path):
    """Zeros in a hole would take room, and a full volume has none."""
    with open_store(tmp_path) as store:
        fill(store, {0: 1, 40: 2})
        arena = tmp_path / "kvblocks.arena"
        before = arena.stat().st_blocks
        assert before * 512 < 40 * BLOCK_BYTES, "the file system keeps holes"
        store.erase(range(41))
        assert arena.stat().st_blocks == before
        assert store.read([0], [identity_of(1)], bytearray(BLOCK_BYTES)) == 0
        assert BlockIdentity(b"", b"", b"") not in store.remembered()
