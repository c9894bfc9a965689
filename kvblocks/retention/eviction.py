"""Which cached block is taken next with an eviction policy: `KVCacheManager(eviction=...)`.

The free queue still decides which blocks are free. `Eviction` stands between the queue and the policies. It tells them
about free cached blocks, and asks one of them for a victim when the queue has only cached blocks. Then it takes the
victim and the blocks below it, leaves first. The order in which blocks are taken:

1. blocks that hold nothing;
2. while a tenant is over its quota: its least recently used block if that left a window, otherwise the victim of the
   tenant's own policy, which is told only of the tenant's blocks;
3. blocks that left a window;
4. the victim of the pool's policy, which is told of the blocks of all tenants.

Policies are never told of blocks that hold nothing or left a window. Without a valid answer, the least recently used
block is taken.

A manager without a policy has no `Eviction`. With one, `Eviction` is the pool's `chooser` and a watcher of its index.
"""

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from typing import Any, Final

from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.hooks import Chooser
from kvblocks.core.sequence import Sequence
from kvblocks.retention.adviser import Adviser, Setting
from kvblocks.retention.policies import find_factory
from kvblocks.retention.policies.policy import MAX_SESSIONS, FreeBlock
from kvblocks.retention.quotas import TenantQuotas, salt_in
from kvblocks.retention.tenant import Tenant

_NOBODY: Final[tuple[Hashable, ...]] = (None,)
_LATEST: Final = 1 << 62  # for blocks that aren't free: later than any release


