"""`Transfers`: what moves between the device and the tiers. The manager reports here what its sequences do.

Filling. A request names a prefix (`store_queue`). When there is room for another store, the request becomes a store of
those blocks that the tier lacks, parents first, with what a hit at the prefix's end needs of other groups. Storing
never makes a call wait. Blocks that are taken before their store began are not stored. A hit on the device counts as a
use in the tiers: its request touches the slots that a tier has.

With several groups, lookups ask the device and the tiers together, so a load moves only what the device lacks.

Sources: pools of ids, one below the other, are a memory hierarchy. Holding a block while it moves, and finding loading
blocks as pending, are from vLLM's KV connectors.
"""

from typing import Any

from kvblocks.arguments import is_a, listed, wrong
from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.caching import find_blocks
from kvblocks.core.hit import CacheHit
from kvblocks.core.link import ManagerLink
from kvblocks.core.sequence import Sequence
from kvblocks.core.slots import Commit
from kvblocks.errors import InvalidArgumentError, SequenceStateError, StaleHitError
from kvblocks.tiers.calls import ManagerCalls
from kvblocks.tiers.events import note_restored, record_tiers
from kvblocks.tiers.hit import TierHit, hit_with_loads
from kvblocks.tiers.jobs import Job, LoadJob, StoreJob, WholeLoadJob, moved_prefix
from kvblocks.tiers.lookup import Found, PrefixCopy, find_all_needed, find_longest
from kvblocks.tiers.pool import TierPool, make_pool
from kvblocks.tiers.prefix import Home, Prefix, prefix_of, shortest_prefixes
from kvblocks.tiers.tier import Tier
from kvblocks.tiers.transfer import BEGUN, QUEUED, Loaded, Transfer

STORING_SHARE = 8
"""Stores of all tiers hold at most an eighth of the device's blocks. Each tier gets an equal part, at least one."""


