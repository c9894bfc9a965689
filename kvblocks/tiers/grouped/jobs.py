"""Loads and stores of several groups: the jobs of `tiers.jobs`, with the blocks of a `GroupPrefix`."""

from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.sequence import Sequence
from kvblocks.core.tables import tables_of
from kvblocks.tiers.grouped.hit import GroupTierHit
from kvblocks.tiers.grouped.prefix import GroupPrefix, Home
from kvblocks.tiers.grouped.telling import attach_checkpoint, note_attached
from kvblocks.tiers.jobs import LoadJob, StoreJob
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.transfer import Transfer
from kvblocks.tiers.wishes import Prefix


def moved_prefix(sequence: Sequence, load: GroupTierHit) -> GroupPrefix:
    """Return a sequence's primary blocks up to a load's end, then side groups' blocks for the load, then its state's
    blocks.

    O(blocks).
    """
    size, tables, state = load.layout.block_size, tables_of(sequence).tables, tables_of(sequence).live_state
    num_blocks = (load.first_token + load.num_tokens) // size
    side_blocks: list[KVCacheBlock] = []
    homes: list[Home] = []
    for number, index, _, _ in load.pieces:
        if number < len(tables):
            block = tables[number].live_block(index)
            assert block is not None, f"{sequence}: no block for what is loaded"
            side_blocks.append(block)
            homes.append(load.layout.side_groups[number].home(index))
        elif number > len(tables):
            assert state is not None and state.arriving is not None, f"{sequence}: waits for no state"
            side_blocks.append(state.arriving.blocks[index])
            homes.append((num_blocks - 1, load.layout.row_size + index))
    tokens = bytearray(sequence.packed_tokens()[: 4 * size * num_blocks])
    prefix = Prefix(tokens, sequence.encoded_keys(size), sequence.blocks[:num_blocks])
    return GroupPrefix(prefix, side_blocks, homes)


class GroupLoadJob(LoadJob):
    """A `LoadJob` of several groups. The primary group's blocks come before the others.

    If one block is bad, all count as bad. The load also relies on blocks of the tables that were cached on the device;
    if one of these is lost, all count as bad. end_token: where the load ends. A sequence that is cut before end_token
    no longer waits.
    """

    def __init__(self, sequence: Sequence, prefix: GroupPrefix, load: GroupTierHit, start: int) -> None:
        """prefix: as `moved_prefix` returns it. start: how many tokens the sequence's hit has."""
        pieces = load.pieces
        num_held = len(load.places[0].blocks)
        pools = [pool for _, _, pool, _ in pieces]
        parts: list[tuple[TierPool, list[KVCacheBlock]]] = []
        for pool in dict.fromkeys(pools):
            chain = [place.blocks for place in load.places if place.index is pool.index]
            num_side = len(load.tables)
            side = [slot for table, _, other, slot in pieces if other is pool and table != num_side]
            parts += [(pool, chain[0]), (pool, side)]
        super().__init__(sequence, prefix, num_held, [slot for _, _, _, slot in pieces], pools, parts)
        self.start = start
        self.end_token = load.first_token + load.num_tokens
        self._layout = load.layout
        sizes = [*[side_group.block_size for side_group in self._layout.side_groups], self._layout.block_size]
        self._piece_starts = [index * sizes[number] for number, index, _, _ in pieces if number < len(sizes)]
        self._first_needed = [first for first, _ in load.tables]
        held = [*load.places[0].blocks]
        held += [block for _, found in load.tables for place, block in found if not place]
        if load.checkpoint is not None and not load.checkpoint[0]:
            held += load.checkpoint[1].blocks
        self._relied_on = set(held)

    def note_lost(self, blocks: set[KVCacheBlock], prefixes: list[Prefix]) -> None:
        """As `LoadJob.note_lost`. The load is also bad if a block that it relies on, but doesn't bring, is lost."""
        # Blocks that no sequence waits for may belong to others by now.
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


class GroupStoreJob(StoreJob):
    """A `StoreJob` of several groups. above: the primary slots before the store, then slots of side groups to keep."""

    def __init__(
        self, pool: TierPool, run: Run, prefix: GroupPrefix, above: list[list[KVCacheBlock]], slots: list[KVCacheBlock]
    ) -> None:
        super().__init__(pool, run, prefix, above, slots)
        self._group_prefix = prefix
        self._num_primary = max(0, prefix.num_primary - self.first)

    def good_tables(self) -> list[list[KVCacheBlock]]:
        """Return the device's blocks that are still cached, the primary group's before those attached to them."""
        primary = super().good_tables()
        side = [self.blocks[n] for n in range(self._num_primary, len(self.blocks)) if self._is_in_place(n)]
        return [*primary, side]

    def finish(self) -> None:
        """Release all slots."""
        self.pool.let_go([*self.above[0], *self.slots[: self._num_primary]])
        for slots in [*self.above[1:], self.slots[self._num_primary :]]:
            self.pool.let_go(slots)

    def _slot_before(self, number: int) -> KVCacheBlock | None:
        """As `StoreJob`. Blocks of side groups need the last primary slot."""
        return super()._slot_before(min(number, self._num_primary))

    def _store(self, start: int, end: int) -> int:
        """As `StoreJob`. Slots of side groups are attached, unless something else is there, and states if whole."""
        num_stored, middle = 0, max(start, min(end, self._num_primary))
        if middle > start:
            self._cache(start, middle)
            num_stored = middle - start
        if end > middle:
            self._attach(middle - self._num_primary, end - self._num_primary)
            num_stored += sum([slot.is_cached for slot in self.slots[middle:end]])
            self.pool.pool.requeue_detached()
        for number in range(start, end):
            if self.slots[number].is_cached:
                self.pool.note_stored([self.slots[number]], self.prefix, self.first + number)
        return num_stored

    def _attach(self, start: int, end: int) -> None:
        """Attach slots of side groups, number start to end - 1 of them, to primary slots. O(prefix)."""
        prefix, index, side = self._group_prefix, self.pool.index, self.slots[self._num_primary :]
        assert isinstance(index, GroupIndex), f"{self.pool.name}: not a tier of several groups"
        found = self.pool.match(prefix.token_view(), prefix.extra_keys, prefix.num_primary)
        for number in range(start, min(end, prefix.num_attached)):
            position, column = prefix.homes[number]
            if index.attach(found[position], column, side[number]):
                note_attached(index, found[: position + 1], prefix.tokens, column)
        for first in prefix.whole_states(end):
            if first >= start:
                slots = side[first : first + prefix.num_parts]
                attach_checkpoint(index, found[: prefix.homes[first][0] + 1], slots, prefix.tokens)
