"""`DiskTier`: a secondary tier of vLLM's offloading on a `kvblocks.tiers.disk.DiskStore`.

All calls come from vLLM's scheduler, one at a time. This class decides what a slot holds, and threads move the bytes. A
key can be hit only after the thread that writes it has finished, and an entry that a thread reads or writes isn't
evicted.
"""

import logging
from collections.abc import Collection, Iterable
from concurrent.futures import CancelledError, Future, wait
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvblocks import InvalidArgumentError
from kvblocks.integrations import probing
from kvblocks.integrations.vllm import probe
from kvblocks.integrations.vllm.disk.copies import Copied, Copies, Part
from kvblocks.integrations.vllm.disk.naming import Hashes, describe, fingerprint, identity_of, key_of
from kvblocks.integrations.vllm.disk.nowhere import Nowhere
from kvblocks.integrations.vllm.disk.options import Options, read_options
from kvblocks.integrations.vllm.disk.slots import Entry, Slots
from kvblocks.tiers.disk import DiskFullError, DiskStats, DiskStore

_LOG = logging.getLogger("kvblocks.integrations.vllm.disk")
_LABELS = ("tier",)

STORED, EVICTED, DAMAGED, FAILED_WRITES, FAILED_SYNCS = (
    f"kvblocks:disk_tier_{name}"
    for name in ("stored_chunks", "evicted_chunks", "damaged_chunks", "failed_writes", "failed_syncs")
)


class _Job:
    """A job of vLLM's. entries: those that it copies, in order. others: entries that another job writes.

    is_whole: whether all of it was accepted.
    """

    def __init__(self, metadata: Any, entries: list[Entry], others: list[Entry], is_whole: bool) -> None:
        self.id = metadata.job_id
        self.is_load = metadata.is_promotion
        self.entries = entries
        self.others = others
        self.is_whole = is_whole
        self.future: Future[Copied] | None = None
        self.copied: Copied | None = None


