"""The runs of cached blocks that there are, and how blocks stop being cached.

The removing half of the prefix index; `prefix_index` has the finding and the adding half, and the reasons. A block
leaves the cache because it is about to be reused (`evict`), because its KV was never written (`forget`) or with
everything else (`clear`). What is chained to a prefix that goes, goes too.

Invariants: `blocks` of a run are its positions 0..n-1 with no gap; a block's `run` and `index` lead to a position whose
`blocks` entry or `duplicates` hold it; every run of the current epoch that has blocks is under its key in the map.
"""

from collections import OrderedDict

from kvblocks.core.block import KVCacheBlock, Run, RunKey
from kvblocks.core.epoch import Epoch
from kvblocks.core.hashing import HashFunction
from kvblocks.errors import InvalidArgumentError
from kvblocks.events import AllBlocksCleared, BlockRemoved, CacheEvent
from kvblocks.observe.removal_history import RemovalCause, RemovalHistory
from kvblocks.retention.quotas import TenantQuotas

MapKey = RunKey | bytes
"""What a run stands under in the map: its key, or the tokens alone where that is all there is to it.

Most lookups begin at the root and without extra keys, and bytes are found in two thirds of the time.
"""


MANY_DUPLICATES = 16
"""A dict searches for its first key past all that went before it; with more duplicates, that is felt."""


def map_key(key: RunKey) -> MapKey:
    """Return what a run with this key stands under. O(1)."""
    parent, _, tokens, extra_keys = key
    return tokens if parent is None and extra_keys is None else key


