"""What a worker has cached according to its events: sets of hashes, by rank, group and medium."""

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from kvblocks.wire.codecs import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Hash
from kvblocks.wire.convert import to_u64

CLEARED: Final = 0
STORED: Final = 1
REMOVED: Final = 2


class Location(NamedTuple):
    """Where blocks are cached. rank: the data-parallel rank; medium: None if the events don't say."""

    rank: int
    group: int
    medium: str | None


Change: TypeAlias = tuple[int, Location, list[int]]
"""CLEARED, STORED or REMOVED, then the place, then the hashes."""


def changes_of(batch: EventBatch) -> list[Change]:
    """Return the changes in a batch, without tokens. Unknown events change nothing. O(blocks)."""
    rank = batch.data_parallel_rank or 0
    changes: list[Change] = []
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            changes.append((CLEARED, Location(rank, 0, None), []))
        elif isinstance(event, BlockStored | BlockRemoved):
            kind = STORED if isinstance(event, BlockStored) else REMOVED
            changes.append(
                (kind, Location(rank, event.group_idx or 0, event.medium), list(map(to_u64, event.block_hashes)))
            )
    return changes


class Holdings:
    """The cached blocks of one worker. Hashes of all forms are kept as their low 64 bits, unsigned."""

    __slots__ = ("_sets",)

    def __init__(self) -> None:
        self._sets: dict[Location, set[int]] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes, in order. O(blocks)."""
        for kind, place, hashes in changes:
            if kind == CLEARED:
                self._sets = {other: held for other, held in self._sets.items() if other.rank != place.rank}
            elif kind == STORED:
                self._sets.setdefault(place, set()).update(hashes)
            elif place in self._sets:
                held = self._sets[place]
                held.difference_update(hashes)
                if not held:
                    del self._sets[place]

    def clear(self) -> None:
        """Forget all."""
        self._sets = {}

    def count(self) -> int:
        """Return the number of blocks. A block counts once for each place where it is cached. O(places)."""
        return sum(map(len, self._sets.values()))

    def ranks(self) -> list[int]:
        """Return the ranks that have blocks."""
        return sorted({place.rank for place in self._sets})

    def places(self) -> dict[Location, frozenset[int]]:
        """Return a copy of the sets. O(blocks)."""
        return {place: frozenset(held) for place, held in self._sets.items()}

    def find(self, hashes: Iterable[Hash], rank: int, group: int, medium: str | None, states: int | None = None) -> int:
        """Return how many of `hashes`, from the first, are cached. medium: None: on any. O(blocks found x media).

        states: the number of the group of recurrent states; then only blocks up to the last one with a state count.
        """
        held = self._at(rank, group, medium)
        if states is not None:
            return self._find_with_state(hashes, held, self._at(rank, states, medium))
        count = 0
        if len(held) == 1:
            (only,) = held
            for name in hashes:
                if to_u64(name) not in only:
                    break
                count += 1
        elif held:
            for name in hashes:
                key = to_u64(name)
                if not any(key in one for one in held):
                    break
                count += 1
        return count

    def _at(self, rank: int, group: int, medium: str | None) -> list[set[int]]:
        return [
            found
            for place, found in self._sets.items()
            if place.rank == rank and place.group == group and medium in (None, place.medium)
        ]

    @staticmethod
    def _find_with_state(hashes: Iterable[Hash], held: list[set[int]], saved: list[set[int]]) -> int:
        usable = 0
        for count, key in enumerate(map(to_u64, hashes), 1):
            if not any(key in one for one in held):
                break
            if any(key in one for one in saved):
                usable = count
        return usable
