"""`Tiers`: what is kept below the device, what moves between, and when. `manager.tiers`.

The order of a step. An engine carries out the copies (`take_copies`), runs the step, and then what `take_transfers`
returned after all calls that made room for that step: a store reads what the step wrote, and a load's target may be a
block that the step or its copies read. Among each other transfers may run in any order, and as long as they like: no
block and no slot is in two of them, unless both only read it. A sequence that is loading is in no step until `complete`
says what arrived.

Filling. A wish names a prefix (`wishes`); it becomes a store when there is room for one in flight, of those blocks that
the tier lacks, parents first. Storing never makes a call wait, and what is taken before its store began is simply
lost. A hit on the device counts as a use below: its wish touches the slots that the tier has.

The shape, pools of ids below each other that one policy fills and somebody else's hands move, is that of a memory
hierarchy; holding a block while it moves, and finding loading blocks as pending, are vLLM's KV connectors'.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

from kvblocks.arguments import Flag, Given, check_count, check_flag, check_number, is_a, listed, wrong
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.change import Changeable
from kvblocks.core.hit import CacheHit
from kvblocks.core.sequence import Sequence, not_a_sequence
from kvblocks.core.slots import SlotAllocator
from kvblocks.errors import BlockStateError, InvalidArgumentError, SequenceStateError, StaleHitError
from kvblocks.tiers.jobs import Job, LoadJob, StoreJob
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.rates import Rate, num_worth_loading
from kvblocks.tiers.tier import Tier, TierStats
from kvblocks.tiers.transfer import BEGUN, QUEUED, Loaded, TierHit, Transfer
from kvblocks.tiers.wishes import Wishes, prefix_of

STORING_SHARE = 8
"""Stores hold at most an eighth of the device's blocks, at least one."""


