"""vLLM's hashes of the blocks of a prompt, from the prompt itself: the oracle for `kvblocks.hashing.vllm`.

Written along vLLM's `generate_block_hash_extra_keys` and `hash_block_tokens`, with nothing of kvblocks in it;
tests/integrations/vllm compares it with the real ones.
"""

import pickle
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import cbor2
from xxhash import xxh3_128_digest

Span = tuple[int, int, str | bytes]

HASHES: dict[str, Any] = {
    "sha256": lambda value: sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest(),
    "sha256_cbor": lambda value: sha256(cbor2.dumps(value, canonical=True)).digest(),
    "xxhash": lambda value: xxh3_128_digest(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)),
    "xxhash_cbor": lambda value: xxh3_128_digest(cbor2.dumps(value, canonical=True)),
}


def block_keys(
    salt: str | None, lora: tuple[str, str] | None, spans: Sequence[Span], block_size: int, num_blocks: int
) -> list[tuple[Any, ...]]:
    """Return each block's keys. spans: images by str, embeddings' digests by bytes."""
    images = sorted((start, end, key) for start, end, key in spans if isinstance(key, str))
    digests = sorted((start, end, key) for start, end, key in spans if isinstance(key, bytes))
    has_embeddings = any(start < block_size for start, _, _ in digests)
    found = []
    for first in range(0, num_blocks * block_size, block_size):
        end = first + block_size
        keys: list[Any] = [] if lora is None else [("lora", *lora)]
        for start, stop, key in images:
            if start < end and stop > first:
                keys.append(("mm", key, start - first))
        if salt is not None and first == 0:
            keys.append(("cache_salt", salt))
        here = [key[:32] for start, stop, key in digests if start < end and stop > first]
        if has_embeddings and not here:
            here = [sha256().digest()]
        keys += [("prompt_embeds", key) for key in here]
        found.append(tuple(keys))
    return found


def block_hashes(
    algorithm: str, seed: str, tokens: Sequence[int], keys: Sequence[tuple[Any, ...]], block_size: int
) -> list[bytes]:
    """Return each full block's hash."""
    hashed = HASHES[algorithm]
    parent, hashes = hashed(seed), []
    for number in range(len(tokens) // block_size):
        content = tuple(tokens[number * block_size : (number + 1) * block_size])
        parent = hashed((parent, content, keys[number] or None))
        hashes.append(parent)
    return hashes
