"""A bounded memory of prefixes that are cached no more, and why: what `explain` answers from.

Prefixes are remembered by their digests, which name them well enough for an explanation; no hit depends on them. Time
is counted in blocks taken from the pool, the one clock that a cache has by itself.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Literal, NamedTuple

RemovalCause = Literal["evicted", "aborted", "reset"]


class Removal(NamedTuple):
    """Why a prefix stopped being cached.

    cause: "evicted" (its block was taken for something else), "aborted" (its KV was never written) or "reset".
    num_taken_blocks: from the pool until then. sequence_id: for which sequence it was evicted, None for other causes.
    """

    cause: RemovalCause
    num_taken_blocks: int
    sequence_id: Hashable | None


class RemovalHistory:
    """Remembers the last `max_blocks` prefixes that went, about 250 bytes each.

    num_taken_blocks, sequence_id: now, and on whose behalf; whoever takes blocks from the pool keeps them up to date.
    """

    __slots__ = ("_removals", "max_blocks", "num_taken_blocks", "sequence_id")

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_taken_blocks = 0
        self.sequence_id: Hashable | None = None
        self._removals: OrderedDict[bytes, Removal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._removals)

    def record(self, digests: Iterable[bytes], cause: RemovalCause) -> None:
        """Remember prefixes that just went, and forget the oldest beyond `max_blocks`. O(their number)."""
        removal = Removal(cause, self.num_taken_blocks, self.sequence_id if cause == "evicted" else None)
        removals = self._removals
        for digest in digests:
            removals[digest] = removal
            removals.move_to_end(digest)
        while len(removals) > self.max_blocks:
            removals.popitem(last=False)

    def find(self, digest: bytes) -> Removal | None:
        """Return why the prefix of that digest went last, None if that isn't remembered. O(1). Changes nothing."""
        return self._removals.get(digest)
