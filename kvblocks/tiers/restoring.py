"""Building a tier's map from what is known about its slots: what was remembered, or what was found there.

*Remembered*: slot ids and identities, the oldest first. Since a tier may have millions of slots, nothing here makes an
object for each slot where a list of numbers is enough.

*Found*: what is in a tier that others fill too. It may have blocks that this manager never stored, and lack some that
it did store. Before a lookup counts on the tier, the mover of the bytes asks it what it has, and reports the answer
here. A load checks the answer.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, SupportsIndex

from kvblocks.arguments import check_count, is_a, listed, wrong
from kvblocks.core.block import ROOT, KVCacheBlock
from kvblocks.core.hooks import Digests
from kvblocks.core.sequence import Sequence
from kvblocks.errors import InvalidArgumentError
from kvblocks.hashing.extra_keys import decode_extra_keys
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.prefix import Prefix

_EXPECTED = "pairs of a slot's id and a BlockIdentity"

Remembered = tuple[list[int], list[BlockIdentity]]
"""Slots, and the block that each holds."""


def check_slots(pool: TierPool, slots: Iterable[tuple[SupportsIndex, BlockIdentity]]) -> Remembered:
    """Return what was given, as two lists. Raises InvalidArgumentError, also for a slot given twice. O(slots)."""
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
    """Cache what slots hold, and order them so that the slots stored first are reused first. O(slots log slots).

    A block counts as stored when the last block after it, or attached to it, was stored, so that a prefix's end is
    reused before its beginning. Of slots that hold the same block, one stays cached. Returns how many slots did; the
    others count as forgotten.
    """
    slots, identities = remembered
    blocks = [pool.pool.blocks[slot] for slot in slots]
    pool.hold(blocks)
    restoring = _Restoring(pool, identities, blocks)
    restoring.cache()
    order = [blocks[number] for number in restoring.in_order()]
    lost = [block for block in blocks if not block.is_cached] if len(order) < len(blocks) else []
    if not pool.index.num_duplicates:  # none of them is used now, hence not `let_go`
        pool.pool.release_table(order)
    else:  # one by one, so that what stays cached is as new as the newest of its duplicates
        for block in reversed(order):
            pool.pool.release_table([block])
    pool.pool.release_table(lost)
    pool.note_unstored(lost)
    return sum([block.is_cached for block in order])


class _Restoring:
    """Caches remembered slots in a tier's map, parents first.

    A *number* here is the position of a slot in what was remembered, so a smaller number was stored earlier. Slots with
    the same parent form a linked list: `_behind` or `_beside` has the first number, `_next` each further one.
    """

    def __init__(self, pool: TierPool, identities: list[BlockIdentity], blocks: list[KVCacheBlock]) -> None:
        self._pool = pool
        self._identities = identities
        self._blocks = blocks
        self._found: list[int] = []  # cached blocks of the primary group, parents first
        self._attached: list[int] = []  # cached blocks of side groups
        self._above = [-1] * len(blocks)  # by number: the block before it, or that it is attached to; -1: none
        self._behind: dict[bytes, int] = {}  # by digest: the oldest block whose parent it is
        self._beside: dict[bytes, int] = {}  # by digest: the oldest block that is attached to it
        self._next = [-1] * len(blocks)  # by number: the next block with the same parent; -1: none

    def cache(self) -> None:
        """Cache all blocks whose prefix is there. O(slots)."""
        self._sort()
        begins, above = self._hang(self._behind.pop(b"", -1), -1), self._above
        while begins:
            number = begins.pop()
            others = self._cache_run(above[number], number)
            if others:
                begins += others

    def _sort(self) -> None:
        """Link the blocks that come after each digest, and those attached to it, the oldest first in each list."""
        size, next_number = 4 * self._pool.index.block_size, self._next
        behind, beside = self._behind, self._beside
        number = len(next_number)
        for identity in reversed(self._identities):
            number -= 1
            if identity.column:
                next_number[number] = beside.get(identity.parent, -1)
                beside[identity.parent] = number
            elif len(identity.tokens) == size and (not identity.extra_keys or has_keys(identity)):
                next_number[number] = behind.get(identity.parent, -1)
                behind[identity.parent] = number

    def _hang(self, number: int, top: int) -> list[int]:
        """Return the linked list that begins with `number`, and set `_above` of its numbers to `top`."""
        chain: list[int] = []
        while number >= 0:
            self._above[number] = top
            chain.append(number)
            number = self._next[number]
        return chain

    def _cache_run(self, top: int, number: int) -> list[int]:
        """Cache a run that begins with block `number` after block `top` (-1: at the root).

        Where several blocks have the same parent, the run goes on with the oldest. Returns the numbers of the others.
        """
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
                break  # no digest is looked up any more
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
        """Attach slots to their primary blocks. Of two in one column the newer one stays."""
        parts: dict[int, dict[int, int]] = {}  # of checkpoints: by the number above and the column, the newest number
        for number in sorted(numbers, reverse=True):
            above, column = self._above[number], self._identities[number].column
            if column in self._pool.part_columns:
                parts.setdefault(above, {}).setdefault(column, number)
            elif self._pool.attach(self._blocks[above], column, self._blocks[number]):
                self._attached.append(number)
        for above, found in parts.items():
            slots = {column: self._blocks[number] for column, number in found.items()}
            if self._pool.attach_parts(self._blocks[above], slots):
                self._attached += found.values()

    def in_order(self) -> list[int]:
        """Return the numbers of the cached blocks in the order in which to release them, the latest used first.

        The tier had this order before. A block is as new as the newest block after it or attached to it. The attached
        blocks that one store wrote are equally new. O(n log n).
        """
        # By number: the number of the store that makes the block that new.
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
        return sorted(self._attached + self._found, key=newest.__getitem__, reverse=True)  # equals keep this order


def has_keys(identity: BlockIdentity) -> bool:
    """Whether a block's keys can be read, since they may be damaged. Quotas are charged by the keys."""
    try:
        decode_extra_keys(identity.extra_keys)
    except InvalidArgumentError:
        return False
    return True


