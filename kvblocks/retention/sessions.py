"""Sessions: what a caller tells eviction policies about the conversations that its requests belong to.

A request names its session (`Sequence(session=...)`). Between a session's requests the caller may report that it pauses
and why, or that it has ended. A session belongs to a tenant: the same name with another salt is another session.
"""

from collections.abc import Hashable
from typing import Any, final

from kvblocks.arguments import Text, check_id, check_name, check_text, is_a, plain_text, wrong
from kvblocks.closed import Closed
from kvblocks.core.link import ManagerLink
from kvblocks.retention.eviction import Eviction


@final
class Sessions(Closed):
    """The calls about sessions: `manager.sessions`. They do nothing without an eviction policy that uses them.

    Made by a manager. As with the manager's own calls, one that raises has changed nothing.
    """

    def __init__(self, link: ManagerLink, eviction: Eviction | None) -> None:
        self._link = link
        self._change = link.change
        self._eviction = eviction

    def pause(self, session: Hashable, reason: Text, salt: Text | None = None) -> None:
        """Report that a session's latest request has ended, and why: its stop reason.

        reason: any non-empty str, such as "tool_use", "end_turn", "stop" or "length"; policies learn what each means.
        salt: that of its requests. Call this when the request has been freed, with the manager's clock (`manager.now`)
        set. The session may be unknown. Raises InvalidArgumentError. O(1), plus the policy's time.
        """
        own, why, tenant = self._check(session), _check_reason(reason), check_name("salt", salt)
        if self._eviction is not None:
            self._change.begin()
            self._eviction.pause(own, tenant, why)
            self._link.end()

    def end(self, session: Hashable, salt: Text | None = None) -> None:
        """Report that a session will have no more requests. If another request comes, the session begins again.

        salt: that of its requests. Raises InvalidArgumentError. O(1), plus the policy's time.
        """
        own, tenant = self._check(session), check_name("salt", salt)
        if self._eviction is not None:
            self._change.begin()
            self._eviction.end(own, tenant)
            self._link.end()

    def _check(self, session: Hashable) -> Hashable:
        self._change.check_whole()
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
