"""The blocks of a `PrefixCache`: ids that the engine chose, what they hold, and the order in which they are evicted.

A block is here from its insertion to its eviction. Then its object goes to a stock and is used again, so that a cache
in steady state makes no objects.

As in `BlockPool`, a block is queued exactly when its `ref_cnt` is 0. Only whole paths are held: the first blocks of a
prefix, without a gap. A hold adds a reference to the path's last block, and each block that has references counts as
one reference to its parent. So holding a path costs nothing for the part that it shares with a path held already. In
the queue children come before their parents, so eviction is leaf-first: no block stays longer than its parent.

With `max_bytes` there is a `Budget`, and blocks and payloads are evicted in one order of use, a payload before its
block. Nothing here takes a lock; `PrefixCache` does.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from operator import length_hint
from typing import Any, Final, NoReturn

from kvblocks.core.block import ROOT, KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.hooks import Digests
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.errors import BlockStateError, InvalidArgumentError
from kvblocks.hashing.scheme import HashScheme
from kvblocks.prefix_cache.evicted import EvictedBlocks
from kvblocks.prefix_cache.payloads import MAX_PAYLOADS_A_BLOCK, NewPayload, PayloadEntry, Payloads
from kvblocks.retention.eviction import Eviction

_NEVER: Final = 2**62  # no use has so high a number


class RecencyQueue(FreeBlockQueue):
    """A queue in which a path of blocks can be moved to the end, or taken out to be held."""

    def hold(self, path: Items[KVCacheBlock]) -> None:
        """Add a reference to a path's last block. A block that had none adds one to its parent. O(blocks taken out)."""
        num_kept = 0  # blocks at the path's beginning that were held already, counted without a loop
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
        """Undo one `hold`. Blocks without references go to the queue's end, the first one last. O(those blocks)."""
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
        """Move a path's queued blocks to the end, its first block last, as the most recently used.

        Returns how many are queued; owned blocks aren't. Blocks that were queued together are usually still linked, and
        are moved in one piece. O(blocks).
        """
        first: KVCacheBlock | None = None  # the first of a linked stretch, which ends before `following`
        last = following = self._root
        num_owned = 0
        above = reversed(blocks)
        for block in above:
            if block is not following:
                if first is not None:
                    self._move_to_end(first, last)
                first = None
                if block.ref_cnt:  # then all above it are owned, too
                    num_owned = 1 + length_hint(above)
                    break
                first = block
            last = block
            following = block.next_free_block
        if first is not None:
            self._move_to_end(first, last)
        return len(blocks) - num_owned

    def _move_to_end(self, first: KVCacheBlock, last: KVCacheBlock) -> None:
        """Move the linked blocks from `first` to `last` to the end. O(1)."""
        root, before, after = self._root, first.prev_free_block, last.next_free_block
        before.next_free_block = after
        after.prev_free_block = before
        end = root.prev_free_block
        end.next_free_block = first
        first.prev_free_block = end
        last.next_free_block = root
        root.prev_free_block = last


