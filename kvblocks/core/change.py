"""Whether a change is under way, so that one which was left half done is noticed.

A KeyboardInterrupt or MemoryError may come between any two steps of a change. What it leaves then is some state that
nobody thought of. So whoever changes a manager says when it begins and when all is consistent again. A change that
never ended is seen by the next call, which refuses. That needs no handler on the way out, which another interrupt could
stop. Handlers only take back what was begun for nothing, such as a token that is none, and while they do a change is
under way.
"""

from typing import Final

from kvblocks.errors import CorruptStateError

IDLE: Final = 0
DEBUGGING: Final = 1
CHANGING: Final = 2


class Changeable:
    """What can be left half done: a manager or a cache. kind: what it is, for messages. debug: whether it is checked.

    change_state: IDLE or DEBUGGING between changes, CHANGING from the beginning of one to its end. Whoever makes the
    change may write it, since a call would cost as much as some changes do.
    """

    def __init__(self, kind: str, *, debug: bool = False) -> None:
        self._kind = kind
        self._rest_state: int = DEBUGGING if debug else IDLE
        self.change_state: int = self._rest_state

    def check_whole(self) -> None:
        """Raise CorruptStateError if a call was left half done. O(1)."""
        if self.change_state == CHANGING:
            raise CorruptStateError(
                f"expected a {self._kind} none of whose calls was left half done, got one where an exception (a"
                " KeyboardInterrupt, say) came in the middle of a change, or one that is called in the middle of its"
                f" own call: make a new {self._kind}, and new sequences from their token_ids()"
            )

    def begin_change(self) -> None:
        """Say that a change begins, which is left half done until `end_change`. Raises CorruptStateError. O(1)."""
        if self.change_state:
            self.check_whole()
        self.change_state = CHANGING

    def end_change(self) -> None:
        """Say that all is consistent again. O(1)."""
        self.change_state = self._rest_state
