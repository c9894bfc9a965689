"""Events about slots that hold side groups' blocks."""

from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.tiers.wishes import prefix_of


def note_attached(index: GroupIndex, chain: list[KVCacheBlock], tokens: bytes | bytearray, column: int) -> None:
    """Record that the slot attached to the last primary slot of a chain is stored. tokens: at least the chain's."""
    for side_group in index.layout.side_groups:
        if side_group.first_column <= column < side_group.first_column + side_group.num_columns:
            number, size = side_group.number_at(len(chain) - 1, column), 4 * side_group.block_size
            index.note_attached(side_group, chain, number, bytes(tokens[number * size : (number + 1) * size]))


def attach_checkpoint(
    index: GroupIndex, chain: list[KVCacheBlock], slots: list[KVCacheBlock], tokens: bytes | bytearray
) -> bool:
    """Attach the slots of a checkpoint to the last primary slot of a chain, unless it has one, and record that.

    Returns whether it had none. O(slots).
    """
    assert index.checkpoints is not None, "no group keeps a state"
    if index.checkpoints.at(chain[-1]) is not None:
        return False
    checkpoint = Checkpoint(slots, is_landmark=True)
    index.attach_checkpoint(chain[-1], checkpoint)
    note_checkpoint(index, chain, checkpoint, tokens)
    return True


def note_checkpoint(
    index: GroupIndex, chain: list[KVCacheBlock], checkpoint: Checkpoint, tokens: bytes | bytearray
) -> None:
    """Record that a checkpoint at the end of a chain of primary slots is stored. tokens: at least the chain's."""
    end = 4 * len(chain) * index.block_size
    index.note_checkpoint(chain, len(chain), checkpoint, bytes(tokens[end - 4 * index.layout.alignment : end]))


def note_restored_rows(index: GroupIndex) -> None:
    """Record all blocks that are attached in a tier as stored just now. O(blocks of the prefixes that have some)."""
    for run in index.runs():
        rows = index.rows_of(run)
        checkpoints = {} if index.checkpoints is None else index.checkpoints.in_run(run)
        prefix = prefix_of(run, len(run.blocks)) if rows or checkpoints else None
        for position, checkpoint in sorted(checkpoints.items()):
            if prefix is not None:
                chain = prefix.blocks[: len(prefix.blocks) - len(run.blocks) + position + 1]
                note_checkpoint(index, chain, checkpoint, prefix.tokens)
        for position, row in sorted(rows.items()):
            if prefix is not None:
                chain = prefix.blocks[: len(prefix.blocks) - len(run.blocks) + position + 1]
                for column, slot in enumerate(row):
                    if slot is not None:
                        note_attached(index, chain, prefix.tokens, column)
