"""Jobs: the load of a sequence or the store of a prefix, in one or more transfers.

A job owns the device's block of each transfer until that transfer is over, and the tiers' slots until the last one is,
whatever happens to sequences in the meantime. So no transfer reads or writes a block that has been given to something
else. A load that a sequence waits for also owns the blocks of its transfers that are over, since they are cached
together when the load ends.
"""

from kvblocks.core.block import KVCacheBlock, Node, Run
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.core.hooks import Digests
from kvblocks.core.layout import GroupLayout
from kvblocks.core.sequence import Sequence
from kvblocks.tiers.events import digests_of
from kvblocks.tiers.hit import TierHit
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.prefix import Home, Prefix, prefix_of
from kvblocks.tiers.transfer import ENDED, QUEUED, Transfer


class Job:
    """What loads and stores have in common."""

    def __init__(self, prefix: Prefix, first: int, slots: list[KVCacheBlock]) -> None:
        self.prefix = prefix
        """The blocks that move, and those before them."""
        self.first = first
        """Index in the prefix of the first block that moves."""
        self.blocks = blocks = prefix.blocks[first : first + len(slots)]
        """The device's blocks that move, in the prefix's order."""
        self.slots = slots
        """The tiers' slots for them."""
        self.transfers: list[Transfer] = []
        """All transfers of the job."""
        self.num_open = 0
        """How many of them aren't over."""
        self.num_good = len(blocks)
        """How many of the blocks, from the first, are not known to be bad."""
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


def moved_prefix(sequence: Sequence, load: TierHit) -> Prefix:
    """Return a sequence's primary blocks up to a load's end, then side groups' blocks for the load, then its state's
    blocks.

    O(blocks).
    """
    index, side = load.places[0].index, sequence.side_tables
    size = index.block_size
    num_blocks = (load.first_token + load.num_tokens) // size
    side_blocks: list[KVCacheBlock] = []
    homes: list[Home] = []
    if side is not None:
        tables, state, layout = side.tables, side.live_state, side.layout
        for number, position, _, _ in load.pieces:
            if number < len(tables):
                block = tables[number].live_block(position)
                assert block is not None, f"{sequence}: no block for what is loaded"
                side_blocks.append(block)
                homes.append(layout.side_groups[number].home(position))
            elif number > len(tables):
                assert state is not None and state.arriving is not None, f"{sequence}: waits for no state"
                side_blocks.append(state.arriving.blocks[position])
                homes.append((num_blocks - 1, layout.row_size + position))
    tokens = bytearray(sequence.packed_tokens()[: 4 * size * num_blocks])
    return Prefix(tokens, sequence.encoded_keys(size), sequence.blocks[:num_blocks], side_blocks, homes)


