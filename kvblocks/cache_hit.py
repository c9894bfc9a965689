"""What a lookup found: the answer of `get_computed_blocks`, to be handed to `allocate_slots`."""

from kvblocks.arguments import check_count
from kvblocks.block import KVCacheBlock
from kvblocks.in_flight import InFlight
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

    __slots__ = ("blocks", "in_flight", "num_readonly_tokens", "num_tokens", "sequence", "version")

    def __init__(
        self,
        sequence: Sequence,
        blocks: list[KVCacheBlock],
        num_readonly_tokens: int,
        num_known_tokens: int,
        in_flight: InFlight,
    ) -> None:
        self.sequence = sequence
        self.blocks = blocks
        self.num_readonly_tokens = num_readonly_tokens
        self.num_tokens = num_readonly_tokens if num_readonly_tokens < num_known_tokens else num_known_tokens - 1
        self.in_flight = in_flight
        self.version = in_flight.index.version

    @property
    def index(self) -> PrefixIndex:
        """Where it was found. O(1)."""
        return self.in_flight.index

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the primary group alone has cached; more than num_readonly_tokens where another one has less."""
        return self.num_readonly_tokens

    def group_blocks(self, group: int) -> list[KVCacheBlock | None]:
        """Return the blocks of a group's table, None where it needs none. Raises InvalidArgumentError. O(blocks)."""
        check_count("group", group, 0, 0)
        return [*self.blocks]

    def has_lost_companions(self) -> bool:
        """Whether a block of another group than the primary one is cached no more where it was."""
        return False

    @property
    def pending_tokens(self) -> int:
        """Tokens behind what is cached that `pending_sequence` is about to compute; 0 when nobody is. As of now.

        A scheduler may wait for them rather than compute them twice. O(sequences with unfinished prefill).
        """
        num_matched = self.num_matched_tokens // self.index.block_size
        found = self.in_flight.find(self.sequence, num_matched)
        return 0 if found is None else found[1] * self.index.block_size

    @property
    def pending_sequence(self) -> Sequence | None:
        """The allocated sequence that `pending_tokens` is about, None when there is none. O(as that)."""
        num_matched = self.num_matched_tokens // self.index.block_size
        found = self.in_flight.find(self.sequence, num_matched)
        return None if found is None else found[0]

    def __repr__(self) -> str:
        return f"CacheHit({self.sequence.sequence_id!r}, {self.num_tokens} tokens in {len(self.blocks)} blocks)"
