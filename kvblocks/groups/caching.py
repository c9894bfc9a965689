"""Caching what fills up in the groups beside the primary one: each block hangs where it ends."""

from kvblocks.core.sequence import Sequence
from kvblocks.groups.index import GroupIndex


def hang_full_blocks(index: GroupIndex, sequence: Sequence, first: int) -> None:
    """Cache the companions that end in a sequence's cached blocks from the primary place `first` on. O(blocks).

    Not those that no hit can ever need, since hits end at multiples of the largest block size only.
    """
    assert sequence.window_tables is not None
    size, step = index.block_size, index.layout.hit_size
    end = sequence.num_registered_blocks * size
    for table in sequence.window_tables.tables:
        companion = table.companion
        for number in range(first * size // companion.block_size, end // companion.block_size):
            block = table.live_block(number)
            next_end = -(-(number + 1) * companion.block_size // step) * step
            if block is None or block.run is not None or companion.first_needed(next_end - 1) > number:
                continue
            position, place = companion.home(number)
            if index.hang(sequence.blocks[position], place, block) and index.events is not None:
                in_bytes = 4 * companion.block_size
                tokens = bytes(sequence.packed_tokens()[number * in_bytes : (number + 1) * in_bytes])
                index.note_hung(companion, sequence.blocks, number, tokens)


def hang_anew(index: GroupIndex, sequence: Sequence) -> None:
    """Cache what hangs from a sequence's blocks, which were cached anew after a reset. O(blocks)."""
    assert sequence.window_tables is not None
    for table in sequence.window_tables.tables:
        for block in table.blocks:
            if block.run is not None and not block.run.epoch.is_current:
                block.run = None
    hang_full_blocks(index, sequence, 0)
