"""What the keys and values of a sequence depend on besides its tokens: salt, LoRA adapter, and keys of spans."""

from collections.abc import Iterable
from typing import Any

from kvblocks.arguments import Text, check_count, check_name, check_text, is_a, listed, plain_bytes, plain_text, wrong
from kvblocks.core.hashing import PositionKey, encode_extra_keys


class SequenceKeys:
    """The salt, the adapter and the extra keys of a sequence that has any of them; see `Sequence`. Never changed."""

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
    """Return the keys of a sequence of `num_tokens` tokens, None if there are none. Raises InvalidArgumentError."""
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
    if is_a(payload, bytes):
        payload = plain_bytes(payload)
    elif is_a(payload, str):
        payload = check_text("extra_keys", plain_text(payload))
    else:
        payload = b""
    if not payload:
        raise wrong("extra_keys", "a non-empty str or bytes as key", items[2])
    return start, end, payload
