"""Jobs: the load of a sequence or the store of a prefix, in one or more transfers.

A job owns the device's block of each transfer until that transfer is over, and the tiers' slots until the last one is,
whatever happens to sequences in the meantime. So no transfer reads or writes a block that has been given to something
else. A load that a sequence waits for also owns the blocks of its transfers that are over, since they are cached
together when the load ends.
"""

from kvblocks.core.block import KVCacheBlock, Node, Run
from kvblocks.core.hooks import Digests
from kvblocks.core.sequence import Sequence
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.telling import names_of
from kvblocks.tiers.transfer import ENDED, QUEUED, Transfer
from kvblocks.tiers.wishes import Prefix, prefix_of


class Job:
    """What loads and stores have in common.

    transfers: all of the job's. prefix: the blocks that move, and those before them. first: index in the prefix of the
    first block that moves. blocks: the device's blocks that move, in the prefix's order. slots: the tiers' slots for
    them. num_good: how many of the blocks, from the first, are not known to be bad.
    """

    def __init__(self, prefix: Prefix, first: int, slots: list[KVCacheBlock]) -> None:
        self.prefix = prefix
        self.first = first
        self.blocks = blocks = prefix.blocks[first : first + len(slots)]
        self.slots = slots
        self.transfers: list[Transfer] = []
        self.num_open = 0
        self.num_good = len(blocks)
        self._has_arrived = [False] * len(blocks)

    def add(self, transfer: Transfer) -> None:
        """Add one more transfer to the job."""
        self.transfers.append(transfer)
        self.num_open += 1

    def end(self, transfer: Transfer, *, ok: bool) -> None:
        """Record that a transfer is over, and whether its bytes arrived."""
        transfer.state, transfer.has_arrived = ENDED, ok
        self.num_open -= 1
        if ok:
            self._note_arrived(self._has_arrived, transfer)

    def cancel_queued(self) -> None:
        """End the transfers that `take_transfers` hasn't returned yet."""
        for transfer in self.transfers:
            if transfer.state == QUEUED:
                self.end(transfer, ok=False)

    def blocks_of(self, transfer: Transfer) -> list[KVCacheBlock]:
        """Return the device's blocks that a transfer of the job moves. O(blocks of the transfer)."""
        start = transfer.position - self.first
        return self.blocks[start : start + len(transfer.slots)]

    def open_blocks(self) -> list[KVCacheBlock]:
        """Return the device's blocks whose transfers aren't over, in the prefix's order. O(blocks)."""
        return [block for each in self.transfers if each.state != ENDED for block in self.blocks_of(each)]

    def has_arrived(self, also: Transfer | None = None) -> list[bool]:
        """Return, for each block, whether it has arrived. also: a transfer whose blocks count as arrived. O(blocks)."""
        arrived = self._has_arrived
        if also is not None:
            arrived = arrived.copy()
            self._note_arrived(arrived, also)
        return arrived

    def num_arrived(self, also: Transfer | None = None) -> int:
        """Return how many blocks, from the first, have arrived and are good. also: as in `has_arrived`."""
        arrived = self.has_arrived(also)
        return min(arrived.index(False) if False in arrived else len(arrived), self.num_good)

    def _note_arrived(self, arrived: list[bool], transfer: Transfer) -> None:
        start, number = transfer.position - self.first, len(transfer.slots)
        arrived[start : start + number] = [True] * number