class Budget:
    """The bound of a cache with `max_bytes`, which blocks and payloads share, as they share one order of use.

    The order of the blocks is that of their queue. To compare a block with a payload, uses are numbered: a use of a
    path gives its number to all of the path's blocks.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """The bytes of all blocks, without payloads."""
        self.use = 0
        """The number of the latest use."""
        self.sizes: dict[KVCacheBlock, int] = {}
        """Each cached block's bytes."""
        self.uses: dict[KVCacheBlock, int] = {}
        """The number of each cached block's latest use."""

    def add(self, blocks: list[KVCacheBlock], block_bytes: int) -> None:
        """Count new blocks of `block_bytes` bytes each. O(blocks)."""
        self.sizes.update(dict.fromkeys(blocks, block_bytes))
        self.num_bytes += block_bytes * len(blocks)

    def note_used(self, path: Items[KVCacheBlock]) -> None:
        """Record the latest use for a path's blocks, all of which moved to the queue's end. O(blocks)."""
        self.uses.update(dict.fromkeys(path, self.use))

    def remove(self, blocks: list[KVCacheBlock]) -> int:
        """Forget blocks. Returns how many bytes they had. O(blocks)."""
        freed = 0
        for block in blocks:
            freed += self.sizes.pop(block)
            del self.uses[block]
        self.num_bytes -= freed
        return freed

    def check(self, blocks: list[KVCacheBlock], queued: list[KVCacheBlock], num_payload_bytes: int) -> None:
        """Raise AssertionError unless the bytes are within the bound and are those of `blocks`. O(blocks)."""
        assert set(blocks) == self.sizes.keys() == self.uses.keys(), "budget: other blocks"
        assert self.num_bytes == sum(self.sizes.values()), "budget: bytes"
        total = self.num_bytes + num_payload_bytes
        assert total <= self.max_bytes, f"budget: {total} bytes of {self.max_bytes}"
        uses = [self.uses[block] for block in queued]
        assert uses == sorted(uses), "budget: not in the order of use"


