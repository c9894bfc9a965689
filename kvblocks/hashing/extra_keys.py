r"""A block's extra keys, decoded; and as vLLM has them: tagged in its hashes, untagged in its events.

Imports only the core, which encodes them (`kvblocks.core.hashing` has the format). For vLLM a sequence's `lora` is an
adapter's name, or "name\0path"; text after another "\0" is ignored. A str position key is an image's identifier. A
bytes key is one of embeddings; its first NUM_EMBEDDING_BYTES bytes are the digest.
"""

from hashlib import sha256
from struct import unpack
from typing import Any, Final

from kvblocks.arguments import Given, is_a, wrong
from kvblocks.core.hashing import BYTES_KEY_KIND, SALT_KIND, STR_KEY_KIND
from kvblocks.errors import InvalidArgumentError
from kvblocks.events import BlockStored

ExtraKey = tuple[str, tuple[int, int] | None, str | bytes]
"""A decoded extra key: ("salt", None, salt), ("lora", None, name) or ("key", (start, length), key).

start: where the keyed span begins, in tokens relative to the block's first one. length: that of the whole span, in
tokens.
"""

NO_EMBEDDINGS: Final = sha256().digest()
"""The digest that stands for a block without embeddings, in a prompt that has some."""
NUM_EMBEDDING_BYTES: Final = 32


def decode_extra_keys(encoded: Given[bytes]) -> list[ExtraKey]:
    """Return a block's extra keys in the order of their encoding; the inverse of `encode_extra_keys`.

    encoded: those of one block, as in `BlockStored.extra_keys`; b"" for none. Raises InvalidArgumentError for bytes
    that are no block's encoding. O(bytes).
    """
    given: Any = encoded
    if not is_a(given, bytes):
        raise wrong("extra keys", "bytes", given)
    return _decoded_keys(given)


def decode_names(encoded: bytes | None) -> tuple[str | None, str | None]:
    """Return the salt and the LoRA name among a first block's encoded keys, each None if there is none."""
    keys = [] if encoded is None else _decoded_keys(encoded)
    names = {kind: text for kind, _, text in keys if isinstance(text, str)}
    return names.get("salt"), names.get("lora")


def _decoded_keys(encoded: bytes) -> list[ExtraKey]:
    keys: list[ExtraKey] = []
    offset, previous = 0, (0, 0, 0, 0, b"")
    while offset < len(encoded):
        kind, start, length = encoded[offset], 0, 0
        offset += 1
        if kind in (STR_KEY_KIND, BYTES_KEY_KIND):
            start, length = unpack("<qQ", _cut(encoded, offset, 16))
            offset += 16
        payload = _cut(encoded, offset + 4, unpack("<I", _cut(encoded, offset, 4))[0])
        offset += 4 + len(payload)
        order = (min(kind, STR_KEY_KIND), start, start + length, kind, payload)
        is_in_order = order >= previous if kind >= STR_KEY_KIND else kind > previous[0]
        if not is_in_order or (kind >= STR_KEY_KIND and not 0 < start + length > start):
            got = f"{_decoded(kind, start, length, payload)} after {keys}"
            raise InvalidArgumentError(f"extra keys: expected salt, LoRA, then non-empty spans by position, got {got}")
        keys.append(_decoded(kind, start, length, payload))
        previous = order
    return keys


def tagged_keys(encoded: bytes, *, has_embeddings: bool) -> tuple[Any, ...]:
    """Return a block's own keys, each with its kind, in vLLM's order: images, salt, embeddings.

    encoded: the block's encoded keys, b"" for none. has_embeddings: whether the prompt consists of embeddings.
    """
    decoded = decode_extra_keys(encoded)
    found: list[Any] = [("mm", key, span[0]) for _, span, key in decoded if span is not None and isinstance(key, str)]
    found += [("cache_salt", key) for kind, _, key in decoded if kind == "salt"]
    digests = [key[:NUM_EMBEDDING_BYTES] for _, _, key in decoded if isinstance(key, bytes)]
    found += [("prompt_embeds", digest) for digest in digests or [NO_EMBEDDINGS] * has_embeddings]
    return tuple(found)


def block_extra_keys(event: BlockStored, *, has_embeddings: bool = False) -> list[tuple[Any, ...] | None]:
    """Return the keys of each block of a record as events write them; None for a block without keys. O(blocks + keys).

    The adapter's name comes first, then the keys of `tagged_keys`: (identifier, offset in tokens) of an image, salt,
    digests.
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


def _cut(encoded: bytes, offset: int, num_bytes: int) -> bytes:
    part = encoded[offset : offset + num_bytes]
    if len(part) < num_bytes:
        raise InvalidArgumentError(f"extra keys: expected {num_bytes} bytes from {offset} on, got {part!r}")
    return part


def _decoded(kind: int, start: int, length: int, payload: bytes) -> ExtraKey:
    if not SALT_KIND <= kind <= BYTES_KEY_KIND:
        raise InvalidArgumentError(f"extra keys: expected a kind from {SALT_KIND} to {BYTES_KEY_KIND}, got {kind}")
    try:
        text: str | bytes = payload if kind == BYTES_KEY_KIND else payload.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"extra keys: expected UTF-8, got {payload!r}: {error.reason}") from None
    if kind >= STR_KEY_KIND:
        return "key", (start, length), text
    return "salt" if kind == SALT_KIND else "lora", None, text
