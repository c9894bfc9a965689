"""The cache of a run: the production manager, or arrays that give the same results in a fraction of the time.

Both have the same methods. They take a request's blocks, count its misses, and give the blocks back.
"""

from collections import OrderedDict
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from kvblocks import KVCacheManager, Sequence
from kvblocks.replay.accounts import MissAccounts
from kvblocks.replay.arrays.advised import AdvisedPool
from kvblocks.replay.arrays.pool import ArrayPool
from kvblocks.replay.trace import Numbers, Trace
from kvblocks.tiers.store import RecentUses

STORE = "store"
"""The name that the manager has for the tier shared by several runs."""


class SharedBlocks:
    """A store that several runs share: blocks of the trace by salt and number, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: the store's size."""
        self._num_blocks = num_blocks
        self._held: OrderedDict[tuple[str | None, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def num_found(self, path: Items[int], salt: str | None) -> int:
        """Return how many leading blocks are there. All blocks that are there count as used. O(blocks)."""
        number = next((place for place, block in enumerate(path) if (salt, block) not in self._held), len(path))
        for block in reversed(path):
            if (salt, block) in self._held:
                self._held.move_to_end((salt, block))
        return number

    def add(self, blocks: Items[int], salt: str | None) -> None:
        """Store blocks, in the order of a prefix. The least recently used blocks are evicted. O(blocks)."""
        for block in reversed(blocks):
            self._held[salt, block] = None
            self._held.move_to_end((salt, block))
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)


class ManagerPool:
    """The production manager. Each block of the trace is one token for it, and its blocks have one token each."""

    def __init__(
        self, trace: Trace, num_blocks: int, manager: KVCacheManager, store: SharedBlocks | None = None
    ) -> None:
        """manager: an empty one of so many blocks. store: shared with other runs; then a tier of it is named STORE."""
        self.manager, self.store = manager, store
        self.has_tiers = len(manager.tiers) > 0
        self.uses = RecentUses()
        self.accounts = MissAccounts(trace, num_blocks, manager.first_block_id)
        manager._watch_blocks(self.accounts.note_taken, self.accounts.note_touched)  # noqa: SLF001  # a hook for us
        self._sessions: list[int] = trace.sessions.tolist()
        self._names = trace.session_names
        self._running: dict[int, Sequence] = {}

    def set_time(self, now: float) -> None:
        """Set the clock."""
        self.manager.now = now

    def levels(self) -> tuple[int, int]:
        """Return how many blocks have owners, and how many are cached. O(1)."""
        stats = self.manager.stats
        return stats.num_blocks - stats.num_free_blocks, stats.num_cached_blocks

    def counts(self) -> tuple[int, int]:
        """Return how many blocks were evicted and how often the policy failed. O(1)."""
        stats = self.manager.stats
        return stats.num_evicted_blocks, stats.num_eviction_failures

    def take(self, request: int, path: Numbers, salt: str | None, now: float) -> tuple[int, int] | None:
        """Give a request its blocks. Returns how many were found on the device and how many in a tier.

        Returns None, with nothing changed, if there are too few. O(blocks).
        """
        session, manager = self._sessions[request], self.manager
        named = None if self._names[session] is None else session
        sequence = Sequence(request, path, salt=salt, session=named)
        hit = manager.get_computed_blocks(sequence)
        found: int | None = 0
        if self.has_tiers:
            found = self.load(sequence, hit, now)
        elif manager.allocate_slots(sequence, hit=hit) is None:
            found = None
        if found is None:
            return None
        self.accounts.note_admitted(path, (len(hit.blocks), found), sequence.block_ids, session, now)
        self._running[request] = sequence
        return len(hit.blocks), found

    def free(self, request: int) -> None:
        """Take a request's blocks back. O(blocks)."""
        self.manager.free(self._running.pop(request))
        self.move()

    def pause(self, session: int, salt: str | None, reason: str) -> None:
        """Note that a session pauses. O(1), without the policy's cost."""
        self.manager.sessions.pause(session, reason, salt)

    def end(self, session: int, salt: str | None) -> None:
        """Note that a session has ended. O(1), without the policy's cost."""
        self.manager.sessions.end(session, salt)

    def cut(self, path: Numbers, salt: str | None) -> Numbers:
        """Return the leading blocks of a prompt for which there is room now, perhaps none."""
        sequence = Sequence(-1, path, salt=salt)
        hit = self.manager.get_computed_blocks(sequence)
        num_missing = self.manager.get_num_blocks_to_allocate(sequence, len(path), hit=hit)
        num_left_out = max(0, num_missing - self.manager.num_free_blocks)
        return path[: len(path) - num_left_out] if num_left_out else path

    def load(self, sequence: Sequence, hit: Any, now: float) -> int | None:
        """Make room for a sequence in a manager with a tier, and load what the tier has.

        Returns the number of loaded blocks.
        """
        manager = self.manager
        if manager.get_num_blocks_to_allocate(sequence, sequence.num_tokens, hit=hit) > manager.num_free_blocks:
            return None
        asked = memoryview(sequence.tokens)[
            :-1
        ].tolist()  # the last token is always computed: its block isn't asked for
        is_at_hand = len(hit.blocks) >= len(asked)
        if self.store is not None and not is_at_hand:
            manager.tiers.note_found(STORE, sequence, self.store.num_found(asked, sequence.salt))
        loads = manager.tiers.find(hit)
        if manager.tiers.allocate(sequence, hit, loads, 0 if loads else None) is None:
            return None
        if self.store is not None and asked and is_at_hand:
            self.tell_store(self.store, sequence, asked, now)
        self.move()
        if sequence.num_computed_tokens < sequence.num_tokens and manager.allocate_slots(sequence) is None:
            raise AssertionError(f"{sequence}: there was room for it, and now {manager.last_refusal}")
        return sum(load.num_tokens for load in loads)

    def tell_store(self, store: SharedBlocks, sequence: Sequence, asked: list[int], now: float) -> None:
        """Tell the store that blocks on the device are used, as a server does, and learn which ones it has lost."""
        if self.uses.is_due((sequence.salt, *asked), now):
            num_found = store.num_found(asked, sequence.salt)
            if num_found < len(asked):
                self.manager.tiers.note_found(STORE, sequence, num_found)

    def move(self) -> None:
        """Carry out all transfers at once."""
        if self.has_tiers:
            tiers = self.manager.tiers
            while True:
                for transfer in tiers.take_transfers():
                    if self.store is not None and not transfer.is_load:
                        prefix, first = transfer.prefix, transfer.position
                        self.store.add(prefix.token_view()[first : first + len(transfer.slots)].tolist(), prefix.salt)
                    tiers.complete(transfer, ok=True)
                if not tiers.is_busy:
                    return

    def drop(self, blocks: Numbers) -> None:
        """Drop those of these blocks of the trace that nobody holds."""
        dropped = self.accounts.place(blocks)
        first = self.manager.first_block_id
        free = [block_id for block_id in dropped if not self.manager.blocks[block_id - first].ref_cnt]
        if free:
            self.manager.evict_blocks(free)
            self.accounts.note_dropped(free)


class ArrayRunPool:
    """An `ArrayPool` with the methods of `ManagerPool` except `drop`. Use it only if `run.can_use_arrays` allows it."""

    def __init__(self, trace: Trace, num_blocks: int, eviction: Any) -> None:
        """eviction: of `run.POLICIES`."""
        num_unique = trace.num_unique_blocks
        self._pool = make_array_pool(num_blocks, num_unique, eviction)
        self.accounts = MissAccounts(trace, num_unique, 0)  # a block's number is its place
        self._num_blocks = num_blocks
        self._sessions: list[int] = trace.sessions.tolist()
        self._names = trace.session_names
        self._running: dict[int, tuple[Any, int | None, str | None]] = {}

    def set_time(self, now: float) -> None:
        """As `ManagerPool.set_time`."""
        self._pool.set_time(now)

    def levels(self) -> tuple[int, int]:
        """As `ManagerPool.levels`."""
        return self._num_blocks - self._pool.num_free_blocks, self._pool.num_cached_blocks

    def counts(self) -> tuple[int, int]:
        """As `ManagerPool.counts`."""
        return self._pool.num_evicted_blocks, self._pool.num_policy_failures

    def cut(self, path: Numbers, salt: str | None) -> Numbers:  # noqa: ARG002
        """As `ManagerPool.cut`."""
        own = path.astype(np.intp)
        num_missing = self._pool.num_missing(own, self._pool.find(own))
        num_left_out = max(0, num_missing - self._pool.num_free_blocks)
        return path[: len(path) - num_left_out] if num_left_out else path

    def take(self, request: int, path: Numbers, salt: str | None, now: float) -> tuple[int, int] | None:
        """As `ManagerPool.take`."""
        session = self._sessions[request]
        named = None if self._names[session] is None else session
        own = path.astype(np.intp)
        num_hit = self._pool.find(own)
        evicted = self._pool.take(own, num_hit, named, salt)
        if evicted is None:
            return None
        self.accounts.note_evicted(evicted)
        self.accounts.note_admitted(own, (num_hit, 0), own, session, now)
        self._running[request] = own, named, salt
        return num_hit, 0

    def free(self, request: int) -> None:
        """As `ManagerPool.free`."""
        self._pool.release(*self._running.pop(request))

    def pause(self, session: int, salt: str | None, reason: str) -> None:
        """As `ManagerPool.pause`."""
        self._pool.pause(session, salt, reason)

    def end(self, session: int, salt: str | None) -> None:
        """As `ManagerPool.end`."""
        self._pool.end(session, salt)


def make_array_pool(num_blocks: int, num_unique: int, eviction: Any) -> ArrayPool:
    """Make a pool with an eviction policy; None: LRU."""
    return ArrayPool(num_blocks, num_unique) if eviction is None else AdvisedPool(num_blocks, num_unique, eviction)


def has_own_blocks(trace: Trace) -> bool:
    """Return whether no two tenants share a block number, so that each number stands for one block of a cache."""
    if len({*trace.tenants}) < 2:
        return True
    names = {tenant: number for number, tenant in enumerate(dict.fromkeys(trace.tenants))}
    by_session = np.array([names[tenant] for tenant in trace.tenants])
    tenants = np.repeat(by_session[trace.sessions], np.diff(trace.ends))
    owner = np.zeros(trace.num_unique_blocks, np.int64)
    owner[trace.blocks] = tenants
    return bool((owner[trace.blocks] == tenants).all())
