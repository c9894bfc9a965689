"""The payloads of frames: records and their encodings. No input or output.

The records hold the fields of vLLM 0.33's and SGLang 0.5.23's events, by those names. A block's hash is an int
(unsigned in vLLM's events, signed in SGLang's) or bytes. `unknown` holds all other fields, so that they aren't lost. An
array's unknown fields are a list under the name "".

`decode` takes all encodings, since an event shows which one it is in. `CODECS` has an encoder of each:

- "vllm": maps tagged "type", as vLLM 0.33 sends them. A field that has its default value is left out.
- "vllm:array": arrays, as vLLM sent them before June 2026 (the last version with them is 0.23): the tag, then the
  fields in order.
- "sglang": SGLang's maps: another order, other defaults, signed hashes.
"""

from typing import Any, Final, TypeAlias, TypeVar

from kvblocks.arguments import wrong
from kvblocks.wire.errors import MalformedFrameError, missing

try:
    import msgspec
    from msgspec import Struct, field
except ImportError as _error:
    raise missing("msgspec", _error) from _error

Hash: TypeAlias = int | bytes


class BlockStored(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Consecutive blocks of one prefix became cached on a medium.

    token_ids: those of all its blocks. A pair of ids in place of an id is a bigram of speculative decoding.
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
    """Blocks that are no longer cached on a medium."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    unknown: dict[str, Any] | None = field(default=None, name="")


class AllBlocksCleared(Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Nothing that earlier events stored is cached any more."""

    unknown: dict[str, Any] | None = field(default=None, name="")


class UnknownEvent(Struct, frozen=True, gc=False):
    """An event of a type other than those above. content: the whole event, as it came."""

    type: str
    content: Any


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent


class EventBatch(Struct, frozen=True, gc=False):
    """The payload of a frame. ts: seconds since 1970. more: elements after the known ones."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None
    more: tuple[Any, ...] = ()

    @property
    def num_unknown(self) -> int:
        """The number of events of unknown types."""
        return sum(isinstance(event, UnknownEvent) for event in self.events)


MAX_PAYLOAD_BYTES: Final = 1 << 26
"""The most bytes of a payload. A batch of a million tokens takes a tenth of this."""

_Known = TypeVar("_Known", BlockStored, BlockRemoved, AllBlocksCleared)

_CLASSES: Final = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
# The fields in their order. vLLM has only added fields at the end, so its arrays have the same order.
_VLLM: Final = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
        *("ownership", "session_id", "lookahead_token_ids"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    "AllBlocksCleared": (),
}
_SGLANG: Final = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("cache_salt", "session_id", "lora_name"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_ALL_FIELDS: Final = {
    tag: tuple(name for name in kind.__struct_fields__ if name != "unknown") for tag, kind in _CLASSES.items()
}
_decoder: Final = msgspec.msgpack.Decoder()
_encoder: Final = msgspec.msgpack.Encoder()


class Codec:
    """One encoding. Immutable. name: its name in `CODECS`. hash_form: how its hashes are written: "u64" or "i64"."""

    __slots__ = ("_fields", "_is_array", "_num_always", "hash_form", "name")

    def __init__(
        self, name: str, fields: dict[str, tuple[str, ...]], num_always: tuple[int, int], hash_form: str
    ) -> None:
        """num_always: how many of the first fields of BlockStored and BlockRemoved are sent even if they are None."""
        self.name = name
        self.hash_form = hash_form
        self._fields = fields
        self._num_always = {"BlockStored": num_always[0], "BlockRemoved": num_always[1], "AllBlocksCleared": 0}
        self._is_array = name.endswith(":array")

    def encode(self, batch: EventBatch) -> bytes:
        """Return the payload of a batch. O(blocks + tokens).

        Fields that this encoding doesn't know are written after the known ones. Raises InvalidArgumentError for fields
        that an array has no place for.
        """
        encode_event = self._as_array if self._is_array else self._as_map
        events = [encode_event(event) for event in batch.events]
        return _encoder.encode((batch.ts, events, batch.data_parallel_rank, *batch.more))

    def _as_map(self, event: WireEvent) -> Any:
        if isinstance(event, UnknownEvent):
            return event.content
        tag = type(event).__name__
        names, num_always = self._fields[tag], self._num_always[tag]
        said: dict[str, Any] = {"type": tag}
        for number, name in enumerate(names):
            value = getattr(event, name)
            if value is not None or number < num_always:
                said[name] = value
        for name in _ALL_FIELDS[tag]:
            if name not in said and getattr(event, name) is not None:
                said[name] = getattr(event, name)
        return said if event.unknown is None else said | event.unknown

    def _as_array(self, event: WireEvent) -> Any:
        if isinstance(event, UnknownEvent):
            return event.content
        tag = type(event).__name__
        names = self._fields[tag]
        unknown = {} if event.unknown is None else event.unknown
        lost = [name for name in _ALL_FIELDS[tag] if name not in names and getattr(event, name) is not None]
        lost += [name for name, value in unknown.items() if name or not isinstance(value, list)]
        if lost:
            raise wrong("event", f"fields that an array of {self.name!r} has a place for", lost)
        values = [getattr(event, name) for name in names]
        if unknown:
            return [tag, *values, *unknown[""]]
        while len(values) > self._num_always[tag] and values[-1] is None:
            values.pop()
        return [tag, *values]


CODECS: Final = {
    codec.name: codec
    for codec in (
        Codec("vllm", _VLLM, (7, 2), "u64"),
        Codec("vllm:array", _VLLM, (11, 3), "u64"),
        Codec("sglang", _SGLANG, (5, 1), "i64"),
    )
}


def get_codec(name: str) -> Codec:
    """Return the codec of a name. Raises InvalidArgumentError for an unknown name."""
    if not isinstance(name, str) or name not in CODECS:
        raise wrong("codec", " or ".join(map(repr, CODECS)), name)
    return CODECS[name]


def decode(payload: bytes) -> EventBatch:
    """Return the batch in a payload, of any encoding. Raises MalformedFrameError. O(bytes)."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedFrameError(f"payload: expected at most {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}")
    try:
        content = _decoder.decode(payload)
        return _batch(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrameError(f"payload: expected a batch of events, got {payload[:40]!r}: {error}") from error


def _batch(content: Any) -> EventBatch:
    if not isinstance(content, list) or len(content) < 2 or not isinstance(content[1], list):
        raise MalformedFrameError(f"payload: expected [ts, events, data_parallel_rank], got {str(content)[:80]}")
    ts, events, *more = content
    rank = more[0] if more else None
    if type(ts) not in (float, int) or not (rank is None or type(rank) is int):
        raise MalformedFrameError(f"payload: expected a time and a rank, got {str([ts, rank])[:80]}")
    return EventBatch(float(ts), [_event(event) for event in events], rank, tuple(more[1:]))


def _event(content: Any) -> WireEvent:
    if isinstance(content, dict):
        tag, values = content.get("type"), content
    elif isinstance(content, list) and content:
        tag = content[0]
        values = _named(tag, content) if isinstance(tag, str) and tag in _VLLM else {}
    else:
        tag, values = None, {}
    if not isinstance(tag, str):
        raise MalformedFrameError(f"event: expected a map or an array with its type, got {str(content)[:80]}")
    if tag == "BlockStored":
        return _known(BlockStored, values)
    if tag == "BlockRemoved":
        return _known(BlockRemoved, values)
    if tag == "AllBlocksCleared":
        return _known(AllBlocksCleared, values)
    return UnknownEvent(tag, content)


def _named(tag: str, content: list[Any]) -> dict[str, Any]:
    names = _VLLM[tag]
    values = dict(zip(names, content[1:], strict=False))
    if len(content) > len(names) + 1:
        values[""] = content[len(names) + 1 :]
    return values


def _known(kind: type[_Known], values: dict[str, Any]) -> _Known:
    fields = _ALL_FIELDS[kind.__name__]
    unknown = {name: value for name, value in values.items() if name not in fields and name != "type"}
    if unknown:
        values = {name: value for name, value in values.items() if name in fields} | {"": unknown}
    return msgspec.convert(values, kind, builtin_types=(bytes,))
