"""Caching what fills up in the groups beside the primary one: each block hangs where it ends."""

from kvblocks.core.sequence import Sequence
from kvblocks.groups.index import GroupIndex


def attach_full_blocks(index: GroupIndex, sequence: Sequence, first: int) -> None:
    """Cache the side_groups that end in a sequence's cached blocks from the primary place `first` on. O(blocks).

    Not those that no hit can ever need, since hits end at multiples of the largest block size only.
    """
    assert sequence.side_tables is not None
    size, step = index.block_size, index.layout.alignment
    end = sequence.num_cached_blocks * size
    for table in sequence.side_tables.tables:
        side_group = table.side_group
        for number in range(first * size // side_group.block_size, end // side_group.block_size):
            block = table.live_block(number)
            next_end = -(-(number + 1) * side_group.block_size // step) * step
            if block is None or block.run is not None or side_group.first_needed(next_end - 1) > number:
                continue
            position, place = side_group.home(number)
            if index.attach(sequence.blocks[position], place, block) and index.events is not None:
                in_bytes = 4 * side_group.block_size
                tokens = bytes(sequence.packed_tokens()[number * in_bytes : (number + 1) * in_bytes])
                index.note_attached(side_group, sequence.blocks, number, tokens)


def attach_anew(index: GroupIndex, sequence: Sequence) -> None:
    """Cache what is attached to a sequence's blocks, which were cached anew after a reset. O(blocks)."""
    assert sequence.side_tables is not None
    for table in sequence.side_tables.tables:
        for block in table.blocks:
            if block.run is not None and not block.run.epoch.is_current:
                block.run = None
    attach_full_blocks(index, sequence, 0)
