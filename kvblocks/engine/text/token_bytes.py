"""The bytes that each token stands for. Joined they form the text; a character may be split among several tokens."""

import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"  # what SentencePiece writes for a space


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones stay, others begin at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """The bytes of one tokenizer's tokens. Immutable, so threads may share it.

    definition: the parsed content of tokenizer.json.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, definition: Mapping[str, Any]) -> None:
        decoder = json.dumps(definition.get("decoder"))
        self._tokenizer = tokenizer
        self._added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_byte_tokens = '"ByteFallback"' in decoder

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; b"" for an unknown id. O(length of the token)."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelled = self._tokenizer.id_to_token(token_id)
        if spelled is None:
            return b""
        if self._is_byte_level and all(character in _ALPHABET for character in spelled):
            return bytes([_ALPHABET[character] for character in spelled])
        if self._has_byte_tokens:
            byte = _BYTE_TOKEN.fullmatch(spelled)
            return bytes([int(byte[1], 16)]) if byte else spelled.replace(_WORD_START, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
