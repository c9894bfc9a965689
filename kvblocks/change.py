"""Whether a change is under way, so that one which was left half done is noticed.

A KeyboardInterrupt or MemoryError may come between any two steps of a change. What it leaves then is some state that
nobody thought of. So whoever changes a manager says when it begins and when all is consistent again. A change that
never ended is seen by the next call, which refuses. That needs no handler, hence there is none which another interrupt
could stop.
"""

from typing import Final, NoReturn

from kvblocks.errors import CorruptStateError

IDLE: Final = 0
DEBUGGING: Final = 1
CHANGING: Final = 2


class Change:
    """The change that an object is in, if any. what: the object, for messages. debug: whether changes are checked.

    state: IDLE or DEBUGGING between changes, CHANGING from the first step of one to its last; written by whoever makes
    the change, since a call of a method would cost as much as some changes do. rest: what it is between changes.
    """

    __slots__ = ("rest", "state", "what")

    def __init__(self, what: str, *, debug: bool = False) -> None:
        self.what = what
        self.rest: int = DEBUGGING if debug else IDLE
        self.state: int = self.rest

    def refuse(self) -> NoReturn:
        """Raise CorruptStateError, as every call must while the state is CHANGING."""
        raise CorruptStateError(
            f"expected a {self.what} none of whose calls was left half done, got one where an exception (a"
            f" KeyboardInterrupt, say) came in the middle of a change, or one that calls itself: make a new {self.what},"
            " and new sequences from their token_ids()"
        )
