"""`GroupTraffic`: `Traffic` of a manager with several groups.

A prefix is stored with the blocks of each group that a hit at its end needs. Lookups ask the device and the tiers
together, so a load moves only what the device lacks.
"""

from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.caching import find_blocks
from kvblocks.core.hit import CacheHit
from kvblocks.core.longest_hit import GroupHit
from kvblocks.core.sequence import Sequence
from kvblocks.core.side_tables import GroupSlots
from kvblocks.tiers.grouped.hit import GroupTierHit
from kvblocks.tiers.grouped.holders import Found, PrefixHolder, find_all_needed, find_longest
from kvblocks.tiers.grouped.jobs import GroupLoadJob, GroupStoreJob, moved_prefix
from kvblocks.tiers.grouped.pool import GroupTierPool
from kvblocks.tiers.grouped.prefix import GroupPrefix, Home
from kvblocks.tiers.grouped.telling import note_restored_rows
from kvblocks.tiers.jobs import LoadJob, StoreJob
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.tier import Tier
from kvblocks.tiers.traffic import Traffic
from kvblocks.tiers.transfer import TierHit
from kvblocks.tiers.wishes import Prefix, prefix_of


class GroupTraffic(Traffic):
    """`Traffic` for several groups, at least one of them with full attention."""

    # What `Tiers` asks.

    def find(self, hit: CacheHit) -> list[TierHit]:
        """Return what the tiers and the device have together after a hit. One lookup in each of them.

        Each part ends where all groups have what the next token sees. A part is left out if it moves more than a longer
        one. The hit learns how much K and V the tiers have, even if they lack its state. Nothing else changes.
        """
        size, sequence, position = self._block_size, hit.sequence, len(hit.blocks)
        if hit.num_tokens < position * size:
            return []
        index, keys = self._group_index(), sequence.encoded_keys(size)
        most = (sequence.num_tokens - 1) // size
        places = [PrefixHolder(index, find_blocks(index, sequence, most * size))]
        end, _ = find_longest(index.layout, places, len(places[0].blocks), sequence.num_tokens)
        end = max(end, position * size)
        found: list[GroupTierHit] = []
        for number, pool in enumerate(self.pools, 1):
            places.append(PrefixHolder(_index_of(pool), pool.match(memoryview(sequence.tokens), keys, most)))
            num_blocks = max([len(place.blocks) for place in places])
            if isinstance(hit, GroupHit):
                hit.num_tier_tokens = max(hit.num_tier_tokens, len(places[-1].blocks) * size)
            longest, tables = find_longest(index.layout, places, num_blocks, sequence.num_tokens)
            if longest <= end:
                continue
            end, pools = longest, self.pools[:number]
            part = GroupTierHit(hit, end, pools, places, tables, found[-1] if found else None)
            while found and part.num_bytes <= 0:
                found.pop()
                part = GroupTierHit(hit, end, pools, places, tables, found[-1] if found else None)
            found.append(part)
        return [*found]

    def with_loads(self, sequence: Sequence, hit: CacheHit | None, loads: list[TierHit]) -> CacheHit | None:  # noqa: ARG002
        """Return the hit, extended by what is to be loaded."""
        if not loads or (hit is not None and not isinstance(hit, GroupHit)):
            return hit  # another manager's hit: `allocate_slots` raises for it
        return _last_of(loads).loading_hit(hit)

    # What the manager tells.

    def note_cut(self, sequence: Sequence) -> None:
        """Record that a sequence was cut. If cut inside its load, it keeps nothing of the load and no longer waits."""
        job = self._loading.get(sequence)
        if isinstance(job, GroupLoadJob) and sequence.num_computed_tokens < job.end_token:
            start = job.start_for(sequence)
            self.leave(sequence)
            if start < min(job.start, sequence.num_computed_tokens):
                self._calls.rewind(sequence, start)

    def note_restored(self, pool: TierPool) -> None:
        """Record that a tier's slots were restored. O(slots)."""
        super().note_restored(pool)
        if pool.index.events is not None:
            note_restored_rows(_index_of(pool))

    def note_lost(self, blocks: list[KVCacheBlock], sequence: Sequence | None, *, are_shared: bool) -> None:
        """As `Traffic.note_lost`. What was stored of checkpoints after lost tokens is forgotten too."""
        super().note_lost(blocks, sequence, are_shared=are_shared)
        if self._group_index().checkpoints is not None:
            lost = set(blocks)
            for owner in [sequence] if sequence is not None else self._sequences.values():
                for pool in self.pools:
                    assert isinstance(pool, GroupTierPool), f"{pool.name}: not a tier of several groups"
                    pool.drop_states(owner, lost)

    # Methods of `Traffic` that several groups need to do otherwise.

    def _make_pool(self, tier: Tier, max_storing: int) -> TierPool:
        layout = self._group_index().layout
        kind = layout.state_kind
        return GroupTierPool(tier, layout, max_storing if kind is None else max(max_storing, kind.checkpoint_blocks))

    def _is_stored(self, load: TierHit) -> bool:
        return _last_of([load]).is_there()

    def _make_load(self, sequence: Sequence, loads: list[TierHit]) -> LoadJob:
        load = _last_of(loads)
        prefix = moved_prefix(sequence, load)
        return GroupLoadJob(sequence, prefix, load, loads[0].first_token)

    def _drop_prefixes(self, blocks: list[KVCacheBlock]) -> list[Prefix]:
        """As `Traffic._drop_prefixes`. Of an attached block's prefix, only what is attached there is forgotten."""
        index = self._group_index()
        columns = {block: _column_of(index, block) for block in blocks if block.is_cached}
        nodes = {block.node for block, column in columns.items() if column is None}
        prefixes: list[Prefix] = []
        for block, column in columns.items():
            if block.run is not None and (block.run, block.index - 1) not in nodes:
                prefix = prefix_of(block.run, block.index + 1)
                prefixes.append(prefix)
                for pool in self.pools:
                    _drop_bad(pool, prefix, column)
        return prefixes

    def _note_started(self, sequence: Sequence) -> None:
        slots = self._slots
        assert isinstance(slots, GroupSlots), f"{slots}: not of several groups"
        slots.end_loads(sequence)

    def _find_store(self, pool: TierPool, run: Run, num_blocks: int) -> tuple[Prefix, list[list[KVCacheBlock]]]:
        """Return what is to be stored with a prefix, and what the tier has of it.

        The stored blocks of windows are those that one of these hits needs: the longest hit that device and tier can
        serve together, a hit at each multiple of `window_store_tokens`, and one at each checkpoint that is stored. The
        checkpoints are the device's last one, and all others except those that are saved at regular distances and were
        of no use yet.
        """
        prefix, layout = prefix_of(run, num_blocks), self._group_index().layout
        parents = pool.match(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
        places = [PrefixHolder(_index_of(pool), parents), PrefixHolder(self._group_index(), prefix.blocks)]
        needed: list[tuple[int, Found]] = find_longest(layout, places, len(prefix.blocks), None)[1]
        tables = [*enumerate(needed)]
        checkpoints, kept_states = self._find_states(places, len(prefix.blocks))
        for number in checkpoints:
            tables += [*enumerate(find_all_needed(layout, places, number * layout.block_size, None) or [])]
        if pool.window_store_tokens is not None:
            for wanted in range(
                pool.window_store_tokens, len(prefix.blocks) * layout.block_size, pool.window_store_tokens
            ):
                end = wanted // layout.alignment * layout.alignment
                tables += [*enumerate(find_all_needed(layout, places, end, None) or [])] if end else []
        kept: dict[KVCacheBlock, None] = {}
        side: dict[KVCacheBlock, Home] = {}
        for number, (first, found) in tables:
            for index, (place, block) in enumerate(found, first):
                if place:
                    side[block] = layout.side_groups[number].home(index)
                else:
                    kept[block] = None
        kind = layout.state_kind
        found_prefix = GroupPrefix(
            prefix, [*side], [*side.values()], num_parts=1 if kind is None else kind.checkpoint_blocks
        )
        found_prefix.add_states(checkpoints, layout.row_size)
        return found_prefix, [parents, [*kept], kept_states]

    def _find_states(
        self, places: list[PrefixHolder], num_blocks: int
    ) -> tuple[dict[int, list[KVCacheBlock]], list[KVCacheBlock]]:
        """Return the device's checkpoints to be stored, by the number of blocks before each, and slots to keep.

        places: the tier and the device. The slots are those of the tier's last checkpoint. O(blocks).
        """
        layout = self._group_index().layout
        if layout.state is None:
            return {}, []
        missing: dict[int, list[KVCacheBlock]] = {}
        step, newest = layout.alignment // layout.block_size, places[1].last_checkpoint(num_blocks * layout.block_size)
        for number in range(step, num_blocks + 1, step):
            end = number * layout.block_size
            found = places[1].checkpoint(end)
            is_wanted = found is not None and (found.is_landmark or end == newest)
            if found is not None and is_wanted and places[0].checkpoint(end) is None:
                missing[number] = found.blocks
        last = places[0].checkpoint(places[0].last_checkpoint(num_blocks * layout.block_size))
        return missing, [] if last is None else last.blocks

    def _make_store(
        self, pool: TierPool, run: Run, prefix: Prefix, above: list[list[KVCacheBlock]], slots: list[KVCacheBlock]
    ) -> StoreJob:
        assert isinstance(prefix, GroupPrefix), "not what `_find_store` found"
        return GroupStoreJob(pool, run, prefix, above, slots)

    def _group_index(self) -> GroupIndex:
        index = self._slots.pool.index
        assert isinstance(index, GroupIndex), f"{index}: not of several groups"
        return index


def _index_of(pool: TierPool) -> GroupIndex:
    index = pool.index
    assert isinstance(index, GroupIndex), f"{pool.name}: not a tier of several groups"
    return index


def _last_of(loads: list[TierHit]) -> GroupTierHit:
    """Return the last of a sequence's loads, whose `pieces` are those of all of them."""
    load = loads[-1]
    assert isinstance(load, GroupTierHit), f"{load}: not of several groups"
    return load


def _column_of(index: GroupIndex, block: KVCacheBlock) -> int | None:
    """Return the column in which a cached block is attached; None for one of the primary group. O(columns).

    For a part of a checkpoint, this is the first column after those of a row.
    """
    for column, other in enumerate(index.row(block) or []):
        if other is block:
            return column
    is_part = index.checkpoints is not None and index.checkpoints.of(block) is not None
    return index.layout.row_size if is_part else None


def _drop_bad(pool: TierPool, prefix: Prefix, column: int | None) -> None:
    """Forget the last block of a prefix in a tier, or, with a column, what is attached to it in that column."""
    if column is None:
        pool.drop_prefix(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
        return
    found = pool.match(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
    index = _index_of(pool)
    if len(found) < len(prefix.blocks):
        return
    if column < index.layout.row_size:
        slot = index.attached(found[-1], column)
    else:
        checkpoint = None if index.checkpoints is None else index.checkpoints.at(found[-1])
        slot = None if checkpoint is None else checkpoint.blocks[0]
    if slot is not None:
        pool.drop([slot])
