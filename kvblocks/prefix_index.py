"""The exact map from prefixes to the blocks that hold them.

A prefix is a chain of preimages: each block's tokens and extra keys under its parent. Blocks that were cached one
after the other stand in one `Run`; only a run's first block has an entry in the map, keyed by its whole preimage, and
the rest is reached through the run by comparing tokens. So a lookup costs one dict lookup and one memcmp per run,
inserting and evicting cost no dict operation per block, and no comparison ever trusts a hash.

Why a hit is never wrong. A node (run, position) means one prefix for as long as anything refers to it: a run that
lost its end is closed, so no position is ever given a second meaning, and a key holds its parent's run itself, so no
identity is used twice. Equal tokens and extra keys under the same node are therefore the same prefix, by induction
from the root. No hash takes part.

Invariants: `blocks` of a run are its positions 0..n-1 with no gap; a block's `run` and `index` lead to a position whose
`blocks` entry or `spares` hold it; every run of the current epoch that has blocks is under its key in the map.

The map keyed by preimages, the runs and the closing rule are this project's; reusing blocks by hash chain is vLLM's.
"""

from array import array

from kvblocks.block import ROOT, Epoch, KVCacheBlock, Node, Run, RunKey
from kvblocks.errors import InvalidArgumentError
from kvblocks.events import AllBlocksCleared, BlockRemoved, CacheEvent
from kvblocks.hashing import HashFunction

ExtraKeys = dict[int, bytes] | None


