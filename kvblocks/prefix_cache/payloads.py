"""Payloads: what the caller attached to prompts of a `PrefixCache`, such as logits or a recurrent state.

A payload is kept with the last full block of its prompt until that block is evicted. Several prompts may have the same
last full block, each with a tail of its own. Prompts shorter than a block have no full block; their payloads are kept
together. In both cases their number is bounded, or their bytes are: see `Budget`. Where bytes are bounded, a payload
may be evicted while its block stays.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, SupportsIndex

from kvblocks.arguments import check_count, is_a, listed, wrong
from kvblocks.core.block import ROOT, KVCacheBlock, Run
from kvblocks.core.sequence import Sequence
from kvblocks.hashing.extra_keys import encode_extra_keys

Tail = tuple[bytes, bytes | None]
"""The part of a prompt after its last full block: tokens, and their encoded keys."""

MAX_PAYLOADS_A_BLOCK = 16

_WHOLE: Tail = (b"", None)


class NewPayload(NamedTuple):
    """A payload for `insert_prefix`, of the prompt's first `num_tokens` tokens. num_bytes: the bytes that it takes."""

    num_tokens: int
    payload: Any
    num_bytes: int


def check_payloads(
    payloads: Iterable[tuple[SupportsIndex, Any, SupportsIndex]],
    num_tokens: int,
    check_bytes: Callable[[str, SupportsIndex, int], int],
) -> list[NewPayload]:
    """Return the payloads of an insertion of `num_tokens` tokens, at most one for each number of tokens. O(payloads).

    check_bytes: checks the bytes of one. Raises InvalidArgumentError.
    """
    checked: list[NewPayload] = []
    for item in listed("payloads", "an iterable of (number of tokens, payload, bytes)", payloads):
        parts: list[Any] = [*item] if is_a(item, tuple) or is_a(item, list) else []
        if len(parts) != 3 or parts[1] is None:
            raise wrong("payloads", "(number of tokens, payload that isn't None, bytes)", item)
        number = check_count("payloads: number of tokens", parts[0], 0, num_tokens)
        checked.append(NewPayload(number, parts[1], check_bytes("payloads: bytes", parts[2], 1)))
    if len({new.num_tokens for new in checked}) < len(checked):
        raise wrong("payloads", "one of each number of tokens", [new.num_tokens for new in checked])
    return checked


class PayloadEntry:
    """One payload, with the last full block and the tail of its prompt."""

    __slots__ = ("block", "num_bytes", "num_tokens", "payload", "tail", "use")

    def __init__(
        self, block: KVCacheBlock | None, tail: Tail, payload: Any, num_tokens: int, num_bytes: int, use: int
    ) -> None:
        self.block = block
        self.tail = tail
        self.payload = payload
        self.num_tokens = num_tokens
        """How many tokens its prompt has."""
        self.num_bytes = num_bytes
        self.use = use
        """The number of its latest use, see `Budget`."""


