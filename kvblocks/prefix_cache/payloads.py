"""Payloads: what the caller attached to prompts of a `PrefixCache`, such as the logits behind the last token.

A payload is kept with the last full block of its prompt, until that block is evicted. Several prompts may have the same
last full block, each with a tail of its own. Prompts shorter than a block have no full block; their payloads are kept
together. The number of payloads is bounded in both cases.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.sequence import Sequence

Tail = tuple[bytes, bytes | None]
"""The part of a prompt behind its last full block: tokens, and their encoded keys."""

MAX_PAYLOADS_A_BLOCK = 16

_NO_TAIL: Tail = (b"", None)


class Payloads:
    """Payloads by block and tail; block None: prompts shorter than a block.

    At most MAX_PAYLOADS_A_BLOCK for a block, and `max_short` for short prompts; beyond that the oldest is forgotten.
    Forgotten payloads are kept until `drop`, since a payload's finalizer may do anything.
    """

    def __init__(self, block_size: int, max_short: int) -> None:
        self._block_size = block_size
        self._max_short = max_short
        self._by_block: dict[KVCacheBlock | None, dict[Tail, Any]] = {}
        self._dropped: list[Any] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is none. O(1)."""
        return not self._by_block

    def attach(self, sequence: Sequence, path: list[KVCacheBlock], payload: Any) -> bool:
        """Keep a payload for exactly this sequence, whose full blocks are `path`; None: forget it. O(block_size).

        Returns False if there is no room for payloads at all.
        """
        block, tail = path[-1] if path else None, self._tail(sequence, path)
        kept = self._by_block.get(block, {})
        self._dropped.append(kept.pop(tail, None))
        if payload is not None:
            limit = self._max_short if block is None else MAX_PAYLOADS_A_BLOCK
            if not limit:
                return False
            if len(kept) == limit:
                self._dropped.append(kept.pop(next(iter(kept))))
            kept[tail] = payload
            self._by_block[block] = kept
        elif not kept:
            self._by_block.pop(block, None)
        return True

    def find(self, sequence: Sequence, path: list[KVCacheBlock]) -> Any:
        """Return the payload of exactly this sequence, whose full blocks are `path`, or None. O(block_size)."""
        kept = self._by_block.get(path[-1] if path else None)
        return None if kept is None else kept.get(self._tail(sequence, path))

    def find_last(self, path: list[KVCacheBlock]) -> tuple[int, Any]:
        """Return how many of a path's first blocks are the longest prompt with a payload, and the payload.

        (0, None) if there is none. O(blocks) if there are any payloads.
        """
        if self._by_block:
            for number in range(len(path), 0, -1):
                kept = self._by_block.get(path[number - 1])
                if kept is not None and _NO_TAIL in kept:
                    return number, kept[_NO_TAIL]
        return 0, None

    def forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forget the payloads of these blocks. O(blocks) if there are any payloads."""
        if self._by_block:
            for block in blocks:
                if block in self._by_block:
                    self._dropped.append(self._by_block.pop(block))

    def clear(self) -> None:
        """Forget all payloads. O(blocks with payloads)."""
        self._dropped += self._by_block.values()
        self._by_block.clear()

    def drop(self) -> None:
        """Drop the references to forgotten payloads. A call of the cache does this last."""
        self._dropped.clear()

    def check(self, blocks: AbstractSet[KVCacheBlock]) -> None:
        """Raise AssertionError unless all payloads belong to one of `blocks` and are within the bounds. O(payloads)."""
        for block, kept in self._by_block.items():
            assert block is None or block in blocks, "payloads: one without its block"
            limit = self._max_short if block is None else MAX_PAYLOADS_A_BLOCK
            assert 0 < len(kept) <= limit, f"payloads: {len(kept)} of one block"

    def _tail(self, sequence: Sequence, path: list[KVCacheBlock]) -> Tail:
        keys = sequence.encoded_keys(self._block_size)
        tail = bytes(sequence.packed_tokens()[4 * self._block_size * len(path) :])
        return tail, None if keys is None else keys.get(len(path))
