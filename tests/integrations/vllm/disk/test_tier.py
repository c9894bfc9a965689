"""The disk tier call by call, as vLLM's manager of tiers calls it: what it keeps, evicts, refuses and survives.

A tier that returned the wrong bytes would give wrong answers, so each load is compared with what was stored.
"""

import os
import subprocess
import sys
import threading

import pytest
from tiers.disk.volumes import fill_up, mounted
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from integrations.vllm.disk.stand import (
    CHUNK_BYTES,
    CONTEXT,
    END,
    MAX_BYTES,
    NUM_CHUNKS,
    Stand,
    begin_hashing,
    bytes_of,
    key_of,
    make_spec,
    named,
)
from kvblocks import InvalidArgumentError, UnsupportedEngineError
from kvblocks.integrations.vllm.disk import DiskTier, naming, tier
from kvblocks.tiers.disk import DiskError, DiskStore

HIT, MISS = "HIT", "MISS"


def damage(folder, key, offset=5000):
    """Change a byte of a chunk's payload on the disk."""
    path = folder / "kvblocks.arena"
    data = bytearray(path.read_bytes())
    at = data.index(bytes_of(key)) + offset
    data[at] ^= 1
    path.write_bytes(data)


def test_what_was_stored_is_loaded_by_the_next_process(tmp_path):
    with Stand(tmp_path) as stand:
        assert stand.has(1, 2) == [MISS, MISS]
        result = stand.store(1, 2, 3)
        assert result.success and result.transfer_bytes == 3 * CHUNK_BYTES and result.successful_keys is None
        assert stand.has(1, 2, 3, 4) == [HIT, HIT, HIT, MISS]
        assert stand.load(2, 3).success
    with Stand(tmp_path) as stand:
        assert stand.has(1, 2, 3, 4) == [HIT, HIT, HIT, MISS]
        result = stand.load(3, 1)
        assert result.success and result.transfer_bytes == 2 * CHUNK_BYTES


def test_vllms_own_manager_stores_and_promotes_through_it(tmp_path):
    def step(manager):
        manager.secondary_tiers[0].drain_jobs()
        manager.on_schedule_end(END)

    def places(found):
        return [slice(int(number) * CHUNK_BYTES, (int(number) + 1) * CHUNK_BYTES) for number in found.chunk_ids]

    prompts = [[key_of(10 * prompt + number) for number in range(4)] for prompt in range(4)]
    for is_again in (False, True):
        spec = make_spec(tiers=[named(tmp_path)])
        begin_hashing()
        manager = spec.get_manager()
        memory = manager.primary_tier.get_kv_memoryview().cast("B")
        for number, keys in enumerate(prompts):  # twice what the host's memory holds
            context = ReqContext(req_id=f"request {number}")
            manager.on_new_request(context)
            found = [manager.lookup(key, context) for key in keys]
            assert found == [LookupResult.HIT_PENDING if is_again else LookupResult.MISS] * 4
            step(manager)
            step(manager)
            if is_again:
                assert [manager.lookup(key, context) for key in keys] == [LookupResult.HIT] * 4
                load = manager.prepare_load(keys, context)
                assert [bytes(memory[place]) for place in places(load)] == [bytes_of(key) for key in keys]
                manager.complete_load(keys, context)
            else:
                output = manager.prepare_store(keys, context)
                for place, key in zip(places(output.store_spec), output.keys_to_store, strict=True):
                    memory[place] = bytes_of(key)
                manager.complete_store(keys, context)
            step(manager)
            manager.on_request_finished(context)
            step(manager)
        stats = manager.get_stats().reduce()
        name = "vllm:kv_offload_tiering_read_bytes" if is_again else "vllm:kv_offload_tiering_write_bytes"
        assert stats[f"{name}:('1:DiskTier',)"] == 16 * CHUNK_BYTES
        assert stats["kvblocks:disk_tier_stored_chunks:('DiskTier',)"] == 16
        memory.release()
        manager.shutdown()  # releases memory that nobody may hold any more