class PrefixIndex:
    """Finds, adds and removes cached prefixes of blocks of `block_size` tokens.

    version: goes up whenever a block stops being cached; while it stands still, every earlier match holds.
    num_cached_blocks: blocks that hold a cached prefix, spares included. events: since last taken; None: not recorded.
    """

    def __init__(self, block_size: int, hash_function: HashFunction, *, enable_events: bool = False) -> None:
        self.block_size = block_size
        self._block_bytes = 4 * block_size
        self._runs: dict[RunKey, Run] = {}
        self.epoch = Epoch(hash_function, self._block_bytes, len(hash_function(b"")))
        self.version = 0
        self.num_cached_blocks = 0
        self.events: list[CacheEvent] | None = [] if enable_events else None

    @property
    def num_runs(self) -> int:
        """Runs in the map. O(1)."""
        return len(self._runs)

    def match(self, tokens: memoryview, extra_keys: ExtraKeys, max_blocks: int) -> list[KVCacheBlock]:
        """Return the blocks of the longest cached prefix, at most `max_blocks`.

        tokens: packed u32, as bytes. extra_keys: encoded, by block. Changes nothing. O(runs + tokens), where the second
        is one memcmp a run and one slice of its blocks.
        """
        blocks: list[KVCacheBlock] = []
        node, first = ROOT, 0
        while first < max_blocks:
            run = self._child(node, tokens, extra_keys, first)
            if run is None:
                break
            count = run.num_common(0, tokens, extra_keys, first, max_blocks - first)
            blocks += run.blocks[:count]
            node = run, count - 1
            first += count
        return blocks

    def digests(self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, first: int, end: int) -> bytearray:
        """Return the digests of a sequence's blocks first to end - 1 below the cached `node`. Changes nothing visible.

        Needed before `insert` when events are recorded; a hash function that raises then does so before any change.
        """
        run, position = node
        parent_digest = b"" if run is None else run.digest(position)
        return self.epoch.chain(parent_digest, tokens, extra_keys, first, end)

    def insert_one(self, parent: KVCacheBlock, block: KVCacheBlock, tokens: "array[int]") -> bool:
        """`insert` of one block without extra keys behind `parent`, if their run can be extended. Whether it was.

        tokens: the block's. The short way for a decoded token; not when events are recorded.
        """
        run = parent.run
        if run is None or not run.is_open_at(parent.index):
            return False
        run.extend_by_one(block, tokens)
        self.num_cached_blocks += 1
        return True

    def insert(
        self,
        node: Node,
        blocks: list[KVCacheBlock],
        tokens: memoryview,
        extra_keys: ExtraKeys,
        first: int,
        digests: bytearray | None = None,
    ) -> None:
        """Cache `blocks`, which hold a sequence's blocks first, first + 1, …, below the cached `node`.

        Those whose very prefix is cached already become spares of it; the rest extend the node's run or form a new one.
        digests: theirs, needed when events are recorded. O(blocks).
        """
        num_done = 0
        while num_done < len(blocks) and not (node[0] is not None and node[0].is_open_at(node[1])):
            run, start, count = self._following(node, tokens, extra_keys, first + num_done, len(blocks) - num_done)
            if run is None:
                break
            self._add_spares(run, start, blocks[num_done : num_done + count])
            node = run, start + count - 1
            num_done += count
        if num_done == len(blocks):
            return
        if num_done:
            blocks, first = blocks[num_done:], first + num_done
        target, position = node
        if target is None or not target.is_open_at(position):
            target = self._new_run(node, tokens, extra_keys, first)
        base, size = len(target.blocks), self._block_bytes
        keys = {i: extra_keys[first + i] for i in range(len(blocks)) if first + i in extra_keys} if extra_keys else {}
        target.extend(blocks, tokens[first * size : (first + len(blocks)) * size], keys)
        self.num_cached_blocks += len(blocks)
        if self.events is not None and digests is not None:
            target.digests += digests[num_done * self.epoch.num_digest_bytes :]
            self.events.append(target.stored_since(base))

    def evict(self, blocks: list[KVCacheBlock]) -> int:
        """Forget `blocks`, in order, which are about to be reused. Returns how many blocks stopped
        being cached.

        A prefix stays cached while a spare holds it; one that goes takes everything chained to it along. O(blocks),
        plus what was chained.
        """
        num_cached_before = self.num_cached_blocks
        removed: list[bytes] = []
        i = 0
        while i < len(blocks):
            run = blocks[i].run
            i += 1 if run is None else self._evict_stretch(run, blocks, i, removed)
        if self.num_cached_blocks != num_cached_before:
            self._note_removal(removed)
        return num_cached_before - self.num_cached_blocks

    def evict_one(self, block: KVCacheBlock) -> int:
        """`evict` of one block; the short way for the last of several in its run, where nothing else hangs. O(1)."""
        run = block.run
        if run is None or self.events is not None or run.spares or run.children or not run.pops(block):
            return self.evict([block])
        self.num_cached_blocks -= 1
        self.version += 1
        return 1

    def forget(self, block: KVCacheBlock) -> None:
        """Stop caching the prefix that `block` holds through this block; a spare takes its place when there is one.

        With the last block that holds a prefix goes everything chained to it. Does nothing to a block that isn't
        cached. O(what was chained).
        """
        if block.run is not None:
            removed: list[bytes] = []
            self._forget(block, block.run, removed)
            self._note_removal(removed)

    def clear(self) -> None:
        """Stop caching everything, in O(1) but for giving memory back. No earlier node is cached any more."""
        ended = self.epoch
        ended.is_current = False
        self.epoch = Epoch(ended.hash_function, ended.block_bytes, ended.num_digest_bytes)
        self._runs = {}
        self.version += 1
        self.num_cached_blocks = 0
        if self.events is not None:
            self.events.append(AllBlocksCleared())

    def take_events(self) -> list[CacheEvent]:
        """Return the records since the last call, oldest first, and forget them."""
        if self.events is None:
            raise InvalidArgumentError("take_events: expected enable_events=True when the manager was made, got False")
        events, self.events = self.events, []
        return events

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants hold. O(cached blocks)."""
        num_cached = 0
        for key, run in self._runs.items():
            assert run.key == key and run.epoch is self.epoch and run.blocks, f"{run}: not a live run under its key"
            parent, position, _, _ = key
            assert parent is None or self._runs.get(parent.key) is parent, f"{run}: its parent isn't in the map"
            assert parent is None or run in parent.children_from(position), f"{run}: its parent doesn't know it"
            for child in run.children_from(0):
                assert self._runs.get(child.key) is child, f"{run}: a child isn't in the map"
            num_cached += run.check()
        assert num_cached == self.num_cached_blocks, f"index: {num_cached} cached, {self.num_cached_blocks} counted"

    def _child(self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, block: int) -> Run | None:
        """Return the run below `node` whose first block is the sequence's block number `block`."""
        start = block * self._block_bytes
        extra = None if extra_keys is None else extra_keys.get(block)
        return self._runs.get((node[0], node[1], bytes(tokens[start : start + self._block_bytes]), extra))

    def _following(
        self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, first: int, max_blocks: int
    ) -> tuple[Run | None, int, int]:
        """Return the run, position and number of the sequence's blocks first, … that are cached below `node`."""
        run, position = node
        if run is not None and position + 1 < len(run.blocks):
            count = run.num_common(position + 1, tokens, extra_keys, first, max_blocks)
            if count:
                return run, position + 1, count
        run = self._child(node, tokens, extra_keys, first)
        return run, 0, 0 if run is None else run.num_common(0, tokens, extra_keys, first, max_blocks)

    def _new_run(self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, first: int) -> Run:
        """Return a new run below `node`, still empty, keyed by the sequence's block `first`."""
        parent, position = node
        start = first * self._block_bytes
        extra = None if extra_keys is None else extra_keys.get(first)
        run = Run((parent, position, bytes(tokens[start : start + self._block_bytes]), extra), self.epoch)
        self._runs[run.key] = run
        if parent is not None:
            parent.children = parent.children or {}
            parent.children.setdefault(position, {})[run] = None
        return run

    def _add_spares(self, run: Run, start: int, blocks: list[KVCacheBlock]) -> None:
        if run.spares is None:
            run.spares = {}
        for index, block in enumerate(blocks, start):
            block.run = run
            block.index = index
            run.spares.setdefault(index, {})[block] = None
        self.num_cached_blocks += len(blocks)

    def _evict_stretch(self, run: Run, blocks: list[KVCacheBlock], i: int, removed: list[bytes]) -> int:
        """Evict blocks[i], and with it those that follow it as they stood in its run. Returns how many blocks."""
        block, end = blocks[i], blocks[i].index + 1
        is_tail = run.epoch.is_current and end == len(run.blocks) and run.blocks[-1] is block
        count = run.num_without_spares(len(blocks) - i) if is_tail else 0
        if not count:
            self._forget(block, run, removed)
            return 1
        # Freeing queues a sequence's blocks last first, so the queue mostly holds a run's blocks last first as well.
        if (
            blocks[i + count - 1] is not run.blocks[end - count]
            or blocks[i : i + count] != run.blocks[end - count :][::-1]
        ):
            count = 1
            while blocks[i + count] is run.blocks[end - 1 - count]:  # ends at the latest where the slices differ
                count += 1
        self._cut(run, end - count, removed)
        return count

    def _forget(self, block: KVCacheBlock, run: Run, removed: list[bytes]) -> None:
        if not run.epoch.is_current:
            block.run = None  # the cache was reset
            run.retire()
            return
        spares = run.spares.get(block.index) if run.spares else None
        if not spares:
            self._cut(run, block.index, removed)
            return
        if run.blocks[block.index] is block:
            heir = next(iter(spares))
            run.blocks[block.index] = heir
            del spares[heir]
        else:
            del spares[block]
        if not spares and run.spares:
            del run.spares[block.index]
        block.run = None
        self.num_cached_blocks -= 1

    def _cut(self, run: Run, position: int, removed: list[bytes]) -> None:
        """Forget `run` from `position` on, after everything that is chained to that."""
        chain = [(run, position)]
        for above, start in chain:  # grows while it is walked: parents before children
            chain += [(child, 0) for child in above.children_from(start)]
        for below, start in reversed(chain):
            if self.events is not None:
                removed += [below.digest(index) for index in range(len(below.blocks) - 1, start - 1, -1)]
            self.num_cached_blocks -= below.cut(start)
            if start == 0:
                del self._runs[below.key]
                self._leave_parent(below)

    def _leave_parent(self, run: Run) -> None:
        parent, position, _, _ = run.key
        if parent is not None and parent.children:
            siblings = parent.children[position]
            del siblings[run]
            if not siblings:
                del parent.children[position]

    def _note_removal(self, removed: list[bytes]) -> None:
        self.version += 1
        if removed and self.events is not None:
            self.events.append(BlockRemoved(tuple(removed)))
