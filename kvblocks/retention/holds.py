"""Holds: they own blocks that something other than a sequence reads or writes, such as a transfer.

A hold owns blocks as a sequence does: those of a sequence's first tokens, in all groups. It outlives the sequence, so
blocks under a transfer are neither reused nor evicted, whatever is freed, aborted or rewound in the meantime. Only
`release` ends a hold; unlike a pin, it never gives blocks up.

While the sequence goes on, a hold has only full blocks. A full block is never written twice, so a hold causes no copy.
The exception is a sequence that went back into the middle of a held block (`truncate`): it gets a copy, as with any
shared block. Only `detach` holds the partly filled last block, since it frees the sequence.
"""

from collections.abc import Hashable, Iterator
from typing import Any, SupportsIndex, final

from kvblocks.arguments import Given, asked_once, check_count, counted, is_a, shown, wrong
from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.change import CHANGING
from kvblocks.core.link import ManagerLink
from kvblocks.core.sequence import Sequence
from kvblocks.errors import BlockStateError


@final
class BlockHold(Closed):
    """Blocks that are neither reused nor evicted until the hold is released.

    Made by `BlockHolds`; read-only, compared by identity. Blocks that had left a window are not held.
    """

    __slots__ = ("first_blocks", "is_released", "num_tokens", "sequence_id", "tables")

    def __init__(
        self, sequence_id: Hashable, num_tokens: int, first_blocks: list[int], tables: list[list[KVCacheBlock]]
    ) -> None:
        self.sequence_id = sequence_id
        """The id of the sequence whose blocks they were."""
        self.num_tokens = num_tokens
        """How many of its first tokens have, or will have, their KV in these blocks."""
        self.first_blocks = first_blocks
        """By group, the index in the sequence's table of the first held block."""
        self.tables = tables
        """By group, the held blocks."""
        self.is_released = False
        """Whether the hold has ended."""

    @property
    def block_ids(self) -> list[int]:
        """The ids of the held blocks of group 0, the only group in most managers. O(blocks)."""
        return self.group_block_ids(0)

    def group_block_ids(self, group: SupportsIndex) -> list[int]:
        """Return the ids of the held blocks of a group. Raises InvalidArgumentError. O(blocks)."""
        number = check_count("group", group, 0, len(self.tables) - 1)
        return [block.block_id for block in self.tables[number]]

    @property
    def num_blocks(self) -> int:
        """How many blocks it holds in all groups. O(groups)."""
        return sum([len(table) for table in self.tables])

    def __repr__(self) -> str:
        state = "released" if self.is_released else counted(self.num_blocks, "block")
        return f"BlockHold({shown(self.sequence_id)}, {counted(self.num_tokens, 'token')}, {state})"


@final
class BlockHolds(Closed):
    """The holds of a manager: `manager.holds`. Iterating yields them, oldest first.

    Made by a manager. As with the manager's own calls, one that raises has changed nothing.
    """

    def __init__(self, link: ManagerLink) -> None:
        self._link = link
        self._change = link.change
        self._slots = link.slots
        self._holds: dict[BlockHold, None] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[BlockHold]:
        return iter(list(self._holds))

    def read(self, sequence: Given[Sequence], num_tokens: SupportsIndex | None = None) -> BlockHold:
        """Hold the blocks that a sequence's first `num_tokens` written tokens fill, for a reader.

        num_tokens: at most `sequence.num_written_tokens`; None: all of these. Raises SequenceStateError (not this
        manager's sequence) and InvalidArgumentError. O(blocks).
        """
        given = None if num_tokens is None else asked_once(num_tokens)
        own = self._link.check_owned(sequence, "holds.read")
        most = own.num_written_tokens
        return self._hold_full(own, most if given is None else check_count("num_tokens", given, 0, most))

    def write(self, sequence: Given[Sequence], num_tokens: SupportsIndex | None = None) -> BlockHold:
        """Hold the blocks that a sequence's first `num_tokens` tokens with slots fill, for a writer.

        As `read`, but delayed tokens count too, such as tokens that are being loaded. num_tokens: at most
        `sequence.num_computed_tokens`; None: all of these.
        """
        given = None if num_tokens is None else asked_once(num_tokens)
        own = self._link.check_owned(sequence, "holds.write")
        most = own.num_computed_tokens
        return self._hold_full(own, most if given is None else check_count("num_tokens", given, 0, most))

    def detach(self, sequence: Given[Sequence]) -> BlockHold:
        """Free a sequence, and hold all blocks that it had until `release`.

        For steps in flight that may still write to the blocks, and for readers of a finished sequence's KV. The
        sequence may be allocated again at once, with other blocks after its hit. Call `evict_blocks` for blocks that
        must not stay cached. Raises what `free` raises. O(blocks).
        """
        own = self._link.check_owned(sequence, "holds.detach")
        hold = self._hold(own, own.num_computed_tokens, is_whole=True)
        try:
            self._change.end()
            self._link.free(own)
        except BaseException:
            if own.owner is not None and self._change.state != CHANGING:
                self.release(hold)  # nothing was freed, for example since the id's hash raised
            raise
        return hold

    def release(self, hold: Given[BlockHold]) -> None:
        """End a hold. Blocks without other owners become free, and cached blocks stay cached.

        Raises BlockStateError when the hold has ended or is another manager's, and InvalidArgumentError when it is no
        hold. O(blocks).
        """
        self._change.check_whole()
        given: Any = hold
        if not is_a(given, BlockHold):
            raise wrong("holds.release", "what read, write or detach returned", given)
        own: BlockHold = given
        if own not in self._holds:
            expected = "a hold that hasn't ended" if own.is_released else "a hold of this manager"
            raise BlockStateError(f"holds.release: expected {expected}, got {own}")
        self._change.state = CHANGING
        del self._holds[own]
        own.is_released = True
        for table in own.tables:
            self._slots.pool.release_table(table)
        self._link.end()

    def owned(self) -> list[list[KVCacheBlock]]:
        """Return the held blocks, each as many times as it is held. Only for the manager. O(holds)."""
        return [table for hold in self._holds for table in hold.tables]

    def _hold_full(self, sequence: Sequence, num_tokens: int) -> BlockHold:
        """Hold the blocks that a sequence's first tokens fill."""
        hold = self._hold(sequence, num_tokens, is_whole=False)
        self._link.end()
        return hold

    def _hold(self, sequence: Sequence, num_tokens: int, *, is_whole: bool) -> BlockHold:
        """Begin a change by holding the blocks that a sequence's first tokens fill, or all of its blocks."""
        layout = self._slots.layout
        groups = [(self._slots.alignment, True)]
        if layout is not None:
            groups = [(group.block_size, group.has_table) for group in layout.groups]
        first_blocks, tables = [], []
        for group, (size, has_table) in enumerate(groups):
            first, blocks = sequence.first_live_block(group), sequence.group_blocks(group)
            end = len(blocks) if is_whole else num_tokens // size if has_table else 0
            first_blocks.append(first)
            tables.append([block for block in blocks[:end] if block is not None])
        hold = BlockHold(sequence.sequence_id, num_tokens, first_blocks, tables)
        self._change.begin()
        self._holds[hold] = None
        for table in tables:
            self._slots.pool.touch(table)
        return hold
