"""What a lookup found: `get_computed_blocks` returns a hit, and `allocate_slots` takes it.

`check_hit` checks that a hit is still valid.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, SupportsIndex

from kvblocks.arguments import check_count, counted, is_a, shown, wrong
from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence, as_sequence
from kvblocks.errors import SequenceStateError, StaleHitError

if TYPE_CHECKING:
    from kvblocks.core.longest_hit import HitParts


class HitSource:
    """Where hits are found. index: the prefix index that holds the cached prefixes."""

    __slots__ = ("index",)

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index

    @abstractmethod
    def find_pending(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """Return who will compute the most blocks after `sequence`'s cached prefix, and how many; None if nobody."""


class CacheHit(Closed):
    """The longest cached prefix of a sequence, as of the time of the lookup.

    - blocks: the full blocks that hold the prefix, in order.
    - num_tokens: tokens that need no computing. These are all tokens in `blocks`, or one less for a full hit, since the
      logits of its last token are still needed.
    - num_readonly_tokens: tokens before this position lie in `blocks` and must not be written. This includes the last
      token of a full hit, which is recomputed.

    Made by `get_computed_blocks`. A hit owns nothing, so any later allocation may evict its blocks. `allocate_slots`
    checks that it is still valid before using it.
    """

    __slots__ = ("blocks", "num_readonly_tokens", "num_tokens", "parts", "sequence", "source", "version")

    def __init__(
        self,
        sequence: Sequence,
        blocks: list[KVCacheBlock],
        num_readonly_tokens: int,
        num_known_tokens: int,
        source: HitSource,
        parts: "HitParts | None" = None,
    ) -> None:
        """parts: what it has of other groups, and its state; None with one group."""
        self.sequence = sequence
        self.blocks = blocks
        self.num_readonly_tokens = num_readonly_tokens
        self.num_tokens = num_readonly_tokens if num_readonly_tokens < num_known_tokens else num_known_tokens - 1
        self.source = source
        self.version = source.index.version
        self.parts = parts

    @property
    def index(self) -> PrefixIndex:
        """The prefix index where the hit was found. O(1)."""
        return self.source.index

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the primary group has cached: more than num_readonly_tokens if another group has fewer."""
        return self.num_readonly_tokens if self.parts is None else self.parts.num_matched * self.index.block_size

    @property
    def checkpoint_block_ids(self) -> tuple[int, ...]:
        """The ids of its checkpoint's blocks, where layers keep a state; otherwise empty. O(their number)."""
        checkpoint = None if self.parts is None else self.parts.checkpoint
        return () if checkpoint is None else tuple([block.block_id for block in checkpoint.blocks])

    @property
    def is_full_hit(self) -> bool:
        """Whether all known tokens are cached, so that only the last one must be computed, for its logits. O(1)."""
        return self.num_tokens < self.num_readonly_tokens

    def group_blocks(self, group: SupportsIndex) -> list[KVCacheBlock | None]:
        """Return the blocks of a group's block table, None where the hit needs none. Raises InvalidArgumentError.

        O(blocks).
        """
        if self.parts is not None:
            return self.parts.group_blocks(group, self.blocks)
        check_count("group", group, 0, 0)
        return [*self.blocks]

    def cut(self, max_tokens: SupportsIndex) -> "CacheHit":
        """Return a hit of the same lookup with at most `max_tokens` tokens in its blocks; this hit itself if it is
        short enough.

        With several groups the result may have fewer tokens, because a window may lack the blocks that a hit with this
        end needs. Blocks that were evicted since the lookup are then left out. With one group, `allocate_slots` notices
        them.

        Changes nothing. Raises InvalidArgumentError. O(blocks).
        """
        number = check_count("max_tokens", max_tokens, 0)
        return self if number >= self.num_readonly_tokens else self._cut_to(number // self.index.block_size)

    def _cut_to(self, num_blocks: int) -> "CacheHit":
        """Return a hit of the first `num_blocks` blocks, fewer than this one has."""
        if self.parts is not None:
            return self.parts.cut(self, num_blocks)
        num_tokens = num_blocks * self.index.block_size
        hit = CacheHit(self.sequence, self.blocks[:num_blocks], num_tokens, num_tokens + 1, self.source)
        hit.version = self.version
        return hit

    @property
    def pending_tokens(self) -> int:
        """How many tokens after the cached prefix `pending_sequence` is about to compute; 0 if there is no such
        sequence.

        This looks at the tokens and the cache as they are now; both may have grown since the lookup. A scheduler may
        wait for these tokens instead of computing them twice. O(sequences with unfinished prefill), plus a lookup if
        there are any.
        """
        return (self.source.find_pending(self.sequence) or (None, 0))[1] * self.index.block_size

    @property
    def pending_sequence(self) -> Sequence | None:
        """The allocated sequence that will compute `pending_tokens`; None if there is none. Costs the same."""
        return (self.source.find_pending(self.sequence) or (None, 0))[0]

    def __repr__(self) -> str:
        return (
            f"CacheHit({shown(self.sequence.sequence_id)}, {counted(self.num_tokens, 'token')} in"
            f" {counted(len(self.blocks), 'block')})"
        )


def check_start(sequence: object, hit: object) -> None:
    """Raise InvalidArgumentError unless `sequence` is a sequence and `hit` is a hit or None."""
    as_sequence("allocate_slots", sequence)
    given: Any = hit
    if given is not None and not is_a(given, CacheHit):
        raise wrong("allocate_slots: hit", "what get_computed_blocks returned, or None", given)


def ends_in_block(hit: CacheHit | None) -> bool:
    """Whether a hit has blocks and isn't a full hit. A sequence may then start without a token after it. O(1)."""
    return hit is not None and 0 < hit.num_readonly_tokens == hit.num_tokens


def check_hit(index: PrefixIndex, sequence: Sequence, hit: CacheHit) -> int:
    """Return the number of tokens of `hit`.

    Raises SequenceStateError if the hit is for another sequence or another manager, and StaleHitError if it is
    outdated. O(1) if nothing was evicted since the lookup and the sequence never lost tokens; otherwise one more
    lookup.
    """
    if hit.sequence is not sequence:
        raise SequenceStateError(f"allocate_slots: expected a hit of {sequence}, got {hit}")
    if hit.source.index is not index:
        raise SequenceStateError(f"allocate_slots: expected a hit of this manager's cache, got another's: {hit}")
    is_doubtful = hit.version != index.version or sequence.was_truncated
    is_outdated = is_doubtful and (
        find_blocks(index, sequence, hit.num_readonly_tokens) != hit.blocks
        or (hit.parts is not None and hit.parts.are_lost(hit.blocks))
    )
    if is_outdated or hit.num_tokens >= len(sequence.tokens):
        raise StaleHitError(f"allocate_slots: expected {hit} to be cached still; it isn't: look it up again")
    return hit.num_tokens
