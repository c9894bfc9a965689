"""Jobs: the load of a sequence or the store of a prefix, in one or more transfers.

A job owns the blocks on both sides from its beginning to the end of its last transfer, whatever happens to sequences in
the meantime. So no transfer reads or writes a block that has been given to something else.
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
    that the job owns: all of the prefix, as long as a sequence waits.
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
        indices = [index for index, block in enumerate(self.prefix.blocks) if block in blocks]
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

    run: the run that was wished for. above: lists of slots that the tier already has for the prefix. The first list has
    the primary blocks before those of the store. slots: new ones. The job owns all of these slots.
    """

    def __init__(
        self, pool: TierPool, run: Run, prefix: Prefix, above: list[list[KVCacheBlock]], slots: list[KVCacheBlock]
    ) -> None:
        super().__init__(prefix, len(above[0]), slots)
        self.pool = pool
        self.run = run
        self.above = above
        self._nodes: list[Node] = [block.node for block in self.blocks]
        self._names = names_of(pool, self.blocks)

    def good_tables(self) -> list[list[KVCacheBlock]]:
        """Return the device's blocks that are still cached, in the order in which they are to be released.

        These are the prefix's blocks, from its beginning to the last good block of this store. O(prefix).
        """
        if not self.num_good:
            return []
        run, index = self._nodes[self.num_good - 1]
        return [] if run is None else [prefix_of(run, index + 1).blocks]

    def _leave_uncached(self) -> None:
        """Of the blocks, count as good only those from the first on that are still cached at their nodes and weren't
        lost.

        O(blocks).
        """
        lost = self.pool.lost
        for number in range(self.num_good):
            (run, index), block = self._nodes[number], self.blocks[number]
            if block.run is not run or block.index != index or not block.is_cached or block in lost:
                self.num_good = number
                break
        lost.difference_update(self.blocks)

    def names(self, number: int) -> Digests | None:
        """Return the names of the first `number` blocks for events; None if no events are recorded. O(number)."""
        if self._names is None:
            return None
        return Digests(self._names[: number * self.pool.index.epoch.num_digest_bytes])

    def finish(self) -> int:
        """Cache in the tier what arrived and is good, release all slots, and return how many blocks were stored."""
        self._leave_uncached()
        number, parents = self.num_arrived(), self.above[0]
        if parents and not parents[-1].is_cached:
            number = 0
        if number:
            node: Node = parents[-1].node if parents else (None, 0)
            tokens = memoryview(self.prefix.tokens)
            slots, keys = self.slots[:number], self.prefix.extra_keys
            self.pool.index.cache(node, slots, tokens, keys, len(parents), self.names(number))
            self.pool.note_stored(self.slots[:number], self.prefix, len(parents))
        self.pool.let_go([*parents, *self.slots])
        return number
