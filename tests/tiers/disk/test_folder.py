"""A store's folder: who may use it, what it was made for, and what is refused."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tiers.disk import stores
from tiers.disk.histories import identity_of
from tiers.disk.stores import SECRET, fill, open_store, reads, remembered
from tiers.disk.test_kill import ROOT

from kvblocks.tiers.disk import DiskError
from kvblocks.tiers.disk import store as store_module


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_folder_and_files_are_for_their_owner_only(tmp_path):
    old = os.umask(0)
    try:
        with open_store(tmp_path / "a" / "store") as store:
            fill(store, {0: 1})
            assert stat.S_IMODE((tmp_path / "a" / "store").stat().st_mode) == 0o700
            names = {"kvblocks.lock", "kvblocks.json", "kvblocks.arena", "kvblocks.index", "kvblocks.index-wal"}
            assert modes(tmp_path / "a" / "store") == dict.fromkeys(names, 0o600)
    finally:
        os.umask(old)


def test_modes_that_were_widened_are_narrowed(tmp_path):
    with open_store(tmp_path) as store:
        fill(store, {0: 1})
    for path in [tmp_path, *tmp_path.iterdir()]:
        path.chmod(0o777)
    with open_store(tmp_path) as store:
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700 and {*modes(tmp_path).values()} == {0o600}
        assert remembered(store) == [(0, 1)]


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "kvblocks.index2"])
def test_a_folder_with_anything_else_is_refused_untouched(tmp_path, name):
    (tmp_path / name).write_text("precious")
    tmp_path.chmod(0o755)
    with pytest.raises(DiskError, match=rf"expected an empty folder, .* got one with {name}"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_store_with_anything_else_is_refused_untouched(tmp_path):
    with open_store(tmp_path) as store:
        fill(store, {0: 1})
    for number in range(5):
        (tmp_path / f"other{number}").mkdir()
    before = stores.sizes(tmp_path)
    with pytest.raises(DiskError, match="got one with other0, other1, other2 and 2 more"):
        open_store(tmp_path, fingerprint=b"b" * 32)
    assert stores.sizes(tmp_path) == before


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskError, match="expected a folder to read and write, got"):
            open_store(path)
    assert (tmp_path / "file").read_text() == "x"


def test_links_and_folders_in_the_place_of_files_are_refused(tmp_path):
    (tmp_path / "target").write_bytes(b"precious")
    for name in ("kvblocks.index", "kvblocks.arena", "kvblocks.lock"):
        folder = tmp_path / name.replace(".", "-")
        open_store(folder).close()
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "target")
        with pytest.raises(DiskError):
            open_store(folder)
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(DiskError):
            open_store(folder)
        (folder / name).rmdir()
        os.mkfifo(folder / name)
        with pytest.raises(DiskError, match="expected a file, got something else"):
            open_store(folder)
        (folder / name).unlink()
        open_store(folder).close()
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_another_users_folder_is_refused(tmp_path, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(DiskError, match=f"expected a folder of user {user + 1}, got one of user {user}"):
        open_store(tmp_path)
    assert not [*tmp_path.iterdir()]


# One owner at a time.


def test_a_second_store_is_told_who_the_first_one_is(tmp_path):
    with open_store(tmp_path) as store:
        fill(store, {0: 1})
        with pytest.raises(DiskError, match=f"expected a folder that nobody uses, got one of process {os.getpid()}$"):
            open_store(tmp_path, fingerprint=b"b" * 32)
        assert reads(store, 0, 1) and remembered(store) == [(0, 1)]
    open_store(tmp_path).close()


HOLD = """
import sys, time
from tiers.disk.stores import open_store
store = open_store(sys.argv[1])
print("open", flush=True)
time.sleep(60)
"""


def test_another_process_is_told_who_has_it_until_that_is_killed(tmp_path):
    tests = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tests}"}
    command = [sys.executable, "-c", HOLD, tmp_path]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "open\n"
            with pytest.raises(DiskError, match=f"got one of process {process.pid}$"):
                open_store(tmp_path)
        finally:
            process.send_signal(signal.SIGKILL)
    open_store(tmp_path).close()


def open_files(below):
    """What this process has open of a folder and below it; nothing where nobody can tell."""
    found = []
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(str(link.readlink()))
    return [path for path in found if path.startswith(str(below))]


def test_an_opening_that_fails_lets_go_of_the_folder(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    for module, target in ((store_module, "Index"), (os, "fchmod"), (os, "rename"), (os, "fstatvfs")):
        with monkeypatch.context() as patch:
            patch.setattr(module, target, fail)
            with pytest.raises(DiskError, match="No space left on device"):
                open_store(tmp_path)
    assert open_files(tmp_path) == []
    with open_store(tmp_path):
        assert len(open_files(tmp_path)) > 2 or not Path("/proc/self/fd").is_dir()


# What a folder was made for.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": b"b" * 32}, "expected fingerprint '6262"),
        ({"num_block_bytes": 6001}, "expected num_block_bytes 6001, got 6000"),
        ({"block_size": 8}, "expected block_size 8, got 4"),
        ({"secret": SECRET}, "expected the secret that it was made with, got another"),
    ],
)
def test_a_folder_made_for_something_else_is_kept_with_a_line(tmp_path, caplog, change, reason):
    with open_store(tmp_path) as store:
        fill(store, {slot: slot for slot in range(9)})
    with open_store(tmp_path, **change) as store:
        assert store.remembered() == [] and stores.sizes(tmp_path)["kvblocks.arena"] == 0
    record = caplog.records[0]
    assert record.name == "kvblocks.tiers.disk" and record.levelname == "WARNING"
    assert "kept for its return: " in record.message and reason in record.message and str(tmp_path) in record.message
    for _ in range(2):
        with open_store(tmp_path) as store:
            assert remembered(store) == [(slot, slot) for slot in range(9)]
            assert all(reads(store, slot, slot) for slot in range(9))


def test_another_secret_is_something_else_and_none_is_shown(tmp_path, caplog):
    for secret in (SECRET, SECRET[::-1], None):
        with open_store(tmp_path, secret=secret) as store:
            assert remembered(store) == []
            fill(store, {0: 1})
        assert SECRET not in stores.all_bytes(tmp_path) and SECRET[::-1] not in stores.all_bytes(tmp_path)
    assert SECRET.decode() not in caplog.text
    with open_store(tmp_path, secret=None) as store:
        assert remembered(store) == [(0, 1)]


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_another_format_is_something_else(tmp_path, caplog, number):
    with open_store(tmp_path) as store:
        fill(store, {0: 1})
    marker = json.loads((tmp_path / "kvblocks.json").read_text())
    assert marker["format"] == 1 and marker["kvblocks"] == "a disk tier of kvblocks"
    (tmp_path / "kvblocks.json").write_text(json.dumps(marker | {"format": number}))
    with open_store(tmp_path) as store:
        assert remembered(store) == [] and not reads(store, 0, 1)
    assert f"expected format 1, got {number!r}" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff\xfe", "null"])
def test_a_damaged_marker_empties_the_folder(tmp_path, caplog, text):
    with open_store(tmp_path) as store:
        fill(store, {0: 1})
    (tmp_path / "kvblocks.json").write_bytes(text.encode("latin-1"))
    with open_store(tmp_path) as store:
        assert remembered(store) == []
    assert "expected a marker that says what it was made for, got none" in caplog.text


def test_a_new_folder_is_no_news(tmp_path, caplog):
    open_store(tmp_path / "one").close()
    (tmp_path / "two").mkdir()
    open_store(tmp_path / "two").close()
    open_store(tmp_path / "two").close()
    assert not caplog.records


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_store("store") as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        fill(store, {0: 1})
        store.erase([1])
    with open_store(tmp_path / "store") as store:
        assert remembered(store) == [(0, 1)]


def test_a_history_that_goes_on_counts_on(tmp_path):
    """What was stored in a later process comes later, even where all that was remembered last is forgotten."""
    for number in range(4):
        with open_store(tmp_path) as store:
            fill(store, {3 - number: number})
    with open_store(tmp_path) as store:
        assert remembered(store) == [(3, 0), (2, 1), (1, 2), (0, 3)]
        assert store.remembered()[0][1] == identity_of(0)
    assert time.time() - (tmp_path / "kvblocks.json").stat().st_mtime < 600
