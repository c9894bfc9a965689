"""`AdvisedPool`: an `ArrayPool` with an eviction policy, which gets the same calls as from `retention.eviction`."""

from collections.abc import Hashable, Iterable
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from kvblocks import FreeBlock
from kvblocks.replay.arrays.advice import ArrayAdvice
from kvblocks.replay.arrays.pool import ArrayPool
from kvblocks.replay.arrays.released import Blocks
from kvblocks.replay.arrays.tree import CachedTree
from kvblocks.retention.policies import MAX_SESSIONS

_UNKNOWN, _SEVERAL = -1, -2
_new_record: Any = partial(tuple.__new__, FreeBlock)  # takes a third of the time of FreeBlock(...)


class AdvisedPool(ArrayPool):
    """A pool whose victims are named by a policy."""

    def __init__(self, num_blocks: int, num_unique: int, eviction: Any) -> None:
        """eviction: a name, or what makes a policy."""
        super().__init__(num_blocks, num_unique)
        self._advice = ArrayAdvice(eviction, num_blocks, self._released.number_of)
        self._tree = CachedTree(num_unique)
        self._hits = np.zeros(num_unique, np.int64)
        # By block, who gave it back since it was cached: a number of `_names`, or _SEVERAL, which `_givers` has.
        self._giver = np.full(num_unique, _UNKNOWN, np.int64)
        self._givers: dict[int, tuple[Hashable, ...]] = {}
        self._numbers: dict[Hashable, int] = {}  # of sessions
        self._names: list[Hashable] = []

    def set_time(self, now: float) -> None:
        """Set the clock that policies see."""
        self._advice.view.now = now

    def pause(self, session: Hashable, tenant: str | None, reason: str) -> None:
        """Note that a session pauses, as `manager.sessions.pause` does."""
        self._advice.tell("pause", session, tenant, reason)
        self.num_policy_failures = self._advice.num_failures

    def end(self, session: Hashable, tenant: str | None) -> None:
        """Note that a session has ended, as `manager.sessions.end` does."""
        self._advice.tell("end", session, tenant)
        self.num_policy_failures = self._advice.num_failures

    def _begin(self, session: Hashable, tenant: str | None) -> None:
        if session is not None:
            self._advice.tell("begin", session, tenant)

    def _use(self, blocks: Blocks) -> None:
        self._advice.tell("use", blocks.tolist())
        self._released.forget(blocks)

    def _evict(self, number: int) -> Blocks:
        found: list[int] = []
        numbers, tree, advice = self._released.number_of, self._tree, self._advice
        while len(found) < number:
            missing = number - len(found)
            victim = advice.ask(missing)
            if victim is None:
                victim, missing = self._oldest(), 1
            if tree.has_below(victim):
                blocks = tree.below(victim, missing, numbers)
                gone = np.array(blocks, np.intp)
                self._is_cached[gone] = 0
                advice.tell_removed(blocks[:])
                self._released.forget(gone)
                tree.remove(gone, self._is_cached)
                found += blocks
            else:  # without NumPy, which takes several times as long for one block
                advice.tell_removed([victim])
                numbers[victim] = 0
                tree.remove_one(victim)
                found.append(victim)
        self.num_policy_failures = advice.num_failures
        evicted = np.array(found, np.intp)
        self._is_cached[evicted] = 0
        self._hits[evicted] = 0
        if self._givers:
            for block in evicted[self._giver[evicted] == _SEVERAL].tolist():
                del self._givers[block]
        self._giver[evicted] = _UNKNOWN
        return evicted

    def _oldest(self) -> int:
        """Return the least recently used free block. O(blocks of the trace), by NumPy."""
        numbers = self._released.numbers
        return int(np.where(numbers > 0, numbers, np.iinfo(np.int64).max).argmin())

    def _cache(self, path: Blocks, first: int) -> None:
        super()._cache(path, first)
        self._tree.add(path, first)

    def _note_hit(self, blocks: Blocks) -> None:
        self._hits[blocks] += 1

    def _note_released(self, path: Blocks, num_owned: int, session: Hashable, tenant: str | None) -> None:
        self._note_giver(path, session)
        freed = path[num_owned:][::-1]
        if not len(freed):
            return
        self._released.add(freed)
        others: Iterable[tuple[Hashable, ...]] = repeat(())
        if self._givers:
            known = self._givers
            if (self._giver[freed] == _SEVERAL).any():
                others = [known[block][:-1] if block in known else () for block in freed.tolist()]
        depths = range(len(path) - 1, num_owned - 1, -1)
        fields = zip(freed.tolist(), depths, repeat(tenant), repeat(session), self._hits[freed].tolist(), others)
        self._advice.tell("free", [*map(_new_record, fields)])
        self.num_policy_failures = self._advice.num_failures

    def _note_giver(self, path: Blocks, session: Hashable) -> None:
        """Note which session gave blocks back: for each the last MAX_SESSIONS, the latest last. O(blocks)."""
        own = self._numbers.setdefault(session, len(self._names))
        if own == len(self._names):
            self._names.append(session)
        givers = self._giver[path]
        new = givers == _UNKNOWN
        if new.any():
            self._giver[path[new]] = own
        shared = path[~(new | (givers == own))]
        if not len(shared):
            return
        for block in shared.tolist():
            before = self._givers.get(block)
            if before is None:
                before = (self._names[int(self._giver[block])],)
            others = [other for other in before if other != session]
            if others:
                self._givers[block] = (*others[1 - MAX_SESSIONS :], session)
                self._giver[block] = _SEVERAL
            else:
                self._givers.pop(block, None)
                self._giver[block] = own
