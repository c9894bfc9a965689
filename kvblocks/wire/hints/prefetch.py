"""Prefetches: a tier's blocks of a prefix come to the device before the request that wants them.

Each prefetch is a sequence of the manager that holds what it hits and loads. It takes part in no step, and is freed
when its loads have ended. What arrived is then cached as most recently used. All prefetches together hold at most a
share of the pool, and each leaves a share of it free, so they don't block requests for long, and pins give up nothing
for them. Unless they may evict, they take only blocks that hold nothing. Where layers keep a state, each takes a slot
while it lasts, but never the last free one.
"""

from bisect import bisect_right
from dataclasses import dataclass

from kvblocks import CacheHit, KVCacheManager, RecurrentState, Sequence, TierHit
from kvblocks.wire.hints.limits import HintLimits
from kvblocks.wire.hints.prefix import NamedPrefix


class LoadId:
    """The id of a sequence that only loads. It is equal to no other id."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "a prefetch"


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A load in progress.

    num_held_blocks: how many blocks it counts towards the limit on all loads. num_expected_tokens: how many tokens of
    the prefix are there if everything arrives.
    """

    sequence: Sequence
    num_held_blocks: int
    num_cached_tokens: int
    num_expected_tokens: int


@dataclass(frozen=True, slots=True)
class Begun:
    """What was found of a prefix, in blocks.

    - num_cached: those on the device.
    - num_loading: those that are now being loaded.
    - num_found: those on the device and in tiers, even without room for them.
    - load: None if there is nothing to load.
    """

    num_cached: int
    num_loading: int
    num_found: int
    load: Load | None = None


class Prefetches:
    """The prefetches of a manager.

    loads: those in progress, oldest first. num_changes: how many have begun or ended. After each of these, other blocks
    may be cached on the device.
    """

    def __init__(self, manager: KVCacheManager, limits: HintLimits) -> None:
        self._manager = manager
        self._may_evict = limits.may_evict
        self._max_blocks = int(manager.num_blocks * limits.max_prefetch_share)
        self._num_reserved = int(manager.num_blocks * limits.reserved_share)
        self._num_held = 0
        self._state = next((group for group in manager.groups if isinstance(group, RecurrentState)), None)
        self.loads: dict[Load, None] = {}
        self.num_loaded_blocks = self.num_failed = self.num_changes = 0

    def begin(self, prefix: NamedPrefix) -> Begun | None:
        """Begin to load what tiers have of a prefix after what the device has. None: that isn't possible now.

        It isn't possible while somebody else brings or computes it, or when there is no room for any of it. O(blocks +
        tiers).
        """
        hit, loads = self._look(prefix, prefix.num_blocks)
        if hit.pending_tokens or (self._state is not None and self._manager.states.num_free_slots < 2):
            return None
        size, start = self._manager.block_size, hit.num_readonly_tokens
        found = _end(loads, start)
        if found == start:
            return Begun(start // size, 0, found // size)
        end = self._fitting_end(hit, found)
        if end <= start:
            return None
        if end < found:
            hit, loads = self._look(prefix, end // size)
            if not start < _end(loads, start) <= end:  # a window's blocks are missing there, or the end is too far
                return None
            end = _end(loads, start)
        num_held = self._num_free(hit) + self._num_new_blocks(start, end)
        self.num_changes += 1
        if self._manager.tiers.allocate(hit.sequence, hit, loads) is None:
            return None
        load = Load(hit.sequence, num_held, start, end)
        self.loads[load] = None
        self._num_held += num_held
        return Begun(start // size, (end - start) // size, found // size, load)

    def end_finished(self) -> list[Load]:
        """Free the sequences whose loads have ended, and return these loads. O(loads)."""
        is_loading = self._manager.tiers.is_loading
        finished = [load for load in self.loads if not is_loading(load.sequence)]
        for load in finished:
            arrived = load.sequence.num_computed_tokens
            self.num_loaded_blocks += max(0, arrived - load.num_cached_tokens) // self._manager.block_size
            self.num_failed += arrived < load.num_expected_tokens
            self.end(load)
        return finished

    def end(self, load: Load) -> None:
        """Free a load's sequence, finished or not. A transfer that has begun keeps its blocks until it is answered."""
        del self.loads[load]
        self.num_changes += 1
        self._num_held -= load.num_held_blocks
        self._manager.free(load.sequence)

    def _look(self, prefix: NamedPrefix, num_blocks: int) -> tuple[CacheHit, list[TierHit]]:
        """Return what the device and the tiers have of the first blocks of a prefix."""
        sequence = prefix.sequence(LoadId(), num_blocks)
        hit = self._manager.get_computed_blocks(sequence, num_blocks * self._manager.block_size)
        return hit, self._manager.tiers.find(hit)

    def _fitting_end(self, hit: CacheHit, found: int) -> int:
        """Return the token up to which there is room: `found`, a multiple of the alignment, or the hit's end."""
        manager, start = self._manager, hit.num_readonly_tokens
        num_wanted = self._num_new_blocks(start, found)
        most = min(self._max_blocks - self._num_held, manager.num_free_blocks - self._num_reserved) - self._num_free(
            hit
        )
        if not self._may_evict and most > 0:
            most = min(most, manager.inspect.count_empty_blocks(num_wanted))
        if num_wanted <= most:
            return found
        ends = range(start, found, manager.alignment)
        return start + manager.alignment * max(
            0, bisect_right(ends, most, key=lambda end: self._num_new_blocks(start, end)) - 1
        )

    def _num_new_blocks(self, start: int, end: int) -> int:
        """Return the most blocks that loading tokens start to end - 1 takes. It never decreases as `end` grows.

        Layers that don't see everything take the blocks that the next token sees. Those may begin before `start` if the
        device lacks them. Layers that keep a state take those of a checkpoint.
        """
        if end == start:
            return 0
        number = 0 if self._state is None else self._state.checkpoint_blocks
        for group in self._manager.groups:
            number += group.num_blocks(end) - (start // group.block_size if group.sees_all else 0)
        return number

    def _num_free(self, hit: CacheHit) -> int:
        """Return how many blocks of a hit are free. A sequence that starts with the hit takes them all. O(blocks)."""
        tables = [hit.group_blocks(group) for group in range(len(self._manager.groups))]
        number = sum([block is not None and not block.ref_cnt for table in tables for block in table])
        own = self._manager.blocks
        first = self._manager.first_block_id
        return number + sum([not own[block_id - first].ref_cnt for block_id in hit.checkpoint_block_ids])


def _end(loads: list[TierHit], start: int) -> int:
    return loads[-1].first_token + loads[-1].num_tokens if loads else start
