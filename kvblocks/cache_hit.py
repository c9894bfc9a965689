"""What a lookup found: the answer of `get_computed_blocks`, to be handed to `allocate_slots`."""

from kvblocks.block import KVCacheBlock
from kvblocks.prefix_index import PrefixIndex
from kvblocks.sequence import Sequence


class CacheHit:
    """The longest cached prefix of a sequence, as of one moment.

    blocks: the full blocks that hold it, in order. num_tokens: tokens that need no computing; block_size for each
    block, or the whole prompt but one token when all of it is cached, since its last token's logits are still needed.
    num_readonly_tokens: positions below it lie in `blocks` and must not be written, the recomputed last token
    included.

    A hit owns nothing: its blocks may be evicted by any later allocation. `allocate_slots` checks that before it uses
    it.
    """

    __slots__ = ("blocks", "index", "num_readonly_tokens", "num_tokens", "sequence", "version")

    def __init__(
        self, sequence: Sequence, blocks: list[KVCacheBlock], num_readonly_tokens: int, index: PrefixIndex
    ) -> None:
        self.sequence = sequence
        self.blocks = blocks
        self.num_readonly_tokens = num_readonly_tokens
        self.num_tokens = num_readonly_tokens if num_readonly_tokens < sequence.num_tokens else sequence.num_tokens - 1
        self.index = index
        self.version = index.version

    def __repr__(self) -> str:
        return f"CacheHit({self.sequence.sequence_id!r}, {self.num_tokens} tokens in {len(self.blocks)} blocks)"
