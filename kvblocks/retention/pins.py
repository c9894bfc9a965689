"""Pins: prefixes that the caller wants to stay cached, until they expire or sequences need the space.

A pin owns its prefix's blocks as a sequence owns its blocks. They are therefore not in the free queue, and nothing on
the hot path has to know about pins. A pin is for a prefix, not for certain blocks. Blocks of the prefix that aren't
cached yet, or that the pin gave up, are held once they are cached and a sequence releases them.

With several groups, a pin holds the primary group's blocks of its prefix. Once it holds all of them, it also holds the
attached blocks that a hit of the whole prefix needs. With windows, no shorter hit can use these, so they are held all
together or not at all, and the pin gives them up before its primary blocks. Where layers keep a state, a checkpoint at
the prefix's end is among them; sequences that pass there save one as long as the pin lacks it. Virtual blocks don't
count towards the budget.

Pins cause no deadlock. All pins together hold at most a share of the pool. When the pool has no other blocks, pins give
up blocks, those of lowest priority first, and within a pin the end of the prefix first. Only pins of priority 100 never
do.

Invariants: a pin holds the first blocks of its prefix, all cached. Their priorities never increase from one block to
the next, so no block is kept longer than its parent. A pin with attached blocks holds all of its primary blocks.

Retention priorities by ranges of tokens are TensorRT-LLM's; protecting blocks by holding a reference is this project's.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, SupportsIndex, final

from kvblocks.arguments import as_int, check_count, is_a, listed, shown, wrong
from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import find_blocks
from kvblocks.core.hooks import SoftHolds
from kvblocks.core.pool import BlockPool
from kvblocks.core.sequence import Sequence
from kvblocks.errors import InvalidArgumentError, PinBudgetError
from kvblocks.retention.pinned_blocks import KEEP, Pinned, PinnedBlocks
from kvblocks.stats import Refusal

Priority = SupportsIndex | Iterable[tuple[SupportsIndex, SupportsIndex, SupportsIndex]]
"""0 to 100 for a whole prefix, or (start, end, priority) for ranges of its tokens."""


@final
class Pin(Closed):
    """A request to keep a prefix cached. Made by `manager.pins.pin`; pins are compared by identity."""

    __slots__ = (
        "attached_blocks",
        "blocks",
        "expires_at",
        "has_ended",
        "num_wanted_attached_blocks",
        "num_wanted_blocks",
        "priorities",
        "sequence",
    )

    def __init__(self, sequence: Sequence, priorities: list[int], expires_at: Any) -> None:
        self.sequence = sequence
        """The prefix, with its salt and keys."""
        self.priorities = priorities
        """Of its full blocks, first to last."""
        self.expires_at = expires_at
        """The time when it ends; None: never."""
        self.has_ended = False
        self.blocks: list[KVCacheBlock] = []
        """The primary group's blocks that it holds now."""
        self.attached_blocks: list[KVCacheBlock] = []
        """The side groups' blocks that it holds, including those of a checkpoint: either all that a hit of the whole
        prefix needs, or none.
        """
        self.num_wanted_blocks = len(priorities)
        """How many blocks, of all groups, it is for. This number counts towards the budget."""
        self.num_wanted_attached_blocks = 0
        """How many of those are side groups'."""

    @property
    def num_blocks(self) -> int:
        """How many blocks of the primary group it is for. O(1)."""
        return len(self.priorities)

    @property
    def num_held_blocks(self) -> int:
        """How many blocks it holds now: those that are cached and weren't given up. O(1)."""
        return len(self.blocks) + len(self.attached_blocks)

    def __repr__(self) -> str:
        until = "" if self.expires_at is None else f", until {shown(self.expires_at)}"
        held = f"{len(self.blocks)} of {self.num_blocks} blocks"
        if self.num_wanted_attached_blocks:
            held += f", {len(self.attached_blocks)} of {self.num_wanted_attached_blocks} of side groups and states"
        return f"Pin({shown(self.sequence.sequence_id)}, {held}{until})"


