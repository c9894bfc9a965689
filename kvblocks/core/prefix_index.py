"""The exact map from prefixes to the blocks that hold them.

A prefix is a chain of preimages: each block's tokens and extra keys under its parent. Blocks that were cached one after
the other form one `Run`. Only a run's first block has an entry in the map, keyed by its whole preimage. The other
blocks are found through the run, by comparing tokens. A lookup thus costs one dict lookup and one memcmp per run,
caching and evicting cost no dict operation per block, and no comparison ever trusts a hash.

Why a hit is never wrong. A node (run, position) means one prefix for as long as anything refers to it. A run that lost
blocks at its end is closed, so no position ever gets a second meaning. A key refers to its parent's `Run` object, so
that object isn't reused for another prefix. Therefore equal tokens and extra keys under the same node are the same
prefix, by induction from the root. A dict hashes its keys, but then compares them with ==: tokens and keys by their
bytes, a run by its identity. Hence no hash decides. `cache_full_blocks` makes sure that blocks are cached only below a
node that is cached itself.

A block stops being cached because it is about to be reused (`evict`), because its KV was never written or on request
(`forget`), or together with all others (`clear`). When a prefix stops being cached, so does everything chained to it.

Invariants: `blocks` of a run are its positions 0 to n - 1 with no gap; the `blocks` or the `duplicates` of a block's
`run` hold the block at its `index`; every run of the current epoch that has blocks is in the map under its key.

The map keyed by preimages, the runs and the closing rule are this project's; reusing blocks by hash chain is vLLM's.
"""

from array import array
from collections import OrderedDict

from kvblocks.core.attached import AttachedBlocks
from kvblocks.core.block import Epoch, KVCacheBlock, Node, Run, RunKey
from kvblocks.core.hooks import Accounts, Digests, EventLog, RemovalCause, Watcher
from kvblocks.core.layout import GroupLayout
from kvblocks.hashing.scheme import HashScheme

ExtraKeys = dict[int, bytes] | None

MapKey = RunKey | bytes
"""A run's key in the map: its `RunKey`, or only the tokens if it has no parent and no extra keys.

Most lookups begin at the root without extra keys, and a lookup of bytes takes only two thirds of the time.
"""


MANY_DUPLICATES = 16
"""Above this number, duplicates are in an OrderedDict: a dict's first key takes longer to find after deletions."""


def map_key(key: RunKey) -> MapKey:
    """Return the key under which the map has a run with this `RunKey`. O(1)."""
    parent, _, tokens, extra_keys = key
    return tokens if parent is None and extra_keys is None else key


