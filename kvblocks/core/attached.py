"""Cached blocks of the side groups, attached to the primary group's cached blocks.

An attached block is attached to the node (run, position) of the primary block that contains its last token, so it needs
no key of its own. Its prefix is part of the node's, and a node never comes to mean a second prefix, whatever the hash.
An attached block can therefore be found exactly as long as its whole prefix can. When the node's prefix stops being
cached, its attached blocks can never be hit again. They stop being cached and are put into `detached`, and the pool has
them reused first.

A node has a row with a column for each attached block that ends in it. A column holds one block. If a second sequence
brings another block for it, the newer one takes the place of the older one, which is detached, unless the older one has
an owner. In that case the newer block isn't cached. An attached block has the `run` and `index` of its node, so it
counts as cached.

Checkpoints of recurrent states (`states.checkpoint`) are attached to nodes in the same way, each as one object.

Invariants: every row belongs to a cached position and holds at least one block; a block in a row leads back to it.
"""

from collections.abc import Hashable
from struct import pack

from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.checkpoints import Checkpoint, Checkpoints
from kvblocks.core.hooks import RemovalCause
from kvblocks.core.layout import GroupLayout, SideGroup
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.events import BlockRemoved, BlockStored
from kvblocks.hashing.extra_keys import decode_salt_and_lora
from kvblocks.hashing.scheme import HashScheme

Row = list[KVCacheBlock | None]