def test_it_never_holds_more_than_it_may_and_evicts_ends_before_beginnings(tmp_path):
    with Stand(tmp_path, enable_kv_events=True, spec=make_spec(events=True)) as stand:
        num_slots = stand.slots.num_slots
        for first in range(0, 2 * num_slots, 4):
            assert stand.store(*range(first, first + 4)).success
            assert len(stand.slots) <= num_slots
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= MAX_BYTES
        oldest = next(number for number in range(2 * num_slots) if stand.has(number) == [HIT])
        assert stand.has(*range(oldest)) == [MISS] * oldest
        stored, removed = set(), set()
        for event in stand.tier.take_events():
            (removed if event.removed else stored).update(event.keys)
        assert not list(stand.tier.take_events())
        assert len(stored) - len(removed) == len(stand.slots)
        assert all((stand.has(number) == [HIT]) == (key_of(number) not in removed) for number in range(2 * num_slots))
        stats = stand.tier.get_stats().reduce()
        assert stats["kvblocks:disk_tier_evicted_chunks:('DiskTier',)"] == len(removed)
    with Stand(tmp_path) as stand:
        stand.tier.touch([key_of(2 * num_slots - 4 + number) for number in range(4)], CONTEXT)
        for first in range(-8, -8 - num_slots + 1, -1):
            assert stand.store(10_000 - first).success
        assert stand.has(2 * num_slots - 4, 2 * num_slots - 1) == [HIT, MISS]


def test_a_prefix_that_came_in_parts_is_evicted_from_its_end(tmp_path):
    with Stand(tmp_path) as stand:
        context = ReqContext(req_id="long")
        for number in (0, 1, 2, 3):  # chunked prefill: the beginning is stored first
            context.set_offload_key_position(key_of(number), 16 * (number + 1))
            stand.store(number)
        stand.tier.on_request_finished(context)
        for number in range(stand.slots.num_slots - 2):
            stand.store(100 + number)
        assert stand.has(0, 1, 2, 3) == [HIT, HIT, MISS, MISS]


def test_a_job_larger_than_the_disk_stores_its_beginning_and_has_failed(tmp_path):
    with Stand(tmp_path, num_chunks=400) as stand:
        num_slots = stand.slots.num_slots
        assert num_slots < 300
        stand.store(1000)
        assert not stand.store(*range(300)).success
        assert stand.has(0, num_slots - 1, num_slots, 1000) == [HIT, HIT, MISS, MISS]
        assert stand.store(0, 1).success  # they are there


@pytest.mark.parametrize("bad", [0, 2])
def test_what_is_damaged_is_a_miss_and_what_came_before_it_is_kept(tmp_path, bad):
    with Stand(tmp_path) as stand:
        assert stand.store(0, 1, 2).success
        stand.disk.sync()
        damage(tmp_path, key_of(bad))
        result = stand.load(0, 1, 2)
        assert not result.success
        assert result.successful_keys == ((key_of(0), key_of(1)) if bad else None)
        assert stand.has(0, 1, 2) == [MISS if number == bad else HIT for number in range(3)]
        assert stand.tier.get_stats().reduce()["kvblocks:disk_tier_damaged_chunks:('DiskTier',)"] == 1
        assert stand.store(bad).success and stand.load(0, 1, 2).success


def test_one_that_was_never_stored_fails_its_load(tmp_path):
    with Stand(tmp_path) as stand:
        stand.store(1)
        assert stand.load(1, 2).successful_keys == (key_of(1),)
        assert stand.load(2, 1).successful_keys is None
        assert not stand.load(3).success and stand.has(1) == [HIT]


@pytest.mark.parametrize("chunk_id", [NUM_CHUNKS, -1])
@pytest.mark.parametrize("is_load", [False, True])
def test_a_place_outside_of_the_memory_fails_and_copies_nothing(tmp_path, chunk_id, is_load):
    with Stand(tmp_path) as stand:
        stand.store(1)
        before = bytes(stand.memory)
        submit = stand.tier.submit_load if is_load else stand.tier.submit_store
        submit(stand.job([key_of(1 if is_load else 2)], is_load=is_load, chunk_ids=[chunk_id]))
        assert not stand.ended().success
        assert stand.has(1, 2) == [HIT, MISS] and stand.memory == before


class Gate:
    """Lets a store's blocks through one by one."""

    def __init__(self, stand, call, monkeypatch):
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.plain = getattr(stand.disk, call)
        monkeypatch.setattr(stand.disk, call, self._wait)
        stand.gates.append(self)

    def _wait(self, *given):
        self.begun.release()
        self.go_on.acquire()
        return self.plain(*given)


def test_what_is_being_stored_is_not_hit_and_two_jobs_store_it_once(tmp_path, monkeypatch):
    with Stand(tmp_path, n_write_threads=2) as stand:
        gate = Gate(stand, "write", monkeypatch)
        stand.begin_store([key_of(1), key_of(2)])
        stand.begin_store([key_of(1), key_of(2)])
        gate.begun.acquire()
        assert stand.has(1, 2) == ["RETRY", "RETRY"] and not stand.tier.get_finished_jobs()
        gate.go_on.release(2)
        stand.tier.drain_jobs()
        assert [result.success for result in stand.tier.get_finished_jobs()] == [True, True]
        assert stand.disk.stats.num_written_blocks == 2 and stand.has(1, 2) == [HIT, HIT]


