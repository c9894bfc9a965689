"""What a lookup found: the answer of `get_computed_blocks`, to be handed to `allocate_slots`.

`check_hit` says whether that may use it still.
"""

from typing import SupportsIndex

from kvblocks.arguments import check_count, shown
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.in_flight import InFlight
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.errors import SequenceStateError, StaleHitError


class CacheHit:
    """The longest cached prefix of a sequence, as of one moment.

    blocks: the full blocks that hold it, in order. num_tokens: tokens that need no computing; block_size for each
    block, or the whole prompt but one token when all of it is cached, since its last token's logits are still needed.
    num_readonly_tokens: positions below it lie in `blocks` and must not be written, the recomputed last token
    included.

    Made by `get_computed_blocks`. A hit owns nothing: its blocks may be evicted by any later allocation.
    `allocate_slots` checks that before it uses it.
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

    def group_blocks(self, group: SupportsIndex) -> list[KVCacheBlock | None]:
        """Return the blocks of a group's table, None where it needs none. Raises InvalidArgumentError. O(blocks)."""
        check_count("group", group, 0, 0)
        return [*self.blocks]

    def has_lost_attached(self) -> bool:
        """Whether a block of another group than the primary one is cached no more where it was."""
        return False

    @property
    def pending_tokens(self) -> int:
        """Tokens behind what is cached that `pending_sequence` is about to compute; 0 when nobody is.

        Of the tokens that the sequence has now, and of what is cached now: more of both may be there than at the
        lookup. A scheduler may wait for them rather than compute them twice. O(sequences with unfinished prefill), and
        a lookup if there are any.
        """
        found = self.in_flight.find(self.sequence)
        return 0 if found is None else found[1] * self.index.block_size

    @property
    def pending_sequence(self) -> Sequence | None:
        """The allocated sequence that `pending_tokens` is about, None when there is none. O(as that)."""
        found = self.in_flight.find(self.sequence)
        return None if found is None else found[0]

    def __repr__(self) -> str:
        return f"CacheHit({shown(self.sequence.sequence_id)}, {self.num_tokens} tokens in {len(self.blocks)} blocks)"


def check_hit(index: PrefixIndex, sequence: Sequence, hit: CacheHit) -> int:
    """Return the tokens of `hit`.

    Raises SequenceStateError if it is another sequence's or manager's, StaleHitError if it is outdated. O(1) while
    nothing has been evicted since the lookup, for a sequence that never lost tokens; else one more lookup.
    """
    if hit.sequence is not sequence:
        raise SequenceStateError(f"allocate_slots: expected a hit of {sequence}, got {hit}")
    if hit.index is not index:
        raise SequenceStateError(f"allocate_slots: expected a hit of this manager's cache, got another's: {hit}")
    is_doubtful = hit.version != index.version or sequence.was_truncated
    is_outdated = is_doubtful and (
        find_blocks(index, sequence)[: len(hit.blocks)] != hit.blocks or hit.has_lost_attached()
    )
    if is_outdated or hit.num_tokens >= sequence.num_tokens:
        raise StaleHitError(f"allocate_slots: expected {hit} to be cached still; it isn't: look it up again")
    return hit.num_tokens
