"""Building a tier's map anew from what was remembered of its slots: ids and identities, the oldest first."""

from collections.abc import Iterable
from typing import Any, SupportsIndex

from kvblocks.arguments import check_count, is_a, listed, wrong
from kvblocks.core.block import ROOT, KVCacheBlock, Node
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
        decode_extra_keys(pair[1].extra_keys)  # whoever is charged for it reads them, in the midst of a change
        slot = check_count("tiers.restore: slot", pair[0], 0, len(pool.pool.blocks) - 1)
        if slot in seen:
            raise InvalidArgumentError(f"tiers.restore: expected each slot once, got {slot} twice")
        seen.add(slot)
        remembered.append((slot, pair[1]))
    return remembered


class _Stretch:
    """Slots that hold blocks one behind the other. newest: the greatest number of a slot in it, or behind it."""

    def __init__(self, above: "_Stretch | None", position: int) -> None:
        """position: of the block above its first one, in `above`."""
        self.above = above
        self.position = position
        self.blocks: list[KVCacheBlock] = []
        self.newest = 0


def restore_slots(pool: TierPool, remembered: Remembered) -> int:
    """Cache what slots hold, parents first, and have those reused first that were stored first. O(slots).

    Returns how many were cached; the others count as forgotten.
    """
    stretches = _find_stretches(pool, remembered)
    for stretch in reversed(stretches):  # those behind come after what they are behind
        if stretch.above is not None:
            stretch.above.newest = max(stretch.above.newest, stretch.newest)
    order = sorted(range(len(stretches)), key=lambda number: (stretches[number].newest, -number))
    for number in order:
        pool.let_go(stretches[number].blocks)
    number_cached = sum([len(stretch.blocks) for stretch in stretches])
    if number_cached < len(remembered):
        blocks = [pool.pool.blocks[slot] for slot, _ in remembered]
        pool.note_unstored([block for block in blocks if not block.is_cached])
    return number_cached


def _find_stretches(pool: TierPool, remembered: Remembered) -> list[_Stretch]:
    """Cache what can be found, and return it, owned, parents before what is behind them."""
    size = 4 * pool.index.block_size
    behind: dict[bytes, list[int]] = {}
    for number, (_, identity) in enumerate(remembered):
        if len(identity.tokens) == size:
            behind.setdefault(identity.parent, []).append(number)
    stretches: list[_Stretch] = []
    begins: list[tuple[_Stretch | None, int, int]] = [(None, 0, number) for number in behind.pop(b"", [])]
    while begins:
        above, position, number = begins.pop()
        stretch = _Stretch(above, position)
        tokens, keys = bytearray(), dict[int, bytes]()
        while True:
            slot, identity = remembered[number]
            if identity.extra_keys:
                keys[len(stretch.blocks)] = identity.extra_keys
            tokens += identity.tokens
            stretch.blocks.append(pool.pool.blocks[slot])
            stretch.newest = max(stretch.newest, number)
            below = behind.pop(identity.digest(), None)
            if below is None:
                break
            begins += [(stretch, len(stretch.blocks) - 1, other) for other in below[1:]]
            number = below[0]
        node: Node = ROOT if above is None else above.blocks[position].node
        pool.hold(stretch.blocks)
        pool.index.cache(node, stretch.blocks, memoryview(tokens), keys or None, 0)
        stretches.append(stretch)
    return stretches
