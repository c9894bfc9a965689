"""`ManagerCalls`: what tiers need of their manager."""

from collections.abc import Callable
from typing import Any

from kvblocks.core.sequence import Sequence
from kvblocks.core.slots import Commit


class ManagerCalls:
    """What `Tiers` needs of its manager.

    check_owned: the manager's check of a sequence. commit: caches what `prepare_commit` returned. rewind: gives back a
    sequence's slots behind a token; called inside a change of the manager. end: ends a change, and runs `check` if the
    manager checks after each change.
    """

    def __init__(
        self,
        check_owned: Callable[[Any, str], Sequence],
        commit: Callable[[Commit], None],
        rewind: Callable[[Sequence, int], None],
        end: Callable[[], None],
    ) -> None:
        self.check_owned = check_owned
        self.commit = commit
        self.rewind = rewind
        self.end = end
