"""Cached blocks of groups beside the primary one: companions, which hang from the primary group's cached blocks.

A companion hangs from the node (run, position) that ends with the same token, so it needs no key of its own. It means
what the node means, and a node never comes to mean a second prefix, whatever the hash: a companion is found exactly
as long as its whole prefix is. When a node goes, its companions can never be hit again; they are cached no more and
come to `detached`, for the pool to have them reused first.

A node has a row of places, one for each companion block that ends in it. A place holds one block: where a second
sequence brings another, the newer one stays if nobody owns the older, which is then detached; otherwise the newer
one isn't cached. A companion's `run` and `index` say where it hangs, so that it counts as cached as any block does.

Invariants: every row belongs to a cached position and holds at least one block; a block in a row leads back to it.
"""

from struct import pack

from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.hashing import HashFunction
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvblocks.groups.layout import Companion, GroupLayout
from kvblocks.observe.removal_history import RemovalCause

Row = list[KVCacheBlock | None]


class GroupIndex(PrefixIndex):
    """The prefix index of the primary group, with what hangs from it."""

    def __init__(self, layout: GroupLayout, hash_function: HashFunction, *, enable_events: bool = False) -> None:
        super().__init__(layout.block_size, hash_function, enable_events=enable_events)
        self.layout = layout
        self.num_companions = 0
        self._rows: dict[Run, dict[int, Row]] = {}
        self._empty_row: Row = [None] * layout.row_size
        self._removal_cause: RemovalCause = "evicted"

    def row(self, block: KVCacheBlock) -> Row | None:
        """Return what hangs from where a primary block is cached, by place; None: nothing. Not to be changed. O(1)."""
        rows = None if block.run is None else self._rows.get(block.run)
        return None if rows is None else rows.get(block.index)

    def companion(self, primary: KVCacheBlock, place: int) -> KVCacheBlock | None:
        """Return the block in a place of the row of a cached primary block, None if there is none. O(1)."""
        row = self.row(primary)
        return None if row is None else row[place]

    def rows(self, primaries: list[KVCacheBlock], first: int, end: int) -> list[Row]:
        """Return the rows of cached primary blocks first to end - 1, an empty one where nothing hangs. O(rows)."""
        found: list[Row] = []
        run: Run | None = None
        rows: dict[int, Row] = {}
        empty = self._empty_row
        for primary in primaries[first:end]:
            if primary.run is not run:
                run = primary.run
                rows = {} if run is None else self._rows.get(run, {})
            found.append(rows.get(primary.index, empty))
        return found

    def hang(self, primary: KVCacheBlock, place: int, block: KVCacheBlock) -> bool:
        """Cache `block`, which isn't cached, where `primary` is, unless the place is taken by an owned one. O(1).

        Returns whether the place was empty: whether something is cached that wasn't.
        """
        run = primary.run
        assert run is not None and run.epoch.is_current, f"{primary}: nothing can hang from it"
        row = self._rows.setdefault(run, {}).setdefault(primary.index, [None] * self.layout.row_size)
        older = row[place]
        if older is not None and older.ref_cnt:
            return False
        row[place] = block
        block.run, block.index = run, primary.index
        if older is not None:
            older.run = None
            self.version += 1
            self.detached.append(older)
            return False
        self.num_companions += 1
        self._count(run, 1)
        return True

    def note_hung(self, companion: Companion, chain: list[KVCacheBlock], number: int, tokens: bytes) -> None:
        """Record that a group's block `number` became cached. chain: the sequence's primary blocks, all cached."""
        if self.events is None:
            return
        name = self._name_in_chain(companion, chain, number)
        parent = self._name_in_chain(companion, chain, number - 1) if number else None
        keys: tuple[tuple[int, bytes], ...] = ()
        primary = chain[companion.home(number)[0]]
        if companion.block_size == self.block_size and primary.run is not None and primary.run.extra_keys:
            key = primary.run.extra_keys.get(primary.index)
            keys = () if key is None else ((0, key),)
        self.events.append(BlockStored((name,), parent, tokens, companion.block_size, keys, companion.group))

    def name(self, primary: KVCacheBlock, companion: Companion, place: int) -> bytes:
        """Return how a companion is named to the outside: the digest of the primary block that it ends in.

        Behind that, where several of its group end in one, comes which of them as a little-endian u32. O(1) when the
        digest is known.
        """
        digest = primary.block_hash or b""
        return digest if companion.num_places == 1 else digest + pack("<I", place - companion.first_place)

    def evict(self, blocks: list[KVCacheBlock]) -> int:
        """`PrefixIndex.evict`; of primary blocks and companions."""
        num_cached_before = self.num_cached_blocks
        for block in blocks:
            self.evict_one(block)
        return num_cached_before - self.num_cached_blocks

    def evict_one(self, block: KVCacheBlock) -> int:
        """`evict` of one block. Returns how many stopped being cached, those that hung from it included."""
        if block.run is None:
            return 0
        num_cached_before = self.num_cached_blocks
        self._removal_cause = "evicted"
        if not self._drops(block):
            super().evict([block])
        return num_cached_before - self.num_cached_blocks

    def forget(self, block: KVCacheBlock) -> None:
        """Stop caching what `block` holds, as of its node; what hangs there was perhaps never written either."""
        self._removal_cause = "aborted"
        if block.run is not None and block.run.epoch.is_current:
            if self._drops(block):
                return
            self._orphan(block.run, block.index, block.index + 1)
        super().forget(block)

    def clear(self) -> None:
        """Stop caching everything, companions too."""
        super().clear()
        self._rows = {}
        self.num_companions = 0

    def take_events(self) -> list[CacheEvent]:
        """Return the records since the last call; those of the primary group say so, those of ghosts are left out."""
        primary, events = self.layout.primary, super().take_events()
        shown: list[CacheEvent] = []
        for event in events:
            if isinstance(event, AllBlocksCleared) or event.group_idx is not None:
                shown.append(event)
            elif primary is not None:
                shown.append(event.of_group(primary))
        return shown

    def count_companions(self) -> list[tuple[Run, int]]:
        """Return the runs that companions hang from, and how many do. O(rows)."""
        return [
            (run, sum([sum([block is not None for block in row]) for row in rows.values()]))
            for run, rows in self._rows.items()
        ]

    def num_cached_by_group(self) -> list[int]:
        """Return how many blocks of each group are cached. O(rows)."""
        counts = [0] * len(self.layout.groups)
        for rows in self._rows.values():
            for row in rows.values():
                for companion in self.layout.companions:
                    places = row[companion.first_place : companion.first_place + companion.num_places]
                    counts[companion.group] += sum([block is not None for block in places])
        if self.layout.primary is not None:
            counts[self.layout.primary] = self.num_cached_blocks - self.num_companions
        return counts

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants and those of the runs hold. O(cached blocks)."""
        num_companions = 0
        for run, rows in self._rows.items():
            assert run.epoch is self.epoch and rows, f"{run}: blocks hang from what isn't cached"
            for position, row in rows.items():
                blocks = [block for block in row if block is not None]
                assert blocks and position < len(run.blocks), f"{run}: a row of nothing at {position}"
                for block in blocks:
                    assert block.run is run and block.index == position, f"{block}: doesn't lead to its row"
                num_companions += len(blocks)
        assert num_companions == self.num_companions, f"index: {num_companions} hang, {self.num_companions} counted"
        num_cached = self._check_runs() + num_companions
        assert num_cached == self.num_cached_blocks, f"index: {num_cached} cached, {self.num_cached_blocks} counted"

    def _cut(self, run: Run, position: int, removed: list[bytes]) -> list[KVCacheBlock]:
        if self._rows:
            chain = [(run, position)]
            for above, start in chain:  # grows while it is walked
                chain += [(child, 0) for child in above.children_from(start)]
            for below, start in reversed(chain):
                self._orphan(below, start, len(below.blocks))
        return super()._cut(run, position, removed)

    def _orphan(self, run: Run, first: int, end: int) -> None:
        """Stop caching what hangs from positions first to end - 1 of a run, last first. O(positions)."""
        rows = self._rows.get(run)
        if rows is None:
            return
        for position in range(end - 1, first - 1, -1):
            for block in rows.get(position, ())[::-1]:
                if block is not None:
                    self._let_go(block)
                    self.detached.append(block)

    def _drops(self, block: KVCacheBlock) -> bool:
        """Stop caching `block` if it is a companion. Whether it was, or was one before a reset."""
        row = self.row(block)
        if row is None or block not in row:
            return False
        self._let_go(block)
        self.version += 1
        return True

    def _let_go(self, block: KVCacheBlock) -> None:
        run = block.run
        assert run is not None
        rows = self._rows[run]
        row = rows[block.index]
        place = row.index(block)
        if self.names_changes:
            self._note_gone(block, place)
        row[place] = None
        if not any(row):
            del rows[block.index]
            if not rows:
                del self._rows[run]
        block.run = None
        self.num_companions -= 1
        self._count(run, -1)

    def _note_gone(self, block: KVCacheBlock, place: int) -> None:
        for companion in self.layout.companions:
            if companion.first_place <= place < companion.first_place + companion.num_places:
                name = self.name(block, companion, place)
                if self.events is not None:
                    self.events.append(BlockRemoved((name,), group_idx=companion.group))
                if self.history is not None:
                    self.history.record([history_key(companion.group, name)], self._removal_cause)

    def _name_in_chain(self, companion: Companion, chain: list[KVCacheBlock], number: int) -> bytes:
        position, place = companion.home(number)
        return self.name(chain[position], companion, place)


def history_key(group: int, name: bytes) -> bytes:
    """Return what the eviction history knows a group's block by."""
    return pack("<I", group) + name
