"""The blocks of a `PrefixCache`: ids that the engine chose, what they hold, and in which order they go.

A block is here from its insertion to its eviction. The object that stood for it then goes to a stock and is used again,
so that a cache in steady state makes no objects.

As in `BlockPool`, being in the queue and having `ref_cnt` 0 are one fact. What is held are whole paths, from a prefix's
first block on; a reference is to a path's last block, and a block with any has one to the block that it is attached to.
So holding a path that is held already, or shares its beginning with one, costs nothing for what they share. With the
queue's order, children before their parents, that makes eviction leaf-first: a block never outlives what it is attached
to.

Takes no lock; `PrefixCache` does.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from operator import length_hint
from typing import Any

from xxhash import xxh3_128_digest

from kvblocks.arguments import check_count, listed
from kvblocks.core.block import ROOT, KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.errors import BlockStateError, InvalidArgumentError


class RecencyQueue(FreeBlockQueue):
    """A queue whose blocks can be used without being taken out, and taken out as paths."""

    def hold(self, path: Items[KVCacheBlock]) -> None:
        """Add a reference to a path's last block, and to its parent if it had none. O(blocks taken out)."""
        num_kept = 0  # what isn't reached is counted, since that costs nothing for each block
        above = reversed(path)
        for block in above:
            if block.ref_cnt:
                block.ref_cnt += 1
                num_kept = 1 + length_hint(above)
                break
            previous, following = block.prev_free_block, block.next_free_block
            previous.next_free_block = following
            following.prev_free_block = previous
            block.prev_free_block = block
            block.ref_cnt = 1
        self.num_free_blocks -= len(path) - num_kept

    def let_go(self, path: Items[KVCacheBlock]) -> None:
        """Undo one `hold`; blocks without a reference join the end, a path's first one last. O(those blocks)."""
        root = self._root
        last = root.prev_free_block
        num_kept = 0
        above = reversed(path)
        for block in above:
            if block.ref_cnt != 1:
                assert block.ref_cnt, f"let_go: {block} isn't held"
                block.ref_cnt -= 1
                num_kept = 1 + length_hint(above)
                break
            block.ref_cnt = 0
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = root
        root.prev_free_block = last
        self.num_free_blocks += len(path) - num_kept

    def renew(self, blocks: Items[KVCacheBlock]) -> None:
        """Make a path's blocks the most recently used, its first one most of all. Owned ones stay out.

        Blocks that were queued together mostly stand together still, and are moved in one piece. O(blocks).
        """
        first: KVCacheBlock | None = None  # of a stretch that stands together, and is followed by `following`
        last = following = self._root
        for block in reversed(blocks):
            if block is not following:
                if first is not None:
                    self._move_to_end(first, last)
                first = None
                if block.ref_cnt:  # so have all above it
                    break
                first = block
            last = block
            following = block.next_free_block
        if first is not None:
            self._move_to_end(first, last)

    def _move_to_end(self, first: KVCacheBlock, last: KVCacheBlock) -> None:
        """Move what is linked from `first` to `last`. O(1)."""
        root, before, after = self._root, first.prev_free_block, last.next_free_block
        before.next_free_block = after
        after.prev_free_block = before
        end = root.prev_free_block
        end.next_free_block = first
        first.prev_free_block = end
        last.next_free_block = root
        root.prev_free_block = last


