"""What a folder keeps for other fingerprints: it is found again, in one budget, and the oldest goes first."""

import os
import shutil
from contextlib import suppress

import pytest
from tiers.disk import stores
from tiers.disk.histories import BLOCK_BYTES, identity_of, payload_of
from tiers.disk.stores import fill, open_store, reads, remembered

from kvblocks.tiers.disk import DiskError

BUDGET = 8_000_000


def open_for(folder, name, **more):
    return open_store(folder, **{"fingerprint": name.encode() * 32, "max_bytes": BUDGET, **more})


def all_sizes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def num_found(folder, name):
    """How many blocks a fingerprint finds again. All that is remembered can be read."""
    with open_for(folder, name) as store:
        found = remembered(store)
        assert all(reads(store, slot, number) for slot, number in found)
        return len(found)


def test_who_comes_back_finds_all_again_if_there_was_room(tmp_path):
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        with open_for(tmp_path, name) as store:
            fill(store, {slot: first + slot for slot in range(50)})
    assert [num_found(tmp_path, name) for name in "abcba"] == [50] * 5


def test_a_full_folder_gives_only_what_the_new_one_takes(tmp_path):
    """The case of a rollback: a short trial of another configuration costs as much as the trial has stored."""
    with open_for(tmp_path, "a") as store:
        number = store.num_slots
        for start in range(0, number, 100):
            fill(store, {slot: slot for slot in range(start, min(start + 100, number))})
    with open_for(tmp_path, "b") as store:
        for slot in range(40):
            fill(store, {slot: slot})
            assert all_sizes(tmp_path) <= BUDGET
    left = num_found(tmp_path, "a")
    assert 0.85 * number < left < number
    assert num_found(tmp_path, "b") == 40


def test_the_one_that_was_used_longest_ago_goes_first(tmp_path):
    aged = set()
    for age, name in enumerate("abc"):
        with open_for(tmp_path, name) as store:
            half = store.num_slots // 4
            fill(store, {slot: slot for slot in range(half)})
        for path in {*(tmp_path / "kvblocks.kept").glob("*/kvblocks.json")} - aged:
            os.utime(path, (1000 * age, 1000 * age))  # the clocks of file systems are coarse
            aged.add(path)
    with open_for(tmp_path, "d") as store:
        fill(store, {slot: slot for slot in range(2 * half)})
        assert all_sizes(tmp_path) <= BUDGET
    assert num_found(tmp_path, "c") == half
    assert num_found(tmp_path, "a") < half / 2


def test_a_folder_never_holds_more_than_its_budget(tmp_path):
    for turn in range(6):
        with open_for(tmp_path, "abc"[turn % 3], max_bytes=BUDGET - 500_000 * turn) as store:
            assert all_sizes(tmp_path) <= BUDGET - 500_000 * turn
            for start in range(0, store.num_slots - 50, 50):
                fill(store, {slot: slot for slot in range(start, start + 50)})
                assert all_sizes(tmp_path) <= BUDGET - 500_000 * turn


def test_erasing_reaches_what_is_kept(tmp_path):
    with open_for(tmp_path, "a") as store:
        fill(store, {slot: 700 + slot for slot in range(20)})
    with open_for(tmp_path, "b") as store:
        fill(store, {0: 1})
        found = stores.all_bytes(tmp_path)
        assert payload_of(705)[:100] in found and identity_of(705).parent in found, "the search can find"
        store.erase([5])
        found = stores.all_bytes(tmp_path)
        assert not any(payload_of(700 + slot)[:100] in found for slot in range(20))
        assert not any(identity_of(700 + slot).parent in found for slot in (1, 2, 3, 5, 6))
    assert num_found(tmp_path, "a") == 0


@pytest.mark.parametrize("num_moves", range(8))
def test_a_crash_between_two_moves_costs_hits_at_most(tmp_path, monkeypatch, num_moves):
    """Whichever rename is the last one, both fingerprints open afterwards, and find all of theirs or nothing."""
    with open_for(tmp_path / "folder", "a") as store:
        fill(store, {slot: slot for slot in range(9)})
    with open_for(tmp_path / "folder", "b") as store:
        fill(store, {slot: slot for slot in range(7)})
    rename, left = os.rename, [num_moves]

    class Crash(BaseException):
        pass

    def until_the_crash(*given, **more):
        if not left[0]:
            raise Crash
        left[0] -= 1
        rename(*given, **more)

    monkeypatch.setattr(os, "rename", until_the_crash)
    with suppress(Crash):
        open_for(tmp_path / "folder", "a").close()
    monkeypatch.undo()
    shutil.copytree(tmp_path / "folder", tmp_path / "other")
    assert num_found(tmp_path / "folder", "a") in (0, 9) and num_found(tmp_path / "folder", "b") in (0, 7)
    assert num_found(tmp_path / "other", "b") in (0, 7) and num_found(tmp_path / "other", "a") in (0, 9)


def test_what_is_not_ours_among_the_kept_is_refused_untouched(tmp_path):
    for name in "ab":
        open_for(tmp_path, name).close()
    (there,) = (tmp_path / "kvblocks.kept").iterdir()
    (there / "notes.txt").write_text("precious")
    with pytest.raises(DiskError, match=r"expected files of a DiskStore, got notes.txt"):
        open_for(tmp_path, "c")
    assert (there / "notes.txt").read_text() == "precious"


def test_a_link_among_the_kept_is_refused(tmp_path):
    open_for(tmp_path / "folder", "a").close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder" / "kvblocks.kept").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DiskError):
        open_for(tmp_path / "folder", "b")
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_a_damaged_arena_among_the_kept_is_a_miss(tmp_path):
    with open_for(tmp_path, "a") as store:
        fill(store, {slot: slot for slot in range(9)})
    open_for(tmp_path, "b").close()
    (arena,) = (tmp_path / "kvblocks.kept").glob("*/kvblocks.arena")
    with arena.open("r+b") as file:
        file.truncate(arena.stat().st_size // 2)
    with open_for(tmp_path, "a") as store:
        found = remembered(store)
        assert len(found) == 4, "rows of slots that are gone are gone"
        assert all(reads(store, slot, number) for slot, number in found)
        assert store.read([8], [identity_of(8)], bytearray(BLOCK_BYTES)) == 0