class Givers:
    """By block id, the sessions whose sequences released the block since it was cached.

    None stands for sequences without a session. Comparing sessions runs the caller's own code, which may raise; the
    block then keeps the sessions that it had.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[Hashable, ...]] = {}

    def note(self, blocks: Iterable[KVCacheBlock], session: Hashable) -> None:
        """Record that a sequence of a session released these cached blocks. O(blocks)."""
        own: tuple[Hashable, ...] = _NOBODY if session is None else (session,)
        known = self._sessions
        for block in blocks:
            before = known.get(block.block_id)
            if before is None or before is own:
                known[block.block_id] = own
            else:
                others = [other for other in before if not (other is session or other == session)]
                known[block.block_id] = (*others[1 - MAX_SESSIONS :], session) if others else own

    def of(self, block_id: int) -> tuple[Hashable, ...]:
        """Return the sessions that released a block, the latest last; (None,) if nothing is known. O(1)."""
        return self._sessions.get(block_id, _NOBODY)

    def forget(self, blocks: Items[KVCacheBlock]) -> None:
        """These blocks stopped being cached. O(blocks)."""
        if self._sessions:
            for block in blocks:
                self._sessions.pop(block.block_id, None)

    def clear(self) -> None:
        """The cache was reset. O(blocks)."""
        self._sessions.clear()


class Eviction(Chooser):
    """The eviction policies of one pool."""

    def __init__(self, eviction: Any, num_blocks: int, end_block_id: int) -> None:
        """eviction: a name, or a callable that makes a policy. Raises InvalidArgumentError, and what it raises."""
        self._make: Callable[[Any], Any] = find_factory(eviction)
        self._setting = Setting()
        self._end_block_id = end_block_id
        self._main = Adviser(self._make, self._setting, num_blocks)
        self._own: dict[int, Adviser] = {}  # by block id: the tenant's adviser that was told of the block
        self._released: dict[int, int] = {}  # by block id: when it became free; only blocks that policies know
        self._num_released = 0
        self._hits: dict[int, int] = {}
        self._quotas: TenantQuotas | None = None
        self._givers = Givers()

    @property
    def now(self) -> Any:
        """The caller's clock, as last set."""
        return self._setting.now

    def set_time(self, now: Any) -> None:
        """Set the caller's clock. O(1)."""
        self._setting.now = now

    @property
    def num_failures(self) -> int:
        """How often a policy raised, or named a block that it was not told of. O(1)."""
        return self._setting.num_failures

    def use_quotas(self, quotas: TenantQuotas | None) -> None:
        """Apply quotas whose blocks were counted again, with new advisers for the tenants' own policies. O(salts)."""
        self._quotas = quotas
        self._own.clear()
        if quotas is not None:
            quotas.forget_advisers()

    def pause(self, session: Hashable, tenant: str | None, reason: str) -> None:
        """Tell policies that know a tenant's blocks that one of its sessions pauses. O(1), plus the policies' time."""
        for adviser in self._advisers_of(tenant):
            adviser.pause(session, tenant, reason)

    def end(self, session: Hashable, tenant: str | None) -> None:
        """Tell policies that know a tenant's blocks that one of its sessions ended. O(1), plus the policies' time."""
        for adviser in self._advisers_of(tenant):
            adviser.end(session, tenant)

    def _advisers_of(self, tenant: str | None) -> list[Adviser]:
        account = None if self._quotas is None else self._quotas.find(tenant)
        if account is None or account.adviser is None:
            return [self._main]
        return [account.adviser, self._main]

    # Calls that ask.

    @property
    def is_choosing(self) -> bool:
        """Always True: a policy is asked whenever the queue has only cached blocks."""
        return True

    def take_next(self, queue: FreeBlockQueue, max_blocks: int) -> list[KVCacheBlock]:
        """Take blocks that hold nothing, or else a victim and the blocks below it.

        O(blocks + branches below the victim), plus the policy's time.
        """
        taken = queue.popleft_empty(max_blocks)
        if not taken:
            first = queue.first
            assert first is not None, "eviction: nothing is free"
            taken = self._choose(first, max_blocks)
            queue.touch(taken)
        return taken

    def _choose(self, first: KVCacheBlock, max_blocks: int) -> list[KVCacheBlock]:
        """Return the blocks to be taken next. first: the first block of the queue."""
        if not first.is_cached:  # cached before a reset
            return [first]
        tenant = None if self._quotas is None else self._quotas.next_tenant()
        if tenant is not None:
            own = tenant.first_free()
            assert own is not None
            if own.block_id not in self._released:
                return [own]
            return self._advised(self._adviser_of(tenant), own, min(max_blocks, tenant.num_excess_blocks))
        if first.block_id not in self._released:  # it left a window
            return [first]
        return self._advised(self._main, first, max_blocks)

    def _advised(self, adviser: Adviser, fallback: KVCacheBlock, max_blocks: int) -> list[KVCacheBlock]:
        victim = adviser.ask(max_blocks)
        return [fallback] if victim is None else free_stretch(victim, max_blocks, self._released)

    def _adviser_of(self, tenant: Tenant) -> Adviser:
        """Return the adviser of a tenant. It is made on first use, and told of the tenant's free blocks."""
        if tenant.adviser is None:
            num_blocks = max(1, tenant.max_cached_blocks)
            try:
                tenant.adviser = Adviser(self._make, self._setting, num_blocks)
            except Exception:  # noqa: BLE001  # then the tenant's least recently used blocks are taken
                self._setting.num_failures += 1
                tenant.adviser = Adviser(_Silent, self._setting, num_blocks)
            blocks = [block for block in tenant.all_free() if block.block_id in self._released]
            self._tell_own(tenant.adviser, blocks, self._records(blocks))
        return tenant.adviser

    # Calls that tell.

    def note_starting(self, sequence: Sequence) -> None:
        """Tell policies that a request of a session begins. O(1), plus the policies' time."""
        for adviser in self._advisers_of(sequence.salt):
            adviser.begin(sequence.session, sequence.salt)

    def note_hit(self, blocks: Items[KVCacheBlock]) -> None:
        """A sequence has hit these blocks. O(blocks)."""
        for block in blocks:
            if block.block_id < self._end_block_id:  # not a virtual one
                self._hits[block.block_id] = self._hits.get(block.block_id, 0) + 1

    def note_passed(self, blocks: Items[KVCacheBlock]) -> None:
        """Do nothing: policies aren't told of blocks that left a window."""

    def note_released(self, blocks: Items[KVCacheBlock], giver: Sequence | None = None) -> None:
        """Tell policies of those blocks that are now free and cached. O(blocks + runs above them)."""
        if giver is not None:
            self._note_giver(blocks, giver.session)
        freed: list[KVCacheBlock] = []
        released, number = self._released, self._num_released
        for block in blocks:
            run = block.run
            if block.ref_cnt == 0 and run is not None and run.epoch.is_current and block.block_id not in released:
                number += 1
                released[block.block_id] = number
                freed.append(block)
        if not freed:
            return
        self._num_released = number
        records = self._records(freed)
        if self._quotas is not None:
            self._tell_tenants(freed, records)
        self._main.free(freed, records)

    def note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell policies of those blocks that were free. O(blocks)."""
        self.note_renewed(blocks)

    def note_renewed(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell policies that those blocks which were free were used. O(blocks)."""
        used = self._leave(blocks)
        if used:
            self._main.use(used)
            for adviser, block_ids in self._leave_own(used):
                adviser.use(block_ids)

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell policies of those blocks that they know, before the index evicts them. O(blocks)."""
        self._note_gone(blocks)

    def note_detached(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell policies of those blocks that they know. O(blocks)."""
        self._note_gone(blocks)

    def note_clearing(self, runs: Iterable[Run]) -> None:  # noqa: ARG002  # for other watchers
        """Tell policies that no block is cached any more. O(free cached blocks)."""
        gone = [*self._released]
        if gone:
            self._main.remove(gone)
        self._released.clear()
        self._own.clear()
        self._hits.clear()
        self._givers.clear()

    def check(self, queue: FreeBlockQueue) -> None:
        """Raise AssertionError unless policies know exactly the free cached blocks that left no window. O(queue)."""
        known = self._main.blocks
        assert known.keys() == self._released.keys(), "eviction: told of other blocks than counted"
        assert max(self._hits, default=-1) < self._end_block_id, "eviction: hits of what is no block"
        num_seen = 0
        for block in queue:
            is_known = known.get(block.block_id) is block
            assert not is_known or block.is_cached, f"{block}: a policy knows it, and it holds nothing"
            assert is_known or not num_seen or not block.is_cached, f"{block}: no policy knows it"
            num_seen += is_known
        assert num_seen == len(known), f"eviction: {len(known)} blocks are known, {num_seen} of them free"
        assert self._own.keys() <= known.keys(), "eviction: a tenant's policy knows more than the pool's"
        for block_id, adviser in self._own.items():
            assert adviser.blocks[block_id] is known[block_id], f"eviction: block {block_id} of a tenant's policy"

    def _note_gone(self, blocks: Items[KVCacheBlock]) -> None:
        if self._hits:
            for block in blocks:
                self._hits.pop(block.block_id, None)
        self._givers.forget(blocks)
        gone = self._leave(blocks)
        if gone:
            self._main.remove(gone)
            for adviser, block_ids in self._leave_own(gone):
                adviser.remove(block_ids)

    def _leave(self, blocks: Items[KVCacheBlock]) -> list[int]:
        """Forget those of `blocks` that policies were told of. Returns their ids, each once."""
        return [block.block_id for block in blocks if self._released.pop(block.block_id, 0)]

    def _leave_own(self, block_ids: list[int]) -> list[tuple[Adviser, list[int]]]:
        """Forget those of these blocks that tenants' own policies were told of. Returns them by adviser."""
        theirs: dict[Adviser, list[int]] = {}
        if self._own:
            for block_id in block_ids:
                adviser = self._own.pop(block_id, None)
                if adviser is not None:
                    theirs.setdefault(adviser, []).append(block_id)
        return [*theirs.items()]

    def _note_giver(self, blocks: Items[KVCacheBlock], session: Hashable) -> None:
        """Note which session gave back those of `blocks` that are cached. O(blocks)."""
        cached = [block for block in blocks if block.run is not None and block.run.epoch.is_current]
        try:
            self._givers.note(cached, session)
        except Exception:  # noqa: BLE001  # the session's own comparison
            self._setting.num_failures += 1

    def _tell_tenants(self, freed: list[KVCacheBlock], records: list[FreeBlock]) -> None:
        """Tell the tenants' own policies of their tenant's blocks."""
        theirs: dict[Adviser, list[int]] = {}
        for i, block in enumerate(freed):
            account = None if block.run is None else block.run.account
            if isinstance(account, Tenant) and account.adviser is not None:
                theirs.setdefault(account.adviser, []).append(i)
        for adviser, numbers in theirs.items():
            self._tell_own(adviser, [freed[i] for i in numbers], [records[i] for i in numbers])

    def _tell_own(self, adviser: Adviser, blocks: list[KVCacheBlock], records: list[FreeBlock]) -> None:
        for block in blocks:
            self._own[block.block_id] = adviser
        adviser.free(blocks, records)

    def _records(self, blocks: list[KVCacheBlock]) -> list[FreeBlock]:
        """Return the records of free cached blocks for policies. O(blocks + runs above them)."""
        records: list[FreeBlock] = []
        last: Run | None = None
        first, tenant = 0, None
        hits, givers = self._hits, self._givers
        for block in blocks:
            run = block.run
            assert run is not None, f"{block}: isn't cached"
            if run is not last:
                if last is not None and last.key[0] is run:  # often so, since a table's blocks come last first
                    first -= last.key[1] + 1
                else:
                    first = num_blocks_above(run)
                    tenant = salt_in(run.first_keys)
                last = run
            block_id = block.block_id
            sessions = givers.of(block_id)
            fields = block_id, first + block.index, tenant, sessions[-1], hits.get(block_id, 0), sessions[:-1]
            records.append(tuple.__new__(FreeBlock, fields))  # takes half the time of FreeBlock(...)
        return records