def first_digests(pool: TierPool, prefix: Prefix, num_blocks: int) -> bytearray | None:
    """Return the names of a prefix's first blocks; None if they aren't needed. O(tokens)."""
    index = pool.index
    if not index.needs_digests:
        return None
    keys = prefix.extra_keys or {}
    scheme = index.epoch.hash_scheme
    return scheme.chain(b"", prefix.tokens, keys, keys.get(0), 4 * index.block_size, range(num_blocks))


def known_prefix(sequence: Sequence, block_size: int) -> Prefix:
    """Return the full blocks of a sequence that a tier may be asked for: those before the last token. O(tokens)."""
    num_blocks = max(0, sequence.num_tokens - 1) // block_size
    tokens = bytearray(sequence.packed_tokens()[: 4 * block_size * num_blocks])
    return Prefix(tokens, sequence.encoded_keys(block_size), [])


def note_found(
    pool: TierPool, prefix: Prefix, num_blocks: int, attached: list[tuple[int, int]], names: bytearray | None
) -> int:
    """Make a tier's map say that it holds the first `num_blocks` blocks of a prefix, and nothing after them.

    attached: the side groups' blocks that are there, as (index of the primary block that they are attached to, column),
    and the parts of checkpoints, in the columns after those. A checkpoint that isn't complete there is forgotten.
    names: as `first_digests` returned them. Slots are taken as for a store, so there may be fewer than needed. Returns
    how many blocks, from the first, the map has after the call. O(blocks).
    """
    size, tokens = pool.index.block_size, prefix.token_view()
    num_known = len(prefix.tokens) // (4 * size)
    held = pool.match(tokens, prefix.extra_keys, num_known)
    if len(held) > num_blocks:
        pool.drop_prefix(tokens, prefix.extra_keys, num_blocks + 1)
        held = held[:num_blocks]
    pool.hold(held)
    slots = _take(pool, num_blocks - len(held), prefix.salt)
    if slots:
        node = held[-1].node if held else ROOT
        pool.index.cache(
            node,
            slots,
            memoryview(prefix.tokens),
            prefix.extra_keys,
            len(held),
            None if names is None else Digests(names[len(held) * pool.index.epoch.num_digest_bytes :]),
        )
    there = set(attached)
    for index, primary in enumerate(held):
        if not there.issuperset([(index, column) for column in pool.part_columns]):  # a lookup must not count on it
            pool.drop(pool.parts_at(primary)[:1])
    found = [*held, *slots]
    beside = _attach(pool, prefix, found, attached)
    pool.let_go(found)
    pool.let_go(beside)
    return len(found)


def _take(pool: TierPool, num_blocks: int, salt: str | None) -> list[KVCacheBlock]:
    return pool.take(min(num_blocks, pool.pool.num_free_blocks), salt)


def _attach(
    pool: TierPool, prefix: Prefix, found: list[KVCacheBlock], attached: list[tuple[int, int]]
) -> list[KVCacheBlock]:
    """Attach slots for the side groups' blocks that were found, and return these slots. O(attached)."""
    missing = [(index, column) for index, column in attached if index < len(found)]
    missing = [(index, column) for index, column in missing if not pool.is_attached(found[index], column)]
    alone = [(index, column) for index, column in missing if column not in pool.part_columns]
    slots = _take(pool, len(alone), prefix.salt)
    for (index, column), slot in zip(alone, slots, strict=False):  # quotas may have allowed fewer
        if pool.attach(found[index], column, slot):
            pool.note_attached(found[: index + 1], prefix.tokens, column)
    parts: dict[int, set[int]] = {}
    for index, column in missing:
        if column in pool.part_columns:
            parts.setdefault(index, set()).add(column)
    for index, columns in parts.items():  # a checkpoint is there if all of its parts are
        of_state = _take(pool, len(pool.part_columns), prefix.salt) if len(columns) == len(pool.part_columns) else []
        if pool.attach_parts(found[index], dict(zip(sorted(columns), of_state))):  # noqa: B905  # perhaps fewer
            pool.note_attached(found[: index + 1], prefix.tokens, min(columns))
        slots += of_state
    return slots
