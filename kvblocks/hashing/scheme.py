"""Extra keys and the digest chain: what a block's KV depends on besides tokens, and its name outside this process.

A block's digest covers its parent's digest, its extra keys and its tokens, so it names the whole prefix up to the
block. It names the block in events, in other processes and in tiers. It never decides a hit: matching compares
preimages (see `prefix_index`). A weak or broken hash function can therefore confuse a reader of events, but never a
lookup.

Format 1, pinned by golden vectors in tests/core; integers are little-endian and unsigned unless noted:

    preimage   = u32 len(parent) | parent | u32 len(extra) | extra | tokens      parent is empty for a first block
    tokens     = block_size x u32
    extra      = entry*           salt, then LoRA (first block only), then positions by (start, end, key)
    entry      = u8 kind | [position kinds only: i64 start, u64 length] | u32 len(payload) | payload

Kinds: 1 salt, 2 LoRA name, 3 position key given as str, 4 position key given as bytes. `start` is where the keyed span
begins relative to the block's first token (negative when it began in an earlier block), `length` is the span's whole
length. Kinds and lengths make the encoding injective: no two different sets of keys have the same bytes.
`kvblocks.wire.extra_keys` decodes keys.

The chain of digests follows vLLM's automatic prefix caching; the typed, length-prefixed keys are this project's.
"""

import hashlib
from collections.abc import Callable, Iterable
from struct import pack
from typing import Any

from kvblocks.arguments import Text, check_count, check_name, check_text, is_a, listed, plain_text, shown, wrong
from kvblocks.closed import Closed
from kvblocks.errors import InvalidArgumentError

HashFunction = Callable[[bytes], bytes]
"""Maps a preimage to a digest. It must be pure and always return the same number of bytes, at least one."""

PositionKey = tuple[int, int, str | bytes]
"""(start, end, key): tokens start to end - 1 depend on `key`, such as the hash of the image that they stand for."""

PositionKeys = Iterable[PositionKey]
"""Several position keys, in any order."""

SALT_KIND, LORA_KIND, STR_KEY_KIND, BYTES_KEY_KIND = 1, 2, 3, 4


def sha256_digest(preimage: bytes) -> bytes:
    """Return the 32-byte SHA-256 of `preimage`."""
    return hashlib.sha256(preimage).digest()


def check_digest(digest: Any, num_bytes: int | None) -> bytes:
    """Return `digest` if it has `num_bytes` bytes (None: any number but 0), else raise InvalidArgumentError."""
    if type(digest) is not bytes or not digest:
        raise InvalidArgumentError(f"hash function: expected it to return bytes, at least one; got {shown(digest)}")
    if num_bytes is not None and len(digest) != num_bytes:
        raise InvalidArgumentError(f"hash function: expected {num_bytes} bytes as before, got {len(digest)}")
    return digest


def make_preimage(parent_digest: bytes, extra_keys: bytes, tokens: bytes) -> bytes:
    """Return the preimage of a block, which its digest is the hash of.

    parent_digest: the parent block's digest, b"" for a first block. extra_keys: the block's encoded extra keys, b"" for
    none. tokens: the block's token ids, packed as little-endian u32.
    """
    return b"".join((pack("<I", len(parent_digest)), parent_digest, pack("<I", len(extra_keys)), extra_keys, tokens))


class Names(Closed):
    """How prefixes are named to the outside. This class hashes preimages in format 1.

    num_digest_bytes: length of a name. are_unique: whether two prefixes never have the same name, unless the hash
    function is broken. Other rooms derive other schemes from this class (`kvblocks.wire.names`).
    """

    def __init__(self, hash_function: HashFunction, num_digest_bytes: int, *, are_unique: bool = True) -> None:
        self.hash_function: Callable[[bytes], Any] = hash_function
        self.num_digest_bytes = num_digest_bytes
        self.are_unique = are_unique

    def chain(
        self,
        parent_digest: bytes,
        tokens: bytearray | memoryview,
        extra_keys: dict[int, bytes] | None,
        first_keys: bytes | None,  # noqa: ARG002  # the first block's digest covers them
        block_bytes: int,
        blocks: range,
    ) -> bytearray:
        """Return the digests of `blocks`, one after the other in one buffer. Changes nothing. O(blocks).

        tokens: a sequence's packed tokens, `block_bytes` bytes for each block. blocks: indices of the blocks to name.
        parent_digest: the digest of the block before them, b"" for none. extra_keys: encoded, by block. first_keys: the
        keys of the prefix's first block, which may come long before `blocks`.
        """
        keys, size, packed = extra_keys or {}, block_bytes, bytearray()
        previous = parent_digest
        for block in blocks:
            preimage = make_preimage(previous, keys.get(block, b""), bytes(tokens[block * size : (block + 1) * size]))
            previous = check_digest(self.hash_function(preimage), self.num_digest_bytes)
            packed += previous
        return packed