def num_blocks_above(run: Run) -> int:
    """Return how many blocks of its prefix come before a run. O(runs above)."""
    number = 0
    parent, position, _, _ = run.key
    while parent is not None:
        number += position + 1
        parent, position, _, _ = parent.key
    return number


class _Silent:
    """A policy that never names a victim."""

    def __init__(self, cache: object) -> None:
        """cache: not used."""

    def free(self, blocks: object) -> None:
        """Do nothing."""

    def use(self, block_ids: object) -> None:
        """Do nothing."""

    def remove(self, block_ids: object) -> None:
        """Do nothing."""

    def victim(self, num_blocks: object) -> None:
        """Name no block."""


def free_stretch(victim: KVCacheBlock, max_blocks: int, released: dict[int, int]) -> list[KVCacheBlock]:
    """Return the free blocks to evict for `victim`, a free cached block: those below it, and the victim last.

    At most `max_blocks`, each after all blocks below it; of several branches the least recently used one first. A
    victim that has duplicates, or is an attached block, is returned alone. released: by block id, when the block became
    free. Changes nothing. O(blocks returned + owned blocks between them + branches).
    """
    run, index = victim.run, victim.index
    assert run is not None, f"{victim}: isn't cached"
    if run.blocks[index] is not victim or (run.duplicates and index in run.duplicates):
        return [victim]
    if not run.children and not run.duplicates:  # fast path: the end of a run, if all of it is free
        tail = run.blocks[max(index, len(run.blocks) - max_blocks) :]
        if not any([block.ref_cnt for block in tail]):  # noqa: C419  # a generator costs more
            tail.reverse()
            return tail
    found: list[KVCacheBlock] = []
    # Stacks instead of recursion, since a prefix may have more branches below each other than calls may be nested.
    # emits: stretches to return, as (run, high, low). parts: (run, low), for all that is cached from there on; it must
    # be taken apart first. A None in `emits` stands for the top item of `parts`.
    emits: list[tuple[Run, int, int] | None] = [None]
    parts: list[tuple[Run, int]] = [(run, index)]
    while emits and len(found) < max_blocks:
        emit = emits.pop()
        if emit is None:
            below, low = parts.pop()
            _take_apart(below, low, emits, parts, released)
        else:
            _emit(emit, found, max_blocks)
    return found


def _take_apart(
    run: Run,
    low: int,
    emits: list[tuple[Run, int, int] | None],
    parts: list[tuple[Run, int]],
    released: dict[int, int],
) -> None:
    """Split what is cached from position `low` of a run on at its first branching.

    Pushes the stretch above the branches, then the branches, with the least recently used one last, so that it is
    popped first.
    """
    end = len(run.blocks)
    positions = [] if not run.children else [position for position in run.children if position >= low]
    if not positions:
        emits.append((run, end - 1, low))
        return
    first = min(positions)
    assert run.children is not None
    branches = [(child, 0) for child in run.children[first]]
    if first + 1 < end:
        branches.append((run, first + 1))
    emits.append((run, first, low))
    ages = [(-released.get(below.blocks[start].block_id, _LATEST), i) for i, (below, start) in enumerate(branches)]
    for _, i in sorted(ages):
        emits.append(None)
        parts.append(branches[i])


def _emit(emit: tuple[Run, int, int], found: list[KVCacheBlock], max_blocks: int) -> None:
    """Add the free blocks of positions high to low of a run."""
    run, high, low = emit
    for position in range(high, low - 1, -1):
        block = run.blocks[position]
        if not block.ref_cnt and len(found) < max_blocks:
            found.append(block)
