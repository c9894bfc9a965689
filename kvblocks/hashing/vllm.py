r"""The hashes of blocks in vLLM, Dynamo and llm-d. A manager can use vLLM's as digests; the others are functions.

As everywhere, no name decides a hit: names are for the outside. Our identity of a prefix can be finer than a name. In
that case several prefixes share one name, and `kvblocks.observe.shared_names` has events report each name once.

As of vLLM 0.32, the hash of a block is H((parent, tokens, keys)): the parent's hash, or H(seed) for a first block; a
tuple of ints; a tuple of keys or None. H is SHA-256 or XXH3 (128 bits) over pickle or canonical CBOR. The keys:

    ("lora", name, path)          in every block of a prompt with an adapter
    ("mm", identifier, start)     of each image that the block touches; start: relative to the block's first token
    ("cache_salt", salt)          in the first block only
    ("prompt_embeds", digest)     in every block of a prompt of embeddings: SHA-256 of its embeddings; of b"" if none

`kvblocks.wire.extra_keys` makes these keys from ours. A prefix whose first block has a bytes key is taken for a prompt
of embeddings.

The hashes equal vLLM's for images that don't overlap, which vLLM takes for granted. (If they overlap, vLLM's keys of a
block depend on images that come later.) Pickle writes a str object that comes twice as a reference the second time.
vLLM's strings come from a decoder, so no object comes twice there. With pickle the names are therefore equal unless the
caller passed the same str object as both an adapter's name and its path.

Sources: chaining, and keys beside the tokens, are vLLM's. Dynamo's and llm-d's functions follow their sources.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from importlib import import_module
from struct import Struct, pack
from typing import Any, Final, SupportsIndex

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvblocks.arguments import Text, check_count, check_name, check_text, is_a, pip_install, plain_text, wrong
from kvblocks.core.hashing import Names, sha256_digest
from kvblocks.core.tokens import TokenIds, pack_tokens
from kvblocks.errors import InvalidArgumentError
from kvblocks.wire.extra_keys import decode_extra_keys, decode_names, split_lora, tagged_keys

DEFAULT_SEED: Final = "vllm-none-hash"
"""vLLM's seed if PYTHONHASHSEED isn't set and the hash is cryptographic."""

_ALGORITHMS: Final = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
_DYNAMO_SEED: Final = 1337
_64_BITS: Final = 2**64 - 1


class VllmNames(Names):
    """vLLM's names, as `KVCacheManager(hash_algorithm=...)` takes them.

    algorithm: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor". seed: None: the value of PYTHONHASHSEED. If that
    isn't set either, the sha256 kinds use vLLM's own seed, and the others a random one that nobody can guess. The
    attribute `seed` is what others need to compute the same names. The cbor kinds need cbor2: pip install
    'kvblocks[wire]'. Raises InvalidArgumentError.
    """

    def __init__(self, algorithm: Text, *, seed: Text | None = None) -> None:
        given: Any = algorithm
        name = plain_text(given) if is_a(given, str) else ""
        if name not in _ALGORITHMS:
            raise wrong("VllmNames: algorithm", f"one of {', '.join(map(repr, _ALGORITHMS))}", algorithm)
        is_cryptographic = name.startswith("sha256")
        digest = sha256_digest if is_cryptographic else xxh3_128_digest
        super().__init__(digest, len(digest(b"")), are_unique=False)
        self.algorithm = name
        self._encode: Callable[[Any], bytes] = _cbor_encoder(name) if name.endswith("_cbor") else _pickled
        self.seed: str = _check_seed(seed, is_cryptographic=is_cryptographic)
        self.none_hash: bytes = digest(self._encode(self.seed))

    def __repr__(self) -> str:
        return f"VllmNames({self.algorithm!r})"

    def chain(
        self,
        parent_digest: bytes,
        tokens: bytearray | memoryview,
        extra_keys: dict[int, bytes] | None,
        first_keys: bytes | None,
        block_bytes: int,
        blocks: range,
    ) -> bytearray:
        """Return vLLM's hashes of these blocks. See `Names.chain`."""
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
    _, lora = decode_names(first_keys)
    has_embeddings = any(isinstance(key, bytes) for _, _, key in decode_extra_keys(first_keys))
    return () if lora is None else (("lora", *split_lora(lora)),), has_embeddings


