"""Sessions: what a caller tells of the conversations that its requests belong to, for eviction policies that listen.

A request says which session it is of (`Sequence(session=...)`). Between a session's requests the caller may say that it
pauses, and why, or that it has ended. A session belongs to a tenant: the same name under another salt is another one.
"""

from collections.abc import Callable, Hashable
from typing import Any

from kvblocks.arguments import Text, check_id, check_name, check_text, is_a, plain_text, wrong
from kvblocks.core.change import Changeable
from kvblocks.retention.eviction import Eviction


class Sessions:
    """What can be told of sessions: `manager.sessions`. Does nothing where no eviction policy listens.

    Made by a manager. Its calls raise as the manager's, and have changed nothing then.
    """

    def __init__(self, manager: Changeable, eviction: Eviction | None, end: Callable[[], None]) -> None:
        """end: the manager's call that ends a change, and checks all if that is wanted."""
        self._manager = manager
        self._eviction = eviction
        self._end = end

    def pause(self, session: Hashable, reason: Text, salt: Text | None = None) -> None:
        """Say that a session's last request has come to its end, and why: its stop reason.

        reason: any non-empty str, such as "tool_use", "end_turn", "stop" or "length"; policies learn what each means.
        salt: of its requests. Call it when the request has been freed, with the manager's clock (`manager.now`) set. A
        session that nobody has heard of may pause, too. Raises InvalidArgumentError. O(1) beside the policy.
        """
        own, why, tenant = self._check(session), _check_reason(reason), check_name("salt", salt)
        if self._eviction is not None:
            self._manager.begin_change()
            self._eviction.pause(own, tenant, why)
            self._end()

    def end(self, session: Hashable, salt: Text | None = None) -> None:
        """Say that no request of a session will come any more. One that comes all the same begins it anew.

        salt: of its requests. Raises InvalidArgumentError. O(1) beside the policy.
        """
        own, tenant = self._check(session), check_name("salt", salt)
        if self._eviction is not None:
            self._manager.begin_change()
            self._eviction.end(own, tenant)
            self._end()

    def _check(self, session: Hashable) -> Hashable:
        self._manager.check_whole()
        if session is None:
            raise wrong("session", "something hashable other than None", session)
        check_id("session", session)
        return session


def _check_reason(reason: Text) -> str:
    """Return `reason` if it is a non-empty str, else raise InvalidArgumentError."""
    given: Any = reason
    plain = plain_text(given) if is_a(given, str) else ""
    if not plain:
        raise wrong("reason", "a non-empty str", given)
    return check_text("reason", plain)
