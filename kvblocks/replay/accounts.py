"""What a replay counts: hits, causes of misses, waits, and the state over time.

Everything here only observes. NumPy handles all blocks of a request at once, since a replay has millions of blocks.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvblocks import KVCacheBlock
from kvblocks.replay.result import Bucket, Misses, Moment, Waits
from kvblocks.replay.trace import Numbers, Trace

MAX_MOMENTS = 120
AGES = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""The upper limits, in seconds, of the bars of `Misses.ages`. One more bar has the rest."""

_NEW, _CACHED, _EVICTED, _REFUSED = 0, 1, 2, 3  # what became of a block of the trace so far


class MissAccounts:
    """Tracks where each block of the trace is, and who evicted it when, to find the cause of each miss."""

    def __init__(self, trace: Trace, num_blocks: int, first_block_id: int) -> None:
        num_unique = trace.num_unique_blocks
        self._content = np.full(num_blocks, -1, np.int64)  # by block of the pool: the block of the trace that it holds
        self._first_id = first_block_id
        # By block of the trace: the block of the pool where it was cached last; -1: none. One more entry, always -1,
        # stands for no block.
        self._place = np.full(num_unique + 1, -1, np.int64)
        self._fate = np.zeros(num_unique, np.int8)
        self._was_hit = np.zeros(num_unique, bool)  # since it was cached last
        self._evicted_at = np.zeros(num_unique)
        self._evictor = np.zeros(num_unique, np.int64)  # number of a session
        tenants = {tenant: number for number, tenant in enumerate(dict.fromkeys(trace.tenants))}
        self._tenants = np.array([tenants[tenant] for tenant in trace.tenants])
        self._counts = dict.fromkeys(("first", "own", "other", "tenant", "dropped", "refused", "window"), 0)
        self._ages = np.zeros(len(AGES) + 1, np.int64)
        self._taken: list[int] = []

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """Remember blocks that were taken from the pool, until `note_admitted`. A hook of the manager."""
        self._taken += [block.block_id for block in blocks]

    def note_evicted(self, block_ids: Numbers) -> None:
        """As `note_taken`, for blocks that held something, by their ids."""
        self._taken += block_ids.tolist()

    def note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        """Do nothing: hits are counted when their request is admitted."""

    def note_admitted(
        self, path: Numbers, found: tuple[int, int], table: Items[int] | Numbers, session: int, now: float
    ) -> None:
        """Count a request. path: its blocks. table: where they are now. found: how many were hit and how many loaded.

        O(blocks), by NumPy.
        """
        num_hit, num_loaded = found
        if num_hit + num_loaded < len(path):
            self._count_misses(path[num_hit + num_loaded :], session, now)
        fresh = path[num_hit:]
        self._was_hit[path[:num_hit]] = True
        if self._taken:
            taken = np.array(self._taken, np.int64) - self._first_id
            self._taken.clear()
            lost = self._content[taken]
            lost = lost[self._place[lost] == taken]
            self._fate[lost] = _EVICTED
            self._place[lost] = -1
            self._evicted_at[lost] = now
            self._evictor[lost] = session
            self._content[taken] = -1
        if len(fresh):
            places = np.array(table[num_hit:], np.int64) - self._first_id
            self._content[places] = fresh
            self._place[fresh] = places
            self._fate[fresh] = _CACHED
            self._was_hit[fresh] = False

    def note_refused(self, path: Numbers) -> None:
        """Count a request that is larger than the pool. O(blocks), by NumPy."""
        self._counts["refused"] += len(path)
        self._fate[path[self._fate[path] == _NEW]] = _REFUSED

    def note_dropped(self, block_ids: list[int]) -> None:
        """Note that these blocks of the pool no longer hold anything."""
        places = np.array(block_ids, np.int64) - self._first_id
        self._place[self._content[places]] = -1
        self._content[places] = -1

    def place(self, path: Numbers) -> list[int]:
        """Return the ids of the pool's blocks that hold these blocks of the trace, as far as they are cached."""
        places = self._place[path]
        found: list[int] = (places[places >= 0] + self._first_id).tolist()
        return found

    def num_used_blocks(self) -> int:
        """Return how many cached blocks have been hit since they were cached. O(pool), by NumPy."""
        return int(self._was_hit[self._content[self._content >= 0]].sum())

    def misses(self) -> Misses:
        """Return the misses by cause."""
        counts = self._counts
        ages = [Bucket(upto, int(count)) for upto, count in zip((*AGES, None), self._ages, strict=True)]
        return Misses(
            first_time=counts["first"],
            own_session=counts["own"],
            other_session=counts["other"],
            other_tenant=counts["tenant"],
            dropped=counts["dropped"],
            refused=counts["refused"],
            window=counts["window"],
            ages=ages,
        )

    def _count_misses(self, missed: Numbers, session: int, now: float) -> None:
        counts, fates = self._counts, self._fate[missed]
        num_new, cached, _, num_refused = np.bincount(fates, minlength=4).tolist()
        counts["first"] += num_new
        counts["refused"] += num_refused
        still = int((self._place[missed[fates == _CACHED]] >= 0).sum()) if cached else 0
        counts["window"] += still
        counts["dropped"] += cached - still
        evicted = missed[fates == _EVICTED]
        if len(evicted):
            evictors = self._evictor[evicted]
            own = int((evictors == session).sum())
            foreign = int((self._tenants[evictors] != self._tenants[session]).sum())
            counts["own"] += own
            counts["tenant"] += foreign
            counts["other"] += len(evicted) - own - foreign
            bars = np.searchsorted(AGES, now - self._evicted_at[evicted])
            self._ages += np.bincount(bars, minlength=len(AGES) + 1)