class PrefixIndex:
    """Finds, adds and removes cached prefixes of blocks of `block_size` tokens."""

    def __init__(self, block_size: int, hash_scheme: HashScheme, layout: GroupLayout | None = None) -> None:
        """layout: of the manager's groups, if there are any beside the primary one; None: there are none."""
        self.block_size = block_size
        self._block_bytes = 4 * block_size
        self._runs: dict[MapKey, Run] = {}
        self.epoch = Epoch(hash_scheme, self._block_bytes)
        """What all runs since the last reset share."""
        self.version = 0
        """Increases whenever a block that a match may name stops being cached. While it stays the same, every earlier
        match is valid.
        """
        self.num_cached_blocks = 0
        """Blocks that hold a cached prefix, including duplicates and attached blocks."""
        self.num_duplicates = 0
        """The duplicates among them, which hits don't get."""
        self.detached: list[KVCacheBlock] = []
        """Blocks that stopped being cached although nobody took them and nothing was reset; the pool requeues them."""
        self.events: EventLog | None = None
        """Where changes are recorded; None: nowhere."""
        self.needs_digests = False
        """Whether events or a watcher need digests, which are then computed as blocks are cached."""
        self.watchers: tuple[Watcher, ...] = ()
        """Who is told what happens, in order."""
        self.needs_takers = False
        """Whether a watcher must know for which sequence blocks are taken."""
        self.accounts: Accounts | None = None
        """Who is charged; None: nobody."""
        self.attached = None if layout is None else AttachedBlocks(layout, self)
        """Blocks of other groups, and of checkpoints, that are attached to cached blocks; None: there are none."""

    def record(self, events: EventLog, hash_scheme: HashScheme) -> None:
        """Record in `events` what is cached and removed from now on, with digests of this scheme.

        Nothing may be cached yet.
        """
        self.events, self.needs_digests = events, True
        self.epoch = Epoch(hash_scheme, self._block_bytes)

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` what happens from now on. If it needs digests, nothing may be cached yet."""
        self.needs_digests = self.needs_digests or watcher.needs_digests
        self.needs_takers = self.needs_takers or watcher.needs_takers
        self.watchers = (*self.watchers, watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Remove a watcher. Does nothing if it isn't one."""
        self.watchers = tuple([other for other in self.watchers if other is not watcher])

    def runs(self) -> list[Run]:
        """Return the runs in the map, parents before their children. O(runs)."""
        return list(self._runs.values())

    def count_by_run(self) -> list[tuple[Run, int]]:
        """Return the runs, parents before children, each with its number of cached blocks, attached ones included.

        O(runs + attached blocks).
        """
        attached = self.attached
        if attached is None:
            return [(run, run.num_cached_blocks()) for run in self._runs.values()]
        return [(run, run.num_cached_blocks() + attached.num_in_run(run)) for run in self._runs.values()]

    def num_cached_by_group(self) -> list[int]:
        """Return how many blocks of each group are cached. O(1) for one group, otherwise O(attached blocks)."""
        return [self.num_cached_blocks] if self.attached is None else self.attached.num_cached_by_group()

    def match(self, tokens: "memoryview[int]", extra_keys: ExtraKeys, max_blocks: int) -> list[KVCacheBlock]:
        """Return the blocks of the longest cached prefix, at most `max_blocks`. Changes nothing.

        tokens: u32, not cast to bytes. extra_keys: encoded, by block. O(runs + tokens), where the tokens cost one
        memcmp and one slice of blocks per run.
        """
        size = self.block_size
        head = tokens[:size].tobytes()
        extra = None if extra_keys is None else extra_keys.get(0)
        run = self._runs.get(head if extra is None else (None, 0, head, extra))  # `map_key`, inlined
        if run is None:
            return []
        parts = False
        if extra_keys is None and run.extra_keys is None and len(run.blocks) >= max_blocks:
            # Fast path: one run holds the whole prompt.
            if run.tokens.startswith(tokens[: max_blocks * size]):
                return run.blocks[:max_blocks]
            parts = True
        packed, size = tokens.cast("B"), self._block_bytes
        blocks: list[KVCacheBlock] = []
        first = 0
        while run is not None:
            count = min(len(run.blocks), max_blocks - first)
            if parts or not run.tokens.startswith(packed[first * size : (first + count) * size]):
                count = run.num_equal_tokens(0, packed, first, count)
                parts = False
            if extra_keys is not None or run.extra_keys is not None:
                count = run.num_equal_keys(0, extra_keys, first, count)
            blocks += run.blocks[:count]
            first += count
            if first == max_blocks:
                break
            extra = None if extra_keys is None else extra_keys.get(first)
            run = self._runs.get((run, count - 1, packed[first * size : (first + 1) * size].tobytes(), extra))
        return blocks

    def digests(self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, first: int, end: int) -> bytearray:
        """Return the digests of a sequence's blocks first to end - 1, which come after the cached `node`.

        Called before `cache` when digests are needed, so that a hash function that raises does so before any change.
        Changes nothing, except that runs above keep the digests that this computes.
        """
        run, position = node
        parent_digest = b"" if run is None else run.digest(position)
        first_keys = None if extra_keys is None else extra_keys.get(0)
        return self.epoch.hash_scheme.chain(
            parent_digest, tokens, extra_keys, first_keys, self._block_bytes, range(first, end)
        )

    def cache_one(
        self, run: Run, parent: KVCacheBlock, block: KVCacheBlock, tokens: "array[int] | memoryview[int]"
    ) -> bool:
        """Cache one block without extra keys after `parent`, if `parent` is the last block of an open `run`.

        tokens: those of the block. Returns whether it was cached. This is the fast path for a decoded token, and only
        works while no digest is needed.
        """
        blocks = run.blocks
        if run.is_closed or run.epoch is not self.epoch or blocks[-1] is not parent:
            return False
        block.run = run
        block.index = len(blocks)
        blocks.append(block)
        run.tokens += tokens
        self.num_cached_blocks += 1
        if run.account is not None:
            run.account.add(1)
        return True

    def cache(
        self,
        node: Node,
        blocks: list[KVCacheBlock],
        tokens: memoryview,
        extra_keys: ExtraKeys,
        first: int,
        digests: Digests | None = None,
    ) -> None:
        """Cache `blocks`, a sequence's blocks from index `first` on, below the cached `node`.

        Blocks whose prefix is cached already become duplicates. The rest extend the node's run or form a new run.
        digests: those of the blocks, if `needs_digests`. O(blocks).
        """
        num_done = 0
        target, position = node
        while num_done < len(blocks) and (target is None or target.is_closed or position + 1 < len(target.blocks)):
            run, start, count = self._following(node, tokens, extra_keys, first + num_done, len(blocks) - num_done)
            if run is None:
                target = self._new_run(node, tokens, extra_keys, first + num_done)
                break
            self._add_duplicates(run, start, blocks[num_done : num_done + count])
            node = target, position = run, start + count - 1
            num_done += count
        if num_done == len(blocks) or target is None:
            return
        if num_done:
            blocks, first = blocks[num_done:], first + num_done
        base, size = len(target.blocks), self._block_bytes
        keys = {i: extra_keys[first + i] for i in range(len(blocks)) if first + i in extra_keys} if extra_keys else {}
        target.extend(blocks, tokens[first * size : (first + len(blocks)) * size], keys)
        self.num_cached_blocks += len(blocks)  # `count`, inlined
        if target.account is not None:
            target.account.add(len(blocks))
        if digests is not None:
            target.digests += digests.packed[num_done * self.epoch.num_digest_bytes :]
            if self.events is not None:
                self.events.note_stored(target, base, digests.sequence_id)

    def evict(self, blocks: list[KVCacheBlock]) -> int:
        """Stop caching those of `blocks` that are cached, in order, because they are about to be reused.

        A prefix stays cached while a duplicate holds it; otherwise everything chained to it stops being cached too.
        Returns how many blocks stopped being cached. O(blocks + what was chained).
        """
        if self.attached is not None:
            return self._evict_with_attached(self.attached, blocks)
        num_cached_before = self.num_cached_blocks
        removed: list[bytes] = []
        i = 0
        while i < len(blocks):
            run = blocks[i].run
            i += 1 if run is None else self._evict_stretch(run, blocks, i, removed)
        if self.num_cached_blocks != num_cached_before:
            self.version += 1
            if self.needs_digests:
                self._note_removal(removed, "evicted")
        return num_cached_before - self.num_cached_blocks

    def evict_one(self, block: KVCacheBlock) -> int:
        """`evict` of one block, with a fast path for the last block of a run. O(1) there.

        The fast path saves 5 % of a decoded token's time.
        """
        run = block.run
        if run is None or run.children or run.duplicates or self.needs_digests or run.epoch is not self.epoch:
            return self.evict([block])
        if run.blocks[-1] is not block or self.attached is not None:
            return self.evict([block])
        self.version += 1
        self._cut_end(run, block.index)
        return 1

    def _evict_with_attached(self, attached: AttachedBlocks, blocks: list[KVCacheBlock]) -> int:
        """`evict` one block after the other, each together with what is attached to it."""
        num_cached_before = self.num_cached_blocks
        for block in blocks:
            if block.run is not None:
                if attached.drop(block):
                    self._note_drop("evicted")
                    continue
                removed: list[bytes] = []
                num_before = self.num_cached_blocks
                self._evict_stretch(block.run, [block], 0, removed)
                if self.num_cached_blocks != num_before:
                    self.version += 1
                    if self.needs_digests:
                        self._note_removal(removed, "evicted")
        return num_cached_before - self.num_cached_blocks

    def num_bare(self, first: KVCacheBlock | None, most: int) -> int:
        """Return how many queued blocks, from `first` on, are the last ones of a run, the last one first.

        At most `most`. Only blocks count to which nothing is attached or chained, so that evicting them evicts nothing
        else. O(blocks + checkpoints of the run).
        """
        run, attached = None if first is None else first.run, self.attached
        if run is None or run.epoch is not self.epoch or run.children or run.duplicates or self.needs_digests:
            return 0
        if attached is not None:
            if not attached.is_bare(run):
                return 0
            most = min(most, len(run.blocks) - attached.num_with_last_checkpoint(run))
        block, number = first, 0
        while number < most and block is run.blocks[-1 - number]:
            block = block.next_free_block
            number += 1
        return number

    def evict_bare(self, blocks: list[KVCacheBlock]) -> int:
        """`evict` all at once the blocks that `num_bare` counted. O(blocks)."""
        run = blocks[0].run
        assert run is not None, f"{blocks[0]}: isn't cached"
        self.version += 1
        self._cut_end(run, len(run.blocks) - len(blocks))
        return len(blocks)

    def forget(self, block: KVCacheBlock, cause: RemovalCause = "aborted") -> None:
        """Stop caching `block`. If there is a duplicate, it takes the block's place, and the prefix stays cached.

        Otherwise everything chained to the prefix stops being cached too, and so do blocks of other groups that are
        attached to this one, since they may not have been written either. Does nothing to a block that isn't cached.
        O(what was chained or attached).
        """
        attached = self.attached
        if attached is not None and block.run is not None and block.run.epoch.is_current:
            if attached.drop(block):
                self.detached.append(block)
                self._note_drop(cause)
                return
            attached.detach(block.run, block.index, block.index + 1)
        if block.run is not None:
            removed: list[bytes] = []
            if block.is_cached:
                self.detached.append(block)
            self._forget(block, block.run, removed)
            self.version += 1
            if self.needs_digests:
                self._note_removal(removed, cause)

    def drop_duplicate(self, block: KVCacheBlock) -> KVCacheBlock | None:
        """If `block` is a duplicate, detach it and return the block that hits get instead; otherwise return None.

        The prefix stays cached. No earlier match names a duplicate, so all earlier matches stay valid. O(1).
        """
        run = block.run
        if run is None or not run.duplicates or not run.epoch.is_current:
            return None
        if block not in run.duplicates.get(block.index, ()):
            return None
        self._forget(block, run, [])
        self.detached.append(block)
        return run.blocks[block.index]

    def clear(self) -> None:
        """Stop caching everything. No earlier node is cached any more.

        O(1), except for freeing memory and for what a watcher does: a removal history takes O(cached blocks).
        """
        for watcher in self.watchers:
            watcher.note_clearing(self._runs.values())
        ended = self.epoch
        ended.is_current = False
        self.epoch = Epoch(ended.hash_scheme, ended.block_bytes)
        self._runs = {}
        self.version += 1
        self.num_cached_blocks = self.num_duplicates = 0
        if self.attached is not None:
            self.attached.clear()
        if self.events is not None:
            self.events.note_cleared()

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants hold. O(cached blocks)."""
        num_cached = self._check_runs()
        if self.attached is not None:
            self.attached.check()
            num_cached += self.attached.num_blocks
        assert num_cached == self.num_cached_blocks, f"index: {num_cached} cached, {self.num_cached_blocks} counted"

    def _following(
        self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, first: int, max_blocks: int
    ) -> tuple[Run | None, int, int]:
        """Return where the sequence's blocks from `first` on are cached below `node`: run, position, how many."""
        run, position = node
        start, size = first * self._block_bytes, self._block_bytes
        tokens_of_first = tokens[start : start + size]
        after = position + 1  # comparing its first block is faster than to let `num_common` find it out
        if run is not None and after < len(run.blocks) and run.tokens.startswith(tokens_of_first, after * size):
            count = run.num_common(after, tokens, extra_keys, first, max_blocks)
            if count:
                return run, after, count
        extra = None if extra_keys is None else extra_keys.get(first)
        packed = tokens_of_first.tobytes()
        key = packed if node[0] is None and extra is None else (node[0], node[1], packed, extra)  # `map_key`, inlined
        run = self._runs.get(key)
        return run, 0, 0 if run is None else run.num_common(0, tokens, extra_keys, first, max_blocks)

    def _new_run(self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, first: int) -> Run:
        """Return a new run below `node`, still empty, keyed by the sequence's block `first`."""
        parent, position = node
        start = first * self._block_bytes
        extra = None if extra_keys is None else extra_keys.get(first)
        packed = tokens[start : start + self._block_bytes].tobytes()
        run = Run((parent, position, packed, extra), self.epoch)
        self._runs[packed if parent is None and extra is None else run.key] = run
        if parent is not None:
            parent.children = parent.children or {}
            parent.children.setdefault(position, {})[run] = None
            run.account, run.first_keys = parent.account, parent.first_keys
        elif self.accounts is not None:
            run.account = self.accounts.account_of(extra)
        return run

    def _add_duplicates(self, run: Run, start: int, blocks: list[KVCacheBlock]) -> None:
        duplicates = run.duplicates = run.duplicates or {}
        num_added = 0
        for index, block in enumerate(blocks, start):
            if block.run is not run:  # else another sequence that shares the block has cached it
                block.run = run
                block.index = index
                duplicates.setdefault(index, {})[block] = None
                num_added += 1
        self.num_duplicates += num_added
        self.count(run, num_added)

    def _check_runs(self) -> int:
        """Check the runs. Returns how many blocks they hold, duplicates included."""
        num_cached = num_duplicates = 0
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
            num_duplicates += run.num_cached_blocks() - len(run.blocks)
        assert num_duplicates == self.num_duplicates, f"index: {num_duplicates} duplicates, not {self.num_duplicates}"
        return num_cached

    def _evict_stretch(self, run: Run, blocks: list[KVCacheBlock], i: int, removed: list[bytes]) -> int:
        """Evict blocks[i] and those after it that go backwards through the same run. Returns how many blocks."""
        block, end = blocks[i], blocks[i].index + 1
        count = 0
        if run.epoch.is_current and end == len(run.blocks) and run.blocks[-1] is block:
            count = len(blocks) - i
            if count > end:  # noqa: PLR1730  # min() costs three times as much
                count = end
            # `free` queues a sequence's blocks last first, so the blocks of a run mostly come in reverse order.
            if run.duplicates:
                count = run.num_backwards(blocks, i)
            elif (
                blocks[i + count - 1] is not run.blocks[end - count]
                or blocks[i : i + count] != run.blocks[end - count :][::-1]
            ):
                count = 1  # `num_backwards`, inlined: this happens at each eviction when the queue's order is mixed
                while blocks[i + count] is run.blocks[end - 1 - count]:  # ends at the first difference
                    count += 1
        if not count:
            self._forget(block, run, removed)
            return 1
        if run.children or self.needs_digests:
            self._cut(run, end - count, removed)
        else:
            self._cut_end(run, end - count)
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
        self.num_duplicates -= 1
        self.count(run, -1)

    def _cut(self, run: Run, position: int, removed: list[bytes]) -> list[KVCacheBlock]:
        """Stop caching `run` from `position` on, after everything chained to it. Returns the run's blocks."""
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
        """Stop caching `run` from `position` on, to which nothing is chained. Returns these blocks, with duplicates."""
        if self.attached is not None:
            self.attached.detach(run, position, len(run.blocks))
        dropped = run.blocks[position:]
        if run.duplicates:
            for index in run.keys_from(position, run.duplicates):
                dropped += run.duplicates.pop(index, ())
            self.num_duplicates -= len(dropped) - (len(run.blocks) - position)
        for block in dropped:
            block.run = None
        del run.blocks[position:]
        run.is_closed = True
        if len(run.tokens) > 2 * position * self._block_bytes:
            run.trim(position)
        num_blocks = len(dropped)
        self.num_cached_blocks -= num_blocks  # `count`, inlined: each eviction of a short prefix comes here
        if run.account is not None:
            run.account.add(-num_blocks)
        if position == 0:
            parent, _, tokens, extra_keys = run.key
            del self._runs[tokens if parent is None and extra_keys is None else run.key]
            if parent is not None:
                self._leave_parent(run)
        return dropped

    def _leave_parent(self, run: Run) -> None:
        parent, position, _, _ = run.key
        if parent is not None and parent.children:
            siblings = parent.children[position]
            del siblings[run]
            if not siblings:
                del parent.children[position]

    def count(self, run: Run, num_blocks: int) -> None:
        """Count blocks that became cached in a run or beside it, or (a negative number) that stopped being. O(1)."""
        self.num_cached_blocks += num_blocks
        if run.account is not None:
            run.account.add(num_blocks)

    def _note_removal(self, removed: list[bytes], cause: RemovalCause) -> None:
        if self.attached is not None:
            self.attached.tell_gone(cause)  # first, so that a history keeps these prefixes longer
        if not removed:
            return
        if self.events is not None:
            self.events.note_removed(removed)
        for watcher in self.watchers:
            watcher.note_removed(removed, cause)

    def _note_drop(self, cause: RemovalCause) -> None:
        """Note that an attached block, and nothing else, stopped being cached."""
        self.version += 1
        if self.needs_digests:
            self._note_removal([], cause)
