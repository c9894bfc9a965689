"""Loss of power at any point of a history: what had been synced is there, nothing that is read is wrong, and what is
erased then is gone.
"""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiers.disk import histories, power
from tiers.disk.test_kill import start

from kvblocks.tiers.disk import DiskStore

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or COMPILER is None, reason="needs Linux and a C compiler"
)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    """The library that records, compiled."""
    library = tmp_path_factory.mktemp("recorder") / "recorder.so"
    source = Path(__file__).with_name("recorder.c")
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", "-o", library, source, "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def record(recorder, folder, seed, num_turns):
    """Run a history to its end; returns its events."""
    root = (folder / "root").resolve()
    root.mkdir(parents=True)
    environment = {"LD_PRELOAD": str(recorder), "RECORD_ROOT": str(root), "RECORD_TO": str(folder / "events")}
    assert start(root / "store", root / "claims", seed, num_turns, **environment).wait(timeout=120) == 0
    return root, power.read_events(folder / "events")


def put(files, folder):
    """Make a folder with files, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / Path(name).name).write_bytes(content)


def test_the_recorder_sees_every_change(recorder, tmp_path):
    """SQLite's changes, too: the recorded events give the files that are there."""
    root, events = record(recorder, tmp_path, 1, 300)
    disk = power.Disk(str(root / "store"))
    seen = set()
    for event in events:
        disk.do(event)
        seen.add((event.kind, Path(event.path).name))
    for path in [*(root / "store").iterdir(), root / "claims"]:
        assert disk.content(str(path)) == path.read_bytes(), path
    wanted = {(power.WRITE, "kvblocks.index-wal"), (power.SYNC, "kvblocks.index-wal"), (power.SYNC, "kvblocks.arena")}
    wanted |= {(power.WRITE, "kvblocks.index"), (power.SYNC, "kvblocks.index"), (power.UNLINK, "kvblocks.index-wal")}
    assert wanted <= seen


def crash_points(events, dice, number):
    """Return where the power goes: anywhere, and as often right before or after a flush."""
    flushes = [index + more for index, event in enumerate(events) if event.kind == power.SYNC for more in (0, 1)]
    points = [dice.choice([dice.randint(0, len(events)), dice.choice(flushes)]) for _ in range(number)]
    return sorted(points)


@pytest.mark.parametrize(
    "num_losses", [200, pytest.param(5000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)])]
)
def test_what_was_synced_survives_a_loss_of_power(recorder, tmp_path, num_losses):
    folder, num_midway = tmp_path / "after", 0
    for seed in range(num_losses // 100):
        root, events = record(recorder, tmp_path / str(seed), seed, 150)
        dice = random.Random(seed)
        disk, done = power.Disk(str(root / "store")), 0
        for point in crash_points(events, dice, 100):
            for event in events[done:point]:
                disk.do(event)
            done = point
            put(disk.after_loss(dice), folder)
            claims = histories.Claims()
            path = str(root / "claims")
            claims.read(disk.content(path).decode().split("\n")[:-1] if path in disk.names else [])
            num_midway += claims.is_syncing
            (folder / "claims").unlink(missing_ok=True)  # it lies beside the store, as the process sees it
            with DiskStore(folder, **histories.OPTIONS) as store:
                claims.check(store)
                erased = range(store.num_slots if point % 4 == 0 else 0)
                store.erase(erased)
            assert not (erased and any((folder / "kvblocks.arena").read_bytes()))
        shutil.rmtree(tmp_path / str(seed))
    assert num_midway > num_losses // 20