class LoadJob(Job):
    """Loads of the blocks in its sequences' tables from index `first` on.

    sequences: those that wait for the load: the one that it was begun for, and later forks. prefix: what the tables
    hold up to the load's end. start: how many of their tokens the sequences had without the load when it began. pools:
    the tier of each slot. parts: for each tier, its slots of the prefix; the job owns them. held: the device's blocks
    that the job owns as long as a sequence waits: all of the prefix.
    """

    def __init__(
        self,
        sequence: Sequence,
        prefix: Prefix,
        first: int,
        slots: list[KVCacheBlock],
        pools: list[TierPool],
        parts: list[tuple[TierPool, list[KVCacheBlock]]],
    ) -> None:
        super().__init__(prefix, first, slots)
        self._block_size = size = parts[0][0].index.block_size
        self.start = first * size
        self.held = [*prefix.blocks]
        self.sequences: dict[Sequence, None] = {sequence: None}
        self.pools = pools
        self.parts = parts

    def stretches(self) -> list[tuple[TierPool, range]]:
        """Return each tier's stretches of consecutive slots, as ranges of slot numbers. O(slots)."""
        found: list[tuple[TierPool, range]] = []
        start = 0
        for number in range(1, len(self.pools) + 1):
            if number == len(self.pools) or self.pools[number] is not self.pools[start]:
                found.append((self.pools[start], range(start, number)))
                start = number
        return found

    def note_lost(self, blocks: set[KVCacheBlock], prefixes: list[Prefix]) -> None:
        """Record lost blocks of the device, and prefixes that are lost in tiers. O(blocks of the load).

        What the load brings of them may be bad too, and so is everything after them. Checking when the load ends would
        be too late, because the blocks may be written and cached again by then.
        """
        # Blocks that no sequence waits for may belong to others by now.
        indices = [index for index, block in enumerate(self.prefix.blocks) if block in blocks and self.sequences]
        indices += [len(lost.blocks) - 1 for lost in prefixes if self.prefix.begins_with(lost, self._block_size)]
        for index in indices:
            self.num_good = min(self.num_good, max(0, index - self.first))
            if index >= self.first:
                self.pools[index - self.first].drop([self.slots[index - self.first]])

    def start_for(self, sequence: Sequence) -> int:
        """Return how many tokens, from the first, a waiting sequence has without the load, in whole blocks. O(1).

        They are fewer than `start` if a part of its hit was lost: the step that was to write it died, or it turned out
        to be bad.
        """
        lost_from = sequence.lost_from
        return self.start if lost_from is None else min(self.start, lost_from) // self._block_size * self._block_size

    def end_in(self, sequence: Sequence, also: Transfer | None = None) -> int:
        """Return the token of a sequence up to which this job's blocks have arrived and are still in its table.

        If the sequence lost a part of its hit, return the end of the remaining part. also: as in `has_arrived`.
        O(blocks).
        """
        start = self.start_for(sequence)
        if start < self.start:
            return start
        table, index = sequence.blocks, self.first
        for block in self.blocks[: self.num_arrived(also)]:
            if index >= len(table) or table[index] is not block:
                break
            index += 1
        return index * self._block_size

    def waits_behind(self, sequence: Sequence, end: int) -> bool:
        """Whether a sequence has a block of this job at token `end`, a multiple of the block size. O(1)."""
        index = end // self._block_size
        number = index - self.first
        return (
            number < len(self.blocks) and index < len(sequence.blocks) and sequence.blocks[index] is self.blocks[number]
        )


