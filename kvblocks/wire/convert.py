"""From kvblocks' records of what is cached to records of the wire."""

from collections.abc import Iterable
from typing import Any, Final

from kvblocks.arguments import wrong
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlocksHit, BlockStored, CacheEvent
from kvblocks.hashing.vllm import block_extra_keys, split_lora
from kvblocks.wire import codecs
from kvblocks.wire.codecs import Hash, WireEvent, get_codec

HASH_FORMS: Final = ("u64", "i64", "bytes")

_SGLANG_MEDIA: Final = {"CPU": "CPU_PINNED", "STORAGE": "DISK"}
_MASK: Final = 2**64 - 1


def to_u64(digest: Hash) -> int:
    """Return the low 64 bits of a digest (its last eight bytes), unsigned. A signed hash keeps its bits."""
    return int.from_bytes(digest[-8:]) if isinstance(digest, bytes) else digest & _MASK


def to_i64(digest: Hash) -> int:
    """Return the low 64 bits of a digest, signed."""
    number = to_u64(digest)
    return number - 2**64 if number >> 63 else number


def to_bytes(digest: bytes) -> bytes:
    """Return a digest as it is."""
    return digest


_FORMS: Final[dict[str, Any]] = {"u64": to_u64, "i64": to_i64, "bytes": to_bytes}


class Converter:
    """Makes records of the wire from kvblocks' records.

    codec: the name of the encoding. hash_form: "u64", "i64" or "bytes"; None: the codec's own form. Raises
    InvalidArgumentError for other values.
    """

    def __init__(self, codec: str = "vllm", *, hash_form: str | None = None) -> None:
        self.codec = get_codec(codec)
        form = self.codec.hash_form if hash_form is None else hash_form
        if form not in _FORMS or (form == "bytes" and codec == "sglang"):
            raise wrong("hash_form", " or ".join(map(repr, HASH_FORMS)), hash_form)
        self._hash = _FORMS[form]
        self._is_sglang = codec == "sglang"

    def convert(self, events: Iterable[CacheEvent]) -> list[WireEvent]:
        """Return the equivalent records, in order. O(blocks + tokens).

        `BlocksHit` gives no record: it changes nothing, and no format has an event for it. Raises InvalidArgumentError
        for objects that aren't kvblocks' records, and for records of several groups if the format has none.
        """
        return [self._one(event) for event in events if not isinstance(event, BlocksHit)]

    def check(self, event: BlockStored | BlockRemoved) -> None:
        """Raise InvalidArgumentError if the format can't express a record: SGLang's has no groups."""
        if self._is_sglang and event.group_idx is not None:
            raise wrong("group_idx", "None, since SGLang's events have no groups", event.group_idx)

    def medium_of(self, event: BlockStored | BlockRemoved) -> str:
        """Return the medium of a record's blocks in the format's terms. A tier with a medium of its own keeps that."""
        return _SGLANG_MEDIA.get(event.medium, event.medium) if self._is_sglang else event.medium

    def _one(self, event: CacheEvent) -> WireEvent:
        if isinstance(event, AllBlocksCleared):
            return codecs.AllBlocksCleared()
        if not isinstance(event, BlockStored | BlockRemoved):
            raise wrong("event", "BlockStored, BlockRemoved or AllBlocksCleared", event)
        self.check(event)
        group, medium = event.group_idx or 0, self.medium_of(event)
        hashes = list(map(self._hash, event.block_hashes))
        if isinstance(event, BlockRemoved):
            return codecs.BlockRemoved(block_hashes=hashes, medium=medium, group_idx=None if self._is_sglang else group)
        parent = event.parent_block_hash
        shared: dict[str, Any] = {
            "block_hashes": hashes,
            "parent_block_hash": None if parent is None else self._hash(parent),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "medium": medium,
            "lora_name": None if event.lora is None else split_lora(event.lora)[0],
        }
        if self._is_sglang:
            return codecs.BlockStored(**shared, cache_salt=event.salt)
        return codecs.BlockStored(
            **shared,
            extra_keys=block_extra_keys(event),
            group_idx=group,
            kv_cache_spec_kind=event.kind,
            kv_cache_spec_sliding_window=event.window,
        )
