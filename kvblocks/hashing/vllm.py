r"""vLLM's hashes of blocks, which a manager can use as digests, and a block's extra keys as vLLM has them.

As everywhere, no digest decides a hit. Prefixes that kvblocks tells apart may have one hash in vLLM. In that case
`kvblocks.observe.shared_hashes` reports each hash once in events.

As of vLLM 0.32, the hash of a block is H((parent, tokens, keys)): the parent's hash, or H(seed) for a first block; a
tuple of ints; a tuple of keys or None. H is SHA-256 or XXH3 (128 bits) over pickle or canonical CBOR. The keys:

    ("lora", name, path)          in every block of a prompt with an adapter
    ("mm", identifier, start)     of each image that the block touches; start: relative to the block's first token
    ("cache_salt", salt)          in the first block only
    ("prompt_embeds", digest)     in every block of a prompt of embeddings: SHA-256 of its embeddings; of b"" if none

In events vLLM writes the same keys without their kinds. For vLLM a sequence's `lora` is an adapter's name, or
"name\0path"; text after another "\0" is ignored. A str position key is an image's identifier. A bytes key is one of
embeddings; its first NUM_EMBEDDING_BYTES bytes are the digest. A prefix whose first block has a bytes key is taken for
a prompt of embeddings.

The hashes equal vLLM's for images that don't overlap, which vLLM takes for granted. (If they overlap, vLLM's keys of a
block depend on images that come later.) Pickle writes a str object that comes twice as a reference the second time.
vLLM's strings come from a decoder, so no object comes twice there. With pickle the hashes are therefore equal unless
the caller passed the same str object as both an adapter's name and its path.
"""

import os
import pickle
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from importlib import import_module
from struct import Struct
from typing import Any, Final

from xxhash import xxh3_128_digest

from kvblocks.arguments import Text, check_text, is_a, pip_install, plain_text, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.events import BlockStored
from kvblocks.hashing.extra_keys import decode_extra_keys, decode_salt_and_lora
from kvblocks.hashing.scheme import HashScheme, sha256_digest

DEFAULT_SEED: Final = "vllm-none-hash"
"""vLLM's seed if PYTHONHASHSEED isn't set and the hash is cryptographic."""

NO_EMBEDDINGS: Final = sha256().digest()
"""The digest that stands for a block without embeddings, in a prompt that has some."""
NUM_EMBEDDING_BYTES: Final = 32

_ALGORITHMS: Final = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


class VllmHashScheme(HashScheme):
    """vLLM's hashes, as `KVCacheManager(hash_algorithm=...)` takes them.

    algorithm: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor". seed: None: the value of PYTHONHASHSEED. If that
    isn't set either, the sha256 kinds use vLLM's own seed, and the others a random one that nobody can guess. The
    attribute `seed` is what others need to compute the same hashes. The cbor kinds need cbor2: pip install
    'kvblocks[wire]'. Raises InvalidArgumentError.
    """

    def __init__(self, algorithm: Text, *, seed: Text | None = None) -> None:
        given: Any = algorithm
        name = plain_text(given) if is_a(given, str) else ""
        if name not in _ALGORITHMS:
            raise wrong("VllmHashScheme: algorithm", f"one of {', '.join(map(repr, _ALGORITHMS))}", algorithm)
        is_cryptographic = name.startswith("sha256")
        digest = sha256_digest if is_cryptographic else xxh3_128_digest
        super().__init__(digest, len(digest(b"")), are_unique=False)
        self.algorithm = name
        self._encode: Callable[[Any], bytes] = cbor_encoder(name) if name.endswith("_cbor") else _pickled
        self.seed: str = _check_seed(seed, is_cryptographic=is_cryptographic)
        self.none_hash: bytes = digest(self._encode(self.seed))

    def __repr__(self) -> str:
        return f"VllmHashScheme({self.algorithm!r})"

    def chain(
        self,
        parent_digest: bytes,
        tokens: bytearray | memoryview,
        extra_keys: dict[int, bytes] | None,
        first_keys: bytes | None,
        block_bytes: int,
        blocks: range,
    ) -> bytearray:
        """Return vLLM's hashes of these blocks. See `HashScheme.chain`."""
        keys, packed = extra_keys or {}, bytearray()
        of_all, has_embeddings = _keys_of_all(first_keys)
        words = Struct(f"<{block_bytes // 4}I")
        previous = parent_digest or self.none_hash
        for block in blocks:
            of_block = of_all
            if has_embeddings or block in keys:
                of_block = of_all + tagged_keys(keys.get(block, b""), has_embeddings=has_embeddings)
            content = (previous, words.unpack_from(tokens, block * block_bytes), of_block or None)
            previous = self.hash_function(self._encode(content))
            packed += previous
        return packed


def _keys_of_all(first_keys: bytes | None) -> tuple[tuple[Any, ...], bool]:
    """Return the keys that all blocks of a prefix have, and whether it is of embeddings."""
    if first_keys is None:
        return (), False
    _, lora = decode_salt_and_lora(first_keys)
    has_embeddings = any(isinstance(key, bytes) for _, _, key in decode_extra_keys(first_keys))
    return () if lora is None else (("lora", *split_lora(lora)),), has_embeddings


def _check_seed(seed: Text | None, *, is_cryptographic: bool) -> str:
    given: Any = seed
    if given is not None:
        if not is_a(given, str):
            raise wrong("VllmHashScheme: seed", "a str or None", seed)
        return check_text("VllmHashScheme: seed", plain_text(given))
    from_environment = os.environ.get("PYTHONHASHSEED")
    if from_environment is not None:
        return from_environment
    return DEFAULT_SEED if is_cryptographic else os.urandom(32).hex()


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def cbor_encoder(wanted_by: str) -> Callable[[Any], bytes]:
    """Return canonical CBOR's encoder. Raises InvalidArgumentError, which begins with `wanted_by`, without cbor2."""
    try:
        dumps: Any = import_module("cbor2").dumps
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"{wanted_by}: expected the package cbor2, got none: {pip_install('wire')}"
        ) from error
    return partial(dumps, canonical=True)


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
