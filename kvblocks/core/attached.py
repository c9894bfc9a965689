"""Cached blocks of groups beside the primary one, attached to the primary group's cached blocks.

An attached block is attached to the node (run, position) of the primary block that contains its last token, so it needs
no key of its own. Its prefix is part of the node's, and a node never comes to mean a second prefix, whatever the hash.
An attached block can therefore be found exactly as long as its whole prefix can. When the node's prefix stops being
cached, its attached blocks can never be hit again. They stop being cached and are put into `detached`, and the pool has
them reused first.

A node has a column for each attached block that ends in it, together its row. A column holds one block. If a second
sequence brings another block for it, the newer one takes the place of the older one, which is detached, unless the
older one has an owner. In that case the newer block isn't cached. An attached block has the `run` and `index` of its
node, so it counts as cached.

Checkpoints of recurrent states (`checkpoints`) are attached to nodes in the same way, each as one object.

Invariants: blocks are attached to cached positions alone; an attached block leads back to its node.
"""

from collections.abc import Hashable
from struct import pack
from typing import TYPE_CHECKING

from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.checkpoints import Checkpoint, Checkpoints
from kvblocks.core.hooks import RemovalCause
from kvblocks.core.layout import GroupLayout, SideGroup
from kvblocks.events import BlockRemoved, BlockStored
from kvblocks.hashing.extra_keys import decode_salt_and_lora

if TYPE_CHECKING:
    from kvblocks.core.prefix_index import PrefixIndex

Column = list[KVCacheBlock | None]
"""The blocks attached in one column of a run, by position. Positions behind its end have none."""


class Columns:
    """The blocks that are attached to a run, by column. num_blocks: how many there are."""

    __slots__ = ("columns", "num_blocks")

    def __init__(self, num_columns: int) -> None:
        self.columns: list[Column] = [[] for _ in range(num_columns)]
        self.num_blocks = 0


