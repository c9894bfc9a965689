"""A process that is killed at any time: what it had synced is there, and nothing that is read is wrong."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers.disk import histories

import kvblocks
from kvblocks.tiers.disk import DiskStore

ROOT = Path(kvblocks.__file__).resolve().parents[1]


def start(folder, claims, seed, num_turns=10**9, **environment):
    """Start a history in a process of its own."""
    command = [sys.executable, histories.__file__, folder, claims, str(seed), str(num_turns)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


def lines_of(path):
    """The claims that were written whole."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.mark.parametrize("num_kills", [20, pytest.param(200, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])])
def test_what_was_synced_survives_kill_9(tmp_path, num_kills):
    folder, path, dice = tmp_path / "store", tmp_path / "claims", random.Random(num_kills)
    claims, num_read, num_midway = histories.Claims(), 0, 0
    for seed in range(num_kills):
        slowly = {"SLOW_FLUSH": "1"} if seed % 2 else {}  # a disk in memory is seldom within a sync
        process = start(folder, path, seed, **slowly)
        try:
            while len(lines_of(path)) <= num_read + 50 and process.poll() is None:
                time.sleep(0.005)
            time.sleep(dice.random() * 0.25)
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
        lines = lines_of(path)
        claims.read(lines[num_read:])
        num_read = len(lines)
        num_midway += claims.is_syncing
        with DiskStore(folder, **histories.OPTIONS) as store:
            claims.check(store)
    assert num_midway > 0 and num_read > 50 * num_kills  # it was killed at work
