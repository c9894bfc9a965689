"""Caching what fills up in the side groups: each block is attached where it ends."""

from kvblocks.core.sequence import Sequence
from kvblocks.groups.index import GroupIndex
from kvblocks.groups.tables import tables_of


def attach_full_blocks(index: GroupIndex, sequence: Sequence, first: int) -> None:
    """Cache side groups' blocks that end in a sequence's cached ones, from block `first` of those on. O(blocks).

    Not those that no hit can ever need, since hits end at multiples of the largest block size only.
    """
    primary_size, alignment = index.block_size, index.layout.alignment
    end = sequence.num_cached_blocks * primary_size
    for table in tables_of(sequence).tables:
        side_group, blocks, num_dead = table.side_group, table.blocks, table.num_dead
        size = side_group.block_size
        if not side_group.is_cached:
            continue
        for number in range(max(num_dead, first * primary_size // size), end // size):
            block = blocks[number - num_dead]
            if block.run is not None:
                continue
            next_end = -(-(number + 1) * size // alignment) * alignment
            if side_group.first_needed(next_end - 1) > number:
                continue
            position, column = side_group.home(number)
            if index.attach(sequence.blocks[position], column, block) and index.events is not None:
                index.events.storing = sequence.sequence_id
                tokens = bytes(sequence.packed_tokens()[number * 4 * size : (number + 1) * 4 * size])
                index.note_attached(side_group, sequence.blocks, number, tokens)


def attach_anew(index: GroupIndex, sequence: Sequence, first: int) -> None:
    """Cache what ends in a sequence's blocks from `first` on, which were cached late or after a reset. O(blocks)."""
    for table in tables_of(sequence).tables:
        for block in table.blocks:
            if block.run is not None and not block.run.epoch.is_current:
                block.run = None
    attach_full_blocks(index, sequence, first)
