"""`GroupPrefix`: the blocks of all groups of a cached prefix in one list, so that jobs handle them as one group's."""

from kvblocks.core.block import KVCacheBlock
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.wishes import Prefix

Home = tuple[int, int]
"""Where a side group's block is attached: the index of the primary block, and the column there."""


class GroupPrefix(Prefix):
    """A `Prefix` whose first num_primary blocks are the primary group's, and whose other blocks are side groups'.

    homes: where the side groups' blocks are attached, in the same order.
    """

    def __init__(self, prefix: Prefix, side_blocks: list[KVCacheBlock], homes: list[Home]) -> None:
        """prefix: of the primary group."""
        super().__init__(prefix.tokens, prefix.extra_keys, prefix.blocks + side_blocks)
        self.num_primary = len(prefix.blocks)
        self.homes = homes

    def identities(self, first: int, end: int, block_size: int) -> list[BlockIdentity]:
        """Return the identities of blocks first to end - 1. As `Prefix.identities`."""
        number = self.num_primary
        found = super().identities(first, min(end, number), block_size) if first < number else []
        for position, column in self.homes[max(0, first - number) : max(0, end - number)]:
            above = super().identities(position, position + 1, block_size)[0]
            found.append(BlockIdentity(above.digest(), b"", b"", column + 1))
        return found
