"""Building a tier's map anew from what was remembered of its slots: ids and identities, the oldest first.

Nothing here makes an object for each slot where a list of numbers does: a tier may have millions.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, SupportsIndex

from kvblocks.arguments import check_count, is_a, listed, wrong
from kvblocks.core.block import ROOT, KVCacheBlock
from kvblocks.core.hashing import decode_extra_keys
from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.pool import TierPool

_EXPECTED = "pairs of a slot's id and a BlockIdentity"

Remembered = tuple[list[int], list[BlockIdentity]]
"""Slots, and whose bytes each holds."""


def check_slots(pool: TierPool, slots: Iterable[tuple[SupportsIndex, BlockIdentity]]) -> Remembered:
    """Return what was given, each slot once. Raises InvalidArgumentError. O(slots)."""
    numbers: list[int] = []
    identities: list[BlockIdentity] = []
    last = len(pool.pool.blocks) - 1
    for given in listed("tiers.restore", _EXPECTED, slots):
        pair: Any = given
        if not is_a(pair, tuple) or len(pair) != 2 or not is_a(pair[1], BlockIdentity):
            raise wrong("tiers.restore", _EXPECTED, pair)
        numbers.append(check_count("tiers.restore: slot", pair[0], 0, last))
        identities.append(pair[1])
    if len(set(numbers)) < len(numbers):
        twice = [slot for slot, number in Counter(numbers).items() if number > 1]
        raise InvalidArgumentError(f"tiers.restore: expected each slot once, got {twice[0]} twice")
    return numbers, identities


def restore_slots(pool: TierPool, remembered: Remembered) -> int:
    """Cache what slots hold, and have those reused first that were stored first. O(slots log slots).

    A block counts as stored when the last one behind it was, or beside it, so that a prefix's end goes before its
    beginning. Returns how many were cached; the others count as forgotten.
    """
    slots, identities = remembered
    blocks = [pool.pool.blocks[slot] for slot in slots]
    pool.hold(blocks)
    restoring = _Restoring(pool, identities, blocks)
    restoring.cache()
    found = restoring.in_order()
    pool.let_go([blocks[number] for number in found])
    if len(found) < len(blocks):
        lost = [block for block in blocks if not block.is_cached]
        pool.let_go(lost)
        pool.note_unstored(lost)
    return len(found)


class _Restoring:
    """Slots that are on their way back into a tier's map, by their numbers in what was remembered."""

    def __init__(self, pool: TierPool, identities: list[BlockIdentity], blocks: list[KVCacheBlock]) -> None:
        self._pool = pool
        self._identities = identities
        self._blocks = blocks
        self._found: list[int] = []  # of the primary group, parents first
        self._attached: list[int] = []
        self._above = [-1] * len(blocks)  # by number, that of the block before it, or that it is attached to; -1: none
        # By a digest, the first number of what is behind that, and of what is attached there; by number, the next one.
        self._behind: dict[bytes, int] = {}
        self._beside: dict[bytes, int] = {}
        self._next = [-1] * len(blocks)

    def cache(self) -> None:
        """Cache what can be found. O(slots)."""
        self._sort()
        begins, above = self._hang(self._behind.pop(b"", -1), -1), self._above
        while begins:
            number = begins.pop()
            others = self._cache_run(above[number], number)
            if others:
                begins += others

    def _sort(self) -> None:
        """Find what is behind each digest, and beside it. Backwards, so that of each the oldest comes first."""
        size, next_number = 4 * self._pool.index.block_size, self._next
        behind, beside = self._behind, self._beside
        number = len(next_number)
        for identity in reversed(self._identities):
            number -= 1
            if identity.column:
                next_number[number] = beside.get(identity.parent, -1)
                beside[identity.parent] = number
            elif len(identity.tokens) == size and (not identity.extra_keys or _has_keys(identity)):
                next_number[number] = behind.get(identity.parent, -1)
                behind[identity.parent] = number

    def _hang(self, number: int, top: int) -> list[int]:
        """Return what stands one after the other from a number on, all of which `top` is now above."""
        chain: list[int] = []
        while number >= 0:
            self._above[number] = top
            chain.append(number)
            number = self._next[number]
        return chain

    def _cache_run(self, top: int, number: int) -> list[int]:
        """Cache a stretch of blocks, one behind the other, below the block `top`. Returns what is behind it as well."""
        identities, blocks, above = self._identities, self._blocks, self._above
        stretch: list[KVCacheBlock] = []
        tokens = bytearray()
        keys: dict[int, bytes] | None = None
        others: list[int] = []
        beside: list[int] = []
        while number >= 0:
            identity = identities[number]
            if identity.extra_keys:
                keys = keys or {}
                keys[len(stretch)] = identity.extra_keys
            tokens += identity.tokens
            stretch.append(blocks[number])
            self._found.append(number)
            if not self._behind and not self._beside:
                break  # no digest is asked for any more
            digest = identity.digest()
            if self._beside:
                beside += self._hang(self._beside.pop(digest, -1), number)
            below = self._behind.pop(digest, -1)
            if below >= 0:
                above[below] = number
                others += self._hang(self._next[below], number)
            number = below
        self._pool.index.cache(ROOT if top < 0 else blocks[top].node, stretch, memoryview(tokens), keys, 0)
        if beside:
            self._attach(beside)
        return others

    def _attach(self, numbers: list[int]) -> None:
        """Attach slots to what they are beside. Of two in one column the newer one stays, as ever."""
        for number in sorted(numbers, reverse=True):
            primary = self._blocks[self._above[number]]
            if self._pool.attach(primary, self._identities[number].column, self._blocks[number]):
                self._attached.append(number)

    def in_order(self) -> list[int]:
        """Return the numbers of what is cached as they would be given back had they stayed: what is used last first.

        What is attached was given back behind its prefix, and what was stored of one prefix in a row at once.
        O(n log n).
        """
        identities, blocks, newest = self._identities, self._blocks, list(range(len(self._blocks)))
        for number in range(len(newest) - 2, -1, -1):
            is_attached = identities[number].column and identities[number + 1].column
            if is_attached and blocks[number].run is blocks[number + 1].run:
                newest[number] = newest[number + 1]
        self._attached.sort()
        for numbers in (self._attached, self._found):
            for number in reversed(numbers):
                parent = self._above[number]
                if parent >= 0 and newest[parent] < newest[number]:
                    newest[parent] = newest[number]
        for number in self._attached:
            if self._pool.is_used_with_prefix(identities[number].column):
                newest[number] = newest[self._above[number]]
        return sorted(self._attached + self._found, key=newest.__getitem__, reverse=True)  # equal ones stay in order


def _has_keys(identity: BlockIdentity) -> bool:
    """Whether a block's keys can be read: who remembered them may have lost some. Quotas are charged by them."""
    try:
        decode_extra_keys(identity.extra_keys)
    except InvalidArgumentError:
        return False
    return True
