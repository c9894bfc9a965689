"""Records of every change to the set of cached prefixes, in order, for routers and other observers of the cache.

The set is of prefixes, not of blocks: a second block that holds the same prefix changes nothing, and a prefix is
removed when the last block that holds it goes. Replaying the records into a dict gives the cached set at any time,
that of each group and of each medium for itself: the same digest may be cached in several. The kinds follow vLLM's KV
events; putting them on a wire is not the core's work.
"""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

from kvblocks.arguments import Flag, check_flag, is_a, wrong


def _set_state(record: Any, state: list[Any]) -> None:
    """Fill a record from its pickled fields. Older versions had fewer: the last ones then get their defaults."""
    declared = fields(record)
    values = state + [field.default for field in declared[len(state) :]]
    for field, value in zip(declared, values, strict=True):
        object.__setattr__(record, field.name, value)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one prefix became cached.

    block_hashes: their digests, first to last. parent_block_hash: the digest of the block that the first is attached
    to, None for a first block. tokens: their token ids, packed as little-endian u32. block_size: tokens in a block.
    extra_keys: (position among block_hashes, encoded extra keys) of those that have some, encoded as in `hashing`; a
    group whose blocks are of another size than the primary one's leaves them to that. group_idx: the group that they
    are cached in; None where there is only one. In a windowed group the parent need not be cached. block_ids: the
    blocks that hold them now; a duplicate that takes the place of one later makes no record. In a tier, its slots.
    salt, lora: of their sequence, whichever of its blocks they are. kind: how the group's layers attend,
    "full_attention" or "sliding_window"; None: not known, in records of older versions. window: of the latter, in
    tokens. medium: where they are cached, "GPU" for the device, otherwise a tier's `medium`. sequence_id: of the
    sequence whose call cached them; None in a tier.
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
        """The blocks' token ids. O(tokens)."""
        return array("I", self.tokens).tolist()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Prefixes that are cached no more, by their digests; a child always before its parent.

    group_idx, medium: as stored.
    """

    block_hashes: tuple[bytes, ...]
    group_idx: int | None = None
    medium: str = "GPU"

    __setstate__ = _set_state


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was reset: no prefix stored before this record is cached any more, on the device or in a tier."""


@dataclass(frozen=True, slots=True)
class BlocksHit:
    """A sequence begins with these cached blocks, first to last; the cached set is as before.

    Recorded for whoever asks (`EventOptions`). Fields as `BlockStored`'s; sequence_id: of the one that begins.
    """

    block_hashes: tuple[bytes, ...]
    group_idx: int | None = None
    medium: str = "GPU"
    sequence_id: Hashable | None = None


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared | BlocksHit


@dataclass(frozen=True)
class EventOptions:
    """What a manager records besides the changes of the device's cached set, as its `enable_events`.

    hits: `BlocksHit`, when a sequence begins with cached blocks. tiers: what tiers store and remove; their media must
    differ. Raises InvalidArgumentError.
    """

    hits: bool = False
    tiers: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hits", check_flag("hits", self.hits))
        object.__setattr__(self, "tiers", check_flag("tiers", self.tiers))


def check_event_options(value: "Flag | EventOptions") -> EventOptions | None:
    """Return what is to be recorded, None: nothing. Raises InvalidArgumentError."""
    given: Any = value
    if is_a(given, EventOptions):
        options: EventOptions = given
        return options
    if given is not True and given is not False:
        raise wrong("enable_events", "True, False or EventOptions", given)
    return EventOptions() if given else None


def part_of(stored: BlockStored, first: int, end: int) -> BlockStored:
    """Return the record of blocks first to end - 1 of a record's. O(blocks)."""
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