class Tiers:
    """The tiers of a manager, quickest first. Iterates over their `TierStats`. Made by a manager.

    Its calls raise as the manager's, and have changed nothing then. num_stale_answers: `complete` calls that came for
    a transfer which had ended already.
    """

    def __init__(
        self,
        tiers: tuple[Tier, ...],
        manager: Changeable,
        slots: SlotAllocator,
        sequences: Mapping[Hashable, Sequence],
        calls: "ManagerCalls",
    ) -> None:
        """sequences: the manager's, by id. calls: what of the manager this needs."""
        self._manager = manager
        self._slots = slots
        self._sequences = sequences
        self._calls = calls
        block_size = slots.pool.index.block_size
        self._pools = [TierPool(tier, block_size) for tier in tiers]
        self._wishes = [Wishes() for _ in tiers]
        self._rates = {tier.name: Rate(tier.bytes_per_second) for tier in tiers}
        self._compute_rate = Rate()
        self._block_size = block_size
        self._max_storing = max(1, len(slots.pool.blocks) // STORING_SHARE)
        self._num_storing = 0
        self._storing: dict[tuple[str, KVCacheBlock], None] = {}  # by tier: the device's blocks that stores read
        self._queue: dict[Transfer, Job] = {}  # loads that nobody knows of yet
        self._begun: dict[Transfer, Job] = {}
        self._jobs: dict[Job, None] = {}
        self._loading: dict[Sequence, LoadJob] = {}
        self._noted: dict[Sequence, int] = {}  # how many blocks were cached at the last look, where that is looked at
        self._generation = 0
        self.num_stale_answers = 0

    def __len__(self) -> int:
        return len(self._pools)

    def __iter__(self) -> "Iterable[TierStats]":
        return iter([pool.stats() for pool in self._pools])

    # Lookups.

    def find(self, hit: Given[CacheHit]) -> list[TierHit]:
        """Return what the tiers have of a hit's sequence behind the hit, the nearest part first. Changes nothing.

        Each part begins where the one before it ends. Any number of first parts may be given to `allocate_slots`.
        Raises InvalidArgumentError, and SequenceStateError for another manager's hit. A lookup in each tier.
        """
        self._manager.check_whole()
        given: Any = hit
        if not is_a(given, CacheHit):
            raise wrong("tiers.find", "what get_computed_blocks returned", hit)
        own: CacheHit = given
        if own.index is not self._slots.pool.index:
            raise SequenceStateError(f"tiers.find: expected a hit of this manager's cache, got another's: {own}")
        size, sequence, position = self._block_size, own.sequence, len(own.blocks)
        end = (sequence.num_tokens - 1) // size
        found: list[TierHit] = []
        for pool in self._pools:
            blocks = pool.match(memoryview(sequence.tokens), sequence.encoded_keys(size), end)
            if len(blocks) > position:
                found.append(TierHit(sequence, pool, blocks, position))
                position = len(blocks)
        return found

    def worth_loading(self, loads: Iterable[TierHit]) -> list[TierHit]:
        """Return those first parts of `find`'s answer whose load is expected to be faster than computing them.

        By the tiers' bytes a second (see `Tier`, learned by `complete`) and the model's speed (learned by
        `note_computed`); what isn't known counts as fast for a tier, and as slow for the model.
        """
        given = self._listed(loads)
        costs = [(hit.num_tokens, hit.num_bytes * self._rates[hit.tier].seconds_a_unit) for hit in given]
        return given[: num_worth_loading(costs, self._compute_rate.seconds_a_unit)]

    def note_computed(self, num_tokens: SupportsIndex, seconds: SupportsFloat) -> None:
        """Learn that a step computed so many tokens of prompts in so many seconds. Raises InvalidArgumentError."""
        number = check_count("num_tokens", num_tokens, 0)
        self._compute_rate.note(number, _check_seconds(seconds))

    # Transfers.

    def take_transfers(self) -> list[Transfer]:
        """Return what is to be copied, loads first, and count it as begun: each is to be answered by `complete`.

        Call it once a step, when all steps that slots were given for are launched or have ended: see the module. Takes
        no more stores than the bound on blocks that are held for them allows. O(blocks that move, and of their
        prefixes), and O(sequences) where a tier stores what is computed.
        """
        self._manager.begin_change()
        transfers = [*self._queue]
        self._begun.update(self._queue)
        self._queue = {}
        self._wish_for_computed()
        for pool, wishes in zip(self._pools, self._wishes, strict=True):
            if len(wishes):
                self._begin_stores(pool, wishes, transfers)
        for transfer in transfers:
            transfer.state = BEGUN
        self._calls.end()
        return transfers

    def complete(self, transfer: Given[Transfer], ok: Flag, *, seconds: SupportsFloat | None = None) -> list[Loaded]:
        """Say that a transfer is over, and whether all of its bytes arrived, were right, and stay where they are.

        With the last transfer of a load its sequences are told of: what arrived is cached, the slots behind it are
        given back, and they go on from `Loaded.num_tokens`. What a load didn't bring is stored no more. An answer for a
        transfer that was answered before changes nothing. seconds: how long it took; teaches `worth_loading`.

        Raises BlockStateError for one that `take_transfers` hasn't returned yet, and InvalidArgumentError. O(blocks).
        """
        self._manager.check_whole()
        is_ok = check_flag("ok", ok)
        took = None if seconds is None else _check_seconds(seconds)
        own = self._check_transfer(transfer)
        job = self._begun.get(own)
        if job is None:
            self.num_stale_answers += 1
            return []
        ended: list[Loaded] = []
        if isinstance(job, LoadJob):
            if job.num_open == 1:
                self._commit(job, job.num_arrived(own if is_ok else None))
            self._manager.begin_change()
            self._note_loaded(own, is_ok=is_ok, seconds=took)
        else:
            self._manager.begin_change()
        del self._begun[own]
        job.end(own, ok=is_ok)
        if not job.num_open:
            ended = self._finish(job)
        self._calls.end()
        return ended

    def give_up(self, sequence: Given[Sequence]) -> int:
        """Stop waiting for a sequence's loads, which take too long; returns how many first tokens it has without them.

        It goes on at once. Transfers that have begun still own their blocks until they are answered. Raises
        SequenceStateError when the sequence isn't loading. O(blocks).
        """
        self._manager.check_whole()
        job = self._loading.get(self._calls.check_owned(sequence, "tiers.give_up"))
        if job is None:
            raise SequenceStateError(f"tiers.give_up: expected a sequence that is loading, got {sequence}")
        own: Sequence = sequence  # type: ignore[assignment]
        self._manager.begin_change()
        self.leave(own)
        self._calls.rewind(own, job.first * self._block_size)
        self._calls.end()
        return own.num_computed_tokens

    def is_loading(self, sequence: Given[Sequence]) -> bool:
        """Whether a sequence waits for loads: it must be in no step. O(1)."""
        if not is_a(sequence, Sequence):
            raise not_a_sequence("tiers.is_loading", sequence)
        own: Sequence = sequence  # type: ignore[assignment]
        return own in self._loading

    # What the manager tells. A change is under way.

    def check_loads(self, sequence: Sequence, hit: CacheHit | None, loads: object) -> tuple[list[TierHit], int]:
        """Return loads as a list, and of how many tokens. Raises as `allocate_slots`. Changes nothing. O(blocks)."""
        given = self._listed(loads)
        if given and sequence.owner is not None:
            raise SequenceStateError(f"allocate_slots: expected no loads, since {sequence} has blocks; got {given}")
        start = 0 if hit is None else len(hit.blocks) * self._block_size
        for load in given:
            if load.sequence is not sequence:
                raise SequenceStateError(f"allocate_slots: expected loads of {sequence}, got {load}")
            if load.first_token != start:
                raise InvalidArgumentError(f"allocate_slots: loads: expected one from token {start} on, got {load}")
            start += load.num_tokens
            if load.version != load.pool.index.version:
                tokens, keys = memoryview(sequence.tokens), sequence.encoded_keys(self._block_size)
                if load.pool.match(tokens, keys, len(load.prefix)) != load.prefix:
                    raise StaleHitError(
                        f"allocate_slots: expected {load} to be stored still; it isn't: look it up again"
                    )
        if given and start >= sequence.num_tokens:
            raise StaleHitError(f"allocate_slots: expected loads of fewer tokens than {sequence} has, got {given}")
        return given, sum([load.num_tokens for load in given])

    def begin_loads(self, sequence: Sequence, loads: list[TierHit]) -> None:
        """Begin the loads of a sequence that was just given slots for them. O(blocks)."""
        size, first = self._block_size, loads[0].first_token // self._block_size
        end = first + sum([load.num_tokens for load in loads]) // size
        parts = [(load.pool, load.prefix) for load in loads]
        slots = [slot for load in loads for slot in load.prefix[load.first_token // size :]]
        job = LoadJob(sequence, first, sequence.blocks[first:end], slots, parts)
        self._slots.pool.touch(job.held)
        self._jobs[job] = None
        self._loading[sequence] = job
        number = 0
        for load in loads:
            load.pool.hold(load.prefix)
            part = range(number, number + load.num_tokens // size)
            for transfer in self._transfers(load.pool, job, part, is_load=True):
                job.add(transfer)
                self._queue[transfer] = job
            number = part.stop

    def note_use(self, hit: CacheHit) -> None:
        """Take note that a sequence starts with a hit: a second use. O(tiers)."""
        for pool, wishes in zip(self._pools, self._wishes, strict=True):
            if pool.stores_reused:
                pool.num_dropped_blocks += wishes.add(hit.blocks[-1].node)

    def note_end(self, sequence: Sequence) -> None:
        """Take note that a sequence is about to give its blocks back. O(tiers), and O(blocks) after an abort."""
        self._noted.pop(sequence, None)
        if sequence in self._loading:
            self.leave(sequence)
        if sequence.epoch is not self._slots.pool.index.epoch:
            return
        number = sequence.num_cached_blocks
        while number and not sequence.blocks[number - 1].is_cached:
            number -= 1
        if not number:
            return
        for pool, wishes in zip(self._pools, self._wishes, strict=True):
            least = pool.min_store_tokens
            is_long = least is not None and number * self._block_size >= least
            if is_long or not (pool.stores_reused or pool.stores_computed):
                pool.num_dropped_blocks += wishes.add(sequence.blocks[number - 1].node)

    def note_fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Take note that a sequence was forked: the twin waits for the same loads. O(1)."""
        job = self._loading.get(sequence)
        if job is not None and twin.num_computed_tokens > job.first * self._block_size:
            job.sequences[twin] = None
            self._loading[twin] = job

    def note_cut(self, sequence: Sequence) -> None:
        """Take note that a sequence went back, perhaps into what it loads: it keeps whole blocks of that.

        A block that a transfer may still write is nobody's to add tokens to.
        """
        job = self._loading.get(sequence)
        if job is None:
            return
        num_blocks = sequence.num_computed_tokens // self._block_size
        if num_blocks < job.first + len(job.blocks) and sequence.num_computed_tokens % self._block_size:
            self._calls.rewind(sequence, num_blocks * self._block_size)
        if num_blocks <= job.first:
            self.leave(sequence)

    def note_forgotten(self) -> None:
        """Take note that something was taken back from the device's cache. O(blocks that are being stored)."""
        for job in self._jobs:
            if isinstance(job, StoreJob):
                job.note_forgotten()

    def note_bad(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forget what these blocks of the device hold in all tiers, too: it turned out to be bad.

        A load that is bringing it has failed there. O(blocks x (their prefixes + loads)).
        """
        for block in blocks:
            if block.run is None or not block.is_cached:
                continue
            prefix = prefix_of(block.run, block.index + 1)
            for pool in self._pools:
                dropped = pool.drop_prefix(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
                for job in self._jobs:
                    if isinstance(job, LoadJob):
                        job.note_bad(dropped)

    def clear(self) -> None:
        """Forget everything in all tiers, after the device's cache was reset. O(1) but for giving memory back.

        Loads that have begun go on, since their sequences are of before, too. Stores that have begun are for nothing:
        what they read is cached no more.
        """
        for pool, wishes in zip(self._pools, self._wishes, strict=True):
            pool.clear()
            wishes.clear()

    def leave(self, sequence: Sequence) -> None:
        """A sequence waits for its loads no more; what nobody has begun for it alone is cancelled. O(blocks)."""
        job = self._loading.pop(sequence)
        del job.sequences[sequence]
        if job.sequences:
            return
        for transfer in job.transfers:
            if transfer.state == QUEUED:
                del self._queue[transfer]
        job.cancel_queued()
        if not job.num_open:
            self._finish(job)

    def owned(self) -> list[list[KVCacheBlock]]:
        """Return the device's blocks that jobs own, each as often as they do. O(jobs)."""
        return [job.held if isinstance(job, LoadJob) else job.blocks for job in self._jobs]

    def check(self) -> None:
        """Raise AssertionError unless all here agrees. O(all slots)."""
        for pool in self._pools:
            tables: list[list[KVCacheBlock]] = []
            for job in self._jobs:
                if isinstance(job, StoreJob) and job.pool is pool:
                    tables += [job.parents, job.slots]
                if isinstance(job, LoadJob):
                    tables += [prefix for other, prefix in job.parts if other is pool]
            pool.pool.check(tables)
        for sequence, job in self._loading.items():
            assert sequence.owner is self._manager and sequence in job.sequences, f"{sequence}: waits for no load"
            assert job in self._jobs and job.num_open, f"{sequence}: waits for a load that is over"
        num_open = sum([job.num_open for job in self._jobs])
        assert num_open == len(self._queue) + len(self._begun), f"tiers: {num_open} transfers counted"
        storing = [job for job in self._jobs if isinstance(job, StoreJob)]
        assert self._num_storing == sum([len(job.blocks) for job in storing]), "tiers: blocks that are being stored"
        assert self._num_storing == len(self._storing), "tiers: a block is stored twice at once"

    # What these are made of.

    def _listed(self, loads: object) -> list[TierHit]:
        given: list[Any] = listed("loads", "what tiers.find returned, or a first part of it", loads)
        for load in given:
            if not is_a(load, TierHit):
                raise wrong("loads", "what tiers.find returned, or a first part of it", load)
            if load.pool not in self._pools:
                raise SequenceStateError(f"loads: expected one of this manager's tiers, got another's: {load}")
        return given

    def _check_transfer(self, transfer: object) -> Transfer:
        given: Any = transfer
        if not is_a(given, Transfer):
            raise wrong("tiers.complete", "what take_transfers returned", transfer)
        own: Transfer = given
        if own.owner is not self:
            raise InvalidArgumentError(f"tiers.complete: expected a transfer of this manager's tiers, got {own}")
        if own.state == QUEUED:
            raise BlockStateError(f"tiers.complete: expected a transfer that take_transfers returned, got {own}")
        return own

    def _transfers(self, pool: TierPool, job: Job, numbers: range, *, is_load: bool) -> list[Transfer]:
        """Return the transfers of those blocks of a job, all between the device and one tier."""
        made: list[Transfer] = []
        for start in numbers[:: pool.max_transfer_blocks]:
            part = range(start, min(start + pool.max_transfer_blocks, numbers.stop))
            pairs = [(job.blocks[number].block_id, job.slots[number].block_id) for number in part]
            self._generation += 1
            made.append(Transfer(self, self._generation, pool, start, pairs, is_load=is_load))
        return made

    def _wish_for_computed(self) -> None:
        """Wish for what sequences have cached since the last look, for tiers that store that."""
        wishing = [wishes for pool, wishes in zip(self._pools, self._wishes, strict=True) if pool.stores_computed]
        if not wishing:
            return
        for sequence in self._sequences.values():
            number = sequence.num_cached_blocks
            if number and number != self._noted.get(sequence) and sequence.blocks[number - 1].is_cached:
                self._noted[sequence] = number
                for wishes in wishing:
                    wishes.add(sequence.blocks[number - 1].node)

    def _begin_stores(self, pool: TierPool, wishes: Wishes, transfers: list[Transfer]) -> None:
        """Begin what can be begun of a tier's wishes; the others stay."""
        for run, end in wishes.take_all():
            room = self._max_storing - self._num_storing
            if room <= 0:
                wishes.add((run, end - 1))
                continue
            num_blocks = min(end, len(run.blocks))
            pool.num_dropped_blocks += end - num_blocks
            if not num_blocks or not run.epoch.is_current:
                continue
            prefix = prefix_of(run, num_blocks)
            parents = pool.match(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
            first = len(parents)
            if first == len(prefix.blocks):
                pool.hold(parents)
                pool.let_go(parents)  # used: reused last
                continue
            if (pool.name, prefix.blocks[first]) in self._storing:
                wishes.add((run, num_blocks - 1))
                continue
            pool.hold(parents)
            number = min(len(prefix.blocks) - first, room, pool.pool.num_free_blocks)
            number = self._num_unmoved(pool, prefix.blocks[first : first + number])
            if not number:
                pool.let_go(parents)
                pool.num_dropped_blocks += len(prefix.blocks) - first
                continue
            job = StoreJob(pool, prefix, parents, pool.pool.take(number))
            self._begin_store(job, transfers)
            if first + number < len(prefix.blocks):
                wishes.add((run, num_blocks - 1))

    def _num_unmoved(self, pool: TierPool, blocks: list[KVCacheBlock]) -> int:
        """Return how many of the first blocks are in no store of that tier."""
        for number, block in enumerate(blocks):
            if (pool.name, block) in self._storing:
                return number
        return len(blocks)

    def _begin_store(self, job: StoreJob, transfers: list[Transfer]) -> None:
        self._slots.pool.touch(job.blocks)
        self._jobs[job] = None
        self._num_storing += len(job.blocks)
        for block in job.blocks:
            self._storing[job.pool.name, block] = None
        for transfer in self._transfers(job.pool, job, range(len(job.blocks)), is_load=False):
            job.add(transfer)
            self._begun[transfer] = job
            transfers.append(transfer)

    def _commit(self, job: LoadJob, num_arrived: int) -> None:
        """Cache what arrived, for all who wait. A hash function that raises does so before anything is lost."""
        for sequence in job.sequences:
            end = min(job.end_in(sequence, num_arrived) * self._block_size, sequence.num_computed_tokens)
            if end > sequence.num_written_tokens:
                self._calls.commit(sequence, end)

    def _note_loaded(self, transfer: Transfer, *, is_ok: bool, seconds: float | None) -> None:
        """Count a load, learn from it, and forget slots that didn't bring what they should."""
        pool = self._pool_of(transfer)
        if is_ok:
            pool.num_loaded_blocks += len(transfer.slots)
            if seconds is not None:
                self._rates[pool.name].note(transfer.num_bytes, seconds)
        else:
            pool.num_failed_blocks += len(transfer.slots)
            first = pool.pool.first_block_id
            pool.drop([pool.pool.blocks[slot - first] for slot in transfer.slots])

    def _pool_of(self, transfer: Transfer) -> TierPool:
        return next(pool for pool in self._pools if pool.name == transfer.tier)

    def _finish(self, job: Job) -> list[Loaded]:
        """End a job all of whose transfers are over."""
        del self._jobs[job]
        if isinstance(job, LoadJob):
            return self._finish_load(job)
        assert isinstance(job, StoreJob)
        self._num_storing -= len(job.blocks)
        for block in job.blocks:
            del self._storing[job.pool.name, block]
        num_arrived = job.num_arrived()
        num_stored = job.finish()
        job.pool.num_stored_blocks += num_stored
        job.pool.num_failed_blocks += len(job.blocks) - num_arrived
        job.pool.num_dropped_blocks += num_arrived - num_stored
        self._slots.pool.release_table(job.blocks)
        return []

    def _finish_load(self, job: LoadJob) -> list[Loaded]:
        ended: list[Loaded] = []
        num_arrived, size = job.num_arrived(), self._block_size
        for sequence in job.sequences:
            del self._loading[sequence]
            end = job.end_in(sequence, num_arrived)
            is_whole = not job.waits(sequence, end)
            if not is_whole:
                self._calls.rewind(sequence, end * size)
            ended.append(Loaded(sequence, min(end * size, sequence.num_computed_tokens), is_whole=is_whole))
        for pool, prefix in job.parts:
            pool.let_go(prefix)
        self._slots.pool.release_table(job.held)
        return ended


class ManagerCalls:
    """What `Tiers` needs of its manager.

    check_owned: as the manager's. commit: caches a sequence's first tokens, which are written. rewind: gives slots
    back, in a change that is under way. end: ends a change, and checks all, if that is wanted.
    """

    def __init__(
        self,
        check_owned: Callable[[Any, str], Sequence],
        commit: Callable[[Sequence, int], None],
        rewind: Callable[[Sequence, int], None],
        end: Callable[[], None],
    ) -> None:
        self.check_owned = check_owned
        self.commit = commit
        self.rewind = rewind
        self.end = end


def _check_seconds(seconds: SupportsFloat) -> float:
    number = float(check_number("seconds", seconds, "a number of seconds, at least 0"))
    if not 0.0 <= number < float("inf"):
        raise wrong("seconds", "a number of seconds, at least 0", seconds)
    return number
