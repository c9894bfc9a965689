"""Which sessions gave a cached block back, that is, which sessions' requests contained it."""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from typing import Final

from kvblocks.core.block import KVCacheBlock

MAX_SESSIONS: Final = 8
"""How many sessions are remembered for a block, the last ones. More would tell a policy nothing new."""

_NOBODY: Final[tuple[Hashable, ...]] = (None,)


class Givers:
    """By block id, the sessions whose sequences gave the block back since it was cached.

    None stands for sequences without a session. Comparing sessions runs the caller's own code, which may raise. Then
    the block keeps the sessions that it had.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[Hashable, ...]] = {}

    def note(self, blocks: Iterable[KVCacheBlock], session: Hashable) -> None:
        """A sequence of a session gave these cached blocks back. O(blocks)."""
        own: tuple[Hashable, ...] = _NOBODY if session is None else (session,)
        known = self._sessions
        for block in blocks:
            before = known.get(block.block_id)
            if before is None or before is own:
                known[block.block_id] = own
            else:
                others = [other for other in before if not (other is session or other == session)]
                known[block.block_id] = (*others[1 - MAX_SESSIONS :], session) if others else own

    def of(self, block_id: int) -> tuple[Hashable, ...]:
        """Return the sessions that gave a block back, the latest last; (None,) if nothing is known. O(1)."""
        return self._sessions.get(block_id, _NOBODY)

    def forget(self, blocks: Items[KVCacheBlock]) -> None:
        """These blocks stopped being cached. O(blocks)."""
        if self._sessions:
            for block in blocks:
                self._sessions.pop(block.block_id, None)

    def clear(self) -> None:
        """The cache was reset. O(blocks)."""
        self._sessions.clear()
