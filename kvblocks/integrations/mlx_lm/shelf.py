"""What a `BlockPromptCache` keeps: blocks, and pieces, which hold everything else. Knows nothing about arrays.

A block has the rows of `block_size` tokens. A piece is a payload of `PrefixCache`. At the end of a full block it has
the rows of windows in that block, and perhaps states. After the last full block of a prompt it also has the rows of the
tokens there. `Siblings` finds the block or piece that shares the longest beginning with given tokens.
"""

from bisect import bisect_left
from typing import Any

TOKEN_BYTES = 8  # of a packed token: the negative ids of images fit too


class Siblings:
    """The blocks and pieces that follow one prefix, sorted by their packed tokens."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []
        self._items: list[Any] = []

    def add(self, tokens: bytes, item: Any) -> None:
        """Add an item with these tokens, which no other item has. O(siblings)."""
        place = bisect_left(self._tokens, tokens)
        self._tokens.insert(place, tokens)
        self._items.insert(place, item)

    def remove(self, tokens: bytes) -> None:
        """Remove the item with these tokens. O(siblings)."""
        place = bisect_left(self._tokens, tokens)
        del self._tokens[place], self._items[place]

    def get(self, tokens: bytes) -> Any:
        """Return the item with exactly these tokens, or None. O(log(siblings))."""
        place = bisect_left(self._tokens, tokens)
        return self._items[place] if place < len(self._tokens) and self._tokens[place] == tokens else None

    def pieces(self) -> "list[KeptPiece]":
        """Return the pieces. O(siblings)."""
        return [item for item in self._items if isinstance(item, KeptPiece)]

    def blocks(self) -> "list[Block]":
        """Return the blocks. O(siblings)."""
        return [item for item in self._items if isinstance(item, Block)]

    def nearest(self, tokens: bytes, most: int) -> tuple[int, list[Any]]:
        """Return the most leading tokens that any item shares, and at most `most` of the items that share so many.

        O(log(siblings) + tokens). In sorted order, the items that share the longest beginning are next to the place of
        the tokens themselves.
        """
        place = bisect_left(self._tokens, tokens)
        best = 0
        items: list[Any] = []
        for step, first in ((-1, place - 1), (1, place)):
            index = first
            while 0 <= index < len(self._tokens) and abs(index - first) < most:
                number = num_equal(self._tokens[index], tokens) // TOKEN_BYTES
                if number < max(best, 1):
                    break
                if number > best:
                    best, items = number, []
                items.append(self._items[index])
                index += step
        return best, items[:most]


def num_equal(one: bytes, other: bytes) -> int:
    """Return how many leading bytes are equal. O(log(bytes)) comparisons."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Block:
    """The rows of a block. above: the previous block, or the root. tokens: packed. num_bytes: the bytes of the rows.

    piece: what is kept at its end. siblings: what follows it. cache_type: the type of the insertion that added it.
    """

    __slots__ = ("above", "cache_type", "num_bytes", "piece", "rows", "siblings", "tokens")

    def __init__(self, above: "Block | None", tokens: bytes, rows: list[Any], num_bytes: int, cache_type: str) -> None:
        self.above = above
        self.tokens = tokens
        self.rows = rows
        self.num_bytes = num_bytes
        self.cache_type = cache_type
        self.piece: KeptPiece | None = None
        self.siblings = Siblings()
        if above is not None:
            above.siblings.add(tokens, self)

    def forget(self) -> None:
        """Remove it from the block above it."""
        if self.above is not None:
            self.above.siblings.remove(self.tokens)
            self.above = None


class KeptPiece:
    """What is kept at one token. block: the last full block before it. tail: the packed tokens after that block.

    rows: the rows of the tail, by stack. windows: for each stack, the position of the first row in the block, and the
    rows up to the token. states: for each layer, arrays or the one object that is kept whole, and options; None if none
    were kept. is_end: whether an inserted prompt ends here. is_kept: whether the cache still has it.
    """

    __slots__ = (
        "block",
        "cache_type",
        "is_end",
        "is_kept",
        "num_bytes",
        "num_tokens",
        "rows",
        "states",
        "tail",
        "windows",
    )

    def __init__(self, block: Block, tail: bytes, num_tokens: int) -> None:
        self.block = block
        self.tail = tail
        self.num_tokens = num_tokens
        self.rows: list[Any] = []
        self.windows: dict[int, tuple[int, Any]] = {}
        self.states: list[Any] | None = None
        self.cache_type = "assistant"
        self.is_end = False
        self.is_kept = False
        self.num_bytes = 1

    def wide_tokens(self) -> bytes:
        """Return all tokens before its end, 8 bytes each. O(tokens)."""
        parts, block = [self.tail], self.block
        while block.above is not None:
            parts.append(block.tokens)
            block = block.above
        return b"".join(reversed(parts))

    def measure(self) -> None:
        """Set `num_bytes` to the bytes of its arrays and objects, at least 1. O(arrays)."""
        arrays = [*self.rows, *[rows for _, rows in self.windows.values()]]
        for own, _ in self.states or ():
            arrays += own
        self.num_bytes = max(1, sum([array.nbytes for array in arrays]))

    def keep(self) -> None:
        """Register it with its block, where lookups find it."""
        if not self.is_kept:
            self.is_kept = True
            if self.tail:
                self.block.siblings.add(self.tail, self)
            else:
                self.block.piece = self

    def forget(self) -> None:
        """Undo `keep`."""
        if self.is_kept:
            self.is_kept = False
            if self.tail:
                self.block.siblings.remove(self.tail)
            else:
                self.block.piece = None