class LoadJob(Job):
    """Loads of the blocks in its sequences' tables from index `first` on. `prefix` is what the tables hold up to the
    load's end.
    """

    def __init__(self, sequence: Sequence, prefix: Prefix, load: TierHit, start: int) -> None:
        """prefix: as `moved_prefix` returns it. load: the last part. start: how many tokens the hit before has."""
        pieces = load.pieces
        super().__init__(prefix, len(load.places[0].blocks), [slot for _, _, _, slot in pieces])
        self._block_size = load.places[0].index.block_size
        self.start = start
        """How many of their tokens the sequences had without the load when it began."""
        self.end_token = load.first_token + load.num_tokens
        """Where the load ends."""
        self.held = [*prefix.blocks]
        """The device's blocks that the job owns as long as a sequence waits: all of the prefix."""
        self.sequences: dict[Sequence, None] = {sequence: None}
        """Those that wait for the load: the one that it was begun for, and later forks."""
        self.pools = [pool for _, _, pool, _ in pieces]
        """The tier of each slot."""
        self.parts: list[tuple[TierPool, list[KVCacheBlock]]] = []
        """For each tier, its slots of the prefix. The job owns them."""
        for pool in dict.fromkeys(self.pools):
            (chain,) = [place.blocks for place in load.places if place.index is pool.index]
            side = [slot for table, _, other, slot in pieces if other is pool and table != len(load.tables)]
            self.parts += [(pool, chain), (pool, side)]

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
        # Blocks that no sequence waits for may have other owners now.
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

    def is_cut(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence that was cut or rewound no longer waits. O(1)."""
        return self.start_for(sequence) < self.start or sequence.num_computed_tokens <= self.start

    def num_kept_after_cut(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence keeps that was cut inside its load: whole blocks. O(1).

        A transfer may still write to a block that it keeps in part.
        """
        num_left, size = sequence.num_computed_tokens, self._block_size
        is_inside = num_left < self.start + len(self.blocks) * size
        return num_left // size * size if is_inside else num_left


class WholeLoadJob(LoadJob):
    """A `LoadJob` of a manager with several groups. The primary group's blocks come before the others.

    With windows or states there is no shorter hit that a sequence could go back to, so if one block is bad, all count
    as bad. The load also relies on blocks of the tables that were cached on the device; if one of these is lost, all
    count as bad. A sequence that is cut before `end_token` no longer waits.
    """

    def __init__(self, sequence: Sequence, prefix: Prefix, load: TierHit, start: int, layout: GroupLayout) -> None:
        super().__init__(sequence, prefix, load, start)
        self._layout = layout
        sizes = [*[side_group.block_size for side_group in layout.side_groups], layout.block_size]
        self._piece_starts = [index * sizes[number] for number, index, _, _ in load.pieces if number < len(sizes)]
        self._first_needed = [first for first, _ in load.tables]
        held = [*load.places[0].blocks]
        held += [block for _, found in load.tables for place, block in found if not place]
        if load.checkpoint is not None and not load.checkpoint[0]:
            held += load.checkpoint[1].blocks
        self._relied_on = set(held)

    def note_lost(self, blocks: set[KVCacheBlock], prefixes: list[Prefix]) -> None:
        """As `LoadJob.note_lost`. The load is also bad if a block that it relies on, but doesn't bring, is lost."""
        # Blocks that no sequence waits for may have other owners now.
        brought = [number for number, block in enumerate(self.blocks) if block in blocks and self.sequences]
        for number in brought:
            self.pools[number].drop([self.slots[number]])
        is_same = [prefix for prefix in prefixes if self.prefix.begins_with(prefix, self._block_size)]
        if brought or is_same or not blocks.isdisjoint(self._relied_on):
            self.num_good = 0

    def start_for(self, sequence: Sequence) -> int:
        """Return how many tokens, from the first, a waiting sequence has without this load: 0 if a part of its hit was
        lost.

        With windows there is no shorter hit to go back to. O(1).
        """
        return self.start if super().start_for(sequence) == self.start else 0

    def end_in(self, sequence: Sequence, also: Transfer | None = None) -> int:
        """Return the token up to which all groups' blocks have arrived, so that a sequence may go on from there.

        If a window lacks a block that this token sees, the answer is the end of the hit before the load. The same holds
        where layers keep a state, if anything is missing, because the loaded state is the one at the load's end.
        """
        if self.num_good < len(self.blocks):
            return self.start_for(sequence)
        arrived, alignment = self.has_arrived(also), self._layout.alignment
        if self._layout.state is not None:
            return self.end_token if all(arrived) else self.start_for(sequence)
        late = [start for start, has_arrived in zip(self._piece_starts, arrived, strict=True) if not has_arrived]
        if not late:
            return self.end_token
        end = min(late) // alignment * alignment
        for side_group, first in zip(self._layout.side_groups, self._first_needed, strict=True):
            if side_group.kind.first_needed(end) < first:
                return self.start_for(sequence)
        return max(end, self.start)

    def waits_behind(self, sequence: Sequence, end: int) -> bool:  # noqa: ARG002  # all that wait have all
        """Whether a sequence has a block of this job after token `end`. O(1)."""
        return end < self.end_token

    def is_cut(self, sequence: Sequence) -> bool:
        """As `LoadJob.is_cut`. A sequence cut inside its load keeps nothing of the load."""
        return sequence.num_computed_tokens < self.end_token

    def num_kept_after_cut(self, sequence: Sequence) -> int:
        """As `LoadJob.num_kept_after_cut`: it wasn't cut inside its load."""
        return sequence.num_computed_tokens


class StoreJob(Job):
    """The store of a prefix's blocks, those after the ones that the tier has.

    What arrives is cached in the tier as soon as everything before it is. Until then `TierPool.arrived` has the
    device's block, which the job doesn't own any more. The job owns the slots: those above, and the new ones.
    """

    def __init__(
        self, pool: TierPool, run: Run, prefix: Prefix, above: list[list[KVCacheBlock]], slots: list[KVCacheBlock]
    ) -> None:
        super().__init__(prefix, len(above[0]), slots)
        self.pool = pool
        self.run = run
        """The run that was asked for."""
        self.above = above
        """Lists of slots that the tier already has for the prefix. The first list has the primary blocks before those
        of the store.
        """
        self.num_done = 0
        """How many blocks, from the first, have been cached in the tier."""
        self.num_stored = 0
        """How many of these the tier lacked."""
        self._nodes: list[Node] = [block.node for block in self.blocks]
        self._digests = digests_of(pool, self.blocks)
        self._num_primary = max(0, prefix.num_primary - self.first)

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
        self.pool.let_go([*self.above[0], *self.slots[: self._num_primary]])
        for slots in [*self.above[1:], self.slots[self._num_primary :]]:
            if slots:
                self.pool.let_go(slots)

    def waiting_blocks(self) -> list[KVCacheBlock]:
        """Return the device's blocks that have arrived, but after a block that may still arrive. O(blocks)."""
        return [self.blocks[n] for n in range(self.num_done, self.num_good) if self._has_arrived[n]]

    def good_tables(self) -> list[list[KVCacheBlock]]:
        """Return the device's blocks that are still cached, in the order in which they are to be released.

        These are the prefix's blocks, from its beginning to the last block of this store at its node, and then those
        attached to them. O(prefix).
        """
        number, tables = len(self.blocks), list[list[KVCacheBlock]]()
        while number and not self._is_in_place(number - 1):
            number -= 1
        if number:
            run, index = self._nodes[number - 1]
            if run is not None:
                tables.append(prefix_of(run, index + 1).blocks)
        side = [self.blocks[n] for n in range(self._num_primary, len(self.blocks)) if self._is_in_place(n)]
        return [*tables, side] if side else tables

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
        """Return the slot that must still be cached when a block is; None if none must. O(1).

        Blocks of side groups need the last primary slot.
        """
        number = min(number, self._num_primary)
        if number:
            return self.slots[number - 1]
        return self.above[0][-1] if self.above[0] else None

    def _store(self, start: int, end: int) -> int:
        """Cache slots start to end - 1 in the tier. Returns how many are now cached. O(blocks).

        Slots of side groups are attached, unless something else is there, and states if they are whole.
        """
        middle = max(start, min(end, self._num_primary))
        if middle > start:
            self._cache(start, middle)
            self.pool.note_stored(self.slots[start:middle], self.prefix, self.first + start)
        if end == middle:
            return end - start
        self._attach(middle - self._num_primary, end - self._num_primary)
        attached = [number for number in range(middle, end) if self.slots[number].is_cached]
        self.pool.pool.requeue_detached()
        for number in attached:
            if self.slots[number].is_cached:
                self.pool.note_stored([self.slots[number]], self.prefix, self.first + number)
        return middle - start + len(attached)

    def _attach(self, start: int, end: int) -> None:
        """Attach slots of side groups, number start to end - 1 of them, to primary slots. O(prefix)."""
        prefix, attached, side = self.prefix, self.pool.index.attached, self.slots[self._num_primary :]
        assert attached is not None, f"{self.pool.name}: not a tier of several groups"
        found = self.pool.match(prefix.token_view(), prefix.extra_keys, prefix.num_primary)
        for number in range(start, min(end, prefix.num_attached)):
            position, column = prefix.homes[number]
            if attached.attach(found[position], column, side[number]):
                attached.note_column(found[: position + 1], prefix.tokens, column)
        for first in prefix.whole_states(end):
            if first >= start:
                chain = found[: prefix.homes[first][0] + 1]
                if attached.checkpoints is not None and attached.checkpoints.at(chain[-1]) is None:
                    checkpoint = Checkpoint(side[first : first + prefix.num_parts], is_likely_end=True)
                    attached.attach_checkpoint(chain[-1], checkpoint)
                    attached.note_checkpoint_at_end(chain, checkpoint, prefix.tokens)

    def _cache(self, start: int, end: int) -> None:
        """Cache slots of the primary group. O(blocks)."""
        before = self._slot_before(start)
        node: Node = (None, 0) if before is None else before.node
        tokens, keys = memoryview(self.prefix.tokens), self.prefix.extra_keys
        self.pool.index.cache(
            node, self.slots[start:end], tokens, keys, self.first + start, self._digests_for(start, end)
        )

    def _digests_for(self, start: int, end: int) -> Digests | None:
        """Return the names of blocks start to end - 1 for events; None if no events are recorded. O(blocks)."""
        if self._digests is None:
            return None
        size = self.pool.index.epoch.num_digest_bytes
        return Digests(self._digests[start * size : end * size])
