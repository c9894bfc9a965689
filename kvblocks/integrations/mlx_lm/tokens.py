"""`PromptTokens`: the tokens of a request, in the form that `PrefixCache` takes.

mlx-lm's server replaces the tokens of an image's patches by a negative id of the image. `PrefixCache` takes unsigned
ids of 32 bits, so a stretch of one such id becomes tokens 0 with an extra key.
"""

from array import array
from collections.abc import Sequence

from kvblocks.integrations.mlx_lm.shelf import TOKEN_BYTES

_MOST_TOKEN = 2**32 - 1


class PromptTokens:
    """The tokens of a prompt. packed: u32 tokens. keys: the extra keys of images."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.num_tokens = len(tokens)
        self._tokens = tokens
        self._wide = self.widened(tokens)
        self.keys: list[tuple[int, int, str]] = []
        try:
            self.packed = array("I", tokens)
        except OverflowError:
            self.packed = array("I", [token if 0 <= token <= _MOST_TOKEN else 0 for token in tokens])
            start = 0
            for end in range(1, len(tokens) + 1):
                if end == len(tokens) or tokens[end] != tokens[start]:
                    if not 0 <= tokens[start] <= _MOST_TOKEN:
                        self.keys.append((start, end, str(tokens[start])))
                    start = end

    def beginning(self, num_tokens: int) -> "PromptTokens":
        """Return the first `num_tokens` tokens as a separate prompt."""
        return PromptTokens(self._tokens[:num_tokens])

    @staticmethod
    def widened(tokens: Sequence[int]) -> bytes:
        """Return tokens as 8 bytes each. O(tokens)."""
        return array("q", tokens).tobytes()

    @classmethod
    def of_wide(cls, wide: bytes) -> "PromptTokens":
        """Return the prompt of tokens of 8 bytes each."""
        tokens = array("q")
        tokens.frombytes(wide)
        return cls(tokens)

    def wide(self, first: int, end: int) -> bytes:
        """Return tokens as 8 bytes each, with the ids of images. O(tokens)."""
        return self._wide[TOKEN_BYTES * first : TOKEN_BYTES * end]

    def keys_before(self, num_tokens: int) -> list[tuple[int, int, str]]:
        """Return the extra keys of the first `num_tokens` tokens, as a separate prompt would have them."""
        return [(start, min(end, num_tokens), key) for start, end, key in self.keys if start < num_tokens]
