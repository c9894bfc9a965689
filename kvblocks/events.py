"""Records of every change to the set of cached prefixes, in order, for routers and other observers of the cache.

The set contains prefixes, not blocks. A second block that holds the same prefix changes nothing, and a prefix is
removed when the last block that holds it is evicted. Replaying the records into a set gives the prefixes cached at any
time. Keep one set for each group and each medium, because the same digest may be cached in several.

The kinds of records follow vLLM's KV events. `kvblocks.wire` sends them over a network.
"""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

from kvblocks.arguments import Flag, check_flag, is_a, wrong


def _set_state(record: Any, state: list[Any]) -> None:
    """Fill a record from its pickled fields. Fields that an older version didn't have get their defaults."""
    declared = fields(record)
    values = state + [field.default for field in declared[len(state) :]]
    for field, value in zip(declared, values, strict=True):
        object.__setattr__(record, field.name, value)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one prefix became cached.

    - block_hashes: their digests, first to last.
    - parent_block_hash: the digest of the first block's parent; None if that block begins a prefix. In a windowed group
      the parent need not be cached.
    - tokens: the blocks' token ids, packed as little-endian u32.
    - block_size: tokens in a block.
    - extra_keys: (index in block_hashes, encoded extra keys) for each block that has some, encoded as in
      `kvblocks.hashing`; empty for a group whose block size isn't the primary group's.
    - group_idx: the group in which they are cached; None if there is only one.
    - block_ids: the blocks, or a tier's slots, that hold them now. When a duplicate later takes the place of one of
      them, nothing is recorded.
    - salt, lora: those of their sequence, in every record.
    - kind: how the group's layers attend, such as "full_attention" or "sliding_window"; None in records of older
      versions, which don't say.
    - window: the size of a sliding window, in tokens.
    - medium: where they are cached: "GPU" for the device, otherwise a tier's `medium`.
    - sequence_id: the sequence whose call cached them; None in a tier.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    tokens: bytes
    block_size: int
    extra_keys: tuple[tuple[int, bytes], ...] = ()
    group_idx: int | None = None
    block_ids: tuple[int, ...] = ()
    salt: str | None = None
    lora: str | None = None
    kind: str | None = None
    window: int | None = None
    medium: str = "GPU"
    sequence_id: Hashable | None = None

    __setstate__ = _set_state

    @property
    def token_ids(self) -> list[int]:
        """The blocks' token ids as ints. O(tokens)."""
        return array("I", self.tokens).tolist()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Prefixes, named by their digests, that are no longer cached; a child always comes before its parent.

    group_idx, medium: as in `BlockStored`.
    """

    block_hashes: tuple[bytes, ...]
    group_idx: int | None = None
    medium: str = "GPU"

    __setstate__ = _set_state


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was reset. Nothing stored before this record is cached any more, on the device or in a tier."""


@dataclass(frozen=True, slots=True)
class BlocksHit:
    """A sequence was allocated with these cached blocks, first to last, which doesn't change the cached set.

    Recorded only with `EventOptions(hits=True)`. Fields are as in `BlockStored`, but sequence_id is that of the
    allocated sequence.
    """

    block_hashes: tuple[bytes, ...]
    group_idx: int | None = None
    medium: str = "GPU"
    sequence_id: Hashable | None = None


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared | BlocksHit
"""The records in the list that `take_events` returns."""


@dataclass(frozen=True)
class EventOptions:
    """A value for a manager's `enable_events`: what to record in addition to changes of the device's cached set.

    hits: a `BlocksHit` whenever a sequence is allocated with a hit. tiers: what tiers store and remove; the tiers must
    have different media. Raises InvalidArgumentError.
    """

    hits: bool = False
    tiers: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hits", check_flag("hits", self.hits))
        object.__setattr__(self, "tiers", check_flag("tiers", self.tiers))


def check_event_options(value: "Flag | EventOptions") -> EventOptions | None:
    """Return what is to be recorded; None means nothing. Raises InvalidArgumentError."""
    given: Any = value
    if is_a(given, EventOptions):
        options: EventOptions = given
        return options
    if given is not True and given is not False:
        raise wrong("enable_events", "True, False or EventOptions", given)
    return EventOptions() if given else None


def part_of(stored: BlockStored, first: int, end: int) -> BlockStored:
    """Return a record of only the blocks first to end - 1 of `stored`. O(end - first)."""
    if first == 0 and end >= len(stored.block_hashes):
        return stored
    size = 4 * stored.block_size
    return replace(
        stored,
        block_hashes=stored.block_hashes[first:end],
        parent_block_hash=stored.block_hashes[first - 1] if first else stored.parent_block_hash,
        tokens=stored.tokens[first * size : end * size],
        extra_keys=tuple([(index - first, keys) for index, keys in stored.extra_keys if first <= index < end]),
        block_ids=stored.block_ids[first:end],
    )