class Payloads:
    """Payloads by block and tail. Under block None are those of prompts shorter than a block.

    Forgotten payloads are kept until `drop`, since a payload's finalizer may do anything.
    """

    def __init__(self, block_size: int, limits: tuple[int, int] | None) -> None:
        """limits: the most payloads of a block, and of all short prompts; beyond that the least recently used one is
        forgotten. None: no limit.
        """
        self._block_size = block_size
        self._limits = limits
        self._by_block: dict[KVCacheBlock | None, dict[Tail, PayloadEntry]] = {}
        self._order: OrderedDict[PayloadEntry, None] = OrderedDict()  # the least recently used first
        self._positions: dict[Run, list[int]] = {}  # sorted: of the blocks with payloads
        self._places: dict[KVCacheBlock, tuple[Run, int]] = {}  # of these blocks; an evicted block forgets its own
        self._dropped: list[Any] = []
        self.num_bytes = 0
        """What all payloads take."""

    @property
    def is_empty(self) -> bool:
        """Whether there is none. O(1)."""
        return not self._by_block

    @property
    def oldest(self) -> PayloadEntry | None:
        """The least recently used one. O(1)."""
        return next(iter(self._order), None)

    def tail(self, sequence: Sequence, num_tokens: int, num_blocks: int) -> Tail:
        """Return the tail of the first `num_tokens` tokens of a sequence, which fill `num_blocks` blocks.

        A span of extra keys that begins in these tokens counts with its whole length. O(block_size + spans).
        """
        start = num_blocks * self._block_size
        if start and start == num_tokens:
            return _WHOLE
        tokens = bytes(sequence.packed_tokens()[4 * start : 4 * num_tokens])
        keys = sequence.keys
        if keys is None:
            return tokens, None
        spans = [key for key in keys.extra_keys if key[0] < num_tokens]
        return tokens, encode_extra_keys(keys.salt, keys.lora, spans, self._block_size).get(num_blocks)

    def get(self, sequence: Sequence, num_tokens: int, path: list[KVCacheBlock]) -> PayloadEntry | None:
        """Return the payload of the first `num_tokens` tokens, whose full blocks are `path`. O(block_size + spans)."""
        kept = self._by_block.get(path[-1] if path else None)
        return None if kept is None else kept.get(self.tail(sequence, num_tokens, len(path)))

    def attach(self, sequence: Sequence, path: list[KVCacheBlock], new: NewPayload, use: int) -> bool:
        """Keep a payload, not None, for the first tokens of a sequence, whose full blocks are `path`. They had none
        before.

        Returns False if there is no room for payloads at all. O(block_size + payloads of a run).
        """
        block, tail = path[-1] if path else None, self.tail(sequence, new.num_tokens, len(path))
        if self._limits is not None:
            limit = self._limits[block is None]
            kept = self._by_block.get(block, {})
            if not limit:
                return False
            if len(kept) == limit:
                self.remove(next(iter(kept.values())))
        entry = PayloadEntry(block, tail, new.payload, new.num_tokens, new.num_bytes, use)
        self._by_block.setdefault(block, {})[tail] = entry
        self._order[entry] = None
        self.num_bytes += new.num_bytes
        if block is not None and block.run is not None and block not in self._places:
            insort(self._positions.setdefault(block.run, []), block.index)
            self._places[block] = block.run, block.index
        return True

    def find(self, sequence: Sequence, path: list[KVCacheBlock]) -> list[PayloadEntry]:
        """Return the payloads of all prefixes of a sequence whose cached blocks are `path`, the shortest first.

        O(runs), and at most O(block_size) for each block of the path that has payloads.
        """
        if not self._by_block:
            return []
        marked: list[tuple[int, KVCacheBlock]] = []  # blocks with payloads, the last first: how many end there
        number = len(path)
        run: Run | None
        run, last = path[-1].node if path else ROOT
        while run is not None:
            positions = self._positions.get(run)
            if positions:
                here = positions[: bisect_right(positions, last)]
                marked += [(number - last + position, run.blocks[position]) for position in reversed(here)]
            number -= last + 1
            key = run.key
            run, last = key[0], key[1]
        found = self._find_tails(sequence, 0, None)
        for number, block in reversed(marked):
            found += self._find_tails(sequence, number, block)
        return found

    def _find_tails(self, sequence: Sequence, num_blocks: int, block: KVCacheBlock | None) -> list[PayloadEntry]:
        """Return the payloads that are kept with `block`, the last of `num_blocks`, as far as the sequence has them."""
        kept = self._by_block.get(block)
        if kept is None:
            return []
        start, most = num_blocks * self._block_size, sequence.num_tokens
        ends = sorted({entry.num_tokens for entry in kept.values()}) if len(kept) < self._block_size else None
        found: list[PayloadEntry] = []
        for end in range(start, start + self._block_size) if ends is None else ends:
            if end <= most and (end or not most):
                entry = kept.get(self.tail(sequence, end, num_blocks))
                if entry is not None:
                    found.append(entry)
        return found

    def renew(self, entry: PayloadEntry, use: int) -> None:
        """Make a payload the most recently used. O(1)."""
        entry.use = use
        self._order.move_to_end(entry)
        kept = self._by_block[entry.block]
        kept[entry.tail] = kept.pop(entry.tail)  # each block's are in the order of use, too

    def remove(self, entry: PayloadEntry) -> None:
        """Forget one payload. O(payloads of a run)."""
        kept = self._by_block[entry.block]
        del kept[entry.tail], self._order[entry]
        self.num_bytes -= entry.num_bytes
        self._dropped.append(entry.payload)
        block = entry.block
        if kept:
            return
        del self._by_block[block]
        if block is not None:
            run, position = self._places.pop(block)
            positions = self._positions[run]
            del positions[bisect_left(positions, position)]
            if not positions:
                del self._positions[run]

    def forget(self, blocks: Iterable[KVCacheBlock]) -> list[Any]:
        """Forget the payloads of these blocks, and return them. O(blocks) if there are any payloads."""
        forgotten: list[Any] = []
        if self._by_block:
            for block in blocks:
                for entry in [*self._by_block.get(block, {}).values()]:
                    self.remove(entry)
                    forgotten.append(entry.payload)
        return forgotten

    def clear(self) -> list[Any]:
        """Forget all payloads, and return them. O(payloads)."""
        forgotten = [entry.payload for entry in self._order]
        self._dropped += forgotten
        for kept in (self._by_block, self._order, self._positions, self._places):
            kept.clear()
        self.num_bytes = 0
        return forgotten

    def drop(self) -> None:
        """Drop the references to forgotten payloads. A call of the cache does this last."""
        self._dropped.clear()

    def check(self, blocks: AbstractSet[KVCacheBlock]) -> None:
        """Raise AssertionError unless all payloads belong to one of `blocks` and are within the bounds. O(payloads)."""
        for block, kept in self._by_block.items():
            assert block is None or block in blocks, "payloads: one without its block"
            assert kept, "payloads: none of a block"
            limit = len(kept) if self._limits is None else self._limits[block is None]
            assert len(kept) <= limit, f"payloads: {len(kept)} of one block"
            assert block is None or block in self._places, "payloads: one that isn't found"
        entries = [entry for kept in self._by_block.values() for entry in kept.values()]
        assert len(entries) == len(self._order) and all(entry in self._order for entry in entries), "payloads: order"
        uses = [entry.use for entry in self._order]
        assert uses == sorted(uses), "payloads: not in the order of use"
        assert self.num_bytes == sum([entry.num_bytes for entry in entries]), "payloads: bytes"
        places = sorted([(id(run), place) for run, places in self._positions.items() for place in places])
        assert places == sorted([(id(run), place) for run, place in self._places.values()]), "payloads: places"
        for block, (run, place) in self._places.items():
            assert run.blocks[place] is block, f"payloads: {block} isn't at its place"
