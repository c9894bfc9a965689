"""What a block's KV depends on besides tokens, its extra keys; and its digest, which names it outside this process.

A block's digest covers its parent's digest, its extra keys and its tokens, so it stands for the whole prefix up to the
block: in events, in other processes and in tiers. It never decides a hit: matching compares preimages (see
`kvblocks.core.prefix_index`). A weak or broken hash function can therefore confuse a reader of events, but never a
lookup.

Format 1, pinned by golden vectors in tests/hashing; integers are little-endian and unsigned unless noted:

    preimage   = u32 len(parent) | parent | u32 len(extra) | extra | tokens      parent is empty for a first block
    tokens     = block_size x u32
    extra      = entry*           salt, then LoRA (first block only), then positions by (start, end, key)
    entry      = u8 kind | [position kinds only: i64 start, u64 length] | u32 len(payload) | payload

Kinds: 1 salt, 2 LoRA name, 3 position key given as str, 4 position key given as bytes. `start` is where the keyed span
begins relative to the block's first token (negative when it began in an earlier block), `length` is the span's whole
length. Kinds and lengths make the encoding injective: no two different sets of keys have the same bytes.

`extra_keys` encodes and decodes the keys. `scheme` has `HashScheme`, which computes the digests of this format, and
`vllm` a scheme with vLLM's hashes instead; `by_name` finds a scheme by its name. Nothing here imports the core, which
calls it.

The chain of digests follows vLLM's automatic prefix caching; the typed, length-prefixed keys are this project's.
"""

from kvblocks.hashing.by_name import get_hash_scheme
from kvblocks.hashing.extra_keys import ExtraKey, PositionKey, decode_extra_keys
from kvblocks.hashing.scheme import HashFunction, HashScheme

__all__ = ["ExtraKey", "HashFunction", "HashScheme", "PositionKey", "decode_extra_keys", "get_hash_scheme"]
