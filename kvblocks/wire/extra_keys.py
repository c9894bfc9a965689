r"""A block's extra keys as vLLM has them: tagged in its hashes, untagged in its events. Imports only the core.

A sequence's `lora` is an adapter's name, or "name\0path"; text behind another "\0" is ignored. A str position key is an
image's identifier. A bytes key is one of embeddings; its first NUM_EMBEDDING_BYTES are the digest.
"""

from hashlib import sha256
from typing import Any, Final

from kvblocks.core.hashing import decode_extra_keys
from kvblocks.events import BlockStored

NO_EMBEDDINGS: Final = sha256().digest()
"""The digest of a block without embeddings, in a prompt that has some."""
NUM_EMBEDDING_BYTES: Final = 32


def tagged_keys(encoded: bytes, *, has_embeddings: bool) -> tuple[Any, ...]:
    """Return a block's own keys, each with its kind, in vLLM's order: images, salt, embeddings.

    encoded: the block's encoded keys, b"" for none. has_embeddings: whether the prompt is one of embeddings.
    """
    decoded = decode_extra_keys(encoded)
    found: list[Any] = [("mm", key, span[0]) for _, span, key in decoded if span is not None and isinstance(key, str)]
    found += [("cache_salt", key) for kind, _, key in decoded if kind == "salt"]
    digests = [key[:NUM_EMBEDDING_BYTES] for _, _, key in decoded if isinstance(key, bytes)]
    found += [("prompt_embeds", digest) for digest in digests or [NO_EMBEDDINGS] * has_embeddings]
    return tuple(found)


def block_extra_keys(event: BlockStored, *, has_embeddings: bool = False) -> list[tuple[Any, ...] | None]:
    """Return the keys of each block of a record as events write them; None for a block without keys. O(blocks + keys).

    The adapter's name first, then those of `tagged_keys`: (identifier, offset in tokens) of an image, salt, digests.
    """
    given = dict(event.extra_keys)
    of_all = () if event.lora is None else (split_lora(event.lora)[0],)
    if not given and not has_embeddings:
        return [of_all or None] * len(event.block_hashes)
    keys: list[tuple[Any, ...] | None] = []
    for position in range(len(event.block_hashes)):
        own = tagged_keys(given.get(position, b""), has_embeddings=has_embeddings)
        keys.append((*of_all, *(key[1:] if key[0] == "mm" else key[1] for key in own)) or None)
    return keys


def split_lora(lora: str) -> tuple[str, str]:
    """Return the adapter's name and path in a sequence's `lora`; "" for no path."""
    name, path, *_ = [*lora.split("\0"), ""]
    return name, path