class CachedRuns:
    """The runs of blocks of `block_size` tokens, by their keys.

    version: goes up whenever a block stops being cached; while it stands still, every earlier match holds.
    num_cached_blocks: blocks that hold a cached prefix, duplicates included. detached: blocks that stopped being cached
    though nobody took them and nothing was reset, for the pool to requeue. events: since last taken; None: not
    recorded. history: of what is cached no more; None: not kept. needs_digests: whether either is on, so that digests
    are computed as blocks are cached. quotas: of tenants; None: there are none.
    """

    def __init__(self, block_size: int, hash_function: HashFunction, *, enable_events: bool = False) -> None:
        self.block_size = block_size
        self._block_bytes = 4 * block_size
        self._runs: dict[MapKey, Run] = {}
        self.epoch = Epoch(hash_function, self._block_bytes, len(hash_function(b"")))
        self.version = 0
        self.num_cached_blocks = 0
        self.detached: list[KVCacheBlock] = []
        self.events: list[CacheEvent] | None = [] if enable_events else None
        self.history: RemovalHistory | None = None
        self.needs_digests = enable_events
        self.quotas: TenantQuotas | None = None

    def keep_history(self, history: RemovalHistory) -> None:
        """Remember what is cached no more, from now on; nothing may be cached yet."""
        self.history = history
        self.needs_digests = True

    @property
    def num_runs(self) -> int:
        """Runs in the map. O(1)."""
        return len(self._runs)

    def runs(self) -> list[Run]:
        """Return the runs in the map, parents before their children. O(runs)."""
        return list(self._runs.values())

    def evict(self, blocks: list[KVCacheBlock]) -> int:
        """Forget those of `blocks` that are cached, in order; they are about to be reused. Returns how many were.

        A prefix stays cached while a duplicate holds it; one that goes takes everything chained to it along. O(blocks),
        plus what was chained.
        """
        num_cached_before = self.num_cached_blocks
        removed: list[bytes] = []
        i = 0
        while i < len(blocks):
            run = blocks[i].run
            i += 1 if run is None else self._evict_stretch(run, blocks, i, removed)
        if self.num_cached_blocks != num_cached_before:
            self._note_removal(removed, "evicted")
        return num_cached_before - self.num_cached_blocks

    def evict_one(self, block: KVCacheBlock) -> int:
        """`evict` of one block; the short way for the last of several in its run, where nothing else hangs. O(1)."""
        run = block.run
        if run is None or self.needs_digests or run.duplicates or run.children or not run.pops(block):
            return self.evict([block])
        self.num_cached_blocks -= 1
        if run.tenant is not None:
            run.tenant.add(-1)
        self.version += 1
        return 1

    def forget(self, block: KVCacheBlock) -> None:
        """Stop caching the prefix that `block` holds through this block; a duplicate takes its place when there is one.

        With the last block that holds a prefix goes everything chained to it. Does nothing to a block that isn't
        cached. O(what was chained).
        """
        if block.run is not None:
            removed: list[bytes] = []
            if block.is_cached:
                self.detached.append(block)
            self._forget(block, block.run, removed)
            self._note_removal(removed, "aborted")

    def clear(self) -> None:
        """Stop caching everything. No earlier node is cached any more.

        O(1) but for giving memory back; with a history, O(cached blocks), to remember them.
        """
        if self.history is not None:
            for run in self._runs.values():
                self.history.record([run.digest(index) for index in range(len(run.blocks))], "reset")
        ended = self.epoch
        ended.is_current = False
        self.epoch = Epoch(ended.hash_function, ended.block_bytes, ended.num_digest_bytes)
        self._runs = {}
        self.version += 1
        self.num_cached_blocks = 0
        if self.quotas is not None:
            self.quotas.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())

    def check_events(self) -> None:
        """Raise InvalidArgumentError unless changes are recorded."""
        if self.events is None:
            raise InvalidArgumentError("take_events: expected enable_events=True when the manager was made, got False")

    def take_events(self) -> list[CacheEvent]:
        """Return the records since the last call, oldest first, and forget them."""
        assert self.events is not None
        events, self.events = self.events, []
        return events

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants hold. O(cached blocks)."""
        num_cached = self._check_runs()
        assert num_cached == self.num_cached_blocks, f"index: {num_cached} cached, {self.num_cached_blocks} counted"

    def _check_runs(self) -> int:
        """Check the runs; returns how many blocks they hold, duplicates included."""
        num_cached = 0
        for key, run in self._runs.items():
            is_live = run.epoch is self.epoch and run.blocks
            assert map_key(run.key) == key and is_live, f"{run}: not a live run under its key"
            parent, position, _, _ = run.key
            if parent is not None:
                assert self._runs.get(map_key(parent.key)) is parent, f"{run}: its parent isn't in the map"
            assert parent is None or run in parent.children_from(position), f"{run}: its parent doesn't know it"
            for child in run.children_from(0):
                assert self._runs.get(map_key(child.key)) is child, f"{run}: a child isn't in the map"
            num_cached += run.check()
        return num_cached

    def _evict_stretch(self, run: Run, blocks: list[KVCacheBlock], i: int, removed: list[bytes]) -> int:
        """Evict blocks[i], and with it those that follow it as they stood in its run. Returns how many blocks."""
        block, end = blocks[i], blocks[i].index + 1
        count = 0
        if run.epoch.is_current and end == len(run.blocks) and run.blocks[-1] is block:
            count = len(blocks) - i
            if count > end:  # noqa: PLR1730  # min() costs three times as much
                count = end
            # Freeing queues a sequence's blocks last first, so the queue mostly holds a run's last first as well.
            if run.duplicates:
                count = run.num_backwards(blocks, i)
            elif (
                blocks[i + count - 1] is not run.blocks[end - count]
                or blocks[i : i + count] != run.blocks[end - count :][::-1]
            ):
                count = 1  # `num_backwards`, without the call: those whose queue is mixed come here each time
                while blocks[i + count] is run.blocks[end - 1 - count]:  # ends at the latest where the slices differ
                    count += 1
        if not count:
            self._forget(block, run, removed)
            return 1
        self._cut(run, end - count, removed)
        return count

    def _forget(self, block: KVCacheBlock, run: Run, removed: list[bytes]) -> None:
        if not run.epoch.is_current:
            block.run = None  # the cache was reset
            run.retire()
            return
        duplicates = run.duplicates.get(block.index) if run.duplicates else None
        if not duplicates or not run.duplicates:
            self.detached += [below for below in self._cut(run, block.index, removed) if below is not block]
            return
        if run.blocks[block.index] is block:
            if len(duplicates) > MANY_DUPLICATES and type(duplicates) is dict:
                duplicates = run.duplicates[block.index] = OrderedDict(duplicates)
            heir = next(iter(duplicates))
            run.blocks[block.index] = heir
            del duplicates[heir]
        else:
            del duplicates[block]
        if not duplicates:
            del run.duplicates[block.index]
        block.run = None
        self._count(run, -1)

    def _cut(self, run: Run, position: int, removed: list[bytes]) -> list[KVCacheBlock]:
        """Forget `run` from `position` on, after everything that is chained to that. Returns the run's own blocks."""
        if not run.children and not self.needs_digests:
            return self._cut_end(run, position)
        chain = [(run, position)]
        for above, start in chain:  # grows while it is walked: parents before children
            chain += [(child, 0) for child in above.children_from(start)]
        dropped: list[KVCacheBlock] = []
        for below, start in reversed(chain):
            if self.needs_digests:
                removed += [below.digest(index) for index in range(len(below.blocks) - 1, start - 1, -1)]
            self.detached += dropped
            dropped = self._cut_end(below, start)
        return dropped

    def _cut_end(self, run: Run, position: int) -> list[KVCacheBlock]:
        """Forget `run` from `position` on, which nothing follows. Returns its blocks from there, duplicates too."""
        dropped = run.cut(position)
        num_blocks = len(dropped)
        self.num_cached_blocks -= num_blocks  # `_count`, without the call: evicting short prefixes comes here each time
        if run.tenant is not None:
            run.tenant.add(-num_blocks)
        if position == 0:
            del self._runs[map_key(run.key)]
            if run.key[0] is not None:
                self._leave_parent(run)
        return dropped

    def _leave_parent(self, run: Run) -> None:
        parent, position, _, _ = run.key
        if parent is not None and parent.children:
            siblings = parent.children[position]
            del siblings[run]
            if not siblings:
                del parent.children[position]

    def _count(self, run: Run, num_blocks: int) -> None:
        self.num_cached_blocks += num_blocks
        if run.tenant is not None:
            run.tenant.add(num_blocks)

    def _note_removal(self, removed: list[bytes], cause: RemovalCause) -> None:
        self.version += 1
        if removed and self.events is not None:
            self.events.append(BlockRemoved(tuple(removed)))
        if removed and self.history is not None:
            self.history.record(removed, cause)
