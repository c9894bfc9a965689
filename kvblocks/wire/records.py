"""The records of the wire: what one frame's payload says, whichever of the encodings it came in.

They hold the fields of vLLM 0.33's and SGLang 0.5.23's events, by those names. A block's hash is an int (unsigned in
vLLM's events, signed in SGLang's) or bytes. `unknown` holds the fields that are none of these, so that they survive;
those of an array are a list under the name "".
"""

from typing import Any, TypeAlias

from kvblocks.wire.errors import missing

try:
    from msgspec import Struct, field
except ImportError as _error:
    raise missing("msgspec", _error) from _error

Hash: TypeAlias = int | bytes


class BlockStored(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Consecutive blocks of one prefix became cached, on a medium.

    token_ids: of all its blocks; a pair in place of an id is a bigram of speculative decoding.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None
    unknown: dict[str, Any] | None = field(default=None, name="")


class BlockRemoved(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Blocks that are cached on a medium no more."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    unknown: dict[str, Any] | None = field(default=None, name="")


class AllBlocksCleared(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Nothing that was said before is cached any more."""

    unknown: dict[str, Any] | None = field(default=None, name="")


class UnknownEvent(Struct, frozen=True, gc=False):
    """An event of a type that none of the above is. content: the whole event, as it came."""

    type: str
    content: Any


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent


class EventBatch(Struct, frozen=True, gc=False):
    """The payload of a frame. ts: seconds since 1970. more: elements behind the ones that are known."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None
    more: tuple[Any, ...] = ()

    @property
    def num_unknown(self) -> int:
        """The number of events of unknown types."""
        return sum(isinstance(event, UnknownEvent) for event in self.events)