def encode_extra_keys(
    salt: str | None, lora: str | None, position_keys: Iterable[PositionKey], block_size: int
) -> dict[int, bytes]:
    """Return the encoded extra keys of every block that has some, by the block's index in the sequence.

    Salt and LoRA name go to block 0 alone, since every later block is chained to it. A position key goes to each block
    that its span touches. The order of `position_keys` makes no difference. O(spans x blocks that each touches).
    """
    root = b""
    if salt is not None:
        root += _entry(SALT_KIND, b"", salt.encode())
    if lora is not None:
        root += _entry(LORA_KIND, b"", lora.encode())
    encoded = {0: [root]} if root else {}
    for start, end, kind, payload in sorted(_typed(key) for key in position_keys):
        for block in range(start // block_size, (end - 1) // block_size + 1):
            span = pack("<qQ", start - block * block_size, end - start)
            encoded.setdefault(block, []).append(_entry(kind, span, payload))
    return {block: b"".join(entries) for block, entries in encoded.items()}


def _typed(key: PositionKey) -> tuple[int, int, int, bytes]:
    start, end, payload = key
    if isinstance(payload, str):
        return start, end, STR_KEY_KIND, payload.encode()
    return start, end, BYTES_KEY_KIND, payload


def _entry(kind: int, span: bytes, payload: bytes) -> bytes:
    return pack("<B", kind) + span + pack("<I", len(payload)) + payload


class SequenceKeys:
    """The salt, the adapter and the extra keys of a sequence that has any of these; see `Sequence`. Never changed."""

    __slots__ = ("_encoded", "extra_keys", "lora", "salt")

    def __init__(self, salt: str | None, lora: str | None, extra_keys: tuple[PositionKey, ...]) -> None:
        self.salt = salt
        self.lora = lora
        self.extra_keys = extra_keys
        self._encoded: tuple[int, dict[int, bytes]] | None = None

    def encoded(self, block_size: int) -> dict[int, bytes]:
        """Return the encoded extra keys by block. O(blocks that spans touch) once, then O(1)."""
        if self._encoded is None or self._encoded[0] != block_size:
            keys = encode_extra_keys(self.salt, self.lora, self.extra_keys, block_size)
            self._encoded = block_size, keys
        return self._encoded[1]


def check_keys(
    salt: Text | None, lora: Text | None, extra_keys: Iterable[PositionKey], num_tokens: int
) -> SequenceKeys | None:
    """Return the keys of a sequence of `num_tokens` tokens; None if it has none. Raises InvalidArgumentError."""
    name, adapter = check_name("salt", salt), check_name("lora", lora)
    keys = _check_position_keys(extra_keys, num_tokens)
    return SequenceKeys(name, adapter, keys) if name is not None or adapter is not None or keys else None


def _check_position_keys(keys: Any, num_tokens: int) -> tuple[PositionKey, ...]:
    return tuple(
        [_check_position_key(key, num_tokens) for key in listed("extra_keys", "an iterable of (start, end, key)", keys)]
    )


def _check_position_key(key: Any, num_tokens: int) -> PositionKey:
    items: list[Any] = [*key] if is_a(key, tuple) or is_a(key, list) else []
    if len(items) != 3:
        raise wrong("extra_keys", "(start, end, key)", key)
    start = check_count("extra_keys: start", items[0], 0, num_tokens - 1)
    end = check_count("extra_keys: end", items[1], start + 1, num_tokens)
    payload: Any = items[2]
    if is_a(payload, str):
        payload = check_text("extra_keys", plain_text(payload))
    if not (is_a(payload, str) or is_a(payload, bytes)) or not payload:
        raise wrong("extra_keys", "a non-empty str or bytes as key", items[2])
    return start, end, payload
