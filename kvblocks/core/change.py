"""Whether a change is under way, so that a change that was left half done is noticed.

A KeyboardInterrupt or MemoryError may come at any point of a change and leave an inconsistent state. Every change is
therefore marked at its beginning, and the mark is removed when all is consistent again. A call that finds a mark that
was never removed refuses to run. This needs no exception handler, which another interrupt could stop. Handlers only
undo changes that fail for another reason, such as an invalid token, and the mark stays until they are done.
"""

from typing import Final

from kvblocks.errors import CorruptStateError

IDLE: Final = 0
DEBUGGING: Final = 1
CHANGING: Final = 2


class Change:
    """Marks whether a change of a manager or a cache is under way. As a block's owner, it also stands for its manager.

    kind: "manager" or "cache", for messages. debug: whether each change is followed by a check. rest: the state between
    changes, IDLE or DEBUGGING. state: CHANGING during a change, otherwise `rest`. Code that makes a change may write it
    directly, since a call would cost as much as some changes.
    """

    def __init__(self, kind: str, *, debug: bool = False) -> None:
        self._kind = kind
        self.rest: int = DEBUGGING if debug else IDLE
        self.state: int = self.rest

    def check_whole(self) -> None:
        """Raise CorruptStateError if a call was left half done. O(1)."""
        if self.state == CHANGING:
            threads = " or by several threads at once," if self._kind == "manager" else ""  # a cache has a lock
            raise CorruptStateError(
                f"expected a {self._kind} none of whose calls was left half done, got one where an exception (a"
                f" KeyboardInterrupt, say) came in the middle of a change, or one that is called{threads} in the middle"
                f" of its own call: make a new {self._kind}, and new sequences from their token_ids()"
            )

    def begin(self) -> None:
        """Mark the beginning of a change, which `end` ends. Raises CorruptStateError. O(1)."""
        if self.state:
            self.check_whole()
        self.state = CHANGING

    def end(self) -> None:
        """Mark the end of a change: everything is consistent again. O(1)."""
        self.state = self.rest