class PrefixStore:
    """At most `max_blocks` blocks of `block_size` tokens. blocks: those that are here, by id. index: what they hold."""

    def __init__(self, max_blocks: int, block_size: int) -> None:
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.blocks: dict[int, KVCacheBlock] = {}
        self.index = PrefixIndex(block_size, xxh3_128_digest)  # nothing here ever asks for a digest
        self._queue = RecencyQueue(())
        self._stock: list[KVCacheBlock] = []  # ref_cnt 1, as they come off the queue and as they go into it
        self._payloads: dict[KVCacheBlock, tuple[bytes, bytes | None, Any]] = {}
        self._dropped: list[Any] = []

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that nothing holds. O(1)."""
        return self._queue.num_free_blocks

    def find(self, sequence: Sequence) -> list[KVCacheBlock]:
        """Return the blocks of the longest prefix that is here. Changes nothing."""
        return find_blocks(self.index, sequence)

    def renew(self, path: list[KVCacheBlock]) -> None:
        """Make a path the most recently used. O(blocks)."""
        self._queue.renew(path)

    def hold(self, path: list[KVCacheBlock]) -> None:
        """Keep a path from being evicted. O(blocks that nothing else holds)."""
        self._queue.hold(path)

    def let_go(self, path: list[KVCacheBlock]) -> None:
        """Undo one `hold`; what nothing holds any more becomes the most recently used. O(1 + those blocks)."""
        self._queue.let_go(path)

    def cache(
        self, sequence: Sequence, kv_block_ids: list[int], path: list[KVCacheBlock]
    ) -> tuple[list[KVCacheBlock], int, list[int]]:
        """Cache as much of the sequence's full blocks as there is room for, evicting what nothing holds.

        kv_block_ids: different ones, one for each full block, that passed `check_insertable`. path: what is found of
        the sequence. Returns the path that is cached then, held once; how many blocks of it are new, the last ones; and
        the ids that were evicted. O(blocks).
        """
        num_found = len(path)
        self.hold(path)
        num_missing = len(kv_block_ids) - num_found - (self.max_blocks - len(self.blocks))
        evicted = self.evict(num_missing) if num_missing > 0 else []
        room = self.max_blocks - len(self.blocks)
        new = self._take(kv_block_ids[num_found : num_found + room])
        if new:
            node = path[-1].node if path else ROOT
            keys = sequence.encoded_keys(self.block_size)
            self.index.cache(node, new, sequence.packed_tokens(), keys, num_found)
        return path + new, len(new), evicted

    def evict(self, num_blocks: int) -> list[int]:
        """Give up at most `num_blocks` blocks that nothing holds, least recently used first. Returns their ids.

        Payloads that go with them are kept until `drop_payloads`. O(blocks).
        """
        blocks = self._queue.popleft_n(min(num_blocks, self._queue.num_free_blocks))
        num_evicted = self.index.evict(blocks)
        assert num_evicted == len(blocks), f"evict: {num_evicted} blocks went with {len(blocks)} leaves"
        kv_block_ids = [block.block_id for block in blocks]
        for kv_block_id in kv_block_ids:
            del self.blocks[kv_block_id]
        if self._payloads:
            for block in blocks:
                if block in self._payloads:
                    self._dropped.append(self._payloads.pop(block))
        self._stock += blocks
        return kv_block_ids

    def attach(self, sequence: Sequence, payload: Any) -> bool:
        """Keep `payload` with the sequence's last full block; None: keep nothing. Whether that block is here."""
        path = self.find(sequence)
        if not path or len(path) < sequence.num_tokens // self.block_size:
            return False
        if payload is None:
            self._dropped.append(self._payloads.pop(path[-1], None))
        else:
            tail, tail_key = self._tail(sequence)
            self._payloads[path[-1]] = tail, tail_key, payload
        return True

    def payload(self, sequence: Sequence, path: list[KVCacheBlock]) -> Any:
        """Return what was attached to exactly this sequence, whose cached blocks are `path`. O(block_size)."""
        if not self._payloads or not path or len(path) < sequence.num_tokens // self.block_size:
            return None
        kept = self._payloads.get(path[-1])
        return kept[2] if kept is not None and kept[:2] == self._tail(sequence) else None

    def drop_payloads(self) -> None:
        """Forget what evicted blocks carried. Called last, since a payload's finalizer may call the cache again."""
        self._dropped.clear()

    def check(self, holds: Iterable[list[KVCacheBlock]]) -> None:
        """Raise AssertionError unless all here agrees, and the paths that are held are `holds`. O(blocks)."""
        num_holds = dict.fromkeys(self.blocks.values(), 0)
        for path in holds:
            for above, block in zip([None, *path], path, strict=False):
                assert _parent(block) is above, f"{block}: is attached to another block than {above}"
            if path:
                num_holds[path[-1]] += 1
        for block in self.blocks.values():
            held_from = _parent(block) if block.ref_cnt else None
            if held_from is not None:
                num_holds[held_from] += 1
        self._queue.check()
        self.index.check()
        indices = {block: i for i, block in enumerate(self._queue)}
        for kv_block_id, block in self.blocks.items():
            assert block.block_id == kv_block_id and block.is_cached, f"{block}: isn't what {kv_block_id} holds"
            assert block.ref_cnt == num_holds[block], f"{block}: held {num_holds[block]} times"
            assert (block in indices) == (block.ref_cnt == 0), f"{block}: queued and held, or neither"
            parent = _parent(block)
            assert parent is None or parent.ref_cnt or indices[block] < indices[parent], f"{block}: outlives {parent}"
        assert len(indices) == self.num_evictable_blocks, "store: queued blocks that aren't here"
        assert self.index.num_cached_blocks == len(self.blocks), f"index: {self.index.num_cached_blocks} cached"
        assert len(self.blocks) + len(self._stock) <= self.max_blocks, f"store: more than {self.max_blocks} blocks"
        assert all(block.run is None and block.ref_cnt == 1 for block in self._stock), "store: the stock is in use"
        assert self._payloads.keys() <= num_holds.keys(), "store: a payload without its block"

    def check_insertable(self, kv_block_ids: list[int], path: list[KVCacheBlock]) -> None:
        """Raise BlockStateError when an id is here for another prefix than `path`. Changes nothing. O(blocks)."""
        if self.blocks.keys().isdisjoint(kv_block_ids):
            return
        for position, kv_block_id in enumerate(kv_block_ids):
            block = self.blocks.get(kv_block_id)
            if block is not None and (position >= len(path) or path[position] is not block):
                raise BlockStateError(
                    f"kv_block_ids: expected ids that hold no other prefix, got {kv_block_id} at position {position}, "
                    "which does; evict it first"
                )

    def _take(self, kv_block_ids: list[int]) -> list[KVCacheBlock]:
        """Return blocks with these ids, held once, from the stock as far as it goes."""
        stock = self._stock
        first = max(len(stock) - len(kv_block_ids), 0)
        blocks = stock[first:]
        del stock[first:]
        for block, kv_block_id in zip(blocks, kv_block_ids, strict=False):
            block.block_id = kv_block_id
        for kv_block_id in kv_block_ids[len(blocks) :]:
            block = KVCacheBlock(kv_block_id)
            block.ref_cnt = 1
            blocks.append(block)
        self.blocks.update(zip(kv_block_ids, blocks, strict=True))
        return blocks

    def _tail(self, sequence: Sequence) -> tuple[bytes, bytes | None]:
        """What a sequence has after its last full block: tokens, and their encoded keys."""
        num_blocks = sequence.num_tokens // self.block_size
        keys = sequence.encoded_keys(self.block_size)
        tail = bytes(sequence.packed_tokens()[4 * self.block_size * num_blocks :])
        return tail, None if keys is None else keys.get(num_blocks)


def check_block_ids(kv_block_ids: Any, num_blocks: int, block_size: int) -> list[int]:
    """Return `kv_block_ids` as a list of `num_blocks` different ints of at least 0; else InvalidArgumentError."""
    ids = listed("kv_block_ids", "an iterable of ints", kv_block_ids)
    if len(ids) != num_blocks:
        raise InvalidArgumentError(
            f"kv_block_ids: expected {num_blocks}, one for each full block of {block_size} tokens and none for a "
            f"partial one, got {len(ids)}"
        )
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0):
        ids = [check_count(f"kv_block_ids: position {i}", kv_block_id, 0) for i, kv_block_id in enumerate(ids)]
    if len(set(ids)) != num_blocks:
        raise InvalidArgumentError(f"kv_block_ids: expected {num_blocks} different ones, got {len(set(ids))}")
    return ids


def _parent(block: KVCacheBlock) -> KVCacheBlock | None:
    """The block that a cached block is attached to."""
    run = block.run
    assert run is not None, f"{block}: isn't cached"
    if block.index:
        return run.blocks[block.index - 1]
    above, position, _, _ = run.key
    return None if above is None else above.blocks[position]