class Pins(SoftHolds):
    """The pins of a pool, which together hold at most `max_blocks`."""

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self.max_blocks = max_blocks
        self.pins: dict[Pin, None] = {}
        self.lacking: dict[bytes, dict[Pin, None]] = {}
        """The pins that don't hold all of their blocks, by the tokens of their first block."""
        self._only_pinned = PinnedBlocks(pool)

    def make(self, sequence: Sequence, priority: Priority, expires_at: Any) -> Pin:
        """Return a pin of a prefix, for `add`. Changes nothing. O(tokens + pins).

        expires_at: a number, or None. Raises InvalidArgumentError, and PinBudgetError when the budget is too small.
        """
        pin = Pin(sequence, block_priorities(priority, sequence.num_tokens, self._pool.index.block_size), expires_at)
        self._count_wanted(pin)
        num_pinned = sum([other.num_wanted_blocks for other in self.pins])
        if num_pinned + pin.num_wanted_blocks > self.max_blocks:
            raise PinBudgetError(
                f"pin: expected pins of at most {self.max_blocks} blocks together, got {pin.num_wanted_blocks} more"
                f" than the {num_pinned} that are pinned"
            )
        return pin

    def add(self, pin: Pin) -> None:
        """Begin a pin that `make` returned. O(tokens)."""
        self.pins[pin] = None
        self._note(pin)
        self._extend(pin)

    def remove(self, pin: Pin) -> None:
        """End a pin. Its blocks without other owners become free. O(its blocks)."""
        del self.pins[pin]
        attached, pin.attached_blocks = pin.attached_blocks, []
        blocks, pin.blocks, pin.has_ended = pin.blocks, [], True
        self._note(pin)
        self.extend(pin.sequence)  # another pin may lack blocks that this one holds
        self._pool.release_table(blocks)
        self._pool.release_table(attached)

    def expired(self, now: Any) -> list[Pin]:
        """Return the pins whose `expires_at` is at or before `now`. O(pins)."""
        return [pin for pin in self.pins if pin.expires_at is not None and pin.expires_at <= now]

    def extend(self, sequence: Sequence) -> None:
        """Let pins hold the blocks that they lack and `sequence` has. The sequence is about to release blocks.

        Costs a lookup for each lacking pin that has the same tokens in its first block.
        """
        if self.lacking:
            for pin in list(self.lacking.get(_first_block(sequence, self._pool.index.block_size), ())):
                self._extend(pin)

    def drop_uncached(self) -> None:
        """Release blocks that are no longer cached, after an abort or a reset. O(pinned blocks)."""
        for pin in self.pins:
            if pin.attached_blocks and not all(block.is_cached for block in [*pin.attached_blocks, *pin.blocks]):
                self._drop_attached(pin)
        for pin in self.pins:
            num_cached = 0
            while num_cached < len(pin.blocks) and pin.blocks[num_cached].is_cached:
                num_cached += 1
            gone = pin.blocks[num_cached:]
            del pin.blocks[num_cached:]
            self._pool.release_table(gone)
            self._note(pin)

    def ends_in(self, sequence: Sequence) -> list[int]:
        """Return the ends, in tokens, of pins that lack blocks and that `sequence` begins with. O(their tokens)."""
        ends: list[int] = []
        size = self._pool.index.block_size
        tokens, keys = sequence.packed_tokens(), sequence.encoded_keys(size) or {}
        for pin in self.lacking.get(bytes(tokens[: 4 * size]), ()):
            end = self._end(pin)
            if 0 < end <= sequence.num_tokens and pin.sequence.packed_tokens()[: 4 * end] == tokens[: 4 * end]:
                theirs = pin.sequence.encoded_keys(size) or {}
                if all(keys.get(block) == theirs.get(block) for block in range(end // size)):
                    ends.append(end)
        return ends

    def find_refusal(self, num_blocks: int, touched: list[KVCacheBlock]) -> Refusal | None:
        """Return why `num_blocks` can't be had once `touched` are owned; None if they can, perhaps after `give_up`.

        Changes nothing. O(touched), and O(pinned blocks) if pins came to hold other blocks, or an owned block got or
        lost an owner, since the last call.
        """
        num_free = self._pool.num_free_blocks - sum([block.ref_cnt == 0 for block in touched])
        num_given = num_kept = 0
        if self.pins:
            held = map(self._held_by, self.pins)  # lazy; in the compiled build a generator would make a list first
            num_given, num_kept = self._only_pinned.count(held, touched, num_blocks - num_free)
            if num_given >= num_blocks - num_free:
                return None
        return Refusal(num_blocks, num_free, num_given, num_kept)

    def give_up(self, num_blocks: int) -> None:
        """Free `num_blocks` blocks of pins, lowest priority first, then oldest pin first.

        `find_refusal` must have returned None. O(pins + blocks given up x log pins).
        """
        order = [(pin.priorities[len(pin.blocks) - 1], age, pin) for age, pin in enumerate(self.pins) if pin.blocks]
        heapify(order)
        known, given_up = self._only_pinned.known, list[KVCacheBlock]()
        num_wanted = self._pool.num_free_blocks + num_blocks
        while self._pool.num_free_blocks < num_wanted:
            _, age, pin = heappop(order)
            given_up += self._give_up_end(pin)
            self._note(pin)
            if pin.blocks:
                heappush(order, (pin.priorities[len(pin.blocks) - 1], age, pin))
        self._only_pinned.note_given_up(known, given_up)

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants hold. O(pinned blocks)."""
        assert sum([pin.num_wanted_blocks for pin in self.pins]) <= self.max_blocks, "pins: over their budget"
        self._only_pinned.check([self._held_by(pin) for pin in self.pins])
        for pin in self.pins:
            assert pin.blocks == find_blocks(self._pool.index, pin.sequence)[: len(pin.blocks)], f"{pin}: holds others"
            lacking = self.lacking.get(_first_block(pin.sequence, self._pool.index.block_size), ())
            assert (pin in lacking) == self._lacks(pin), f"{pin}: not seen to lack anything"
            assert pin.priorities == sorted(pin.priorities, reverse=True), f"{pin}: a priority rises"
            if pin.attached_blocks:
                assert pin.attached_blocks == self._find_attached(pin), f"{pin}: holds other attached blocks"

    def _extend(self, pin: Pin) -> None:
        num_held = len(pin.blocks)
        more = find_blocks(self._pool.index, pin.sequence)[num_held : pin.num_blocks]
        self._pool.touch(more)
        pin.blocks += more
        if pin.num_wanted_attached_blocks and not pin.attached_blocks and len(pin.blocks) == pin.num_blocks:
            pin.attached_blocks = self._find_attached(pin)
            self._pool.touch(pin.attached_blocks)
        self._note(pin)

    def _note(self, pin: Pin) -> None:
        """Update `lacking` for a pin that is new, has ended, or holds other blocks than before."""
        self._only_pinned.forget()
        first = _first_block(pin.sequence, self._pool.index.block_size)
        if not pin.has_ended and self._lacks(pin):
            self.lacking.setdefault(first, {})[pin] = None
        elif first in self.lacking:
            self.lacking[first].pop(pin, None)
            if not self.lacking[first]:
                del self.lacking[first]

    def tables(self) -> list[list[KVCacheBlock]]:
        """Return the blocks that pins hold. O(pins)."""
        return [pin.blocks for pin in self.pins] + [pin.attached_blocks for pin in self.pins]

    def _end(self, pin: Pin) -> int:
        """Return the longest hit, in tokens, that a pin can serve: its prefix down to a multiple of the alignment."""
        num_tokens, attached = pin.num_blocks * self._pool.index.block_size, self._pool.index.attached
        return num_tokens if attached is None else num_tokens // attached.layout.alignment * attached.layout.alignment

    def _count_wanted(self, pin: Pin) -> None:
        """Set for how many blocks of all groups a pin is. O(groups)."""
        attached = self._pool.index.attached
        if attached is not None:
            end = self._end(pin)
            pin.num_wanted_attached_blocks = attached.layout.num_needed_beside(end)
            num_primary = pin.num_blocks if self._pool.virtual is None else 0
            pin.num_wanted_blocks = num_primary + pin.num_wanted_attached_blocks

    def _lacks(self, pin: Pin) -> bool:
        return len(pin.blocks) < pin.num_blocks or (not pin.attached_blocks and pin.num_wanted_attached_blocks > 0)

    def _find_attached(self, pin: Pin) -> list[KVCacheBlock]:
        """Return what a hit of the whole pin needs beside its primary blocks; nothing unless all of it is cached."""
        attached = self._pool.index.attached
        return [] if attached is None else attached.needed_at(pin.blocks, self._end(pin))

    def _give_up_end(self, pin: Pin) -> list[KVCacheBlock]:
        """Release the attached blocks that a pin holds, or else its last block, and return what was released."""
        if pin.attached_blocks:
            return self._drop_attached(pin)
        end = [pin.blocks.pop()]
        self._pool.release_table(end)
        return end

    def _drop_attached(self, pin: Pin) -> list[KVCacheBlock]:
        attached, pin.attached_blocks = pin.attached_blocks, []
        self._pool.release_table(attached)
        self._note(pin)
        return attached

    def _held_by(self, pin: Pin) -> Pinned:
        """Return the blocks of the pool that a pin holds, with their priorities."""
        held = zip(pin.blocks, pin.priorities, strict=False)
        if not pin.attached_blocks and self._pool.virtual is None:
            return held
        attached = zip(pin.attached_blocks, [pin.priorities[-1]] * len(pin.attached_blocks), strict=True)
        return chain(held, attached) if self._pool.virtual is None else attached


def _first_block(sequence: Sequence, block_size: int) -> bytes:
    return bytes(sequence.packed_tokens()[: 4 * block_size])


def block_priorities(priority: Priority, num_tokens: int, block_size: int) -> list[int]:
    """Return the priority of each full block to pin.

    A block has the highest priority of the ranges that touch it, and at least that of the blocks after it. Blocks after
    the last range are not pinned. Raises InvalidArgumentError unless at least one block is pinned. O(blocks + ranges).
    """
    given: Any = priority
    if as_int(given) is not None or not hasattr(given, "__iter__"):  # one number, for the whole prefix
        ranges = [(0, num_tokens, check_count("priority", given, 0, KEEP))]
    else:
        ranges = [
            _check_range(item, num_tokens)
            for item in listed("priority", "an int or an iterable of (start, end, priority)", given)
        ]
    end = max([stop for _, stop, _ in ranges], default=0)
    priorities = [0] * min(-(-end // block_size), num_tokens // block_size)
    if not priorities:
        raise InvalidArgumentError(
            f"pin: expected at least one full block of {block_size} tokens, got {end} tokens:"
            " only full blocks are cached, so pin a longer prefix, or use smaller blocks (block_size)"
        )
    for start, stop, level in ranges:
        for block in range(start // block_size, min(-(-stop // block_size), len(priorities))):
            priorities[block] = max(priorities[block], level)
    for block in range(len(priorities) - 2, -1, -1):
        priorities[block] = max(priorities[block], priorities[block + 1])
    return priorities


def _check_range(item: Any, num_tokens: int) -> tuple[int, int, int]:
    items: list[Any] = [*item] if is_a(item, tuple) or is_a(item, list) else []
    if len(items) != 3:
        raise wrong("priority", "(start, end, priority)", item)
    start = check_count("priority: start", items[0], 0, num_tokens - 1)
    end = check_count("priority: end", items[1], start + 1, num_tokens)
    return start, end, check_count("priority", items[2], 0, KEEP)