class PrefixStore:
    """At most `max_blocks` blocks of `block_size` tokens.

    Most methods make one call for all blocks of a path. With one token per block, loops would take most of the time.
    """

    def __init__(
        self,
        max_blocks: int,
        block_size: int,
        hash_scheme: HashScheme,
        eviction: Eviction | None = None,
        budget: Budget | None = None,
    ) -> None:
        """eviction: chooses which blocks are evicted first; None: the least recently used. budget: limits the bytes,
        and can't be combined with `eviction`; None: no limit.
        """
        self.max_blocks = max_blocks
        self._eviction = eviction
        self._budget = budget
        self.block_size = block_size
        self.ids: set[int] = set()
        """The ids of its blocks."""
        self.index = PrefixIndex(block_size, hash_scheme)
        """What they hold."""
        self._queue = RecencyQueue(())
        self._stock: list[KVCacheBlock] = []
        """Objects to use again, with ref_cnt 1, as they leave the queue and as `let_go` needs them."""
        self._payloads = Payloads(block_size, None if budget else (MAX_PAYLOADS_A_BLOCK, max_blocks))

    @property
    def num_bytes(self) -> int:
        """The bytes of all blocks and payloads; 0 without a budget. O(1)."""
        return 0 if self._budget is None else self._budget.num_bytes + self._payloads.num_bytes

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that nothing holds. O(1)."""
        return self._queue.num_free_blocks

    def free_blocks(self) -> Iterable[KVCacheBlock]:
        """Return the blocks that nothing holds, the least recently used first. O(1)."""
        return self._queue

    def find(self, sequence: Sequence) -> list[KVCacheBlock]:
        """Return the blocks of the longest cached prefix. Changes nothing."""
        return find_blocks(self.index, sequence)

    def renew(self, path: list[KVCacheBlock]) -> None:
        """Make a path the most recently used. O(blocks)."""
        self._queue.renew(path)
        if self._budget is not None:
            self._note_used(self._budget, path)
        if self._eviction is not None:
            self._eviction.note_touched(path)
            self._eviction.note_released(path[::-1])

    def hold(self, path: list[KVCacheBlock]) -> None:
        """Keep a path from being evicted. O(blocks that nothing else holds)."""
        self._queue.hold(path)
        if self._eviction is not None:
            self._eviction.note_touched(path)

    def let_go(self, path: list[KVCacheBlock]) -> None:
        """Undo one `hold`. Blocks that nothing else holds become the most recently used. O(1 + those blocks)."""
        self._queue.let_go(path)
        if self._budget is not None:
            self._note_used(self._budget, path)
        if self._eviction is not None:
            self._eviction.note_released(path[::-1])

    def _note_used(self, budget: Budget, path: list[KVCacheBlock]) -> None:
        budget.use += 1
        budget.note_used(path)

    def renew_payload(self, entry: PayloadEntry) -> None:
        """Make a payload the most recently used, together with the path that was renewed last. O(1)."""
        self._payloads.renew(entry, 0 if self._budget is None else self._budget.use)

    def cache(
        self,
        sequence: Sequence,
        kv_block_ids: list[int],
        path: list[KVCacheBlock],
        digests: Digests | None,
        block_bytes: int,
        *,
        is_held: bool,
    ) -> tuple[list[KVCacheBlock], EvictedBlocks]:
        """Cache as many of the sequence's full blocks as there is room for, evicting blocks that nothing holds.

        kv_block_ids: one for each full block; they passed `check_insertable`. path: the sequence's cached blocks.
        digests: of the full blocks after `path`, if digests are needed. block_bytes: the bytes of each new block.
        is_held: whether to hold the new path; otherwise it becomes the most recently used. Returns the path that is
        then cached, and what was evicted. O(blocks).
        """
        num_found = len(path)
        num_missing = len(kv_block_ids) - num_found - (self.max_blocks - len(self.ids))
        if num_missing <= 0:
            evicted = EvictedBlocks()
            evicted.payloads = []
        elif self._eviction is not None:
            self.hold(path)  # so that no policy can name its blocks
            evicted = self.evict(min(num_missing, self._queue.num_free_blocks))
            self.let_go(path)
        else:
            num_queued = self._queue.renew(path)  # to the end, so that none of it is evicted
            evicted = self.evict(min(num_missing, self._queue.num_free_blocks - num_queued))
        room = min(self.max_blocks - len(self.ids), len(kv_block_ids) - num_found)
        budget = self._budget
        if budget is not None:
            budget.use += 1
            room = self._make_room(budget, path, block_bytes, room, evicted)
        blocks = self._take(kv_block_ids[num_found : num_found + room])
        for watcher in self.index.watchers:
            watcher.note_taking(len(blocks), None)
        if blocks:
            node = path[-1].node if path else ROOT
            keys = sequence.encoded_keys(self.block_size)
            if digests is not None:  # there may not be room for all blocks; and they are no sequence's
                digests = Digests(digests.packed[: len(blocks) * self.index.epoch.num_digest_bytes])
            self.index.cache(node, blocks, sequence.packed_tokens(), keys, num_found, digests)
            if budget is not None:
                budget.add(blocks, block_bytes)
        if is_held:
            self.hold(path)  # the first new block's reference to its parent; without new blocks, the hold itself
        else:
            self._queue.let_go(blocks)
            if self._eviction is not None:
                self._eviction.note_released(blocks[::-1])
            self.renew(path)  # behind the new blocks in the queue, which must be evicted first
        path = path + blocks
        if budget is not None:
            self._note_used(budget, path)
        return path, evicted

    def attach_all(
        self, sequence: Sequence, payloads: list[NewPayload], path: list[KVCacheBlock], evicted: EvictedBlocks
    ) -> list[Any]:
        """Attach payloads, none of them None, to prefixes of a sequence that `cache` has just cached as `path`.

        With a budget, older blocks and payloads make room, and are added to `evicted`. Returns those without room.
        O(blocks and payloads).
        """
        return [item.payload for item in payloads if not self._attach_new(sequence, item, path, evicted)]

    def _make_room(
        self, budget: Budget, path: list[KVCacheBlock], block_bytes: int, num_blocks: int, evicted: EvictedBlocks
    ) -> int:
        """Free bytes for `num_blocks` blocks after `path`. Returns for how many there is room. O(blocks)."""
        num_missing = num_blocks * block_bytes - (budget.max_bytes - self.num_bytes)
        if num_missing > 0:
            self._free_bytes(num_missing, path, budget.use, evicted)
        room = budget.max_bytes - self.num_bytes
        return num_blocks if not block_bytes else min(num_blocks, room // block_bytes)

    def _attach_new(
        self, sequence: Sequence, new: NewPayload, path: list[KVCacheBlock], evicted: EvictedBlocks
    ) -> bool:
        """Attach a payload of a sequence's prefix, whose cached blocks `path` were renewed. False: no room."""
        num_blocks = new.num_tokens // self.block_size
        if num_blocks > len(path):
            return False
        budget, beginning = self._budget, path[:num_blocks]
        old = self._payloads.get(sequence, new.num_tokens, beginning)
        if old is not None:
            self._payloads.remove(old)
        if budget is not None:
            num_missing = new.num_bytes - (budget.max_bytes - self.num_bytes)
            if num_missing > 0:
                if new.num_bytes > budget.max_bytes:
                    return False
                self._free_bytes(num_missing, path, budget.use, evicted)
            if new.num_bytes > budget.max_bytes - self.num_bytes:
                return False
        return self._payloads.attach(sequence, beginning, new, 0 if budget is None else budget.use)

    def _free_bytes(self, num_bytes: int, path: list[KVCacheBlock], use: int, evicted: EvictedBlocks) -> None:
        """Evict the least recently used blocks and payloads until `num_bytes` bytes are freed, or nothing is left.

        path: these blocks are kept. use: payloads last used then, or later, are kept unless their block goes. Adds to
        `evicted`. O(blocks of path + evicted).
        """
        budget, queue, payloads = self._budget, self._queue, self._payloads
        assert budget is not None, "store: no budget"
        most_blocks = queue.num_free_blocks - queue.renew(path)
        blocks: list[KVCacheBlock] = []
        freed = 0
        while freed < num_bytes:
            block = queue.first if len(blocks) < most_blocks else None
            entry = payloads.oldest
            if entry is not None and entry.use >= use:
                entry = None
            if entry is not None and (block is None or entry.use <= budget.uses[block]):
                freed += entry.num_bytes
                payloads.remove(entry)
                evicted.payloads.append(entry.payload)
            elif block is not None:
                blocks.append(queue.popleft())
                num_payload_bytes = payloads.num_bytes
                evicted.payloads += payloads.forget((block,))
                freed += budget.sizes[block] + num_payload_bytes - payloads.num_bytes
            else:
                break
        num_evicted = self.index.evict(blocks)
        assert num_evicted == len(blocks), f"evict: {num_evicted} blocks went with {len(blocks)} leaves"
        evicted += self._put_away(blocks)

    def evict(self, num_blocks: int, num_bytes: int = 0) -> EvictedBlocks:
        """Evict until `num_bytes` bytes are freed and `num_blocks` blocks are evicted, or nothing is left.

        Only blocks that nothing holds are evicted, the least recently used first or as a policy says. Payloads that
        were forgotten are kept until `drop_payloads`. O(blocks and payloads).
        """
        if num_bytes:
            evicted = EvictedBlocks()
            evicted.payloads = []
            self._free_bytes(num_bytes, [], _NEVER, evicted)
            more = self.evict(max(num_blocks - len(evicted), 0))
            evicted += more
            evicted.payloads += more.payloads
            return evicted
        number = min(num_blocks, self._queue.num_free_blocks)
        blocks = self._queue.popleft_n(number) if self._eviction is None else self._choose(self._eviction, number)
        num_evicted = self.index.evict(blocks)
        assert num_evicted == len(blocks), f"evict: {num_evicted} blocks went with {len(blocks)} leaves"
        return self._put_away(blocks)

    def clear(self) -> EvictedBlocks:
        """Evict all blocks by a reset; none of them may be held. Returns what was evicted. O(blocks + payloads)."""
        blocks = self._queue.popleft_n(self._queue.num_free_blocks)
        if self._eviction is not None:
            self._eviction.note_clearing(self.index.runs())
        self.index.clear()
        self.index.evict(blocks)  # unmarks blocks that were cached before the reset
        payloads = self._payloads.clear()
        evicted = self._put_away(blocks)
        evicted.payloads = payloads
        return evicted

    def _put_away(self, blocks: list[KVCacheBlock]) -> EvictedBlocks:
        """Put evicted blocks into the stock. Returns their ids and the payloads evicted with them. O(blocks)."""
        kv_block_ids = [block.block_id for block in blocks]
        self.ids.difference_update(kv_block_ids)
        if self._budget is not None:
            self._budget.remove(blocks)
        self._stock += blocks
        evicted = EvictedBlocks(kv_block_ids)
        evicted.payloads = self._payloads.forget(blocks)
        return evicted

    def _choose(self, eviction: Eviction, num_blocks: int) -> list[KVCacheBlock]:
        """Take `num_blocks` blocks that nothing holds, as the policy says. If all of them are taken, it isn't asked."""
        taken: list[KVCacheBlock] = []
        if num_blocks == self._queue.num_free_blocks:
            taken = self._queue.popleft_n(num_blocks)
            eviction.note_taken(taken)
        while len(taken) < num_blocks:
            more = eviction.take_next(self._queue, num_blocks - len(taken))
            eviction.note_taken(more)
            taken += more
        return taken

    def attach(self, sequence: Sequence, payload: Any, num_bytes: int) -> bool:
        """Keep `payload` for exactly this sequence, evicting nothing; None: forget it.

        Returns False if a full block isn't cached, or there is no room. In that case the sequence has no payload any
        more.
        """
        path, budget = self.find(sequence), self._budget
        if len(path) < sequence.num_tokens // self.block_size:
            return False
        old = self._payloads.get(sequence, sequence.num_tokens, path)
        if old is not None:
            self._payloads.remove(old)
        if payload is None:
            return True
        if budget is not None and num_bytes > budget.max_bytes - self.num_bytes:
            return False
        if budget is not None:
            self.renew(path)  # so that the payload, which is in use now, isn't more recent than its block
        new = NewPayload(sequence.num_tokens, payload, num_bytes)
        return self._payloads.attach(sequence, path, new, 0 if budget is None else budget.use)

    def payloads(self, sequence: Sequence, path: list[KVCacheBlock]) -> list[PayloadEntry]:
        """Return the payloads of the sequence's prefixes, the shortest first. path: its cached blocks.

        See `Payloads.find`.
        """
        return [] if self._payloads.is_empty else self._payloads.find(sequence, path)

    def drop_payloads(self) -> None:
        """Drop forgotten payloads. Called last, since a payload's finalizer may call the cache again."""
        self._payloads.drop()

    def check(self, holds: Iterable[list[KVCacheBlock]]) -> None:
        """Raise AssertionError unless all is consistent, and `holds` are the held paths. O(blocks)."""
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
        if self._budget is not None:
            self._budget.check(blocks, [*self._queue], self._payloads.num_bytes)

    def check_insertable(self, kv_block_ids: list[int], found: list[int]) -> list[int]:
        """Return the given ids at positions where other blocks are cached. found: the ids of the cached prefix.

        Raises InvalidArgumentError unless all ids are different, and BlockStateError when an id holds another prefix.
        Changes nothing. O(ids).
        """
        num_found = len(found)
        others: list[int] = []
        if kv_block_ids[:num_found] != found:
            others = [given for given, block_id in zip(kv_block_ids, found, strict=False) if given != block_id]
        # Ids that `found` has at the same position are different and valid. So only the rest is checked.
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
        """Return blocks with these ids and one reference each, from the stock as far as it lasts."""
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
    """Return a cached block's parent, None for the first block of a prefix."""
    run = block.run
    assert run is not None, f"{block}: isn't cached"
    if block.index:
        return run.blocks[block.index - 1]
    above, position, _, _ = run.key
    return None if above is None else above.blocks[position]