class DiskTier(SecondaryTierManager):
    """A disk below vLLM's host memory, with the options of `kvblocks.integrations.vllm.disk.options.Options`.

    If the volume has no room even for an empty store, every lookup is a miss, and a warning says so. Raises
    InvalidArgumentError for a bad option, UnsupportedEngineError if a restart would change the seed of vLLM's hashes or
    vLLM lacks a needed part, and DiskError if the folder can't be used or another process uses it.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        _check_parts()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chosen = read_options(options)
        self.locality = None if chosen.locality is None else Locality(chosen.locality)
        wants_events = chosen.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] | None = [] if wants_events else None
        self._hashes = Hashes(chosen.prefix_caching_hash_algo)
        self._num_chunks = len(primary_kv_view)
        self._store = self._open(chosen)
        self._slots = Slots(self._store.num_slots)
        self._restore()
        self._memory = primary_kv_view.cast("B")
        threads = chosen.n_read_threads, chosen.n_write_threads
        self._copies = Copies(self._store, self._memory, self.block_size_bytes, threads)
        self._jobs: list[_Job] = []
        self._num_evicted = 0
        self._told = DiskStats(), 0
        self._is_closed = False

    def _open(self, options: Options) -> DiskStore | Nowhere:
        if not self._primary_kv_view.c_contiguous or self._primary_kv_view.nbytes % self.block_size_bytes:
            raise InvalidArgumentError("DiskTier: expected contiguous host memory of whole chunks")
        parallel = self._offloading_spec.config.parallel
        is_one_of_many = parallel.data_parallel_size > 1
        folder = options.root_dir / f"dp{parallel.data_parallel_index}" if is_one_of_many else options.root_dir
        description = describe(self._offloading_spec, self.block_size_bytes, self._hashes, options.weights)
        _LOG.info("%s: made for %s", folder, description)
        try:
            return DiskStore(
                folder,
                fingerprint=fingerprint(description),
                num_block_bytes=self.block_size_bytes,
                block_size=1,
                max_bytes=options.max_bytes,
                secret=options.read_secret(),
            )
        except DiskFullError as error:
            _LOG.warning("%s: nothing is stored on this disk before vLLM is started again with more room there", error)
            return Nowhere()

    def _restore(self) -> None:
        remembered = [(slot, key_of(identity)) for slot, identity in self._store.remembered()]
        lost = self._slots.restore((slot, key) for slot, key in remembered if key is not None)
        self._store.remember(dict.fromkeys([*lost, *(slot for slot, key in remembered if key is None)]))
        _LOG.info("%d of %d slots hold chunks from earlier runs", len(self._slots), self._slots.num_slots)

    # Called by vLLM.

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ARG002  # vLLM's own signature
        """Return the policy: chunks are stored one by one.

        Raises UnsupportedEngineError if vLLM's hashing has changed.
        """
        self._hashes.check()
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:  # noqa: ARG002  # vLLM's own signature
        """Return whether a chunk can be loaded; RETRY while it is being stored. O(1)."""
        entry = self._slots.find(key)
        if entry is None or self._is_closed:
            return LookupResult.MISS
        return LookupResult.HIT if entry.is_stored else LookupResult.RETRY

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:  # noqa: ARG002  # vLLM's own signature
        """Note that a prefix is used. O(keys)."""
        self._note_used(keys)

    def on_request_finished(self, req_context: Any) -> None:
        """Note that a request's chunks were used, in the order of its prefix, wherever they came from. O(chunks)."""
        self._note_used(_in_order(req_context))

    def _note_used(self, keys: Collection[bytes]) -> None:
        """Take note that a prefix is used, here and on the disk, so that the next process knows the order of use."""
        self._slots.use(keys)
        if not self._is_closed:
            self._store.note_used(self._slots.stored_slots(keys))

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store the chunks that aren't there.

        If a chunk gets no slot, it is dropped and the job counts as failed.
        """
        keys = [bytes(key) for key in job_metadata.keys]
        chunk_ids = self._chunk_ids(job_metadata)
        if chunk_ids is None:
            self._jobs.append(_Job(job_metadata, [], [], False))
            return
        entries, evicted = self._slots.reserve(keys)
        self._note_removed(evicted)
        self._num_evicted += len(evicted)
        own = {entry.key for entry in entries}
        found = {key: self._slots.find(key) for key in keys if key not in own}
        others = [entry for entry in found.values() if entry is not None]
        job = _Job(job_metadata, entries, others, len(others) == len(found))
        places = dict(zip(keys, chunk_ids, strict=True))
        if entries:
            job.future = self._copies.store([self._part(places[entry.key], entry) for entry in entries])
        self._jobs.append(job)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load chunks, up to the first that can't be loaded."""
        keys = [bytes(key) for key in job_metadata.keys]
        chunk_ids = self._chunk_ids(job_metadata)
        entries: list[Entry] = []
        for key in keys if chunk_ids is not None else ():
            entry = self._slots.find(key)
            if entry is None or not entry.is_stored:
                break
            self._slots.hold(entry)
            entries.append(entry)
        job = _Job(job_metadata, entries, [], len(entries) == len(keys))
        if entries and chunk_ids is not None:
            parts = [self._part(chunk_id, entry) for chunk_id, entry in zip(chunk_ids, entries, strict=False)]
            job.future = self._copies.load(parts)
        self._jobs.append(job)

    def _chunk_ids(self, job_metadata: Any) -> list[int] | None:
        """Return the chunks' places in the host's memory; None if nothing may be copied there."""
        found = [int(chunk_id) for chunk_id in job_metadata.chunk_ids][: len(job_metadata.keys)]
        is_right = len(found) == len(job_metadata.keys) and all(0 <= number < self._num_chunks for number in found)
        return found if is_right and not self._is_closed else None

    def _part(self, chunk_id: int, entry: Entry) -> Part:
        return Part(chunk_id, entry.slot, identity_of(entry.key))

    def get_finished_jobs(self) -> list[Any]:
        """Return the jobs that have ended since the last call. O(jobs in progress)."""
        self._settle()
        ended = [job for job in self._jobs if self._has_ended(job)]
        self._jobs = [job for job in self._jobs if not self._has_ended(job)]
        return [self._result(job) for job in ended]

    def _has_ended(self, job: _Job) -> bool:
        is_copied = job.future is None or job.copied is not None
        return is_copied and all(entry.is_stored or entry.is_gone for entry in job.others)

    def _result(self, job: _Job) -> Any:
        number = job.copied.number if job.copied is not None else 0
        is_whole = job.is_whole and number == len(job.entries) and not any(entry.is_gone for entry in job.others)
        keys = tuple(entry.key for entry in job.entries[:number])
        return JobResult(
            job_id=job.id,
            success=is_whole,
            successful_keys=keys if job.is_load and keys and not is_whole else None,
            transfer_time=job.copied.seconds if job.copied is not None else 0.0,
            transfer_bytes=number * self.block_size_bytes,
        )

    def _settle(self) -> None:
        """Process the copies that have ended."""
        for job in self._jobs:
            if job.future is None or job.copied is not None or not job.future.done():
                continue
            try:
                job.copied = job.future.result()
            except CancelledError:  # by `shutdown`
                job.copied = Copied(0, 0.0)
            except Exception:  # noqa: BLE001  # vLLM must learn that the job has ended, whatever the error
                _LOG.exception("a copy of %d chunks failed", len(job.entries))
                job.copied = Copied(0, 0.0)
            settle = self._settle_load if job.is_load else self._settle_store
            settle(job.entries, job.copied.number)

    def _settle_store(self, entries: list[Entry], number: int) -> None:
        for entry in entries[:number]:
            entry.is_stored = True
        self._store.remember({entry.slot: identity_of(entry.key) for entry in entries[:number][::-1]})
        for entry in entries[number:]:
            self._slots.forget(entry)
        self._tell([entry.key for entry in entries[:number]], removed=False)

    def _settle_load(self, entries: list[Entry], number: int) -> None:
        bad = entries[number : number + 1] if not self._is_closed else []
        removed = [entry for entry in bad if not entry.is_gone]
        for entry in bad:
            self._slots.forget(entry)
        self._note_removed(removed)
        if not self._is_closed:
            self._store.note_used([entry.slot for entry in entries[:number][::-1] if not entry.is_gone])
        for entry in entries:
            self._slots.release(entry)

    def _note_removed(self, entries: list[Entry]) -> None:
        self._store.remember(dict.fromkeys(entry.slot for entry in entries))
        self._tell([entry.key for entry in entries], removed=True)

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=removed, locality=self.locality))

    def take_events(self) -> Iterable[Any]:
        """Return events about what was stored and removed since the last call."""
        found, self._events = self._events or [], None if self._events is None else []
        return found

    def drain_jobs(self) -> None:
        """Wait until everything that was submitted is copied or has failed."""
        wait([job.future for job in self._jobs if job.future is not None])

    def shutdown(self) -> None:
        """Finish the chunks that are being copied, drop the others, and close the folder. A second call does nothing.

        `get_finished_jobs` then reports the jobs of dropped chunks as failed. Raises DiskError if the last sync failed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._copies.stop()
        self._settle()
        self._memory.release()
        self._store.close()

    # Metrics.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003  # vLLM's own
        """Return the metrics that `get_stats` fills."""
        texts = {
            EVICTED: "Chunks that were evicted from the disk tier to make room.",
            DAMAGED: "Chunks of the disk tier that were not what was stored there; they count as misses.",
            FAILED_WRITES: "Writes to the disk tier that failed.",
            FAILED_SYNCS: "Syncs of the disk tier that failed.",
        }
        found = {name: OffloadingCounterMetadata(documentation=texts[name], labelnames=_LABELS) for name in texts}
        gauge = OffloadingGaugeMetadata(documentation="Chunks in the disk tier.", labelnames=_LABELS)
        return {**found, STORED: gauge}

    def get_stats(self) -> Any:
        """Return counters since the last call."""
        stats, (old, num_evicted) = self._store.stats, self._told
        self._told = stats, self._num_evicted
        found = OffloadingConnectorStats()
        counts = {
            EVICTED: self._num_evicted - num_evicted,
            DAMAGED: stats.num_damaged_blocks - old.num_damaged_blocks,
            FAILED_WRITES: stats.num_failed_writes - old.num_failed_writes,
            FAILED_SYNCS: stats.num_failed_syncs - old.num_failed_syncs,
        }
        for name, count in counts.items():
            if count:
                found.increase_counter(name, count, (self.tier_type,))
        found.set_gauge(STORED, len(self._slots), (self.tier_type,))
        return found


def _in_order(req_context: Any) -> list[bytes]:
    """Return a request's keys in the order of its prefix, as far as vLLM says."""
    positions: dict[bytes, int] = req_context._offload_key_positions  # noqa: SLF001  # vLLM has no other way
    return sorted(positions, key=positions.__getitem__)


def _check_parts() -> None:
    """Raise UnsupportedEngineError if vLLM's tiers have a call that this one lacks, or lack a part that it uses."""
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.base import TransferJob

    missing = sorted(f"the call {name}" for name in DiskTier.__abstractmethods__)
    parts = {
        TransferJob: ("job_id", "keys", "chunk_ids", "is_promotion"),
        ReqContext: ("_offload_key_positions",),
        OffloadingConfig: ("groups", "model", "cache", "parallel", "replicated_layout", "canonical_layout"),
    }
    for part, names in parts.items():
        missing += [f"{part.__name__}.{name}" for name in names if name not in part.__dataclass_fields__]
    probing.check_parts(probe.NAME, "tiers of vLLM's as they were tested", "others:", missing)
