"""The hashes by which the routers of Dynamo and llm-d know blocks. They follow the sources of those.

Dynamo's are of each block by itself, llm-d's of a chain. A manager can't use them as digests; vLLM's it can
(`kvblocks.hashing.vllm`).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from struct import pack
from typing import Any, Final, SupportsIndex

from xxhash import xxh3_64_intdigest

from kvblocks.arguments import Text, check_count, check_name, check_text, is_a, plain_text, wrong
from kvblocks.core.tokens import TokenIds, pack_tokens
from kvblocks.hashing.vllm import cbor_encoder

_DYNAMO_SEED: Final = 1337
_64_BITS: Final = 2**64 - 1


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
    encode, keys = cbor_encoder("llm_d_block_hashes"), images or {}
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