class GroupIndex(PrefixIndex):
    """The prefix index of the primary group, with the attached blocks.

    checkpoints: None where no group keeps a state. num_attached_blocks: how many are attached, including checkpoints'.
    """

    def __init__(self, layout: GroupLayout, hash_scheme: HashScheme) -> None:
        super().__init__(layout.block_size, hash_scheme)
        self.layout = layout
        self.checkpoints = None if layout.state is None else Checkpoints()
        self.num_attached_blocks = 0
        self._rows: dict[Run, dict[int, Row]] = {}
        self._empty_row: Row = [None] * layout.row_size
        self._gone: list[bytes] = []  # removal keys of attached blocks that this call stops caching

    def row(self, block: KVCacheBlock) -> Row | None:
        """Return the row of a cached primary block, None if nothing is attached. Don't change it. O(1)."""
        rows = None if block.run is None else self._rows.get(block.run)
        return None if rows is None else rows.get(block.index)

    def rows_of(self, run: Run) -> dict[int, Row]:
        """Return the rows of a run, by position. Don't change them. O(1)."""
        return self._rows.get(run, {})

    def attached(self, primary: KVCacheBlock, column: int) -> KVCacheBlock | None:
        """Return the block in a column of the row of a cached primary block, None if there is none. O(1)."""
        row = self.row(primary)
        return None if row is None else row[column]

    def rows(self, primaries: list[KVCacheBlock], first: int, end: int) -> list[Row]:
        """Return the rows of cached primary blocks first to end - 1. A row is empty if nothing is attached. O(rows)."""
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

    def attach(self, primary: KVCacheBlock, column: int, block: KVCacheBlock) -> bool:
        """Attach `block`, which isn't cached, to `primary`, unless the column holds an owned block. O(1).

        Returns whether the column was empty, so that something new is cached.
        """
        run = primary.run
        assert run is not None and run.epoch.is_current, f"{primary}: nothing can be attached to it"
        row = self._rows.setdefault(run, {}).setdefault(primary.index, [None] * self.layout.row_size)
        older = row[column]
        if older is not None and older.ref_cnt:
            return False
        row[column] = block
        block.run, block.index = run, primary.index
        if older is not None:
            older.run = None
            self.version += 1
            self.detached.append(older)
            return False
        self.num_attached_blocks += 1
        self._count(run, 1)
        return True

    def attach_checkpoint(self, primary: KVCacheBlock, checkpoint: Checkpoint) -> None:
        """Attach a checkpoint to a cached primary block, which has none. O(blocks)."""
        assert self.checkpoints is not None, "no group keeps a state"
        self.checkpoints.add(primary, checkpoint)
        self.num_attached_blocks += len(checkpoint.blocks)
        if checkpoint.run is not None:
            self._count(checkpoint.run, len(checkpoint.blocks))

    def note_attached(
        self,
        side_group: SideGroup,
        chain: list[KVCacheBlock],
        number: int,
        tokens: bytes,
        sequence_id: Hashable = None,
    ) -> None:
        """Record that a group's block `number` became cached. chain: the sequence's primary blocks, all cached.

        sequence_id: that of the sequence; None if there is no sequence.
        """
        log = self.events
        if log is None:
            return
        name = self.name_in_chain(side_group, chain, number)
        parent = self.name_in_chain(side_group, chain, number - 1) if number else None
        keys: tuple[tuple[int, bytes], ...] = ()
        primary = chain[side_group.home(number)[0]]
        if side_group.block_size == self.block_size and primary.run is not None and primary.run.extra_keys:
            key = primary.run.extra_keys.get(primary.index)
            keys = () if key is None else ((0, key),)
        block = self.attached(primary, side_group.home(number)[1])
        ids = () if block is None else (block.block_id,)
        salt, lora = decode_salt_and_lora(None if primary.run is None else primary.run.first_keys)
        size, group, kind = side_group.block_size, side_group.group, side_group.kind
        log.append(
            BlockStored(
                *((name,), parent, tokens, size, keys, group, ids, salt, lora),
                *(kind.event_kind, kind.window_tokens, log.medium, sequence_id),
            )
        )

    def note_checkpoint(
        self,
        chain: list[KVCacheBlock],
        num_blocks: int,
        checkpoint: Checkpoint,
        tokens: bytes,
        sequence_id: Hashable = None,
    ) -> None:
        """Record that a checkpoint became cached, as one block of `alignment` tokens that has several ids.

        chain: the sequence's primary blocks. num_blocks: how many of them come before the checkpoint. tokens: the last
        `alignment` tokens of these.
        """
        log, group, size = self.events, self.layout.state, self.layout.alignment
        if log is None or group is None:
            return
        before = num_blocks - size // self.block_size
        primary, kind = chain[num_blocks - 1], self.layout.groups[group]
        salt, lora = decode_salt_and_lora(None if primary.run is None else primary.run.first_keys)
        log.append(
            BlockStored(
                (primary.block_hash or b"",),
                (chain[before - 1].block_hash or b"") if before else None,
                tokens,
                size,
                (),
                group,
                tuple([block.block_id for block in checkpoint.blocks]),
                *(salt, lora, kind.event_kind, kind.window_tokens, log.medium, sequence_id),
            )
        )

    def name(self, primary: KVCacheBlock, side_group: SideGroup, column: int) -> bytes:
        """Return the name of an attached block for the outside: the digest of the primary block that it ends in.

        If several blocks of its group end in a primary block, its number among them follows as a little-endian u32.
        O(1) when the digest is known.
        """
        digest = primary.block_hash or b""
        return digest if side_group.num_columns == 1 else digest + pack("<I", column - side_group.first_column)

    def evict(self, blocks: list[KVCacheBlock]) -> int:
        """`PrefixIndex.evict` of primary blocks and attached blocks."""
        num_cached_before = self.num_cached_blocks
        for block in blocks:
            if block.run is not None:
                if self._drops(block):
                    self._note_drop("evicted")
                else:
                    super().evict([block])
        return num_cached_before - self.num_cached_blocks

    def evict_one(self, block: KVCacheBlock) -> int:
        """`evict` of one cached block, and of the blocks which that detaches."""
        num_cached_before = self.num_cached_blocks
        if self._drops(block):
            self._note_drop("evicted")
        else:
            super().evict_one(block)
        return num_cached_before - self.num_cached_blocks

    def num_bare(self, first: KVCacheBlock | None, most: int) -> int:
        """Return how many queued blocks, from `first` on, are the last ones of a run, the last one first.

        At most `most`. Only blocks count to which nothing is attached or chained, so that evicting them evicts nothing
        else. O(blocks + checkpoints of the run).
        """
        run = None if first is None else first.run
        if run is None or run.epoch is not self.epoch or run.children or run.duplicates or self.needs_digests:
            return 0
        if run in self._rows:
            return 0
        block, number = first, 0
        most = min(most, len(run.blocks) - (0 if self.checkpoints is None else self.checkpoints.num_with_last(run)))
        while number < most and block is run.blocks[-1 - number]:
            block = block.next_free_block
            number += 1
        return number

    def evict_bare(self, blocks: list[KVCacheBlock]) -> int:
        """`evict` all at once the blocks that `num_bare` counted. O(blocks)."""
        run = blocks[0].run
        assert run is not None, f"{blocks[0]}: isn't cached"
        self.version += 1
        super()._cut_end(run, len(run.blocks) - len(blocks))
        return len(blocks)

    def forget(self, block: KVCacheBlock, cause: RemovalCause = "aborted") -> None:
        """Stop caching `block` and the blocks attached to it, since these may not have been written either."""
        if block.run is not None and block.run.epoch.is_current:
            if self._drops(block):
                self.detached.append(block)
                self._note_drop(cause)
                return
            self._detach(block.run, block.index, block.index + 1)
        super().forget(block, cause)

    def clear(self) -> None:
        """Stop caching everything, including attached blocks."""
        super().clear()
        self._rows = {}
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self.num_attached_blocks = 0

    def count_by_run(self) -> list[tuple[Run, int]]:
        """Return the runs, parents before children, each with its number of cached blocks, attached ones included."""
        counts = [
            (run, number + sum([sum([block is not None for block in row]) for row in self._rows.get(run, {}).values()]))
            for run, number in super().count_by_run()
        ]
        own = self.checkpoints
        if own is None:
            return counts
        return [(run, n + sum([len(found.blocks) for found in own.in_run(run).values()])) for run, n in counts]

    def num_cached_by_group(self) -> list[int]:
        """Return how many blocks of each group are cached. O(rows)."""
        counts = [0] * len(self.layout.groups)
        for rows in self._rows.values():
            for row in rows.values():
                for side_group in self.layout.side_groups:
                    columns = row[side_group.first_column : side_group.first_column + side_group.num_columns]
                    counts[side_group.group] += sum([block is not None for block in columns])
        if self.checkpoints is not None and self.layout.state is not None:
            counts[self.layout.state] = self.checkpoints.num_blocks
        if self.layout.primary is not None:
            counts[self.layout.primary] = self.num_cached_blocks - self.num_attached_blocks
        return counts

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants and those of the runs hold. O(cached blocks)."""
        num_attached_blocks = 0
        for run, rows in self._rows.items():
            assert run.epoch is self.epoch and rows, f"{run}: blocks are attached to what isn't cached"
            for position, row in rows.items():
                blocks = [block for block in row if block is not None]
                assert blocks and position < len(run.blocks), f"{run}: a row of nothing at {position}"
                for block in blocks:
                    assert block.run is run and block.index == position, f"{block}: doesn't lead to its row"
                num_attached_blocks += len(blocks)
        if self.checkpoints is not None:
            self.checkpoints.check()
            num_attached_blocks += self.checkpoints.num_blocks
        assert num_attached_blocks == self.num_attached_blocks, (
            f"index: {num_attached_blocks} attached, {self.num_attached_blocks} counted"
        )
        num_cached = self._check_runs() + num_attached_blocks
        assert num_cached == self.num_cached_blocks, f"index: {num_cached} cached, {self.num_cached_blocks} counted"

    def _cut_end(self, run: Run, position: int) -> list[KVCacheBlock]:
        if self._rows or self.checkpoints is not None:
            self._detach(run, position, len(run.blocks))
        return super()._cut_end(run, position)

    def _detach(self, run: Run, first: int, end: int) -> None:
        """Detach the blocks that are attached to positions first to end - 1 of a run, last first. O(positions)."""
        found = None if self.checkpoints is None else self.checkpoints.in_run(run)
        if found:
            for position in sorted([position for position in found if first <= position < end], reverse=True):
                checkpoint = found[position]
                self._let_checkpoint_go(checkpoint)
                self.detached += checkpoint.blocks
        rows = self._rows.get(run)
        if rows is None:
            return
        for position in range(end - 1, first - 1, -1):
            for block in rows.get(position, ())[::-1]:
                if block is not None:
                    self._let_go(block)
                    self.detached.append(block)

    def _drops(self, block: KVCacheBlock) -> bool:
        """Stop caching `block` if it is an attached block. Returns whether it is one.

        The other blocks of a checkpoint are detached.
        """
        if self._rows:
            row = self.row(block)
            if row is not None and block in row:
                self._let_go(block)
                return True
        checkpoint = None if self.checkpoints is None else self.checkpoints.of(block)
        if checkpoint is None:
            return False
        self._let_checkpoint_go(checkpoint)
        others = checkpoint.blocks
        self.detached += others[:-1] if others[-1] is block else [other for other in others if other is not block]
        return True

    def _let_checkpoint_go(self, checkpoint: Checkpoint) -> None:
        run = checkpoint.run
        group = self.layout.state
        assert run is not None and self.checkpoints is not None and group is not None, "a checkpoint that isn't cached"
        if self.needs_digests:
            name = run.digest(checkpoint.index)
            if self.events is not None:
                self.events.append(BlockRemoved((name,), group, self.events.medium))
            self._gone.append(removal_key(group, name))
        self.checkpoints.remove(checkpoint)
        self.num_attached_blocks -= len(checkpoint.blocks)
        self._count(run, -len(checkpoint.blocks))

    def _let_go(self, block: KVCacheBlock) -> None:
        run = block.run
        assert run is not None
        rows = self._rows[run]
        row = rows[block.index]
        column = row.index(block)
        if self.needs_digests:
            self._note_gone(block, column)
        row[column] = None
        if not any(row):
            del rows[block.index]
            if not rows:
                del self._rows[run]
        block.run = None
        self.num_attached_blocks -= 1
        self._count(run, -1)

    def _note_gone(self, block: KVCacheBlock, column: int) -> None:
        for side_group in self.layout.side_groups:
            if side_group.first_column <= column < side_group.first_column + side_group.num_columns:
                name = self.name(block, side_group, column)
                if self.events is not None:
                    self.events.append(BlockRemoved((name,), side_group.group, self.events.medium))
                self._gone.append(removal_key(side_group.group, name))

    def _note_removal(self, removed: list[bytes], cause: RemovalCause) -> None:
        if self._gone:
            for watcher in self.watchers:
                watcher.note_removed(self._gone, cause)
        self._gone = []
        super()._note_removal(removed, cause)  # last, so that the history keeps these longer

    def _note_drop(self, cause: RemovalCause) -> None:
        """Note that an attached block, and nothing else, stopped being cached."""
        self.version += 1
        if self.needs_digests:
            self._note_removal([], cause)

    def name_in_chain(self, side_group: SideGroup, chain: list[KVCacheBlock], number: int) -> bytes:
        """Return the `name` of a group's block `number`. chain: the cached primary blocks of its prefix. O(1)."""
        position, column = side_group.home(number)
        return self.name(chain[position], side_group, column)


def removal_key(group: int, name: bytes) -> bytes:
    """Return the name by which watchers know a group's block."""
    return pack("<I", group) + name
