"""What a lookup found: the answer of `get_computed_blocks`, to be handed to `allocate_slots`.

`check_hit` says whether that may use it still.
"""

from abc import abstractmethod
from typing import Any, SupportsIndex

from kvblocks.arguments import check_count, is_a, shown, wrong
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence, as_sequence
from kvblocks.errors import SequenceStateError, StaleHitError


class HitSource:
    """Where hits are found. index: the cached prefixes."""

    __slots__ = ("index",)

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index

    @abstractmethod
    def find_pending(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """Return who will compute most of what follows the cached prefix of a sequence, and how many blocks."""


class HitLimit:
    """Why a hit is shorter than what the primary group has cached: a group lacks some tokens.

    first_token, end_token: the tokens, the second behind the last of them. removal_key: what the removal history knows
    the group's missing block by. Read-only.
    """

    __slots__ = ("end_token", "first_token", "group", "removal_key", "window")

    def __init__(self, group: int, window: int | None, first_token: int, end_token: int, removal_key: bytes) -> None:
        self.group = group
        self.window = window
        self.first_token = first_token
        self.end_token = end_token
        self.removal_key = removal_key


class CacheHit:
    """The longest cached prefix of a sequence, as of one moment.

    blocks: the full blocks that hold it, in order. num_tokens: tokens that need no computing; block_size for each
    block, or the whole prompt but one token when all of it is cached, since its last token's logits are still needed.
    num_readonly_tokens: positions below it lie in `blocks` and must not be written, the recomputed last token
    included.

    Made by `get_computed_blocks`. A hit owns nothing: its blocks may be evicted by any later allocation.
    `allocate_slots` checks that before it uses it.
    """

    __slots__ = ("blocks", "num_readonly_tokens", "num_tokens", "sequence", "source", "version")

    def __init__(
        self,
        sequence: Sequence,
        blocks: list[KVCacheBlock],
        num_readonly_tokens: int,
        num_known_tokens: int,
        source: HitSource,
    ) -> None:
        self.sequence = sequence
        self.blocks = blocks
        self.num_readonly_tokens = num_readonly_tokens
        self.num_tokens = num_readonly_tokens if num_readonly_tokens < num_known_tokens else num_known_tokens - 1
        self.source = source
        self.version = source.index.version

    @property
    def index(self) -> PrefixIndex:
        """Where it was found. O(1)."""
        return self.source.index

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that the primary group alone has cached; more than num_readonly_tokens where another one has less."""
        return self.num_readonly_tokens

    def group_blocks(self, group: SupportsIndex) -> list[KVCacheBlock | None]:
        """Return the blocks of a group's table, None where it needs none. Raises InvalidArgumentError. O(blocks)."""
        check_count("group", group, 0, 0)
        return [*self.blocks]

    def cut(self, max_tokens: SupportsIndex) -> "CacheHit":
        """Return a hit of the same lookup whose blocks hold at most `max_tokens` tokens; this one if its own do.

        Changes nothing. What was evicted since the lookup is seen by `allocate_slots`. With several groups it may have
        fewer tokens, since a window may lack what another end needs. Raises InvalidArgumentError. O(blocks).
        """
        number = check_count("max_tokens", max_tokens, 0)
        return self if number >= self.num_readonly_tokens else self._cut_to(number // self.index.block_size)

    def _cut_to(self, num_blocks: int) -> "CacheHit":
        """Return a hit of the first `num_blocks` blocks, which are fewer than all."""
        num_tokens = num_blocks * self.index.block_size
        hit = CacheHit(self.sequence, self.blocks[:num_blocks], num_tokens, num_tokens + 1, self.source)
        hit.version = self.version
        return hit

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
        found = self.source.find_pending(self.sequence)
        return 0 if found is None else found[1] * self.index.block_size

    @property
    def pending_sequence(self) -> Sequence | None:
        """The allocated sequence that `pending_tokens` is about, None when there is none. O(as that)."""
        found = self.source.find_pending(self.sequence)
        return None if found is None else found[0]

    def __repr__(self) -> str:
        return f"CacheHit({shown(self.sequence.sequence_id)}, {self.num_tokens} tokens in {len(self.blocks)} blocks)"


def check_start(sequence: object, hit: object) -> None:
    """Raise InvalidArgumentError unless these are a sequence, and a hit or None."""
    as_sequence("allocate_slots", sequence)
    given: Any = hit
    if given is not None and not is_a(given, CacheHit):
        raise wrong("allocate_slots: hit", "what get_computed_blocks returned, or None", given)


def ends_in_block(hit: CacheHit | None) -> bool:
    """Whether a hit has blocks, and all of their tokens count: none needs to be computed behind it. O(1)."""
    return hit is not None and 0 < hit.num_readonly_tokens == hit.num_tokens


def check_hit(index: PrefixIndex, sequence: Sequence, hit: CacheHit) -> int:
    """Return the tokens of `hit`.

    Raises SequenceStateError if it is another sequence's or manager's, StaleHitError if it is outdated. O(1) while
    nothing has been evicted since the lookup, for a sequence that never lost tokens; else one more lookup.
    """
    if hit.sequence is not sequence:
        raise SequenceStateError(f"allocate_slots: expected a hit of {sequence}, got {hit}")
    if hit.source.index is not index:
        raise SequenceStateError(f"allocate_slots: expected a hit of this manager's cache, got another's: {hit}")
    is_doubtful = hit.version != index.version or sequence.was_truncated
    is_outdated = is_doubtful and (
        find_blocks(index, sequence, hit.num_readonly_tokens) != hit.blocks or hit.has_lost_attached()
    )
    if is_outdated or hit.num_tokens >= len(sequence.tokens):
        raise StaleHitError(f"allocate_slots: expected {hit} to be cached still; it isn't: look it up again")
    return hit.num_tokens
