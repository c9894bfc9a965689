"""The pins of a `PrefixCache`: each holds a path of blocks until it is removed.

A pin is found by the tokens and keys that it was made with, not by its blocks, because more blocks may have been cached
for the same tokens since.
"""

from array import array
from typing import NamedTuple

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.sequence import Sequence
from kvblocks.errors import PinBudgetError

PinKey = tuple[bytes, tuple[tuple[int, bytes], ...]]
"""A prefix's full blocks: their packed tokens, and encoded keys by block."""

Path = list[KVCacheBlock]


class PinnedPrefix(NamedTuple):
    """One pin. token_ids: the pinned tokens. kv_block_ids: their blocks. description: what the caller gave."""

    token_ids: list[int]
    kv_block_ids: list[int]
    description: str | None


class PrefixPins:
    """Pins by prefix; a prefix that was pinned several times has several. The cache holds their blocks.

    max_blocks: the most blocks of all pins together; a block counts once for each pin that has it.
    """

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._pins: dict[PinKey, list[tuple[Path, str | None]]] = {}

    def check_room(self, num_blocks: int) -> None:
        """Raise PinBudgetError unless a pin of `num_blocks` more blocks is within the budget. O(1)."""
        if self._num_blocks + num_blocks > self._max_blocks:
            raise PinBudgetError(
                f"pin_prefix: expected pins of at most {self._max_blocks} blocks together, got {num_blocks} more than "
                f"the {self._num_blocks} that are pinned"
            )

    def add(self, sequence: Sequence, path: Path, description: str | None) -> None:
        """Pin the cached `path` of a sequence, for which there is room. O(tokens)."""
        self._num_blocks += len(path)
        self._pins.setdefault(self._key(sequence), []).append((path, description))

    def remove(self, sequence: Sequence) -> Path:
        """Remove the sequence's latest pin. Returns its path, empty when there is none. O(tokens)."""
        key = self._key(sequence)
        if key not in self._pins:
            return []
        pins = self._pins[key]
        path, _ = pins.pop()
        self._num_blocks -= len(path)
        if not pins:
            del self._pins[key]
        return path

    def clear(self) -> None:
        """Remove all pins."""
        self._pins.clear()
        self._num_blocks = 0

    def paths(self) -> list[Path]:
        """Return the path of each pin. O(pins)."""
        return [path for pins in self._pins.values() for path, _ in pins]

    def records(self) -> list[PinnedPrefix]:
        """Return a record of each pin, with those of one prefix together. O(pinned tokens)."""
        return [
            PinnedPrefix(self._tokens(key, len(path)), [block.block_id for block in path], description)
            for key, pins in self._pins.items()
            for path, description in pins
        ]

    def _key(self, sequence: Sequence) -> PinKey:
        num_blocks = sequence.num_tokens // self._block_size
        keys = sequence.encoded_keys(self._block_size) or {}
        packed = bytes(sequence.packed_tokens()[: 4 * self._block_size * num_blocks])
        return packed, tuple(sorted([(block, key) for block, key in keys.items() if block < num_blocks]))

    def _tokens(self, key: PinKey, num_blocks: int) -> list[int]:
        return array("I", key[0][: 4 * self._block_size * num_blocks]).tolist()
