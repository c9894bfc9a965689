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
from typing import Any, NoReturn

from kvblocks.core.block import ROOT, KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.hashing import Names
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.errors import BlockStateError, InvalidArgumentError
from kvblocks.prefix_cache.payloads import Payloads
from kvblocks.retention.eviction import Eviction


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

    def renew(self, blocks: Items[KVCacheBlock]) -> int:
        """Make a path's blocks the most recently used, its first one most of all. Owned ones stay out.

        Returns how many are queued. Blocks that were queued together mostly stand together still, and are moved in one
        piece. O(blocks).
        """
        first: KVCacheBlock | None = None  # of a stretch that stands together, and is followed by `following`
        last = following = self._root
        num_owned = 0
        above = reversed(blocks)
        for block in above:
            if block is not following:
                if first is not None:
                    self._move_to_end(first, last)
                first = None
                if block.ref_cnt:  # so have all above it
                    num_owned = 1 + length_hint(above)
                    break
                first = block
            last = block
            following = block.next_free_block
        if first is not None:
            self._move_to_end(first, last)
        return len(blocks) - num_owned

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
    """At most `max_blocks` blocks of `block_size` tokens. ids: of those that are here. index: what they hold.

    names: by which its changes are told to whoever watches `index`. eviction: who says which go first; None: the least
    recently used.

    Many lines here are one call for all blocks of a path: with one token a block, a loop is what an insertion costs.
    """

    def __init__(self, max_blocks: int, block_size: int, names: Names, eviction: Eviction | None = None) -> None:
        self.max_blocks = max_blocks
        self._eviction = eviction
        self.block_size = block_size
        self.ids: set[int] = set()
        self.index = PrefixIndex(block_size, names)
        self._queue = RecencyQueue(())
        self._stock: list[KVCacheBlock] = []  # ref_cnt 1, as they come off the queue and as they go into it
        self._payloads = Payloads(block_size, max_blocks)

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
        if self._eviction is not None:
            self._eviction.note_touched(path)
            self._eviction.note_released(path[::-1])

    def hold(self, path: list[KVCacheBlock]) -> None:
        """Keep a path from being evicted. O(blocks that nothing else holds)."""
        self._queue.hold(path)
        if self._eviction is not None:
            self._eviction.note_touched(path)

    def let_go(self, path: list[KVCacheBlock]) -> None:
        """Undo one `hold`; what nothing holds any more becomes the most recently used. O(1 + those blocks)."""
        self._queue.let_go(path)
        if self._eviction is not None:
            self._eviction.note_released(path[::-1])

    def cache(
        self,
        sequence: Sequence,
        kv_block_ids: list[int],
        path: list[KVCacheBlock],
        digests: bytearray | None,
        *,
        is_held: bool,
    ) -> tuple[list[KVCacheBlock], list[int]]:
        """Cache as much of the sequence's full blocks as there is room for, evicting what nothing holds.

        kv_block_ids: one for each full block, that passed `check_insertable`. path: what is found of the sequence.
        digests: of the full blocks behind it, where changes are named.
        Returns the path that is cached then, and the ids that were evicted. is_held: whether the path is held once;
        else it is the most recently used. O(blocks).
        """
        num_found = len(path)
        num_missing = len(kv_block_ids) - num_found - (self.max_blocks - len(self.ids))
        evicted: list[int] = []
        if num_missing > 0 and self._eviction is not None:
            self.hold(path)  # whatever a policy names
            evicted = self.evict(min(num_missing, self._queue.num_free_blocks))
            self.let_go(path)
        elif num_missing > 0:
            num_queued = self._queue.renew(path)  # last in the queue now, so that what is extended isn't evicted for it
            evicted = self.evict(min(num_missing, self._queue.num_free_blocks - num_queued))
        room = self.max_blocks - len(self.ids)
        new = self._take(kv_block_ids[num_found : num_found + room])
        if self.index.watcher is not None:
            self.index.watcher.note_taking(len(new), None)
        if new:
            node = path[-1].node if path else ROOT
            keys = sequence.encoded_keys(self.block_size)
            if digests is not None:  # perhaps there is no room for all
                del digests[len(new) * self.index.epoch.num_digest_bytes :]
            self.index.cache(node, new, sequence.packed_tokens(), keys, num_found, digests)
        if is_held:
            self.hold(path)  # for the first new block, which is held; without new blocks for the path itself
        else:
            self.let_go(new)
            self.renew(path)  # behind its new end, which is to be evicted first
        return path + new, evicted

    def evict(self, num_blocks: int) -> list[int]:
        """Give up at most `num_blocks` blocks that nothing holds, least recently used first unless a policy says.

        Returns their ids. Payloads that go with them are kept until `drop_payloads`. O(blocks).
        """
        number = min(num_blocks, self._queue.num_free_blocks)
        blocks = self._queue.popleft_n(number) if self._eviction is None else self._choose(self._eviction, number)
        num_evicted = self.index.evict(blocks)
        assert num_evicted == len(blocks), f"evict: {num_evicted} blocks went with {len(blocks)} leaves"
        return self._put_away(blocks)

    def clear(self) -> list[int]:
        """Give up all blocks, none of which is held, as one reset. Returns their ids. O(blocks)."""
        blocks = self._queue.popleft_n(self._queue.num_free_blocks)
        if self._eviction is not None:
            self._eviction.note_clearing(self.index.runs())
        self.index.clear()
        self.index.evict(blocks)  # what they held is of before the reset
        self._payloads.clear()
        return self._put_away(blocks)

    def _put_away(self, blocks: list[KVCacheBlock]) -> list[int]:
        """Keep blocks that hold nothing any more for later; returns their ids. O(blocks)."""
        kv_block_ids = [block.block_id for block in blocks]
        self.ids.difference_update(kv_block_ids)
        self._payloads.forget(blocks)
        self._stock += blocks
        return kv_block_ids

    def _choose(self, eviction: Eviction, num_blocks: int) -> list[KVCacheBlock]:
        """Take so many blocks that nothing holds, as policies say. Nobody is asked where all are to go."""
        taken: list[KVCacheBlock] = []
        if num_blocks == self._queue.num_free_blocks:
            taken = self._queue.popleft_n(num_blocks)
            eviction.note_taken(taken)
        while len(taken) < num_blocks:
            more = eviction.take_next(self._queue, num_blocks - len(taken))
            eviction.note_taken(more)
            taken += more
        return taken

    def attach(self, sequence: Sequence, payload: Any) -> bool:
        """Keep `payload` for exactly this sequence; None: keep nothing. Whether its full blocks are here."""
        path = self.find(sequence)
        if len(path) < sequence.num_tokens // self.block_size:
            return False
        return self._payloads.attach(sequence, path, payload)

    def payload(self, sequence: Sequence, path: list[KVCacheBlock]) -> Any:
        """Return what was attached to exactly this sequence, whose cached blocks are `path`. O(block_size)."""
        if self._payloads.is_empty or len(path) < sequence.num_tokens // self.block_size:
            return None
        return self._payloads.find(sequence, path)

    def drop_payloads(self) -> None:
        """Forget what evicted blocks carried. Called last, since a payload's finalizer may call the cache again."""
        self._payloads.drop()

    def check(self, holds: Iterable[list[KVCacheBlock]]) -> None:
        """Raise AssertionError unless all here agrees, and the paths that are held are `holds`. O(blocks)."""
        blocks = [block for run in self.index.runs() for block in run.blocks]
        num_holds = dict.fromkeys(blocks, 0)
        for path in holds:
            for above, block in zip([None, *path], path, strict=False):
                assert _parent(block) is above, f"{block}: is attached to another block than {above}"
            if path:
                num_holds[path[-1]] += 1
        for block in blocks:
            held_from = _parent(block) if block.ref_cnt else None
            if held_from is not None:
                num_holds[held_from] += 1
        self._queue.check()
        self.index.check()
        if self._eviction is not None:
            self._eviction.check(self._queue)
        indices = {block: i for i, block in enumerate(self._queue)}
        assert {block.block_id for block in blocks} == self.ids, "store: ids that aren't those of the blocks"
        for block in blocks:
            assert block.ref_cnt == num_holds[block], f"{block}: held {num_holds[block]} times"
            assert (block in indices) == (block.ref_cnt == 0), f"{block}: queued and held, or neither"
            parent = _parent(block)
            assert parent is None or parent.ref_cnt or indices[block] < indices[parent], f"{block}: outlives {parent}"
        assert len(indices) == self.num_evictable_blocks, "store: queued blocks that aren't here"
        assert self.index.num_cached_blocks == len(self.ids), f"index: {self.index.num_cached_blocks} cached"
        assert len(self.ids) + len(self._stock) <= self.max_blocks, f"store: more than {self.max_blocks} blocks"
        assert all(block.run is None and block.ref_cnt == 1 for block in self._stock), "store: the stock is in use"
        self._payloads.check(num_holds.keys())

    def check_insertable(self, kv_block_ids: list[int], found: list[int]) -> list[int]:
        """Return those of the ids for whose position there is another one in `found`, the ids of what is cached.

        Raises InvalidArgumentError unless the ids are different ones, and BlockStateError when one is here for another
        prefix. Changes nothing. O(ids).
        """
        num_found = len(found)
        others: list[int] = []
        if kv_block_ids[:num_found] != found:
            others = [given for given, block_id in zip(kv_block_ids, found, strict=False) if given != block_id]
        # Those that are `found` at their positions are different ones, and here. So only the rest is looked at.
        rest = others + kv_block_ids[num_found:]
        if len(set(rest)) != len(rest) or not self.ids.isdisjoint(rest):
            self._refuse(kv_block_ids, found)
        return others

    def _refuse(self, kv_block_ids: list[int], found: list[int]) -> NoReturn:
        num_different = len(set(kv_block_ids))
        if num_different != len(kv_block_ids):
            raise InvalidArgumentError(
                f"kv_block_ids: expected {len(kv_block_ids)} different ones, got {num_different}"
            )
        given = list(enumerate(kv_block_ids))
        position, taken = next((i, one) for i, one in given if one in self.ids and found[i : i + 1] != [one])
        raise BlockStateError(
            f"kv_block_ids: expected ids that hold no other prefix, got {taken} at position {position}, "
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
        self.ids.update(kv_block_ids)
        return blocks


def _parent(block: KVCacheBlock) -> KVCacheBlock | None:
    """The block that a cached block is attached to."""
    run = block.run
    assert run is not None, f"{block}: isn't cached"
    if block.index:
        return run.blocks[block.index - 1]
    above, position, _, _ = run.key
    return None if above is None else above.blocks[position]