class StoreJob(Job):
    """The store of a prefix's blocks, those after the ones that the tier has.

    What arrives is cached in the tier as soon as everything before it is. Until then `TierPool.arrived` has the
    device's block, which the job doesn't own any more.

    run: the run that was wished for. above: lists of slots that the tier already has for the prefix. The first list has
    the primary blocks before those of the store. slots: new ones. The job owns all of these slots. num_done: how many
    blocks, from the first, have been cached in the tier. num_stored: how many of these the tier lacked.
    """

    def __init__(
        self, pool: TierPool, run: Run, prefix: Prefix, above: list[list[KVCacheBlock]], slots: list[KVCacheBlock]
    ) -> None:
        super().__init__(prefix, len(above[0]), slots)
        self.pool = pool
        self.run = run
        self.above = above
        self.num_done = self.num_stored = 0
        self._nodes: list[Node] = [block.node for block in self.blocks]
        self._names = names_of(pool, self.blocks)

    def end(self, transfer: Transfer, *, ok: bool) -> None:
        """As `Job.end`. Caches in the tier what can be, and takes the transfer's blocks out of `TierPool.storing`.

        What comes after a block that didn't arrive, or is not good, is not stored. O(blocks) in all transfers together.
        """
        pool, start, num_good, num_done = self.pool, transfer.position - self.first, self.num_good, self.num_done
        end, salt = start + len(transfer.slots), pool.storing[self.blocks[start]]
        for block in self.blocks[start:end]:
            del pool.storing[block]
        super().end(transfer, ok=ok)
        if not ok:
            self._give_up_from(start)
        self._store_arrived()
        for number in range(max(start, self.num_done), min(end, self.num_good)):
            pool.arrived[self.blocks[number]] = salt
        decided = [*range(num_done, self.num_done)]
        decided += [number for number in range(self.num_good, num_good) if self._has_arrived[number]]
        for number in decided:
            if not start <= number < end:
                del pool.arrived[self.blocks[number]]
        if pool.lost:
            pool.lost.intersection_update([block for block in pool.lost if pool.is_in_store(block)])

    def finish(self) -> None:
        """Release all slots."""
        self.pool.let_go([*self.above[0], *self.slots])

    def waiting_blocks(self) -> list[KVCacheBlock]:
        """Return the device's blocks that have arrived, but after a block that may still arrive. O(blocks)."""
        return [self.blocks[n] for n in range(self.num_done, self.num_good) if self._has_arrived[n]]

    def good_tables(self) -> list[list[KVCacheBlock]]:
        """Return the device's blocks that are still cached, in the order in which they are to be released.

        These are the prefix's blocks, from its beginning to the last block of this store at its node. O(prefix).
        """
        number = len(self.blocks)
        while number and not self._is_in_place(number - 1):
            number -= 1
        if not number:
            return []
        run, index = self._nodes[number - 1]
        return [] if run is None else [prefix_of(run, index + 1).blocks]

    def _give_up_from(self, number: int) -> None:
        """Count block `number`, those after it, and a checkpoint that it splits as not good. O(1)."""
        self.num_good = min(self.num_good, self.prefix.num_whole(self.first, number))

    def _is_in_place(self, number: int) -> bool:
        """Whether a block is still cached at the node at which it was when the store began. O(1)."""
        (run, index), block = self._nodes[number], self.blocks[number]
        return block.run is run and block.index == index and block.is_cached

    def _store_arrived(self) -> None:
        """Cache in the tier what has arrived, up to the first block that hasn't, was lost, or left its node.

        If the slot before is no longer cached, nothing of the rest is good. O(blocks that are cached).
        """
        start = end = self.num_done
        while end < self.num_good and self._has_arrived[end]:
            if not self._is_in_place(end) or self.blocks[end] in self.pool.lost:
                self._give_up_from(end)
                break
            end += 1
        end = self.prefix.num_whole(self.first, end)
        if end <= start:
            return
        before = self._slot_before(start)
        if before is not None and not before.is_cached:
            self._give_up_from(start)
            return
        self.num_done = end
        number = self._store(start, end)
        self.num_stored += number
        self.pool.num_stored_blocks += number

    def _slot_before(self, number: int) -> KVCacheBlock | None:
        """Return the slot that must still be cached when a block is; None if none must. O(1)."""
        if number:
            return self.slots[number - 1]
        return self.above[0][-1] if self.above[0] else None

    def _store(self, start: int, end: int) -> int:
        """Cache slots start to end - 1 in the tier. Returns how many are now cached. O(blocks)."""
        self._cache(start, end)
        self.pool.note_stored(self.slots[start:end], self.prefix, self.first + start)
        return end - start

    def _cache(self, start: int, end: int) -> None:
        """Cache slots of the primary group. O(blocks)."""
        before = self._slot_before(start)
        node: Node = (None, 0) if before is None else before.node
        tokens, keys = memoryview(self.prefix.tokens), self.prefix.extra_keys
        self.pool.index.cache(
            node, self.slots[start:end], tokens, keys, self.first + start, self._names_for(start, end)
        )

    def _names_for(self, start: int, end: int) -> Digests | None:
        """Return the names of blocks start to end - 1 for events; None if no events are recorded. O(blocks)."""
        if self._names is None:
            return None
        size = self.pool.index.epoch.num_digest_bytes
        return Digests(self._names[start * size : end * size])
