"""`Ends`: the ends of prompts that a `BlockPromptCache` keeps, and the bytes of each type of insertion."""

from collections import OrderedDict
from itertools import pairwise

from kvblocks.integrations.mlx_lm.shelf import KeptPiece

CACHE_TYPES = ("assistant", "user", "system")


class Ends:
    """The pieces at which inserted prompts end, by type and in the order of use.

    num_bytes: the bytes of all pieces, by type.
    """

    def __init__(self) -> None:
        self.num_bytes = dict.fromkeys(CACHE_TYPES, 0)
        self._uses: dict[str, OrderedDict[KeptPiece, int]] = {name: OrderedDict() for name in CACHE_TYPES}
        self._use = 0

    def __len__(self) -> int:
        return sum([len(uses) for uses in self._uses.values()])

    def num_of_type(self, name: str) -> int:
        """Return how many ends have insertions of a type made."""
        return len(self._uses[name])

    def add(self, piece: KeptPiece) -> None:
        """Count the bytes of a piece; if it is an end, it becomes the most recently used."""
        self.num_bytes[piece.cache_type] += piece.num_bytes
        if piece.is_end:
            self._use += 1
            self._uses[piece.cache_type][piece] = self._use

    def remove(self, piece: KeptPiece) -> None:
        """Undo `add`."""
        self.num_bytes[piece.cache_type] -= piece.num_bytes
        self._uses[piece.cache_type].pop(piece, None)

    def renew(self, piece: KeptPiece) -> None:
        """Make an end the most recently used. Other pieces are left alone."""
        uses = self._uses[piece.cache_type]
        if piece in uses:
            self._use += 1
            uses[piece] = self._use
            uses.move_to_end(piece)

    def next_to_go(self) -> tuple[KeptPiece, list[KeptPiece]]:
        """Return the next end to drop if their number is bounded, and the ends of other types that were used before it.

        As in mlx-lm, that is the least recently used end of the first type, in the order of `CACHE_TYPES`, that has no
        fewer ends than the type after it. Requires at least one end. O(ends).
        """
        kinds = [self._uses[name] for name in CACHE_TYPES]
        fuller = [one for one, other in pairwise(kinds) if one and len(one) >= len(other)]
        uses = fuller[0] if fuller else kinds[-1]
        piece, use = next(iter(uses.items()))
        older = sorted([(at, id(one), one) for other in kinds for one, at in other.items() if at < use])
        return piece, [one for _, _, one in older]
