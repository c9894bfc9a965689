"""A block's extra keys as events say them: untagged, in vLLM's order. Needs nothing but the core."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from kvblocks.events import BlockStored
from kvblocks.hashing import decode_extra_keys

NUM_DIGEST_BYTES = 32
"""Bytes of a key of embeddings that an event says: their sha256."""

NO_EMBEDDINGS = sha256().digest()
"""What vLLM says of blocks behind a prompt of embeddings."""


def block_extra_keys(
    event: BlockStored, lora_name: str | None, *, has_embeddings: bool = False
) -> list[tuple[Any, ...] | None]:
    """Return the keys of each block of `event`, None for a block without any. O(blocks + keys).

    In this order: the adapter's name, (image, offset in tokens from the block's start) of each key that is text, the
    salt in a prefix's first block, and the first NUM_DIGEST_BYTES of each key that is bytes. lora_name: the adapter's
    name as the outside knows it. has_embeddings: whether the prompt is one of embeddings; then a block without such a
    key says NO_EMBEDDINGS.
    """
    given = dict(event.extra_keys)
    if not given and lora_name is None and not has_embeddings:
        return [None] * len(event.block_hashes)
    return [
        tuple(_keys(given.get(position, b""), lora_name, has_embeddings=has_embeddings)) or None
        for position in range(len(event.block_hashes))
    ]


def _keys(encoded: bytes, lora_name: str | None, *, has_embeddings: bool) -> Iterator[Any]:
    decoded = decode_extra_keys(encoded)
    if lora_name is not None:
        yield lora_name
    yield from ((key, span[0]) for _, span, key in decoded if span is not None and isinstance(key, str))
    yield from (key for kind, _, key in decoded if kind == "salt")
    digests = [key[:NUM_DIGEST_BYTES] for _, span, key in decoded if span is not None and isinstance(key, bytes)]
    yield from digests or [NO_EMBEDDINGS] * has_embeddings
