"""`GroupPrefix`: the blocks of all groups of a cached prefix in one list, so that jobs handle them like one group's."""

from kvblocks.core.block import KVCacheBlock
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.wishes import Prefix

Home = tuple[int, int]
"""Where a side group's block is attached: the index of the primary block, and the column there."""


class GroupPrefix(Prefix):
    """A `Prefix` whose first num_primary blocks are the primary group's, and whose other blocks are side groups'.

    homes: where the side groups' blocks are attached, in the same order. The last of them may be parts of checkpoints,
    num_parts each, whose columns come after those of side groups. num_attached: how many homes come before these.
    """

    def __init__(self, prefix: Prefix, side_blocks: list[KVCacheBlock], homes: list[Home], num_parts: int = 1) -> None:
        """prefix: of the primary group."""
        super().__init__(prefix.tokens, prefix.extra_keys, prefix.blocks + side_blocks)
        self.num_primary = len(prefix.blocks)
        self.num_attached = len(side_blocks)
        self.homes = homes
        self.num_parts = num_parts

    def add_states(self, checkpoints: dict[int, list[KVCacheBlock]], row_size: int) -> None:
        """Add checkpoints, by the number of primary blocks before each. row_size: of side groups' rows. O(blocks)."""
        for number, blocks in checkpoints.items():
            self.blocks += blocks
            self.homes += [(number - 1, row_size + index) for index in range(len(blocks))]

    def whole_states(self, num_side: int) -> range:
        """Return where the checkpoints begin that are complete in the first num_side blocks after the primary ones."""
        return range(self.num_attached, num_side - self.num_parts + 1, self.num_parts)

    def num_whole(self, first: int, number: int) -> int:
        """Return how many blocks from index `first` on may move together: at most `number`, without splitting a
        checkpoint.

        What comes before `first` has moved. O(1).
        """
        begin = self.num_primary + self.num_attached
        over = max(0, first + number - max(first, begin))
        return number - over % self.num_parts

    def identities(self, first: int, end: int, block_size: int) -> list[BlockIdentity]:
        """Return the identities of blocks first to end - 1. As `Prefix.identities`."""
        number = self.num_primary
        found = super().identities(first, min(end, number), block_size) if first < number else []
        for position, column in self.homes[max(0, first - number) : max(0, end - number)]:
            above = super().identities(position, position + 1, block_size)[0]
            found.append(BlockIdentity(above.digest(), b"", b"", column + 1))
        return found