class Transfers:
    """The jobs of a manager, and its tiers' pools. Only for the manager and `Tiers`, which check the arguments.

    Call methods inside a change of the manager, unless their docstring says otherwise. pools: the fastest first. begun:
    the transfers that have begun and aren't over, in that order, with their jobs; read-only.
    """

    def __init__(self, tiers: tuple[Tier, ...], link: ManagerLink, calls: ManagerCalls) -> None:
        """calls: what this needs of the manager."""
        slots = link.slots
        self._change = link.change
        self._slots = slots
        self._sequences = link.sequences
        self._calls = calls
        self.index = slots.pool.index
        self._attached = slots.pool.index.attached
        self._layout = slots.layout
        self._block_size = self.index.block_size
        most = max(1, len(slots.pool.blocks) // (STORING_SHARE * max(1, len(tiers))))
        self.pools = [make_pool(tier, self._block_size, self._layout, most) for tier in tiers]
        record_tiers(tiers, self.pools, self.index.events, self.index.epoch.hash_scheme)
        self._queue: dict[Transfer, Job] = {}  # loads that `take` hasn't returned yet
        self.begun: dict[Transfer, Job] = {}
        self._jobs: dict[Job, None] = {}
        self._loading: dict[Sequence, LoadJob] = {}
        self._noted: dict[Sequence, int] = {}  # blocks cached at the last look, for tiers that store what is computed
        self._generation = 0
        self.num_clears = 0

    # Called by `Tiers`.

    @property
    def is_busy(self) -> bool:
        """Whether anything moves, is to be stored, or is to be remembered. O(tiers)."""
        return bool(self._jobs) or any(pool.is_busy for pool in self.pools)

    def find(self, hit: CacheHit) -> list[TierHit]:
        """Return what the tiers and the device have together after a hit. One lookup in each of them.

        If the hit is the whole prompt, the tiers have nothing after it, since its last token is computed again. Each
        part ends where all groups have what the next token sees. A part is left out if it moves more than a longer one.
        The hit learns how much K and V the tiers have, even if they lack its state. Nothing else changes.
        """
        size, sequence, position = self._block_size, hit.sequence, len(hit.blocks)
        if hit.num_tokens < position * size:
            return []
        keys, most = sequence.encoded_keys(size), (sequence.num_tokens - 1) // size
        on_device, end = hit.blocks, position * size
        if self._layout is not None:  # other groups may have lost what the primary group still has after the hit
            on_device = find_blocks(self.index, sequence, most * size)
            places = [PrefixCopy(self.index, on_device)]
            end = max(end, find_longest(self._layout, places, len(on_device), sequence.num_tokens)[0])
        places = [PrefixCopy(self.index, on_device)]
        found: list[TierHit] = []
        for number, pool in enumerate(self.pools, 1):
            places.append(PrefixCopy(pool.index, pool.match(memoryview(sequence.tokens), keys, most)))
            num_blocks = max([len(place.blocks) for place in places])
            if hit.parts is not None:
                hit.parts.num_tier_tokens = max(hit.parts.num_tier_tokens, len(places[-1].blocks) * size)
            longest, tables = find_longest(self._layout, places, num_blocks, sequence.num_tokens)
            if longest <= end:
                continue
            end, pools = longest, self.pools[:number]
            part = TierHit(hit, end, pools, places, tables, found[-1] if found else None)
            while found and part.num_bytes <= 0:
                found.pop()
                part = TierHit(hit, end, pools, places, tables, found[-1] if found else None)
            found.append(part)
        return found

    def listed(self, loads: object) -> list[TierHit]:
        """Return loads as a list. Raises InvalidArgumentError, and SequenceStateError for another manager's loads."""
        given: list[Any] = listed("loads", "what tiers.find returned, or a first part of it", loads, in_order=True)
        for load in given:
            if not is_a(load, TierHit):
                raise wrong("loads", "what tiers.find returned, or a first part of it", load)
            if load.pool not in self.pools:
                raise SequenceStateError(f"loads: expected one of this manager's tiers, got another's: {load}")
        return given

    def take(self) -> list[Transfer]:
        """Begin the transfers that can begin, and return them, loads first."""
        transfers = [*self._queue]
        self.begun.update(self._queue)
        self._queue = {}
        self._request_computed()
        for pool in self.pools:
            if len(pool.store_queue):
                self._begin_stores(pool, transfers)
        for transfer in transfers:
            transfer.state = BEGUN
        return transfers

    def prepare_commits(self, job: Job, transfer: Transfer, *, ok: bool) -> list[Commit]:
        """Return what to cache of a load when this transfer ends, for each waiting sequence. Call it outside a change.

        The answer is [] before the load's last transfer. Nothing is cached after a hit that was lost meanwhile. If a
        hash function raises, it does so here, and the transfer can be answered again.
        """
        if not isinstance(job, LoadJob) or job.num_open > 1:
            return []
        also = transfer if ok else None
        ends = {sequence: min(job.end_in(sequence, also), sequence.num_computed_tokens) for sequence in job.sequences}
        return [
            self._slots.prepare_commit(sequence, end)
            for sequence, end in ends.items()
            if end > sequence.num_written_tokens
        ]

    def end(
        self, transfer: Transfer, job: Job, commits: list[Commit], seconds: float | None, *, ok: bool
    ) -> list[Loaded]:
        """End a transfer and, if it is the last one, its job. Returns what became of loads. O(blocks)."""
        for prepared in commits:
            self._calls.commit(prepared)
        if isinstance(job, LoadJob):
            self._note_loaded(transfer, seconds, is_ok=ok)
        elif not ok:
            transfer.pool.num_failed_blocks += len(transfer.slots)
        del self.begun[transfer]
        job.end(transfer, ok=ok)
        if not (isinstance(job, LoadJob) and job.sequences):
            self._slots.pool.release_table(job.blocks_of(transfer))
        return [] if job.num_open else self._finish(job)

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for loads. O(1)."""
        return sequence in self._loading

    def give_up(self, sequence: Sequence) -> None:
        """Stop a loading sequence from waiting, and release the slots of what it waited for. O(blocks)."""
        start = self._loading[sequence].start_for(sequence)
        self.leave(sequence)
        self._calls.rewind(sequence, start)

    # Called by the manager.

    def check_loads(self, sequence: Sequence, hit: CacheHit | None, loads: object) -> list[TierHit]:
        """Return loads as a list. Raises as `Tiers.allocate`. Changes nothing. O(blocks)."""
        given = self.listed(loads)
        if given and sequence.owner is not None:
            raise SequenceStateError(f"tiers.allocate: expected no loads, since {sequence} has blocks; got {given}")
        start = 0 if hit is None else len(hit.blocks) * self._block_size
        if given and hit is not None and hit.num_tokens != start:
            raise StaleHitError(f"tiers.allocate: expected no loads after {hit}, whose last token is computed again")
        for load in given:
            if load.sequence is not sequence:
                raise SequenceStateError(f"tiers.allocate: expected loads of {sequence}, got {load}")
            if load.first_token != start:
                raise InvalidArgumentError(f"tiers.allocate: loads: expected one from token {start} on, got {load}")
            start += load.num_tokens
            if not load.is_there():
                raise StaleHitError(f"tiers.allocate: expected {load} to be stored still; it isn't: look it up again")
        if given and start >= sequence.num_tokens:
            raise StaleHitError(f"tiers.allocate: expected loads of fewer tokens than {sequence} has, got {given}")
        return given

    def with_loads(self, hit: CacheHit | None, loads: list[TierHit]) -> CacheHit | None:
        """Return the hit that a sequence with these loads starts with. Changes nothing."""
        if not loads or (hit is not None and hit.index is not self.index):
            return hit  # another manager's hit: `allocate_slots` raises for it
        return hit_with_loads(loads[-1], hit)

    def begin_loads(self, sequence: Sequence, loads: list[TierHit]) -> None:
        """Begin the loads of a sequence that was just given slots for them. O(blocks)."""
        job = self._make_load(sequence, loads)
        self._slots.pool.touch(job.held)
        self._jobs[job] = None
        self._loading[sequence] = job
        for pool, slots in job.parts:
            pool.hold(slots)
        for pool, numbers in job.stretches():
            for transfer in self._transfers(pool, job, numbers, is_load=True):
                job.add(transfer)
                self._queue[transfer] = job

    def note_use(self, hit: CacheHit) -> None:
        """Record that a sequence starts with a hit, which is a second use of its blocks. O(tiers)."""
        self._request_used(hit.blocks[-1])

    def note_end(self, sequence: Sequence) -> None:
        """Record that a sequence is about to release its blocks. O(tiers); after an abort or a reset O(blocks)."""
        self._noted.pop(sequence, None)
        if sequence in self._loading:
            self.leave(sequence)
        number = sequence.num_cached_blocks
        while number and not sequence.blocks[number - 1].is_cached:
            number -= 1
        if not number:
            return
        for pool in self.pools:
            least = pool.min_store_tokens
            is_long = least is not None and number * self._block_size >= least
            if is_long or not (pool.stores_reused or pool.stores_computed):
                pool.request(sequence.blocks[number - 1].node)

    def note_fork(self, sequence: Sequence, child: Sequence) -> None:
        """Record that a sequence was forked: the child waits for the same loads. O(1)."""
        job = self._loading.get(sequence)
        if job is not None and child.num_computed_tokens > job.start:
            job.sequences[child] = None
            self._loading[child] = job

    def note_cut(self, sequence: Sequence) -> None:
        """Record a `truncate` or `rewind` of a sequence. If a part of its hit was lost, it keeps what comes before."""
        job = self._loading.get(sequence)
        if job is None:
            return
        if job.is_cut(sequence):
            start, num_left = job.start_for(sequence), sequence.num_computed_tokens
            self.leave(sequence)
            if start < min(job.start, num_left):
                self._calls.rewind(sequence, start)
            return
        num_kept = job.num_kept_after_cut(sequence)
        if num_kept < sequence.num_computed_tokens:
            self._calls.rewind(sequence, num_kept)
            if sequence.num_computed_tokens == job.start:
                self.leave(sequence)

    def num_writable(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens may be reported as written: those before the load. O(1)."""
        return min(num_tokens, self._loading[sequence].start) if sequence in self._loading else num_tokens

    def note_lost(self, blocks: list[KVCacheBlock], sequence: Sequence | None, *, are_shared: bool) -> None:
        """Forget what tiers have of these lost blocks of the device. Called before the blocks stop being cached.

        sequence: who was to write them; what was stored from them is forgotten. None: they are bad, and all that tiers
        have of their prefixes is. Loads that bring it or come after it fail, as do stores that read them. are_shared:
        if one has an owner other than `sequence` and stores. O(lost blocks + prefixes); and O(blocks of loads) if so.
        """
        if not self.pools:
            return
        lost = set(blocks)
        prefixes = [] if sequence is not None else self._drop_prefixes(blocks)
        left = lost if sequence is not None else {block for block in blocks if block.ref_cnt and not block.is_cached}
        owners = self._sequences.values() if sequence is None else [sequence]
        for pool in self.pools:
            if [block for block in left if block in pool.copies]:
                prefixes += [prefix for owner in owners for prefix in pool.drop_copies(owner, left)]
            pool.lost.update([block for block in blocks if pool.is_in_store(block)])
        for job in self._jobs if are_shared or prefixes else ():
            if isinstance(job, LoadJob):
                job.note_lost(lost, prefixes)
        if self._attached is not None and self._attached.checkpoints is not None:
            for owner in owners:
                for pool in self.pools:
                    pool.drop_states(owner, lost)

    def clear(self) -> None:
        """Forget everything in all tiers, after the device's cache was reset. O(1), plus the time to free memory.

        Loads that have begun go on, since their sequences are from before the reset too. Stores and requests have no
        effect, since what they read is no longer cached.
        """
        self.num_clears += 1
        for pool in self.pools:
            pool.clear()

    def forget_salt(self, salt: str | None) -> int:
        """Forget what all tiers have of a salt, after the device did. Returns how many slots. O(runs + those slots).

        Loads that have begun go on, as after `clear`. Stores of the salt have no effect.
        """
        return sum([pool.forget_salt(salt) for pool in self.pools])

    def note_restored(self, pool: TierPool) -> None:
        """Record that a tier's slots were restored. O(slots)."""
        note_restored(pool)

    def leave(self, sequence: Sequence) -> None:
        """Stop a sequence from waiting for its loads. If no other waits, cancel what has not begun. O(blocks)."""
        job = self._loading.pop(sequence)
        del job.sequences[sequence]
        if job.sequences:
            return
        for transfer in job.transfers:
            if transfer.state == QUEUED:
                del self._queue[transfer]
        job.cancel_queued()
        still = {*job.open_blocks()}
        self._slots.pool.release_table([block for block in job.held if block not in still])
        job.held = []
        if not job.num_open:
            self._finish(job)

    def owned(self) -> list[list[KVCacheBlock]]:
        """Return the device's blocks that jobs own, once for each job. O(blocks)."""
        return [job.held if isinstance(job, LoadJob) and job.sequences else job.open_blocks() for job in self._jobs]

    def check(self) -> None:
        """Raise AssertionError unless all data here agree. O(all slots)."""
        for pool in self.pools:
            tables: list[list[KVCacheBlock]] = []
            for job in self._jobs:
                if isinstance(job, StoreJob) and job.pool is pool:
                    tables += [*job.above, job.slots]
                if isinstance(job, LoadJob):
                    tables += [prefix for other, prefix in job.parts if other is pool]
            pool.pool.check(tables)
            stores = [job for job in self._jobs if isinstance(job, StoreJob) and job.pool is pool]
            storing = [block for job in stores for block in job.open_blocks()]
            arrived = [block for job in stores for block in job.waiting_blocks()]
            pool.check_stores(storing, arrived)
        for sequence, job in self._loading.items():
            assert sequence.owner is self._change and sequence in job.sequences, f"{sequence}: waits for no load"
            assert job in self._jobs and job.num_open, f"{sequence}: waits for a load that is over"
        num_open = sum([job.num_open for job in self._jobs])
        assert num_open == len(self._queue) + len(self.begun), f"tiers: {num_open} transfers counted"

    # Steps of the above.

    def _make_load(self, sequence: Sequence, loads: list[TierHit]) -> LoadJob:
        """Return the job of a sequence's loads, whose blocks stand in its tables."""
        load = loads[-1]  # whose `pieces` are those of all of them
        prefix, start = moved_prefix(sequence, load), loads[0].first_token
        if self._layout is None:
            return LoadJob(sequence, prefix, load, start)
        return WholeLoadJob(sequence, prefix, load, start, self._layout)

    def _drop_prefixes(self, blocks: list[KVCacheBlock]) -> list[Prefix]:
        """Forget in all tiers the prefixes of those of `blocks` that are cached, and return the shortest of them.

        Of an attached block's prefix, only what is attached there is forgotten.
        """
        if self._attached is None:
            prefixes = shortest_prefixes(blocks)
            for prefix in prefixes:
                for pool in self.pools:
                    pool.drop_prefix(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
            return prefixes
        columns = {block: self._attached.column_of(block) for block in blocks if block.is_cached}
        nodes = {block.node for block, column in columns.items() if column is None}
        prefixes = []
        for block, column in columns.items():
            if block.run is not None and (block.run, block.index - 1) not in nodes:
                prefix = prefix_of(block.run, block.index + 1)
                prefixes.append(prefix)
                for pool in self.pools:
                    pool.drop_bad(prefix, column)
        return prefixes

    def _find_store(self, pool: TierPool, run: Run, num_blocks: int) -> tuple[Prefix, list[list[KVCacheBlock]]]:
        """Return what is to be stored with the first `num_blocks` blocks of `run`, and lists of slots to keep.

        The first list has the primary slots that the tier has of the prefix; the others have slots of side groups. The
        stored blocks of windows are those that one of these hits needs: the longest hit that device and tier can serve
        together, a hit at each multiple of `window_store_tokens`, and one at each checkpoint that is stored. The
        checkpoints are the device's last one, and all others except those that are saved at regular distances and were
        of no use yet.
        """
        prefix, layout = prefix_of(run, num_blocks), self._layout
        parents = pool.match(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
        if layout is None:
            return prefix, [parents]
        places = [PrefixCopy(pool.index, parents), PrefixCopy(self.index, prefix.blocks)]
        needed: list[tuple[int, Found]] = find_longest(layout, places, len(prefix.blocks), None)[1]
        tables = [*enumerate(needed)]
        checkpoints, kept_states = self._find_states(places, len(prefix.blocks))
        for number in checkpoints:
            tables += [*enumerate(find_all_needed(layout, places, number * layout.block_size, None) or [])]
        if pool.window_store_tokens is not None:
            for wanted in range(
                pool.window_store_tokens, len(prefix.blocks) * layout.block_size, pool.window_store_tokens
            ):
                end = wanted // layout.alignment * layout.alignment
                tables += [*enumerate(find_all_needed(layout, places, end, None) or [])] if end else []
        kept: dict[KVCacheBlock, None] = {}
        side: dict[KVCacheBlock, Home] = {}
        for number, (first, found) in tables:
            for index, (place, block) in enumerate(found, first):
                if place:
                    side[block] = layout.side_groups[number].home(index)
                else:
                    kept[block] = None
        kind = layout.state_kind
        num_parts = 1 if kind is None else kind.checkpoint_blocks
        whole = Prefix(prefix.tokens, prefix.extra_keys, prefix.blocks, [*side], [*side.values()], num_parts)
        whole.add_states(checkpoints, layout.row_size)
        return whole, [parents, [*kept], kept_states]

    def _find_states(
        self, places: list[PrefixCopy], num_blocks: int
    ) -> tuple[dict[int, list[KVCacheBlock]], list[KVCacheBlock]]:
        """Return the device's checkpoints to be stored, by the number of blocks before each, and slots to keep.

        places: the tier and the device. The slots are those of the tier's last checkpoint. O(blocks).
        """
        layout = self._layout
        if layout is None or layout.state is None:
            return {}, []
        missing: dict[int, list[KVCacheBlock]] = {}
        step, newest = layout.alignment // layout.block_size, places[1].last_checkpoint(num_blocks * layout.block_size)
        for number in range(step, num_blocks + 1, step):
            end = number * layout.block_size
            found = places[1].checkpoint(end)
            is_wanted = found is not None and (found.is_likely_end or end == newest)
            if found is not None and is_wanted and places[0].checkpoint(end) is None:
                missing[number] = found.blocks
        last = places[0].checkpoint(places[0].last_checkpoint(num_blocks * layout.block_size))
        return missing, [] if last is None else last.blocks

    def _transfers(self, pool: TierPool, job: Job, numbers: range, *, is_load: bool) -> list[Transfer]:
        """Return the transfers of the blocks `numbers` of a job, all between the device and one tier."""
        made: list[Transfer] = []
        for start in numbers[:: pool.max_transfer_blocks]:
            part = range(start, min(start + pool.max_transfer_blocks, numbers.stop))
            slots = [job.slots[number].block_id for number in part]
            self._generation += 1
            made.append(Transfer(self._generation, pool, job.prefix, job.first + start, slots, is_load=is_load))
        return made

    def _request_used(self, block: KVCacheBlock) -> None:
        """Ask for the prefix up to this cached block, which a second sequence uses."""
        for pool in [pool for pool in self.pools if pool.stores_reused]:
            pool.request(block.node)

    def _request_computed(self) -> None:
        """Ask for what sequences have cached since the last call, for tiers that store what is computed."""
        pools = [pool for pool in self.pools if pool.stores_computed]
        if not pools:
            return
        for sequence in self._sequences.values():
            number = sequence.num_cached_blocks
            if number and number != self._noted.get(sequence) and sequence.blocks[number - 1].is_cached:
                self._noted[sequence] = number
                for pool in pools:
                    pool.request(sequence.blocks[number - 1].node)

    def _begin_stores(self, pool: TierPool, transfers: list[Transfer]) -> None:
        """Begin as many of a tier's stores as possible. The others stay queued."""
        for run, end in pool.store_queue.take_all():
            room = pool.max_storing - len(pool.storing)
            if room <= 0:
                pool.request((run, end - 1))
                continue
            num_blocks = min(end, len(run.blocks))
            pool.num_dropped_blocks += end - num_blocks
            if not num_blocks or not run.epoch.is_current:
                continue
            prefix, above = self._find_store(pool, run, num_blocks)
            first = len(above[0])
            if first < len(prefix.blocks) and pool.is_in_store(prefix.blocks[first]):
                pool.store_queue.put_aside(run, num_blocks)
                continue
            for slots in above:
                pool.hold(slots)
            number = min(len(prefix.blocks) - first, room, pool.pool.num_free_blocks)
            moving = [n for n in range(number) if pool.is_in_store(prefix.blocks[first + n])]
            number = min([number, *moving])
            if not (slots := pool.take_whole(prefix, first, number)):
                for held in above:
                    pool.let_go(held)  # the stored part was used, so it is reused last
                if number and pool.storing and not prefix.num_whole(first, number):
                    pool.store_queue.put_aside(run, num_blocks)  # until there is room for the whole checkpoint
                else:
                    pool.num_dropped_blocks += len(prefix.blocks) - first
                continue
            self._begin_store(StoreJob(pool, run, prefix, above, slots), transfers)
            if first + len(slots) < len(prefix.blocks):
                pool.request((run, num_blocks - 1))

    def _begin_store(self, job: StoreJob, transfers: list[Transfer]) -> None:
        self._slots.pool.touch(job.blocks)
        self._jobs[job] = None
        job.pool.note_unstored(job.slots)
        salt = job.prefix.salt
        for block in job.blocks:
            job.pool.storing[block] = salt
        for transfer in self._transfers(job.pool, job, range(len(job.blocks)), is_load=False):
            job.add(transfer)
            self.begun[transfer] = job
            transfers.append(transfer)

    def _note_loaded(self, transfer: Transfer, seconds: float | None, *, is_ok: bool) -> None:
        """Count a load, learn its speed, and forget slots whose bytes were wrong or didn't arrive."""
        pool = transfer.pool
        if is_ok:
            pool.num_loaded_blocks += len(transfer.slots)
            if seconds is not None:
                pool.rate.note(transfer.num_bytes, seconds)
        else:
            pool.num_failed_blocks += len(transfer.slots)
            first = pool.pool.first_block_id
            pool.drop([pool.pool.blocks[slot - first] for slot in transfer.slots], "aborted")

    def _finish(self, job: Job) -> list[Loaded]:
        """End a job whose transfers are all over."""
        del self._jobs[job]
        if isinstance(job, LoadJob):
            return self._finish_load(job)
        assert isinstance(job, StoreJob)
        pool = job.pool
        job.finish()
        num_arrived = sum([len(transfer.slots) for transfer in job.transfers if transfer.has_arrived])
        pool.num_dropped_blocks += num_arrived - job.num_stored
        if num_arrived < len(job.blocks):  # not tried again until the next request
            pool.store_queue.drop(job.run)
        pool.store_queue.resume()
        tables = job.good_tables()
        for table in tables:
            self._slots.pool.touch(table)
        for table in tables:  # in order: a prefix's end is reused before its beginning
            self._slots.pool.release_table(table)
        return []

    def _finish_load(self, job: LoadJob) -> list[Loaded]:
        ended: list[Loaded] = []
        for sequence in job.sequences:
            del self._loading[sequence]
            end = job.end_in(sequence)
            is_whole = end >= job.start and not job.waits_behind(sequence, end)
            if end > job.start:
                self._slots.end_loads(sequence)
            if not is_whole:
                self._calls.rewind(sequence, end)
            last = end // self._block_size - 1
            if end > job.start and sequence.blocks[last].is_cached:
                self._request_used(sequence.blocks[last])
            ended.append(Loaded(sequence, min(end, sequence.num_computed_tokens), is_whole=is_whole))
        for pool, slots in job.parts:
            pool.let_go(slots)
        self._slots.pool.release_table(job.held)
        return ended
