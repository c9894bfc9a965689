"""vLLM's own events for `--kv-events-config`, made from kvblocks' records of what is cached, and questions by hash.

The block hashes are those that vLLM would compute (`kvblocks.hashing.vllm`) with its `--prefix-caching-hash-algo`.
"""

from collections.abc import Iterable
from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvblocks import AllBlocksCleared, BlockStored, CacheEvent, CacheHit, KVCacheManager
from kvblocks.hashing.vllm import block_extra_keys, split_lora


class NamedBlocks:
    """A manager's records, and which hashes are cached according to them, for a part of vLLM that asks.

    is_asked: whether `has` will be called; if not, no hashes are remembered. is_read: whether `take` will be called.
    """

    def __init__(self, manager: KVCacheManager, *, is_asked: bool, is_read: bool) -> None:
        self._manager = manager
        self._is_asked = is_asked
        self._is_read = is_read
        self._untaken: list[CacheEvent] = []
        self._cached: dict[int, set[bytes]] = {}

    def take(self) -> list[CacheEvent]:
        """Return the records since the last call. O(records)."""
        if not self._is_asked:
            return self._manager.take_events()
        self.update()
        taken, self._untaken = self._untaken, []
        return taken

    def update(self) -> None:
        """Process the records since the last call, so that they don't pile up. O(records)."""
        if not self._is_asked:
            return
        events = self._manager.take_events()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._cached.clear()
            elif isinstance(event, BlockStored):
                self._cached.setdefault(event.group_idx or 0, set()).update(event.block_hashes)
            else:
                self._cached[event.group_idx or 0].difference_update(event.block_hashes)
        if self._is_read:
            self._untaken += events

    def has(self, block_hash: bytes, group: int) -> bool:
        """Return whether a block with this hash is cached in a group. O(records since the last call)."""
        self.update()
        return block_hash in self._cached.get(group, ())


class EventMaker:
    """Makes vLLM's events from kvblocks', in order.

    kinds: for each group, the name of its spec's kind, and its window or None.
    """

    def __init__(self, kinds: list[tuple[str, int | None]]) -> None:
        self._kinds = kinds
        self._made: list[Any] = []

    def collect(self, events: Iterable[CacheEvent], request: Any) -> None:
        """Make events of what a call for a request has changed."""
        self._made += [self.make(event, request) for event in events]

    def collect_hit(self, hit: CacheHit, request: Any, block_sizes: list[int]) -> None:
        """Report the blocks of a hit as stored, for a request that asks for that. block_sizes: by group."""
        self._made += [self.make(stored, request) for stored in _as_stored(hit, block_sizes)]

    def take(self, events: Iterable[CacheEvent]) -> list[Any]:
        """Return the events made since the last call, followed by those of `events`, which belong to no request."""
        made, self._made = self._made, []
        return made + [self.make(event, None) for event in events]

    def make(self, event: CacheEvent, request: Any) -> Any:
        """Return the equivalent event of vLLM. request: the request whose call caused it, or None."""
        if isinstance(event, AllBlocksCleared):
            return kv_events.AllBlocksCleared()
        group = event.group_idx or 0
        hashes = [maybe_convert_block_hash(digest) for digest in event.block_hashes]
        if not isinstance(event, BlockStored):
            return kv_events.BlockRemoved(block_hashes=hashes, medium=kv_events.MEDIUM_GPU, group_idx=group)
        parent, name = event.parent_block_hash, None if event.lora is None else split_lora(event.lora)[0]
        kind, window = self._kinds[group]
        has_embeddings = request is not None and request.prompt_embeds is not None
        lora = None if request is None else request.lora_request
        return kv_events.BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=event.token_ids,
            block_size=event.block_size,
            lora_id=None if lora is None else lora.lora_int_id,
            medium=kv_events.MEDIUM_GPU,
            lora_name=name,
            extra_keys=block_extra_keys(event, has_embeddings=has_embeddings),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            session_id=None if request is None else request.session_id,
        )


def _as_stored(hit: CacheHit, block_sizes: list[int]) -> Iterable[BlockStored]:
    """Yield a record for each group of a hit, as if its blocks had been stored just now.

    Of a window only cached blocks are reported. vLLM reports the whole prefix, but nothing would ever remove the rest.
    Groups with another block size are left out, since the hit's names don't name their blocks.
    """
    size = hit.num_tokens // len(hit.blocks)
    encoded = hit.sequence.encoded_keys(size) or {}
    names = [block.block_hash or b"" for block in hit.blocks]
    tokens = bytes(hit.sequence.packed_tokens()[: 4 * hit.num_tokens])
    for group, block_size in enumerate(block_sizes):
        held = hit.group_blocks(group)
        first = len(held) - sum(block is not None for block in held)
        if block_size == size and first < len(held):
            hashes, parent = tuple(names[first:]), names[first - 1] if first else None
            keys = tuple((index - first, key) for index, key in sorted(encoded.items()) if first <= index < len(names))
            yield BlockStored(
                hashes, parent, tokens[4 * size * first :], size, keys, group, (), hit.sequence.salt, hit.sequence.lora
            )
