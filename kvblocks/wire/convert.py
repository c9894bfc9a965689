"""kvblocks' records of what is cached, as records of the wire."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvblocks.arguments import wrong
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvblocks.wire import codecs
from kvblocks.wire.codecs import Hash, WireEvent, get_codec
from kvblocks.wire.extra_keys import block_extra_keys, split_lora

HASH_FORMS: Final = ("u64", "i64", "bytes")
FULL_ATTENTION: Final = ("full_attention", None)

_MASK: Final = 2**64 - 1


def to_u64(digest: Hash) -> int:
    """Return the low 64 bits of a digest (its last eight bytes), unsigned; of a signed hash the same bits."""
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
    """Makes records of the wire of kvblocks' records.

    codec: which encoding they are for. hash_form: "u64", "i64" or "bytes"; None: the codec's own. groups: by group,
    its kind of layers by vLLM's name and its window in tokens or None. Raises InvalidArgumentError for others.
    """

    def __init__(
        self,
        codec: str = "vllm",
        *,
        hash_form: str | None = None,
        groups: Sequence[tuple[str, int | None]] = (FULL_ATTENTION,),
    ) -> None:
        self.codec = get_codec(codec)
        form = self.codec.hash_form if hash_form is None else hash_form
        if form not in _FORMS or (form == "bytes" and codec == "sglang"):
            raise wrong("hash_form", " or ".join(map(repr, HASH_FORMS)), hash_form)
        self._hash = _FORMS[form]
        self._groups = tuple(groups)
        self._is_sglang = codec == "sglang"

    def convert(self, events: Iterable[CacheEvent]) -> list[WireEvent]:
        """Return the records that say the same, in order. O(blocks + tokens).

        Raises InvalidArgumentError for what is no record of kvblocks', or of a group that the converter wasn't told of.
        """
        return [self._one(event) for event in events]

    def check_group(self, event: BlockStored | BlockRemoved) -> int:
        """Return the number of an event's group. Raises InvalidArgumentError for one that wasn't named."""
        group = event.group_idx or 0
        if group >= len(self._groups):
            raise wrong("group_idx", f"one of the {len(self._groups)} groups named", group)
        return group

    def _one(self, event: CacheEvent) -> WireEvent:
        if isinstance(event, AllBlocksCleared):
            return codecs.AllBlocksCleared()
        if not isinstance(event, BlockStored | BlockRemoved):
            raise wrong("event", "BlockStored, BlockRemoved or AllBlocksCleared", event)
        group, medium = self.check_group(event), medium_of(event)
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
        kind, window = self._groups[group]
        return codecs.BlockStored(
            **shared,
            extra_keys=block_extra_keys(event),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


def medium_of(event: BlockStored | BlockRemoved) -> str:
    """Return where a record's blocks are, by the wire's name. All records are of the device so far."""
    del event
    return "GPU"
