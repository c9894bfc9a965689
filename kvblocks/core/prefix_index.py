"""The exact map from prefixes to the blocks that hold them.

A prefix is a chain of preimages: each block's tokens and extra keys under its parent. Blocks that were cached one
after the other stand in one `Run`; only a run's first block has an entry in the map, keyed by its whole preimage, and
the rest is reached through the run by comparing tokens. So a lookup costs one dict lookup and one memcmp per run,
inserting and evicting cost no dict operation per block, and no comparison ever trusts a hash.

Why a hit is never wrong. A node (run, position) means one prefix for as long as anything refers to it: a run that
lost its end is closed, so no position is ever given a second meaning, and a key holds its parent's run itself, so no
identity is used twice. Equal tokens and extra keys under the same node are therefore the same prefix, by induction
from the root. No hash takes part.

The map keyed by preimages, the runs and the closing rule are this project's; reusing blocks by hash chain is vLLM's.
"""

from array import array

from kvblocks.core.block import KVCacheBlock, Node, Run
from kvblocks.core.cached_runs import CachedRuns, map_key

ExtraKeys = dict[int, bytes] | None


class PrefixIndex(CachedRuns):
    """Finds, adds and removes cached prefixes of blocks of `block_size` tokens."""

    def match(self, tokens: "memoryview[int]", extra_keys: ExtraKeys, max_blocks: int) -> list[KVCacheBlock]:
        """Return the blocks of the longest cached prefix, at most `max_blocks`.

        tokens: u32, not cast to bytes. extra_keys: encoded, by block. Changes nothing. O(runs + tokens), where the
        second is one memcmp a run and one slice of its blocks.
        """
        size = self.block_size
        head = tokens[:size].tobytes()
        extra = None if extra_keys is None else extra_keys.get(0)
        run = self._runs.get(head if extra is None else (None, 0, head, extra))  # `map_key`, without the call
        if run is None:
            return []
        parts = False
        if extra_keys is None and run.extra_keys is None and len(run.blocks) >= max_blocks:
            # One run has it all, mostly: the way that counts, with nothing on it that isn't needed.
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
        """Return the digests of a sequence's blocks first to end - 1 below the cached `node`. Changes nothing visible.

        Needed before `cache` when changes are named; a hash function that raises then does so before any change.
        """
        run, position = node
        parent_digest = b"" if run is None else run.digest(position)
        return self.epoch.chain(parent_digest, tokens, extra_keys, first, end)

    def cache_one(
        self, run: Run, parent: KVCacheBlock, block: KVCacheBlock, tokens: "array[int] | memoryview[int]"
    ) -> bool:
        """`cache` of one block without extra keys behind `parent`, if that is the open end of `run`. Whether it was.

        tokens: the block's. The short way for a decoded token; not when changes are named.
        """
        blocks = run.blocks
        if run.is_closed or run.epoch is not self.epoch or blocks[-1] is not parent:
            return False
        block.run = run
        block.index = len(blocks)
        blocks.append(block)
        run.tokens += tokens
        self.num_cached_blocks += 1
        if run.tenant is not None:
            run.tenant.add(1)
        return True

    def cache(
        self,
        node: Node,
        blocks: list[KVCacheBlock],
        tokens: memoryview,
        extra_keys: ExtraKeys,
        first: int,
        digests: bytearray | None = None,
    ) -> None:
        """Cache `blocks`, which hold a sequence's blocks first, first + 1, …, below the cached `node`.

        Those whose very prefix is cached already become duplicates of it; the rest extend the node's run or form a new
        one. digests: theirs, needed when changes are named. O(blocks).
        """
        num_done = 0
        while num_done < len(blocks) and not (node[0] is not None and node[0].is_open_at(node[1])):
            run, start, count = self._following(node, tokens, extra_keys, first + num_done, len(blocks) - num_done)
            if run is None:
                break
            self._add_duplicates(run, start, blocks[num_done : num_done + count])
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
        self._count(target, len(blocks))
        if digests is not None:
            target.digests += digests[num_done * self.epoch.num_digest_bytes :]
            if self.events is not None:
                self.events.append(target.stored_since(base))

    def _following(
        self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, first: int, max_blocks: int
    ) -> tuple[Run | None, int, int]:
        """Return the run, position and number of the sequence's blocks first, … that are cached below `node`."""
        run, position = node
        start, size = first * self._block_bytes, self._block_bytes
        tokens_of_first = tokens[start : start + size]
        if (
            run is not None
            and position + 1 < len(run.blocks)
            and run.tokens.startswith(
                tokens_of_first, (position + 1) * size
            )  # `num_common` says the same, less quickly
        ):
            count = run.num_common(position + 1, tokens, extra_keys, first, max_blocks)
            if count:
                return run, position + 1, count
        extra = None if extra_keys is None else extra_keys.get(first)
        run = self._runs.get(map_key((node[0], node[1], tokens_of_first.tobytes(), extra)))
        return run, 0, 0 if run is None else run.num_common(0, tokens, extra_keys, first, max_blocks)

    def _new_run(self, node: Node, tokens: memoryview, extra_keys: ExtraKeys, first: int) -> Run:
        """Return a new run below `node`, still empty, keyed by the sequence's block `first`."""
        parent, position = node
        start = first * self._block_bytes
        extra = None if extra_keys is None else extra_keys.get(first)
        run = Run((parent, position, bytes(tokens[start : start + self._block_bytes]), extra), self.epoch)
        self._runs[map_key(run.key)] = run
        if parent is not None:
            parent.children = parent.children or {}
            parent.children.setdefault(position, {})[run] = None
            run.tenant = parent.tenant
        elif self.quotas is not None:
            run.tenant = self.quotas.tenant_of(extra)
        return run

    def _add_duplicates(self, run: Run, start: int, blocks: list[KVCacheBlock]) -> None:
        if run.duplicates is None:
            run.duplicates = {}
        for index, block in enumerate(blocks, start):
            block.run = run
            block.index = index
            run.duplicates.setdefault(index, {})[block] = None
        self._count(run, len(blocks))
