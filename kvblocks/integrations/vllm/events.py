"""kvblocks' records of what is cached, as vLLM's own events, for `--kv-events-config`.

The block hashes are kvblocks' digests: sha256 over the exact preimage of a prefix. They name blocks as vLLM's do, but
have other values.
"""

from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvblocks import AllBlocksCleared, BlockStored, CacheEvent, CacheHit
from kvblocks.hashing import decode_extra_keys
from kvblocks.integrations.vllm.sequences import lora_name


class EventMaker:
    """Makes vLLM's events of kvblocks'. kinds: by group, the name of its spec's kind and its window or None."""

    def __init__(self, kinds: list[tuple[str, int | None]]) -> None:
        self._kinds = kinds
        self._lora_ids: dict[str, int] = {}

    def note_request(self, request: Any) -> None:
        """Take note of a request's adapter, whose number events say beside its name."""
        if request.lora_request is not None:
            self._lora_ids[request.lora_request.lora_name] = request.lora_request.lora_int_id

    def make(self, event: CacheEvent) -> Any:
        """Return the event that says the same."""
        if isinstance(event, AllBlocksCleared):
            return kv_events.AllBlocksCleared()
        group = event.group_idx or 0
        hashes = [maybe_convert_block_hash(digest) for digest in event.block_hashes]
        if not isinstance(event, BlockStored):
            return kv_events.BlockRemoved(block_hashes=hashes, medium=kv_events.MEDIUM_GPU, group_idx=group)
        parent, name = event.parent_block_hash, lora_name(event.lora)
        kind, window = self._kinds[group]
        return kv_events.BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=event.token_ids,
            block_size=event.block_size,
            lora_id=None if name is None else self._lora_ids.get(name),
            medium=kv_events.MEDIUM_GPU,
            lora_name=name,
            extra_keys=self._extra_keys(event, name),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def of_hit(self, hit: CacheHit, request: Any) -> Any:
        """Return the event that reports the blocks of a hit as if they were stored, for requests that want it.

        Of group 0, whose blocks name the prefix.
        """
        size = hit.num_tokens // len(hit.blocks)
        keys = tuple(sorted((hit.sequence.encoded_keys(size) or {}).items()))
        hashes = tuple(block.block_hash or b"" for block in hit.blocks)
        tokens = bytes(hit.sequence.packed_tokens()[: 4 * hit.num_tokens])
        keys = tuple((index, key) for index, key in keys if index < len(hashes))
        self.note_request(request)
        stored = BlockStored(hashes, None, tokens, size, keys, 0, (), hit.sequence.salt, hit.sequence.lora)
        event = self.make(stored)
        event.session_id = request.session_id
        return event

    def _extra_keys(self, event: BlockStored, name: str | None) -> list[tuple[Any, ...] | None] | None:
        """Return the keys by block, as vLLM publishes them: the adapter's name, (image, offset), salt, embeddings."""
        keys: list[tuple[Any, ...] | None] = []
        given = dict(event.extra_keys)
        for position in range(len(event.block_hashes)):
            found: list[Any] = [] if name is None else [name]
            decoded = decode_extra_keys(given.get(position, b""))
            found += [(key, span[0]) for _, span, key in decoded if span is not None and isinstance(key, str)]
            found += [key for kind, _, key in decoded if kind == "salt"]
            found += [key for _, span, key in decoded if span is not None and isinstance(key, bytes)]
            keys.append(tuple(found) or None)
        return keys or None
