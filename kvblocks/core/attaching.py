"""Caching full blocks of side groups: each is attached to the primary block that contains its last token."""

from kvblocks.core.attached import GroupIndex
from kvblocks.core.sequence import Sequence
from kvblocks.core.tables import GapTable, tables_of


def attach_full_blocks(index: GroupIndex, sequence: Sequence, first: int) -> None:
    """Cache the side groups' blocks that end in a sequence's cached primary blocks from `first` on. O(blocks).

    Skips blocks that no hit can need: hits end only at multiples of the alignment.
    """
    primary_size, alignment = index.block_size, index.layout.alignment
    end = sequence.num_cached_blocks * primary_size
    for table in tables_of(sequence).tables:
        side_group, blocks, num_dead = table.side_group, table.blocks, table.num_dead
        size = side_group.block_size
        if not side_group.kind.is_cached:
            continue
        ends = table.ends if isinstance(table, GapTable) else None
        for number in range(max(num_dead, first * primary_size // size), end // size):
            block = blocks[number - num_dead]
            if block.run is not None or (ends is not None and number not in ends):
                continue
            next_end = -(-(number + 1) * size // alignment) * alignment
            if side_group.kind.first_needed(next_end - 1) > number:
                continue
            position, column = side_group.home(number)
            if index.attach(sequence.blocks[position], column, block) and index.events is not None:
                tokens = bytes(sequence.packed_tokens()[number * 4 * size : (number + 1) * 4 * size])
                index.note_attached(side_group, sequence.blocks, number, tokens, sequence.sequence_id)


def attach_anew(index: GroupIndex, sequence: Sequence, first: int) -> None:
    """`attach_full_blocks` for primary blocks that were cached late or after a reset. O(blocks)."""
    for table in tables_of(sequence).tables:
        for block in table.blocks:
            if block.run is not None and not block.run.epoch.is_current:
                block.run = None
    attach_full_blocks(index, sequence, first)