class AttachedBlocks:
    """The blocks that are attached to cached blocks of `index`, for the groups of `layout`."""

    def __init__(self, layout: GroupLayout, index: "PrefixIndex") -> None:
        self.layout = layout
        self._index = index
        self.checkpoints = None if layout.state is None else Checkpoints()
        """Where states are saved; None where no group keeps a state."""
        self.num_blocks = 0
        """How many blocks are attached, including those of checkpoints."""
        self._columns: dict[Run, Columns] = {}
        self._gone: list[bytes] = []  # removal keys of attached blocks that this call stops caching

    def row(self, block: KVCacheBlock) -> Column:
        """Return what is attached to a cached primary block, by column. O(columns)."""
        found = None if block.run is None else self._columns.get(block.run)
        if found is None:
            return [None] * self.layout.row_size
        index = block.index
        return [column[index] if index < len(column) else None for column in found.columns]

    def at(self, primary: KVCacheBlock, column: int) -> KVCacheBlock | None:
        """Return the block in a column of a cached primary block, None if there is none. O(1)."""
        found = None if primary.run is None else self._columns.get(primary.run)
        if found is None:
            return None
        blocks = found.columns[column]
        return blocks[primary.index] if primary.index < len(blocks) else None

    def stretch(self, primaries: list[KVCacheBlock], column: int, first: int, end: int) -> Column:
        """Return the blocks in a column of primary blocks first to end - 1 of a cached prefix, None where there are
        none.

        O(runs), where a run's blocks cost one slice.
        """
        if first >= end:
            return []
        run = primaries[first].run
        if run is None or primaries[end - 1].run is not run:
            return [self.at(primary, column) for primary in primaries[first:end]]
        found, start, number = self._columns.get(run), primaries[first].index, end - first
        part = [] if found is None else found.columns[column][start : start + number]
        return part if len(part) == number else part + [None] * (number - len(part))

    def column_of(self, block: KVCacheBlock) -> int | None:
        """Return the column in which a cached block is attached; None for one of the primary group. O(columns).

        For a part of a checkpoint, this is the first column after those of a row.
        """
        for column, other in enumerate(self.row(block)):
            if other is block:
                return column
        is_part = self.checkpoints is not None and self.checkpoints.of(block) is not None
        return self.layout.row_size if is_part else None

    def needed_at(self, primaries: list[KVCacheBlock], end: int) -> list[KVCacheBlock]:
        """Return the attached blocks that a hit of `end` tokens needs; none unless all of them are cached.

        primaries: the primary group's cached blocks of the hit, at least. O(blocks).
        """
        found: list[KVCacheBlock] = []
        if self.checkpoints is not None and end:
            checkpoint = self.checkpoints.at(primaries[end // self.layout.block_size - 1])
            if checkpoint is None:
                return []
            found += checkpoint.blocks
        for side_group in self.layout.side_groups:
            first, last = side_group.kind.needed_blocks(end, end)
            for number in range(first, last):
                position, column = side_group.home(number)
                block = self.at(primaries[position], column)
                if block is None:
                    return []
                found.append(block)
        return found

    def attach(self, primary: KVCacheBlock, column: int, block: KVCacheBlock) -> bool:
        """Attach `block`, which isn't cached, to `primary`, unless the column holds an owned block. O(1).

        Returns whether the column was empty, so that something new is cached.
        """
        run = primary.run
        assert run is not None and run.epoch.is_current, f"{primary}: nothing can be attached to it"
        columns = self._columns.get(run)
        if columns is None:
            columns = self._columns[run] = Columns(self.layout.row_size)
        blocks, index = columns.columns[column], primary.index
        if index >= len(blocks):
            blocks += [None] * (index + 1 - len(blocks))
        older = blocks[index]
        if older is not None and older.ref_cnt:
            return False
        blocks[index] = block
        block.run, block.index = run, index
        if older is not None:
            older.run = None
            self._index.version += 1
            self._index.detached.append(older)
            return False
        columns.num_blocks += 1
        self._count(run, 1)
        return True

    def attach_checkpoint(self, primary: KVCacheBlock, checkpoint: Checkpoint) -> None:
        """Attach a checkpoint to a cached primary block, which has none. O(blocks)."""
        assert self.checkpoints is not None, "no group keeps a state"
        self.checkpoints.add(primary, checkpoint)
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
        log = self._index.events
        if log is None:
            return
        name = self.name_in_chain(side_group, chain, number)
        parent = self.name_in_chain(side_group, chain, number - 1) if number else None
        keys: tuple[tuple[int, bytes], ...] = ()
        primary = chain[side_group.home(number)[0]]
        if side_group.block_size == self.layout.block_size and primary.run is not None and primary.run.extra_keys:
            key = primary.run.extra_keys.get(primary.index)
            keys = () if key is None else ((0, key),)
        block = self.at(primary, side_group.home(number)[1])
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
        log, group, size = self._index.events, self.layout.state, self.layout.alignment
        if log is None or group is None:
            return
        before = num_blocks - size // self.layout.block_size
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

    def note_column(self, chain: list[KVCacheBlock], tokens: bytes | bytearray, column: int) -> None:
        """Record that the block in a column of a chain's last primary block became cached. tokens: at least the
        chain's.
        """
        for side_group in self.layout.side_groups:
            if side_group.first_column <= column < side_group.first_column + side_group.num_columns:
                number, size = side_group.number_at(len(chain) - 1, column), 4 * side_group.block_size
                self.note_attached(side_group, chain, number, bytes(tokens[number * size : (number + 1) * size]))

    def note_checkpoint_at_end(
        self, chain: list[KVCacheBlock], checkpoint: Checkpoint, tokens: bytes | bytearray
    ) -> None:
        """Record that a checkpoint at the end of a chain of primary blocks became cached. tokens: at least the
        chain's.
        """
        end = 4 * len(chain) * self.layout.block_size
        last = bytes(tokens[end - 4 * self.layout.alignment : end])
        self.note_checkpoint(chain, len(chain), checkpoint, last)

    def name(self, primary: KVCacheBlock, side_group: SideGroup, column: int) -> bytes:
        """Return the name of an attached block for the outside: the digest of the primary block that it ends in.

        If several blocks of its group end in a primary block, its number among them follows as a little-endian u32.
        O(1) when the digest is known.
        """
        digest = primary.block_hash or b""
        return digest if side_group.num_columns == 1 else digest + pack("<I", column - side_group.first_column)

    def drop(self, block: KVCacheBlock) -> bool:
        """Stop caching `block` if it is an attached block. Returns whether it is one.

        The other blocks of a checkpoint are detached. O(blocks of a checkpoint).
        """
        columns = None if block.run is None else self._columns.get(block.run)
        if columns is not None and block.run is not None:
            for column, blocks in enumerate(columns.columns):
                if block.index < len(blocks) and blocks[block.index] is block:
                    self._let_go(block.run, columns, column, block)
                    return True
        checkpoint = None if self.checkpoints is None else self.checkpoints.of(block)
        if checkpoint is None:
            return False
        self._let_checkpoint_go(checkpoint)
        others = checkpoint.blocks
        self._index.detached += others[:-1] if others[-1] is block else [it for it in others if it is not block]
        return True

    def is_bare(self, run: Run) -> bool:
        """Whether no block is attached to a run, apart from checkpoints. O(1)."""
        return run not in self._columns

    def num_with_last_checkpoint(self, run: Run) -> int:
        """Return how many blocks of a run, from the first, end with its last checkpoint; 0: none. O(checkpoints)."""
        return 0 if self.checkpoints is None else self.checkpoints.num_with_last(run)

    def detach(self, run: Run, first: int, end: int) -> None:
        """Stop caching what is attached to positions first to end - 1 of a run, last first. O(positions)."""
        found = None if self.checkpoints is None else self.checkpoints.in_run(run)
        if found:
            for position in sorted([position for position in found if first <= position < end], reverse=True):
                checkpoint = found[position]
                self._let_checkpoint_go(checkpoint)
                self._index.detached += checkpoint.blocks
        columns = self._columns.get(run)
        if columns is None:
            return
        end = min(end, max([len(blocks) for blocks in columns.columns]))
        for position in range(end - 1, first - 1, -1):
            for column in range(len(columns.columns) - 1, -1, -1):
                blocks = columns.columns[column]
                block = blocks[position] if position < len(blocks) else None
                if block is not None:
                    self._let_go(run, columns, column, block)
                    self._index.detached.append(block)

    def tell_gone(self, cause: RemovalCause) -> None:
        """Tell watchers what stopped being cached since the last call."""
        if self._gone:
            for watcher in self._index.watchers:
                watcher.note_removed(self._gone, cause)
        self._gone = []

    def clear(self) -> None:
        """Forget all attached blocks, after a reset. O(1)."""
        self._columns = {}
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self.num_blocks = 0

    def num_in_run(self, run: Run) -> int:
        """Return how many blocks are attached to a run. O(rows + checkpoints of the run)."""
        columns = self._columns.get(run)
        number = 0 if columns is None else columns.num_blocks
        if self.checkpoints is not None:
            number += sum([len(found.blocks) for found in self.checkpoints.in_run(run).values()])
        return number

    def num_cached_by_group(self) -> list[int]:
        """Return how many blocks of each group are cached. O(rows)."""
        counts = [0] * len(self.layout.groups)
        for found in self._columns.values():
            for side_group in self.layout.side_groups:
                for blocks in found.columns[side_group.first_column : side_group.first_column + side_group.num_columns]:
                    counts[side_group.group] += len(blocks) - blocks.count(None)
        if self.checkpoints is not None and self.layout.state is not None:
            counts[self.layout.state] = self.checkpoints.num_blocks
        if self.layout.primary is not None:
            counts[self.layout.primary] = self._index.num_cached_blocks - self.num_blocks
        return counts

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants hold. O(attached blocks)."""
        num_blocks = 0
        for run, columns in self._columns.items():
            assert run.epoch is self._index.epoch and columns.num_blocks, f"{run}: attached to what isn't cached"
            held = [(i, block) for blocks in columns.columns for i, block in enumerate(blocks) if block is not None]
            for position, block in held:
                assert position < len(run.blocks), f"{run}: {block} is attached to nothing at {position}"
                assert block.run is run and block.index == position, f"{block}: doesn't lead to its column"
            assert len(held) == columns.num_blocks, f"{run}: {len(held)} attached, {columns.num_blocks} counted"
            num_blocks += len(held)
        if self.checkpoints is not None:
            self.checkpoints.check()
            num_blocks += self.checkpoints.num_blocks
        assert num_blocks == self.num_blocks, f"index: {num_blocks} attached, {self.num_blocks} counted"

    def _let_checkpoint_go(self, checkpoint: Checkpoint) -> None:
        run = checkpoint.run
        group = self.layout.state
        assert run is not None and self.checkpoints is not None and group is not None, "a checkpoint that isn't cached"
        if self._index.needs_digests:
            name = run.digest(checkpoint.index)
            if self._index.events is not None:
                self._index.events.append(BlockRemoved((name,), group, self._index.events.medium))
            self._gone.append(removal_key(group, name))
        self.checkpoints.remove(checkpoint)
        self._count(run, -len(checkpoint.blocks))

    def _let_go(self, run: Run, columns: Columns, column: int, block: KVCacheBlock) -> None:
        if self._index.needs_digests:
            self._note_gone(block, column)
        blocks = columns.columns[column]
        if block.index == len(blocks) - 1:
            blocks.pop()
        else:
            blocks[block.index] = None
        columns.num_blocks -= 1
        if not columns.num_blocks:
            del self._columns[run]
        block.run = None
        self._count(run, -1)

    def _note_gone(self, block: KVCacheBlock, column: int) -> None:
        for side_group in self.layout.side_groups:
            if side_group.first_column <= column < side_group.first_column + side_group.num_columns:
                name = self.name(block, side_group, column)
                if self._index.events is not None:
                    self._index.events.append(BlockRemoved((name,), side_group.group, self._index.events.medium))
                self._gone.append(removal_key(side_group.group, name))

    def _count(self, run: Run, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        self._index.count(run, num_blocks)

    def name_in_chain(self, side_group: SideGroup, chain: list[KVCacheBlock], number: int) -> bytes:
        """Return the `name` of a group's block `number`. chain: the cached primary blocks of its prefix. O(1)."""
        position, column = side_group.home(number)
        return self.name(chain[position], side_group, column)


def removal_key(group: int, name: bytes) -> bytes:
    """Return the name by which watchers know a group's block."""
    return pack("<I", group) + name