def test_nothing_is_evicted_that_is_being_loaded(tmp_path, monkeypatch):
    with Stand(tmp_path, n_read_threads=1) as stand:
        num_slots = stand.slots.num_slots
        stand.store(1)
        stand.memory[:] = bytes(len(stand.memory))
        gate = Gate(stand, "read", monkeypatch)
        stand.tier.submit_load(stand.job([key_of(1)], is_load=True, chunk_ids=[7]))
        gate.begun.acquire()
        for number in range(num_slots):
            stand.begin_store([key_of(100 + number)])
        gate.go_on.release()
        stand.tier.drain_jobs()
        *others, last = stand.tier.get_finished_jobs()
        assert all(result.success for result in others) and not last.success  # there was no slot for it
        assert stand.memory[7 * CHUNK_BYTES :] == bytes_of(key_of(1))
        assert not stand.slots.find(key_of(1)).num_readers  # it may be evicted from now on


@pytest.mark.parametrize("is_load", [False, True])
def test_shutdown_ends_the_copy_that_runs_and_drops_the_others(tmp_path, monkeypatch, is_load):
    stand = Stand(tmp_path, n_read_threads=1, n_write_threads=1)
    keys = [key_of(number) for number in range(4)]
    if is_load:
        stand.store(0, 1, 2, 3)
        stand.memory[:] = bytes(len(stand.memory))
    gate = Gate(stand, "read" if is_load else "write", monkeypatch)
    for _ in range(2):
        if is_load:
            stand.tier.submit_load(stand.job(keys, is_load=True))
        else:
            stand.begin_store(keys if stand.num_jobs == 0 else [key_of(10), key_of(11)], place=4 * stand.num_jobs)
    gate.begun.acquire()
    closer = threading.Thread(target=stand.tier.shutdown)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()  # it waits for the block
    gate.go_on.release(1)
    closer.join(20)
    assert not closer.is_alive()
    first, second = stand.tier.get_finished_jobs()
    assert not first.success and not second.success and second.successful_keys is None
    if is_load:
        assert first.successful_keys == (key_of(0),)
        assert stand.memory == bytes_of(key_of(0)) + bytes(len(stand.memory) - CHUNK_BYTES)
    with Stand(tmp_path) as again:
        assert again.has(0, 1, 2, 3, 10, 11) == [HIT] + [HIT if is_load else MISS] * 3 + [MISS] * 2
        assert again.load(0).success and again.disk.stats.num_damaged_blocks == 0


def test_drain_waits_for_all_that_was_submitted(tmp_path, monkeypatch):
    with Stand(tmp_path) as stand:
        gate = Gate(stand, "write", monkeypatch)
        for number in range(5):
            stand.begin_store([key_of(number)])
        drainer = threading.Thread(target=stand.tier.drain_jobs)
        drainer.start()
        gate.go_on.release(4)
        drainer.join(0.2)
        assert drainer.is_alive()
        gate.go_on.release(1)
        drainer.join(20)
        assert len(stand.tier.get_finished_jobs()) == 5 and stand.has(*range(5)) == [HIT] * 5


def test_after_the_end_all_fails_and_nothing_raises(tmp_path):
    stand = Stand(tmp_path)
    stand.store(1)
    stand.tier.shutdown()
    stand.tier.shutdown()
    assert stand.has(1) == [MISS]
    assert not stand.store(2).success and not stand.load(1).success
    stand.tier.drain_jobs()
    stand.tier.touch([key_of(1)], CONTEXT)
    stand.tier._primary_kv_view.release()  # noqa: SLF001  # as vLLM's manager does with its own
    stand.memory.clear()  # which raises while anybody holds a part of it


def test_the_next_process_knows_what_was_used_last(tmp_path):
    with Stand(tmp_path) as stand:
        for number in (1, 2, 3):
            stand.store(number)
        stand.tier.touch([key_of(1)], CONTEXT)
    with Stand(tmp_path) as stand:
        assert [*stand.slots._entries] == [key_of(2), key_of(3), key_of(1)]  # noqa: SLF001
        assert stand.load(2).success
    with Stand(tmp_path) as stand:
        assert [*stand.slots._entries] == [key_of(3), key_of(1), key_of(2)]  # noqa: SLF001


