"""What may stand beside the primary group's block table, as the allocator knows it.

The allocator's own path is that of one group with full attention. It has a tuple of components, which is empty then,
and asks them at the edges of blocks alone. There are two: `side_slots`, for groups with block tables of their own, and
`states`, for layers that keep a state in slots. A component answers four questions. What a hit needs of it is asked by
`longest_hit`, since it is the same for tiers. What a call takes and gives back is planned by `SideTables`. What became
full, and what is held, are the methods here.
"""

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.sequence import Sequence

LostBlocks = dict[KVCacheBlock, int]
"""Blocks whose KV is lost, each with a number of tokens, from a prompt's first one, that are written nevertheless."""


class Component:
    """What sequences have besides the primary group's block table. This base class has nothing."""

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Give the fork of a sequence what the sequence has here. O(blocks)."""

    def note_full(self, sequence: Sequence, first: int) -> None:
        """Cache what ends in a sequence's primary blocks from `first` on, which were cached late or anew. O(blocks)."""

    def note_rewinding(self, sequence: Sequence, num_tokens: int) -> int:  # noqa: ARG002  # for components
        """A sequence is about to go back to `num_tokens` tokens. Returns how many it can go back to, at most that."""
        return num_tokens

    def note_rewound(self, sequence: Sequence, num_tokens: int) -> None:
        """Give up what the first `num_tokens` tokens don't need. O(blocks)."""

    def end_loads(self, sequence: Sequence) -> None:
        """Release what a sequence holds in case its loads fail, since they have arrived. O(blocks)."""

    def release(self, sequence: Sequence) -> None:
        """Release all that a sequence has here. O(blocks)."""

    def unwritten_blocks(self, sequence: Sequence, num_tokens: int) -> list[KVCacheBlock]:  # noqa: ARG002
        """Return the blocks that are lost if a sequence wrote only its first `num_tokens` tokens. O(their number)."""
        return []

    def first_lost_in(self, sequence: Sequence, lost: LostBlocks) -> list[int]:  # noqa: ARG002  # for components
        """Return from which tokens on a sequence loses KV with these blocks; [] if it loses none. O(its blocks)."""
        return []

    def lose(self, sequence: Sequence, lost: LostBlocks) -> None:
        """Drop what waits in lost blocks of a sequence, or comes after them. O(what waits)."""
