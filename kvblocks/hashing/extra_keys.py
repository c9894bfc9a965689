"""A block's extra keys: checked, encoded and decoded. `kvblocks.hashing` has the format."""

from collections.abc import Iterable
from struct import pack, unpack
from typing import Any

from kvblocks.arguments import Given, Text, check_count, check_name, check_text, is_a, listed, plain_text, wrong
from kvblocks.errors import InvalidArgumentError

PositionKey = tuple[int, int, str | bytes]
"""(start, end, key): tokens start to end - 1 depend on `key`, such as the hash of the image that they stand for."""

PositionKeys = Iterable[PositionKey]
"""Several position keys, in any order."""

ExtraKey = tuple[str, tuple[int, int] | None, str | bytes]
"""A decoded extra key: ("salt", None, salt), ("lora", None, name) or ("key", (start, length), key).

start: where the keyed span begins, in tokens relative to the block's first one. length: that of the whole span, in
tokens.
"""

SALT_KIND, LORA_KIND, STR_KEY_KIND, BYTES_KEY_KIND = 1, 2, 3, 4


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


def decode_extra_keys(encoded: Given[bytes]) -> list[ExtraKey]:
    """Return a block's extra keys in the order of their encoding; the inverse of `encode_extra_keys`.

    encoded: those of one block, as in `BlockStored.extra_keys`; b"" for none. Raises InvalidArgumentError for bytes
    that are no block's encoding. O(bytes).
    """
    given: Any = encoded
    if not is_a(given, bytes):
        raise wrong("extra keys", "bytes", given)
    return _decoded_keys(given)


def decode_salt_and_lora(encoded: bytes | None) -> tuple[str | None, str | None]:
    """Return the salt and the LoRA name among a first block's encoded keys, each None if there is none."""
    keys = [] if encoded is None else _decoded_keys(encoded)
    found = {kind: text for kind, _, text in keys if isinstance(text, str)}
    return found.get("salt"), found.get("lora")


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