def test_on_a_full_volume_everything_is_a_miss_with_a_warning(tmp_path, caplog):
    with mounted(tmp_path / "volume", "tmpfs", 2**22) as volume:
        fill_up(volume)
        with Stand(volume / "kv") as stand:
            assert "nothing is stored on this disk before vLLM is started again" in caplog.text
            assert stand.has(1) == [MISS]
            assert not stand.store(1).success and not stand.load(1).success
            stand.tier.touch([key_of(1)], CONTEXT)
            stand.tier.get_stats()


# Whose folder it is.

OTHERS = {
    "model": {"spec": {"model": "other/model"}},
    "dtype": {"spec": {"dtype": "bfloat16"}},
    "block size": {"spec": {"tokens_per_block": 32}},
    "tensor parallel": {"spec": {"parallel": {"tp_size": 2, "is_parallelism_agnostic": False}}},
    "layout": {"spec": {"layout": "HND"}},
    "weights": {"weights": "another revision"},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "seed": {"PYTHONHASHSEED": "7"},
    "secret": {"secret": b"sixteen bytes or more"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_configuration_finds_nothing(tmp_path, monkeypatch, name, caplog):
    folder, other = tmp_path / "kv", dict(OTHERS[name])
    with Stand(folder) as stand:
        stand.store(1)
    with Stand(folder) as stand:
        assert stand.has(1) == [HIT]
    spec = make_spec(**other.pop("spec", {}))
    if "PYTHONHASHSEED" in other:
        monkeypatch.setenv("PYTHONHASHSEED", other.pop("PYTHONHASHSEED"))
    if "secret" in other:
        (tmp_path / "secret").write_bytes(other.pop("secret"))
        other["secret_file"] = str(tmp_path / "secret")
    with Stand(folder, spec=spec, **other) as stand:
        assert stand.has(1) == [MISS] and "kept for its return" in caplog.text


def test_bytes_that_vllm_calls_portable_are_found_under_another_parallelism(tmp_path):
    with Stand(tmp_path) as stand:
        stand.store(1)
    with Stand(tmp_path, spec=make_spec(parallel={"tp_size": 2, "world_size": 2})) as stand:
        assert stand.load(1).success


def test_new_weights_in_the_models_folder_are_another_model(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    spec = make_spec(model=str(tmp_path))
    with Stand(tmp_path / "kv", spec=spec) as stand:
        stand.store(1)
    weights.write_bytes(b"newer")
    with Stand(tmp_path / "kv", spec=spec) as stand:
        assert stand.has(1) == [MISS]


def test_each_data_parallel_rank_has_a_folder_of_its_own(tmp_path):
    first, second = (
        Stand(tmp_path, spec=make_spec(parallel={"data_parallel_size": 2, "data_parallel_index": index}))
        for index in range(2)
    )
    with first, second:
        first.store(1)
        assert second.has(1) == [MISS]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dp0", "dp1"]


def test_a_folder_in_use_is_refused_and_by_whom_is_said(tmp_path):
    with Stand(tmp_path) as stand:
        stand.store(1)
    holds = (
        f"from kvblocks.tiers.disk.folder import Folder; from pathlib import Path; f = Folder(Path({str(tmp_path)!r}))"
    )
    script = f"{holds}\nprint('held', flush=True)\ninput()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DiskError, match=f"expected a folder that nobody uses, got one of process {other.pid}"):
            Stand(tmp_path)
        other.kill()
    with Stand(tmp_path) as stand:
        assert stand.load(1).success


def test_an_older_row_of_an_equal_key_is_given_up(tmp_path):
    with Stand(tmp_path) as stand:
        stand.store(1)
        store, entry = stand.disk, stand.slots.find(key_of(1))
        for slot in (entry.slot + 1, entry.slot + 2):
            store.write([slot], [naming.identity_of(key_of(1))], bytes_of(key_of(1)))
            store.remember({slot: naming.identity_of(key_of(1))})
    with Stand(tmp_path) as stand:
        assert len(stand.slots) == 1 and stand.load(1).success
        for number in range(stand.slots.num_slots - 1):
            stand.store(100 + number)
        assert stand.has(1) == [HIT]  # every other slot was free


# What it refuses.


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_random_seed_is_refused_and_a_set_one_is_not(tmp_path, monkeypatch, algorithm):
    with pytest.raises(UnsupportedEngineError, match=f"random seed of {algorithm}: .*set PYTHONHASHSEED"):
        Stand(tmp_path, prefix_caching_hash_algo=algorithm)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    begin_hashing(algorithm)
    with Stand(tmp_path, prefix_caching_hash_algo=algorithm) as stand:
        stand.tier.on_new_request(CONTEXT)
        assert stand.store(1).success


def test_hashes_of_another_kind_are_refused_at_the_first_request(tmp_path, monkeypatch):
    from vllm.v1.core import kv_cache_utils

    with Stand(tmp_path) as stand:
        stand.tier.on_new_request(CONTEXT)
        begin_hashing("sha256_cbor")
        with pytest.raises(UnsupportedEngineError, match=r"expected hashes by 'sha256' .*, got 'sha256_cbor'; set"):
            stand.tier.on_new_request(CONTEXT)
        begin_hashing("xxhash")
        with pytest.raises(UnsupportedEngineError, match="got 'xxhash'"):
            stand.tier.on_new_request(CONTEXT)
        monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
        with pytest.raises(UnsupportedEngineError, match="has not begun to hash"):
            stand.tier.on_new_request(CONTEXT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 0}, "max_bytes: expected an int of at least 1, got 0"),
        ({"max_bytes": "1GB"}, "max_bytes: expected an int of at least 1, got '1GB'"),
        ({"max_bytes": 1000}, "max_bytes: expected at least"),
        ({"root_dir": ""}, "root_dir: expected a path, got ''"),
        ({"n_read_threads": True}, "n_read_threads: expected an int"),
        ({"weights": 3}, "weights: expected a text, got 3"),
        ({"locality": "local"}, "locality: expected a Locality"),
        ({"enable_kv_events": 1}, "enable_kv_events: expected true or false"),
        ({"secret_file": "/none/there"}, "secret_file: expected a file that can be read"),
        ({"max_byte": 3}, "options: expected some of root_dir, max_bytes, .*, got max_byte"),
    ],
)
def test_an_option_that_is_wrong_is_named(tmp_path, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Stand(tmp_path, **options)
    with Stand(tmp_path):
        pass  # nothing was left open


@pytest.mark.parametrize("missing", ["root_dir", "max_bytes"])
def test_an_option_without_a_default_is_needed(tmp_path, missing):
    config = {name: value for name, value in named(tmp_path).items() if name != missing}
    with pytest.raises(InvalidArgumentError, match=f"{missing}: expected a value"):
        SecondaryTierFactory.create_secondary_tier(config, memoryview(bytearray(64)).cast("B", (4, 16)), make_spec())


def test_a_hash_that_vllm_lacks_is_refused(tmp_path):
    with pytest.raises(UnsupportedEngineError, match="the hash 'md5': prefix_caching_hash_algo is one of sha256"):
        Stand(tmp_path, prefix_caching_hash_algo="md5")


def test_a_vllm_whose_tiers_have_another_call_is_refused(tmp_path, monkeypatch):
    from vllm.v1.kv_offload.tiering import base

    monkeypatch.setattr(DiskTier, "__abstractmethods__", frozenset({"rename"}))
    monkeypatch.setattr(base, "TransferJob", type("TransferJob", (), {"__dataclass_fields__": {"keys": 0}}))
    with pytest.raises(UnsupportedEngineError, match=r"the call rename; TransferJob\.job_id; TransferJob\.chunk_ids"):
        tier._check_parts()  # noqa: SLF001  # a class that lacks a call can't be made at all


# What vLLM shows of it.


def test_its_metrics_are_among_vllms(tmp_path):
    known = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [named(tmp_path)]})
    with Stand(tmp_path) as stand:
        stand.store(1)
        found = stand.tier.get_stats()
        assert not found.is_empty()
        assert set(found.data["data"]) <= set(known)
        assert all(
            len(labels) == len(known[name].labelnames)
            for name in found.data["data"]
            for labels in found.data["data"][name]
        )


def test_a_disk_that_fails_is_counted_and_the_next_store_tries_again(tmp_path, monkeypatch):
    with Stand(tmp_path) as stand:

        def fail(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("kvblocks.tiers.disk.arena.Arena.write", fail)
            assert not stand.store(1, 2).success
        assert stand.has(1, 2) == [MISS, MISS]
        assert stand.tier.get_stats().reduce()["kvblocks:disk_tier_failed_writes:('DiskTier',)"] == 1
        assert stand.store(1, 2).success


def test_a_bug_in_a_copy_fails_its_job_and_is_logged(tmp_path, monkeypatch, caplog):
    with Stand(tmp_path) as stand:
        monkeypatch.setattr(DiskStore, "write", lambda *_: 1 / 0)
        assert not stand.store(1).success
        assert "a copy of 1 chunks failed" in caplog.text and stand.has(1) == [MISS]
        monkeypatch.undo()
        assert stand.store(1).success


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DiskError, match="expected an empty folder"):
        Stand(tmp_path)
