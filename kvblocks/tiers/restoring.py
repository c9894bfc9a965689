"""Building a tier's map anew from what was remembered of its slots: ids and identities, the oldest first."""

from collections.abc import Iterable
from typing import Any, SupportsIndex

from kvblocks.arguments import check_count, is_a, listed, wrong
from kvblocks.core.block import ROOT, KVCacheBlock
from kvblocks.core.hashing import decode_extra_keys
from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.pool import TierPool

_EXPECTED = "pairs of a slot's id and a BlockIdentity"

Remembered = list[tuple[int, BlockIdentity]]


def check_slots(pool: TierPool, slots: Iterable[tuple[SupportsIndex, BlockIdentity]]) -> Remembered:
    """Return slots as a list of which each is named once. Raises InvalidArgumentError. O(slots)."""
    remembered: Remembered = []
    seen: set[int] = set()
    for given in listed("tiers.restore", _EXPECTED, slots):
        pair: Any = given
        if not is_a(pair, tuple) or len(pair) != 2 or not is_a(pair[1], BlockIdentity):
            raise wrong("tiers.restore", _EXPECTED, pair)
        slot = check_count("tiers.restore: slot", pair[0], 0, len(pool.pool.blocks) - 1)
        if slot in seen:
            raise InvalidArgumentError(f"tiers.restore: expected each slot once, got {slot} twice")
        seen.add(slot)
        remembered.append((slot, pair[1]))
    return remembered


def restore_slots(pool: TierPool, remembered: Remembered) -> int:
    """Cache what slots hold, parents first, and have those reused first that were stored first. O(slots log slots).

    A block counts as stored when the last one behind it was, so that a prefix's end goes before its beginning. Returns
    how many were cached; the others count as forgotten.
    """
    blocks = [pool.pool.blocks[slot] for slot, _ in remembered]
    pool.hold(blocks)
    found, above = _cache(pool, remembered, blocks)
    newest = list(range(len(remembered)))
    for number in reversed(found):
        parent = above[number]
        if parent >= 0 and newest[parent] < newest[number]:
            newest[parent] = newest[number]
    found.sort(key=newest.__getitem__, reverse=True)  # of equal ones those before stay before
    pool.let_go([blocks[number] for number in found])
    if len(found) < len(remembered):
        lost = [block for block in blocks if not block.is_cached]
        pool.let_go(lost)
        pool.note_unstored(lost)
    return len(found)


def has_keys(identity: BlockIdentity) -> bool:
    """Whether a block's keys can be read: who remembered them may have lost some. Quotas are charged by them."""
    if identity.extra_keys:
        try:
            decode_extra_keys(identity.extra_keys)
        except InvalidArgumentError:
            return False
    return True


def _cache(pool: TierPool, remembered: Remembered, blocks: list[KVCacheBlock]) -> tuple[list[int], list[int]]:
    """Cache what can be found: return its numbers, parents first, and by number that of the one above, -1 for none."""
    size = 4 * pool.index.block_size
    behind: dict[bytes, list[int]] = {}
    for number, (_, identity) in enumerate(remembered):
        if len(identity.tokens) == size and has_keys(identity):
            behind.setdefault(identity.parent, []).append(number)
    found: list[int] = []
    above = [-1] * len(remembered)
    begins = [(-1, number) for number in behind.pop(b"", [])]
    while begins:
        top, number = begins.pop()
        above[number], first = top, len(found)
        tokens, keys = bytearray(), dict[int, bytes]()
        while True:
            identity = remembered[number][1]
            if identity.extra_keys:
                keys[len(found) - first] = identity.extra_keys
            tokens += identity.tokens
            found.append(number)
            below = behind.pop(identity.digest(), None)
            if below is None:
                break
            begins += [(number, other) for other in below[1:]]
            above[below[0]] = number
            number = below[0]
        stretch = [blocks[each] for each in found[first:]]
        pool.index.cache(ROOT if top < 0 else blocks[top].node, stretch, memoryview(tokens), keys or None, 0)
    return found, above