def _check_seed(seed: Text | None, *, is_cryptographic: bool) -> str:
    given: Any = seed
    if given is not None:
        if not is_a(given, str):
            raise wrong("VllmNames: seed", "a str or None", seed)
        return check_text("VllmNames: seed", plain_text(given))
    from_environment = os.environ.get("PYTHONHASHSEED")
    if from_environment is not None:
        return from_environment
    return DEFAULT_SEED if is_cryptographic else os.urandom(32).hex()


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor_encoder(wanted_by: str) -> Callable[[Any], bytes]:
    try:
        dumps: Any = import_module("cbor2").dumps
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"{wanted_by}: expected the package cbor2, got none: {pip_install('wire')}"
        ) from error
    return partial(dumps, canonical=True)


def dynamo_block_hashes(
    token_ids: TokenIds,
    block_size: SupportsIndex,
    *,
    lora: Text | None = None,
    salt: Text | None = None,
    mm_hashes: Mapping[int, Items[int]] | None = None,
) -> list[int]:
    """Return the hashes of the full blocks of tokens in Dynamo's router (1.6): each block by itself, as u64.

    Its indexer finds a prefix by these, whatever a worker's own hashes are. lora: the adapter's name. salt: Dynamo's
    cache namespace. mm_hashes: by block, a u64 for each image in it. Equal to Dynamo's `compute_block_hash_for_seq`.
    Raises InvalidArgumentError and InvalidTokensError. O(tokens).
    """
    packed = memoryview(pack_tokens(token_ids)).cast("B")
    size = 4 * check_count("block_size", block_size, 1)
    name, space, images = check_name("lora", lora), check_name("salt", salt), mm_hashes or {}
    seed = _DYNAMO_SEED
    if name is not None:
        seed += xxh3_64_intdigest(name.encode())
    if space is not None:
        seed += xxh3_64_intdigest(space.encode(), seed=1)
    found: list[int] = []
    for block in range(len(packed) // size):
        numbers = sorted([check_count("mm_hashes", number, 0, _64_BITS) for number in images.get(block, ())])
        content = bytes(packed[block * size : (block + 1) * size]) + pack(f"<{len(numbers)}Q", *numbers)
        found.append(xxh3_64_intdigest(content, seed=seed & _64_BITS))
    return found


def llm_d_block_hashes(
    token_ids: TokenIds,
    block_size: SupportsIndex,
    model: Text,
    *,
    seed: Text = "",
    images: Mapping[int, Items[str]] | None = None,
) -> list[int]:
    """Return the hashes of the full blocks of tokens in llm-d's KV-cache indexer: chained, as u64. Salts don't enter
    them.

    model: the name of the model, or of the adapter if there is one. seed: llm-d's `hashSeed`. images: by block, the
    identifier of each image that the block touches. Needs cbor2: pip install 'kvblocks[wire]'. Raises
    InvalidArgumentError and InvalidTokensError. O(tokens), with FNV-1a in Python, which takes about 30 us per block.
    """
    packed = pack_tokens(token_ids)
    size = check_count("block_size", block_size, 1)
    name = check_name("model", model)
    if name is None:
        raise wrong("model", "a non-empty str", model)
    given: Any = seed
    if not is_a(given, str):
        raise wrong("seed", "a str", seed)
    encode, keys = _cbor_encoder("llm_d_block_hashes"), images or {}
    previous = _fnv1a(encode([_fnv1a(check_text("seed", plain_text(given)).encode()), None, name]))
    found: list[int] = []
    for block in range(len(packed) // size):
        of_block = [{"Hash": image} for image in keys.get(block, ())]
        tokens = list(packed[block * size : (block + 1) * size])
        previous = _fnv1a(encode([previous, tokens, of_block or None]))
        found.append(previous)
    return found


def _fnv1a(content: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in content:
        value = ((value ^ byte) * 0x100000001B3) & _64_BITS
    return value