@dataclass(slots=True)
class State:
    """The state of a run at a moment. blocks: how many are held, cached and used, as in `Moment`."""

    live_sessions: int
    running_requests: int
    waiting_requests: int
    held_blocks: int
    cached_blocks: int
    used_blocks: int


class Timeline:
    """The run over time, in at most MAX_MOMENTS buckets. When there would be more, pairs of buckets are merged."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        """begin_s, end_s: when the run begins, and roughly when it ends."""
        self._begin = begin_s
        self._width = max((end_s - begin_s) / (MAX_MOMENTS - 20), 1e-3)
        self._moments: list[Moment] = []
        self._references = self._hits = 0
        self.next_s = begin_s + self._width

    def add(self, num_references: int, num_hits: int) -> None:
        """Count a request. O(1)."""
        self._references += num_references
        self._hits += num_hits

    def note(self, state: State, now: float) -> None:
        """Note the state for each bucket that ends before `now`, since it lasts until then."""
        while self.next_s < now:
            self._append(state, self.next_s)
            if len(self._moments) == MAX_MOMENTS:
                self._halve()
            self.next_s = self._begin + self._width * (len(self._moments) + 1)

    def end(self, state: State, now: float) -> list[Moment]:
        """Return all buckets, the last of which ends at `now`."""
        self.note(state, now)
        self._append(state, now)
        return self._moments

    def _append(self, state: State, time_s: float) -> None:
        self._moments.append(
            Moment(
                time_s=time_s,
                live_sessions=state.live_sessions,
                running_requests=state.running_requests,
                waiting_requests=state.waiting_requests,
                held_blocks=state.held_blocks,
                cached_blocks=state.cached_blocks,
                used_blocks=state.used_blocks,
                references=self._references,
                hits=self._hits,
            )
        )
        self._references = self._hits = 0

    def _halve(self) -> None:
        fields = Moment.__slots__
        joined: list[Moment] = []
        for one, other in zip(self._moments[::2], self._moments[1::2], strict=True):
            values: dict[str, Any] = {name: getattr(other, name) for name in fields}
            values["references"] += one.references
            values["hits"] += one.hits
            joined.append(Moment(**values))
        self._moments = joined
        self._width *= 2


def count_waits(waits_s: list[float], num_refused: int) -> Waits:
    """Summarize the waits of all requests that ran."""
    if not waits_s:
        return Waits(0, 0.0, 0.0, 0.0, num_refused)
    waits = np.array(waits_s)
    p99 = float(np.quantile(waits, 0.99, method="higher"))
    return Waits(int((waits > 0).sum()), float(waits.mean()), p99, float(waits.max()), num_refused)
