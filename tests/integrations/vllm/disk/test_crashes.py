"""A process that is killed in the midst of anything, and a disk that is full."""

import json
import os
import random
import resource
import signal
import sys
import time

import pytest

from integrations.vllm.disk.stand import CHUNK_BYTES, MAX_BYTES, Stand

NUM_KEYS = 600  # three times what the disk holds
BATCH = 4


def store_for_ever(folder, claims, seed):
    """Store what comes, and say before each job that it begins, and after a sync what the disk holds by then."""
    dice = random.Random(seed)
    with Stand(folder) as stand, claims.open("a") as lines:
        while True:
            print("begins", file=lines, flush=True)
            stand.store(*dice.sample(range(NUM_KEYS), BATCH))
            if dice.random() < 0.3:
                stand.disk.sync()
                held = [number for number in range(NUM_KEYS) if stand.has(number) == ["HIT"]]
                print(json.dumps(held), file=lines, flush=True)


def fork(*arguments):
    """Run `store_for_ever` in a child of this process: vLLM is there already, and takes seconds to import."""
    child = os.fork()
    if not child:
        try:
            store_for_ever(*arguments)
        finally:
            os._exit(1)
    return child


@pytest.mark.parametrize("num_kills", [10, pytest.param(200, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])])
def test_what_was_synced_survives_kill_9_and_nothing_that_is_loaded_is_wrong(tmp_path, num_kills):
    folder, claims, dice, num_held = tmp_path / "kv", tmp_path / "claims", random.Random(num_kills), 0
    for seed in range(num_kills):
        claims.write_text("")
        child = fork(folder, claims, seed)
        try:
            while "[" not in claims.read_text():
                assert os.waitpid(child, os.WNOHANG) == (0, 0)
                time.sleep(0.005)
            time.sleep(dice.random() * 0.1)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        lines = claims.read_text().split("\n")[:-1]
        place = max(place for place, line in enumerate(lines) if line != "begins")
        held, num_begun = json.loads(lines[place]), len(lines) - 1 - place
        with Stand(folder) as stand:
            assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
            found = [number for number in range(NUM_KEYS) if stand.has(number) == ["HIT"]]
            right = {number for number in found if stand.load(number).success}  # `load` compares the bytes
            assert stand.disk.stats.num_damaged_blocks == len(found) - len(right) <= 2 * BATCH * num_begun
            assert len(set(held) - right) <= BATCH * num_begun  # evicted since
        num_held += len(held)
    assert num_held > 50 * num_kills


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of a file's size that fails a write")
def test_a_full_disk_fails_stores_and_nothing_else(tmp_path):
    with Stand(tmp_path) as stand:
        assert stand.store(*range(4)).success
        stand.disk.sync()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (stand.slots.num_slots * CHUNK_BYTES // 4, limit[1]))
        try:
            results = [stand.store(*range(number, number + 4)).success for number in range(4, 100, 4)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert True in results and False in results
        assert stand.disk.stats.num_failed_writes == results.count(False)
        stored = [number for number in range(100) if stand.has(number) == ["HIT"]]
        assert len(stored) >= 4 + 4 * results.count(True)
        assert all(stand.load(number).success for number in stored)
        assert stand.store(*range(200, 204)).success  # there is room again
    with Stand(tmp_path) as stand:
        assert all(stand.load(number).success for number in [*stored, 200, 203])
