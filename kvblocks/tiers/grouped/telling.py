"""Events about slots that hold side groups' blocks."""

from kvblocks.core.block import KVCacheBlock
from kvblocks.groups.index import GroupIndex
from kvblocks.tiers.wishes import prefix_of


def note_attached(index: GroupIndex, chain: list[KVCacheBlock], tokens: bytes | bytearray, column: int) -> None:
    """Record that the slot attached to the last primary slot of a chain is stored. tokens: at least the chain's."""
    for side_group in index.layout.side_groups:
        if side_group.first_column <= column < side_group.first_column + side_group.num_columns:
            number, size = side_group.number_at(len(chain) - 1, column), 4 * side_group.block_size
            index.note_attached(side_group, chain, number, bytes(tokens[number * size : (number + 1) * size]))


def note_restored_rows(index: GroupIndex) -> None:
    """Record all blocks that are attached in a tier, as stored just now. O(blocks of the prefixes that have some)."""
    for run in index.runs():
        rows = index.rows_of(run)
        prefix = prefix_of(run, len(run.blocks)) if rows else None
        for position, row in sorted(rows.items()):
            if prefix is not None:
                chain = prefix.blocks[: len(prefix.blocks) - len(run.blocks) + position + 1]
                for column, slot in enumerate(row):
                    if slot is not None:
                        note_attached(index, chain, prefix.tokens, column)
